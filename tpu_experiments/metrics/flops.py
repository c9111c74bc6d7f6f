"""FLOPs of training per token, and the share of the chip's peak that they reach.

A multiply-add is 2 FLOPs. A dense forward pass is 2 N FLOPs per token for N elements of matrices (arXiv 2001.08361,
table 1), and the backward pass as much again for the gradient of the activations and once more for that of the weights.
LoRA needs no gradient of the frozen weights: about 4 N instead of 6 N. Attention is counted as in PaLM (arXiv
2204.02311, appendix B), but for the causal half alone: T / 2 keys per query, not T, and fewer with a sliding window.
"""

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.config.sources import SAVED
from tpu_experiments.metrics.decoder import Decoder, read_decoder

Trainable = Literal["lora", "full"]


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs of one training step per token of a full row; the parts do not overlap."""

    forward: float
    """Forward pass through the frozen (or trained) matrices of the layers."""
    activation_gradient: float
    """Gradient with respect to the inputs of the same matrices."""
    weight_gradient: float
    """Gradient with respect to the matrices; 0 with LoRA."""
    recomputation: float
    """Layers recomputed by the backward pass, attention and adapters included; 0 without."""
    attention: float
    """Scores and weighted values, forward and backward, causal half only."""
    head: float
    """Logits, forward and backward."""
    lora: float
    """Adapters, forward and backward; 0 without."""

    @property
    def total(self) -> float:
        """FLOPs that the step executes."""
        return sum(asdict(self).values())

    @property
    def model(self) -> float:
        """FLOPs that model FLOPs utilisation counts: all but the recomputation."""
        return self.total - self.recomputation


def utilisation(flops: float, *, seconds: float, peak_tflops: float, num_devices: int) -> float:
    """Return the share of the devices' peak, 0 to 1: FLOPs / (seconds x peak FLOP/s of all devices).

    With the FLOPs that the model needs, and tokens that are not padding, it is the model FLOPs utilisation (MFU); with
    all that is executed, recomputation and padding included, the hardware's (HFU): arXiv 2204.02311, appendix B.
    """
    return flops / (seconds * peak_tflops * 1e12 * num_devices)


def trainable(config: Config) -> Trainable:
    """Return what is trained: adapters or the whole model."""
    return "lora" if config.lora.r else "full"


def recomputes(config: Config) -> bool:
    """Return whether the backward pass recomputes layers: scanned ones do, unless everything is saved."""
    return config.model.remat != "none" and config.model.stack == "scanned"


def trained_flops(config: Config, arch: Any, *, seq_len: int) -> FlopsPerToken:
    """Return the FLOPs per token of the configured training.

    Raises:
        ConfigError: a model that decoder.py does not support.
    """
    return flops_of_token(
        arch,
        seq_len=seq_len,
        trainable=trainable(config),
        lora_rank=config.lora.r,
        targets=config.lora.targets,
        recompute=recomputes(config),
        saved=(*SAVED.get(config.model.remat, ()), *config.model.saved),
        kernel=config.model.attention == "flash",
    )


def flops_by_length(config: Config, arch: Any, *, seq_lens: Iterable[int], is_folded: bool) -> dict[int, FlopsPerToken]:
    """Return FLOPs per token for each row length; empty for a model that is not supported.

    Args:
        is_folded: whether layers were folded; layers that were not recompute nothing.
    """
    try:
        counted = {seq_len: trained_flops(config, arch, seq_len=seq_len) for seq_len in seq_lens}
    except ConfigError:
        return {}
    return counted if is_folded else {length: replace(each, recomputation=0.0) for length, each in counted.items()}


def mean_keys(seq_len: int, *, window: int | None) -> float:
    """Return the mean number of keys per query over a row that is one document; packed rows need fewer."""
    reach = min(window or seq_len, seq_len)
    return (reach * (reach + 1) / 2 + (seq_len - reach) * reach) / seq_len


def flops_of_token(
    arch: Any,
    *,
    seq_len: int,
    trainable: Trainable,
    lora_rank: int = 0,
    targets: Iterable[str] = (),
    recompute: bool = False,
    saved: Collection[str] = (),
    kernel: bool = True,
) -> FlopsPerToken:
    """Return FLOPs per token of forward, backward and recomputation; the optimizer's are not counted.

    Under LoRA nothing needs the gradient of the first layer's input; a scanned stack computes it, so it is counted.

    Args:
        recompute: the backward pass recomputes the layers from their inputs.
        saved: exceptions that are saved: `attention`, or projections by name.
        kernel: attention is a kernel, which saves what its own backward pass needs where attention is saved.

    Raises:
        ConfigError: a model that decoder.py does not support.
    """
    decoder, trained = read_decoder(arch), trainable == "full"
    names = [] if trained else list(targets)
    layers, head = 2.0 * decoder.num_layers * decoder.layer_matrices, 2.0 * decoder.embedding
    keys = sum(mean_keys(seq_len, window=window) for window in decoder.windows)
    attention = 4.0 * decoder.num_heads * decoder.head_dim * keys
    adapters = 2.0 * decoder.adapter_parameters(rank=lora_rank, targets=names)
    share = 1.0 if "attention" not in saved else 0.0 if kernel else 0.5  # plain operations need the scores again
    recomputed = _recomputed(decoder, saved, attention=share * attention, rank=lora_rank, targets=names)
    return FlopsPerToken(
        forward=layers,
        activation_gradient=layers,
        weight_gradient=layers if trained else 0.0,
        recomputation=recomputed if recompute else 0.0,
        attention=3 * attention,  # two products forward, four backward
        head=head * (3 if trained else 2),
        lora=3 * adapters,
    )


def _recomputed(decoder: Decoder, saved: Collection[str], *, attention: float, rank: int, targets: list[str]) -> float:
    """Return the FLOPs of the layers that the backward pass recomputes.

    It reads the output of a layer's last projection only where a norm follows (Gemma 3). An adapter's first product is
    never recomputed, its second where the projection is.
    """
    has_norm_behind = decoder.family.norms > 2
    again = {
        name: wide * high
        for name, (wide, high) in decoder.projections.items()
        if name not in saved and (name != "down_proj" or has_norm_behind)
    }
    adapters = sum(rank * high for leaf, (_, high) in decoder.adapted_by_leaf(targets) if leaf in again)
    return 2.0 * (decoder.num_layers * sum(again.values()) + adapters) + attention
