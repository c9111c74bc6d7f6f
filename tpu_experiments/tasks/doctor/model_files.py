"""Check whether the weights of a run are on this machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tpu_experiments.config.schema import Config
from tpu_experiments.io import strict_json
from tpu_experiments.io.find import find_local

Kind = Literal["drawn", "folder", "hub", "missing"]
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelFiles:
    """Location of the weights."""

    kind: Kind
    folder: str | None = None
    is_complete: bool = False
    """Whether config.json and all weight files are on this machine."""


def look_at_model_files(config: Config) -> ModelFiles:
    """Look for the weights in the folder or the Hub's cache, without network access."""
    model = config.model
    if model.init == "random" or model.size == "tiny":
        return ModelFiles("drawn", is_complete=True)
    local = find_local(model.path)
    if local is not None and local.is_dir():
        return ModelFiles("folder", str(local), is_whole(local))
    if model.path.startswith((".", "/", "~")) or model.path.count("/") != 1:
        return ModelFiles("missing")
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model.path, revision=model.revision, local_files_only=True))
    except Exception:  # the client raises several types for a repository missing in its cache
        return ModelFiles("hub")
    return ModelFiles("hub", str(folder), is_whole(folder))


def is_whole(folder: Path) -> bool:
    """Return whether a checkpoint has config.json and all weight files named by its index."""
    if not (folder / "config.json").is_file():
        return False
    if not (folder / INDEX).is_file():
        return any(folder.glob("*.safetensors"))
    try:
        names = set(strict_json.loads((folder / INDEX).read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return False
    return all((folder / name).is_file() for name in names)
