"""What `model.path` names on this machine, as a folder: a GGUF file's is made in the cache (checkpoint.py)."""

from pathlib import Path

from tpu_experiments.storage.gguf.files import folder_of, is_gguf


def opened(place: Path, *, revision: str | None) -> Path:
    """Return a local file or folder, and of a GGUF file the folder of its checkpoint.

    Args:
        revision: `model.revision`.

    Raises:
        ConfigError: it is a GGUF file that cannot be read as a model, or another one than `revision` says.
    """
    if not is_gguf(place):
        return place
    folder = folder_of(place, revision=revision)
    if not folder.exists():
        from tpu_experiments.storage.gguf.checkpoint import make_checkpoint  # imports torch (4 s)

        make_checkpoint(place, folder)
    return folder
