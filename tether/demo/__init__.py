"""`tether demo`: a small world of simulated people, and the whole road from their choices to a better model and its report."""
