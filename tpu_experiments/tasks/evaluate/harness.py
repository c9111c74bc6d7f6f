"""task=evaluate task.harness=[...]: benchmarks of lm-evaluation-harness, scored by the compiled evaluation.

The harness makes the requests and the figures; this program answers them. It is asked twice with the same seeds: first
with empty answers, which tells every request, and thereby the length of a row, before a device is used; then with the
answers that the base and the trained model gave. Requests are cut into tokens as its own `hf` backend cuts them.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import NormalDist
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.config.mesh import num_shards
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import EvaluateTaskConfig
from tpu_experiments.data.held_out import HeldOut
from tpu_experiments.data.steps.pack import FlatTokens
from tpu_experiments.data.tokens.tokenize import LEARN
from tpu_experiments.loggers.runlog import start_run_log
from tpu_experiments.metrics.goodput import Stopwatch
from tpu_experiments.models.parts.rope import row_limits
from tpu_experiments.objectives.base import model_source, writes_text
from tpu_experiments.pages.table import aligned
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.runtime.processes.launch import launch
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.tasks.evaluate.base_and_trained import ModelAndBase
from tpu_experiments.tasks.evaluate.inputs import check_length
from tpu_experiments.tasks.evaluate.looked_up import Answers, Scored, Written
from tpu_experiments.tasks.evaluate.subject import Subject, of_texts, task_of
from tpu_experiments.tasks.setup import check_model
from tpu_experiments.training.batches import load_run_tokenizer

log = logging.getLogger(__name__)
NAME = "harness"
VERSION = "0.4.13"
ROW_TOKENS = 8192
"""Tokens that a device scores at once, as in a micro-batch of training."""
MULTIPLE = 128
"""Row lengths are multiples of this many tokens, which a TPU pads to."""
KEPT = ("results", "n-shot", "n-samples", "versions")
"""What is written of the harness's own results."""


@dataclass(frozen=True)
class Asked:
    """The requests of all tasks, each once, and the rows that they fit in; picklable."""

    scored: tuple[Scored, ...]
    written: tuple[Written, ...]
    tokenizer: PreTrainedTokenizerBase
    seq_len: int


def run(subject: Subject) -> None:
    """Print the table and write `<run>/harness_results.json`.

    Raises:
        ConfigError: the harness is not installed, a task is unknown or cannot be asked, or the model writes no text.
    """
    check_harness(subject.config)
    config = replace(subject.config, objective=of_texts())  # whatever the run learnt by, it scores next tokens here
    subject, task = replace(subject, config=config), task_of(config)
    check_model(config, [])
    tokenizer = load_run_tokenizer(config)
    limit = row_limit(config, tokenizer=tokenizer)
    found = Answers()
    figures_of(task, found, tokenizer=tokenizer, limit=limit, resamples=0)
    asked = Asked(tuple(found.scores), tuple(found.texts), tokenizer, row_length(found, limit=limit))
    log.info("%s: %d continuations to score and %d answers to write, in rows of %d tokens", ", ".join(task.harness),
             len(asked.scored), len(asked.written), asked.seq_len)  # fmt: skip
    if found.num_cut:
        log.warning("task.harness: %d contexts are longer than %d tokens and lose their start", found.num_cut, limit)
    launch(evaluate_process, config, subject, asked, limit)


def check_harness(config: Config) -> None:
    """Require the harness, the folder of own tasks, and a model that writes text.

    Raises:
        ConfigError: one of them is missing.
    """
    task = task_of(config)
    shown = f"task.harness=[{','.join(task.harness)}]"
    if not writes_text(config):
        raise ConfigError(
            f"{shown} with objective={config.objective.name}; the tasks of lm-evaluation-harness are for causal "
            "decoders; leave it out."
        )
    if find_spec("lm_eval") is None:
        raise ConfigError(
            f"{shown} needs lm-evaluation-harness, which is not installed; pip install lm-eval=={VERSION} (the extra "
            "`harness`)."
        )
    if task.harness_tasks is not None and not Path(task.harness_tasks).is_dir():
        raise ConfigError(f"task.harness_tasks={task.harness_tasks}; there is no such folder; name one of task files.")


