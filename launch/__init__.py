"""Launch runs on Cloud TPU VMs from a laptop; see launch/README.md."""
