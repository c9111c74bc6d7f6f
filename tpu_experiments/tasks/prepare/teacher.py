"""Write what a teacher predicts of the prepared rows, by the compiled evaluation of a model or from vLLM's answers."""

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.checkpoint.errors import on_rank_zero
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import config_of_run, identity
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import PrepareTaskConfig
from tpu_experiments.data.prepared import Key, read_manifest
from tpu_experiments.data.reading.prompt_logprobs import PromptLogprobs
from tpu_experiments.data.rows import Rows, RowSource
from tpu_experiments.data.steps.keys import short_hash
from tpu_experiments.data.store.shards import damaged_shards
from tpu_experiments.data.teacher import (
    FORMAT,
    PredictionWriter,
    digest_of,
    documents_of,
    folder_name,
    rows_hash,
    stored_dtype,
)
from tpu_experiments.data.tokens.tokenizer import tokenizer_hash
from tpu_experiments.loggers.runlog import start_run_log
from tpu_experiments.models.passes.distillation import OfTeacher, likeliest
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.runtime.processes.env import compile_cache_root
from tpu_experiments.runtime.processes.launch import launch
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.given_folders import require_answers
from tpu_experiments.storage.retry import explain_storage_errors
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.tasks.doctor.places import nearest_folder
from tpu_experiments.tasks.evaluate.base_and_trained import ModelAndBase
from tpu_experiments.tasks.evaluate.subject import Subject, config_text, run_subject
from tpu_experiments.tasks.setup import check_ids, check_model
from tpu_experiments.training.batches import RunInputs, load_run_tokenizer, referred_rows
from tpu_experiments.training.reference import ReferencePass
from tpu_experiments.training.step import computing_of

log = logging.getLogger(__name__)
OWN_MODEL = "model"
ROWS_AT_ONCE = 64
"""Rows of vLLM's answers that are read at once."""


@dataclass(frozen=True)
class Order:
    """What is to be written; picklable."""

    inputs: RunInputs
    keys: list[Key]
    """Those that are not there already."""
    dtypes: dict[Key, np.dtype[np.void]]
    about: dict[Key, dict[str, Any]]
    """Entries of the manifests."""
    num_ids: int


def teacher_of(config: Config) -> Subject | None:
    """Return the model that `task.teacher` names; None where it names a file of predictions, or nothing.

    Raises:
        ConfigError: there is no such run, it has no config or nothing trained, or it is not a decoder's.
    """
    assert isinstance(config.task, PrepareTaskConfig)
    teacher = config.task.teacher
    if teacher is None or not config.task.predicts:
        return None
    if teacher == OWN_MODEL:
        return Subject(config, "base", "", "")
    folder = RunFolder.at(teacher)
    stored = folder.stored_identity() if folder.exists() else None
    if stored is None:
        raise ConfigError(
            f"task.teacher={teacher}; it is no run folder; name a run, a .jsonl file of vLLM's prompt_logprobs, or "
            "take this command's own model= as it is loaded with task.teacher=model."
        )
    heads = ("classify", "reward", "masked", "masked_diffusion", "replaced_token")
    learnt = str(stored.get("objective._target_", ""))
    if any(f".{head}." in learnt for head in heads):
        raise ConfigError(f"task.teacher={teacher}; its objective is {learnt}, and a teacher predicts the next token.")
    keys = ("seed", "plugins", "model", "lora")
    found = config_of_run(config, text=config_text(folder), place=folder.config_path, keys=keys)
    hw = replace(config.hw, compile_cache=compile_cache_root(config) or "none")  # this command's, not the run's
    found = replace(found, hw=hw, output_dir=folder.output_dir, name=folder.name)
    return run_subject(found, folder, file="", instead="name another run with task.teacher=")


def write_predictions(config: Config, inputs: RunInputs, subject: Subject | None) -> None:
    """Write the predictions of all rows of training and of evaluations.

    Raises:
        ConfigError: another tokenizer, too many entries, other predictions in the folder, no room on the disk, or
            missing answers, and no prediction was written; NaN, an answer of too few entries, or a folder that cannot
            be written to.
        StorageFailed: the disk is full.
    """
    assert isinstance(config.task, PrepareTaskConfig)
    if config.task.teacher_requests is not None:
        _write_requests(config.task.teacher_requests, inputs, config)
    if config.task.teacher is None:
        return
    if subject is not None:
        subject = replace(subject, config=replace(subject.config, trainer=config.trainer))
        theirs, own = tokenizer_hash(load_run_tokenizer(subject.config)), tokenizer_hash(inputs.tokenizer)
        if theirs != own:
            raise ConfigError(
                f"task.teacher={config.task.teacher}; its tokenizer ({theirs}) is not that of "
                f"model={config.model.name} ({own}), and an id is another token; choose a teacher and a student of one "
                "tokenizer."
            )
        check_ids(subject.config, inputs, vocab_size=check_model(subject.config, inputs.stages))
    order = _order(config, inputs, subject)
    _require_room(order, config)
    if subject is not None and order.keys:
        launch(teacher_process, subject.config, subject, order)
    elif order.keys:
        _import(config, order)
    for key in order.about:
        print(f"data.{key[0]}.teacher, rows of {key[2]}, {key[1]}: {_folder(config, key)}")


