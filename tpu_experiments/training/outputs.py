"""Outputs of a run, written by rank 0: audit and plan, log records, the export and result.json.

<run>/audit.html, audit.json   as written by task=prepare
<run>/plan.md, plan.json       the compiled plan of the same programs; otherwise estimates, or why there are none
"""

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from torch import Tensor

from tpu_experiments.callbacks.base import Ended
from tpu_experiments.checkpoint.progress import AnswersRecord, EpochRecord
from tpu_experiments.checkpoint.state import shapes_of, to_host, to_host_one_by_one
from tpu_experiments.config.escaping import for_markdown
from tpu_experiments.config.model_schema import rounded_settings
from tpu_experiments.config.schema import Config
from tpu_experiments.data.audit.findings import Finding, audit_findings
from tpu_experiments.data.audit.page import audit_pages, write_audit_pages
from tpu_experiments.data.audit.summary import audit_json, audit_table
from tpu_experiments.export.full import write_model
from tpu_experiments.export.peft import DECODER_TASK, TASK_TYPES, write_adapter
from tpu_experiments.loggers.base import Loggers
from tpu_experiments.loggers.jsonl import METRICS_FILE, read_records
from tpu_experiments.loggers.plan_estimates import Measured, PlanEstimates, compared_with_plan
from tpu_experiments.loggers.result import write_result
from tpu_experiments.metrics.goodput import parts_text
from tpu_experiments.models.adapters.lora import adapted_weights
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.sources.buffers import persistent_buffers, shapes_of_buffers
from tpu_experiments.models.sources.build import BuiltModel
from tpu_experiments.objectives.base import objective_class, writes_text
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.retry import is_explained, shown
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.storage.spool import Spool
from tpu_experiments.training.batches import RunInputs, expected_programs
from tpu_experiments.training.callbacks import Callbacks
from tpu_experiments.training.card import write_card
from tpu_experiments.training.epochs import perplexity
from tpu_experiments.training.evaluation import Evaluation
from tpu_experiments.training.lives import Ledger
from tpu_experiments.training.meters import Meters, Reading
from tpu_experiments.training.pictures import audit_figure, loss_figure, png_of
from tpu_experiments.training.result import Ending, result_fields
from tpu_experiments.training.side_files import side_files


def write_pages(
    folder: RunFolder, *, inputs: RunInputs, estimates: PlanEstimates, loggers: Loggers, is_new: bool
) -> None:
    """Write audit and plan, unless the folder has them.

    With `is_new` the loggers get them too; for a resumed run they already have.
    """
    if not paths.exists(folder.path("audit.html")):
        write_audit(folder, inputs)
    if not paths.exists(folder.path("plan.md")):
        write_plan(folder, estimates)
    if is_new:
        loggers.text(0, tag="audit", text=f"```\n{audit_table(manifests_of(inputs))}```")
        loggers.text(0, tag="plan", text=paths.read_text(folder.path("plan.md")))


def manifests_of(inputs: RunInputs) -> list[dict[str, object]]:
    """Return the manifests of every source at every row length."""
    return [manifest for source in inputs.sources.values() for manifest in source.manifests.values()]


def findings_of(inputs: RunInputs) -> list[Finding]:
    """Return what the audit finds in the data of a run: its log, its closing lines and result.json say all of it.

    Where the model writes its own rows, nothing is said of the tokens of the prepared ones.
    """
    return audit_findings(manifests_of(inputs), are_rows_learnt=not inputs.prompts)


def write_audit(folder: RunFolder, inputs: RunInputs) -> None:
    """Write the audit, audit.html last, since `write_pages` checks for it."""
    sources, manifests = inputs.sources.values(), manifests_of(inputs)
    stores = {(s.name, length): s.store("train", length) for s in sources for length in s.manifests}
    pages = audit_pages(manifests, stores=stores, tokenizer=inputs.tokenizer, name="audit")
    paths.write_text_atomic(folder.path("audit.json"), strict_json.dumps(audit_json(manifests), indent=1) + "\n")
    write_audit_pages(folder.path(), pages)


