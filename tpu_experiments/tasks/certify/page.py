"""The page of a certificate, for readers (Markdown) and for programs (JSON), with the hashes of what it is about."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from tpu_experiments.config.escaping import as_code, for_markdown
from tpu_experiments.config.folders import REPOSITORY
from tpu_experiments.loggers.provenance import git_state, versions
from tpu_experiments.pages.table import markdown_line
from tpu_experiments.storage import strict_json
from tpu_experiments.tasks.certify.checks import Check, verdict_of

READ = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.py", "*.txt")
"""Files of a checkpoint's folder that a run may read."""
OF_CHECKS = ("peft", "jax")
"""Packages beside those of a run's provenance that a certificate depends on."""


def certificate(checks: Sequence[Check], *, about: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of certificate.json: its last field is the hash of all others (`digest_of`)."""
    found = {
        "format": 1,
        "verdict": verdict_of(checks),
        **about,
        "checks": [asdict(check) for check in checks],
        "files": dict(files),
        "versions": versions() | {name: _version(name) for name in OF_CHECKS},
        **git_state(REPOSITORY),
    }
    return found | {"sha256": digest_of(found)}


def digest_of(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a certificate without its own hash: of its JSON with sorted keys and no blanks."""
    values = {name: value for name, value in content.items() if name != "sha256"}
    written = strict_json.loads(strict_json.dumps(values))
    text = json.dumps(written, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def files_of(*folders: Path | None) -> dict[str, str]:
    """Return the SHA-256 of the files that a run may read in these folders, by path."""
    found: dict[str, str] = {}
    for folder in dict.fromkeys(each for each in folders if each is not None and each.is_dir()):
        for file in sorted({file for pattern in READ for file in folder.glob(pattern) if file.is_file()}):
            with file.open("rb") as content:
                found[str(file)] = hashlib.file_digest(content, "sha256").hexdigest()
    return found


def as_markdown(content: Mapping[str, Any]) -> str:
    """Return the page."""
    lines = [
        f"# Certificate: {for_markdown(content['name'])} is {content['verdict']}",
        "",
        *(f"* {name}: {for_markdown(str(content[key]))}" for name, key in ABOUT if content.get(key) is not None),
        f"* command: {as_code(content['command'])}",
        "",
        "| check | verdict | reason | seconds |",
        "|---|---|---|---|",
        *(
            markdown_line([c["name"], c["verdict"], for_markdown(c["said"]), f"{c['seconds']:.1f}"])
            for c in content["checks"]
        ),
        "",
        "*Right*: both sides agree. *Refused*: a run with these settings is refused, with this sentence. *Failed*: the "
        "two sides differ. *Not checked*: there is nothing to look at, or it is not there.",
        "",
        "Planned figures are estimates of the TPU's compiler or, where the reason says so, of formulas. Nothing here "
        "has run on a TPU.",
        "",
        "## Signed",
        "",
        f"* this page: `{content['sha256']}` (SHA-256 of certificate.json without this field, sorted keys, no blanks)",
        f"* code: commit {content['git_commit'] or 'unknown'}{changed(content)}",
        f"* packages: {', '.join(f'{name} {number}' for name, number in content['versions'].items() if number)}",
        *(f"* {as_code(name)}: `{digest}`" for name, digest in content["files"].items()),
    ]
    return "\n".join(lines) + "\n"


ABOUT = (
    ("model", "model"),
    ("numerics on", "copy"),
    ("settings", "config_hash"),
    ("made", "made"),
)


def changed(content: Mapping[str, Any]) -> str:
    """Return what differs from the commit, if anything is known to."""
    return f", with changes of SHA-256 `{content['git_diff_sha256']}`" if content["git_dirty"] else ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
