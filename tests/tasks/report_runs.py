"""Run folders for a report, written as a run writes them."""

import json
from pathlib import Path
from typing import Any

from tests.config.composing import composed
from tpu_experiments.storage import paths
from tpu_experiments.storage.run_folder import RunFolder


def made(
    folder: str | Path, *overrides: str, steps: int = 20, loss: float = 3.0, is_finished: bool = True, tokens: int = 99
) -> str:
    """A folder with config, records, a life and, where it is finished, a result; its path."""
    place = str(folder)
    output_dir, _, name = place.rpartition("/")
    run = RunFolder(output_dir, name)
    run.create(composed(f"name='{name}'", f"output_dir='{output_dir}'", *overrides))
    records: list[dict[str, Any]] = [{"step": 0, "time": 1.0, "eval/loss": 5.0}, {"step": 0, "time": 1.0, "audit": "x"}]
    for step in range(1, steps + 1):
        falling = {"train/loss": 5.0 - step / 10, "train/lr": 1e-3, "perf/step_seconds": 0.5}
        records.append({"step": step, "time": 1.0 + step, "perf/tokens_per_second": 100.0 * (step % 2 + 1), **falling})
    records.append({"step": steps, "time": 2.0 + steps, "eval/loss": loss})
    text = "".join(json.dumps(record) + "\n" for record in records)
    paths.write_text_atomic(run.path("metrics.jsonl"), text + ("" if is_finished else '{"step": 9'))
    seconds = {"setup": 4.0, "compile": 6.0, "step": 10.0}
    usd = {"on_demand": 3600.0, "spot": None}
    life = {"id": "1", "host": "h", "started": 0.0, "num_devices": 1, "usd_per_hour": usd, "seconds": seconds}
    paths.make_dirs(run.path("lives"))
    paths.write_text_atomic(run.path("lives", "0001_a.json"), json.dumps(life))
    if is_finished:
        account = {"wall_seconds": 20.0, "lives": 1, "seconds": seconds, "usd": {"on_demand": 20.0, "spot": None}}
        result = {
            "status": "finished", "eval_loss_before": 5.0, "eval_loss": loss, "tokens_per_second": 150.0,
            "eval_tokens": tokens, "eval_sources": {"one": loss},
            "stages": [{"name": "a", "steps": 8}, {"name": "b", "steps": steps - 8}], "goodput": {"run": account},
            "sample_before": None, "sample_after": "<b>Dunărea</b>",
        }  # fmt: skip
        paths.write_text_atomic(run.path("result.json"), json.dumps(result))
    return place
