"""Models of random weights whose logits differ as a trained model's do."""

import torch
from torch import nn

from tpu_experiments.models.sources.buffers import persistent_buffers


def move_logits(model: nn.Module) -> None:
    """Enlarge the matrices, and change the buffers that a checkpoint holds."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
        for buffer in persistent_buffers(model).values():
            buffer.add_(torch.randn(buffer.shape) * 0.3)
