"""Text by the current parameters with a cache of keys and values, on a CPU.

A pass over the whole window for every token (`evaluation.Sampler`) takes a CPU seconds. Here the decoder of
models/passes/generation.py writes, from a copy of the weights with the adapters in them (merged.py). In plain torch
nothing is compiled, and every batch has its own shape. XLA takes three programs of one shape, in the place of one for
samples and one for questions, which pays where there are questions. On a TPU a pass takes milliseconds, programs take
minutes to compile, and the model whole on each chip seldom fits (tests/benchmarks/LOG.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.data_schema import QUESTION_ROWS
from tpu_experiments.config.schema import Config, SampleConfig
from tpu_experiments.config.task_schema import ChoiceConfig
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.parts.dropout import hashed, uniform
from tpu_experiments.models.passes.generation import Bucket, Decoder, program_shapes
from tpu_experiments.models.sources.isolation import decodes_with_cache
from tpu_experiments.objectives.base import model_source, samples, writes_text
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.training.evaluation import BetweenBatches, Told, first_words, prompt_ids, texts_of, until_end
from tpu_experiments.training.merged import MergedCopy

TOKENS_PER_CALL = 8
"""Tokens that one call of XLA's program writes."""
MULTIPLE = 8
"""Of the slots of XLA's prompts."""


@dataclass(frozen=True)
class Lengths:
    """Most tokens of what a run asks its model."""

    prompt: int
    new: int

    @property
    def shapes(self) -> dict[str, set[tuple[int, ...]]]:
        """Return the shapes of XLA's programs, beside the one that makes the copy."""
        how = {"max_new_tokens": self.new, "tokens_per_call": TOKENS_PER_CALL}
        return program_shapes([self.prompt], num_rows=QUESTION_ROWS, **how)


def writes_with_cache(config: Config) -> bool:
    """Return whether the configured model's text is written with a cache: on one CPU, if it has a cache.

    XLA does so for questions alone.
    """
    hw = config.hw
    is_here = hw.runtime == "eager" or (hw.runtime == "xla" and hw.parallel == "inline" and bool(config.questions))
    if hw.device != "cpu" or not is_here or not writes_text(config):
        return False
    source = model_source(config)
    return isinstance(source, HuggingFaceModel) and decodes_with_cache(source)


