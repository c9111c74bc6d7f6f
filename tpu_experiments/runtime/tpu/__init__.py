"""The backend of TorchTPU, torch_xla's successor: it lowers programs and jax's client runs them; on a TPU never yet."""
