"""Plans saved by earlier commands, and which of them has the same programs as a config."""

import hashlib
import json
import logging
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tpu_experiments.config.curriculum import Stage
from tpu_experiments.config.hardware import flags_of, values_of
from tpu_experiments.config.identity import flatten, without_added
from tpu_experiments.config.messages import is_own
from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.config.regular_files import read_regular
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import PlanTaskConfig
from tpu_experiments.metrics.flops import read_decoder
from tpu_experiments.runtime.processes.env import exported_flags
from tpu_experiments.storage import paths
from tpu_experiments.storage.gguf.files import is_gguf, read_header
from tpu_experiments.storage.gguf.settings import config_values
from tpu_experiments.storage.paths import find_local

log = logging.getLogger(__name__)
PLANS, SWEEPS, PLAN_FILE, COMPILED = "plans", "sweeps", "plan.json", "compiled"
SHAPES_PROGRAMS = ("model.", "lora.", "objective.", "optim.", "sharding.", "hw.", "trainer.", "sample.")
SHAPES_NOTHING = (
    "model.name",
    "model.path",
    "model.revision",
    "model.tokenizer_path",
    "model.chat_",
    "model.remote_code",
    "model.init",
    "model.size",
    "model.arch",
    "model.tiny_arch",
    "model.lr",
    "model.lora_targets",
    "optim.lr",
    "sharding.name",
    "sharding.max_replicated_elements",
    "hw.name",
    "hw.chip.",
    "hw.price",
    "hw.calibration",
    "hw.num_threads",
    "hw.compile_cache",
    "trainer.seq_len",
    "trainer.global_batch_rows",
    "trainer.micro_batch_rows",
    "trainer.log_every_steps",
    "trainer.norms_every_steps",
    "trainer.on_recompile",
    "trainer.trace_every_steps",
    "trainer.profile.",
    "trainer.eval_every_steps",
    "trainer.max_eval_rows",
    "trainer.max_stage_steps",
    "trainer.plan_check",
    "sample.prompt",  # and sample.prompts, whose number is hashed separately
    "sample.at",
    "sample.max_new_tokens",
)
"""Exceptions from `SHAPES_PROGRAMS`. The sizes of the model, the batches of the stages and the memory of the chip are
hashed by their resolved values instead."""


COUNTED = 2
"""How memory is counted in plans that are found again. Those of 1 had the gaps between temporaries twice."""


@dataclass(frozen=True)
class SavedPlan:
    """One plan.json."""

    file: str
    fields: dict[str, Any]


def programs_key(config: Config, arch: Any, stages: Iterable[Stage]) -> str:
    """Return 16 hex digits of the SHA-256 of all that the run's programs and their memory depend on.

    Data, seed, learning rate, length and origin of the weights are not part of it. Neither is code: a plan made before
    a change of the step's code has the same key.

    Args:
        arch: `model.arch`, config.json as a dict, or a transformers config.

    Raises:
        ConfigError: a model that `read_decoder` does not support.
    """
    geometries = [stage.geometry for stage in stages]
    facts = program_facts(config, arch)
    facts["counted"] = COUNTED
    facts["batches"] = list(dict.fromkeys((g.accumulation, g.micro_rows, g.seq_len) for g in geometries))
    facts["has sample"] = config.sample.max_new_tokens > 0
    if config.sample.prompts and config.sample.max_new_tokens:
        facts["sample rows"] = len(config.sample.all_prompts)
    if config.questions:
        facts["asks"] = True
    if flags := values_of(flags_of(config.hw, exported=exported_flags())):
        facts["flags"] = flags
    if isinstance(config.task, PlanTaskConfig) and config.task.pack > 1:
        facts["pack"] = config.task.pack
    if isinstance(config.task, PlanTaskConfig) and config.task.libtpu is not None:
        facts["compiler"] = config.task.libtpu  # not the one that the run will be compiled by
    return digest_of(facts)