def lengths_of(
    config: Config, *, tokenizer: PreTrainedTokenizerBase, questions: Sequence[tuple[int, int]], kind: str
) -> Lengths | None:
    """Return the lengths of a run's samples and questions; None where it writes none, or without a cache.

    Args:
        questions: tokens of every question, and of its answer.
        kind: `prompt_kind` of the run's inputs.
    """
    own, settings = list(questions), config.sample
    if samples(config):
        room, new = settings.window - settings.max_new_tokens, settings.max_new_tokens
        prompts = (prompt_ids(tokenizer, prompt, kind=kind) for prompt in settings.all_prompts)
        own += [(len(ids[-room:]), new) for ids in prompts]
    if not own or not writes_with_cache(config):
        return None
    prompt, new = (max(each) for each in zip(*own, strict=True))
    return Lengths(-(-prompt // MULTIPLE) * MULTIPLE, new)


class Writer:
    """Writes tokens with a copy of the current weights, which has memory while text is written."""

    def __init__(
        self,
        make: Callable[[], MergedCopy],
        *,
        runtime: Runtime,
        is_drawn: bool,
        lengths: Lengths | None = None,
    ) -> None:
        """Take what makes the copy; a run that writes nothing makes none.

        Args:
            is_drawn: whether some of the tokens are drawn.
            lengths: of the one shape of all batches; None: each has its own.
        """
        self._make, self.runtime, self.is_drawn, self.lengths = make, runtime, is_drawn, lengths

    @cached_property
    def copy(self) -> MergedCopy:
        """Return the copy."""
        return self._make()

    @cached_property
    def bucket(self) -> Bucket:
        """Return the programs of the one shape."""
        assert self.lengths is not None
        return self._bucket(self.lengths, rows=QUESTION_ROWS, tokens_per_call=TOKENS_PER_CALL)

    def bucket_of(self, prompts: Sequence[list[int]], *, new: int) -> Bucket:
        """Return what writes so many tokens behind a batch of prompts."""
        if self.lengths is not None:
            return self.bucket
        return self._bucket(Lengths(max(map(len, prompts)), new), rows=len(prompts), tokens_per_call=1)

    def _bucket(self, lengths: Lengths, *, rows: int, tokens_per_call: int) -> Bucket:
        decoder = Decoder(
            self.copy.module,
            runtime=self.runtime,
            choice=ChoiceConfig(do_sample=self.is_drawn, top_k=0),
            num_rows=rows,
            max_new_tokens=lengths.new,
            tokens_per_call=tokens_per_call,
            seed=0,  # the caller draws
            weights=lambda: self.copy.tensors,
            is_alone=False,
        )
        return Bucket(decoder, length=lengths.prompt)


class CachedSampler:
    """Generate text as `evaluation.Sampler` does, with the same draws."""

    def __init__(
        self,
        writer: Writer,
        *,
        tokenizer: PreTrainedTokenizerBase,
        settings: SampleConfig,
        seed: int,
        between: BetweenBatches = lambda: None,
        keeps_blanks: bool = False,
    ) -> None:
        self.writer, self.tokenizer, self.seed, self.between = writer, tokenizer, seed, between
        self.keeps_blanks = keeps_blanks
        self.window, self.temperature = settings.window, settings.temperature

    def write(self, prompts: Sequence[list[int]], *, max_new_tokens: int, rows: int) -> list[str]:
        """Continue prompts as `Sampler.run` does, so many rows at once."""
        copy = self.writer.copy
        copy.refresh(is_average=copy.program_of_averages is not None)
        try:
            parts = [prompts[begin : begin + rows] for begin in range(0, len(prompts), rows)]
            return [text for part in parts for text in self._run(part, max_new_tokens=max_new_tokens)]
        finally:
            copy.release()

    def _run(self, prompts: Sequence[list[int]], *, max_new_tokens: int) -> list[str]:
        kept = [ids[-(self.window - max_new_tokens) :] for ids in prompts]
        bucket = self.writer.bucket_of(kept, new=max_new_tokens)
        decoder = bucket.decoder
        filled = kept + kept[-1:] * (decoder.num_rows - len(kept))
        uniforms = self._uniforms(len(filled), num=1 + decoder.num_calls * decoder.tokens_per_call)
        shape = torch.tensor([self.temperature]) if self.writer.is_drawn else None
        new = bucket.generate(filled, uniforms, shape=shape)
        written: list[list[int]] = [[] for _ in kept]
        told, done, is_open = Told("sample, tokens"), 0, True
        with torch.no_grad():
            while is_open and done < max_new_tokens:
                self.between()
                tokens_RN, _ = next(new)
                for row, tokens in zip(written, tokens_RN.tolist(), strict=False):
                    row += tokens
                done += tokens_RN.shape[1]
                told(min(done, max_new_tokens), max_new_tokens)
                is_open = any(len(until_end(ids, self.tokenizer)) == done for ids in written)
                is_open = self.writer.runtime.any_process(is_open)
        kept_ids = [ids[:max_new_tokens] for ids in written]
        return texts_of(kept_ids, self.tokenizer, keeps_blanks=self.keeps_blanks)

    def _uniforms(self, rows: int, *, num: int) -> Tensor:
        """Return a number in [0, 1) for each token, (R, N) float32, those of `Sampler.next_token`."""
        words_R, found = first_words(rows, seed=self.seed), []
        for _ in range(num):
            found.append(uniform(words_R))
            words_R = hashed(words_R)
        return torch.stack(found, dim=1)
