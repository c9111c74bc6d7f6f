"""Warm start of a new run from another run's checkpoint or export, or from a PEFT LoRA adapter.

The source is verified against its checksums (COMMIT.json of a checkpoint, result.json of an export) and compared with
the new run before anything is created. The new run's own checkpoints record it; once one exists, the source is not read
again.
"""

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn

from tpu_experiments.checkpoint.manifest import COMMIT, folder_name, steps_in
from tpu_experiments.checkpoint.proof import read_model
from tpu_experiments.checkpoint.reading import PIECE_BYTES, Groups, size, without_values
from tpu_experiments.checkpoint.state import OPTIMIZER, PARAMETERS, averaged, flat, place_on_device, require_tensors
from tpu_experiments.checkpoint.store import latest_progress, read_step
from tpu_experiments.config.commands import override_of, typed
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import identity
from tpu_experiments.config.model_schema import OF_VOCABULARY, PATTERNS, LoraConfig, lora_of, tokens_of
from tpu_experiments.config.schema import Config, TrainerConfig
from tpu_experiments.export.full import MODEL
from tpu_experiments.export.peft import ADAPTER_CONFIG, ADAPTER_FILE
from tpu_experiments.export.reading import read_adapter, require_rounded_alike
from tpu_experiments.models.adapters.lora import fingerprint, scale_of
from tpu_experiments.models.huggingface import CLASSIFIER, head_parameters
from tpu_experiments.models.sources.build import BuiltModel
from tpu_experiments.objectives.base import model_source, objective_class
from tpu_experiments.optim.base import State
from tpu_experiments.optim.updates import updates_of
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.runtime.stacked import EMBEDDING_PARTS, hugging_face_names
from tpu_experiments.storage import paths
from tpu_experiments.storage.paths import read_range
from tpu_experiments.storage.retry import explain_storage_errors
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.storage.tensors import group_in

log = logging.getLogger(__name__)
OF_THE_BASE = ("model._target_", "model.path", "model.revision", "model.init", "model.size")
"""Keys that identify the base weights of an adapter, and the architecture of a fully trained model."""
MAX_SHOWN = 8
"""Largest number of patterns of an adapter that a message writes out."""
OF_THE_CODES = {"model.base": "dense", "model.base_double_quant": True}
"""Further such keys of LoftQ's adapters, which start as what the base's codes lost; with their defaults."""
OF_THE_GRID = {"model.linear": "plain", "model.linear_bits": 4, "model.linear_group": 0}
"""Further such keys of adapters, whose unit is that of the rounded weights, if they are; with their defaults."""
DRAWN = ("model.arch", "model.tiny_arch")
"""Further such keys if the weights are drawn at random (with an adapter, `seed` is compared as well)."""


@dataclass(frozen=True)
class StartPoint:
    """Verified source of a warm start.

    It is found before anything is created, and its tensors are read once the run's own are on the device.
    """

    run: str
    """`start.run` as given on the command line."""
    kind: str
    """`checkpoint`, `adapter` or `model`."""
    place: str
    """Folder of the tensors."""
    take: str
    """`start.take`: `weights` or `all`."""
    sha256: str
    """SHA-256 of a checkpoint's COMMIT.json (which lists those of its files), of an adapter's file of tensors, or, for
    a model of several files, of their concatenated digests."""
    step: int | None = None
    """Step of a checkpoint; None for an export."""
    name: str | None = None
    """Name of the source run; None for an adapter without a run."""
    data: dict[str, str] | None = None
    """Audit hashes of the source's training data; None if unknown."""
    start: dict[str, Any] | None = None
    """Lineage of the source's own warm start; None if it had none."""

    def lineage(self) -> dict[str, Any]:
        """Return JSON-ready values for result.json, provenance.json and the run's checkpoints."""
        return asdict(self)


