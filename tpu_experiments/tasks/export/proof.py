"""The held-out text that exports are compared on, and the comparisons."""

import logging
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import psutil
import torch

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import OF_ROUNDED, LoraConfig
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import EvaluateTaskConfig, WrittenFormsConfig
from tpu_experiments.models.adapters.low_rank_qat import input_settings
from tpu_experiments.objectives.base import model_source
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.storage.run_folder import with_settings_of_run
from tpu_experiments.tasks.evaluate.inputs import NothingHeldOut, evaluation_inputs
from tpu_experiments.tasks.evaluate.subject import BASE_ALONE
from tpu_experiments.tasks.evaluate.subject import subject_of as evaluated
from tpu_experiments.tasks.export.forms import Copy
from tpu_experiments.tasks.export.parity import Account, Parity, Reference, Texts, compare
from tpu_experiments.tasks.export.readers import TrainedModel
from tpu_experiments.tasks.export.rounding import round_weights
from tpu_experiments.tasks.export.scores import Scorer, ScoreReference, Scores, compare_scores
from tpu_experiments.tasks.export.subject import Subject
from tpu_experiments.tasks.generate.origin import Origin
from tpu_experiments.training.batches import stages_with_data
from tpu_experiments.training.row_lengths import measure_rows

log = logging.getLogger(__name__)
MAX_PROMPT = 128
"""Tokens of a document that both models continue."""
MAX_LINE = 400
"""Letters of a line that tokenizers split."""
PART_OF_MEMORY = 0.7
"""Part of the free memory that one model may take while it is compared."""
HARD_LINES = (
    "Știință și tehnică: „țară”, «înțeles», ăâîșț ĂÂÎȘȚ",
    "日本語のテキスト、中文文本、한국어 텍스트",
    "🚀 👩‍👩‍👧 naïve café — ½ ≠ ⅓ …",
    "    if x == 3.14159:\treturn [1, 22, 333, 4444, 55555]  # 1,234,567.89",
    "https://example.org/a_b?c=d&e=%20f#g",
)
"""Lines that are always compared: they hold what tokenizers differ in."""


