"""The forward pass used by training, evaluation and generation: ready masks, so that nothing is read on the host.

transformers builds masks by looking at tensor values, which on XLA is a host read per step; a ready 4-D mask is
passed through untouched. What a model does with its last hidden states, and whether the values of its config go
together, is found on the meta device without weights. Legend: B rows, T tokens, V vocabulary."""

import copy
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.func import functional_call

from tpu_experiments.models.adapters.token_rows import with_token_rows
from tpu_experiments.models.parts.attention import FLASH, bidirectional_mask, causal_mask, same_chunk
from tpu_experiments.models.parts.bitnet import MIX, mixed
from tpu_experiments.models.parts.dropout import noise, noise_of
from tpu_experiments.models.parts.float32_gradients import cast_weights
from tpu_experiments.models.parts.rope import with_rope_in_kernel
from tpu_experiments.runtime.stacked import is_stack

UNFIT = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""Exceptions that transformers' classes raise over inconsistent values."""
BOOLEAN_MASKS = ("deberta", "deberta-v2")
"""Model types whose own attention takes a boolean mask."""
STATES = ("linear_attention", "conv")
"""Types of layers that hand a state from token to token."""
Masks = dict[str, Tensor | None]
"""Masks (B, 1, T, T) by type of layer; None where a type takes none."""
MaskOf = Callable[[int | None, int | None], Tensor]
"""Makes a mask for a window and a chunk."""


def attention_masks(segments_BT: Tensor, *, config: Any, causal: bool = True) -> Tensor | Masks:
    """Return boolean masks (B, 1, T, T), true where a token may attend.

    Attention is causal or on both sides, within the token's document and within the window. Padding (segment 0) attends
    to padding only, so that no row of the softmax is empty. Models with `layer_types` (Gemma 3, Qwen2, ModernBERT) take
    one mask per type; Mistral takes one mask with its window.
    """

    def mask_of(window: int | None, chunk: int | None) -> Tensor:
        if not causal:
            return bidirectional_mask(segments_BT, window=window)
        mask = causal_mask(segments_BT, window=window)
        return mask & same_chunk(segments_BT, size=chunk) if chunk else mask

    return by_layer_type(mask_of, config=config)


def window_of(config: Any) -> int | None:
    """Return the window of a model's sliding layers; None where none reads one.

    A config keeps any key of its file: `sliding_window` of a Llama is no field of its class, and no layer reads it.
    """
    kind = type(config)
    is_read = hasattr(kind, "sliding_window") or not kind.__module__.startswith("transformers.")
    return getattr(config, "sliding_window", None) if is_read else None


def by_layer_type(mask_of: MaskOf, *, config: Any) -> Tensor | Masks:
    """Return the mask of a model, or one for each type of its layers.

    Args:
        mask_of: makes a mask for a window and a chunk, each of which may be None.

    Returns:
        Of layers that hand on a state, None: their classes would take a mask (B, T) of padding, which is behind the
        documents here and does not reach them.
    """
    window = window_of(config)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return mask_of(window, None)
    full = mask_of(None, None)
    masks: Masks = {"full_attention": full}
    if any("sliding" in kind for kind in layer_types):
        masks["sliding_attention"] = mask_of(window, None)
    if "chunked_attention" in layer_types:
        masks["chunked_attention"] = mask_of(None, config.attention_chunk_size)
    if any(kind not in masks for kind in layer_types):
        others = dict.fromkeys(layer_types, full) | dict.fromkeys(STATES)
        masks = others | masks
    return masks


def logits_of(
    module: nn.Module, parameters: Mapping[str, Tensor], batch: Mapping[str, Tensor], *, causal: bool = True
) -> Tensor:
    """Return logits (B, T, V), with `parameters` in the module's data type in place of its own.

    The gradients of `parameters` are float32, not rounded on the way (models/parts/float32_gradients.py).

    Args:
        parameters: float32 trainable parameters by name.
        batch: `ids`, `positions`, `segments`, all (B, T); `noise` (B,) where adapters have dropout.
        causal: whether a token attends to those before it alone, or to its whole document.
    """
    inputs = model_inputs(module, batch, causal=causal)
    drawn, mix = noise(noise_of(batch)), mixed(batch.get(MIX))
    with drawn, mix, in_module_dtype(module, parameters) as cast, mask_in_layers_alone(module):
        return with_rope_in_kernel(
            module, lambda: functional_call(module, cast, kwargs=inputs, tie_weights=True).logits
        )


