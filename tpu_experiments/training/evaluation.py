"""Held-out loss with exact token weighting, token scores, samples and written answers, on the device.

Sums stay on the device and are read once at the end. Accuracy and bits per byte (metrics/held_out.py) come from the
same program as the loss; a trainer with a custom loss reports the loss alone. A sample takes a full forward pass over a
fixed window for every token, without a cache: one program, with the live parameters, and fast enough where programs are
compiled (cached_sampler.py has a cache, for plain torch on a CPU). Legend: N all rows, G global batch, R prompts,
T tokens, V vocabulary.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.schema import SampleConfig
from tpu_experiments.data.batches import Batch
from tpu_experiments.data.batches import Batch as HostBatch
from tpu_experiments.data.held_out import HeldOut
from tpu_experiments.data.rows import TOKEN_ARRAYS
from tpu_experiments.data.tokens.chat import render
from tpu_experiments.data.tokens.tokenize import LEARN
from tpu_experiments.data.tokens.tokenizer import text_end_ids
from tpu_experiments.data.tokens.widths import Widths
from tpu_experiments.metrics.held_out import measures
from tpu_experiments.models.parts.dropout import NOISE, hashed, random_words, uniform
from tpu_experiments.models.passes.draws import drawn
from tpu_experiments.models.passes.forward import (
    capped,
    has_plain_head,
    hidden_of,
    logits_of,
    soft_cap_of,
    target_weights,
)
from tpu_experiments.models.passes.loss import TokenScores
from tpu_experiments.objectives.base import Objective
from tpu_experiments.optim.ema import held_of
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.runtime.host_copies import host_copy, on_host
from tpu_experiments.training.step import RowLoss

WORDS = "words"
"""Key of a sampler's random words among its program's tensors, one for each row."""
TEXT = "text"
"""Name of the tensor that marks the tokens that stand for text."""
DERIVED_MEASURES = ("accuracy", "bits_per_byte")
QUEUED = 2
"""Batches of an evaluation that are queued before the first is read: the device has work, and a stop waits for few."""
LOOK_EVERY = 8
"""Tokens of a sample between two looks at what is written, each of which waits for the device."""
SAY_EVERY_SECONDS = 30.0

log = logging.getLogger(__name__)
BetweenBatches = Callable[[], None]
"""Called between the programs of an evaluation or a sample, at the same ones on all processes; what it raises ends
it."""


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put the module in evaluation mode inside the block."""
    module.eval()
    try:
        yield
    finally:
        module.train()


