"""The sharding table: rules that shard parameter dimensions, and checks that every rule has an effect."""

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.mesh import Axes, Mesh, row_axes
from tpu_experiments.config.model_schema import ShardingConfig
from tpu_experiments.runtime.ops import in_use
from tpu_experiments.runtime.stacked import (
    ADAPTER_PARTS,
    LEARNT_SCALE,
    MAGNITUDE,
    SIDE_TENSORS,
    is_adapter_part,
    is_learnt_scale,
    is_magnitude,
    is_of_parameter,
    is_side_tensor,
    is_stack,
    weight_of,
)

ABSMAX = "_absmax"
"""Suffix of the slot with the scales of the 8-bit codes in the slot without it (optim/blockwise.py)."""
SPLIT_AS_WEIGHTS = (*SIDE_TENSORS[:2], MAGNITUDE, LEARNT_SCALE)
"""Scales with an entry for each output feature, or for each output feature and block; DoRA's lengths of rows."""
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
"""Ends of the names of a mixture's matrices, which are one parameter for all experts of a layer."""
SAME_PLACE = {
    "backbone.embeddings.": "embed_tokens.",
    "embed_tokens_per_layer.": "embed_tokens.",
    ".mlstm_layer.q.": ".q_proj.",
    ".mlstm_layer.k.": ".k_proj.",
    ".mlstm_layer.v.": ".v_proj.",
    ".mlstm_layer.ogate_preact.": ".v_proj.",
    ".mlstm_layer.out_proj.": ".o_proj.",
    ".ffn.proj_up_gate.": ".gate_proj.",
    ".ffn.proj_up.": ".up_proj.",
    ".ffn.proj_down.": ".down_proj.",
    ".linear_attn.in_proj_qkv.": ".v_proj.",
    ".linear_attn.in_proj_qkvz.": ".v_proj.",
    ".linear_attn.in_proj_z.": ".v_proj.",
    ".linear_attn.out_proj.": ".o_proj.",
    ".self_attn.qkv_proj.": ".q_proj.",
    ".mlp.gate_up_proj.": ".gate_proj.",
    ".experts.gate_up_proj": ".gate_proj.weight",
    ".experts.down_proj": ".down_proj.weight",
}
"""Parts of the names of an xLSTM, of Gated DeltaNet layers, Phi-3, Gemma 4 and experts, and of those under which rules
for Transformers apply to the same matrices: of the same place and orientation. Gates of one number a head have none."""