def row_limit(config: Config, *, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most tokens of a context with what is scored behind it: `task.seq_len`, else the model's own limit."""
    wanted = task_of(config).seq_len
    if wanted is not None:
        check_length(config, wanted)
        return wanted
    limits = row_limits(model_source(config).config).values()
    return min(limits, default=min(2048, tokenizer.model_max_length))


def row_length(found: Answers, *, limit: int) -> int:
    """Return the tokens of a row that holds every request."""
    longest = [len(context) + len(behind) for context, behind in found.scores]
    longest += [len(prompt) + num_new for prompt, num_new, _ in found.texts]
    return min(limit, -(-max(longest, default=1) // MULTIPLE) * MULTIPLE)


def figures_of(
    task: EvaluateTaskConfig, answers: Answers, *, tokenizer: PreTrainedTokenizerBase, limit: int, resamples: int
) -> dict[str, Any]:
    """Return the harness's results with these answers; those that are missing are added, empty.

    Raises:
        ConfigError: a task is unknown, its data are not reached, or it asks what cannot be answered.
    """
    from lm_eval.evaluator import simple_evaluate

    from tpu_experiments.tasks.evaluate.requests import Respondent

    manager = known_tasks(task.harness_tasks)
    for name in task.harness:
        if not manager.match_tasks([name]):
            near = ", ".join(get_close_matches(name, manager.all_tasks)) or "none"
            raise ConfigError(
                f"task.harness has {name!r}, which is no task of lm-evaluation-harness, nor of "
                f"task.harness_tasks={task.harness_tasks}. Near ones: {near}."
            )
    respondent = Respondent(answers, tokenizer=tokenizer, limit=limit)
    try:
        found = simple_evaluate(
            model=respondent,
            tasks=list(task.harness),
            num_fewshot=task.harness_shots,
            limit=task.harness_limit,
            apply_chat_template=task.harness_chat,
            bootstrap_iters=resamples,
            task_manager=manager,
            log_samples=False,
        )
    except ConfigError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"task.harness=[{','.join(task.harness)}]; lm-evaluation-harness stopped: {type(error).__name__}: {text}. "
            "Its data are read from the Hub or from the files that the task names; see that they are reached."
        ) from error
    return cast(dict[str, Any], found)


@cache
def known_tasks(folder: str | None) -> Any:
    """Return the harness's tasks and those of a folder; reading its 14,000 files takes 6 s."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=folder)


def evaluate_process(runtime: Runtime, config: Config, subject: Subject, asked: Asked, limit: int) -> None:
    """Answer in every process; rank 0 lets the harness score the answers, prints and writes."""
    start_run_log(None, rank=runtime.rank)
    watch, task = Stopwatch(), task_of(config)
    rows = max(1, ROW_TOKENS // asked.seq_len) * num_shards(config)
    with watch.measure("load"):
        model = ModelAndBase(
            runtime,
            config,
            subject=subject,
            tokenizer=asked.tokenizer,
            shape=(rows, asked.seq_len),
            max_new_tokens=max((num_new for _, num_new, _ in asked.written), default=1),
            max_prompts=len(asked.written),
            keeps_blanks=True,
        )
    found: dict[str, Answers] = {}
    for state in model.states():
        with watch.measure("score"):
            scores = dict(zip(asked.scored, scored(model, asked.scored), strict=True))
        with watch.measure("write"):
            found[state] = Answers(is_whole=True, scores=scores, texts=written(model, asked.written))
    if runtime.rank == 0:
        results = {
            state: figures_of(task, answers, tokenizer=asked.tokenizer, limit=limit, resamples=task.resamples)
            for state, answers in found.items()
        }
        file = paths.join(paths.folder_of(subject.results), "harness_results.json")
        told = {state: {key: each[key] for key in KEPT if key in each} for state, each in results.items()}
        tables = {state: each["results"] for state, each in results.items()}
        figures = benchmarks_of(tables, confidence=task.confidence)
        fields: dict[str, Any] = {"harness": VERSION, "evaluated": subject.kind, "place": subject.place or None}
        fields |= {"model": config.model.name, "limit": limit, "benchmarks": figures, **told, "seconds": watch.seconds}
        paths.make_dirs(paths.folder_of(file))
        paths.write_text_atomic(file, strict_json.dumps(plain(fields), indent=1) + "\n")
        print(for_terminal(f"{as_text(figures, states=list(found))}\n{file}"))


def scored(model: ModelAndBase, requests: Sequence[Scored]) -> list[tuple[float, bool]]:
    """Return log-probability, and whether every token is the likeliest, of each request; every process takes part."""
    if not requests:
        return []
    lengths_D = np.array([len(context) + len(behind) for context, behind in requests])
    ids_L = np.concatenate([np.array([*context, *behind], np.int32) for context, behind in requests])
    flags = [np.repeat(np.array([0, LEARN], np.uint8), [len(context), len(behind)]) for context, behind in requests]
    flat = FlatTokens(ids_L, np.concatenate(flags), lengths_D)
    sums_DK = model.sums(HeldOut(NAME, "text", flat, len(requests)), widths=None)
    tokens_D, nats_D, hits_D = sums_DK[:, 0], sums_DK[:, 2], sums_DK[:, 4]
    return [(-float(nats), bool(hits == num)) for num, nats, hits in zip(tokens_D, nats_D, hits_D, strict=True)]


def written(model: ModelAndBase, requests: Sequence[Written]) -> dict[Written, str]:
    """Return the likeliest answers, up to the texts that end them; every process takes part."""
    found: dict[Written, str] = {}
    for num_new in sorted({num for _, num, _ in requests}):
        own = [request for request in requests if request[1] == num_new]
        prompts = [list(prompt) for prompt, _, _ in own]
        texts = model.sampler.write(prompts, max_new_tokens=num_new, rows=model.num_written)
        found |= {request: ended(text, request[2]) for request, text in zip(own, texts, strict=True)}
    return found


def ended(text: str, until: Sequence[str]) -> str:
    """Return a text up to the first of the texts that end it."""
    for end in until:
        text = text.split(end)[0] if end else text
    return text


def benchmarks_of(
    results: Mapping[str, Mapping[str, Mapping[str, Any]]], *, confidence: float
) -> dict[str, dict[str, dict[str, float]]]:
    """Return `value`, and `low` and `high` where its standard error is known, by `<task> <figure>` and state."""
    width = NormalDist().inv_cdf((1 + confidence) / 2)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for state, tasks in results.items():
        for name, figures in tasks.items():
            for key, value in figures.items():
                measure, _, how = key.partition(",")
                if not how or measure.endswith("_stderr") or not isinstance(value, int | float):
                    continue
                title = f"{name} {measure}" if how == "none" else f"{name} {measure} ({how})"
                error = figures.get(f"{measure}_stderr,{how}")
                known = {"value": float(value)}
                if isinstance(error, float) and np.isfinite(error):
                    known |= {"low": value - width * error, "high": value + width * error}
                found.setdefault(title, {})[state] = known
    return found


def as_text(figures: Mapping[str, Mapping[str, Mapping[str, float]]], *, states: Sequence[str]) -> str:
    """Return the table of figures, the base beside the trained model, with intervals from standard errors."""
    lines = [("benchmark", *states)]
    lines += [(title, *(_shown(each[state]) for state in states)) for title, each in figures.items()]
    return aligned(lines)


def _shown(figure: Mapping[str, float]) -> str:
    value = f"{figure['value']:.4f}" if abs(figure["value"]) < 1e4 else f"{figure['value']:.4g}"
    return f"{value} [{figure['low']:.4f}, {figure['high']:.4f}]" if "low" in figure else value


def plain(value: Any) -> Any:
    """Return what JSON has, of numpy's numbers too; what else the harness returns as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
