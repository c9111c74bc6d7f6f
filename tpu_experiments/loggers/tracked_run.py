"""The id of a run at a tracking service, kept in the run folder, so that a resumed run goes on in the same place."""

import re
import secrets

from tpu_experiments.storage import paths
from tpu_experiments.storage.run_folder import RunFolder

ID_FILE = "id"
ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_NAME = 50
"""Characters of the run's name in an id."""


def stored_id(folder: RunFolder, service: str) -> str | None:
    """Return the id in `<run>/<service>/id`; None where there is none, or no plain one."""
    place = folder.path(service, ID_FILE)
    stored = paths.read_text(place).strip() if paths.exists(place) else ""
    return stored if ID.fullmatch(stored) else None


def store_id(folder: RunFolder, service: str, made: str) -> None:
    """Write an id to `<run>/<service>/id`."""
    paths.make_dirs(folder.path(service))
    paths.write_text_atomic(folder.path(service, ID_FILE), made + "\n")


def run_id(folder: RunFolder, service: str = "wandb") -> str:
    """Return the stored id, or store a new one: the run's name, made plain, and a random part.

    W&B refuses `:;,#?/'` in an id, points of two sweeps share their names, and an id that was deleted on its server is
    refused as well, so neither the name nor a hash of the path will do.
    """
    stored = stored_id(folder, service)
    if stored is not None:
        return stored
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", folder.name).strip("-")[:MAX_NAME]
    made = f"{plain or 'run'}-{secrets.token_hex(4)}"
    store_id(folder, service, made)
    return made
