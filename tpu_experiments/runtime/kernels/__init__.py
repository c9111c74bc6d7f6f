"""Attention kernels, and the operators of torch that stand for them in a model."""

import warnings

# Where the machine has a v5e or later chip and large pages on request only, importing jax warns in each run's log that
# the TPU's start takes longer. task=doctor says the same with its remedy (hugepages), and launch/startup.sh applies it.
warnings.filterwarnings("ignore", message="Transparent hugepages are not enabled", category=UserWarning)
