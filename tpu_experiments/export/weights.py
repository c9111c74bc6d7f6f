"""The weights that a trained model computes with, base and adapters in one: tensor by tensor, in float32."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import ALL_LINEAR, LoraConfig, is_target, lora_of
from tpu_experiments.models.adapters.lora import (
    MAGNITUDE,
    A,
    B,
    lengths_of_rows,
    scale_of,
    shared_parameters,
)
from tpu_experiments.models.adapters.low_rank_qat import decoded
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.parts.named import Named
from tpu_experiments.models.sources.buffers import persistent_buffers, shapes_of_buffers
from tpu_experiments.models.sources.frozen import TrainedModel
from tpu_experiments.runtime.stacked import EMBEDDING_PARTS, adapter_of


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
        """Count one adapted tensor of float32."""
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
    parted: str = ""
    """Why no set of weights is the model, as a sentence; empty where one is."""

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
    model = TrainedModel(source, lora, trained, reduced_with_seed, origin)
    plain = source.empty()
    empty, buffers = dict(plain.named_parameters()), persistent_buffers(plain)
    own = [name for name in empty if name not in trained]
    model.require_whole(own)
    parted = _parted(model, plain)

    def read(effect: Effect | None, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        if parted:
            raise ConfigError(parted)
        bases = source.weights(own)
        for name in empty:
            if name in trained and name not in (*model.rows, *model.adapted, model.embedding):
                yield name, model.finite(name)
                continue
            base, merged = _begun_and_ended(model, Named(name, model.finite(name)) if name in trained else next(bases))
            if effect is not None and (name in model.adapted or merged is not base):
                effect.add(base, merged, dtype=dtype)
            del base  # otherwise it stays allocated while the next one is read
            yield name, merged
            del merged
        yield from buffers.items()

    held = {name: parameter.detach() for name, parameter in empty.items()} | shapes_of_buffers(buffers)
    is_transposed = any(model.linears.values())
    return WholeModel(
        source.export_config, type(plain).__name__, held, _linears(model, plain), is_transposed, read, parted
    )


def _parted(model: TrainedModel, plain: nn.Module) -> str:
    """Return why no weights are those of an adapted embedding and of the head that is tied to it."""
    if model.embedding not in shared_parameters(plain) or model.is_shared:
        return ""
    return (
        f"{model.origin or 'the adapter'}; it adapts {model.embedding.removesuffix('.weight')} and not the head, which "
        "is the same matrix (tie_word_embeddings), so that no merged model has both; use it beside its base "
        "(task.forms=[peft]), or train one with lora.ensure_weight_tying=true."
    )


def _linears(model: TrainedModel, plain: nn.Module) -> frozenset[str]:
    """Return the names of `WholeModel.linears`; of rounded weights those that were trained so."""
    names = {f"{n}.weight" for n, part in plain.named_modules() if type(part) is nn.Linear and is_target(n, ALL_LINEAR)}
    return frozenset(names & set(model.adapted) if model.grid is not None and model.adapted else names)


def _begun_and_ended(model: TrainedModel, item: Named) -> tuple[Tensor, Tensor]:
    """Return a weight as training began with it, and as it ended; of one without an adapter, the same twice."""
    if (found := model.on_grid(item, dtype=model.source.dtype)) is not None:
        ended, begun = (decoded(*codes, dtype=torch.float32) for codes in found)
        return begun, ended
    base = _base_of(model, item)
    if item.name in model.adapted:
        return base, _merged(model, base, item.name)
    if item.name == model.embedding:
        prefix = item.name.removesuffix("weight")
        a, b = (model.finite(prefix + part) for part in EMBEDDING_PARTS)
        scale = scale_of(lora_of(model.lora, prefix.removesuffix(".")))
        return base, torch.addmm(base, a.t(), b.t(), alpha=scale)
    return base, model.with_rows(Named(item.name, base)).tensor


def _base_of(model: TrainedModel, item: Named) -> Tensor:
    """Return a weight as it is trained over, in float32: reduced, and of a quantised base its decoded codes."""
    item = model.reduced(item)
    if model.format is None or item.name not in model.quantised:
        return item.tensor.to(torch.float32)
    return model.format.decode(model.format.quantise(item.tensor), dtype=torch.float32)


def _merged(model: TrainedModel, base: Tensor, name: str) -> Tensor:
    """Return a weight with its adapter, or that of each expert with its own."""
    prefix, has_lengths = f"{adapter_of(name)}.", model.lora.dora
    scale = scale_of(lora_of(model.lora, name.removesuffix(".weight")))
    parts = {part: model.finite(prefix + part) for part in (A, B, *([MAGNITUDE] if has_lengths else []))}
    weight = base.mT if model.adapted[name] else base
    merged = (torch.baddbmm if base.ndim == 3 else torch.addmm)(weight, parts[B], parts[A], alpha=scale)
    if has_lengths:
        norms = lengths_of_rows(weight, parts[A], parts[B], scale=scale)
        merged *= (parts[MAGNITUDE] / norms)[:, None]
    return merged.mT.contiguous() if model.adapted[name] else merged
