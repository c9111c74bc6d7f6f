"""Training objectives: what a model learns from rows of tokens, and what the loss is divided by.

`objective._target_` names a class derived from `Objective`. It is made with the keys of its config beside `name` and
`_target_`, with `computing`, and, where it has `takes_tokenizer = True`, with `tokenizer`. A loss may have several
parts, each divided by a number of predictions of its own; the gradient is that of the sum of the parts' means.
Legend: R rows, T tokens, G parts of a loss, L tokens of held-out documents, K sums.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.schema import Config
from tpu_experiments.config.targets import locate
from tpu_experiments.data.rows import Array
from tpu_experiments.data.steps.pairs import MARGIN
from tpu_experiments.data.teacher import teacher_arrays
from tpu_experiments.metrics.flops import FlopsPerToken, decoder_flops
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.loss import Scores, Terms
from tpu_experiments.objectives.vocabulary import Vocabulary
from tpu_experiments.optim.base import ParameterGroup
from tpu_experiments.runtime.ops import Constrain, Loop, python_loop, unconstrained

Rows = Mapping[str, Tensor]
"""`ids`, `learn`, `positions`, `segments`, (R, T) int32 each, and `Objective.arrays`; with `Objective.draws` also
`noise`, (R,) int32."""


Column = NDArray[np.float64]
"""Values of every token (L,) of held-out documents, or of the segments (N, S, ...) of their rows."""


REFERENCE = Array("reference", "float32", per="token")
"""Log-probability of a segment's learnt tokens by the model as it starts, at the last of them, 0 elsewhere; with
`objective.reads_reference()`. A second value of `num_references` stands before the first of them. It is no array of
prepared data (training/reference.py)."""


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

    def terms(self, hidden_RTH: Tensor, **settings: Any) -> Terms:
        """Return how the loss of these hidden states is computed, with further settings of `Terms`."""
        rows, length = hidden_RTH.shape[:2]
        at_once = length if self.chunk_tokens is None else max(1, self.chunk_tokens * self.num_shards // rows)
        return Terms(at_once, self.loop, self.constrain, **settings)


@dataclass(frozen=True)
class Summary:
    """Results of some held-out rows."""

    loss: float
    """Loss as in training; NaN without predictions."""
    num_predictions: int
    measures: dict[str, float]
    """Further figures by name; unknown ones are left out."""


class Objective:
    """A training objective; a class derives from it and says what differs from the prediction of the next token.

    A class of a user's own that does not derive from it has its defaults all the same (`objective_class`).
    """

    arrays: ClassVar[tuple[Array, ...]] = ()
    """Further arrays of rows, in prepared data, batches and micro-batches: a label."""
    sampled: ClassVar[tuple[Array, ...]] = ()
    """Further arrays of training rows that the model writes itself (`samples_rollouts`), which prepared data has none
    of."""
    draws: ClassVar[bool] = False
    """Whether rows come with a random word each, `noise`. It is a function of seed, stage, step and the row's number in
    the global batch, in evaluations of seed and row, so that a resumed run draws the same on any devices."""
    spread_draws: ClassVar[bool] = False
    """Whether the random words of a batch's rows are equally spaced (training/batches.py)."""
    reads_draws: ClassVar[bool] = False
    """Whether the loss depends on tokens that the model itself draws: rounding may change one."""
    has_scores: ClassVar[bool] = False
    """Whether `scores` returns something: accuracy and bits per byte are then measured in evaluations."""
    has_perplexity: ClassVar[bool] = True
    """Whether the loss is the mean of -log p of tokens, so that exp(loss) is a perplexity."""
    has_bound: ClassVar[bool] = False
    """Whether the loss is an upper bound of -log p per token, so that exp(loss) bounds the perplexity."""
    causal: ClassVar[bool] = True
    """Whether a token attends to those before it alone, or to its whole document. The objective passes it to
    `logits_of` and `hidden_of` (models/passes/forward.py). Without it, runs write no samples."""
    head: ClassVar[str] = "causal_lm"
    """What the model has on top of its layers: `causal_lm`, `masked_lm` or `sequence_classification` (`HEADS` in
    models/huggingface.py), or `own` where `model._target_` makes the model."""
    takes_tokenizer: ClassVar[bool] = False
    """Whether the class takes `tokenizer`."""
    denoises: ClassVar[bool] = False
    """Whether the model writes text by filling masked tokens, `mask_id` (models/passes/denoising.py)."""
    num_references: ClassVar[int] = 1
    """Values of a segment by the model as it starts, with `objective.reads_reference()`: 1 or 2."""
    masks_in_turn: ClassVar[bool] = False
    """Whether task=evaluate can mask every token in turn, by `masked_scores` and `vocabulary`; it then compares with
    n-grams as well."""
    metrics_of_card: ClassVar[tuple[tuple[str, str, str], ...]] = ()
    """Measures of held-out texts in the model card's metadata: name, the Hub's name, words."""
    words_of_evaluation: ClassVar[str] = ""
    """What the figures of task=evaluate are, below its tables."""

    columns_of_evaluation: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Measures in the table of task=evaluate and their titles, loss and the one that ranks runs first; with
    `document_sums`."""

    mask_id: int
    vocabulary: Vocabulary

    # ---- training -------------------------------------------------------------------------------------------

    def count(self, rows: Rows) -> Tensor:
        """Return the number of predictions that a micro-batch's loss is the sum over, shape (), float32.

        The gradient is divided by its sum over the global batch. Of a loss with parts the shape is (G,), and the
        gradient of each part is divided by its own number.
        """
        raise NotImplementedError

    def row_loss(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the loss sum, which is differentiated, and the number of predictions of every row, (R,) each.

        Of a loss with parts both are (R, G).

        Args:
            parameters: trainable parameters by name, float32, to be used in the place of the module's own.
        """
        raise NotImplementedError

    def reported_loss(
        self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `row_loss` returns and K sums of every row (R, K), without a gradient.

        A class that has this reports in every log record what `measures` makes of the sums since the last one.
        """
        raise NotImplementedError

    def parameter_groups(self, names: Sequence[str], *, clip_norm: float | None) -> Sequence[ParameterGroup]:
        """Return groups of the parameters that are clipped apart; none where they are clipped together.

        Two models that are trained in one step are two groups, each clipped as by an optimizer of its own.
        """
        return ()

    @classmethod
    def flops(cls, config: Config, arch: Any, *, seq_len: int) -> FlopsPerToken:
        """Return the FLOPs per token of the configured training: those of a decoder.

        Raises:
            ConfigError: a model that is not counted (metrics/flops.py).
        """
        return decoder_flops(config, arch, seq_len=seq_len, causal=cls.causal)

    @classmethod
    def require_fit(cls, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        """Require the data of a run to go with the objective; a ConfigError says what does not."""

    def reference_values(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Tensor:
        """Return what is compared of segments 1, 2, ... of every row, (R, S), without a gradient: log-probabilities.

        Those by the model as it starts are the values of `REFERENCE`. Only where rows hold pairs. With two
        `num_references` they are (R, S, 2).
        """
        raise NotImplementedError

    # ---- evaluations and task=evaluate ----------------------------------------------------------------------

    def scores(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Scores:
        """Return loss and hit of every token, without a gradient, for evaluations; only with `has_scores`."""
        raise NotImplementedError

    def sums(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Tensor:
        """Return sums over held-out rows, (K,) float32, without a gradient; added over batches and processes.

        A class that has this and `summary` measures held-out rows by them, not by `scores`.
        """
        raise NotImplementedError

    def summary(self, sums: Sequence[float]) -> Summary:
        """Return loss and measures of all rows from their sums."""
        raise NotImplementedError

    def document_scores(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Scores:
        """Return what task=evaluate adds up by document: loss and hit of every token, at the position before it."""
        return self.scores(module, parameters, rows)

    def document_sums(self, values_NS: Column, reference_NS: Column, lengths_NS: Column) -> Column:
        """Return the sums that `measures` reads of every document of rows of pairs, two segments each, (N, S / 2, K).

        Args:
            values_NS: `reference_values`; `reference_NS` are those by the model as it starts.
            lengths_NS: learnt tokens of each segment; 0 where there is none, and the sums there mean nothing.
        """
        raise NotImplementedError

    def measures(self, sums: Sequence[Any]) -> dict[str, Any]:
        """Return `loss` and further measures from K sums, numbers or arrays of a shape.

        With `document_sums` or `reported_loss`.
        """
        raise NotImplementedError

    def read_hits(self, hits_L: Column, predicted_L: Column) -> tuple[Column, dict[str, list[Column]]]:
        """Return hits from what `document_scores` has in their place, and columns of `FURTHER` measures by name."""
        return hits_L, {}

    def masked_scores(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows, *, places: int) -> Scores:
        """Return loss in nats and hit of the tokens of `learn`, each read as the mask token; with `masks_in_turn`.

        Args:
            places: K, the largest number of such tokens in a row; losses, hits and weights are (R, K), in their order.
        """
        raise NotImplementedError

    # ---- the model card -------------------------------------------------------------------------------------

    @classmethod
    def words_of_results(cls, config: Config, num_predictions: int, *, num_tokens: int) -> str:
        """Return what stands below the card's table of an objective without perplexity: what was measured.

        Args:
            num_predictions: what the loss is a mean over (`ObjectiveConfig.predicts`).
            num_tokens: supervised tokens of the same rows.
        """
        return ""

    @classmethod
    def lines_of_use(cls, config: Config) -> tuple[list[str], str]:
        """Return lines of code below those that load the model, and a paragraph behind them."""
        return [], ""


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
    kind = objective_class(config)
    more = {"tokenizer": tokenizer} if kind.takes_tokenizer else {}
    make: Callable[..., Objective] = kind
    return make(**settings, **more, computing=computing)


def objective_class(config: Config) -> type[Objective]:
    """Return the class that `objective._target_` names; `Objective` stands behind one that does not derive from it."""
    kind = locate(config.objective._target_, key="objective")
    return kind if issubclass(kind, Objective) else type(kind.__name__, (kind, Objective), {})


def prepared_arrays(config: Config) -> tuple[Array, ...]:
    """Return the arrays of prepared rows beside those of tokens."""
    return (*objective_class(config).arrays, *((MARGIN,) if config.objective.reads_margin() else ()))


def row_arrays(config: Config, *, are_trained: bool = False) -> tuple[Array, ...]:
    """Return the arrays of a batch's rows beside those of tokens, of training or of evaluations."""
    kind = objective_class(config)
    arrays = (*prepared_arrays(config), *(kind.sampled if are_trained else ()))
    arrays = (*arrays, REFERENCE) if config.objective.reads_reference() else arrays
    entries = config.objective.teacher_entries()
    arrays = (*arrays, *teacher_arrays(entries)) if entries else arrays
    return (*arrays, *(Array(name, "float32", per="row") for name in config.objective.inputs()))


def measured_by(objective: Objective) -> Objective | None:
    """Return the objective if it has held-out measures of its own."""
    return None if type(objective).sums is Objective.sums else objective


def reports(objective: Objective) -> bool:
    """Return whether training steps report sums of the objective."""
    return type(objective).reported_loss is not Objective.reported_loss


def trained_flops(config: Config, arch: Any, *, seq_len: int) -> FlopsPerToken:
    """Return the FLOPs per token of the configured training; errors as of `Objective.flops`."""
    return objective_class(config).flops(config, arch, seq_len=seq_len)


def writes_text(config: Config) -> bool:
    """Return whether the model can continue a text: whether it is a causal language model."""
    kind = objective_class(config)
    return kind.causal and kind.head == "causal_lm"


def scores_texts(config: Config) -> bool:
    """Return whether the model is a decoder that gives a text one number, at its last token."""
    kind = objective_class(config)
    return kind.causal and kind.head == "sequence_classification"


def samples(config: Config) -> bool:
    """Return whether the run shows samples of text."""
    return config.sample.max_new_tokens > 0 and writes_text(config)


def model_source(config: Config, *, kind: Callable[..., HuggingFaceModel] | None = None) -> HuggingFaceModel:
    """Make the source of the model that the objective trains.

    A source of a user's own that decoders alone have is made without `head` and `causal`.

    Args:
        kind: class in the place of `model._target_`.

    Raises:
        ConfigError: the model and the objective do not go together.
    """
    make: Callable[..., HuggingFaceModel] = kind or locate(config.model._target_, key="model")
    learnt = objective_class(config)
    head, causal = learnt.head, learnt.causal
    more: dict[str, Any] = {} if (head, causal) == ("causal_lm", True) else {"head": head, "causal": causal}
    labels = config.objective.known_labels() or (ASSUMED_LABELS if config.objective.reads_labels else None)
    if labels is not None:
        more["labels"] = labels
    return make(config.model, seed=config.seed, **more)
