"""The writer of every form, and the readers that its files are read back with."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from huggingface_hub.repocard import metadata_load
from yaml import YAMLError

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.task_schema import ExportTaskConfig
from tpu_experiments.export.calibrated import TrainedGrid
from tpu_experiments.export.full import write_model
from tpu_experiments.export.generation import end_ids
from tpu_experiments.export.gguf import ADAPTER, Metadata, file_name, is_exact, write_adapter_file, write_models
from tpu_experiments.export.peft import DECODER_TASK, TASK_TYPES, without_start, write_adapter
from tpu_experiments.export.quantised import (
    Int8Layout,
    Layout,
    NF4Layout,
    Quantised,
    TernaryLayout,
    chosen_weights,
    write_quantised,
)
from tpu_experiments.export.weights import Effect
from tpu_experiments.models.adapters.low_rank_qat import grid_of, input_settings
from tpu_experiments.runtime.stacked import LEARNT_SCALE, is_adapter_part, is_of_linear
from tpu_experiments.storage import paths
from tpu_experiments.storage.gguf.llama_cpp import LlamaCppModel
from tpu_experiments.tasks.export.readers import Reader, TransformersModel
from tpu_experiments.tasks.export.rounding import Rounding, in_codes, in_dtype, in_gguf, unchanged
from tpu_experiments.tasks.export.subject import Subject

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Copy:
    """One file, or one set of files, that holds the model, and how it is read back."""

    label: str
    """Form, or data type of a GGUF file."""
    read: Callable[[str, torch.dtype], Reader]
    """Reads the form's folder, on this machine, for arithmetic in a data type."""
    is_exact: bool = False
    """Whether it holds every weight in float32."""
    rounded: Rounding | None = None
    """The form's rounding; None where it cannot be computed from a weight alone."""
    rounds_inputs: bool = False
    """Whether its reader rounds the inputs of products."""


@dataclass(frozen=True)
class Written:
    """What a writer wrote."""

    digests: dict[str, str]
    """SHA-256 of the files of weights, by name."""
    copies: list[Copy]
    facts: dict[str, object] = field(default_factory=dict)
    """Further facts for export.json."""
    notes: list[str] = field(default_factory=list)
    """Whole sentences on what is particular of the files, for the card and export.json."""


def write_peft(folder: str, subject: Subject) -> Written:
    """Write the adapter in PEFT's layout, for the base that it was trained over."""
    origin, source = subject.origin, subject.source
    digests = write_adapter(
        folder,
        parameters={source.outer_name(name): tensor for name, tensor in origin.trained.items()},
        initial={source.outer_name(name): tensor for name, tensor in subject.taken_out().items()},
        lora=origin.lora,
        base_path=subject.base_path,
        revision=origin.config.model.revision,
        is_transposed=subject.model.is_transposed,
        tokenizer=subject.tokenizer,
        generation=subject.generation,
        task_type=TASK_TYPES.get(source.head, DECODER_TASK),
        tied=source.tied_names,
    )

    def read(folder: str, dtype: torch.dtype) -> Reader:
        path = subject.base_path  # in a bucket: a base that was drawn at random, beside its run
        with paths.local_copy(path) if paths.is_remote(path) else nullcontext(path) as base:
            return TransformersModel(
                base,
                adapter=folder,
                revision=origin.config.model.revision,
                dtype=dtype,
                base=source.model,
                labels=subject.labels,
            )

    base = origin.config.model.base
    # No library holds a base in int8 as training did, so it is read unquantised, and differs by that rounding.
    copy = Copy("peft", read, is_exact=base != "int8", rounded=unchanged if base != "int8" else None)
    return Written(digests, [copy], {"base": base})


def _transformers(folder: str, dtype: torch.dtype, *, labels: Mapping[int, str] | None = None) -> Reader:
    return TransformersModel(folder, dtype=dtype, labels=labels)


def write_merged(folder: str, subject: Subject) -> Written:
    """Write the whole model in Hugging Face's layout, adapters merged in float32 and rounded once.

    Raises:
        ConfigError: no adapted weight differs from the base after rounding.
    """
    effect, model, dtype = Effect(), subject.model, subject.dtype
    digests = write_model(
        folder,
        tensors=model.tensors(effect=effect, dtype=dtype),
        shapes=model.shapes,
        config=model.config,
        architecture=model.architecture,
        dtype=dtype,
        tokenizer=subject.tokenizer,
        max_shard_bytes=subject.max_shard_bytes,
        generation=subject.generation,
    )
    require_effect(effect, subject)
    # A rounding that falls to the other side moves a log-probability by more than the order of a sum does.
    is_exact = dtype == torch.float32 and subject.source.model.linear == "plain"
    read = partial(_transformers, labels=subject.labels)
    copy = Copy("merged", read, is_exact=is_exact, rounded=in_dtype(dtype))
    notes = []
    if input_settings(subject.source.model) is not None:
        notes.append(
            "In training the inputs of the adapted weights were rounded to 8 bits. These files cannot say so, and what "
            "reads them computes with inputs that are not rounded; those of the form `lr_qat` do."
        )
    return Written(digests, [copy], {"dtype": str(dtype).removeprefix("torch."), "merge": effect.facts()}, notes)