def texts_of(subject: Subject, config: Config) -> Texts:
    """Return held-out text of the run's data, or, without a run, of `data=`.

    Args:
        config: the command's.

    Raises:
        ConfigError: nothing was held out, or the data are not those of training.
    """
    task = subject.task
    for split in ("test", "evaluation"):
        wanted = EvaluateTaskConfig(name="evaluate", split=split, run=task.run, adapter=adapter_of(task))
        try:
            documents = _documents(replace(config, task=wanted), vocab_size=int(subject.source.config.vocab_size))
            break
        except NothingHeldOut:
            if split == "evaluation":
                raise
    order = np.random.Generator(np.random.Philox(key=config.seed)).permutation(len(documents))
    long = [documents[index] for index in order if len(documents[index]) > 1]
    if not long:
        raise ConfigError("no held-out document has two tokens")
    chosen = long[: task.parity.documents]
    if subject.labels is None:  # a score is that of a whole text
        chosen = [ids[: task.parity.tokens] for ids in chosen]
    lines = list(HARD_LINES)
    for ids in long:
        text = str(subject.tokenizer.decode(ids, skip_special_tokens=True))
        lines += [line[:MAX_LINE] for line in text.splitlines() if line.strip()]
    continued = chosen[: task.parity.prompts] if subject.labels is None else []
    prompts = [ids[: max(1, min(MAX_PROMPT, len(ids) // 2))] for ids in continued]
    names = ", ".join(subject.config.data) if task.run is None else f"of {task.run}"
    return Texts(chosen, lines[: task.parity.lines], prompts, f"{split} documents {names}")


def adapter_of(task: WrittenFormsConfig) -> str | None:
    """Return `task.adapter` for task=evaluate; of a model alone, the word for none."""
    return BASE_ALONE if task.run is None and task.adapter is None else task.adapter


def _documents(config: Config, *, vocab_size: int) -> list[list[int]]:
    chosen = evaluated(with_settings_of_run(config))
    chosen = replace(chosen, config=measure_rows(chosen.config))
    splits = evaluation_inputs(chosen, stages_with_data(chosen.config), vocab_size=vocab_size).splits
    return [ids.tolist() for held_out in splits.values() for ids in held_out.texts()]


class Proof:
    """The trained model's account of the texts, made when the first export asks for it.

    Use it as a context: the account is removed at the end.
    """

    def __init__(self, subject: Subject, config: Config) -> None:
        self.subject, self.config = subject, config
        self.arithmetic: torch.dtype | None = None
        self.refusal = ""
        """Why nothing is compared; empty while it can be."""
        self._reference: Reference | ScoreReference | None = None
        self._folder = ExitStack()

    def __enter__(self) -> "Proof":
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.close()

    def check(self, folder: str, copy: Copy) -> Parity:
        """Read one copy of the model from a local folder and compare it."""
        trained = self._trained()
        if trained is None:
            return Parity(copy.label, "not checked", self.refusal)
        assert self.arithmetic is not None
        rounded = self._rounded(trained, copy)
        try:
            export = copy.read(folder, self.arithmetic)
            log.info("%s: %s reads it", copy.label, export.name)
            if isinstance(trained, ScoreReference):
                return compare_scores(
                    trained,
                    cast(Scorer, export),
                    form=copy.label,
                    arithmetic=self.arithmetic,
                    is_exact=copy.is_exact,
                    rounded=cast(Scores | None, rounded),
                )
            return compare(
                trained,
                export,
                form=copy.label,
                arithmetic=self.arithmetic,
                is_exact=copy.is_exact,
                max_ratio=self.subject.task.parity.max_perplexity_ratio,
                rounded=cast(Account | None, rounded),
                rounds_inputs=copy.rounds_inputs,
            )
        except ImportError as error:
            reason = f"{error.name or error} is not installed: `pip install 'tpu_experiments[export]'`"
            return Parity(copy.label, "not checked", reason)
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:300]
            return Parity(copy.label, "worse", f"it cannot be read back ({type(error).__name__}: {reason})")

    def _trained(self) -> Reference | ScoreReference | None:
        if self._reference is not None or self.refusal:
            return self._reference
        subject = self.subject
        self.arithmetic = arithmetic_for(subject)
        if self.arithmetic is None:
            self.refusal = "the model does not fit the memory of this machine beside its log-probabilities"
            return None
        try:
            texts = texts_of(subject, self.config)
        except ConfigError as error:
            self.refusal = f"there is no held-out text: {error}"
            log.warning("exports are not compared: %s", error)
            return None
        log.info("computing what the trained model and its base say of %d documents", len(texts.documents))
        folder = Path(self._folder.enter_context(tempfile.TemporaryDirectory(prefix="parity_")))
        model = self._model(subject.origin)
        reference: Reference | ScoreReference = (
            Reference(model, texts, num=subject.task.parity.max_new_tokens, folder=folder)
            if subject.labels is None
            else ScoreReference(model, texts)
        )
        del model  # one model is in memory at a time
        if subject.origin.trained:
            reference.set_base(self._model(_base_of(subject.origin)))
        self._reference = reference
        return reference

    def _model(self, origin: Origin) -> TrainedModel:
        subject = self.subject
        widened = replace(origin.config.model, dtype=str(self.arithmetic).removeprefix("torch."))
        return TrainedModel(
            model_source(replace(origin.config, model=widened)),
            origin=origin,
            stored=subject.source.dtype,
            runtime=EagerRuntime(replace(self.config.hw, device="cpu", runtime="eager", num_devices=1)),
            tokenizer=subject.tokenizer,
        )

    def _rounded(self, trained: Reference | ScoreReference, copy: Copy) -> Account | Scores | None:
        """Return what the trained model with the form's rounding says; None where that cannot be told."""
        model = self.subject.source.model
        rounds_inputs = model.base_activations == "int8" or input_settings(model) is not None
        if copy.rounded is None or self.arithmetic != torch.float32 or (rounds_inputs and not copy.rounds_inputs):
            return None
        made = self._model(self.subject.origin)
        round_weights(made.module, self.subject.model.tensors(), copy.rounded)
        return trained.of_some(made, name="rounded")


def _base_of(origin: Origin) -> Origin:
    """Return the model that training began with, whole."""
    model = origin.config.model
    if model.linear == "lr_qat":  # rounded by adapters, of which it has none
        model = replace(model, linear="plain", **OF_ROUNDED)
    config = replace(origin.config, model=model)
    return replace(origin, config=config, lora=LoraConfig(r=0), trained={}, reduced_with_seed=None)


def arithmetic_for(subject: Subject) -> torch.dtype | None:
    """Return the data type in which a model fits the free memory: float32 or bfloat16; None if neither does."""
    count = sum(shape.numel() for shape in subject.model.shapes.values())
    free = psutil.virtual_memory().available * PART_OF_MEMORY
    return next((dtype for dtype in (torch.float32, torch.bfloat16) if count * dtype.itemsize <= free), None)
