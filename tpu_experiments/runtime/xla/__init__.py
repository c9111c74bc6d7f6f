"""torch_xla behind the Runtime protocol; beside it only runtime/kernels/on_xla.py names it for training."""
