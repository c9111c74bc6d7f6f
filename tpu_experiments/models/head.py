"""What a causal language model does with its last hidden states, determined without running it."""

import copy
import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)
_known: "WeakKeyDictionary[nn.Module, bool]" = WeakKeyDictionary()


def soft_cap_of(module: nn.Module) -> float | None:
    """Return c of Gemma's c tanh(logits / c); None where the logits are not capped."""
    config: Any = module.config
    return getattr(config.get_text_config(), "final_logit_softcapping", None)


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Apply the soft cap of `soft_cap_of` to logits; None leaves them unchanged."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def has_plain_head(module: nn.Module) -> bool:
    """Return whether the logits are one matrix product, capped by `soft_cap_of` or not, and nothing else.

    Not plain are a head with a bias (Phi, GPT-J), a head with an adapter (`LoraLinear`), and scaled logits (Cohere,
    Granite). The models of transformers 5.23 use half a dozen names for such changes, so the module's own forward is
    probed: run on three numbers, with stand-ins for its base model and its head, it must return the product of the two.
    """
    if module not in _known:
        _known[module] = _is_product(module)
        if not _known[module]:
            told = "its logits are not a plain product; those of whole rows are made, whatever loss_chunk_tokens is"
            log.info("%s: %s", type(module).__name__, told)
    return _known[module]


class _Outputs:
    """Output of the stand-in base model: hidden states, and None for all else (caches, router logits)."""

    def __init__(self, hidden_11H: Tensor) -> None:
        self.last_hidden_state = hidden_11H

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class _Base(nn.Module):
    """Stand-in for the layers, which returns given hidden states."""

    def __init__(self, hidden_11H: Tensor) -> None:
        super().__init__()
        self.hidden_11H = hidden_11H

    def forward(self, *args: Any, **kwargs: Any) -> _Outputs:
        return _Outputs(self.hidden_11H)


def _is_product(module: nn.Module) -> bool:
    whole: Any = module
    head, base = whole.get_output_embeddings(), whole.base_model_prefix
    names = [name for name, child in module.named_children() if child is head]
    if type(head) is not nn.Linear or head.bias is not None or not names or base not in module._modules:
        return False
    hidden, weight = torch.tensor([[[0.5, -2.0, 30.0]]]), torch.tensor([[1.0, 0.25, 0.5], [0.0, 1.0, -0.75]])
    probe = copy.copy(module)
    small = nn.Linear(3, 2, bias=False, device="meta")
    small.weight = nn.Parameter(weight, requires_grad=False)
    probe._modules = {**module._modules, base: _Base(hidden), names[0]: small}
    try:
        logits = probe(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits
    except Exception:  # a forward that needs more of its base model than hidden states
        return False
    expected = capped(hidden @ weight.T, soft_cap_of(module))
    return logits.shape == expected.shape and torch.allclose(logits, expected)
