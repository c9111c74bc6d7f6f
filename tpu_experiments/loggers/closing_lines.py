"""Format the closing lines of a run from its result.json.

No torch is loaded, so that a finished run is reported at once.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from tpu_experiments.config.commands import command, override_of
from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.config.schema import Config
from tpu_experiments.loggers.plan_estimates import plan_line
from tpu_experiments.metrics.goodput import goodput_lines
from tpu_experiments.storage import paths
from tpu_experiments.storage.retry import explain_storage_errors
from tpu_experiments.storage.run_folder import RunFolder, has_other_length, open_run, with_settings_of_run

BOUND = "perplexity_bound"
"""Measure that bounds the perplexity from above; with `_low` and `_high` the ends of its interval."""
OF_ONE_RUN = re.compile(r"-|\+*(name|lora\.r|task|task\..*|sweep|sweeping\..*|hydra[./].*)=")
"""Arguments of a command that a follow-up run with the same settings does not repeat."""
SWEEPS = "sweeps"
"""Folder of the output_dir with the sweeps, whose points are below them (sweeping/points.py)."""
CONFIG_FOLDERS = frozenset({"--config-dir", "-cd", "--config-path", "-cp"})
"""Options that a follow-up run repeats, with the folder behind them."""


def print_if_finished(config: Config) -> bool:
    """Return whether the run of this config is finished, and print its closing lines if so.

    Raises:
        ConfigError: the folder belongs to another config, or its result.json is invalid.
    """
    with explain_storage_errors(config.output_dir):
        config = with_settings_of_run(config)
        folder = open_run(config, may_lengthen=True)
        finished = folder.finished()
    if finished is None or has_other_length(folder, config):
        return False
    with folder.reading_result():
        print(for_terminal(summary(finished, folder=folder)))
    print(f"name={config.name} was finished before; nothing was run. Give another name= to train again.")
    return True


def summary(result: dict[str, Any], *, folder: RunFolder, arguments: Sequence[str] | None = None) -> str:
    """Return the closing lines: results, paths and next commands.

    Args:
        arguments: arguments of the command that trained it; by default this process's own.
    """
    before, after = result["eval_loss_before"], result["eval_loss"]
    sources = result["eval_sources"].items() if len(result["eval_sources"]) > 1 else ()
    lines = [
        f"finished {result['name']}",
        *_skill_lines(result.get("skill")),
        f"  held-out loss   {_loss(before)} -> {_loss(after)}{_perplexity_text(result)}",
        *_measure_lines(result),
        *(f"    {name:<13} {_loss(result['eval_sources_before'].get(name))} -> {_loss(end)}" for name, end in sources),
        *(line for stage in result["stages"] for line in _stage_lines(stage)),
        *_guard_lines(result["guard"]),
        *_finding_lines(result.get("findings")),
        f"  trained         {result['num_trainable']:,} of {result['num_parameters']:,} parameters",
        f"  speed           {result['tokens_per_second']:,.0f} tokens/s",
        *plan_line(result.get("plan")),
        *_step_lines(result["meters"]),
        *goodput_lines((result.get("goodput") or {}).get("run")),
        f"  programs        {result['num_compiles']} compiled, {result['compiles_after_warmup']} after warm-up"
        + _cache_text(result["compile_cache"]),
        *_sample_lines(result),
        f"  run folder      {folder.path()}",
        f"  {'adapter' if _is_adapter(result) else 'model  '}         {result['adapter_path']}",
        *(f"  {name:<15} {place}" for name, place in (result.get("parts") or {}).items()),
        "next:",
        *_next_lines(result, folder=folder, arguments=sys.argv[1:] if arguments is None else arguments),
    ]
    return "\n".join(lines)


def _next_lines(result: dict[str, Any], *, folder: RunFolder, arguments: Sequence[str]) -> list[str]:
    """Return commands for this run: TensorBoard, generate, evaluate, export, and the same settings at other ranks."""
    imported = [word for word in arguments if word.startswith("plugins=")]
    run, own = [override_of("task.run", folder.path()), *imported], _repeated(arguments)
    several, one = _hardware(result["hw"])
    board = f"  tensorboard {_logdir(folder)}{_remote_flag(folder)}"
    evaluate = f"  {command('task=evaluate', *run, *several)}   # on its test split, beside its base"
    scored = [evaluate] if result.get("is_evaluated", True) else []
    if not _writes_text(result):
        fill = f"  {command('task=generate', *run, *one)}   # fill masked tokens after a prompt"
        return [board, *([fill] if BOUND in result.get("eval_measures", {}) else []), *scored]
    lines = [
        board,
        f"  {command('task=generate', *run, *one)}   # type prompts to it",
        *scored,
        f"  {command('task=export', *run)}   # "
        + ("its integers, packed and proven" if "rounded" in result else "merged, and proven; task.forms=[gguf] too"),
    ]
    is_point = paths.join(folder.output_dir).split("/")[-2:-1] == [SWEEPS]  # whose ranks are the sweep's matter
    if _is_adapter(result) and not result.get("start") and not is_point:  # what it started from has one rank
        words = ["-m", *own, override_of("name", f"{result['name']}_ranks"), "lora.r=8,16,32"]
        lines.append(f"  {command(*words)}   # the same at other ranks")
    return lines


def _repeated(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a follow-up run with the same settings, its name left out."""
    return [
        word
        for before, word in zip(["", *arguments], arguments, strict=False)
        if not OF_ONE_RUN.match(word) or word.partition("=")[0] in CONFIG_FOLDERS or before in CONFIG_FOLDERS
    ]


