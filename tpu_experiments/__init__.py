"""Fine-tuning of language models on Cloud TPUs: Hydra configs, torch_xla, LoRA."""

__version__ = "0.1.0"
