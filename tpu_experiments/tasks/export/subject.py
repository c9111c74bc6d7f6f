"""What is exported: the trained weights, their base, the tokenizer, and the folder of the forms."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import OF_VOCABULARY, PATTERNS, ModelConfig, has_patterns
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import ExportTaskConfig, QuantizeTaskConfig, WrittenFormsConfig
from tpu_experiments.export.generation import generation_config, model_config
from tpu_experiments.export.weights import WholeModel, whole_model
from tpu_experiments.models.adapters.lora import adapter_weights, fingerprint
from tpu_experiments.models.huggingface import DTYPES, HuggingFaceModel
from tpu_experiments.objectives.base import model_source, scores_texts, writes_text
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.tasks.generate.origin import Origin, origin_of
from tpu_experiments.training.batches import load_run_tokenizer

OF_CODES = (
    "method",
    "bits",
    "group",
    "vector",
    "codebook",
    "residual",
    "outliers",
    "outlier_codebook",
    "rows",
    "row_tokens",
)
"""Settings of task=quantize that determine what is written."""
OF_DENSE = ("gguf", "int8", "nf4")
"""Forms that are for weights with as many bits as training gave them."""
OF_LINEAR = {
    "plain": ((*OF_DENSE, "peft"), "its weights are neither ternary nor rounded to integers in training"),
    "bitnet": (("bitnet",), "its weights are ternary: name bitnet or merged"),
    "lr_qat": (("lr_qat",), "its adapter decides how weights are rounded to integers: name lr_qat or merged"),
}
"""By `model.linear`, the forms beside `merged` that its weights have, and why no others."""


OF_SCORES = ("peft", "merged")
"""Forms of decoders that give scores; the others are of decoders that write text."""


@dataclass(frozen=True)
class Subject:
    """Everything that is exported."""

    config: Config
    """The command's config with the run's model, adapter and seed."""
    task: WrittenFormsConfig
    origin: Origin
    source: HuggingFaceModel
    model: WholeModel
    tokenizer: PreTrainedTokenizerBase
    place: str
    """Folder of the forms."""
    generation: str | None = None
    """Text of generation_config.json; None for a model that has none."""

    @property
    def forms(self) -> list[str]:
        """Forms to write, each once."""
        if isinstance(self.task, QuantizeTaskConfig):
            return [self.task.method]
        assert isinstance(self.task, ExportTaskConfig)
        whole = ["merged"] if self.origin.lora.r == 0 else ["peft", "merged"]
        whole = ["lr_qat"] if self.is_rounded else whole
        return list(dict.fromkeys(self.task.forms or whole))

    @property
    def labels(self) -> Mapping[int, str] | None:
        """Names of the outputs of a model that scores texts, by number; None of one that writes text."""
        return dict(self.source.config.id2label) if scores_texts(self.origin.config) else None

    @property
    def is_rounded(self) -> bool:
        """Whether the adapter is of weights that are rounded to integers in training."""
        return self.origin.config.model.linear == "lr_qat" and self.origin.lora.r > 0

    @property
    def dtype(self) -> torch.dtype:
        """Data type of weights that are not quantised."""
        return DTYPES[self.task.dtype] if self.task.dtype else self.source.dtype

    @property
    def base_path(self) -> str:
        """The base model as an adapter names it: a folder, or a Hub id."""
        if self.source.random and self.task.run is not None:
            return paths.absolute(paths.join(self.task.run, "base"))
        return self.source.reference

    @property
    def max_shard_bytes(self) -> float:
        """Largest file of weights."""
        return self.task.max_shard_gib * 2**30

    def taken_out(self) -> dict[str, Tensor]:
        """Return the A and B that a checkpoint of PiSSA lacks in its base; of an export, nothing."""
        origin = self.origin
        if origin.reduced_with_seed is None:
            return {}
        found: dict[str, Tensor] = {}
        names = [f"{name.rpartition('.')[0]}.weight" for name in origin.trained if name.endswith("lora_A")]
        for base in self.source.weights(names):
            _, *pair = adapter_weights(
                base, lora=origin.lora, seed=origin.reduced_with_seed, is_transposed=self.model.is_transposed
            )
            found |= {part.name: part.tensor for part in pair if not part.name.endswith("magnitude_vector")}
        return found

    def digest(self) -> str:
        """Return the SHA-256 of everything that determines what is written."""
        origin, task = self.origin, self.task
        facts = {
            "trained": {name: fingerprint(tensor) for name, tensor in sorted(origin.trained.items())},
            "lora": [origin.lora.r, origin.lora.alpha, origin.lora.scaling, origin.lora.dora],
            **({key: getattr(origin.lora, key) for key in PATTERNS} if has_patterns(origin.lora) else {}),
            **({key: value for key in OF_VOCABULARY if (value := getattr(origin.lora, key))}),
            "reduced_with_seed": origin.reduced_with_seed,
            "base": [self.base_path, origin.config.model.revision, origin.config.model.dtype],
            **({"linear": _linear_of(origin.config.model)} if origin.config.model.linear != "plain" else {}),
            "quantised": [origin.config.model.base, origin.config.model.base_double_quant],
            "drawn_with_seed": origin.config.seed if self.source.random else None,
            "dtype": str(self.dtype),
            "gguf_types": sorted(task.gguf_types) if isinstance(task, ExportTaskConfig) else [],
            "max_shard_gib": task.max_shard_gib,
            "chat_template": self.tokenizer.chat_template,
            "generation": self.generation,
            "parity": asdict(task.parity),
        }
        if isinstance(task, QuantizeTaskConfig):
            facts["codes"] = {key: getattr(task, key) for key in OF_CODES}
        return hashlib.sha256(strict_json.dumps(facts).encode()).hexdigest()


def subject_of(config: Config, task: WrittenFormsConfig) -> Subject:
    """Find what is exported, and check it.

    Raises:
        ConfigError: something is missing or does not match, or the forms ask for an adapter and there is none.
    """
    needs_training = isinstance(task, ExportTaskConfig)
    if needs_training and task.run is None and task.adapter is None:
        raise ConfigError("task=export; it needs task.run=FOLDER of a run, or task.adapter=FOLDER with model=NAME.")
    origin = origin_of(config, task)
    if not writes_text(origin.config):
        _require_scores(task, origin)
    source = model_source(origin.config)
    if needs_training and not origin.trained:
        raise ConfigError(f"{origin.text}; it has no trained weights; name a run with task.run=.")
    if isinstance(task, ExportTaskConfig) and "peft" in task.forms and origin.lora.r == 0:
        raise ConfigError(f"task.forms has peft, and {origin.text} has no adapter; leave it out of task.forms.")
    linear = origin.config.model.linear
    if linear == "lr_qat" and origin.lora.r == 0:
        linear = "plain"  # its base
    asked, (own, reason) = task.forms if isinstance(task, ExportTaskConfig) else [], OF_LINEAR[linear]
    wrong = [form for form in asked if form not in ("merged", *own)]
    if wrong:
        raise ConfigError(
            f"task.forms has {wrong[0]}, and {origin.text} was trained with model.linear={linear}; {reason}."
        )
    if linear != "plain" and not isinstance(task, ExportTaskConfig):
        raise ConfigError(
            f"task={task.name}; {origin.text} was trained with model.linear={linear}, whose weights are quantised "
            f"already; write them with task=export 'task.forms=[{own[0]}]'."
        )
    model = whole_model(
        source,
        lora=origin.lora,
        trained=origin.trained,
        reduced_with_seed=origin.reduced_with_seed,
        origin=origin.text,
    )
    if model.parted and asked != ["peft"]:
        raise ConfigError(model.parted)
    place = task.folder
    if place is None and task.run is not None:
        place = paths.join(task.run, "export")
    if place is None:
        place = paths.join(config.output_dir, "exports", str(config.name))
    tokenizer = load_run_tokenizer(origin.config)
    model = replace(model, config=model_config(source, tokenizer=tokenizer))
    kinds = origin.kinds or {source.kind for source in origin.config.data.values()}
    generation = generation_config(
        source, tokenizer=tokenizer, learns_turns=not kinds <= {"text"}, writes_text=writes_text(origin.config)
    )
    return Subject(origin.config, task, origin, source, model, tokenizer, place, generation)


def _require_scores(task: WrittenFormsConfig, origin: Origin) -> None:
    """Require a model that writes no text to be one whose scores are compared, and the forms to be those it has.

    Raises:
        ConfigError: it is of another kind, or a form has no such head.
    """
    trained = f"{origin.text} was trained with objective={origin.config.objective.name}"
    if not scores_texts(origin.config):
        raise ConfigError(
            f"{trained}; task={task.name} compares what decoders write or score; the run's own model/ is what "
            "transformers' class for it loads, as it is."
        )
    linear = origin.config.model.linear
    if not isinstance(task, ExportTaskConfig) or (linear == "lr_qat" and origin.lora.r):
        raise ConfigError(
            f"{trained}"
            + (f" and model.linear={linear}" if isinstance(task, ExportTaskConfig) else "")
            + f"; task={task.name} quantises models that write text alone; of plain weights, task=export writes "
            f"{' and '.join(OF_SCORES)}."
        )
    wrong = [form for form in task.forms if form not in OF_SCORES]
    if wrong:
        raise ConfigError(
            f"task.forms has {wrong[0]}, and {trained}, whose model gives scores; leave it out: its forms are "
            f"{' and '.join(OF_SCORES)}."
        )
    if task.parity.max_perplexity_ratio is not None:
        raise ConfigError(
            f"task.parity.max_perplexity_ratio={task.parity.max_perplexity_ratio}; {trained}, whose scores have no "
            "perplexity; leave it out."
        )


def _linear_of(model: ModelConfig) -> str | list[str | int]:
    """Return what determines the quantised weights of a model, for its digest."""
    if model.linear != "lr_qat":
        return model.linear
    return [model.linear, model.linear_bits, model.linear_group, model.linear_activations]