def _perplexity_text(result: dict[str, Any]) -> str:
    """Return the perplexity in brackets, of masked tokens that of an encoder, of masked diffusion its upper bound.

    It is empty where the loss is of no tokens.
    """
    measures = result.get("eval_measures", {})
    if BOUND in measures:
        ends = (_loss(measures.get(f"{BOUND}_{end}"), digits=2) for end in ("low", "high"))
        return f"  (perplexity <= {_loss(measures[BOUND], digits=2)}, 95 %: {' to '.join(ends)})"
    if not result.get("has_perplexity", not result.get("parts")):
        return ""
    kind = "perplexity" if _writes_text(result) else "of masked tokens: perplexity"
    return f"  ({kind} {_loss(result['perplexity'], digits=2)})"


def _sample_lines(result: dict[str, Any]) -> list[str]:
    """Return the first sample before and after training, where the run wrote any."""
    texts = {when: result[f"sample_{when}"] for when in ("before", "after") if _writes_text(result)}
    return [f"  sample {when:<8} {text!r}" for when, text in texts.items() if text is not None]


def _writes_text(result: dict[str, Any]) -> bool:
    """Return whether the run trained a model that continues text; results before 2026-11-25 are of such alone."""
    return bool(result.get("writes_text", True))


def _is_adapter(result: dict[str, Any]) -> bool:
    """Return whether the run trained a LoRA adapter rather than the model's own weights."""
    return str(result["adapter_path"]).endswith("/adapter")


def _hardware(name: str) -> tuple[list[str], list[str]]:
    """Return overrides for the same hardware and for one chip of it; none for the CPU, the default."""
    one = re.sub(r"^(v\d+[a-z]+)\d+$", r"\g<1>1", name)
    if re.fullmatch(r"v\d+p?-\d+", name):  # no smaller slice of it is rented
        return [override_of("hw", name)], [override_of("hw", name), "hw.parallel=inline", "hw.num_devices=1"]
    return ([], []) if name == "cpu" else ([override_of("hw", name)], [override_of("hw", one)])


def _skill_lines(skill: dict[str, Any] | None) -> list[str]:
    """Return every question set's score, some examples of the first set, and how to read the scores."""
    if skill is None:
        return []
    lines = [
        f"  questions       {name}: {_score(score, 'before')} -> {_score(score, 'after')} right"
        for name, score in skill["sets"].items()
    ]
    for example in skill["examples"]:
        lines += [
            f"    asked         {example['question']}",
            f"      before      {' '.join(example['before'].split())}",
            f"      after       {' '.join(example['after'].split())}",
            f"      expected    {example['expected']}",
        ]
    whole = sum(round(score["whole_before"] * score["asked"]) for score in skill["sets"].values())
    asked = sum(score["asked"] for score in skill["sets"].values())
    more = "; in stories of one person they test what is asked, not who" if "one_person" in skill["sets"] else ""
    counted = f"the first sentence counts: a base does not stop, and {whole} of {asked} whole answers were right before"
    return [*lines, f"    {counted}{more}"]


