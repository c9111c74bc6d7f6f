"""Seconds of a step on a TPU by formulas, where its compiler is not asked.

A roofline whose parts follow one another: matrix products at a share of the chip's peak, kernels at theirs, and what a
step reads and writes at the memory's bandwidth. Sharded weights are gathered meanwhile, and take what is longer. Its
four constants were fitted to the compiled steps of conf/tuned.yaml (tests/benchmarks/roofline.py).
"""

from dataclasses import dataclass
from typing import Any

from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.metrics.flops import Decoder, FlopsPerToken, read_decoder
from tpu_experiments.planning.hlo.text import Transfer
from tpu_experiments.planning.timing import CALIBRATED, StepTime, calibration_of, transfer_seconds
from tpu_experiments.planning.work import StepSettings, base_bytes, read_by_layer, recomputes_layers

FLOAT32_BYTES = 4
PASSES_OF_WEIGHTS = 2
"""How often a micro-batch reads the weights: forward and backward."""


@dataclass(frozen=True)
class Constants:
    """What the compiled steps of conf/tuned.yaml say of a step."""

    products: float = 0.95
    """Share of the chip's peak at which matrix products run."""
    passes: float = 5.2
    """How often what the backward pass reads of a layer crosses the memory: written, read, and gradients likewise."""
    folded: float = 1.8
    """Factor of `passes` in layers that are folded into a loop, which stacks what it saves."""
    logits: float = 2.4
    """How often the logits cross it, once in the model's data type and once in float32."""


FITTED = Constants()


def roofline_time(
    flops: FlopsPerToken, arch: Any, *, step: StepSettings, tokens: float, hw: HwConfig, constants: Constants = FITTED
) -> StepTime:
    """Return the seconds of one optimizer step.

    Args:
        tokens: those of the step on one chip; where chips share a row, each has its part of them.

    Raises:
        ConfigError: a model that `read_decoder` does not support, or chips that have no network.
    """
    chip = hw.chip
    assert chip is not None
    decoder, peak = read_decoder(arch), chip.peak_tflops_bf16 * 1e12
    in_kernels = flops.attention + share_of_experts(decoder) * (flops.total - flops.attention - flops.head)
    products = tokens * (flops.total - in_kernels) / (constants.products * peak)
    kernels = tokens * in_kernels / (calibration_of(hw, libtpu=CALIBRATED).kernel_share_of_peak * peak)
    share = tokens / (step.accumulation * step.micro_rows * step.seq_len)
    memory = share * bytes_moved(decoder, step=step, constants=constants) / (chip.hbm_gb_per_second * 1e9)
    network = share * transfer_seconds(gathering(decoder, step=step), chip=chip, topology=hw.topology)
    exposed = max(0.0, network - products - kernels - memory)
    busy = {"compute": products + kernels, "memory": memory, "network": exposed}
    total = sum(busy.values())
    return StepTime(
        compute_s=products + memory,
        kernels_s=kernels,
        network_s=network,
        exposed_network_s=exposed,
        total_s=total,
        bound_by=max(busy, key=lambda part: busy[part]),
        mfu=flops.model * tokens / (total * peak),
        tokens_per_second_per_chip=tokens / total,
        method="analytic",
    )


def share_of_experts(decoder: Decoder) -> float:
    """Return the share of experts in the matrices that a token is multiplied with, 0 to 1."""
    matrices = decoder.multiplied
    return sum(matrices[name] for name in decoder.stacked) / sum(matrices.values())


def bytes_moved(decoder: Decoder, *, step: StepSettings, constants: Constants) -> float:
    """Return the bytes that a step reads and writes for its rows: activations, logits, and weights twice."""
    passes = constants.passes * (constants.folded if recomputes_layers(decoder, step=step) else 1.0)
    of_layers = decoder.num_layers * read_by_layer(decoder, seq_len=step.seq_len, attention=step.attention)
    of_token = passes * of_layers * step.weight_bytes
    of_token += constants.logits * decoder.vocab_size * (step.weight_bytes + FLOAT32_BYTES)
    tokens = step.micro_rows * step.seq_len
    return step.accumulation * (tokens * of_token + PASSES_OF_WEIGHTS * weights_of(decoder, step=step))


def gathering(decoder: Decoder, *, step: StepSettings) -> Transfer:
    """Return the collectives of a step that bring its sharded weights, for the forward pass and for the backward one.

    Training of everything hands the gradients back as well.
    """
    chips = step.chips if step.sharding == "fsdp" else 1
    times = step.accumulation * (PASSES_OF_WEIGHTS + (step.trainable == "full"))
    count = times * decoder.num_layers
    return Transfer("all-gather", count, times * weights_of(decoder, step=step), count, chips)


def weights_of(decoder: Decoder, *, step: StepSettings) -> float:
    """Return the bytes of the model's matrices, whole."""
    return base_bytes(decoder, base=step.base, double_quant=step.double_quant, item_bytes=step.weight_bytes)[0]