class Told:
    """Log how far a long piece of work is, every `SAY_EVERY_SECONDS`."""

    def __init__(self, what: str) -> None:
        self.what, self._due = what, time.monotonic() + SAY_EVERY_SECONDS

    def __call__(self, done: int, total: int | None) -> None:
        """Log that `done` of `total` is done, if that is due."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + SAY_EVERY_SECONDS
            log.info("%s: %d%s done", self.what, done, "" if total is None else f" of {total}")


@dataclass(frozen=True)
class Evaluation:
    """Held-out results: mean loss in nats per supervised token, or per prediction, over all sources and for each."""

    loss: float
    num_tokens: int
    """Supervised tokens."""
    sources: dict[str, float]
    measures: dict[str, float] = field(default_factory=dict)
    """`DERIVED_MEASURES` over all sources; unknown ones are left out."""
    source_measures: dict[str, dict[str, float]] = field(default_factory=dict)
    """`DERIVED_MEASURES` of each source."""

    has_perplexity: bool = True
    """Whether the loss is the mean of -log p of tokens."""
    num_predictions: int = 0
    """What the loss is a mean over: tokens, or pairs, answers or texts (`ObjectiveConfig.predicts`)."""

    @property
    def perplexity(self) -> float:
        """Return exp(loss); infinity where that overflows, NaN where it is no perplexity."""
        if not self.has_perplexity:
            return math.nan
        return math.exp(self.loss) if self.loss < 700 else math.inf


class Evaluator:
    """Compute held-out results with one program of one shape.

    The last batch is padded with rows of zero weight.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        runtime: Runtime,
        row_loss: RowLoss,
        parameters: Mapping[str, Tensor],
        token_scores: TokenScores | None = None,
        widths: Widths | None = None,
        draws: bool = False,
        measured: Objective | None = None,
        inputs: Mapping[str, float] | None = None,
        between: BetweenBatches = lambda: None,
    ) -> None:
        """Create the evaluator; without `token_scores` and `measured` it reports the loss alone.

        Args:
            token_scores: has the held-out loss that is reported, instead of `row_loss`.
            measured: has the held-out loss and measures of its own, instead of `token_scores` and `row_loss`.
            draws: whether batches have a random word for every row.
            inputs: settings of the objective that rows carry.
        """
        self.module, self.runtime, self.row_loss, self.parameters = module, runtime, row_loss, parameters
        self.token_scores, self.widths, self.draws = token_scores, widths, draws
        self.measured, self.inputs, self.between = measured, inputs, between
        self.program = runtime.program(self.sums, name="evaluate", held=lambda: held_of(parameters))

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Return the names of the program's inputs beside further arrays, int32: (rows, T) each, `noise` (rows,)."""
        names = TOKEN_ARRAYS if self.token_scores is None else (*TOKEN_ARRAYS, TEXT)
        return (*names, NOISE) if self.draws else names

    def run(self, batches: Mapping[str, Iterable[HostBatch]]) -> Evaluation:
        """Evaluate every source's batches; all processes take part."""
        found: dict[str, list[Tensor]] = {source: [] for source in batches}
        num_bytes = dict.fromkeys(batches, 0)
        num_learnt = 0
        queued: list[tuple[str, Tensor]] = []

        def read() -> None:
            source, sums = queued.pop(0)
            found[source].append(on_host(sums))

        told, done, total = Told("evaluation, batches"), 0, _length(batches)
        with evaluating(self.module):
            for source, source_batches in batches.items():
                for batch in source_batches:
                    self.between()
                    queued.append((source, self.program(self._send(batch))))
                    num_bytes[source] += self._bytes(batch)
                    num_learnt += batch.num_supervised
                    if len(queued) > QUEUED:
                        read()
                        told(done := done + 1, total)
        while queued:
            read()
        totals = {source: torch.stack(sums).double().sum(0) for source, sums in found.items()}
        overall = torch.stack(list(totals.values())).sum(0)
        if self.measured is not None:
            whole = self.measured.summary(overall.tolist())
            parts = {source: self.measured.summary(t.tolist()) for source, t in totals.items()}
            parts = {source: part for source, part in parts.items() if math.isfinite(part.loss)}
            losses = {source: part.loss for source, part in parts.items()}
            measures = {source: part.measures for source, part in parts.items()}
            return Evaluation(
                whole.loss,
                num_learnt,
                losses,
                whole.measures,
                measures,
                self.measured.has_perplexity,
                whole.num_predictions,
            )
        losses = {source: float(t[0] / t[1]) for source, t in totals.items() if t[1] > 0}
        return Evaluation(
            float(overall[0] / overall[1]),
            int(overall[1]),
            losses,
            _derived(overall, num_bytes=sum(num_bytes.values())),
            {source: _derived(totals[source], num_bytes=num_bytes[source]) for source in losses},
            num_predictions=int(overall[1]),
        )

    def sums_of(self, batch: HostBatch) -> tuple[float, float]:
        """Return loss sum in nats and supervised tokens of one batch; all processes take part."""
        with evaluating(self.module):
            sums = self.program(self._send(batch))
        if self.measured is not None:
            found = self.measured.summary(on_host(sums).double().tolist())
            num = found.num_predictions
            return found.loss * num if num else 0.0, float(num)
        loss, tokens = on_host(sums).tolist()[:2]
        return loss, tokens

    def _send(self, batch: HostBatch) -> dict[str, Tensor]:
        rows = batch.slice_process(*self.runtime.share)
        tensors = host_tensors(rows, inputs=self.inputs)
        if self.token_scores is not None:
            is_text = rows.segments_GT > 0 if self.widths is None else self.widths.is_text(rows.ids_GT)
            tensors[TEXT] = torch.from_numpy(is_text.astype(np.int32))
        return self.runtime.put(tensors, rows_dim=0)

    def _bytes(self, batch: HostBatch) -> int:
        """Return the bytes of the predicted text; 0 where the tokenizer has no known widths."""
        if self.widths is None:
            return 0
        return int(self.widths.of(batch.ids_GT)[batch.learn_GT > 0].sum())

    def sums(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the sums of one batch over all processes; the compiled program.

        Loss in nats and supervised tokens, shape (2,); with `token_scores` also hits, and the loss of tokens that are
        text, shape (4,). With `measured` its own, shape (K,).
        """
        with torch.no_grad():
            parameters = dict(self.parameters)  # averages are computed here, once
            if self.measured is not None:
                own_K = self.measured.sums(self.module, parameters, batch)
                return torch.stack(self.runtime.sum_over_processes(list(own_K)))
            if self.token_scores is None:
                sums_R, weights_R = self.row_loss(self.module, parameters, batch)
                return torch.stack(self.runtime.sum_over_processes([sums_R.sum(), weights_R.sum()]))
            found = self.token_scores(self.module, parameters, batch)
            weights_RT = target_weights(batch)[1] if found.weights_RT is None else found.weights_RT
            text_RT = torch.roll(batch[TEXT], -1, dims=1)
            more = [(found.hits_RT * weights_RT).sum(), (found.losses_RT * weights_RT * text_RT).sum()]
            return torch.stack(self.runtime.sum_over_processes([found.sums_R.sum(), found.weights_R.sum(), *more]))


def _derived(sums: Tensor, *, num_bytes: int) -> dict[str, float]:
    """Compute `DERIVED_MEASURES` from the program's sums."""
    if len(sums) == 2:
        return {}
    nats, tokens, hits, text_nats = sums.tolist()
    found = measures(np.array([[tokens, num_bytes, nats, text_nats, hits]]))
    return {name: float(found[name][0]) for name in DERIVED_MEASURES if np.isfinite(found[name][0])}


def _length(batches: Mapping[str, Iterable[HostBatch]]) -> int | None:
    """Return the number of batches; None where they are not made yet."""
    each = [len(found) if isinstance(found, list) else None for found in batches.values()]
    return None if None in each else sum(number for number in each if number is not None)


def host_tensors(batch: HostBatch, *, inputs: Mapping[str, float] | None = None) -> dict[str, Tensor]:
    """Return `ids`, `learn`, `positions` and `segments`, (rows, T) int32 each, and the further arrays of the rows.

    `noise` (rows,) is added where the batch has it.

    Args:
        inputs: settings of the objective by name, float32 (rows,) each (`ObjectiveConfig.inputs`).
    """
    tensors = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
    tensors |= {name: torch.full((batch.num_rows,), value) for name, value in (inputs or {}).items()}
    return tensors if batch.noise_G is None else tensors | {NOISE: torch.from_numpy(batch.noise_G)}


class Sampler:
    """Generate text with the current parameters."""

    def __init__(
        self,
        module: nn.Module,
        *,
        runtime: Runtime,
        parameters: Mapping[str, Tensor],
        tokenizer: PreTrainedTokenizerBase,
        settings: SampleConfig,
        seed: int,
        name: str = "sample",
        between: BetweenBatches = lambda: None,
        keeps_blanks: bool = False,
    ) -> None:
        """Build the program.

        Args:
            name: its name among those that a run expects.
            keeps_blanks: whether texts keep the blanks and line breaks at their ends.
        """
        self.between, self.keeps_blanks = between, keeps_blanks
        self.module, self.runtime, self.parameters = module, runtime, parameters
        self.tokenizer, self.window, self.temperature = tokenizer, settings.window, settings.temperature
        self.seed = seed
        self.program = runtime.program(self.next_token, name=name, held=lambda: held_of(parameters))

    def write(self, prompts: Sequence[list[int]], *, max_new_tokens: int, rows: int) -> list[str]:
        """Continue prompts as `run` does, so many rows at once: always that many, so that there is one program."""
        written: list[str] = []
        for begin in range(0, len(prompts), rows):
            own = list(prompts[begin : begin + rows])
            written += self.run(own + own[-1:] * (rows - len(own)), max_new_tokens=max_new_tokens)[: len(own)]
        return written

    def run(self, prompts: Sequence[list[int]], *, max_new_tokens: int) -> list[str]:
        """Continue every prompt (its last `window - max_new_tokens` tokens) up to the end of sequence.

        Every process takes part. It ends once every row has ended, which is looked at once in `LOOK_EVERY` tokens.
        """
        kept = [ids[-(self.window - max_new_tokens) :] for ids in prompts]
        ids_RT = torch.zeros(len(kept), self.window, dtype=torch.int32)
        for row, ids in enumerate(kept):
            ids_RT[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        last_R = torch.tensor([len(ids) - 1 for ids in kept], dtype=torch.int32)
        started = {"ids": ids_RT, "last": last_R}
        if self.temperature:
            started[WORDS] = first_words(len(kept), seed=self.seed)
        batch = self.runtime.put(started, rows_dim=-1)
        told = Told("sample, tokens")
        with evaluating(self.module):
            for done in range(1, max_new_tokens + 1):
                self.between()
                batch = self.program(batch)
                if done % LOOK_EVERY == 0 and done < max_new_tokens:
                    told(done, max_new_tokens)
                    written = _written(batch, kept, num=done)
                    is_open = any(len(until_end(ids, self.tokenizer)) == done for ids in written)
                    if not self.runtime.any_process(is_open):
                        break
        written = _written(batch, kept, num=max_new_tokens)
        return texts_of(written, self.tokenizer, keeps_blanks=self.keeps_blanks)

    def next_token(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Append one token: `ids` (R, T) gets it after `last` (R,), which is incremented. The program.

        With a temperature `words` (R,) int32 decide the draws, and are replaced by others.
        """
        ids_RT, last_R = batch["ids"], batch["last"]
        index_T = torch.arange(self.window, device=ids_RT.device, dtype=torch.int32)
        segments_RT = (index_T <= last_R[:, None]).to(torch.int32)
        rows = {"ids": ids_RT, "positions": index_T.expand(ids_RT.shape), "segments": segments_RT}
        with torch.no_grad():
            logits_RV = self._logits(rows, last_R)
        more = {}
        if self.temperature:  # a draw by words of its own, so that it is the same on every device
            token_R = drawn(logits_RV.float() / self.temperature, uniform(batch[WORDS]))
            more[WORDS] = hashed(batch[WORDS])
        else:
            token_R = logits_RV.argmax(-1)
        token_R1 = token_R[:, None].to(torch.int32)
        return {"ids": torch.where(index_T == last_R[:, None] + 1, token_R1, ids_RT), "last": last_R + 1, **more}

    def _logits(self, rows: Mapping[str, Tensor], last_R: Tensor) -> Tensor:
        """Return logits (R, V) after position `last` (R,) of every row.

        Those of other positions are not computed where the head is a plain matrix product.
        """
        index_R = torch.arange(len(last_R), device=last_R.device)
        parameters = dict(self.parameters)  # averages are computed here, once
        if not has_plain_head(self.module):
            return logits_of(self.module, parameters, rows)[index_R, last_R.long()]
        hidden_RTH, head_VH = hidden_of(self.module, parameters, rows)
        hidden_RH = hidden_RTH[index_R, last_R.long()]
        return capped(F.linear(hidden_RH, head_VH.to(hidden_RH.dtype)), soft_cap_of(self.module))


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, *, kind: str) -> list[int]:
    """Return the prompt's token ids: through the chat template for `chat`, as plain text for `text`."""
    if kind == "chat":
        text = render((("user", prompt),), tokenizer=tokenizer, ends_with="generation_prompt")
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return text_ids(tokenizer, prompt)


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of plain text, after the token that begins a text if there is one."""
    begin, _ = text_end_ids(tokenizer)
    start = [] if begin is None else [begin]
    return start + list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _written(batch: Mapping[str, Tensor], prompts: Sequence[list[int]], *, num: int) -> list[list[int]]:
    """Return the first `num` tokens after every prompt; waits for the device."""
    rows = on_host(batch["ids"])
    return [row[len(ids) : len(ids) + num].tolist() for row, ids in zip(rows, prompts, strict=True)]


def first_words(num: int, *, seed: int) -> Tensor:
    """Return the words that decide the first token of every row, (R,) int32; each next one takes their `hashed`."""
    return torch.from_numpy(random_words(num, key=seed % 2**64))


def texts_of(
    written: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase, *, keeps_blanks: bool = False
) -> list[str]:
    """Return the texts of written tokens, each up to its end."""
    decoded = [str(tokenizer.decode(until_end(ids, tokenizer), skip_special_tokens=True)) for ids in written]
    return decoded if keeps_blanks else [text.strip() for text in decoded]


def until_end(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids before the first special token."""
    ends = {tokenizer.eos_token_id, *tokenizer.all_special_ids}
    for index, token in enumerate(ids):
        if token in ends:
            return ids[:index]
    return ids


AHEAD = 8
"""Batches queued before the first is read, so that the device does not wait for the host."""


class Scorer:
    """Score rows with the current values of `parameters`."""

    def __init__(
        self,
        module: nn.Module,
        *,
        runtime: Runtime,
        token_scores: TokenScores,
        parameters: Mapping[str, Tensor],
        name: str = "score",
    ) -> None:
        """Build the program; `name` is its name among those that a process expects."""
        self.module, self.runtime, self.token_scores, self.parameters = module, runtime, token_scores, parameters
        self.program = runtime.program(self.scores, name=name, held=lambda: parameters)

    def run(self, batches: Iterable[Batch]) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """Return losses in nats, hits and weights, (N, T) each, of all rows in order.

        Weights are 1 where every token is predicted; then the caller knows the tokens.

        Every process takes part and gets all.
        """
        self.module.eval()
        found: list[NDArray[np.float32]] = []
        queued: list[Tensor] = []
        for batch in batches:
            rows = batch.slice_process(*self.runtime.share)
            queued.append(self.program(self.runtime.put(host_tensors(rows), rows_dim=0)))
            if len(queued) > AHEAD:
                found.append(host_copy(queued.pop(0)).numpy())
        found += [host_copy(scores).numpy() for scores in queued]
        losses, hits, *weights = np.concatenate(found, axis=1)
        return losses, hits, weights[0] if weights else np.ones_like(losses)

    def scores(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return losses and hits of the global batch, and weights where it has some, (2 or 3, G, T); the program.

        Each process adds its rows to zeros.
        """
        rank, world_size = self.runtime.share
        with torch.no_grad():
            found = self.token_scores(self.module, self.parameters, batch)
            weights = [] if found.weights_RT is None else [found.weights_RT]
            both = torch.stack([found.losses_RT, found.hits_RT, *weights])
            rows = both.shape[1]
            both = F.pad(both, (0, 0, rank * rows, (world_size - 1 - rank) * rows))
            (summed,) = self.runtime.sum_over_processes([both])
            # Replicated: reading a sharded tensor would compile a further program.
            return self.runtime.constrain(summed, axes=())


@dataclass(frozen=True)
class Exchange:
    """A conversation up to its last answer, and that answer as reference."""

    prompt_ids: list[int]
    reference: str


def decoded_documents(held_out: HeldOut, *, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """Return the documents as text, decoded from their tokens."""
    if held_out.kind == "chat":
        found = exchanges(held_out, tokenizer=tokenizer, num=held_out.flat.num_documents)
        prompts = [str(tokenizer.decode(exchange.prompt_ids)) for exchange in found]
        return [
            {"source": held_out.name, "prompt": prompt, "reference": exchange.reference}
            for prompt, exchange in zip(prompts, found, strict=True)
        ]
    texts = (tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in held_out.documents())
    return [{"source": held_out.name, "text": str(text)} for text in texts]


def exchanges(held_out: HeldOut, *, tokenizer: PreTrainedTokenizerBase, num: int) -> list[Exchange]:
    """Return the last exchange of the first `num` conversations.

    Rendering and the extent of the answers were determined when the data was prepared (data/tokens/chat.py).
    """
    found: list[Exchange] = []
    for ids, flags in held_out.documents():
        if len(found) == num:
            break
        learnt = np.flatnonzero(flags & LEARN)
        breaks = np.flatnonzero(np.diff(learnt) > 1)
        begin = int(learnt[breaks[-1] + 1] if len(breaks) else learnt[0])
        answer = ids[begin : int(learnt[-1]) + 1].tolist()
        text = str(tokenizer.decode(answer, skip_special_tokens=True)).strip()
        found.append(Exchange(ids[:begin].tolist(), text))
    return found
