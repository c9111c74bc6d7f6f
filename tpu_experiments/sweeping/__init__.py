"""Sweeps: every point is a process of its own, resumed, placed on devices, pruned and ranked."""
