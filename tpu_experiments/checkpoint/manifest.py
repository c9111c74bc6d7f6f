"""COMMIT.json, a checkpoint's manifest: size and SHA-256 of its files, and results of its checks.

It is written last. What a crash can leave (no manifest, a torn one, files that differ from it) is distinguished from
what it cannot: a name that leads out of the folder, a pickle, JSON with NaN. The former is skipped, the latter refused.
"""

import re
from dataclasses import dataclass
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.tensors import group_in

COMMIT, PROGRESS = "COMMIT.json", "progress.json"
STEP_FOLDER = re.compile(r"step_(\d{8,12})")
DIGEST = re.compile(r"[0-9a-f]{64}")
EXECUTABLE = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib", ".npy", ".py", ".so")
"""Suffixes of files that can run code when they are loaded; no checkpoint of this program has one."""


@dataclass(frozen=True)
class FileFacts:
    """Size and SHA-256 of one file in a manifest."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of COMMIT.json."""

    step: int
    files: dict[str, FileFacts]
    eval_loss: float | None = None
    """Held-out loss of exactly this step; None where it was not evaluated."""
    proof: dict[str, Any] | None = None
    """Results of the checks before the commit, with figures; None where none were made."""

    def text(self) -> str:
        """Return the text of COMMIT.json."""
        files = {name: {"bytes": facts.num_bytes, "sha256": facts.sha256} for name, facts in self.files.items()}
        fields = {"step": self.step, "files": files, "eval_loss": self.eval_loss, "proof": self.proof}
        return strict_json.dumps(fields, indent=1)


def folder_name(step: int) -> str:
    """Return the folder name of the checkpoint of a step."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's folder name; None for other names."""
    found = STEP_FOLDER.fullmatch(name)
    return int(found[1]) if found else None


def steps_in(folder: str) -> list[int]:
    """Return the steps with a folder, complete or not, in ascending order; symbolic links are left out."""
    named = ((step_of(name), name) for name in paths.list_names(folder))
    return sorted(step for step, name in named if step is not None and not paths.is_link(paths.join(folder, name)))


def read_manifest(target: str) -> Manifest:
    """Read the manifest of the checkpoint folder `target`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is torn.
        ConfigError: this program cannot have written it, or a file next to it.
    """
    place = paths.join(target, COMMIT)
    try:
        refuse_executables(target)
        content = paths.read_bytes(place)
    except NotADirectoryError as error:
        raise foreign_file_error(target, "it is a file where a checkpoint's folder belongs") from error
    except IsADirectoryError as error:
        raise foreign_file_error(place, "it is a folder where a file belongs") from error
    try:
        fields = strict_json.loads(content)
    except strict_json.NotStrictError as error:
        raise foreign_file_error(place, str(error)) from error
    if not isinstance(fields, dict) or not isinstance(fields.get("files"), dict):
        raise ValueError(f"{COMMIT} lists no files")
    files = {str(name): _facts(place, str(name), facts) for name, facts in fields["files"].items()}
    if PROGRESS not in files:
        raise foreign_file_error(place, f"it does not list {PROGRESS}")
    loss = fields.get("eval_loss")
    step = step_of(target.rstrip("/").rpartition("/")[2])
    if step is None or fields.get("step") != step:
        raise foreign_file_error(place, f"it says step {fields.get('step')!r}, unlike its folder's name")
    return Manifest(step, files, loss if isinstance(loss, float) else None, fields.get("proof"))


def refuse_executables(target: str) -> None:
    """Check the file names in a checkpoint folder.

    Raises:
        ConfigError: one of them has a suffix of EXECUTABLE, such as a pickle's.
    """
    for name in paths.list_names(target):
        if name.lower().endswith(EXECUTABLE):
            raise foreign_file_error(
                paths.join(target, name),
                "a checkpoint holds safetensors and JSON, and such a file can run code",
            )


def foreign_file_error(place: str, why: str) -> ConfigError:
    """Return the error for a file that this program cannot have written in this form."""
    return ConfigError(
        f"{place}; {why}: this program did not write it, so nothing of this checkpoint is used; find out who wrote "
        "it, then remove the checkpoint's folder to resume from the one before."
    )


def strict_object(content: bytearray, *, place: str) -> dict[str, Any]:
    """Parse the JSON object in a file whose checksum is right.

    Raises:
        ConfigError: the content is not a JSON object.
    """
    try:
        value = strict_json.loads(bytes(content))
    except ValueError as error:
        raise foreign_file_error(place, f"it cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise foreign_file_error(place, "it is no JSON object")
    return value


def _facts(place: str, name: str, facts: Any) -> FileFacts:
    if name != PROGRESS and group_in(name) is None:
        raise foreign_file_error(place, f"it lists {name!r}, which is no name of a checkpoint's file")
    if not isinstance(facts, dict):
        raise ValueError(f"{COMMIT} does not describe {name}")
    num_bytes, digest = facts.get("bytes"), facts.get("sha256")
    if type(num_bytes) is not int or num_bytes < 0 or not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise foreign_file_error(place, f"it gives {name} {num_bytes!r} bytes and the SHA-256 {str(digest)[:80]!r}")
    return FileFacts(num_bytes, digest)
