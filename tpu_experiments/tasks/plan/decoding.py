"""Plan the two programs that write answers (models/passes/generation.py): lower, compile, read what they cost."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import ChoiceConfig, DecodeConfig
from tpu_experiments.models.passes.generation import NEW, Bucket, Decoder, calls_of
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.objectives.base import writes_text
from tpu_experiments.planning.compiled import ITEM_BYTES, Compiled, Compilers, Planned, elements_of_chip, planned
from tpu_experiments.planning.decoding import Decoding
from tpu_experiments.planning.plan import ChipMemory, Program, chip_limit_gib
from tpu_experiments.runtime.lowered import Lowered
from tpu_experiments.runtime.sharding import check_heads, read_alone
from tpu_experiments.runtime.tracing import tracing_runtime
from tpu_experiments.tasks.plan.formulas import shapes_source

GROUPS = {"base weights": "weights", "batch": "cache", "activations and temporaries": "temporaries"}
"""Classes of a program's memory, and what they are called where answers are written."""


@dataclass(frozen=True)
class Submitted:
    """The two programs of some answers, lowered and handed to the compilers."""

    config: Config
    settings: DecodeConfig
    rows: int
    programs: tuple[Lowered, Lowered]
    futures: tuple[Future[Compiled], ...]
    merges: tuple[Lowered, ...] = ()
    """Programs of a run that make the copy of its weights, and that of their averages, compiled last; none where the
    weights are there."""

    @cached_property
    def each(self) -> list[Planned]:
        """Return what the compilers say of the programs, in their order; waits for them."""
        lowered = (*self.programs, *self.merges)
        compiled = [future.result() for future in self.futures]
        return [planned(p, c, hw=self.config.hw, trained=()) for p, c in zip(lowered, compiled, strict=True)]

    def programs_of_run(self, *, kept_gib: float) -> Iterator[Program]:
        """Yield the programs as those of a run that writes rollouts; arguments and errors as of `planned`."""
        for each in self.each:
            yield Program(
                name=each.name,
                stages=(),
                shape=" x ".join(map(str, each.shape)),
                compile_seconds=each.compiled.seconds,
                total_gib=each.memory.total + (kept_gib if each.name in ("read", "write") else 0.0),
                estimated_seconds=each.time.total_s if each.time else None,
                fingerprint=each.compiled.folder.name,
            )

    def planned(self, *, kept_gib: float = 0.0) -> Decoding:
        """Return the figures; waits for the compilers.

        Args:
            kept_gib: what else stays on a chip meanwhile: in a run, its weights and optimizer state.

        Raises:
            ConfigError: the compiler refused one for another reason than its HBM.
        """
        hw, settings = self.config.hw, self.settings
        assert hw.chip is not None, "hardware without a datasheet is refused before"
        read, write, *merges = self.each
        calls, per_call = calls_of(settings.max_new_tokens, tokens_per_call=settings.tokens_per_call)
        floor = bytes_of_chip(self.programs[1]) / (hw.chip.hbm_gb_per_second * 1e9)
        # No cycles are estimated for weights that are fetched while others are multiplied.
        token = max(floor, write.time.total_s / per_call) if write.time else None
        total = max(read.memory.total, write.memory.total)
        return Decoding(
            rows=self.rows,
            prompt_tokens=settings.prompt_tokens,
            new_tokens=settings.max_new_tokens,
            computed_tokens=calls * per_call,
            prefill_seconds=read.time.total_s if read.time else None,
            token_seconds=token,
            floor_seconds=floor,
            classes=grouped(write.memory),
            total_gib=total,
            beside_gib=total + kept_gib,
            limit_gib=chip_limit_gib(hw),
            num_devices=hw.num_devices,
            compile_seconds=sum(each.compiled.seconds for each in self.each),
            merge_seconds=sum(each.time.total_s for each in merges[:1] if each.time),
        )


def grouped(memory: ChipMemory) -> dict[str, float]:
    """Return GiB per chip of weights, cache and temporaries while tokens are written."""
    return {GROUPS.get(name, name): gib for name, gib in memory.classes.items()}


