"""A recipe's promises, proven on this machine: every line compares what training computes with a plain way to the same number."""
