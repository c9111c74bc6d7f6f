"""What the model writes in the course of a run: continuations of prompts, and answers to questions."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from tpu_experiments.checkpoint.progress import AnswersRecord
from tpu_experiments.config.schema import Config
from tpu_experiments.metrics.goodput import Stopwatch
from tpu_experiments.objectives.base import samples
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.training.batches import RunInputs
from tpu_experiments.training.evaluation import Sampler, prompt_ids
from tpu_experiments.training.questions import Asker


class Prompted:
    """The texts that a run's current parameters write, timed apart from training."""

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        *,
        runtime: Runtime,
        parameters: Mapping[str, Tensor],
        inputs: RunInputs,
        watch: Stopwatch,
        between: Callable[[], None],
    ) -> None:
        """Build the programs of samples and answers; `between` is called before every token."""
        self._inputs, self._watch, self._settings = inputs, watch, config.sample
        self._samples = samples(config)
        settings, tokenizer = config.sample, inputs.tokenizer
        parts = {"runtime": runtime, "parameters": parameters, "tokenizer": tokenizer, "between": between}
        self.sampler = Sampler(module, settings=settings, seed=config.seed, **parts)
        self.asker = Asker(module, settings=settings, **parts)

    def texts(self) -> list[str]:
        """Return a continuation of every prompt; empty where the run writes none."""
        if not self._samples:
            return []
        with self._watch.measure("eval"):
            inputs, settings = self._inputs, self._settings
            prompts = [prompt_ids(inputs.tokenizer, each, kind=inputs.prompt_kind) for each in settings.all_prompts]
            return self.sampler.run(prompts, max_new_tokens=settings.max_new_tokens)

    def answers(self) -> dict[str, AnswersRecord]:
        """Ask every set of questions; return the results."""
        if not self._inputs.questions:
            return {}
        with self._watch.measure("eval"):
            return self.asker.ask(self._inputs.questions)
