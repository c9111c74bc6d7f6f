"""Training objectives: what a model learns from rows of tokens, and what the loss is divided by.

`objective._target_` names the class. It is made with the keys of its config beside `name` and `_target_`, with
`computing`, and, where the class has `takes_tokenizer = True`, with `tokenizer`. A loss may have several parts, each
divided by a number of predictions of its own; the gradient is that of the sum of the parts' means.
Legend: R rows, T tokens, G parts of a loss.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, cast

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.objectives.classify import ClassifyConfig
from tpu_experiments.config.objectives.masked_diffusion import MaskedDiffusionConfig
from tpu_experiments.config.schema import Config
from tpu_experiments.config.targets import locate
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.loss import Scores
from tpu_experiments.optim.base import ParameterGroup
from tpu_experiments.runtime.ops import Constrain, Loop, python_loop, unconstrained

Rows = Mapping[str, Tensor]
"""`ids`, `learn`, `positions`, `segments`, (R, T) int32 each; with `Objective.draws` also `noise`, (R,) int32."""


class Place(Protocol):
    """`Runtime.place`."""

    def __call__(self, tensor: Tensor, *, name: str) -> Tensor:
        """Copy a tensor to the device."""
        ...


def on_host(tensor: Tensor, *, name: str) -> Tensor:
    """Return the tensor itself; for processes without a device."""
    return tensor


@dataclass(frozen=True)
class Computing:
    """How a process computes losses."""

    chunk_tokens: int | None = None
    """Tokens per device whose logits exist at once; None: those of all tokens."""
    num_shards: int = 1
    """Devices of this process that the rows are split over."""
    loop: Loop = python_loop
    constrain: Constrain = unconstrained
    place: Place = on_host
    """Copies a table of the objective's own to the device."""

    def of_head(self) -> dict[str, Any]:
        """Return the arguments by which `next_token_loss` computes the logits."""
        return {name: value for name, value in vars(self).items() if name != "place"}


@dataclass(frozen=True)
class Summary:
    """Results of some held-out rows."""

    loss: float
    """Loss as in training; NaN without predictions."""
    num_predictions: int
    measures: dict[str, float]
    """Further figures by name; unknown ones are left out."""


