"""Schema of the settings of task=evaluate."""

from dataclasses import dataclass

from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.places import place
from tpu_experiments.config.planning import TaskConfig


@dataclass
class EvaluateTaskConfig(TaskConfig):
    """Settings of task=evaluate."""

    split: str = choice("test", "evaluation", default="test")
    """Held-out documents that are evaluated; `evaluation` are those that training looks at."""
    run: str | None = place("folder", default=None)
    """Folder of the run whose adapter or model is evaluated, with its own model, LoRA, data and row length; null is the
    run of this very command, `<output_dir>/<name>`."""
    adapter: str | None = place("folder", default=None)
    """Folder of an adapter in PEFT's layout that is evaluated instead of the run's; `none` evaluates the base model
    alone. Neither needs a run."""
    data: str = choice("run", "selected", default="run")
    """With `run`: its own data, or what `data=` selects, of which nothing is known to be unseen."""
    max_documents: int | None = number(default=1000, at_least=1)
    """Documents of each source at most, drawn by `seed`; null takes all."""
    seq_len: int | None = number(default=None, at_least=8, at_most=2**24)
    """Tokens of a row, so the longest context of a token; null is the longest of the run's stages."""
    by: str | None = None
    """Field of the rows, such as `sample_type`, for whose values the same is said one by one; a source whose rows do
    not have it is left out there. The sources are read once more to find the values."""
    documents: str | None = place("file", default=None)
    """JSONL file that the held-out documents are written to as text, for other programs: `source`, and `text` or, of
    conversations up to their last answer, `prompt` and `reference`."""
    resamples: int = number(default=1000, at_least=100)
    """Times that the documents are drawn anew for the intervals."""
    confidence: float = number(default=0.95, above=0, below=1)
    """Share of the resampled values inside an interval."""
    generate: int = number(default=0, at_least=0)
    """Conversations of each chat source whose last answer the model writes, to be compared with the real one (ROUGE,
    exact match); 0 writes none."""
    max_new_tokens: int = number(default=64, at_least=1, at_most=2**24)
    """Tokens of such an answer at most; what is longer of the real one counts as missed."""