class ShardingTable:
    """Sharded dimensions by parameter name; the first matching glob of `sharding.rules` applies."""

    def __init__(self, sharding: ShardingConfig, *, mesh: Mesh) -> None:
        self.name, self.rules = sharding.name, sharding.rules
        self.max_replicated, self.mesh = sharding.max_replicated_elements, mesh

    def axes(self, name: str, shape: tuple[int, ...]) -> Axes:
        """Return the mesh axes of each dimension of a parameter.

        The layer axis of a stack and dimensions of size 1 are never sharded.

        Args:
            name: a parameter's, or `<parameter>/<slot>` of optimizer state, which is sharded as its parameter is;
                scales of 8-bit codes (`<slot>_absmax`) where their dimensions divide.

        Raises:
            ConfigError: the rule has another number of dimensions, or a sharded dimension is not divisible.
        """
        parameter, _, slot = name.partition("/")
        if is_side_tensor(parameter):
            weight = parameter.rpartition(".")[0] + ".weight"
            return self._axes_of_scales(parameter, shape, of=weight, is_split=parameter.endswith(SPLIT_AS_WEIGHTS))
        is_vector = is_magnitude(parameter) or is_learnt_scale(parameter)
        if is_vector and not any(_matches(glob, parameter) for glob in self.rules):
            weight = parameter.rpartition(".")[0] + ".weight"
            # along `tensor` alone, as adapters are
            return in_use(self._axes_of_scales(parameter, shape, of=weight, is_split=True))
        if slot.endswith(ABSMAX):
            return self._axes_of_scales(parameter, shape, of=parameter, is_split=True)
        if is_stack(parameter):
            return (None, *self._axes(parameter, shape[1:]))
        return self._axes(parameter, shape)

    def _axes_of_scales(self, name: str, shape: tuple[int, ...], *, of: str, is_split: bool) -> Axes:
        """Return the axes of the scales of a quantised tensor, or of DoRA's lengths: those of the tensor `of`.

        They have one entry per output feature, or per output feature and block; others are whole on every device.
        """
        leading: Axes = (None,) if is_stack(name) else ()
        own = shape[len(leading) :]
        named = self._axes_of_rule(of) if is_split else ()
        split = (*named, *(None for _ in own))[: len(own)]
        return leading + tuple(
            axis if axis and size > 1 and size % self.mesh.size(axis) == 0 else None
            for size, axis in zip(own, split, strict=True)
        )

    def _axes(self, name: str, shape: tuple[int, ...]) -> Axes:
        for glob, given in self.rules.items():
            if not name or not _matches(glob, name):
                continue
            is_stacked = is_adapter_part(name) or name.endswith(EXPERTS)  # models/adapters/packed.py, parts/experts.py
            if is_stacked and len(shape) == len(given) + 1:
                return (None, *self._axes(name, shape[1:]))
            if len(given) != len(shape):
                raise ConfigError(f"sharding.rules[{glob!r}]={given} has {len(given)} entries but {name} is {shape}.")
            axes = self.mesh.named(given)
            for size, axis in zip(shape, axes, strict=True):
                if axis and size > 1 and size % self.mesh.size(axis):
                    raise ConfigError(
                        f"sharding.rules[{glob!r}]={given}; {name} is {shape} and {size} does not divide by the "
                        f"{self.mesh.size(axis)} devices{self._of(axis)}; split the other dimension."
                    )
            return tuple(axis if size > 1 else None for size, axis in zip(shape, axes, strict=True))
        if is_of_parameter(name):
            return self._axes_of_experts(name, shape)
        return (None,) * len(shape)

    def _axes_of_experts(self, name: str, shape: tuple[int, ...]) -> Axes:
        """Return the axes of an adapter of experts that has no rule: split by experts over what their weight is.

        Not over `tensor`, whose devices compute every expert. The gradients that a device sums are those of its experts
        (kernels/megablox.py).
        """
        named = self._axes_of_rule(weight_of(name.rpartition(".")[0]))
        over = next((axis for axis in named if axis and "tensor" not in axis), None)
        is_split = over is not None and shape[0] > 1 and shape[0] % self.mesh.size(over) == 0
        return (over if is_split else None, *(None for _ in shape[1:]))

    def _axes_of_rule(self, name: str) -> Axes:
        """Return the axes of the first rule that matches a name; none where no rule does."""
        return self.mesh.named(next((axes for glob, axes in self.rules.items() if _matches(glob, name)), []))

    def _of(self, axis: str | tuple[str, ...]) -> str:
        if self.mesh.size(axis) == self.mesh.num_devices:
            return ""
        return f" of sharding.mesh.{axis}" if isinstance(axis, str) else f" of sharding.mesh {' x '.join(axis)}"

    def check(self, names: Mapping[str, tuple[int, ...]]) -> None:
        """Check that every rule matches a parameter and that every large parameter is sharded.

        A rule for adapters need not match where their projections have none (`lora=none`, other targets).

        Raises:
            ConfigError: a rule without a match, or a replicated parameter above `sharding.max_replicated_elements`.
        """
        for glob in self.rules:
            if not any(_matches(glob, name) or _matches(_of_projections(glob), name) for name in names):
                raise ConfigError(
                    f"sharding={self.name}; rule {glob!r} matches no parameter. Names look like: "
                    f"{', '.join(sorted(names)[:4])}; correct the glob or remove the rule."
                )
        for name, shape in names.items():
            size, axes = math.prod(shape), self.axes(name, shape)
            is_claimed = any(axes) and (self.mesh.parts(axes) > 1 or self.mesh.num_devices == 1)
            if self.max_replicated and size > self.max_replicated and not is_claimed:
                raise ConfigError(
                    f"sharding={self.name} leaves {name} with {size:,} elements whole on every device (limit "
                    f"sharding.max_replicated_elements={self.max_replicated:,}); add a rule or raise the limit."
                )


def read_alone(sharding: ShardingConfig) -> ShardingConfig:
    """Return the table of weights that no step changes: on every device whole, or its share along `tensor`.

    A program that reads them for every token would gather what is split along `fsdp` each time that it is called.
    """
    rules = {glob: list(in_use(tuple(axes))) for glob, axes in sharding.rules.items()}
    return replace(sharding, rules=rules, max_replicated_elements=0)


def check_heads(mesh: Mesh, arch: Any) -> None:
    """Check that query and key/value heads divide evenly over the devices along `tensor`.

    Args:
        arch: a transformers config.

    Raises:
        ConfigError: they do not.
    """
    if mesh.tensor == 1:
        return
    text = arch.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or text.num_heads  # xLSTM's name
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % mesh.tensor or kv_heads % mesh.tensor:
        fits = [n for n in range(1, heads + 1) if heads % n == 0 and kv_heads % n == 0]
        raise ConfigError(
            f"sharding.mesh.tensor={mesh.tensor}; the model has {heads} heads and {kv_heads} heads of keys and values, "
            f"which do not divide by it; use sharding.mesh.tensor={' or '.join(map(str, fits))}."
        )


def batch_axes(ndim: int, *, rows_dim: int, mesh: Mesh) -> Axes:
    """Return the mesh axes of each dimension of a batch tensor: sharded by rows; vectors are replicated."""
    (rows,) = row_axes(mesh)
    return tuple(rows if dim == rows_dim and ndim > 1 else None for dim in range(ndim))


def _matches(glob: str, name: str) -> bool:
    own, other = name, next((name.replace(part, to) for part, to in SAME_PLACE.items() if part in name), name)
    return any(fnmatch.fnmatchcase(own, part) or fnmatch.fnmatchcase(other, part) for part in glob.split("|"))


def _of_projections(glob: str) -> str:
    """Return the glob of the weights whose adapters a rule shards; its other alternatives are left out."""
    parts = [part for part in glob.split("|") if part.endswith(ADAPTER_PARTS)]
    return "|".join(part.rpartition(".")[0] + ".weight" for part in parts)