class Measured(Protocol):
    """An objective with held-out measures of its own."""

    def sums(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Tensor:
        """Return sums over the rows, (K,) float32, without a gradient; they are added over batches and processes."""
        ...

    def summary(self, sums: Sequence[float]) -> Summary:
        """Return loss and measures of all rows from their sums."""
        ...


class Objective(Protocol):
    """A training objective; the class that `objective._target_` names must implement it."""

    draws: bool
    """Whether rows come with a random word each, `noise`. It is a function of seed, stage, step and the row's number in
    the global batch, in evaluations of seed and row, so that a resumed run draws the same on any devices."""
    reads_draws: bool
    """Whether the loss depends on tokens that the model itself draws, False where left out: rounding may change one."""
    has_scores: bool
    """Whether `scores` returns something: accuracy and bits per byte are then measured in evaluations."""
    causal: bool
    """Whether a token attends to those before it alone, which is the default, or to its whole document. The objective
    passes it to `logits_of` and `hidden_of` (models/passes/forward.py). Without it, runs write no samples."""
    head: str
    """What the model has on top of its layers: `causal_lm`, which is the default, `masked_lm` or
    `sequence_classification` (`HEADS` in models/huggingface.py), or `own` where `model._target_` makes the model."""

    def count(self, rows: Rows) -> Tensor:
        """Return the number of predictions that a micro-batch's loss is the sum over, shape (), float32.

        The gradient is divided by its sum over the global batch. Of a loss with parts the shape is (G,), and the
        gradient of each part is divided by its own number.
        """
        ...

    def row_loss(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the loss sum, which is differentiated, and the number of predictions of every row, (R,) each.

        Of a loss with parts both are (R, G).

        Args:
            parameters: trainable parameters by name, float32, to be used in the place of the module's own.
        """
        ...

    def scores(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Scores:
        """Return loss and hit of every token, without a gradient, for evaluations; left out without `has_scores`."""
        ...


ASSUMED_LABELS = ("0", "1")
"""Labels of a plan whose data is not prepared."""


def objective_of(
    config: Config, computing: Computing, *, tokenizer: PreTrainedTokenizerBase | None = None
) -> Objective:
    """Make the objective that `objective._target_` names, with the settings of `objective`.

    Args:
        tokenizer: None in a plan; given to objectives whose class has `takes_tokenizer`.
    """
    settings = asdict(config.objective)
    for name in ("_target_", "name"):
        settings.pop(name)
    kind = locate(config.objective._target_, key="objective")
    more = {"tokenizer": tokenizer} if getattr(kind, "takes_tokenizer", False) else {}
    objective: Objective = kind(**settings, **more, computing=computing)
    return objective


def has_perplexity(config: Config) -> bool:
    """Return whether the objective's loss is the mean of -log p of tokens, so that exp(loss) is a perplexity.

    A class says so by its attribute `has_perplexity`, True where it has none.
    """
    return bool(getattr(locate(config.objective._target_, key="objective"), "has_perplexity", True))


def has_bound(config: Config) -> bool:
    """Return whether the objective's loss is an upper bound of -log p per token, so that exp(loss) bounds perplexity.

    A class says so by its attribute `has_bound`, False where it has none.
    """
    return bool(getattr(locate(config.objective._target_, key="objective"), "has_bound", False))


def measured_by(objective: Objective) -> Measured | None:
    """Return the objective as one with measures of its own, if it has the methods of `Measured`."""
    has_measures = callable(getattr(objective, "sums", None)) and callable(getattr(objective, "summary", None))
    return cast(Measured, objective) if has_measures else None


def groups_of(objective: Objective, names: Sequence[str], *, clip_norm: float | None) -> Sequence[ParameterGroup]:
    """Return the groups that the objective makes of the parameters; none where they are clipped together.

    An objective may have a method `parameter_groups(names, clip_norm)`: two models that are trained in one step are two
    groups, each clipped as it would be with an optimizer of its own.
    """
    make = getattr(objective, "parameter_groups", None)
    groups: Sequence[ParameterGroup] = () if make is None else make(names, clip_norm=clip_norm)
    return groups


def has_draws(config: Config) -> bool:
    """Return whether the objective takes a random word for each row."""
    return bool(locate(config.objective._target_, key="objective").draws)


def has_spread_draws(config: Config) -> bool:
    """Return whether the random words of a batch's rows are equally spaced (training/batches.py).

    A class says so by its attribute `spread_draws`, False where it has none.
    """
    return bool(getattr(locate(config.objective._target_, key="objective"), "spread_draws", False))


def is_causal(config: Config) -> bool:
    """Return whether the objective's models attend to earlier tokens alone."""
    return bool(getattr(locate(config.objective._target_, key="objective"), "causal", True))


def writes_text(config: Config) -> bool:
    """Return whether the model can continue a text: whether it is a causal language model."""
    return is_causal(config) and head_of(config) == "causal_lm"


def denoises(config: Config) -> bool:
    """Return whether the model writes text by filling masked tokens (models/passes/denoising.py)."""
    return isinstance(config.objective, MaskedDiffusionConfig)


def samples(config: Config) -> bool:
    """Return whether the run shows samples of text."""
    return config.sample.max_new_tokens > 0 and writes_text(config)


def head_of(config: Config) -> str:
    """Return what the objective's models have on top of their layers."""
    return str(getattr(locate(config.objective._target_, key="objective"), "head", "causal_lm"))


def model_source(config: Config, *, kind: Callable[..., HuggingFaceModel] | None = None) -> HuggingFaceModel:
    """Make the source of the model that the objective trains.

    A source of a user's own that decoders alone have is made without `head` and `causal`.

    Args:
        kind: class in the place of `model._target_`.

    Raises:
        ConfigError: the model and the objective do not go together.
    """
    make: Callable[..., HuggingFaceModel] = kind or locate(config.model._target_, key="model")
    head, causal = head_of(config), is_causal(config)
    more: dict[str, Any] = {} if (head, causal) == ("causal_lm", True) else {"head": head, "causal": causal}
    if isinstance(config.objective, ClassifyConfig):
        more["labels"] = config.objective.labels or ASSUMED_LABELS
    return make(config.model, seed=config.seed, **more)
