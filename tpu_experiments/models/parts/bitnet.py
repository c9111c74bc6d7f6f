"""Linear layers with ternary weights and 8-bit activations, BitNet b1.58 (arXiv 2402.17764), trained through both.

The model is transformers' BitNet: Llama with a norm in front of every linear layer. q, k and v read the block's own
norm, gate and up that of the MLP; `attn_sub_norm` and `ffn_sub_norm` are those of o and down. Head and embedding are
dense. The arithmetic is that of `transformers.integrations.bitnet`, whose functions are compiled by torch.compile and
fail on XLA. Legend: N output features, K input features, R rows, L layers."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BitNetConfig, PretrainedConfig

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import ALL_LINEAR, ModelConfig, is_target
from tpu_experiments.runtime.stacked import hugging_face_names, is_stack

LARGEST = 127
"""Largest magnitude of an 8-bit activation."""
LEAST = 1e-5
"""Lower bound of the mean of a weight's magnitudes, and of a token's largest magnitude."""
LLAMA_LIKE = ("llama", "mistral")
"""Model types that BitNet's layers are made of."""
SUB_NORMS = ("attn_sub_norm", "ffn_sub_norm")
"""Norms that BitNet's layers have beside those of Llama."""
ONLINE = {
    "quant_method": "bitnet",
    "linear_class": "autobitlinear",
    "quantization_mode": "online",
    "modules_to_not_convert": ["lm_head"],
}
"""`quantization_config` of trained weights in float, which transformers makes ternary in every forward pass."""
MIX = "ternary_mix"
"""Key of the share of the quantised values in a batch of the warm-up, (..., R) float32; without it they are all."""

_mix: ContextVar[Tensor | None] = ContextVar("ternary_mix", default=None)


def current_mix() -> Tensor | None:
    """Return the share of quantised values of the current forward pass, float32 (); None for all."""
    return _mix.get()


@contextmanager
def mixed(mix: Tensor | None) -> Iterator[None]:
    """Compute with this share of the quantised values inside the block; None keeps the current one.

    Args:
        mix: a number of every row, which are all equal, (R,), or one number ().
    """
    token = None if mix is None else _mix.set(mix.amax(0) if mix.ndim else mix)
    try:
        yield
    finally:
        if token is not None:
            _mix.reset(token)


# ---- arithmetic ---------------------------------------------------------------------------------------------


def inverse_scale(weight: Tensor, *, dims: tuple[int, ...] | None = None) -> Tensor:
    """Return 1 / mean |W| of a float32 weight (N, K), shape (); of stacks, over `dims`, which are kept."""
    mean = weight.abs().mean() if dims is None else weight.abs().mean(dims, keepdim=True)
    return 1.0 / mean.clamp(min=LEAST)