def _folder(config: Config, key: Key) -> str:
    teacher = config.data[key[0]].teacher
    assert teacher is not None, "training/given.py requires one"
    return paths.join(teacher, folder_name(key))


def _order(config: Config, inputs: RunInputs, subject: Subject | None) -> Order:
    task, entries = config.task, config.objective.teacher_entries()
    temperature = 1.0 if config.objective.converts_temperature() else config.objective.teacher_temperature()
    assert isinstance(task, PrepareTaskConfig)
    num_ids = len(inputs.tokenizer)
    if entries > num_ids:
        raise ConfigError(f"objective.top_k={entries:,}; the tokenizer has {num_ids:,} tokens; use that many or fewer.")
    if subject is None and temperature != 1:
        raise ConfigError(
            f"objective.temperature={temperature:g} with task.teacher={task.teacher}; vLLM's "
            "log-probabilities are of temperature 1; use it, or objective.rest=renormalised."
        )
    dtypes, about = {}, {}
    tokens, told = tokenizer_hash(inputs.tokenizer), _told(task.teacher or "", subject)
    for key, (rows, _) in referred_rows(inputs, config).items():
        name, split, length = key
        dtypes[key] = stored_dtype(length, entries=entries, vocab_size=num_ids)
        about[key] = {
            "source": name,
            "split": split,
            "seq_len": length,
            "top_k": entries,
            "temperature": temperature,
            "num_ids": num_ids,
            "tokenizer_hash": tokens,
            "rows": rows_hash(inputs.sources[name], key),
            "num_rows": rows.num_rows,
            "teacher": told,
        }
    wanted = []
    for key, each in about.items():
        folder = _folder(config, key)
        with explain_storage_errors(folder):
            if not _is_there(folder, each):
                wanted.append(key)
    return Order(inputs, wanted, dtypes, about, num_ids)


def _told(teacher: str, subject: Subject | None) -> str:
    """Return what a teacher is, for the manifest: of a file its content, of a model all its settings and the seed."""
    if subject is None:
        with require_answers(teacher).open("rb") as file:
            return f"{teacher}, sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"
    model = subject.config.model
    settings = {k: v for k, v in identity(subject.config).items() if k == "seed" or k.startswith("model.")}
    state = ""
    if subject.kind == "checkpoint":
        state = f", {', '.join(sorted(paths.list_names(subject.place)))}"
    elif subject.kind != "base":
        state = f", {hashlib.sha256(paths.read_bytes(RunFolder.of(subject.config).result_path)).hexdigest()[:16]}"
    return f"{subject.kind} {subject.place or model.path}{state}, {model.size} {model.path}, {short_hash(settings)}"


def _is_there(folder: str, about: Mapping[str, Any]) -> bool:
    """Return whether these very predictions are in the folder, whole; damage is logged.

    Raises:
        ConfigError: others are.
    """
    found = read_manifest(folder, expected={"format": FORMAT})
    if found is None:
        return False
    other = [name for name, value in about.items() if found.get(name) != value]
    if other:
        shown = ", ".join(f"{name}={found.get(name)!s:.60} there, {about[name]!s:.60} now" for name in other)
        raise ConfigError(
            f"{folder}; it holds other predictions of a teacher ({shown}); name another folder with "
            "data.NAME.teacher=, or delete this one."
        )
    damaged = damaged_shards(folder, found["shards"], md5={each["name"]: each["md5"] for each in found["shards"]})
    for complaint in damaged:
        log.warning("%s The predictions are written again.", complaint)
    if not damaged:
        log.info("%s has these predictions already", folder)
    return not damaged


def _require_room(order: Order, config: Config) -> None:
    """Say how many bytes will be written, and refuse if the disk lacks them."""
    needed: dict[int, int] = {}  # bytes by disk
    places: dict[int, str] = {}
    for key in order.keys:
        num_rows, dtype = order.about[key]["num_rows"], order.dtypes[key]
        folder = _folder(config, key)
        log.info(
            "%s: %s rows of %s take %.1f MB (%.0f bytes a token)",
            *(folder, f"{num_rows:,}", f"{key[2]:,}", num_rows * dtype.itemsize / 1e6, dtype.itemsize / key[2]),
        )
        if not paths.is_remote(folder):
            place = nearest_folder(folder)
            disk = os.stat(place).st_dev
            needed[disk] = needed.get(disk, 0) + num_rows * dtype.itemsize
            places.setdefault(disk, place)
    for disk, num_bytes in needed.items():
        free = shutil.disk_usage(places[disk]).free
        if num_bytes > free:
            raise ConfigError(
                f"task.teacher; its predictions take {num_bytes / 1e9:.1f} GB and the disk of {places[disk]} has "
                f"{free / 1e9:.1f} GB free; lower objective.top_k={config.objective.teacher_entries()}, or name "
                "another folder with data.NAME.teacher=."
            )


