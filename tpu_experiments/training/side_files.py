"""What an export has beside the weights of a run: config, tokenizer, generation settings."""

from typing import Any

from tpu_experiments.config.schema import Config
from tpu_experiments.export.generation import generation_config, model_config
from tpu_experiments.export.tokenizer import require_readable
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.objectives.base import writes_text
from tpu_experiments.training.batches import RunInputs

NUM_ROWS, NUM_LINES, MAX_LINE = 8, 64, 400
"""Training rows of a source whose lines the written tokenizer is compared on, lines in all, and letters of a line."""


def side_files(source: HuggingFaceModel, *, config: Config, inputs: RunInputs) -> dict[str, Any]:
    """Return the arguments of `write_model` for everything but weights and data type.

    Raises:
        ConfigError: the base's generation_config.json cannot be read.
    """
    learns_turns = any(found.kind != "text" for found in config.data.values())
    return {
        "config": model_config(source, tokenizer=inputs.tokenizer),
        "tokenizer": inputs.tokenizer,
        "generation": generation_config(
            source, tokenizer=inputs.tokenizer, learns_turns=learns_turns, writes_text=writes_text(config)
        ),
        "lines": lines_of(inputs),
    }


def require_exportable(source: HuggingFaceModel, *, config: Config, inputs: RunInputs) -> None:
    """Require, before training, that what the run will write beside its weights is read back as it is.

    Raises:
        ConfigError: it is not.
    """
    beside = side_files(source, config=config, inputs=inputs)
    writes_model = config.lora.r == 0 or source.random
    require_readable(inputs.tokenizer, config=beside["config"] if writes_model else None, lines=beside["lines"])


def lines_of(inputs: RunInputs) -> list[str]:
    """Return lines of the run's own training rows."""
    lines: list[str] = []
    for source in inputs.sources.values():
        length = min(source.manifests)
        store = source.store("train", length)
        rows = store.take(slice(0, min(NUM_ROWS, store.num_rows))).ids_NT.tolist()
        store.close()
        for ids in rows:
            lines += [line[:MAX_LINE] for line in str(inputs.tokenizer.decode(ids)).splitlines() if line.strip()]
    return lines[:NUM_LINES]