def write_gguf(folder: str, subject: Subject) -> Written:
    """Write a GGUF file of each data type, adapters merged in float32, and beside them the adapter alone.

    Raises:
        ConfigError: llama.cpp has no such architecture, RoPE or tokenizer.
    """
    task, model = subject.task, subject.model
    assert isinstance(task, ExportTaskConfig), "no other task writes GGUF"
    types = list(dict.fromkeys(task.gguf_types))
    name = (task.run or task.adapter or str(subject.config.name)).rstrip("/").rpartition("/")[2]
    metadata = Metadata(name, subject.base_path, license=_license(subject))
    written = write_models(
        folder,
        model=model,
        tokenizer=subject.tokenizer,
        types=types,
        metadata=metadata,
        ends=end_ids(subject.generation),
    )
    digests = dict(written.digests)
    for note in written.notes:
        log.warning("gguf: %s", note)
    reason = _no_adapter(subject)
    if not reason:
        parameters, lora = without_start(subject.origin.trained, initial=subject.taken_out(), lora=subject.origin.lora)
        digests |= write_adapter_file(
            folder,
            config=model.config,
            architecture=model.architecture,
            parameters=parameters,
            lora=lora,
            metadata=metadata,
        )
    copies = [
        Copy(
            kind,
            _llama_cpp(kind, drops_blank=written.doubles_blank),
            is_exact=is_exact(kind, model.architecture),
            rounded=in_gguf(kind),
            rounds_inputs=not is_exact(kind, model.architecture),
        )
        for kind in types
    ]
    facts: dict[str, object] = {
        "base": subject.origin.config.model.base,
        "adapter": reason or ADAPTER,
        "smaller": _quantise_command(types),
    }
    return Written(digests, copies, facts, written.notes)


def _llama_cpp(kind: str, *, drops_blank: bool) -> Callable[[str, torch.dtype], Reader]:
    return lambda folder, dtype: LlamaCppModel(paths.join(folder, file_name(kind)), drops_blank=drops_blank)


def _no_adapter(subject: Subject) -> str:
    """Return why no adapter is written; empty where one is."""
    lora = subject.origin.lora
    if lora.r == 0:
        return "not written: all weights were trained"
    if lora.dora:
        return "not written: llama.cpp has no DoRA"
    if any(not is_adapter_part(name) for name in subject.origin.trained):
        return "not written: modules were trained whole, which llama.cpp's adapters do not hold"
    if lora.target_parameters:
        return "not written: experts have adapters of their own, which are not written for llama.cpp here"
    if any(not is_of_linear(name) for name in subject.origin.trained):
        return "not written: it has an adapter or rows of the embedding, and adapters of Linears alone are written"
    if lora.init == "loftq":
        return "not written: LoftQ's adapter is for the codes of NF4, which no GGUF file holds"
    return ""


def _quantise_command(types: Sequence[str]) -> str:
    """Return llama.cpp's command for its K-quants, from the best file there is."""
    source = next((kind for kind in ("f16", "bf16", "f32") if kind in types), "q8_0")
    option = "--allow-requantize " if source == "q8_0" else ""
    return f"llama-quantize {option}{file_name(source)} {file_name('Q4_K_M')} Q4_K_M"


def _license(subject: Subject) -> str | None:
    """Return the licence in the model card of the base, where a local folder has one."""
    file = None if subject.source.folder is None else subject.source.folder / "README.md"
    if file is None or not file.exists():
        return None
    try:
        found = (metadata_load(file) or {}).get("license")
    except (ValueError, YAMLError):
        return None
    return found if isinstance(found, str) else None


def require_effect(effect: Effect, subject: Subject) -> None:
    """Refuse a merge that is the base bit for bit.

    Raises:
        ConfigError: the adapters change no weight.
    """
    if effect.adapted and not effect.changed:
        raise ConfigError(
            f"{subject.origin.text}; merged and rounded to {str(subject.dtype).removeprefix('torch.')}, all "
            f"{effect.adapted} adapted weights are the base's bit for bit: the adapter is zero or too small; train "
            "longer, or set task.dtype=float32."
        )


