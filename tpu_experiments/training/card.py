"""The run card: a Markdown page with the model, data, results and loading instructions of a run.

It is the README.md of the run folder and of the exported adapter or model, where the Hub displays it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.repocard_data import EvalResult

from tpu_experiments.config.commands import command, override_of
from tpu_experiments.config.curriculum import Stage
from tpu_experiments.config.escaping import as_code, fenced, for_markdown
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.config.redaction import redacted_text
from tpu_experiments.config.schema import Config
from tpu_experiments.export.card import CARD, adapter_code, is_hub_id, part_code, whole_code
from tpu_experiments.models.huggingface import HEADS
from tpu_experiments.objectives.base import objective_class, writes_text
from tpu_experiments.pages.table import markdown_line
from tpu_experiments.storage import paths
from tpu_experiments.storage.run_folder import RunFolder, config_yaml
from tpu_experiments.training.start import lineage_text

PIPELINES = {
    "causal_lm": "text-generation",
    "masked_lm": "fill-mask",
    "sequence_classification": "text-classification",
    "own": "feature-extraction",
}
"""The Hub's names of what models with these heads do."""


def write_card(folder: RunFolder, result: Mapping[str, Any], config: Config, stages: Sequence[Stage]) -> None:
    """Write `<run>/README.md`, and the same next to the export."""
    text = card(result, config, stages)
    for place in (folder.path(CARD), paths.join(result["adapter_path"], CARD)):
        paths.write_text_atomic(place, text)


def card(result: Mapping[str, Any], config: Config, stages: Sequence[Stage]) -> str:
    """Return the page; `result` has the fields of result.json."""
    sections = {
        "Use": _usage(result, config),
        "Results": _results(result, config),
        "Stages": _stages(result, stages),
        "Data": _data(result, config),
        "Samples": _samples(result, config),
        "Hardware, time and cost": _cost(result, config),
        "Where it comes from": _origin(result, config),
    }
    body = "\n".join(f"## {title}\n\n{text}\n" for title, text in sections.items())
    whole = fenced(config_yaml(config).rstrip("\n"), language="yaml")
    details = f"<details><summary>The whole config</summary>\n\n{whole}\n\n</details>\n"
    head = f"---\n{_metadata(result, config)}---\n\n# {for_markdown(result['name'])}\n\n{_introduction(result, config)}"
    return redacted_text(f"{head}\n\n{body}\n{details}")


def _metadata(result: Mapping[str, Any], config: Config) -> str:
    """Return the Hub's metadata, with held-out losses as results."""
    is_adapter, is_rounded = config.lora.r > 0, config.model.linear == "lr_qat"
    hub_ids = [source.path for source in config.data.values() if is_hub_id(source.path) and config.data_size == "full"]
    kind = PIPELINES[objective_class(config).head]
    results = [
        EvalResult(kind, name, name, "loss", loss, metric_name="held-out loss, nats per token")
        for name, loss in result["eval_sources"].items()
        if objective_class(config).has_perplexity
    ]
    results += [
        EvalResult(kind, name, name, metric, measured[measure], metric_name=f"held-out {words}")
        for name, measured in result["eval_source_measures"].items()
        for measure, metric, words in objective_class(config).metrics_of_card
        if measure in measured
    ]
    data = ModelCardData(
        base_model=config.model.path if is_hub_id(config.model.path) and config.model.size == "full" else None,
        library_name=None if is_rounded else "peft" if is_adapter else "transformers",
        pipeline_tag=kind,
        tags=["tpu_experiments", *(["lora"] if is_adapter else [])],
        datasets=hub_ids or None,
        model_name=result["name"] if results else None,
        eval_results=results or None,
    )
    return data.to_yaml() + "\n"


def _introduction(result: Mapping[str, Any], config: Config) -> str:
    trained = f"{result['num_trainable']:,} of {result['num_parameters']:,} parameters"
    base = ("" if config.model.size == "full" else "a tiny stand-in for ") + as_code(config.model.path)
    base += {"int8": ", whose layers had their weights in int8", "nf4": ", whose layers had their weights in NF4"}.get(
        config.model.base, ""
    )
    how = f"decay {config.optim.ema:g}" if config.optim.ema else "schedule-free"
    averaged = f" averaged over steps ({how})," if config.optim.is_averaged else ""
    if config.lora.r == 0:
        return f"All weights of {base} ({trained}),{averaged} trained with tpu_experiments."
    lora, targets = config.lora, for_markdown(", ".join([*config.lora.targets, *config.lora.target_parameters]))
    if config.model.linear == "lr_qat":
        return (
            f"An adapter of rank {lora.r} and alpha {lora.alpha:g} that decides how {targets} of "
            f"{base} are rounded to integers of {config.model.linear_bits} bits (LR-QAT; {trained}),{averaged} trained "
            "with tpu_experiments."
        )
    return (
        f"A LoRA adapter of rank {lora.r}, alpha {lora.alpha:g} and dropout {lora.dropout:g} on "
        f"{targets}{_own_values(lora)}{_saved(lora)} of {base} ({trained}),{averaged} trained with tpu_experiments."
    )


