"""An attention kernel in the formulas of plain torch, for tests of models."""

import torch

from tpu_experiments.models.parts.attention import bidirectional_mask, causal_mask
from tpu_experiments.runtime.kernels.attention import Scores


def halves(x):
    """(a, b) to (-b, a); its transpose is minus itself."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def mask_of(segments: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Where a token may attend, (B, 1, T, T)."""
    if scores.causal:
        return causal_mask(segments, window=scores.window)
    return bidirectional_mask(segments, window=None if scores.window is None else scores.window - 1)


class PlainKernel:
    """A kernel in the formulas of plain torch; remembers whether it was to turn."""

    def __init__(self):
        self.turned = []

    def forward(self, *tensors, heads, scores):
        self.turned.append(tensors[4].numel() > 0)
        assert tensors[3].dtype == torch.int32
        assert len({each.dtype for each in tensors[:3]}) == 1  # as of the compiled kernel
        assert tensors[4].dtype in (tensors[0].dtype, torch.float32)
        assert tensors[1].shape == tensors[2].shape
        _, _, v, weights = self.parts(*tensors, heads=heads, scores=scores)
        out = (weights @ v).transpose(1, 2).flatten(2)
        return out, out.new_zeros(out.shape[0], heads, out.shape[1])

    def backward(self, *saved, grad, heads, scores):
        if saved[0].ndim == 4:
            saved = (*(stack[saved[-1]] for stack in saved[:3]), *saved[3:])
        q, k, v, weights = self.parts(*saved[:5], heads=heads, scores=scores)
        grad = grad.unflatten(2, (heads, -1)).transpose(1, 2)
        of_weights = grad @ v.mT
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scores.scale
        grads = [of_scores @ k, of_scores.mT @ q, weights.mT @ grad]
        if saved[4].numel():
            cos, sin = saved[4][:, :, None]
            grads[:2] = [(g * cos - halves(g * sin)).to(g.dtype) for g in grads[:2]]
        groups = heads * q.shape[3] // saved[1].shape[2]
        grads[1:] = [g.unflatten(1, (-1, groups)).sum(2) for g in grads[1:]]
        return tuple(g.transpose(1, 2).flatten(2) for g in grads)

    def parts(self, q, k, v, segments, rotation, *, heads, scores: Scores):
        """Turned queries and keys, values, all of H heads, and the weights."""
        q, k, v = (t.unflatten(2, (-1, q.shape[2] // heads)).transpose(1, 2) for t in (q, k, v))
        if rotation.numel():
            cos, sin = rotation[:, :, None]
            q, k = ((t * cos + halves(t) * sin).to(t.dtype) for t in (q, k))
        k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
        products = (q @ k.mT * scores.scale).masked_fill(~mask_of(segments, scores), -torch.inf)
        return q, k, v, torch.softmax(products, -1)
