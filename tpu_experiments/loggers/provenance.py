"""Record the provenance of a run: code, versions, machine and seeds."""

import datetime
import hashlib
import json
import logging
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from tpu_experiments.config.folders import REPOSITORY
from tpu_experiments.config.identity import config_hash
from tpu_experiments.config.redaction import redacted_arguments
from tpu_experiments.config.schema import Config
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.run_folder import RunFolder, put_aside

log = logging.getLogger(__name__)

PACKAGES = (
    "torch", "torch_xla", "torch_tpu", "libtpu", "jaxlib", "transformers", "tokenizers", "datasets", "safetensors",
    "hydra-core", "omegaconf", "numpy",
)  # fmt: skip


def provenance(config: Config, *, device: str, argv: list[str]) -> dict[str, Any]:
    """Return the facts for provenance.json; null where the machine does not report one."""
    return {
        **git_state(REPOSITORY),
        "versions": versions(),
        "device": device,
        "hw": config.hw.name,
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "num_cpus": psutil.cpu_count(),
        "ram_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "seed": config.seed,
        "argv": redacted_arguments(argv),
        "config_hash": config_hash(config),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write_provenance(folder: RunFolder, facts: dict[str, Any]) -> None:
    """Append the facts of this start to provenance.json, and warn if the code or a package is another than before."""
    path = folder.path("provenance.json")
    lives = _stored_lives(path) if paths.exists(path) else []
    differences = changes_between(lives[-1], facts) if lives else []
    if differences:
        log.warning(
            "This run was last started with other code or packages: %s. From here on its numbers may differ from those "
            "of a run that never stopped, by rounding or by more; resume with the former ones for the same bits.",
            "; ".join(differences),
        )
    paths.write_text_atomic(path, json.dumps({"lives": [*lives, facts]}, indent=1) + "\n")


def changes_between(before: Any, now: dict[str, Any]) -> list[str]:
    """Return what differs in the code and the packages of two starts; what one of them does not know does not.

    Args:
        before: an entry of a stored provenance.json, which may hold anything.
    """
    if not isinstance(before, dict):
        return []
    old = before.get("versions")
    packages = old if isinstance(old, dict) else {}
    pairs = [("commit", before.get("git_commit"), now.get("git_commit"))]
    pairs += [(name, packages.get(name), version) for name, version in now.get("versions", {}).items()]
    found = [f"{name} {a}, now {b}" for name, a, b in pairs if a and b and a != b]
    are_known = before.get("git_dirty") is not None and now.get("git_dirty") is not None
    if are_known and before.get("git_diff_sha256") != now.get("git_diff_sha256"):
        found.append("changes that are not committed")
    return found


def _stored_lives(path: str) -> list[Any]:
    """Return the earlier starts; an unreadable file is moved aside and named in the log."""
    content = paths.read_bytes(path)
    try:
        stored = strict_json.loads(content)
        if not isinstance(stored, dict) or not isinstance(stored.get("lives"), list):
            raise ValueError("it lists no lives")
    except ValueError as error:
        log.warning(
            "%s cannot be read (%s); moved to %s, and a new file is begun", path, error, put_aside(path, content)
        )
        return []
    return list(stored["lives"])


def git_state(root: Path) -> dict[str, Any]:
    """Return the commit, whether files (new ones too) differ from it, and a hash of the difference.

    All are null outside a checkout. launch/tpu.py sends files without a checkout, and their base commit as `.commit`.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top.decode().strip()) != root.resolve():  # installed below another checkout
        sent = root / ".commit"
        stands_on = sent.read_text(encoding="utf-8").strip() if sent.is_file() else ""
        return {"git_commit": stands_on or None, "git_dirty": None, "git_diff_sha256": None}
    commit = _git(root, "rev-parse", "HEAD")  # None before the first commit
    changes = (_git(root, "status", "--porcelain") or b"") + (_git(root, "diff", "--binary", "HEAD") or b"")
    return {
        "git_commit": commit.decode().strip() if commit is not None else None,
        "git_dirty": bool(changes),
        "git_diff_sha256": hashlib.sha256(changes).hexdigest() if changes else None,
    }


def versions() -> dict[str, str | None]:
    """Return the installed version of every package that affects results."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _git(root: Path, *arguments: str) -> bytes | None:
    """Return git's standard output, or None when git is missing or refuses."""
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
