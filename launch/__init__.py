"""From a laptop to a TPU and back: launch/README.md."""
