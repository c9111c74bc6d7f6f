"""Build and check a training run's inputs before the run folder is created or a device is used."""

import importlib.util
import inspect
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from tpu_experiments.callbacks.base import EVENTS
from tpu_experiments.checkpoint.state import progress_of
from tpu_experiments.checkpoint.store import latest_progress
from tpu_experiments.config.curriculum import Stage, long_warmups, uneven_rows
from tpu_experiments.config.errors import ConfigError, one_line
from tpu_experiments.config.mesh import mesh_of
from tpu_experiments.config.messages import path_of_model
from tpu_experiments.config.redaction import redacted
from tpu_experiments.config.schema import Config, MuonConfig
from tpu_experiments.config.targets import locate
from tpu_experiments.data.prompts import Prompts, read_prompts
from tpu_experiments.data.steps.epochs import write_epochs
from tpu_experiments.models.adapters.lora import require_read_by_peft
from tpu_experiments.models.huggingface import CLASSIFIER, HEADS, OWN_HEAD, HuggingFaceModel
from tpu_experiments.models.parts.rope import row_limits
from tpu_experiments.models.passes.forward import first_position
from tpu_experiments.models.sources.build import describe, shapes_of_base
from tpu_experiments.models.sources.isolation import require_isolation
from tpu_experiments.models.sources.loaded import require_loaded
from tpu_experiments.objectives.base import (
    Computing,
    Objective,
    model_source,
    objective_class,
    objective_of,
    writes_text,
)
from tpu_experiments.optim.facts import require_patterns
from tpu_experiments.optim.schedules import unreached
from tpu_experiments.optim.updates import optimizer_of
from tpu_experiments.runtime.processes.hosts import Hosts
from tpu_experiments.runtime.sharding import ShardingTable, check_heads
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.training.batches import (
    RunInputs,
    load_run_tokenizer,
    parameters_of_lengths,
    preparation_settings,
    prepare_sources,
    prepared_folder,
    stage_rows,
    stages_with_data,
    steps_by_stage,
    stored_teachers,
)
from tpu_experiments.training.cached_sampler import lengths_of
from tpu_experiments.training.length import new_length
from tpu_experiments.training.outputs import findings_of
from tpu_experiments.training.questions import read_questions
from tpu_experiments.training.side_files import require_exportable
from tpu_experiments.training.start import StartPoint, find_start
from tpu_experiments.training.step import require_trainable_patterns

log = logging.getLogger(__name__)


def set_up(config: Config, folder: RunFolder, *, said: set[str] | None = None) -> RunInputs:
    """Return everything a run needs but its devices, checked.

    Args:
        said: findings that an earlier run of this process has logged; receives those of this one.

    Raises:
        ConfigError: something the user can fix; nothing was written.
    """
    check_targets(config)
    optimizer_of(config)
    check_loggers(config)
    check_callbacks(config)
    stages = stages_with_data(config)
    vocab_size = check_model(config, stages)
    if config.model.added_tokens:
        check_added(config, load_run_tokenizer(config), vocab_size=vocab_size)
    require_dense(config)
    check_loaded(config)
    start = start_of(config, folder)
    inputs = replace(make_inputs(config, stages), start=start)
    check_ids(config, inputs, vocab_size=vocab_size)
    check_held_out(inputs)
    require_exportable(model_source(config), config=config, inputs=inputs)
    check_findings(config, inputs, said=set() if said is None else said)
    new_length(folder, inputs, config)  # says what a run of another length cannot resume from
    check_data(folder, inputs, config=config)
    for text in uneven_rows(inputs.stages) if config.hw.chip is not None else ():
        log.warning("%s", text)
    for stage in inputs.stages:
        stage_rows(inputs, stage, config=config)  # refuses too few written epochs
    steps = steps_by_stage(inputs, config=config)
    falls = (unreached(stage.schedule, num_steps=steps[stage.name]) for stage in inputs.stages)
    for text in (*long_warmups(inputs.stages, steps), *filter(None, dict.fromkeys(falls))):
        log.warning("%s", text)
    return inputs