def write_plan(folder: RunFolder, estimates: PlanEstimates) -> None:
    """Copy the plan's files, or write the few known figures."""
    text = estimates_text(estimates)
    if estimates.file is not None:
        page = paths.join(estimates.file.rpartition("/")[0], "plan.md")
        paths.write_text_atomic(folder.path("plan.json"), paths.read_text(estimates.file))
        text = paths.read_text(page) if paths.exists(page) else text
    paths.write_text_atomic(folder.path("plan.md"), text)


def estimates_text(estimates: PlanEstimates) -> str:
    """Return the plan's figures as Markdown."""
    if estimates.source is None:
        return f"No plan: {for_markdown(estimates.reason)}.\n"
    lines = [f"Plan: {estimates.source}{f' ({for_markdown(estimates.file)})' if estimates.file else ''}", ""]
    lines += [
        f"- stage {for_markdown(name)}: {seconds:.3g} s a step" for name, seconds in estimates.step_seconds.items()
    ]
    lines += (
        [f"- {estimates.hbm_gib:.2f} GiB per chip are resident between steps"] if estimates.hbm_gib is not None else []
    )
    lines += [f"- {for_markdown(estimates.reason)}"] if estimates.reason else []
    return "\n".join(lines) + "\n"


SHOWN = ("train/loss", "eval/loss", "skill/")
"""Prefixes of the names of values that the loss figure shows."""

log = logging.getLogger(__name__)