def ternary(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes -1, 0 and 1 of a weight, float32 (N, K), and the factor () that the weight was multiplied by."""
    weight = weight_NK.to(torch.float32)
    inverse = inverse_scale(weight)
    return (weight * inverse).round().clamp(-1, 1), inverse


def _straight_through(codes: Tensor, scaled: Tensor) -> Tensor:
    """Return the codes bit for bit, with the gradient of `scaled`; in the warm-up, their mix.

    `scaled + (codes - scaled).detach()` would round: products of codes are exact sums of integers, in any order.
    """
    mix = current_mix()
    passed = scaled - scaled.detach()
    if mix is None:
        return codes.detach() + passed
    return mix * codes.detach() + ((1 - mix) * scaled + mix * passed)


def ternary_product(x: Tensor, weight_NK: Tensor) -> Tensor:
    """Multiply (..., K) by the ternary values of a weight, each token rounded to 8 bits: (..., N), in the type of `x`.

    The sum of code products is exact in float32 below K = 131,072. Gradients are those of the products with the rounded
    values, as though rounding were the identity (straight-through estimator, arXiv 1308.3432).
    """
    # `.float()` alone keeps the gradient of a float32 weight in float32 (models/parts/float32_gradients.py).
    weight, tokens = weight_NK.float(), x.to(torch.float32)
    with torch.no_grad():
        weight_factor = inverse_scale(weight)
        token_factor = LARGEST / tokens.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    of_weight, of_tokens = weight * weight_factor, tokens * token_factor
    codes_NK = _straight_through(of_weight.round().clamp(-1, 1), of_weight)
    codes = _straight_through(of_tokens.round().clamp(-LARGEST - 1, LARGEST), of_tokens)
    # Codes are exact in bf16, which has 8 bits.
    sums = F.linear(codes.to(x.dtype), codes_NK.to(x.dtype)).to(torch.float32)
    return (sums / (weight_factor * token_factor)).to(x.dtype)


class BitLinear(nn.Module):
    """A Linear that computes with ternary weights and 8-bit activations; its weight is trained in float."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features), in the data type of `x`."""
        out = ternary_product(x, self.weight)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class SubNorm(nn.Module):
    """One of BitNet's norms that a Llama has not: in the warm-up it is mixed with the values as they are."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon
        self._norm = type(norm).forward

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., K) by its root mean square, or up to the share of the warm-up."""
        mix, normed = current_mix(), self._norm(self, x)
        return normed if mix is None else (mix * normed + (1 - mix) * x).to(x.dtype)


# ---- model --------------------------------------------------------------------------------------------------


def bitnet_config(config: PretrainedConfig, *, origin: str) -> BitNetConfig:
    """Return the config of transformers' BitNet with the sizes of a Llama-like model.

    Args:
        origin: source of the config, for error messages.

    Raises:
        ConfigError: the model has parts that BitNet's layers lack, or holds packed codes.
    """
    values = config.to_dict()
    stored = values.pop("quantization_config", None) or {}
    if stored and (stored.get("quant_method"), stored.get("quantization_mode")) != ("bitnet", "online"):
        raise ConfigError(
            f"{origin} with model.linear=bitnet; its weights are codes ({stored.get('quant_method')}, "
            f"{stored.get('quantization_mode', 'packed')}), and training needs those in float that they were made of; "
            "give that checkpoint: of a run of this project, its model/."
        )
    if config.model_type == "bitnet":
        return BitNetConfig(**values)
    if config.model_type not in LLAMA_LIKE:
        raise ConfigError(
            f"{origin} with model.linear=bitnet; transformers' BitNet has the layers of a Llama, and a "
            f"{config.model_type!r} has others; take a model of type {', '.join(LLAMA_LIKE)} or bitnet."
        )
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = values.get("head_dim") or hidden // heads
    wrong = {
        "sliding_window": values.get("sliding_window"),
        "mlp_bias": values.get("mlp_bias"),
        "head_dim": head_dim if head_dim * heads != hidden else None,
    }
    for key, value in wrong.items():
        if value:
            raise ConfigError(
                f"{origin} with model.linear=bitnet; {key}={value} has no place in transformers' BitNet; take a model "
                "without it."
            )
    kept = {key: values[key] for key in BitNetConfig().to_dict() if key in values and key not in OWN}
    return BitNetConfig(**kept, head_dim=head_dim)


OWN = ("model_type", "architectures", "transformers_version", "quantization_config")
"""Keys of a config that say which class it is of."""


def make_ternary(module: nn.Module, model: ModelConfig) -> None:
    """Put a `BitLinear` in the place of every Linear of the layers, where the model has ternary weights."""
    if model.linear != "bitnet":
        return
    for name, part in list(module.named_modules()):
        owner, _, leaf = name.rpartition(".")
        if type(part) is nn.Linear and is_target(name, ALL_LINEAR):
            setattr(module.get_submodule(owner), leaf, BitLinear(part))
        elif leaf in SUB_NORMS and model.linear_warmup_steps:
            setattr(module.get_submodule(owner), leaf, SubNorm(part))


def is_new_norm(name: str) -> bool:
    """Return whether the parameter of this name belongs to a norm that a Llama has not."""
    return name.split(".")[-2:-1] in ([leaf] for leaf in SUB_NORMS)


# ---- shares of the codes ------------------------------------------------------------------------------------


def ternary_weights(module: nn.Module) -> list[str]:
    """Return the names of the weights that the module computes with as ternary ones."""
    return [f"{name}.weight" for name, part in module.named_modules() if isinstance(part, BitLinear)]


def layers_of(names: Iterable[str]) -> list[int]:
    """Return the numbers of the layers that these parameters are of, in order."""
    return sorted({_layer(part) for name in names for part in hugging_face_names(name)})


def _layer(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())


def ternary_shares(parameters: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """Return the shares of the codes -1, 0 and 1 among all ternary weights of every layer, float32 (L, 3)."""
    sums: dict[int, list[Tensor]] = {}
    counts: dict[int, int] = {}
    for name in names:
        stack = parameters[name] if is_stack(name) else parameters[name][None]
        scaled = stack * inverse_scale(stack, dims=(1, 2))
        each = torch.stack([(scaled < -0.5).float().sum((1, 2)), (scaled > 0.5).float().sum((1, 2))], -1)
        for index, part in enumerate(hugging_face_names(name)):
            sums.setdefault(_layer(part), []).append(each[index])
            counts[_layer(part)] = counts.get(_layer(part), 0) + stack[0].numel()
    rows = []
    for layer in sorted(sums):
        minus, plus = (torch.stack(sums[layer]).sum(0) / counts[layer]).unbind()
        rows.append(torch.stack([minus, 1 - minus - plus, plus]))
    return torch.stack(rows)
