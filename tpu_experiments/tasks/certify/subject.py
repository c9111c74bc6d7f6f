"""What a certificate is of: a model without its weights, a small copy of it, and what is compared of both."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from tpu_experiments.config.errors import ConfigError, one_line
from tpu_experiments.config.folders import has_tokenizer
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.config.schema import Config
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.parts.rope import row_limits
from tpu_experiments.models.sources.build import shapes_of_base
from tpu_experiments.models.sources.isolation import (
    Unchecked,
    check_isolation,
    check_left_padding,
    require_small,
    shallow_copy,
    small_copy,
    unchecked_refusal,
)
from tpu_experiments.models.sources.loaded import check_loaded
from tpu_experiments.objectives.base import model_source
from tpu_experiments.storage.paths import find_local
from tpu_experiments.tasks.certify import tokens
from tpu_experiments.tasks.certify.checks import NotChecked, Seen, Wrong, within
from tpu_experiments.tasks.certify.numerics import (
    DOCUMENTS,
    GRADIENT_TOLERANCE,
    TOLERANCE,
    Rows,
    SmallCheckpoint,
    alone,
    small_lora,
    write_random,
)
from tpu_experiments.tasks.certify.page import files_of
from tpu_experiments.training.batches import load_run_tokenizer, tokenizer_location

WEIGHTS = ("*.safetensors*", "pytorch_model*", "model*.bin", "consolidated*", "*.pth", "tf_model*", "flax_model*")
"""Files of a folder that hold weights, in any format."""


def has_weights(folder: Path) -> bool:
    """Return whether a folder has files of weights, those that cannot be read here among them."""
    return any(any(folder.glob(pattern)) for pattern in WEIGHTS)


@dataclass
class Subject:
    """What is certified: a config, its model without weights, and a small copy of it."""

    config: Config
    source: HuggingFaceModel
    place: Path
    """Folder for the copy."""
    copy_text: str | None = None
    """What the copy is, once it is made."""

    @property
    def is_packed(self) -> bool:
        """Whether rows hold several documents."""
        return self.config.prepare.packing == "best_fit"

    @property
    def lora(self) -> LoraConfig | None:
        """The config's adapters in a small rank; None without any."""
        return small_lora(self.config.lora) if self.config.lora.r else None

    @property
    def folder(self) -> Path | None:
        """Folder of the checkpoint; None of a model without one."""
        return self.source.folder

    def files(self) -> dict[str, str]:
        """Return the SHA-256 of the files of model and tokenizer."""
        return files_of(self.folder, find_local(tokenizer_location(self.config)))

    @cached_property
    def small(self) -> tuple[SmallCheckpoint, HuggingFaceModel, Rows]:
        """The copy as a checkpoint, its source as training reads it, and a row.

        Raises:
            NotChecked: the objective's models are not compared, a run is refused, or transformers computes no copy.
            ConfigError: its source is refused.
        """
        source = self.source
        if isinstance(self.isolated, ConfigError):
            raise NotChecked("no run computes with this model, as its isolation is refused")
        if source.head not in ("causal_lm", "masked_lm") or (source.head == "causal_lm") != source.causal:
            raise NotChecked(
                f"objective={self.config.objective.name}; small copies are of decoders that predict the next token and "
                "of masked language models"
            )
        reasons: list[str] = []
        for what, copied in COPIES.items():
            try:
                config = copied(source.config)
                require_small(config, source)
                reference = write_random(config, self.place, head=source.head)
                made = SmallCheckpoint(
                    self.place,
                    reference,
                    name=self.config.model.name,
                    lora=self.lora or LoraConfig(r=0),
                    head=source.head,
                    causal=source.causal,
                )
                rows = made.rows(is_packed=self.is_packed)
                if not bool(alone(reference, rows).isfinite().all()):
                    raise ValueError("its logits are NaN or infinite")
            except Exception as error:  # each class checks and computes in its own way
                reasons.append(one_line(error))
                continue
            self.copy_text = f"{what}: {shape_of(config)}; float32, random weights"
            small = made.source(self.config.model.attention)
            _require_length(small, length=int(rows["ids"].shape[1]))
            return made, small, rows
        raise NotChecked(f"transformers computes no small copy of this config ({reasons[-1]})")

    @cached_property
    def expected(self) -> Any:
        """Logits (T, V) of the row's documents by transformers, each alone."""
        made, _, rows = self.small
        return alone(made.reference, rows)

    @cached_property
    def isolated(self) -> dict[str, float] | ConfigError | Unchecked:
        """What `check_isolation` returns or raises."""
        try:
            return check_isolation(self.source, is_packed=self.is_packed)
        except (ConfigError, Unchecked) as error:
            return error

    def isolation(self) -> Seen:
        """Check that documents do not reach one another, and that attention is as the objective says."""
        moved = self.isolated
        if isinstance(moved, Unchecked) and self.is_packed:
            raise unchecked_refusal(self.source, moved)
        if isinstance(moved, Unchecked):
            raise NotChecked(f"transformers computes no small copy of this config ({moved})")
        if isinstance(moved, ConfigError):
            raise moved
        kinds = "two documents of a row" if self.is_packed else "a document and the padding behind it"
        agree = {name: value for name, value in moved.items() if name != "past" or self.source.causal}
        return Seen(f"{kinds} have the logits of each alone, to {max(agree.values()):.1g} of the largest", moved)

    def logits(self) -> Seen:
        """Compare the logits of the copy, loaded and called as training does, with transformers'."""
        made, source, rows = self.small
        found = made.logits_apart(made.built(source), rows, self.expected)
        return within(found, most=TOLERANCE, what="logits of the loaded model and of transformers")

    def weights(self) -> Seen:
        """Compare the checkpoint itself, as it is loaded, with transformers."""
        if self.folder is None or not has_weights(self.folder):
            raise NotChecked("there are no weights; a copy of the config with random ones is compared above")
        self.require_all_read()
        done = check_loaded(model_source(self.config), lora=self.config.lora, is_packed=self.is_packed)
        if done.reason:
            raise NotChecked(done.reason)
        return Seen(f"with {done.part} the logits agree to {done.apart:.1g} of the largest", {"logits": done.apart})

    def require_all_read(self) -> None:
        """Require what training does: every parameter in its shape, nothing that is left unread, no value NaN.

        transformers leaves tensors that it does not know, and the comparison of a large model has its first layers.

        Raises:
            ConfigError: the checkpoint is refused.
        """
        source = model_source(self.config)
        if source.random:
            return
        shapes = shapes_of_base(source.empty())
        source.require_weights(shapes)
        for _ in source.weights(list(shapes)):  # each is checked as it is read, and held no longer
            pass

    def adapter(self) -> Seen:
        """Compare adapters with PEFT's, or, without adapters, the gradients of all weights with transformers'."""
        made, source, rows = self.small
        if self.lora is None:
            found = made.trains(source, rows)
            return within({"gradients": found}, most=GRADIENT_TOLERANCE, what="gradients of all weights")
        if not self.source.causal:
            raise NotChecked("adapters are for decoders")
        if importlib.util.find_spec("peft") is None:
            raise NotChecked("PEFT is not installed; pip install 'tpu_experiments[export]'")
        adapted = made.adapts(source, rows, self.expected)
        what = "adapters and those of " + ("PEFT" if not adapted.peft else "a merge, as PEFT takes no such model,")
        seen = within({"logits": adapted.logits}, most=TOLERANCE, what=f"logits of {what}")
        if adapted.moves < 100 * TOLERANCE:
            raise Wrong(f"adapters move the logits by {adapted.moves:.1g} of the largest, so that nothing was compared")
        if adapted.gradients is not None:
            within({"gradients": adapted.gradients}, most=GRADIENT_TOLERANCE, what=f"gradients of {what}")
        figures = seen.figures | {"gradients": adapted.gradients, "moves": adapted.moves, "targets": adapted.targets}
        return Seen(f"{seen.said}, on {', '.join(adapted.targets)}", figures)

    def folded(self) -> Seen:
        """Compare the layers in a loop with the layers one by one."""
        made, source, rows = self.small
        found, has_loop = made.folds(source, rows, lora=self.usable_lora)
        seen = within({"logits": found}, most=TOLERANCE, what="logits of layers in a loop and one by one")
        return seen if has_loop else Seen("no layers are alike, so that none are in a loop", {"folds": False})

    def export(self) -> Seen:
        """Compare the merged export, as transformers reads it, with the model and its adapters."""
        made, source, rows = self.small
        found = made.exports(source, rows, lora=self.usable_lora)
        return within({"logits": found}, most=TOLERANCE, what="logits of the model and of its merged export, read back")

    def generation(self) -> Seen:
        """Compare tokens written with a cache with those that transformers computes without one."""
        made, source, rows = self.small
        if not self.source.causal:
            raise NotChecked("the model writes no text")
        check_left_padding(self.source)
        ours, theirs = made.generates(source, rows["ids"][0, : DOCUMENTS[1]].tolist())
        if ours != theirs:
            raise Wrong(f"tokens written with a cache are {ours}, and transformers computes {theirs}")
        return Seen(f"{len(ours)} tokens written with a cache are those that transformers computes without one")

    @property
    def usable_lora(self) -> LoraConfig | None:
        """The adapters; None where they are refused, which their own check says."""
        made, source, _ = self.small
        if self.lora is None or not self.source.causal:
            return None
        try:
            made.built(source, lora=self.lora)
        except ConfigError:
            return None
        return self.lora

    @cached_property
    def tokenizer(self) -> Any:
        """The run's tokenizer.

        Raises:
            NotChecked: the folder has none.
            ConfigError: it cannot be read.
        """
        place = find_local(tokenizer_location(self.config))
        if place is not None and place.is_dir() and not has_tokenizer(place):
            raise NotChecked(f"{place} has no tokenizer; name one with model.tokenizer_path=")
        return load_run_tokenizer(self.config)

    def texts(self) -> Seen:
        """Check the tokenizer."""
        return tokens.look_at_texts(self.tokenizer, config=self.source.config)

    def chats(self, look: Callable[..., Seen]) -> Seen:
        """Check the chat template."""
        if not self.source.causal:
            raise NotChecked("the model writes no answers")
        return look(self.tokenizer, config=self.source.config, folder=self.folder)


COPIES: dict[str, Callable[[PretrainedConfig], PretrainedConfig]] = {
    "a small copy with the model's own RoPE": partial(small_copy, keeps_rope=True, periods=2),
    "a small copy with plain RoPE": partial(small_copy, periods=2),
    "the model's widths in few layers": shallow_copy,
}
"""By what they are, the first that transformers computes is taken."""


def shape_of(config: PretrainedConfig) -> str:
    """Return the sizes of a copy in words."""
    names = {"num_hidden_layers": "layers", "hidden_size": "features", "vocab_size": "tokens"}
    sizes = ((getattr(config, name, None), word) for name, word in names.items())
    return ", ".join(f"{size} {word}" for size, word in sizes if size is not None)


def _require_length(source: HuggingFaceModel, *, length: int) -> None:
    """Require the model to take rows of the copy's length.

    Raises:
        NotChecked: it does not.
    """
    for name, limit in row_limits(source.config).items():
        if length > limit:
            raise NotChecked(f"rows of {length} tokens are compared, and the model takes {limit} ({name})")
