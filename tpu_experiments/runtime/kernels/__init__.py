"""Attention kernels, and the operators of torch that stand for them in a model."""
