"""Write result.json last and atomically, so that its presence means a finished run."""

import resource
from typing import Any

from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.run_folder import RESULT, RunFolder

FIELDS = (
    "status", "name", "task", "model", "data", "hw", "stages", "eval_loss_before", "eval_loss", "perplexity",
    "num_trainable", "num_parameters", "tokens", "tokens_per_second", "seconds", "num_compiles",
    "compiles_after_warmup", "peak_host_rss_gib", "adapter_path", "config_hash", "git_commit", "versions", "plan",
    "goodput",
)  # fmt: skip


def write_result(folder: RunFolder, result: dict[str, Any]) -> None:
    """Write result.json; non-finite numbers become null, since JSON has none."""
    require_fields(result)
    paths.write_text_atomic(folder.path(RESULT), strict_json.dumps(result, indent=1) + "\n")


def require_fields(result: dict[str, Any]) -> None:
    """Require every field of `FIELDS`.

    Raises:
        AssertionError: one is missing, which is a bug.
    """
    missing = [name for name in FIELDS if name not in result]
    assert not missing, f"result.json lacks {missing}"


def peak_host_rss_gib() -> float:
    """Return the peak resident set size of this process in GiB (ru_maxrss is in KiB on Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
