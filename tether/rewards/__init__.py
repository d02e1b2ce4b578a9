"""Ready rewards. Each is a callable of the signature that any reward function has; `functions.reward` finds one by name."""