class RunOutputs:
    """Outputs of a run: log records, exports and result.json; every method does nothing on ranks above 0."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        *,
        inputs: RunInputs,
        loggers: Loggers | None,
        provenance: dict[str, Any],
        estimates: PlanEstimates,
        ledger: Ledger | None,
        spool: Spool,
        reopen_loggers: Callable[[], Loggers] = lambda: Loggers({}),
        callbacks: Callbacks | None = None,
    ) -> None:
        """Take the outputs' parts; `reopen_loggers` creates the loggers anew, as for a resumed run."""
        self.callbacks = callbacks
        """None where the config has none, and on ranks above 0."""
        self.config, self.folder, self.inputs, self.ledger, self.spool = config, folder, inputs, ledger, spool
        self.loggers, self.provenance, self.estimates = loggers, provenance, estimates
        self.reopen_loggers = reopen_loggers
        self.adapter_path: str | None = None
        self.base_path: str | None = None
        self.part_paths: dict[str, str] = {}
        """Folders of the models that are finished by themselves, by name."""
        self.export_digests: dict[str, str] = {}
        self._steps: Counter[str] = Counter()
        self._tokens = 0
        self._records: list[dict[str, float]] = []
        """Losses and shares of right answers by step, for the loss figure at the end."""
        self._is_first = True

    def rewind(self, step: int, *, num_lost: int) -> None:
        """Restart the loggers after a rollback to `step`; each drops what it wrote after it."""
        if self.ledger is not None:
            self.ledger.roll_back(step, num_lost=num_lost)
        if self.loggers is not None:
            self.loggers.finish("stopped")
            self.loggers = self.reopen_loggers()
        if self.callbacks is not None:
            self.callbacks.rewind()
        self._records = [record for record in self._records if record["step"] <= step]

    def close(self, ended: str = "failed") -> None:
        """Finish the loggers and this process's ledger with how the run `ended`, then deliver spilled files.

        Nothing is logged afterwards.

        Raises:
            StorageFailed: storage is unreachable; the sentence says where the files are kept.
        """
        loggers, self.loggers = self.loggers, None
        try:
            with ExitStack() as stack:
                if self.ledger is not None:
                    stack.callback(self.ledger.close, ended)
                if loggers is not None:
                    stack.callback(loggers.finish, ended)
        except Exception as error:
            if self.ledger is None or not is_explained(error, place=self.folder.path()):
                raise
            log.info("%s; %s: the remaining files are kept in %s", self.folder.path(), shown(error), self.spool.records)
        finally:
            if self.ledger is not None:
                self.spool.close()

    def tell_end(self, ended: Ended, why: str) -> None:
        """Tell the callbacks, once, how this process ended."""
        callbacks, self.callbacks = self.callbacks, None
        if callbacks is not None:
            callbacks.end(ended, why)

    def begin(self, *, step: int, meters: Meters) -> None:
        """Note that training continues from `step`."""
        if self.ledger is not None:
            self.ledger.begin(step=step, input_wait=lambda: meters.input_wait_seconds)
        if self.loggers is not None and step > 0 and not self._records:
            earlier = read_records(self.folder.path(METRICS_FILE))
            self._records = [_figure_values(record) for record in earlier if record["step"] <= step]

    def training(
        self,
        reading: Reading,
        *,
        stage: str,
        meters: dict[str, float],
        groups: Sequence[str],
        layers: Sequence[int] = (),
        measures: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Log one training record: mean loss of the interval, learning rate, norms, shares of codes and meters.

        `measures` are the objective's own, over the interval.

        `groups` names the norms, `layers` numbers the layers with ternary weights.
        """
        if self.loggers is None:
            return
        values = {
            "train/loss": reading.mean_loss,
            **(
                {"train/perplexity": perplexity(reading.mean_loss)}
                if objective_class(self.config).has_perplexity
                else {}
            ),
            "train/lr": reading.lr,
            "train/grad_norm": reading.grad_norm,
            "train/stage": float([s.name for s in self.inputs.stages].index(stage)),
            **{f"train/{name}": value for name, value in measures.items()},
        }
        if reading.loss_scale is not None:
            values["train/loss_scale"] = reading.loss_scale
        if reading.skipped:
            values = {name: value for name, value in values.items() if math.isfinite(value)}
            values["train/skipped"] = float(len(reading.skipped))
        every = self.config.trainer.norms_every_steps
        is_due = bool(every) and reading.step // every > (reading.first_step - 1) // every
        if is_due:
            for layer, shares in zip(layers, reading.shares, strict=False):  # none without a finite step
                named = zip(("minus", "zero", "plus"), shares, strict=True)
                values |= {f"ternary/{name}_layer_{layer:02d}": share for name, share in named}
        if reading.norms and is_due:
            for kind, norms in zip(("grad", "update"), reading.norms, strict=True):
                values |= {f"norms/{kind}_{group}": norm for group, norm in zip(groups, norms, strict=True)}
        self._steps[stage] += reading.num_steps
        self._tokens += reading.num_tokens
        goodput = self.ledger.update(reading.step) if self.ledger is not None else {}
        self._scalars(reading.step, values | meters | goodput)
        if self._is_first and self.ledger is not None:
            self._is_first = False
            life = self.ledger.life
            log.info("step %d, %.1f s after the start: %s", reading.step, life.wall_seconds, parts_text(life.seconds))

    def epoch(self, step: int, record: EpochRecord) -> None:
        """Log the mean loss of a completed pass over a stage's rows, with the log record of its last step."""
        if self.loggers is None:
            return
        values = {"train/epoch": float(record.epoch), "train/epoch_loss": record.loss}
        if objective_class(self.config).has_perplexity:
            values["train/epoch_perplexity"] = perplexity(record.loss)
        self._scalars(step, values)
        log.info("step %d, epoch %d: mean train loss %.4f", step, record.epoch, record.loss)

    def rows(self, step: int, labels: list[str]) -> None:
        """Log the rows of the global batch of a queued step."""
        if self.loggers is not None:
            self.loggers.rows(step, labels)

    def evaluation(self, step: int, evaluation: Evaluation) -> dict[str, float]:
        """Log loss, perplexity, accuracy and bits per byte, over all sources and for each; return what is logged."""
        if self.loggers is None:
            return {}
        kind = "perplexity" if writes_text(self.config) else "masked_perplexity"
        values = {"eval/loss": evaluation.loss}
        values |= {f"eval/{kind}": evaluation.perplexity} if evaluation.has_perplexity else {}
        values |= {f"eval/loss_{source}": loss for source, loss in evaluation.sources.items()}
        values |= {f"eval/{name}": value for name, value in evaluation.measures.items()}
        for source, measured in evaluation.source_measures.items():
            values |= {f"eval/{name}_{source}": value for name, value in measured.items()}
        self._scalars(step, values)
        return values

    def stage_border(self, step: int, text: str) -> None:
        """Log the step after which a stage begins."""
        if self.loggers is not None:
            self.loggers.text(step, tag="stage", text=text)

    def sample(self, step: int, texts: list[str], *, when: str) -> None:
        """Log samples, one for each prompt; `when` is before, during or after."""
        if self.loggers is None:
            return
        pairs = list(zip(self.config.sample.all_prompts, texts, strict=True))
        shown = "\n\n---\n\n".join(f"prompt: {prompt}\n\nmodel: {text}" for prompt, text in pairs)
        self.loggers.text(step, tag="sample", text=f"{when} training\n\n{shown}")
        for prompt, text in pairs:
            log.info("sample %s training: %r -> %r", when, prompt, text)

    def answers(self, step: int, found: Mapping[str, AnswersRecord]) -> None:
        """Log the share of right answers of every set of questions."""
        if self.loggers is None:
            return
        self._scalars(step, {f"skill/{name}": record.right / record.asked for name, record in found.items()})
        for name, record in found.items():
            log.info("step %d, questions %s: %d of %d right", step, name, record.right, record.asked)

    def export(self, model: BuiltModel, *, stored: Mapping[str, Tensor] | None = None) -> None:
        """Write the adapter in PEFT's layout, or for `lora.r: 0` the whole model.

        A base with randomly drawn weights is written too. `stored` has the trained tensors under Hugging Face's names
        where no host holds them whole; each is read when it is written.
        """
        if self.loggers is None:
            return
        source, config = model.source, self.config
        beside = side_files(source, config=config, inputs=self.inputs)
        writing = beside | {
            "architecture": type(model.module).__name__,
            "dtype": source.dtype,
            "max_shard_bytes": config.checkpoint.max_shard_gib * 2**30,
        }
        if config.lora.r == 0:
            self.adapter_path = self.folder.path("model")
            shapes, buffers = shapes_of(model.trainable), persistent_buffers(source.empty())
            tensors = to_host_one_by_one(model.trainable)
            if stored is not None:
                tensors = ((name, stored[name]) for name in shapes)
            tensors = itertools.chain(tensors, buffers.items())
            shapes |= shapes_of_buffers(buffers)
            self.export_digests = write_model(self.adapter_path, tensors=tensors, shapes=shapes, **writing)
            self._export_parts(model, writing, stored=stored)
            return
        self.base_path = source.reference
        if source.random:
            self.base_path = paths.absolute(self.folder.path("base"))
            empty = source.empty()
            parameters, buffers = dict(empty.named_parameters()), persistent_buffers(empty)
            weights = ((w.name, w.tensor) for w in source.weights(list(parameters)))
            tensors = itertools.chain(weights, buffers.items())
            write_model(self.base_path, tensors=tensors, shapes=parameters | shapes_of_buffers(buffers), **writing)
        self.adapter_path = self.folder.path("adapter")
        trained = to_host(model.trainable) if stored is None else stored
        own = {name: beside[name] for name in ("tokenizer", "generation", "lines")}
        self.export_digests = self.write_adapter(self.adapter_path, model, trained, **own)

    def write_adapter(
        self, place: str, model: BuiltModel, trained: Mapping[str, Tensor], **beside: Any
    ) -> dict[str, str]:
        """Write an adapter in PEFT's layout into a folder, and return the SHA-256 of its files.

        Args:
            trained: its tensors on the host, under Hugging Face's names.
            beside: further arguments, as of export/peft.py.
        """
        source, config = model.source, self.config
        return write_adapter(
            place,
            parameters={source.outer_name(name): t for name, t in trained.items()},
            initial={source.outer_name(name): t for name, t in model.taken_out.items()},
            lora=config.lora,
            base_path=self.base_path or source.reference,
            revision=config.model.revision,
            is_transposed=any(adapted_weights(model.module).values()),
            rounded=rounded_settings(config.model),
            task_type=TASK_TYPES.get(source.head, DECODER_TASK),
            tied=source.tied_names,
            **beside,
        )

    def _export_parts(
        self, model: BuiltModel, writing: Mapping[str, Any], *, stored: Mapping[str, Tensor] | None
    ) -> None:
        """Write the models that are finished by themselves, each in a folder of its own."""
        if not isinstance(model.source, HuggingFaceModel) or type(model.source).parts is HuggingFaceModel.parts:
            return
        for part in model.source.parts(to_host(model.trainable) if stored is None else stored):
            place = self.folder.path(part.name)
            own = {"config": part.config, "architecture": part.architecture, "tensors": part.tensors}
            write_model(place, **{**writing, **own})
            self.part_paths[part.name] = place
            log.info("%s of the trained model: %s", part.name, place)

    def result(self, ending: Ending) -> None:
        """Write result.json, last and atomically."""
        if self.loggers is None:
            return
        config, loss = self.config, ending.evaluation.loss
        hparams: dict[str, Any] = {"model": config.model.name, "data": ", ".join(config.data), "hw": config.hw.name}
        hparams |= {"curriculum": config.curriculum.name, "lora.r": config.lora.r, "lora.alpha": config.lora.alpha}
        first = self.inputs.stages[0]
        hparams |= {"lr": first.lr, "rows": first.geometry.global_rows, "seq_len": first.geometry.seq_len}
        hparams |= {"seed": config.seed}
        self._pictures(ending)
        metrics = {"hparam/eval_loss": loss, "hparam/perplexity": ending.evaluation.perplexity}
        self.loggers.hparams(hparams, {name: v for name, v in metrics.items() if math.isfinite(v)})
        goodput = self.ledger.result() if self.ledger is not None else None
        self.close("finished")
        fields = result_fields(ending, config=config, provenance=self.provenance)
        fields |= {
            "findings": [asdict(finding) for finding in findings_of(self.inputs)],
            "adapter_path": self.adapter_path,
            "base_path": self.base_path,
            **({"parts": self.part_paths} if self.part_paths else {}),
            "expected_programs": expected_programs(self.inputs, config),
            "not_read": {manifest["source"]: manifest.get("not_read", {}) for manifest in manifests_of(self.inputs)},
        }
        fields["tuned"] = self.estimates.tuned
        fields |= {"plan": compared_with_plan(self.estimates, self._measured(ending)), "goodput": goodput}
        write_card(self.folder, fields, config, self.inputs.stages)
        write_result(self.folder, fields)

    def _scalars(self, step: int, values: dict[str, float]) -> None:
        assert self.loggers is not None
        self.loggers.scalars(step, values)
        if self.callbacks is not None:
            self.callbacks.log(step, values)
        self._records.append(_figure_values(values | {"step": step}))

    def _pictures(self, ending: Ending) -> None:
        """Log losses and data as images, if a logger accepts them."""
        assert self.loggers is not None
        if not self.loggers.takes_images():
            return
        progress = ending.progress
        before = "-" if progress.eval_loss_before is None else f"{progress.eval_loss_before:.4f}"
        title = f"{self.config.name}: held-out loss {before} -> {ending.evaluation.loss:.4f}"
        stages = {record.name: record.steps for record in progress.stages}
        manifests = [manifest for source in self.inputs.sources.values() for manifest in source.manifests.values()]
        figures = {"loss": loss_figure(self._records, stages=stages, title=title), "audit": audit_figure(manifests)}
        for tag, figure in figures.items():
            self.loggers.image(progress.step, tag=tag, png=png_of(figure))

    def _measured(self, ending: Ending) -> Measured:
        """Return the measurements to compare with the plan, on the time base of `tokens_per_second`."""
        shapes = {stage.name: stage.geometry for stage in self.inputs.stages}
        return Measured(
            steps=dict(self._steps),
            step_tokens={name: shape.global_rows * shape.seq_len for name, shape in shapes.items()},
            train_seconds=self._tokens / ending.tokens_per_second if self._tokens else None,
            hbm_gib=ending.device_memory_gib,
            compile_seconds=ending.counters.compile_seconds,
            num_devices=self.config.hw.num_devices,
        )


def _figure_values(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the step, the losses and the shares of right answers of a log record."""
    return {name: value for name, value in record.items() if name == "step" or name.startswith(SHOWN)}
