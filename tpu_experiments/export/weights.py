"""The weights that a trained model computes with, base and adapters in one: tensor by tensor, in float32."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from tpu_experiments.config.model_schema import ALL_LINEAR, LoraConfig, is_target
from tpu_experiments.models.adapters.lora import (
    MAGNITUDE,
    A,
    B,
    adapted_weights,
    adapter_weights,
    folded_weight,
    lengths_of_rows,
    scale_of,
)
from tpu_experiments.models.adapters.low_rank_qat import decoded, grid_of
from tpu_experiments.models.adapters.quantised import format_of, quantised_shapes
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.parts.named import Named
from tpu_experiments.models.sources.buffers import persistent_buffers, shapes_of_buffers
from tpu_experiments.models.sources.frozen import describe_trained, require_finite_parts, require_whole
from tpu_experiments.storage.tensors import require_finite


@dataclass
class Effect:
    """What the adapters change of the weights that are written."""

    adapted: int = 0
    """Tensors with an adapter."""
    changed: int = 0
    """Those of them that differ from the base in the data type of the export."""
    asked: float = 0.0
    """Squared Frobenius norm of the adapters' changes, over all tensors."""
    lost: float = 0.0
    """That of the part of it that rounding to the data type of the export takes away."""

    def add(self, base: Tensor, merged: Tensor, *, dtype: torch.dtype) -> None:
        """Count one adapted tensor of float32, (N, K)."""
        written = merged.to(dtype)
        self.adapted += 1
        self.changed += int(not torch.equal(written, base.to(dtype)))
        self.asked += float((merged - base).square().sum(dtype=torch.float64))
        # What rounding does to the base alone is no loss of the change.
        change = written.to(torch.float32) - base.to(dtype).to(torch.float32)
        self.lost += float((change - (merged - base)).square().sum(dtype=torch.float64))

    def facts(self) -> dict[str, float]:
        """Return the counts, and the part of the adapters' change that rounding takes away (a ratio of norms)."""
        lost = math.sqrt(self.lost / self.asked) if self.asked else 0.0
        return {"adapted": self.adapted, "changed": self.changed, "lost_by_rounding": lost}


