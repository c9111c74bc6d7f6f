"""Text by the current parameters in plain torch on a CPU, with a cache of keys and values.

Nothing is compiled there, and a pass over the whole window for every token takes seconds, so the decoder of
models/passes/generation.py pays at once; it reads a copy of the weights with the adapters in them (merged.py). XLA
keeps `evaluation.Sampler`: a decoder's three programs take as long to compile as they save, and a TPU seldom has room
for the model whole on each chip (tests/benchmarks/LOG.md).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.schema import Config, SampleConfig
from tpu_experiments.config.task_schema import ChoiceConfig
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.parts.dropout import hashed, uniform
from tpu_experiments.models.passes.generation import Bucket, Decoder
from tpu_experiments.models.sources.build import BuiltModel
from tpu_experiments.models.sources.isolation import decodes_with_cache
from tpu_experiments.objectives.base import writes_text
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.training.evaluation import BetweenBatches, Sampler, Told, first_words, texts_of, until_end
from tpu_experiments.training.merged import MergedCopy


def sampler_of(
    model: BuiltModel,
    config: Config,
    *,
    runtime: Runtime,
    averages: Mapping[str, Tensor] | None = None,
    evaluated: Mapping[str, Tensor],
    **parts: Any,
) -> "Sampler | CachedSampler":
    """Return what generates text with the current parameters, with a cache where that is known to write the same.

    Args:
        averages: of the trainable parameters, which text is written with; None: with the parameters.
        evaluated: the view of either that a program is given (`Trainer.evaluated_parameters`).
        parts: the arguments that both have.
    """
    in_plain_torch = config.hw.runtime == "eager" and config.hw.device == "cpu"
    is_known = isinstance(model.source, HuggingFaceModel) and writes_text(config)
    if in_plain_torch and is_known and decodes_with_cache(model.source, runtime=runtime):
        parts.pop("name", None)
        copy = partial(MergedCopy, model, lora=config.lora, runtime=runtime, averages=averages)
        return CachedSampler(copy, runtime=runtime, **parts)
    return Sampler(model.module, runtime=runtime, parameters=evaluated, **parts)


class CachedSampler:
    """Generate text as `Sampler` does, with the same draws."""

    def __init__(
        self,
        make: Callable[[], MergedCopy],
        *,
        runtime: Runtime,
        tokenizer: PreTrainedTokenizerBase,
        settings: SampleConfig,
        seed: int,
        between: BetweenBatches = lambda: None,
    ) -> None:
        """Take what makes the copy that text is written with; the copy has weights while text is written."""
        self._make, self.runtime, self.tokenizer, self.seed = make, runtime, tokenizer, seed
        self.window, self.temperature, self.between = settings.window, settings.temperature, between

    @cached_property
    def copy(self) -> MergedCopy:
        """Return the copy; a run that writes nothing makes none."""
        return self._make()

    def write(self, prompts: Sequence[list[int]], *, max_new_tokens: int, rows: int) -> list[str]:
        """Continue prompts as `Sampler.run` does, so many rows at once."""
        self.copy.refresh(is_average=self.copy.program_of_averages is not None)
        try:
            parts = [prompts[begin : begin + rows] for begin in range(0, len(prompts), rows)]
            return [text for part in parts for text in self._run(part, max_new_tokens=max_new_tokens)]
        finally:
            self.copy.release()

    def _run(self, prompts: Sequence[list[int]], *, max_new_tokens: int) -> list[str]:
        kept = [ids[-(self.window - max_new_tokens) :] for ids in prompts]
        is_drawn = self.temperature > 0
        choice = ChoiceConfig(do_sample=is_drawn, temperature=self.temperature or 1.0, top_k=0)
        how: dict[str, Any] = {"num_rows": len(kept), "max_new_tokens": max_new_tokens, "tokens_per_call": 1}
        decoder = Decoder(self.copy.module, runtime=self.runtime, choice=choice, seed=self.seed, **how)
        new = Bucket(decoder, length=max(map(len, kept))).generate(
            kept, self._uniforms(len(kept), num=max_new_tokens), shape=None
        )
        written: list[list[int]] = [[] for _ in kept]
        told = Told("sample, tokens")
        with torch.no_grad():
            for done in range(1, max_new_tokens + 1):
                self.between()
                tokens_R1, _ = next(new)
                for row, token in zip(written, tokens_R1[:, 0].tolist(), strict=True):
                    row.append(token)
                told(done, max_new_tokens)
                is_open = any(len(until_end(ids, self.tokenizer)) == done for ids in written)
                if not self.runtime.any_process(is_open):
                    break
        return texts_of(written, self.tokenizer)

    def _uniforms(self, rows: int, *, num: int) -> Tensor:
        """Return a number in [0, 1) for each token, (R, N) float32, those of `Sampler.next_token`."""
        words_R, found = first_words(rows, seed=self.seed), []
        for _ in range(num):
            found.append(uniform(words_R))
            words_R = hashed(words_R)
        return torch.stack(found, dim=1)