def _own_values(lora: LoraConfig) -> str:
    """Return the ranks and alphas of single modules in parentheses; nothing where there are none."""
    words: dict[str, Mapping[str, float]] = {"rank": lora.rank_pattern, "alpha": lora.alpha_pattern}
    told = [f"{word} {value:g} for {as_code(name)}" for word, own in words.items() for name, value in own.items()]
    return f" ({', '.join(told)})" if told else ""


def _saved(lora: LoraConfig) -> str:
    """Return the modules and rows that are trained whole; nothing where there are none."""
    names = for_markdown(", ".join(lora.modules_to_save))
    rows = [f"{len(tokens)} rows of {for_markdown(name)}" for name, tokens in lora.trainable_token_indices.items()]
    told = ", ".join([*([names] if names else []), *rows])
    return f", with {told} trained whole," if told else ""


def _usage(result: Mapping[str, Any], config: Config) -> str:
    place, dtype = result["adapter_path"], config.model.dtype
    if config.model.linear == "lr_qat":
        export = command("task=export", override_of("task.run", place.rpartition("/")[0]))
        return "No other library applies the adapter. Write the integers that it and the base fold into:\n\n" + fenced(
            export, language="bash"
        )
    trust = ", trust_remote_code=True" if config.model.remote_code == "run" else ""
    if result.get("parts"):
        code = [line for part in result["parts"].values() for line in part_code(part, dtype=dtype)]
    elif config.lora.r == 0:
        head = HEADS.get(objective_class(config).head)
        code = whole_code(place, dtype=dtype, options=trust, auto=head.auto.__name__ if head else "AutoModel")
    else:
        labels = config.objective.known_labels()
        code = adapter_code(
            place,
            auto=HEADS[objective_class(config).head].auto.__name__,
            of_base="" if labels is None else f", id2label={dict(enumerate(labels))!r}",
            base=result.get("base_path") or config.model.path,
            dtype=dtype,
            held=config.model.base,
            double_quant=config.model.base_double_quant,
            trust=trust,
            vocab_size=config.model.vocab_size,
        )
    lines, paragraph = objective_class(config).lines_of_use(config)
    text = fenced("\n".join(code + lines), language="python") + (f"\n\n{paragraph}" if paragraph else "")
    if trust:
        text += (
            f"\n\nTrained with `model.remote_code=run`: Python code that {as_code(config.model.path)} brings was "
            "run, and loading runs it again with your rights. Read it first."
        )
    return text


def _results(result: Mapping[str, Any], config: Config) -> str:
    if not objective_class(config).has_perplexity:
        num = result[f"eval_{config.objective.predicts}"]
        words = objective_class(config).words_of_results(config, num, num_tokens=result["eval_tokens"])
        return "\n\n".join(filter(None, (_own_measures(result), words)))
    before, after = result["eval_sources_before"], result["eval_sources"]
    rows = [(name, before.get(name), after[name]) for name in after]
    measures = {side: dict(result[f"eval_source_measures{side}"]) for side in ("_before", "")}
    if len(rows) > 1:
        rows.append(("all", result["eval_loss_before"], result["eval_loss"]))
        measures = {side: found | {"all": result[f"eval_measures{side}"]} for side, found in measures.items()}

    def both(name: str, measure: str) -> str:
        old, new = (_number(measures[side].get(name, {}).get(measure)) for side in ("_before", ""))
        return f"{old} to {new}"

    table = _table(
        (
            "held-out documents of",
            "start, nats per token" if result.get("start") else "base, nats per token",
            "trained",
            "difference",
            "bits per byte",
            "accuracy",
        ),
        [
            (
                for_markdown(name),
                _number(old),
                _number(new),
                _number(_difference(new, old), "+.4f"),
                both(name, "bits_per_byte"),
                both(name, "accuracy"),
            )
            for name, old, new in rows
        ],
    )
    tokens, whose = ("supervised", "") if writes_text(config) else ("masked", " of masked tokens")
    return (
        f"{table}\n\nMean loss per {tokens} token over {result['eval_tokens']:,} tokens of documents that were not "
        f"trained on (at most {config.trainer.max_eval_rows} rows); perplexity{whose} "
        f"{_number(result['perplexity'], ',.2f')}."
    )


def _own_measures(result: Mapping[str, Any]) -> str:
    """Return the measures of an objective that has its own, over all held-out rows."""
    sides = ({"loss": result[f"eval_loss{side}"]} | dict(result[f"eval_measures{side}"]) for side in ("_before", ""))
    before, after = sides
    rows = [(name.replace("_", " "), _number(before.get(name)), _number(value)) for name, value in after.items()]
    return _table(("held-out documents", "start", "trained"), rows)