def find_start(config: Config, module: nn.Module) -> StartPoint | None:
    """Find, verify and compare with the run the source in `start.run`; return None if that is null.

    Args:
        module: the run's model on the meta device, with its adapters.

    Raises:
        ConfigError: the source is missing, damaged, the run itself, or of another model, rank or (with
            `start.take=all`) optimizer.
    """
    run = config.start.run
    if run is None:
        return None
    with explain_storage_errors(run):
        folder = RunFolder.at(paths.absolute(run))
        stored = folder.stored_identity()
        if paths.absolute(folder.path()) == paths.absolute(RunFolder.of(config).path()):
            raise ConfigError(f"start.run={run}; it is this very run, which resumes by itself; leave start.run out.")
        if stored is None:
            return _adapter_point(config, module, folder=run)
        _require_same_model(stored, config, run=run)
        point = _checkpoint_or_export(config, folder, stored=stored)
        _require_tensors(point, config, module)
        log.info("warm start from %s: %s", run, lineage_text(point.lineage()))
        return point


def lineage_text(lineage: Mapping[str, Any]) -> str:
    """Describe a lineage (`StartPoint.lineage`) in words."""
    what = "its adapter" if lineage["kind"] == "adapter" else "its model"
    if lineage["kind"] == "checkpoint":
        what = f"its checkpoint of step {lineage['step']:,}"
    taken = "weights and the optimizer's state" if lineage["take"] == "all" else "weights alone"
    return f"{what} ({taken}; SHA-256 {lineage['sha256'][:16]})"


def load_start(
    point: StartPoint,
    model: BuiltModel,
    *,
    parameters: dict[str, Tensor],
    state: State,
    runtime: Runtime,
    max_held_bytes: float,
) -> dict[str, str]:
    """Replace the run's tensors by those of the source, and return their fingerprints by parameter name.

    With `take=weights` the optimizer state is left unchanged.

    Args:
        max_held_bytes: bytes above which a source is read tensor by tensor.

    Raises:
        ConfigError: the source changed since `find_start` verified it, or holds NaN or infinite values.
    """
    marks: dict[str, str] = {}

    def restore(groups: Groups) -> None:
        taken = {group: tensors for group, tensors in groups.items() if group == OPTIMIZER}
        found = groups[PARAMETERS] if point.take == "all" else averaged(groups)
        lacking = _head_of(model.module, model.source.head).difference(found)
        marks.update({name: model.fingerprints[name] for name in lacking})
        place_on_device(
            {PARAMETERS: _FingerprintedTensors(found, marks), **taken},
            parameters=parameters,
            state=state if point.take == "all" else {},
            place=runtime.place,
            order=[name for name in model.order if name not in lacking],
            source=point.place,
        )

    with explain_storage_errors(point.run), _read_errors_as_sentences(point.run, point.place):
        if point.kind == "checkpoint":
            assert point.step is not None, "`_checkpoint_or_export` gives it"
            if _digest([paths.join(point.place, COMMIT)]) != point.sha256:
                raise ValueError(f"{COMMIT} was changed since this run verified it")
            parent = point.place.rpartition("/")[0]
            read_step(parent, point.step, lambda _, groups: restore(groups), max_held_bytes=max_held_bytes)
        elif point.kind == "adapter":
            if _digest([paths.join(point.place, ADAPTER_FILE)]) != point.sha256:
                raise ValueError(f"{ADAPTER_FILE} was changed since this run verified it")
            frozen = _frozen_names(model.module)
            tensors = read_adapter(point.place, has_head=True).tensors
            restore({PARAMETERS: {name: tensor for name, tensor in tensors.items() if name not in frozen}})
        else:
            restore({PARAMETERS: read_model(point.place, max_held_bytes=max_held_bytes)})
    return marks


