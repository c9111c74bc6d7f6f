"""task=quantize: write a run or a model with its layers' weights in a few bits, and compare it with the original."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.config.targets import locate
from tpu_experiments.config.task_schema import EvaluateTaskConfig, QuantizeTaskConfig
from tpu_experiments.export.calibrated import Form, GridForm, Stored, VectorForm
from tpu_experiments.export.calibration import Calibrated, calibrated
from tpu_experiments.export.quantised import chosen_weights, matrix_shape
from tpu_experiments.export.vector_model import read_vector_model
from tpu_experiments.export.weights import Effect
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.quantisation.grid import Grid
from tpu_experiments.quantisation.vectors import Vectors
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.run_folder import with_settings_of_run
from tpu_experiments.tasks.evaluate.subject import subject_of as evaluated
from tpu_experiments.tasks.export import write_forms
from tpu_experiments.tasks.export.forms import Copy, Written, write_layout
from tpu_experiments.tasks.export.proof import adapter_of
from tpu_experiments.tasks.export.readers import Reader, TransformersModel
from tpu_experiments.tasks.export.subject import Subject
from tpu_experiments.training.batches import (
    RunInputs,
    load_run_tokenizer,
    prepare_sources,
    stage_rows,
    stages_with_data,
)
from tpu_experiments.training.row_lengths import measure_rows

log = logging.getLogger(__name__)
DIGEST = "of.json"
"""File of the folder of quantised layers that says which weights and settings they are of."""


def run(config: Config) -> None:
    """Write the quantised form and print a table; exit code 0 done, 1 it is worse than its limit, 2 refused.

    Raises:
        ConfigError: something the user can fix.
    """
    task = config.task
    assert isinstance(task, QuantizeTaskConfig), "conf/task/quantize.yaml has this schema"
    write_forms(config, task, writers={task.method: partial(write_quantised_form, config=config, task=task)})


def form_of(task: QuantizeTaskConfig) -> Form:
    """Return how weights are quantised.

    Raises:
        ConfigError: the codebook of outliers has no vectors that a column can be cut into.
    """
    if task.method != "vptq":
        return GridForm(Grid(task.bits, task.group), form=task.method, feedback=task.method == "gptq")
    if task.vector % 2 and task.outliers:
        raise ConfigError(
            f"task.vector={task.vector} with task.outliers={task.outliers:g}; outliers have vectors of half the "
            "length; set an even task.vector."
        )
    how = Vectors(task.vector, task.codebook, task.residual, task.outliers, task.outlier_codebook)
    return VectorForm(how)


def write_quantised_form(folder: str, subject: Subject, *, config: Config, task: QuantizeTaskConfig) -> Written:
    """Write the model with its layers quantised into a local folder.

    Raises:
        ConfigError: no adapted weight differs from the base after rounding, no weight can be quantised, or there are no
            training rows.
    """
    form, model, effect = form_of(task), subject.model, Effect()
    chosen = chosen_weights(model, form)
    rows = calibration_rows(config, task) if form.needs_inputs else []
    layers = f"{paths.join(subject.place, task.method)}_layers"
    _begin(layers, digest=_digest(subject, rows))
    made = calibrated(
        model, host_source(subject), form, chosen=chosen, rows=rows, folder=layers, seed=subject.origin.config.seed
    )
    written = write_layout(folder, Stored(form, made), subject, effect=effect)
    paths.remove_tree(layers)
    sizes = {name: model.shapes[name].numel() for name in chosen}
    bits = sum(form.bits(matrix_shape(model.shapes[name])) * size for name, size in sizes.items()) / sum(sizes.values())
    facts: dict[str, object] = {
        "dtype": str(subject.dtype).removeprefix("torch."),
        "quantised": written.quantised,
        "not_quantised": written.left,
        "bits_per_weight": round(bits, 4),
        "calibration_tokens": sum(int((row["segments"] > 0).sum()) for row in rows),
        "lost": {name: round(error, 6) for name, error in made.errors.items()},
        "merge": effect.facts(),
    }
    notes = [_note(task, bits, made), *([written.note] if written.note else [])]
    log.info("%s: %s", task.method, notes[0])
    return Written(written.digests, [Copy(task.method, partial(_read, method=task.method))], facts, notes)


def _read(folder: str, dtype: torch.dtype, *, method: str) -> Reader:
    if method != "vptq":
        return TransformersModel(folder, dtype=dtype)
    return TransformersModel(folder, dtype=dtype, module=read_vector_model(folder, dtype=dtype))


def _note(task: QuantizeTaskConfig, bits: float, made: Calibrated) -> str:
    how = {"rtn": "rounded to the nearest integer", "gptq": "rounded by GPTQ", "vptq": "vectors of codebooks (VPTQ)"}
    lost = f", and lose {sum(made.errors.values()) / len(made.errors):.4f} of their outputs" if made.errors else ""
    books = "codebooks" if task.method == "vptq" else "scales"
    return (
        f"The layers' weights are {how[task.method]}. They take {bits:.3f} bits each with their {books}{lost}; "
        "embeddings, norms, biases and the head are not quantised."
    )


def host_source(subject: Subject) -> HuggingFaceModel:
    """Return the model's source with float32 and an attention that the host computes."""
    model = subject.origin.config.model
    attention = "sdpa" if model.attention == "flash" else model.attention
    dense = replace(model, dtype="float32", attention=attention, base="dense")
    made: HuggingFaceModel = locate(dense._target_, key="model")(dense, seed=subject.origin.config.seed)
    return made


def calibration_rows(config: Config, task: QuantizeTaskConfig) -> list[dict[str, Tensor]]:
    """Return the first training rows (1, T) of the last stage, in the order in which a run draws them.

    Args:
        config: the command's; of a run, its data are used.
    """
    wanted = EvaluateTaskConfig(name="evaluate", run=task.run, adapter=adapter_of(task))
    chosen = measure_rows(evaluated(with_settings_of_run(replace(config, task=wanted))).config)
    stages = stages_with_data(chosen)
    tokenizer = load_run_tokenizer(chosen)
    inputs = RunInputs(tokenizer, prepare_sources(chosen, tokenizer=tokenizer, stages=stages), stages)
    own = stage_rows(inputs, stages[-1], config=chosen).own
    count = min(task.rows, own.num_rows)
    if count < task.rows:
        log.warning("task.rows=%d; the data have %d training rows: all are used", task.rows, count)
    rows, _ = own.between(0, count)
    arrays = {"ids": rows.ids_NT, "positions": rows.positions_NT, "segments": rows.segments_NT}
    tensors = {name: torch.from_numpy(array.copy())[:, : task.row_tokens] for name, array in arrays.items()}
    return [{name: tensor[index : index + 1] for name, tensor in tensors.items()} for index in range(count)]


def _digest(subject: Subject, rows: Sequence[Mapping[str, Tensor]]) -> str:
    digest = hashlib.sha256(subject.digest().encode())
    for row in rows:
        digest.update(row["ids"].numpy().tobytes())
        digest.update(row["segments"].numpy().tobytes())
    return digest.hexdigest()


def _begin(folder: str, *, digest: str) -> None:
    """Keep a folder of layers of the same weights, rows and settings; empty any other."""
    place = paths.join(folder, DIGEST)
    if paths.exists(place) and strict_json.loads(paths.read_bytes(place)) == {"digest": digest}:
        return
    if paths.exists(folder):
        paths.remove_tree(folder)
    paths.make_dirs(folder)
    paths.write_text_atomic(place, strict_json.dumps({"digest": digest}) + "\n")