def _stages(result: Mapping[str, Any], stages: Sequence[Stage]) -> str:
    """Return the lineage: the stages in order, with their data, settings and losses."""
    rows, notes = [], []
    for record, stage in zip(result["stages"], stages, strict=False):
        replayed = (
            f", {100 * stage.replay:g} % of {for_markdown(', '.join(stage.replay_sources))}" if stage.replay else ""
        )
        geometry, name = stage.geometry, for_markdown(stage.name)
        weights = [f" ({100 * weight / sum(stage.weights):.3g} %)" for weight in stage.weights]
        sources = map("".join, zip(map(for_markdown, stage.sources), weights or [""] * len(stage.sources), strict=True))
        rows.append(
            (
                name,
                ", ".join(sources) + replayed,
                f"{geometry.global_rows} x {geometry.seq_len}",
                f"{record['steps']:,}",
                f"{record['tokens']:,}",
                f"{stage.lr:g}, {stage.schedule.name}",
                f"{_number(record['first_train_loss'])} to {_number(record['last_train_loss'])}",
                _number(record["eval_loss"]),
            )
        )
        losses = [_number(each["train_loss"]) for each in record.get("epochs") or [] if each["is_over"]]
        notes += [f"- {name}, mean train loss by epoch: {', '.join(losses)}"] if losses else []
        notes += [f"- {name} ended early: {for_markdown(record['ended_by'])}"] if record["ended_by"] else []
        notes += [f"- {name} ended with step {record['restored_step']}"] if record["restored_step"] else []
        notes += [f"- {name} trained {for_markdown(', '.join(stage.trainable))} only"] if stage.trainable else []
        notes += [f"- {name} began with a fresh optimizer"] if stage.optimizer == "fresh" and stage.index else []
    header = ("stage", "data", "rows x tokens", "steps", "tokens", "peak learning rate", "train loss", "held-out loss")
    origins = [f"- started from {text}" for text in _starts(result.get("start"))]
    notes = [*origins, *notes]
    return "\n".join([_table(header, rows), *(["", *notes] if notes else [])])


def _starts(lineage: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield a line for the warm start of a run, for that of its source, and so on."""
    while lineage is not None:
        hashes = ", ".join(sorted((lineage.get("data") or {}).values()))
        data = f", trained on data of audit hash {hashes}" if hashes else ""
        yield f"{as_code(lineage['run'])}: {for_markdown(lineage_text(lineage))}{data}"
        lineage = lineage.get("start")


def _data(result: Mapping[str, Any], config: Config) -> str:
    hashes = result["data_audit"]
    rows = [
        (
            for_markdown(name),
            as_code(str(source.sample_path if config.data_size == "sample" else source.path)),
            for_markdown(source.revision or "newest"),
            source.kind,
            ", ".join(f"{value} ({key.rpartition('@')[2]} tokens)" for key, value in _of_source(hashes, name)),
        )
        for name, source in config.data.items()
    ]
    return _table(("source", "from", "revision", "kind", "audit hash (row length)"), rows)


def _of_source(hashes: Mapping[str, str], name: str) -> Iterator[tuple[str, str]]:
    return ((key, value) for key, value in hashes.items() if key.rpartition("@")[0] == name)


def _samples(result: Mapping[str, Any], config: Config) -> str:
    if result["sample_after"] is None:
        return "None were written."
    texts = {"before": result["sample_before"], "after": result["sample_after"]}
    prompt = for_markdown(config.sample.prompt or "")
    return "\n\n".join([f"Prompt: {prompt}", *(f"{when}:\n\n{_quoted(text)}" for when, text in texts.items())])


def _quoted(text: str | None) -> str:
    return "\n".join(f"> {for_markdown(line)}" for line in (text or "-").splitlines() or ["-"])


def _cost(result: Mapping[str, Any], config: Config) -> str:
    run = (result.get("goodput") or {}).get("run") or {}
    rows = [
        ("hardware", f"{config.hw.name}, {config.hw.num_devices} devices, {config.hw.runtime} ({config.hw.parallel})")
    ]
    if run:
        times = run["lives"]
        rows.append(("wall time", f"{run['wall_seconds'] / 3600:.2f} h in {times} {'life' if times == 1 else 'lives'}"))
        prices = [f"${usd:,.2f} {kind.replace('_', ' ')}" for kind, usd in run["usd"].items() if usd is not None]
        rows.append(("cost", ", ".join(prices) or f"hw={config.hw.name} has no price"))
    rows += [
        ("speed", f"{result['tokens_per_second']:,.0f} tokens/s over all devices"),
        ("compiled programs", f"{result['num_compiles']}, {result['compiles_after_warmup']} of them after warm-up"),
    ]
    planned = (result.get("plan") or {}).get("step_seconds") or {}
    if planned.get("planned") is not None:
        rows.append(("a step", f"{planned['measured']:.3f} s, planned {planned['planned']:.3f} s"))
    return _table(("", ""), rows)


def _origin(result: Mapping[str, Any], config: Config) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    return _table(
        ("", ""),
        [
            ("code", f"commit {result['git_commit'] or 'unknown'}"),
            ("config", f"hash {result['config_hash']}, seed {config.seed}"),
            ("versions", versions),
        ],
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(map(markdown_line, lines))


def _number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def _difference(new: float | None, old: float | None) -> float | None:
    return None if new is None or old is None else new - old