class _FingerprintedTensors(Mapping[str, Tensor]):
    """View of tensors in float32 that records each one's fingerprint in `marks` when it is accessed."""

    def __init__(self, tensors: Mapping[str, Tensor], marks: dict[str, str]) -> None:
        self._tensors, self._marks = tensors, marks

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name].to(torch.float32)
        self._marks[name] = fingerprint(tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _checkpoint_or_export(config: Config, folder: RunFolder, *, stored: Mapping[str, Any]) -> StartPoint:
    """Return the requested or newest checkpoint of a run, or its export if it has no checkpoint.

    Raises:
        ConfigError: there is neither, the export is damaged or lacks the optimizer state asked for, or a PiSSA
            checkpoint does not suit this run's `lora.init`.
    """
    start, checkpoints = config.start, folder.path("checkpoints")
    step = start.step
    found = latest_progress(checkpoints, before=None if step is None else step + 1)
    if step is not None and (found is None or found[0] != step):
        there = steps_in(checkpoints)
        raise ConfigError(
            f"start.step={step}; {checkpoints} has no complete checkpoint of that step"
            f"{f', and folders of {_listed(there)}' if there else ''}; name one of them, or leave start.step out."
        )
    own: dict[str, Any] = {"run": str(start.run), "take": start.take, "name": folder.name}
    if config.lora.r > 0 and stored.get("lora.init") == "pissa" and (found is None or config.lora.init != "pissa"):
        raise ConfigError(_pissa_refusal(stored, folder))
    if found is not None:
        place = paths.join(checkpoints, folder_name(found[0]))
        data, before = found[1].get("data"), found[1].get("start")
        sha256 = _digest([paths.join(place, COMMIT)])
        return StartPoint(kind="checkpoint", place=place, step=found[0], sha256=sha256, data=data, start=before, **own)
    kind = "adapter" if config.lora.r > 0 else "model"
    place = folder.path(kind)
    if not paths.exists(paths.join(place, ADAPTER_CONFIG if kind == "adapter" else "config.json")):
        raise ConfigError(
            f"start.run={start.run}; it has no complete checkpoint and no {kind}/; let it train until its first "
            "checkpoint, or name another run."
        )
    if start.take == "all":
        raise ConfigError(
            f"start.take=all; {folder.path()} has no complete checkpoint, and {kind}/ holds no optimizer state; use "
            "start.take=weights."
        )
    result = folder.finished() or {}
    names = [ADAPTER_FILE] if kind == "adapter" else sorted(n for n in paths.list_names(place) if group_in(n) == MODEL)
    digests = {name: _digest([paths.join(place, name)]) for name in names}
    _require_proven(digests, (result.get("proof") or {}).get("sha256"), place=place, run=str(start.run))
    whole = digests[names[0]] if len(names) == 1 else hashlib.sha256("".join(digests.values()).encode()).hexdigest()
    data, before = result.get("data_audit"), result.get("start")
    return StartPoint(kind=kind, place=place, sha256=whole, data=data, start=before, **own)


def _adapter_point(config: Config, module: nn.Module, *, folder: str) -> StartPoint:
    """Return the LoRA adapter in `folder`, which is not a run folder; it may be a run's `adapter/`.

    Raises:
        ConfigError: there is no adapter, or its base, rank, scale or tensors do not match the run.
    """
    start = config.start
    if not paths.exists(paths.join(folder, ADAPTER_CONFIG)):
        raise ConfigError(
            f"start.run={folder}; there is neither identity.json of a run nor {ADAPTER_CONFIG} of an adapter; name the "
            "folder of one of them (on the Hub: hf://owner/name)."
        )
    if start.step is not None or start.take == "all":
        key = f"start.step={start.step}" if start.step is not None else "start.take=all"
        raise ConfigError(f"{key}; {folder} is an adapter without checkpoints; name the run's folder, or leave it out.")
    if config.lora.r == 0:
        raise ConfigError(_merge_first(folder, key="task.adapter"))
    _require_own_start(config, run=folder)
    parent = RunFolder.at(paths.absolute(folder.rstrip("/").rpartition("/")[0] or "."))
    stored = parent.stored_identity() if folder.rstrip("/").rpartition("/")[2] == "adapter" else None
    adapter = read_adapter(folder, has_head=True)
    if stored is not None:
        base = {key: value for key, value in stored.items() if not key.startswith("lora.") or key == "lora.init"}
        _require_same_model(base, config, run=folder)
    elif (
        _last(adapter.base) != _last(config.model.path) or config.model.init == "random" or config.model.size == "tiny"
    ):
        drawn = "weights drawn at random" if config.model.init == "random" or config.model.size == "tiny" else "it"
        raise ConfigError(
            f"start.run={folder}; its base is {adapter.base or 'not named'}, and model.path={config.model.path} has "
            f"{drawn if drawn != 'it' else 'another name'}; train on that base (model.path=), or mend "
            f"base_model_name_or_path in its {ADAPTER_CONFIG} where the two are the same."
        )
    require_rounded_alike(adapter, config.model, key=f"start.run={folder}")
    theirs, ours = adapter.lora, config.lora
    names = (*theirs.targets, *theirs.target_parameters)
    each = [(lora_of(theirs, name), lora_of(ours, name)) for name in names]
    are_alike = all((a.r, a.dora) == (b.r, b.dora) for a, b in each)
    are_alike &= all(tokens == tokens_of(ours, name) for name, tokens in theirs.trainable_token_indices.items())
    if any(name.endswith(EMBEDDING_PARTS) for name in adapter.tensors):
        are_alike &= theirs.ensure_weight_tying == ours.ensure_weight_tying
    if not are_alike or not all(math.isclose(scale_of(a), scale_of(b), rel_tol=1e-6) for a, b in each):
        has, wants = (", ".join(f"{key}={text}" for key, text in _shape_of(lora).items()) for lora in (theirs, ours))
        shape = _shape_of(theirs)
        tables = (*PATTERNS, OF_VOCABULARY[0])
        words = typed(*(f"{'+' if key in tables else ''}lora.{key}={text}" for key, text in shape.items()))
        if any(len(getattr(theirs, key)) > MAX_SHOWN for key in PATTERNS):
            words = f"the values of its {ADAPTER_CONFIG} into a file of conf/lora"
        raise ConfigError(
            f"start.run={folder}; it has {has}, and the run {wants}; write {words}, or merge it into its base first."
        )
    sha256 = _digest([paths.join(folder, ADAPTER_FILE)])
    point = StartPoint(run=folder, kind="adapter", place=folder, take="weights", sha256=sha256)
    _require_tensors(point, config, module)
    log.info("warm start from %s: %s", folder, lineage_text(point.lineage()))
    return point


def _shape_of(lora: LoraConfig) -> dict[str, str]:
    """Return what determines the function of an adapter's tensors."""
    found = {"r": str(lora.r), "alpha": f"{lora.alpha:g}", "scaling": lora.scaling, "dora": str(lora.dora).lower()}
    for key in PATTERNS:
        own: dict[str, Any] = getattr(lora, key)
        if own:
            first = dict(list(own.items())[:MAX_SHOWN])
            found[key] = override_of("", first)[1:] + (
                f" and {len(own) - MAX_SHOWN} more" if len(own) > MAX_SHOWN else ""
            )
    if lora.ensure_weight_tying:
        found["ensure_weight_tying"] = "true"
    if lora.trainable_token_indices:
        found["trainable_token_indices"] = override_of("", lora.trainable_token_indices)[1:]
    return found


def _require_same_model(stored: Mapping[str, Any], config: Config, *, run: str) -> None:
    """Require another run's stored identity to have trained the same tensors as this run.

    Raises:
        ConfigError: the model, the adapters or, with `start.take=all`, the optimizer differ.
    """
    now = {
        "lora.dora": False,
        "lora.ensure_weight_tying": False,
        **OF_THE_CODES,
        **OF_THE_GRID,
        **identity(config),
    }  # which leaves them out where they have no effect
    theirs = stored.get("lora.r", config.lora.r)
    if theirs == 0 and config.lora.r > 0:
        raise ConfigError(
            f"start.run={run}; it trained all weights (lora.r=0), and this run adapters; give its model/ as the base: "
            "model.path=RUN/model instead of start.run=."
        )
    if theirs != 0 and config.lora.r == 0:
        raise ConfigError(_merge_first(run, key="task.run"))
    keys = list(OF_THE_BASE)
    is_drawn = config.model.init == "random" or config.model.size == "tiny"
    if is_drawn:
        keys += [key for key in sorted(stored.keys() | now.keys()) if key.startswith(DRAWN)]
    if config.lora.r > 0:
        stored = {"lora.dora": False, "lora.ensure_weight_tying": False, **OF_THE_CODES, **OF_THE_GRID, **stored}
        keys += OF_THE_GRID
        keys += OF_THE_CODES if stored.get("lora.init") == "loftq" else []
        keys += ["seed"] if is_drawn or config.lora.init == "pissa" else []
        patterns = tuple(f"lora.{key}" for key in (*PATTERNS, *OF_VOCABULARY))
        of_patterns = [key for key in sorted(stored.keys() | now.keys()) if key.startswith(patterns)]
        keys += ["lora.r", "lora.alpha", "lora.scaling", "lora.dora", *of_patterns] if "lora.r" in stored else []
    if config.lora.init == "pissa" and "lora.r" in stored:
        keys.append("lora.init")
    if config.start.take == "all":
        keys.append("optim._target_")
    changed = [key for key in keys if not _same(key, stored.get(key), now.get(key))]
    if changed:
        shown = "; ".join(f"{key}={stored.get(key)!r}, now {now.get(key)!r}" for key in changed[:8])
        advice = "restore the values"
        if changed == ["optim._target_"]:
            advice = "take the weights alone (start.take=weights), or restore the value"
        elif changed[0].startswith("lora."):
            advice = "restore the values, or merge its adapter (task=export) and start from that (model.path=)"
        elif changed[0] in OF_THE_CODES:
            advice = "restore the values: LoftQ's adapters (lora.init=loftq) hold what the codes of that base lost"
        raise ConfigError(f"start.run={run}; it was trained with {shown}; {advice}.")


def _same(key: str, theirs: Any, ours: Any) -> bool:
    """Return whether two values of a key mean the same; of `model.path` the last part, since folders move."""
    if key == "model.path" and isinstance(theirs, str) and isinstance(ours, str):
        return _last(theirs) == _last(ours)
    return bool(theirs == ours)


def _require_own_start(config: Config, *, run: str) -> None:
    """Refuse an exported adapter together with `lora.init=pissa`.

    The export is for the original base weights, and PiSSA reduces them.

    Raises:
        ConfigError: `lora.init` is pissa.
    """
    if config.lora.init == "pissa":
        raise ConfigError(
            f"start.run={run} with lora.init=pissa; PiSSA takes its adapters out of the base, and these are for the "
            "whole base; use lora.init=b_zero, whose values are replaced."
        )


def _require_tensors(point: StartPoint, config: Config, module: nn.Module) -> None:
    """Compare the source's tensors with the run's by name, shape and, for checkpoints, dtype.

    Values are checked later, when `load_start` reads them.

    Raises:
        ConfigError: a name, shape or dtype differs.
    """
    parameters = {
        name: torch.empty(p.shape, dtype=torch.float32, device="meta")
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    advice = "give the run the same model and lora.targets, or start from another."
    head = objective_class(config).head
    if point.kind == "checkpoint":
        assert point.step is not None, "`_checkpoint_or_export` gives it"
        wanted = {PARAMETERS: parameters}
        if point.take == "all" and config.trainer._target_ == TrainerConfig._target_:
            wanted[OPTIMIZER] = flat(updates_of(config, parameters).init(parameters))

        def restore(_: Mapping[str, Any], groups: Groups) -> None:
            for group, expected in wanted.items():
                found = without_values(groups.get(group, {}))
                if group == PARAMETERS:
                    expected, found = _without_heads(expected, found, module, head)
                place = paths.join(point.place, f"{group}.safetensors")
                require_tensors(found, expected, place=f"start.run={point.run}; {place}", advice=advice)

        with _read_errors_as_sentences(point.run, point.place):
            read_step(point.place.rpartition("/")[0], point.step, restore, max_held_bytes=0)
        return
    if point.kind == "adapter":
        _require_own_start(config, run=point.run)
        found: Mapping[str, Tensor] = _without_base(
            read_adapter(point.place, has_head=True).tensors, config, module, point
        )
    else:
        found = without_values(read_model(point.place, max_held_bytes=0))
    types = {name: torch.empty(t.shape, dtype=torch.float32, device="meta") for name, t in found.items()}
    parameters, types = _without_heads(parameters, types, module, head)
    require_tensors(types, parameters, place=f"start.run={point.run}; {point.place}", advice=advice)


def _without_base(
    tensors: Mapping[str, Tensor], config: Config, module: nn.Module, point: StartPoint
) -> dict[str, Tensor]:
    """Return an adapter's tensors without the base's own, which PEFT writes beside those of an embedding.

    Raises:
        ConfigError: they are not those of the run's base.
    """
    own = sorted(_frozen_names(module).intersection(tensors))
    for base in model_source(config).weights(own) if own else ():
        theirs = tensors[base.name].to(base.tensor.dtype)
        if not torch.equal(theirs, base.tensor):
            raise ConfigError(
                f"start.run={point.run}; it holds a {base.name} {tuple(theirs.shape)} that is not the one of "
                f"model.path={config.model.path} {tuple(base.tensor.shape)}; train on the base that it was trained on."
            )
    return {name: tensor for name, tensor in tensors.items() if name not in own}


def _frozen_names(module: nn.Module) -> set[str]:
    """Return the names of the parameters that are not trained, each layer's by itself."""
    named = (name for name, p in module.named_parameters() if not p.requires_grad)
    return {each for name in named for each in hugging_face_names(name)}


def _head_of(module: Any, head: str) -> set[str]:
    """Return the parameters of a classifier's head, which stays as it was drawn where a source has another head."""
    return set(head_parameters(module)) if head == CLASSIFIER else set()


def _without_heads(
    wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], module: Any, head: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return both without a head that only one of them has: a classifier's is new over a language model's tensors."""
    own = _head_of(module, head)
    if not own:
        return dict(wanted), dict(found)
    inner = f"{module.base_model_prefix}."
    kept = {name: t for name, t in wanted.items() if name in found or name not in own}
    return kept, {name: t for name, t in found.items() if name in wanted or name.startswith(inner)}


@contextmanager
def _read_errors_as_sentences(run: str, place: str) -> Iterator[None]:
    """Convert the error of a checkpoint that is missing, damaged or changed during the read.

    Raises:
        ConfigError: for FileNotFoundError and ValueError in the block.
    """
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"start.run={run}; {place} cannot be read ({error}); start from another step.") from error


def _require_proven(digests: Mapping[str, str], proven: Any, *, place: str, run: str) -> None:
    """Compare the digests of an export's files with those in its run's result.json, if that has any.

    Args:
        digests: SHA-256 by file name.
        proven: `proof.sha256` of result.json: one digest, or digests by file name.

    Raises:
        ConfigError: a file changed since it was written, or is missing or extra.
    """
    if isinstance(proven, str):
        proven = dict.fromkeys(digests, proven)
    if not isinstance(proven, Mapping):
        return
    for name in sorted({*proven, *digests}):
        if digests.get(name) != proven.get(name):
            raise ConfigError(
                f"start.run={run}; {paths.join(place, name)} has not the SHA-256 that its run's result.json names; it "
                "was changed or is incomplete: copy it again, or start from a checkpoint."
            )


def _digest(files: list[str]) -> str:
    """Return the SHA-256 over the concatenated files, read in pieces of `PIECE_BYTES`."""
    digest = hashlib.sha256()
    for file in files:
        num_bytes = size(file)
        for at in range(0, num_bytes, PIECE_BYTES):
            digest.update(read_range(file, at, min(at + PIECE_BYTES, num_bytes)))
    return digest.hexdigest()


def _pissa_refusal(stored: Mapping[str, Any], folder: RunFolder) -> str:
    r, alpha = int(stored["lora.r"]), float(stored["lora.alpha"])
    factor = 2.0 if stored.get("lora.scaling") == "alpha_over_r" else math.sqrt(2)
    export = typed(override_of("start.run", folder.path("adapter")))
    return (
        f"start.run={folder.path()}; its checkpoints are for a base that PiSSA reduced (lora.init=pissa); use the same "
        f"lora.init, or start from its export: {export} lora.r={2 * r} "
        f"lora.alpha={alpha * factor:g}."
    )


def _merge_first(run: str, *, key: str) -> str:
    words = typed("task=export", override_of(key, run), "task.forms=[merged]")
    return (
        f"start.run={run} with lora.r=0; it is an adapter, and this run trains all weights; merge it into its base "
        f"({words}), and give that folder as model.path instead of start.run."
    )


def _listed(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:8]))
    return f"{'steps' if len(steps) > 1 else 'step'} {shown}{' and others' if len(steps) > 8 else ''}"


def _last(path: str) -> str:
    return PurePosixPath(path.rstrip("/")).name
