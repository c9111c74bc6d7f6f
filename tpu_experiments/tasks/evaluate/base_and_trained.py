"""Evaluate a model and its base one after the other with the same compiled programs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.masking import LABEL
from tpu_experiments.config.mesh import num_shards
from tpu_experiments.config.schema import Config
from tpu_experiments.data.batches import fixed_batches
from tpu_experiments.data.held_out import HeldOut, HeldOutRows, rows_of_documents
from tpu_experiments.data.tokens.tokenizer import pad_id
from tpu_experiments.data.tokens.widths import Widths
from tpu_experiments.metrics.bootstrap import Sums
from tpu_experiments.metrics.held_out import LabelPairs, document_sums
from tpu_experiments.models.sources.build import build_model
from tpu_experiments.objectives.base import model_source, objective_of
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.runtime.stacked import hugging_face_names, stacked
from tpu_experiments.storage.tensors import require_finite
from tpu_experiments.tasks.evaluate.ngrams import Ngrams
from tpu_experiments.tasks.evaluate.pseudo_perplexity import MOST_COPIES, pseudo_sums
from tpu_experiments.tasks.evaluate.subject import Subject
from tpu_experiments.training.batches import with_held_out_noise
from tpu_experiments.training.cached_sampler import CachedSampler, Writer, writes_with_cache
from tpu_experiments.training.evaluation import Sampler, Scorer
from tpu_experiments.training.merged import MergedCopy
from tpu_experiments.training.reference import ReferencePass
from tpu_experiments.training.start import load_start
from tpu_experiments.training.step import computing_of

PSEUDO = "pseudo_perplexity"
"""Name of the program, and of the measure in `FURTHER`."""
MOST_ROWS = 8
"""Answers generated at once; every device computes all of them."""


class ModelAndBase:
    """Model on the device, with the base's parameters first and the trained ones second."""

    def __init__(
        self,
        runtime: Runtime,
        config: Config,
        *,
        subject: Subject,
        tokenizer: PreTrainedTokenizerBase,
        shape: tuple[int, int],
        max_new_tokens: int,
        max_prompts: int,
        ngrams: Ngrams | None = None,
        keeps_blanks: bool = False,
    ) -> None:
        """Build the base.

        Args:
            shape: (rows at once over all devices, tokens per row).
            max_prompts: maximum number of prompts passed to `write` at once; 0 if it is not called.
            ngrams: guesses of masked tokens; None for other objectives.
            keeps_blanks: whether written texts keep the blanks and line breaks at their ends.
        """
        self.runtime, self.subject, self.tokenizer, self.shape = runtime, subject, tokenizer, shape
        self.max_new_tokens = max_new_tokens
        # At most the rows scored at once on a device, so that generation fits where scoring does.
        self.num_written = max(1, min(MOST_ROWS, max_prompts, shape[0] // num_shards(config)))
        source = model_source(config)
        model = build_model(source, lora=config.lora, seed=config.seed, place=runtime.place, folding=runtime.folding)
        self.model, self.parameters = model, model.trainable
        self.config = config
        objective = objective_of(config, computing_of(config, runtime), tokenizer=tokenizer)
        self.scorer = Scorer(
            model.module, runtime=runtime, token_scores=objective.document_scores, parameters=self.parameters
        )
        self.objective = objective
        self.pseudo_scorer: Scorer | None = None
        if objective.masks_in_turn:
            masked = partial(objective.masked_scores, places=MOST_COPIES)
            self.pseudo_scorer = Scorer(
                model.module, runtime=runtime, token_scores=masked, parameters=self.parameters, name=PSEUDO
            )
        self.labels: dict[str, LabelPairs] = {}
        """Label and predicted label of every text, by source, of the last call of `sums`."""
        self.reference: dict[str, NDArray[np.float64]] = {}
        """Values of the rows' segments (N, S) by the model whose state came first, by source."""
        self.values = ReferencePass(self)
        self.ngrams = ngrams
        self.further: dict[str, dict[str, Sums]] = {}
        """Sums of every document for the measures of `FURTHER` (metrics/held_out.py), by measure and source, of the
        model whose state is current."""
        settings = replace(config.sample, window=shape[1], temperature=0.0)
        how: dict[str, Any] = {
            "tokenizer": tokenizer,
            "settings": settings,
            "seed": config.seed,
            "keeps_blanks": keeps_blanks,
        }
        self.sampler: Sampler | CachedSampler
        if config.hw.runtime == "eager" and writes_with_cache(config):
            copy = partial(MergedCopy, model, lora=config.lora, runtime=runtime)
            self.sampler = CachedSampler(Writer(copy, runtime=runtime, is_drawn=False), **how)
        else:
            self.sampler = Sampler(model.module, runtime=runtime, parameters=self.parameters, **how)
        rows_at_once, seq_len = shape
        scored, written = (rows_at_once // runtime.share[1], seq_len), (self.num_written, seq_len)
        runtime.expect({"score": {scored}, "reference": {scored}, "sample": {written}, PSEUDO: {scored}})

    def states(self) -> Iterator[str]:
        """Yield `base`, then `trained`, with the parameters of each in place.

        Where a loss compares with a reference, the model that its run started from is the base.
        """
        if self.subject.start is not None:
            load_start(
                self.subject.start,
                self.model,
                parameters=self.parameters,
                state={},
                runtime=self.runtime,
                max_held_bytes=self.config.checkpoint.max_copy_gib * 2**30,
            )
        yield "base"
        self.further = {}
        trained = self.subject.tensors()
        if trained is None:
            return
        self._require(trained)
        for name in list(self.parameters):
            tensor = stacked(trained, name).to(torch.float32)
            require_finite(tensor, name=name, place=self.subject.place)
            self.parameters[name] = self.runtime.place(tensor, name=name)
        yield "trained"

    def sums(self, held_out: HeldOut, *, widths: Widths | None) -> Sums:
        """Return the sums (D, K) of every document (metrics/held_out.py); every process takes part."""
        rows_at_once, seq_len = self.shape
        laid_out = rows_of_documents(held_out, seq_len=seq_len, pad_id=pad_id(self.tokenizer))
        if self.config.objective.reads_pairs:
            return self._pair_sums(held_out, laid_out)
        batches = fixed_batches(laid_out.rows, global_rows=rows_at_once, name=held_out.name)
        found = self.scorer.run(with_held_out_noise(held_out.name, batches, config=self.config))
        num_rows, num_tokens = laid_out.rows.num_rows, len(held_out.flat.ids_L)
        nats_L, hits_L, predicted_L = (laid_out.per_token(values[:num_rows], num_tokens=num_tokens) for values in found)
        if held_out.labelling is not None:
            # In the place of hits there are the numbers of the predicted labels.
            last_D = np.cumsum(held_out.flat.lengths_D) - 1
            label_L = held_out.flat.more[LABEL]
            self.labels[held_out.name] = np.stack([label_L[last_D], hits_L[last_D]], 1).astype(np.int64)
            hits_L = predicted_L * (hits_L == label_L)
        hits_L, measured = self.objective.read_hits(hits_L, predicted_L)
        for measure, each_L in measured.items():
            self.further.setdefault(measure, {})[held_out.name] = sums_of_documents(held_out, each_L)
        if self.ngrams is not None:
            guessed = [predicted_L * (guess_L == held_out.flat.ids_L) for guess_L in self.ngrams.guesses(held_out)]
            found_DK = sums_of_documents(held_out, [predicted_L, hits_L, *guessed])
            self.further.setdefault("baselines", {})[held_out.name] = found_DK
        bytes_L = predicted_L * bytes_of(held_out, widths=widths)
        columns = {
            "tokens": predicted_L,
            "bytes": bytes_L,
            "nats": nats_L,
            "text_nats": nats_L * is_text(held_out, widths=widths),
            "hits": hits_L,
        }
        return document_sums(held_out.token_documents(), num_documents=held_out.flat.num_documents, columns_L=columns)

    def leave_if_requested(self) -> None:
        """Do nothing: an evaluation is repeated, not resumed."""

    def _pair_sums(self, held_out: HeldOut, laid_out: HeldOutRows) -> Sums:
        """Return tokens, bytes (0) and the objective's own sums of every pair, (D, 2 + K)."""
        lengths_NS = laid_out.segment_lengths()
        num_rows, num_segments = lengths_NS.shape
        found = np.concatenate(list(self.values.run(laid_out.rows, global_rows=self.shape[0])))
        values_NS = found[:num_rows, :num_segments].astype(np.float64)
        reference_NS = self.reference.setdefault(held_out.name, values_NS)
        own_NPK = self.objective.document_sums(values_NS, reference_NS, lengths_NS)
        tokens_NP = lengths_NS.reshape(num_rows, -1, 2).sum(2)
        sums_NPK = np.concatenate([np.stack([tokens_NP, np.zeros_like(tokens_NP)], 2), own_NPK], axis=2)
        return laid_out.per_pair(sums_NPK, held_out)

    def mask_in_turn(self, held_out: HeldOut, *, num_documents: int) -> None:
        """Add the sums of pseudo-perplexity over the first documents to `further`; every process takes part."""
        assert self.pseudo_scorer is not None
        self.further.setdefault(PSEUDO, {})[held_out.name] = pseudo_sums(
            held_out,
            num_documents=num_documents,
            scorer=self.pseudo_scorer,
            shape=self.shape,
            vocabulary=self.objective.vocabulary,
        )

    def write(self, prompts: Sequence[list[int]]) -> list[str]:
        """Return greedy answers to prompts of token ids; prompts that are too long lose their start.

        Every process takes part.
        """
        return self.sampler.write(prompts, max_new_tokens=self.max_new_tokens, rows=self.num_written)

    def _require(self, trained: Mapping[str, Tensor]) -> None:
        """Require the trained tensors' names to match the model's.

        Raises:
            ConfigError: they were trained on another model, or with other targets.
        """
        expected = {part for name in self.parameters for part in hugging_face_names(name)}
        lacks, extra = sorted(expected - trained.keys()), sorted(trained.keys() - expected)
        if lacks or (extra and self.subject.kind == "adapter"):
            raise ConfigError(
                f"{self.subject.place}; it does not belong to model={self.subject.config.model.name}: it lacks "
                f"{len(lacks)} of {len(expected)} tensors (first {lacks[0] if lacks else '-'}) and has {len(extra)} "
                f"others (first {extra[0] if extra else '-'}); choose the model that it was trained on."
            )


def sums_of_documents(held_out: HeldOut, columns_L: Sequence[NDArray[np.float64]]) -> Sums:
    """Sum values of each token by document: (D, K), columns in the order given."""
    document_L, num_documents = held_out.token_documents(), held_out.flat.num_documents
    return np.stack([np.bincount(document_L, weights=w_L, minlength=num_documents) for w_L in columns_L], axis=1)


def is_text(held_out: HeldOut, *, widths: Widths | None) -> NDArray[np.bool_]:
    """Return whether each token (L,) is text; all are if the tokenizer has no known widths."""
    ids_L = held_out.flat.ids_L
    return np.ones(len(ids_L), np.bool_) if widths is None else widths.is_text(ids_L)


def bytes_of(held_out: HeldOut, *, widths: Widths | None) -> NDArray[np.int32]:
    """Return the bytes (L,) of each token's text; zeros if the tokenizer has no known widths."""
    if widths is None:
        return np.zeros(len(held_out.flat.ids_L), np.int32)
    return np.concatenate([widths.of(ids) for ids, _ in held_out.documents()])