def start_of(config: Config, folder: RunFolder) -> StartPoint | None:
    """What a new run starts from; None where it resumes from its own checkpoint, which has everything.

    Raises:
        ConfigError: there is nothing at `start.run`, or it does not go with the run.
    """
    if config.start.run is None or latest_progress(folder.path("checkpoints")) is not None:
        return None
    source = model_source(config)
    return find_start(config, describe(source, lora=config.lora)[0])


SWAPPED: dict[str, tuple[str, ...]] = {
    "model": ("find_folder", "empty", "require_weights", "weights", "outer_name"),
    "objective": ("count", "row_loss", "scores"),
    "optim": ("init", "update"),
    "trainer": ("run",),
}
"""Methods required of the class that each `_target_` names."""


def check_targets(config: Config) -> None:
    """Refuse a `_target_` of the wrong kind, before anything is written.

    Raises:
        ConfigError: it is no class, or lacks a method of `SWAPPED`.
    """
    named = {f"data.{name}": source._target_ for name, source in config.data.items()}
    named |= {f"logger.{name}": logger._target_ for name, logger in config.logger.items()}
    named |= {f"callbacks.{name}": callback._target_ for name, callback in config.callbacks.items()}
    named |= {key: getattr(config, key)._target_ for key in SWAPPED}
    found = {key: locate(target, key=key) for key, target in named.items()}
    for key, methods in SWAPPED.items():
        target, kind = named[key], found[key]
        needed = [name for name in methods if name != "scores" or getattr(kind, "has_scores", False)]
        lacking = [name for name in needed if not _has_own(kind, name)]
        if not isinstance(kind, type) or lacking:
            what = (
                f"a class without {', '.join(lacking)}"
                if isinstance(kind, type)
                else f"{type(kind).__name__}, no class"
            )
            raise ConfigError(
                f"{key}._target_={target}; it is {what}; name a class with {', '.join(methods)}, as {key}'s own have."
            )
    objective, flags = found["objective"], [name for name, value in vars(Objective).items() if isinstance(value, bool)]
    wrong = [name for name in flags if not isinstance(getattr(objective, name, False), bool)]
    if wrong:
        raise ConfigError(
            f"objective._target_={named['objective']}; its {' and '.join(wrong)} must be True or False; set it in the "
            "class (tpu_experiments/objectives/base.py says what it means)."
        )
    head = getattr(objective, "head", Objective.head)
    if head not in (*HEADS, OWN_HEAD):
        raise ConfigError(
            f"objective._target_={named['objective']}; its head={head!r} must be one of "
            f"{', '.join((*HEADS, OWN_HEAD))}; set it in the class, or leave it out for a decoder."
        )


def _has_own(kind: Any, name: str) -> bool:
    """Return whether a class has a method that is not the one of `Objective`, which does nothing."""
    own = getattr(kind, name, None)
    return callable(own) and own is not getattr(Objective, name, None)


def check_loggers(config: Config) -> None:
    """Refuse a logger whose package is missing or whose options it does not accept.

    Raises:
        ConfigError: either; nothing was written.
    """
    for name, logger in config.logger.items():
        kind = locate(logger._target_, key=f"logger.{name}")
        package = getattr(kind, "package", None)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(f"logger={name} needs the package {package}; pip install {package}, or leave it out.")
        try:
            inspect.signature(kind).bind(None, **logger.options)
        except TypeError as error:
            raise ConfigError(f"logger.{name}.options={logger.options}; {kind.__name__} says: {error}.") from error
        if hasattr(kind, "check"):
            kind.check(config, **logger.options)


def check_callbacks(config: Config) -> None:
    """Refuse a callback that has no event's method, or refuses its options or the config.

    Raises:
        ConfigError: either; nothing was written.
    """
    for name, each in config.callbacks.items():
        key, kind = f"callbacks.{name}", locate(each._target_, key=f"callbacks.{name}")
        known = [method for method in EVENTS if callable(getattr(kind, method, None))]
        unknown = [
            method
            for method in dir(kind)
            if method.startswith("on_") and method not in EVENTS and callable(getattr(kind, method))
        ]
        if not isinstance(kind, type) or not known or unknown:
            what = f"{unknown[0]} is no event" if unknown else "it has none of the events' methods"
            raise ConfigError(f"{key}._target_={each._target_}; {what}; the events are {', '.join(EVENTS)}.")
        try:
            made = kind(**each.options)
            if hasattr(made, "check"):
                made.check(config)
        except ConfigError as error:
            raise ConfigError(f"{key}.options={redacted(each.options)}; {error}") from error
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{key}.options={redacted(each.options)}; {kind.__name__} says: {one_line(error)}."
            ) from error


