"""A sweep: every point a process of its own, resumed, placed, pruned, and ranked as it goes."""