def teacher_process(runtime: Runtime, config: Config, subject: Subject, order: Order) -> None:
    """Predict in every process; rank 0 writes."""
    start_run_log(None, rank=runtime.rank)
    rows_of = referred_rows(order.inputs, config)
    shapes: set[tuple[int, ...]] = {(rows_of[key][1] // runtime.share[1], key[2]) for key in order.keys}
    first = order.keys[0]
    model = ModelAndBase(
        runtime,
        config,
        subject=subject,
        tokenizer=order.inputs.tokenizer,
        shape=(rows_of[first][1], first[2]),
        max_new_tokens=1,
        max_prompts=0,
    )
    for _ in model.states():  # the last one is the teacher
        pass
    log.info("teacher: %s", f"{subject.kind} {subject.place}".strip())
    taken = OfTeacher(order.about[first]["top_k"], order.about[first]["temperature"], order.num_ids)
    values_of = partial(likeliest, taken=taken, computing=computing_of(config, runtime))
    predicting = ReferencePass(model, values_of=values_of)
    runtime.expect({"reference": shapes})
    for key in order.keys:
        rows, global_rows = rows_of[key]
        folder, began, done = _folder(config, key), time.monotonic(), 0
        explained = explain_storage_errors(folder, full="failed")
        writer = on_rank_zero(runtime, explained(partial(PredictionWriter, folder, dtype=order.dtypes[key])))
        for values_GTE in predicting.run(rows, global_rows=global_rows):
            part = rows.take(slice(done, done + global_rows))
            done += part.num_rows
            add = partial(_add, writer, part, values_GTE[: part.num_rows], taken.top_k)
            on_rank_zero(runtime, explained(add))
        on_rank_zero(runtime, explained(partial(_close, writer, order.about[key])))
        seconds = time.monotonic() - began
        log.info("teacher: %d rows of %s predicted in %.1f s", done, "/".join(map(str, key)), seconds)


def _add(writer: PredictionWriter | None, rows: Rows, values_MTE: NDArray[np.float32], entries: int) -> None:
    assert writer is not None, "rank 0 has one"
    logps, ids = values_MTE[..., :entries], values_MTE[..., entries:]
    if np.isnan(logps).any():
        raise ConfigError(f"{writer.folder}; the teacher predicts NaN; look at its weights and model.dtype.")
    writer.add(rows, ids_MTE=ids, logps_MTE=logps)


def _close(writer: PredictionWriter | None, about: Mapping[str, Any]) -> None:
    assert writer is not None, "rank 0 has one"
    writer.close(**about)


def _parts(rows: RowSource) -> Iterator[Rows]:
    for start in range(0, rows.num_rows, ROWS_AT_ONCE):
        yield rows.take(slice(start, start + ROWS_AT_ONCE))


def _import(config: Config, order: Order) -> None:
    """Write the answers of vLLM as predictions."""
    assert isinstance(config.task, PrepareTaskConfig)
    assert config.task.teacher is not None, "`write_predictions` has one"
    entries = config.objective.teacher_entries()
    found = PromptLogprobs(config.task.teacher, entries=entries, num_ids=order.num_ids)
    rows_of = referred_rows(order.inputs, config)
    for key in order.keys:
        for part in _parts(rows_of[key][0]):
            found.require(part, what=f"data.{key[0]} ({key[1]}, rows of {key[2]})")
    for key in order.keys:
        folder = _folder(config, key)
        with explain_storage_errors(folder, full="failed"):
            writer = PredictionWriter(folder, dtype=order.dtypes[key])
            for part in _parts(rows_of[key][0]):
                ids, logps = found.of(part)
                writer.add(part, ids_MTE=ids, logps_MTE=logps)
            writer.close(**order.about[key])


def _write_requests(file: str, inputs: RunInputs, config: Config) -> None:
    """Write the token ids of every document once."""
    lines, seen = [], set()
    for rows, _ in referred_rows(inputs, config).values():
        for part in _parts(rows):
            for _, _, ids_L in documents_of(part):
                if digest_of(ids_L) not in seen:
                    seen.add(digest_of(ids_L))
                    lines.append(strict_json.dumps({"prompt_token_ids": ids_L.tolist()}) + "\n")
    with explain_storage_errors(file, full="failed"):
        paths.make_dirs(paths.folder_of(file))
        paths.write_text_atomic(file, "".join(lines))
    print(f"{len(lines):,} documents to be scored: {file}")