def make_inputs(config: Config, stages: list[Stage]) -> RunInputs:
    """Return the tokenizer, prepared rows of every source at every length, and written epochs."""
    tokenizer = load_run_tokenizer(config)
    require_fit(config, tokenizer)
    sources = prepare_sources(config, tokenizer=tokenizer, stages=stages)
    written = {}
    if config.loader.order == "written":
        folder = prepared_folder(config)
        for stage in stages:
            written[stage.index] = write_epochs(
                stage, sources=sources, settings=config.prepare, seed=config.seed, folder=folder
            )
    found = RunInputs(
        tokenizer,
        sources,
        stages,
        written,
        read_questions(config, tokenizer=tokenizer),
        num_parameters=parameters_of_lengths(stages, source=lambda: model_source(config)),
        prompts=prompts_of(config, stages, tokenizer=tokenizer),
        teachers=stored_teachers(config, tokenizer=tokenizer, sources=sources, stages=stages),
    )
    asked = [(len(each.ids), each.num_new) for questions in found.questions.values() for each in questions]
    found.lengths = lengths_of(config, tokenizer=tokenizer, questions=asked, kind=found.prompt_kind)
    return found


def prompts_of(config: Config, stages: Sequence[Stage], *, tokenizer: PreTrainedTokenizerBase) -> dict[str, Prompts]:
    """Return the prompts of every stage, where the model writes its own rows."""
    if not config.objective.samples_rollouts:
        return {}
    preparation = preparation_settings(config, tokenizer=tokenizer)
    found = {}
    for stage in stages:
        length = stage.geometry.seq_len
        found[stage.name] = read_prompts(config, preparation=preparation, sources=stage.sources, seq_len=length)
    return found