def bytes_of_chip(program: Lowered) -> int:
    """Return the bytes of a program's arguments on one chip: weights, and the cache of its rows."""
    return sum(elements_of_chip(each, mesh=program.mesh) * ITEM_BYTES[each.dtype] for each in program.arguments)


def submit_decoding(
    config: Config, settings: DecodeConfig, *, compilers: Compilers, folder: str, merges: Sequence[Lowered] = ()
) -> Submitted:
    """Lower the programs that write answers with a config's model, adapters merged, and start to compile them.

    Every chip has the whole model, or its share along `tensor`, and the cache of its own rows, whatever the table of
    `sharding=` is for training.

    Args:
        settings: `rows` is not null.
        folder: cache of compilations.
        merges: the programs that make the copy of a run's weights, and that of their averages, which are compiled too.

    Raises:
        ConfigError: the model writes no text, or prompt and answer are longer than it takes.
    """
    assert settings.rows is not None
    if not writes_text(config):
        raise ConfigError(
            f"task.decode.rows={settings.rows} with objective={config.objective.name}; such a model writes no text "
            "token by token; leave it out."
        )
    runtime = tracing_runtime(config.hw, sharding=read_alone(config.sharding))
    source = shapes_source(config)
    check_heads(runtime.mesh, source.config)
    calls, per_call = calls_of(settings.max_new_tokens, tokens_per_call=settings.tokens_per_call)
    limit, slots = getattr(source.config, "max_position_embeddings", None), settings.prompt_tokens + calls * per_call
    if limit is not None and slots > limit:
        raise ConfigError(
            f"task.decode.prompt_tokens={settings.prompt_tokens} with task.decode.max_new_tokens="
            f"{settings.max_new_tokens}; together they take {slots} tokens, and model={config.model.name} takes "
            f"{limit} (max_position_embeddings); use shorter ones."
        )
    module = build_frozen(source, lora=LoraConfig(r=0), trained={}, place=runtime.place)
    decoder = Decoder(
        module,
        runtime=runtime,
        choice=ChoiceConfig(do_sample=True, top_k=settings.top_k),
        num_rows=settings.rows,
        max_new_tokens=settings.max_new_tokens,
        tokens_per_call=settings.tokens_per_call,
        seed=0,
    )
    programs = lowered_decoding(decoder, length=settings.prompt_tokens, with_shape=1)
    futures = tuple(compilers.submit(program, hw=config.hw, folder=folder) for program in (*programs, *merges))
    return Submitted(config, settings, decoder.num_rows, programs, futures, tuple(merges))


def lowered_decoding(decoder: Decoder, *, length: int, with_shape: int = 0) -> tuple[Lowered, Lowered]:
    """Lower the reading of prompts of `length` tokens, and the writing of `decoder.tokens_per_call` tokens.

    Args:
        decoder: its runtime lowers programs instead of running them.
        with_shape: 1 where the temperature is an input of the programs, 2 where `top_p` is one as well.
    """
    runtime: Any = decoder.runtime
    bucket, rows = Bucket(decoder, length=length), decoder.num_rows
    more = {"shape": torch.empty(with_shape, device="meta")} if with_shape else {}
    prompts = {"ids": _ids(rows, length), "pads": _ids(rows), "uniforms": torch.empty(rows, device="meta"), **more}
    kept: dict[str, Tensor] = {}

    def prefill(sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made = bucket.prefill(sent)
        kept.update({n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in made.items() if n not in NEW})
        return made

    def write(sent: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        bucket.state = {name: sent[name] for name in kept}
        return bucket.next_states({name: tensor for name, tensor in sent.items() if name not in kept})

    with torch.no_grad():
        read: Lowered = runtime.lower(prefill, name="read", batch=prompts, rows_dim=0, as_run=bucket.prefill_program)
        uniforms = {"uniforms": torch.empty(rows, decoder.tokens_per_call, device="meta"), **more}
        written: Lowered = runtime.lower(
            write,
            name="write",
            batch=uniforms | kept,
            rows_dim=0,
            renewed=lambda out: [(bucket.state[name], tensor) for name, tensor in out[0].items()],
            as_run=bucket.decode_program,
        )
    return replace(read, has_split_results=True), written


def _ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")