def hidden_of(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    *,
    causal: bool = True,
    head: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the last hidden states (B, T, H) and the head's weight (V, H); arguments as in `logits_of`.

    The product of the two, soft-capped where the model caps, equals `logits_of` for a module with a plain head and for
    no other. A trained embedding that is tied to the head is returned as the head. A trained head is float32, as in
    `parameters`: cast it to the data type of the hidden states for the product.

    Args:
        head: name of the head's module; None is that of the vocabulary.
    """
    inputs, without_head = model_inputs(module, batch, causal=causal), _WithoutHead(module, head)
    parameters = with_token_rows(module, parameters)
    drawn, mix = noise(noise_of(batch)), mixed(batch.get(MIX))
    with drawn, mix, in_module_dtype(module, parameters) as cast, mask_in_layers_alone(module):
        own = {f"module.{name}": tensor for name, tensor in cast.items()}
        hidden_BTH, head_VH = with_rope_in_kernel(
            module, lambda: functional_call(without_head, own, kwargs=inputs, tie_weights=True)
        )
    trained = next((parameters[name] for name, tensor in cast.items() if tensor is head_VH), head_VH)
    return hidden_BTH, trained


def masked_features(
    module: nn.Module, parameters: Mapping[str, Tensor], batch: Mapping[str, Tensor], *, picks_RKT: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what an encoder's head makes of chosen tokens, and the matrix that turns it into logits.

    Returns:
        The input of the head's last matrix (R, K, H), that matrix (V, H) and its bias (V,), if it has one. Their
        product is what the class's own forward pass computes; trained ones are float32, as in `parameters`.

    Args:
        picks_RKT: one-hot rows that choose a token for each of K places; a place of zeros has no token.
    """
    inputs, up_to_head = model_inputs(module, batch, causal=False), _UpToHead(module)
    parameters = with_token_rows(module, parameters)
    with noise(noise_of(batch)), in_module_dtype(module, parameters) as cast, mask_in_layers_alone(module):
        own = {f"module.{name}": tensor for name, tensor in cast.items()}
        features_RKH, *head = with_rope_in_kernel(
            module, lambda: functional_call(up_to_head, own, kwargs={"picks_RKT": picks_RKT, **inputs})
        )
    weight_VH, bias_V = (
        next((parameters[name] for name, tensor in cast.items() if tensor is part), part) for part in head
    )
    return features_RKH, weight_VH, bias_V


class _UpToHead(nn.Module):
    """A masked language model up to the last matrix of its head, for the tokens that are predicted."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *, picks_RKT: Tensor, **inputs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        whole: Any = self.module
        hidden_BTH = getattr(whole, whole.base_model_prefix)(**inputs).last_hidden_state
        hidden_RKH = picks_RKT.to(hidden_BTH.dtype) @ hidden_BTH
        own = getattr(getattr(whole, "lm_predictions", None), "lm_head", None)
        if own is not None:  # DeBERTa's head multiplies with the embedding itself
            features = own.LayerNorm(own.transform_act_fn(own.dense(hidden_RKH)))
            return features, whole.get_input_embeddings().weight, own.bias
        matrix = whole.get_output_embeddings()
        return _before(matrix, whole, hidden_RKH), matrix.weight, matrix.bias


def _before(matrix: nn.Module, whole: Any, hidden: Tensor) -> Tensor:
    """Return what a model's own forward pass gives to the last matrix of its head, for these hidden states."""
    path = next(name for name, part in whole.named_modules() if part is matrix)
    probe = copy.copy(whole)
    probe._modules = {**whole._modules, whole.base_model_prefix: _Base(hidden)}
    *outer, leaf = path.split(".")
    owner = probe
    for name in outer:
        inner = copy.copy(owner._modules[name])
        inner._modules = dict(inner._modules)
        owner._modules[name] = inner
        owner = inner
    owner._modules[leaf] = nn.Identity()
    features: Tensor = probe(input_ids=torch.zeros(1, 1, dtype=torch.long)).logits
    return features


@contextmanager
def in_module_dtype(module: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the parameters in the data type in which the module is called; trained rows in their matrices.

    Stacks and the weights of recomputed layers are left as they are and cast where the layers run (stack/fold.py and
    recomputed.py).
    """
    dtype: Any = module.dtype
    parameters = with_token_rows(module, parameters)
    within = tuple(f"{name}." for name, part in module.named_modules() if getattr(part, "casts_weights", False))
    later = {name: p for name, p in parameters.items() if is_stack(name) or name.startswith(within)}
    with cast_weights({n: p for n, p in parameters.items() if n not in later}, dtype=dtype) as cast:
        yield cast | later


class _WithoutHead(nn.Module):
    """A decoder up to its head, which holds the whole, so that functional_call ties weights."""

    def __init__(self, module: nn.Module, head: str | None) -> None:
        super().__init__()
        self.module, self.head = module, head

    def forward(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        whole: Any = self.module
        hidden_BTH = getattr(whole, whole.base_model_prefix)(**inputs).last_hidden_state
        head = whole.get_output_embeddings() if self.head is None else whole.get_submodule(self.head)
        return hidden_BTH, head.weight


def model_inputs(module: nn.Module, batch: Mapping[str, Tensor], *, causal: bool = True) -> dict[str, Any]:
    """Return the arguments of the model's forward pass; those of `logits_of`."""
    first = first_position(module)
    return {
        "input_ids": batch["ids"],
        "position_ids": batch["positions"].long() + first if first else batch["positions"],
        "attention_mask": attention_input(batch["segments"], module=module, causal=causal),
        "use_cache": False,
    }


def first_position(module: nn.Module) -> int:
    """Return the position of a document's first token in the model's table: 2 of RoBERTa's, 0 of most."""
    table = getattr(getattr(_base_of(module), "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return 0 if padding is None else int(padding) + 1


def _base_of(module: nn.Module) -> Any:
    whole: Any = module
    return getattr(whole, whole.base_model_prefix, whole)


@contextmanager
def mask_in_layers_alone(module: nn.Module) -> Iterator[None]:
    """Keep ready masks from DeBERTa's embeddings, which multiply theirs, (B, T) of padding, with the vectors."""
    parts = [part for part in module.modules() if type(part).__name__ in ("DebertaEmbeddings", "DebertaV2Embeddings")]
    handles = [part.register_forward_pre_hook(_without_mask, with_kwargs=True) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _without_mask(_: nn.Module, args: Any, keywords: dict[str, Any]) -> Any:
    return args, {**keywords, "mask": None}


def attention_input(segments_BT: Tensor, *, module: nn.Module, causal: bool = True) -> Any:
    """Return the model's `attention_mask`: segment ids for `flash` (attention.py), masks for other implementations.

    Models without attention that keep documents apart by themselves (xLSTM) get the segments (B, T), and so do the
    layers of a model that do (Qwen 3.5).
    """
    config: Any = module.config
    if getattr(module, "reads_segments", False):
        return segments_BT
    if config._attn_implementation != FLASH:
        masks = in_attention_form(attention_masks(segments_BT, config=config, causal=causal), module)
    else:
        masks = segments_BT[:, None, None, :] if causal else segments_BT[:, None, :, None]
    beside = getattr(module, "reads_segments_in", ())
    if not beside:
        return masks
    return (masks if isinstance(masks, dict) else {"full_attention": masks}) | dict.fromkeys(beside, segments_BT)


def in_attention_form(masks: Tensor | Masks | None, module: nn.Module) -> Any:
    """Convert boolean masks to the form that the module's attention expects.

    sdpa takes the boolean mask, and so does DeBERTa; transformers' eager attention adds its mask to the scores: 0, or
    the lowest finite value.
    """
    config: Any = module.config
    if masks is None or config._attn_implementation != "eager" or config.model_type in BOOLEAN_MASKS:
        return masks
    if isinstance(masks, dict):
        return {kind: in_attention_form(mask, module) for kind, mask in masks.items()}
    dtype: Any = module.dtype
    return torch.where(masks, 0.0, torch.finfo(dtype).min).to(dtype)


def target_weights(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return next-token targets (B, T) and their float32 weights (B, T).

    A weight is 1 where the target is to be learnt and of the same document, otherwise 0.
    """
    targets_BT = torch.roll(batch["ids"], -1, dims=1)
    next_learn = torch.roll(batch["learn"], -1, dims=1)
    same = torch.roll(batch["segments"], -1, dims=1) == batch["segments"]
    weights_BT = (next_learn * same * (batch["segments"] > 0)).to(torch.float32)
    inside = torch.arange(targets_BT.shape[1], device=targets_BT.device) < targets_BT.shape[1] - 1
    return targets_BT, weights_BT * inside


def row_losses(logits_BTV: Tensor, batch: Mapping[str, Tensor], *, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the weighted cross-entropy sum (nats) and the weight sum of every row, both (B,) float32.

    Args:
        z_loss: factor of log(Z)^2, which is added to the loss of every token.
    """
    targets_BT, weights_BT = target_weights(batch)
    logits = logits_BTV.flatten(0, 1).float()
    losses = F.cross_entropy(logits, targets_BT.flatten().long(), reduction="none")
    if z_loss:
        losses = losses + z_loss * torch.logsumexp(logits, -1) ** 2
    return (losses.view_as(weights_BT) * weights_BT).sum(1), weights_BT.sum(1)


log = logging.getLogger(__name__)
_known: "WeakKeyDictionary[nn.Module, bool]" = WeakKeyDictionary()


def soft_cap_of(module: nn.Module) -> float | None:
    """Return c of Gemma's and xLSTM's c tanh(logits / c); None where the logits are not capped."""
    config: Any = module.config
    text = config.get_text_config()
    names = ("final_logit_softcapping", "output_logit_soft_cap")
    cap: float | None = next((c for c in (getattr(text, name, None) for name in names) if c is not None), None)
    return cap


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
            log.info(
                "logits of %s are not a plain matrix product: they are computed for whole rows, and "
                "trainer.loss_chunk_tokens has no effect",
                type(module).__name__,
            )
    return _known[module]


class _Outputs:
    """Output of the stand-in base model: hidden states, and None for all else (caches, router logits)."""

    def __init__(self, hidden_11H: Tensor, pooled: Sequence[Tensor] = ()) -> None:
        self.last_hidden_state, self.pooled = hidden_11H, tuple(pooled)

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state, *self.pooled)[index]


class _Base(nn.Module):
    """Stand-in for the layers, which returns given hidden states."""

    def __init__(self, hidden_11H: Tensor, pooled: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.hidden_11H, self.pooled = hidden_11H, pooled

    def forward(self, *args: Any, **kwargs: Any) -> _Outputs:
        return _Outputs(self.hidden_11H, self.pooled)


def with_base(hidden: Tensor, base: nn.Module) -> nn.Module:
    """Return a stand-in for a base model whose output are these hidden states, and what its pooler makes of them."""
    pooler = getattr(base, "pooler", None)
    return _Base(hidden, () if pooler is None else (pooler(hidden),))


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


TOKENS = 8
SHAPES = re.compile(r"shape|size|dimension|mat1|broadcast|must match|divisible", re.IGNORECASE)
"""What torch's errors about shapes contain. Others are due to the meta device, which has no values to read and lacks
some kernels."""


def rehearse(module: nn.Module, *, causal: bool = True) -> None:
    """Run the module on one row of the meta device; raises what it raises over inconsistent values."""
    named = (*module.named_parameters(), *module.named_buffers())
    tensors: dict[str, Any] = {name: tensor.detach().to("meta") for name, tensor in named}
    with torch.device("meta"), torch.no_grad():
        ones = torch.ones(1, TOKENS, dtype=torch.int64)
        inputs = model_inputs(module, {"ids": ones, "positions": ones, "segments": ones}, causal=causal)
        try:
            with mask_in_layers_alone(module), noise(torch.zeros(1, dtype=torch.int32)):
                functional_call(module, tensors, kwargs=inputs)
        except RuntimeError as error:
            if SHAPES.search(str(error)):
                raise
