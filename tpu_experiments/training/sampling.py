"""What the model writes in the course of a run: continuations of prompts, and answers to questions."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from tpu_experiments.checkpoint.progress import AnswersRecord
from tpu_experiments.config.schema import Config
from tpu_experiments.metrics.goodput import Stopwatch
from tpu_experiments.objectives.base import samples
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.training.batches import RunInputs
from tpu_experiments.training.cached_sampler import CachedSampler, Writer
from tpu_experiments.training.evaluation import Sampler, prompt_ids
from tpu_experiments.training.merged import MergedCopy
from tpu_experiments.training.questions import ask


class Prompted:
    """The texts that a run's current parameters write, timed apart from training."""

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        *,
        runtime: Runtime,
        evaluated: Mapping[str, Tensor],
        copy: Callable[[], MergedCopy],
        inputs: RunInputs,
        watch: Stopwatch,
        between: Callable[[], None],
    ) -> None:
        """Build what writes samples and answers.

        Args:
            evaluated: parameters, or their averages, as programs are given them (`Trainer.evaluated_parameters`).
            copy: returns the copy that text is written with where there is a cache.
            between: called before every token.
        """
        self._inputs, self._watch, self._settings = inputs, watch, config.sample
        self._samples = samples(config)
        greedy = replace(config.sample, temperature=0.0)
        parts: dict[str, Any] = {"tokenizer": inputs.tokenizer, "between": between}
        self.sampler: Sampler | CachedSampler
        self.asker: Sampler | CachedSampler
        if inputs.lengths is not None:
            is_drawn = self._samples and config.sample.temperature > 0
            lengths = None if config.hw.runtime == "eager" else inputs.lengths
            writer = Writer(copy, runtime=runtime, is_drawn=is_drawn, lengths=lengths)
            self.sampler = CachedSampler(writer, settings=config.sample, seed=config.seed, **parts)
            self.asker = CachedSampler(writer, settings=greedy, seed=0, **parts)
        else:
            parts |= {"runtime": runtime, "parameters": evaluated}
            self.sampler = Sampler(module, settings=config.sample, seed=config.seed, **parts)
            self.asker = Sampler(module, settings=greedy, seed=0, name="ask", **parts)

    def texts(self) -> list[str]:
        """Return a continuation of every prompt; empty where the run writes none."""
        if not self._samples:
            return []
        with self._watch.measure("eval"):
            inputs, settings = self._inputs, self._settings
            prompts = [prompt_ids(inputs.tokenizer, each, kind=inputs.prompt_kind) for each in settings.all_prompts]
            return self.sampler.write(prompts, max_new_tokens=settings.max_new_tokens, rows=len(prompts))

    def answers(self) -> dict[str, AnswersRecord]:
        """Ask every set of questions; return the results."""
        if not self._inputs.questions:
            return {}
        with self._watch.measure("eval"):
            return ask(self.asker, self._inputs.questions)
