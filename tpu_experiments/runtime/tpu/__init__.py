"""The backend of TorchTPU, torch_xla's successor: programs are lowered here; nothing has run on a TPU by it yet."""
