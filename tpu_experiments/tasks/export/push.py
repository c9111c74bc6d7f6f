"""Upload of finished forms to a repository of the Hugging Face Hub: one commit for each form.

The token comes from HF_TOKEN alone. huggingface_hub is imported where it is needed: it reads the environment then.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.task_schema import WrittenFormsConfig
from tpu_experiments.export.card import CARD, MARKER, Card, index_page, page
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.tasks.export.parity import Parity
from tpu_experiments.tasks.export.report import as_markdown

TOKEN = "HF_TOKEN"
WITHOUT = ("parity.json", "parity.md", MARKER)
"""Files beside those that export.json lists, which are uploaded too."""


@dataclass(frozen=True)
class Upload:
    """One form on its way to the repository."""

    folder: str
    card: Card
    comparison: str
    sizes: dict[str, int]
    """Bytes of the files, by name, in the order of the listing; the card's are counted as it is uploaded."""
    text: str
    """README.md, whose lines of code name the repository."""
    prefix: str
    """Folder in the repository with a slash behind it; empty where one form has the root."""


def require_pushable(task: WrittenFormsConfig) -> None:
    """Require what an upload needs, before anything is written.

    Raises:
        ConfigError: it is asked for, and there is no token or no network.
    """
    if task.push is None or task.push_dry_run:
        return
    if not os.environ.get(TOKEN):
        raise ConfigError(
            f"task.push={task.push}; the variable {TOKEN} is not set; set it to a token with the right to write, or "
            "leave task.push_dry_run=true."
        )
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"task.push={task.push}; HF_HUB_OFFLINE is set, or the Hub cannot be reached; connect the machine, or "
            "leave task.push_dry_run=true."
        )


def push(task: WrittenFormsConfig, folders: Sequence[str]) -> str:
    """Upload complete forms, or, with `task.push_dry_run`, list what would be; return what was done as text.

    Raises:
        ConfigError: a form is worse than the trained model, the repository holds another's files of the same name, or
            the Hub refuses.
    """
    assert task.push is not None
    uploads = [_upload_of(folder, task.push, is_only=len(folders) == 1) for folder in folders]
    text = _listing(task, uploads)
    if not task.push_dry_run:
        _upload(task, uploads)
    return text


def _upload_of(folder: str, repository: str, *, is_only: bool) -> Upload:
    """Read a complete form's export.json.

    Raises:
        ConfigError: it is worse than the trained model.
    """
    facts = strict_json.loads(paths.read_bytes(paths.join(folder, MARKER)))
    parities = [Parity(**fields) for fields in facts["parity"]]
    worse = [f"{parity.form}: {parity.reason}" for parity in parities if parity.verdict == "worse"]
    if worse:
        raise ConfigError(
            f"task.push={repository}; {folder} is worse than the trained model ({'; '.join(worse)}), and nothing is "
            "uploaded; leave it out of task.forms, or, where perplexity alone is the reason, name a "
            "task.parity.max_perplexity_ratio that you accept."
        )
    form = facts["form"]
    card = Card(**facts["card"])
    comparison = as_markdown(parities, files=facts["files"])
    text = page(
        card,
        place=repository,
        comparison=comparison,
        files=list(facts["files"]),
        subfolder=None if is_only else form,
    )
    sizes = {name: int(file["bytes"]) for name, file in facts["files"].items()}
    sizes |= {name: paths.size_of(paths.join(folder, name)) or 0 for name in WITHOUT}
    sizes[CARD] = len(text.encode())
    return Upload(folder, card, comparison, dict(sorted(sizes.items())), text, "" if is_only else f"{form}/")


def _listing(task: WrittenFormsConfig, uploads: Sequence[Upload]) -> str:
    """Return the files with their sizes, and what becomes of them."""
    total = sum(sum(upload.sizes.values()) for upload in uploads)
    kind = "private" if task.push_private else "public"
    rows = [(f"{size:,}", upload.prefix + name) for upload in uploads for name, size in upload.sizes.items()]
    if len(uploads) > 1:
        text = _index(uploads)
        rows.append((f"{len(text.encode()):,}", CARD))
        total += len(text.encode())
    width = max(len(size) for size, _ in rows)
    lines = [f"  {size.rjust(width)}  {name}" for size, name in rows]
    what = f"{len(rows)} files, {total:,} bytes"
    if task.push_dry_run:
        first = (
            f"nothing was uploaded: task.push_dry_run=false creates {task.push} on the Hub ({kind}), if it is not "
            f"there, and uploads {what}:"
        )
    else:
        first = f"uploaded to {task.push} on the Hub ({kind}, if it was not there): {what}:"
    return "\n".join([first, *lines])


def _index(uploads: Sequence[Upload]) -> str:
    return index_page([upload.card for upload in uploads], comparisons=[upload.comparison for upload in uploads])


def _upload(task: WrittenFormsConfig, uploads: Sequence[Upload]) -> None:
    """Create the repository if it is not there and commit each form.

    Raises:
        ConfigError: the Hub cannot be reached or refuses, or the repository holds other files of the same name.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import disable_progress_bars

    assert task.push is not None
    disable_progress_bars()
    api = HfApi(token=os.environ[TOKEN], library_name="tpu_experiments")
    try:
        api.create_repo(task.push, private=task.push_private, exist_ok=True)
        _require_own(task.push, uploads, set(api.list_repo_files(task.push)))
        for upload in uploads:
            with paths.local_copy(upload.folder) as folder:
                files: dict[str, Any] = {name: paths.join(folder, name) for name in upload.sizes}
                files[CARD] = upload.text.encode()
                added = [
                    CommitOperationAdd(path_in_repo=upload.prefix + name, path_or_fileobj=content)
                    for name, content in files.items()
                ]
                api.create_commit(task.push, added, commit_message=f"{upload.card.form} of {upload.card.name}")
        if len(uploads) > 1:
            added = [CommitOperationAdd(path_in_repo=CARD, path_or_fileobj=_index(uploads).encode())]
            api.create_commit(task.push, added, commit_message=f"Card of {uploads[0].card.name}")
    except ConfigError:
        raise
    except Exception as error:
        # Errors of its HTTP library (httpx2 in 2.4, httpx and requests before) have no class in common with OSError.
        # ValueError: the Hub finds the metadata of a card invalid.
        of_client = type(error).__module__.startswith(("httpx", "requests", "huggingface_hub"))
        if not of_client and not isinstance(error, (OSError, ValueError)):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(
            f"task.push={task.push}; the Hub refused, or cannot be reached ({reason}); mend that and repeat the "
            "command."
        ) from error


def _require_own(repository: str, uploads: Sequence[Upload], there: set[str]) -> None:
    """Require files of the same name in the repository to be an earlier upload's.

    Raises:
        ConfigError: they are another's.
    """
    for upload in uploads:
        taken = sorted(name for name in upload.sizes if upload.prefix + name in there and name != CARD)
        if taken and upload.prefix + MARKER not in there:
            raise ConfigError(
                f"task.push={repository}; it holds {upload.prefix}{taken[0]} and no {upload.prefix}{MARKER}, so that "
                "is not an earlier upload's, and nothing is written over; name another repository."
            )