def program_facts(config: Config, arch: Any) -> dict[str, Any]:
    """Return settings that the run's programs depend on, the model's sizes and the chip's memory.

    The batches are not part of them.

    Raises:
        ConfigError: a model that `read_decoder` does not support.
    """
    chip = config.hw.chip
    facts = {
        key: value
        for key, value in without_added(flatten(config)).items()
        if key.startswith(SHAPES_PROGRAMS) and not key.startswith(SHAPES_NOTHING)
    }
    if config.hw.parallel != "spmd":
        facts = {key: value for key, value in facts.items() if not key.startswith("sharding.")}
    facts["decoder"] = asdict(read_decoder(arch))
    facts["memory"] = [chip.hbm_gib, chip.program_hbm_gib] if chip else None
    return facts


def digest_of(facts: dict[str, Any]) -> str:
    """Return the first 16 hex digits of the SHA-256 of facts, in whatever order they are."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def sizes_of(model: ModelConfig) -> Mapping[str, Any] | None:
    """Return the model's sizes without loading transformers.

    They are those of a checkpoint's config.json, on this disk or of the Hub, or of a GGUF file, otherwise of
    `model.arch`, which says nothing of a model that `model.path` names in the place of the preset's. None where
    config.json cannot be read; the run reports what is wrong with it.
    """
    folder = None if model.init == "random" or model.size == "tiny" else find_local(model.path)
    if folder is not None and is_gguf(folder):
        return config_values(read_header(folder))
    if (folder is None or not folder.is_dir()) and is_own(model):
        return {**model.arch, **(model.tiny_arch if model.size == "tiny" else {})}
    if folder is None:
        folder = hub_folder(model.path, model.revision)
    if folder is None:
        return None
    try:
        values = json.loads(read_regular(folder / "config.json"))
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


@cache
def hub_folder(path: str, revision: str | None) -> Path | None:
    """Return the folder of a Hub model's config.json in the Hub's cache, into which it is fetched; None without it."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(path, "config.json", revision=revision)).parent
    except Exception as error:  # of a dozen types: offline, gated, missing, not a Hub's name
        log.info("model.path=%s; its config.json was not read (%s)", path, type(error).__name__)
        return None


def saved_plans(folder: str) -> Iterator[SavedPlan]:
    """Yield the plans in a folder of plans; one that cannot be read is skipped with a warning."""
    for name in paths.list_names(folder):
        file = paths.join(folder, name, PLAN_FILE)
        if not paths.exists(file):
            continue
        try:
            fields = json.loads(paths.read_text(file))
        except (ValueError, RecursionError, IsADirectoryError) as error:
            log.warning("%s is skipped: it is not JSON (%s); task=plan name=%s writes it again", file, error, name)
            continue
        if isinstance(fields, dict):
            yield SavedPlan(file, fields)


def known_plan(config: Config, arch: Any, stages: Iterable[Stage]) -> SavedPlan | None:
    """Return the compiled plan of the same programs; None where there is none.

    The plan of the run's own name is preferred to others and to those of sweeps.
    """
    key = programs_key(config, arch, stages)
    own = paths.join(config.output_dir, PLANS, str(config.name), PLAN_FILE)
    found = [
        plan
        for folder in plan_folders(config.output_dir)
        for plan in saved_plans(folder)
        if plan.fields.get("method") == "compiled" and plan.fields.get("programs_key") == key
    ]
    return min(found, key=lambda plan: plan.file != own, default=None)


def compiled_folder(settings: PlanTaskConfig, *, output_dir: str) -> str:
    """Return the absolute folder of compilations, below `output_dir` where none is named."""
    return paths.absolute(settings.compiled_folder or paths.join(output_dir, PLANS, COMPILED))


def plan_folders(output_dir: str) -> list[str]:
    """Return `<output_dir>/plans` and the plan folders of its sweeps.

    A point of a sweep uses the same folders as the command that started the sweep.
    """
    base = command_output_dir(output_dir)
    sweeps = paths.join(base, SWEEPS)
    found = [paths.join(base, PLANS), *(paths.join(sweeps, name, PLANS) for name in paths.list_names(sweeps))]
    return [folder for folder in found if paths.exists(folder)]


def command_output_dir(output_dir: str) -> str:
    """Return the `output_dir` of the command line: that of a sweep's point without `sweeps/<name>`."""
    above = posixpath.dirname(output_dir.rstrip("/"))
    return posixpath.dirname(above) or "." if posixpath.basename(above) == SWEEPS else output_dir