@dataclass(frozen=True)
class WholeModel:
    """A trained model as one set of weights under Hugging Face's names, which may be read any number of times."""

    config: PretrainedConfig
    architecture: str
    """Name of its class in transformers."""
    shapes: Mapping[str, Tensor]
    """Empty tensors on the meta device, in the order in which `tensors` yields; a tied weight is there once.

    Buffers that a checkpoint holds are of torch's class Buffer, and keep their data type in files."""
    linears: frozenset[str]
    """Names of the weights of Linear modules inside the layers, the ones that quantised forms quantise."""
    is_transposed: bool
    """Whether adapted weights are (in, out), as in GPT-2's Conv1D."""
    read: Callable[[Effect | None, torch.dtype], Iterator[tuple[str, Tensor]]] = field(repr=False)

    def tensors(
        self, *, effect: Effect | None = None, dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name and float32 tensor on the host, one in memory at a time, and then the buffers as they are.

        Args:
            effect: receives what the adapters change.
            dtype: data type of the export, for `effect` alone.
        """
        return self.read(effect, dtype)


def whole_model(
    source: HuggingFaceModel,
    *,
    lora: LoraConfig,
    trained: Mapping[str, Tensor],
    reduced_with_seed: int | None = None,
    origin: str = "",
) -> WholeModel:
    """Return the model with its adapters merged: W + scale B A; with DoRA its rows in their trained lengths.

    Of rounded weights (`model.linear=lr_qat`) these are the trained scales times the integers, in float32.

    The base is what was trained over: rounded to the run's data type, and of a quantised base the decoded codes.

    Args:
        lora: config of the adapters in `trained`; rank 0 where it has none.
        trained: host tensors as for `models.frozen.build_frozen`.
        reduced_with_seed: seed of a run with `lora.init=pissa`, whose checkpoints hold A and B for the reduced base.
        origin: source of `trained`, for error messages.

    Raises:
        ConfigError: the tensors are not of this model, are an incomplete set, or hold NaN or infinite values.
    """
    module, shapes = describe_trained(source, lora=lora, trained=trained, origin=origin)
    adapted, quantised = adapted_weights(module), set(quantised_shapes(module))
    plain = source.empty()
    empty, buffers = dict(plain.named_parameters()), persistent_buffers(plain)
    own = [name for name in empty if name not in trained]
    require_whole(own, trained=trained, lora=lora, origin=origin)
    source.require_weights({name: shapes[name] for name in own})
    format, grid = format_of(source.model), grid_of(source.model)

    def on_grid(item: Named) -> tuple[Tensor, Tensor]:
        """Return a rounded weight as training began with it, and as it ended."""
        assert grid is not None
        require_finite_parts(item.name, trained, place=origin)
        trained_codes, first_codes = folded_weight(item, trained, lora=lora, grid=grid, dtype=source.dtype)
        return decoded(*first_codes, dtype=torch.float32), decoded(*trained_codes, dtype=torch.float32)

    def begun_and_ended(item: Named) -> tuple[Tensor, Tensor]:
        """Return a weight as training began with it, and as it ended; of one without an adapter, the same twice."""
        if item.name in adapted and grid is not None:
            return on_grid(item)
        base = base_of(item)
        if item.name not in adapted:
            return base, base
        is_transposed = adapted[item.name]
        return base, _merged(base, item.name, lora=lora, trained=trained, is_transposed=is_transposed, origin=origin)

    def base_of(item: Named) -> Tensor:
        if reduced_with_seed is not None and item.name in adapted:
            item = next(adapter_weights(item, lora=lora, seed=reduced_with_seed, is_transposed=adapted[item.name]))
        if format is None or item.name not in quantised:
            return item.tensor.to(torch.float32)
        return format.decode(format.quantise(item.tensor), dtype=torch.float32)

    def read(effect: Effect | None, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        bases = source.weights(own)
        for name in empty:
            if name in trained:
                require_finite(trained[name], name=name, place=origin)
                yield name, trained[name].to(torch.float32)
                continue
            base, merged = begun_and_ended(next(bases))
            if effect is not None and name in adapted:
                effect.add(base, merged, dtype=dtype)
            del base  # otherwise it stays allocated while the next one is read
            yield name, merged
            del merged
        yield from buffers.items()

    linears = {
        f"{n}.weight" for n, part in plain.named_modules() if type(part) is nn.Linear and is_target(n, ALL_LINEAR)
    }
    if grid is not None and adapted:
        linears = {name for name in linears if name in adapted}
    held = {name: parameter.detach() for name, parameter in empty.items()} | shapes_of_buffers(buffers)
    return WholeModel(source.export_config, type(plain).__name__, held, frozenset(linears), any(adapted.values()), read)


def _merged(
    base: Tensor, name: str, *, lora: LoraConfig, trained: Mapping[str, Tensor], is_transposed: bool, origin: str
) -> Tensor:
    prefix, scale = name.removesuffix("weight"), scale_of(lora)
    parts = {part: trained[prefix + part].to(torch.float32) for part in (A, B)}
    if lora.dora:
        parts[MAGNITUDE] = trained[prefix + MAGNITUDE].to(torch.float32)
    for part, tensor in parts.items():
        require_finite(tensor, name=prefix + part, place=origin)
    weight = base.t() if is_transposed else base
    merged = torch.addmm(weight, parts[B], parts[A], alpha=scale)
    if lora.dora:
        norms = lengths_of_rows(weight, parts[A], parts[B], scale=scale)
        merged *= (parts[MAGNITUDE] / norms)[:, None]
    return merged.t().contiguous() if is_transposed else merged