def _score(score: dict[str, float], when: str) -> str:
    """Format a share of the questions as counts and percent."""
    return f"{round(score[when] * score['asked'])} of {score['asked']} ({100 * score[when]:.0f} %)"


def _stage_lines(stage: dict[str, Any]) -> list[str]:
    """Return a stage's line, and notes where it was ended early or restored to an earlier step."""
    line = (
        f"  stage {stage['name']:<10} {stage['steps']} steps, {stage['tokens']:,} tokens, train loss "
        f"{_loss(stage['first_train_loss'])} -> {_loss(stage['last_train_loss'])}, held-out {_loss(stage['eval_loss'])}"
    )
    losses = [_loss(epoch["train_loss"]) for epoch in stage.get("epochs") or [] if epoch["is_over"]]
    notes = [f"mean train loss by epoch: {', '.join(losses)}"] if losses else []
    notes += [stage["ended_by"]] if stage["ended_by"] else []
    notes += [f"it ends with step {stage['restored_step']}, its best"] if stage["restored_step"] else []
    return [line, *(f"    {note}" for note in notes)]


def _measure_lines(result: dict[str, Any]) -> list[str]:
    """Return accuracy and bits per byte, where they are known."""
    before, after = result.get("eval_measures_before", {}), result.get("eval_measures", {})
    shown = {name: value for name, value in after.items() if not name.startswith(BOUND)}
    parts = [f"{name.replace('_', ' ')} {_loss(before.get(name))} -> {_loss(value)}" for name, value in shown.items()]
    return [f"    {', '.join(parts)}"] if parts else []


def _step_lines(meters: dict[str, float | None]) -> list[str]:
    """Return the breakdown of a step's time, and MFU and HFU where the hardware's peak is known."""
    seconds = meters["step_seconds"]
    if not seconds:
        return []
    parts = [
        f"{100 * (meters[f'{name}_seconds'] or 0) / seconds:.0f} % {words}"
        for name, words in (("trace", "tracing"), ("input_wait", "waiting for input"), ("rest", "device and rest"))
    ]
    shares = [f"{name.upper()} {100 * share:.1f} %" for name in ("mfu", "hfu") if (share := meters[name]) is not None]
    return [f"  a step          {1000 * seconds:,.0f} ms: {', '.join([*parts, *shares])}"]


def _guard_lines(guard: dict[str, Any]) -> list[str]:
    """Return the skipped and rolled-back steps, where there were any."""
    parts = []
    if guard["skipped"]:
        parts.append(f"{guard['skipped']} updates skipped, their loss or gradient was not finite")
    if guard["rollbacks"]:
        steps = ", ".join(f"{first} to {last}" for first, last in guard["passed_over"])
        parts.append(f"rolled back {guard['rollbacks']} times, steps {steps} skipped")
    return [f"  guard           {'; '.join(parts)}"] if parts else []


def _finding_lines(findings: list[dict[str, str]] | None) -> list[str]:
    """Return what the audit found in the data; results before 2026-11-28 do not have it."""
    return [f"  {finding['severity']:<15} {finding['message']}" for finding in findings or []]


def _logdir(folder: RunFolder) -> str:
    """Return TensorBoard's log directory flag, under the run's name unless a comma in the path forbids it."""
    place = paths.join(folder.path(), "tensorboard")
    if "," in place:
        return f"--logdir {shlex.quote(place)}"
    return f"--logdir_spec {shlex.quote(f'{folder.name}:{place}')}"


def _remote_flag(folder: RunFolder) -> str:
    """Return the flag that disables TensorBoard's fast loader for remote folders.

    The fast loader has its own client for gs://; the slow one reads through fsspec, as this project does.
    """
    return " --load_fast=false" if paths.is_remote(folder.path()) else ""


def _cache_text(cache: dict[str, Any] | None) -> str:
    if cache is None:
        return ""
    unreadable = f", {cache['unreadable']} could not be read" if cache["unreadable"] else ""
    return f"; of the compile cache {cache['hits']} hits, {cache['misses']} misses{unreadable}"


def _loss(value: float | None, *, digits: int = 4) -> str:
    """Format a figure; result.json has null in place of a non-finite one."""
    return "-" if value is None else f"{value:.{digits}f}"