def require_fit(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Require the tokenizer, the packing and the questions to go with the objective.

    Raises:
        ConfigError: one of them does not.
    """
    objective_of(config, Computing(), tokenizer=tokenizer)
    objective_class(config).require_fit(config, tokenizer)
    if config.questions and not writes_text(config):
        key = next(iter(config.questions.values()))[0]
        raise ConfigError(
            f"{key} with objective={config.objective.name}; questions are asked of causal decoders alone; leave the "
            "questions out."
        )


def check_model(config: Config, stages: Sequence[Stage]) -> int:
    """Check lengths, adapter targets and sharding against the model's config; return its vocabulary size.

    Raises:
        ConfigError: one of them does not fit the model.
    """
    if config.lora.r and objective_class(config).head not in ("causal_lm", CLASSIFIER):
        raise ConfigError(
            f"lora.r={config.lora.r} with objective={config.objective.name}; adapters are for decoders, and this "
            "objective trains every weight of its model; use lora=none."
        )
    source = model_source(config)
    module, report = describe(source, lora=config.lora)
    require_read_by_peft(module, config.lora)
    for stage, (name, most) in itertools.product(stages, row_limits(source.config).items()):
        limit = most - first_position(module)
        if stage.geometry.seq_len > limit:
            raise ConfigError(
                f"trainer.seq_len={stage.geometry.seq_len} (stage {stage.name}) is longer than "
                f"model.path={config.model.path} allows ({name}={limit}); use {limit} or less."
            )
    if isinstance(source, HuggingFaceModel) and source.head != OWN_HEAD:
        require_isolation(source, is_packed=config.prepare.packing == "best_fit")
    source.require_weights(shapes_of_base(module))
    trainable = [name for name, p in module.named_parameters() if p.requires_grad]
    require_trainable_patterns(stages, trainable)
    require_patterns("no_decay", config.optim.no_decay, trainable)
    if isinstance(config.optim, MuonConfig):
        require_patterns("adamw", config.optim.adamw, trainable)
    log.info("%s: %s", config.model.name, report)
    if config.model.tokenizer_path is not None and config.model.path != path_of_model(config.model.name):
        log.info("model.path=%s is trained with the tokenizer of %s", config.model.path, config.model.tokenizer_path)
    if config.hw.parallel == "spmd":
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        mesh = mesh_of(config.hw, config.sharding)
        table = ShardingTable(config.sharding, mesh=mesh)
        table.check(shapes)
        check_heads(mesh, source.config)
        check_hosts(config, table, shapes={name: shapes[name] for name in trainable})
    return int(source.config.vocab_size)


def check_loaded(config: Config) -> None:
    """Compare the model of a checkpoint, as it is loaded, with transformers' from the same files.

    Raises:
        ConfigError: they compute different logits; nothing was written.
    """
    source = model_source(config)
    if isinstance(source, HuggingFaceModel) and config.trainer.canary.when != "never":
        require_loaded(source, lora=config.lora, is_packed=config.prepare.packing == "best_fit")


def require_dense(config: Config) -> None:
    """Refuse to train on a model that task=quantize wrote.

    Raises:
        ConfigError: `model.path` is one.
    """
    if getattr(model_source(config), "packing", None) is not None:
        raise ConfigError(
            f"model.path={config.model.path}; its weights have a few bits, for task=evaluate and task=generate; train "
            "on the model that it was made of, where model.base=nf4 holds the frozen weights in 4 bits."
        )


def check_hosts(config: Config, table: ShardingTable, *, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse the gradient check where trained tensors are sharded over several hosts: it needs them whole on one.

    Raises:
        ConfigError: `trainer.canary.when` is always, and a rule of `sharding` splits a trained tensor.
    """
    split = [name for name, shape in shapes.items() if any(table.axes(name, shape))]
    if config.hw.num_hosts > 1 and split and config.trainer.canary.when == "always":
        raise ConfigError(
            f"trainer.canary.when=always with hw.num_hosts={config.hw.num_hosts} sharding={config.sharding.name}; the "
            f"check needs the trained tensors whole on one host, and {len(split)} of {len(shapes)} ({split[0]}) are "
            "split over the hosts; leave it out, or check the gradients on a slice of one host."
        )


def check_ids(config: Config, inputs: RunInputs, *, vocab_size: int) -> None:
    """Refuse rows with a token id without an embedding, which XLA would silently read as another one.

    Raises:
        ConfigError: tokenizer and model do not match.
    """
    for name, source in inputs.sources.items():
        if source.max_token_id >= vocab_size:
            raise ConfigError(
                f"data.{name} has token id {source.max_token_id} and model={config.model.name} has {vocab_size} "
                "embeddings; set model.tokenizer_path to the tokenizer this model was trained with."
            )
    for (name, *_), stored in inputs.teachers.items():
        if stored.manifest["num_ids"] > vocab_size:
            raise ConfigError(
                f"data.{name}.teacher; its teacher predicts {stored.manifest['num_ids']:,} tokens and "
                f"model={config.model.name} has {vocab_size:,} embeddings; choose a model that has them all."
            )


def check_added(config: Config, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> None:
    """Require a row for every token of `model.added_tokens`, and say which rows no step trains.

    Raises:
        ConfigError: a token has none.
    """
    ids: Any = tokenizer.convert_tokens_to_ids(config.model.added_tokens)
    text = config.model.added_tokens[ids.index(max(ids))] if ids else ""
    if ids and max(ids) >= vocab_size:
        raise ConfigError(
            f"model.added_tokens has {text!r}, which is token {max(ids)}, and model={config.model.name} has "
            f"{vocab_size} rows; set model.vocab_size={len(tokenizer)}, and train the new rows "
            f"(+lora.trainable_token_indices={{embed_tokens: {ids}}}, with lm_head too where the head is not tied)."
        )
    is_trained = config.lora.r == 0 or config.lora.modules_to_save
    rows = {token for tokens in config.lora.trainable_token_indices.values() for token in tokens}
    lacking = [token for token in ids if token not in rows]
    if lacking and not is_trained:
        log.warning(
            "model.added_tokens: no step trains the rows of %s, which stay as they begin; name them in "
            "lora.trainable_token_indices",
            lacking,
        )


def check_held_out(inputs: RunInputs) -> None:
    """Refuse data without a row to evaluate on.

    Raises:
        ConfigError: the evaluation splits of all sources are empty.
    """
    manifests = {name: source.manifests[inputs.eval_seq_len] for name, source in inputs.sources.items()}
    if any(manifest["splits"]["evaluation"]["rows"] for manifest in manifests.values()):
        return
    name, manifest = next(iter(manifests.items()))
    raise ConfigError(
        f"data.{name}.eval_fraction={manifest['config'].get('eval_fraction')}; of its {manifest['documents_out']:,} "
        "documents none is left to evaluate on, and a run is evaluated before its first step and after its last; set "
        f"data.{name}.eval_fraction=0.5, add documents, or name held-out ones with data.{name}.eval_path=FILE."
    )


def check_findings(config: Config, inputs: RunInputs, *, said: set[str]) -> None:
    """Log every finding of the audit that is not among those `said`, or refuse data with an error in its audit.

    Raises:
        ConfigError: there is an error, and `prepare.on_finding` is stop.
    """
    for finding in findings_of(inputs):
        if finding.severity == "error" and config.prepare.on_finding == "stop":
            raise ConfigError(f"{finding.message} Or train all the same: prepare.on_finding=warn.")
        if finding.message not in said:
            log.warning("%s", finding.message)
            said.add(finding.message)


def check_data(folder: RunFolder, inputs: RunInputs, *, config: Config) -> None:
    """Refuse to resume from an invalid position, or with other data than the newest checkpoint's.

    Raises:
        ConfigError: progress.json is invalid, or the audit hash of a source differs from the one in it.
    """
    checkpoints = folder.path("checkpoints")
    found = latest_progress(checkpoints)
    if found is None:
        return
    step = found[0]
    stages = steps_by_stage(inputs, config=config)
    before, now = progress_of(found[1], folder=checkpoints, stages=stages).data, inputs.audit_hashes
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if changed:
        shown = ", ".join(f"{key} {before.get(key)} then, {now.get(key)} now" for key in changed)
        raise ConfigError(
            f"name={folder.name}; its checkpoint of step {step} was trained on other data (audit hash of {shown}); "
            "restore the files, tokenizer and rules of data preparation, or choose another name=."
        )


START = "start.run"
"""Key, among the audit hashes that hosts compare, of the checkpoint that the run starts from."""


def require_same_data(hosts: Hosts, inputs: RunInputs) -> None:
    """Refuse hosts that have prepared different rows, since each feeds its own chips from its own.

    Raises:
        ConfigError: the audit hash of a source differs, or what the run starts from.
    """
    start = {} if inputs.start is None else {START: inputs.start.sha256}
    found = hosts.gather(inputs.audit_hashes | start)
    if len({other.pop(START, "") for other in found}) > 1:
        raise ConfigError(
            "start.run; the hosts found other checkpoints of it (it is training now, or they see other folders); name "
            "the step, start.step=, and a folder that all hosts share."
        )
    changed = sorted(key for key in found[0] if any(other.get(key) != found[0][key] for other in found))
    if changed:
        shown = ", ".join(str(other.get(changed[0])) for other in found)
        raise ConfigError(
            f"data.{changed[0]}; the hosts have other rows ({shown}, by host); give all of them the same "
            "files, for example from a bucket, and the same tokenizer."
        )


def require_shared(folder: RunFolder, hosts: Hosts) -> None:
    """Refuse an output_dir that only the first host sees, since each host reads the checkpoints itself.

    Raises:
        ConfigError: the folder that the first host created is missing here.
    """
    if not folder.exists():
        raise ConfigError(
            f"output_dir={folder.output_dir} with hw.num_hosts={hosts.size}; host {hosts.rank} does not see "
            f"{folder.path()}, which host 0 has made; use a bucket (gs://...) or a folder that all hosts share."
        )