def write_layout(
    folder: str, layout: Layout, subject: Subject, *, effect: Effect | None = None, holds_all: bool = False
) -> Quantised:
    """Write the whole model with its layers' weights as the layout stores them; settings are the subject's.

    Args:
        effect: receives what the adapters changed, which must be something.
        holds_all: whether the layout must hold every such weight.

    Raises:
        ConfigError: no weight can be quantised, or none of the adapted ones differs from the base.
    """
    made = write_quantised(
        folder,
        layout,
        model=subject.model,
        dtype=subject.dtype,
        tokenizer=subject.tokenizer,
        max_shard_bytes=subject.max_shard_bytes,
        generation=subject.generation,
        effect=effect,
        holds_all=holds_all,
    )
    if effect is not None:
        require_effect(effect, subject)
    return made


def write_codes(folder: str, subject: Subject, *, form: str) -> Written:
    """Write the whole model with its layers' weights in int8 or NF4, adapters merged in float32 before.

    Raises:
        ConfigError: no adapted weight differs from the base after rounding, or no weight can be quantised.
    """
    effect, layout = Effect(), Int8Layout() if form == "int8" else NF4Layout(subject.dtype)
    made = write_layout(folder, layout, subject, effect=effect)
    base = subject.origin.config.model.base
    facts: dict[str, object] = {
        "dtype": str(subject.dtype).removeprefix("torch."),
        "quantised": made.quantised,
        "not_quantised": made.left,
        "merge": effect.facts(),
    }
    notes = [made.note] if made.note else []
    if base != "dense":
        notes.append(f"The base was {base} in training: base and adapter were added up and quantised again.")
    format, names = layout.format, chosen_weights(subject.model, layout)
    rounded = in_codes(
        lambda weight: format.decode(format.quantise(weight), dtype=torch.float32), names, others=subject.dtype
    )
    return Written(made.digests, [Copy(form, _transformers, rounded=rounded)], facts, notes)


def write_ternary(folder: str, subject: Subject) -> Written:
    """Write the whole model with the ternary weights that it computes with, in 2 bits each.

    Raises:
        ConfigError: a weight of the layers has a number of output features that 4 does not divide.
    """
    dtype = subject.source.dtype
    made = write_layout(folder, TernaryLayout(dtype), subject, holds_all=True)
    facts = {"dtype": str(subject.dtype).removeprefix("torch."), "quantised": made.quantised}
    rounded = in_codes(
        lambda weight: weight.to(dtype).to(torch.float32), subject.model.linears, others=subject.dtype
    )  # the model rounds to ternary weights itself, of what it is given in training's data type
    return Written(made.digests, [Copy("bitnet", _transformers, rounded=rounded, rounds_inputs=True)], facts)


def write_rounded(folder: str, subject: Subject) -> Written:
    """Write the whole model with the integers that it was trained to compute with, and their scales.

    Raises:
        ConfigError: no integer differs from those that training began with.
    """
    effect, settings, origin = Effect(), subject.source.model, subject.origin
    grid = grid_of(settings)
    assert grid is not None, "`subject_of` refuses other models"
    names = {name: f"{name.removesuffix('weight')}{LEARNT_SCALE}" for name in subject.model.linears}
    scales, inputs = {name: origin.trained[own] for name, own in names.items()}, input_settings(settings)
    layout = TrainedGrid(grid, scales=scales, inputs=inputs)
    made = write_layout(folder, layout, subject, effect=effect, holds_all=True)
    facts: dict[str, object] = {
        "dtype": str(subject.dtype).removeprefix("torch."),
        "quantised": made.quantised,
        "bits": grid.bits,
        "group": grid.group,
        "merge": effect.facts(),
    }
    notes = []
    if inputs is not None:
        notes.append(
            "As in training, the inputs of these weights are rounded to 8 bits, each token between its least and its "
            "greatest feature (`input_activations` in config.json). transformers does so unless it is given "
            "`dequantize=True`."
        )
    rounded = in_codes(lambda weight: weight, subject.model.linears, others=subject.dtype)
    copy = Copy(layout.form, _transformers, rounded=rounded, rounds_inputs=inputs is not None)
    return Written(made.digests, [copy], facts, notes)


Writer = Callable[[str, Subject], Written]
"""Writes a form into a local folder."""
WRITERS: dict[str, Writer] = {
    "peft": write_peft,
    "merged": write_merged,
    "gguf": write_gguf,
    "int8": partial(write_codes, form="int8"),
    "nf4": partial(write_codes, form="nf4"),
    "bitnet": write_ternary,
    "lr_qat": write_rounded,
}
"""By form, in the order of `config.task_schema.FORMS`."""
