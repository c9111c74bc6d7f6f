"""task=export: write what was trained in the forms that others read, and compare each with the trained model.

A form is complete when `export.json` is in its folder, which is written last; the command, repeated, leaves complete
forms as they are.
"""

import hashlib
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import ExportTaskConfig, WrittenFormsConfig
from tpu_experiments.export.card import CARD, MARKER, page
from tpu_experiments.loggers.runlog import terminal_log
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.retry import explain_storage_errors
from tpu_experiments.tasks.export.forms import WRITERS, Writer
from tpu_experiments.tasks.export.pages import card_of
from tpu_experiments.tasks.export.parity import Parity
from tpu_experiments.tasks.export.proof import Proof
from tpu_experiments.tasks.export.push import push, require_pushable
from tpu_experiments.tasks.export.report import as_json, as_markdown, as_table
from tpu_experiments.tasks.export.subject import Subject, subject_of

log = logging.getLogger(__name__)
BEGUN = "export_begun.json"
"""File that is written first, which tells an interrupted export's folder from anybody's."""


def run(config: Config) -> None:
    """Write the forms and print a table; exit code 0 done, 1 an export is worse than the trained model, 2 refused.

    Raises:
        ConfigError: something the user can fix.
    """
    assert isinstance(config.task, ExportTaskConfig), "conf/task/export.yaml has this schema"
    write_forms(config, config.task, writers=WRITERS)


def write_forms(config: Config, task: WrittenFormsConfig, *, writers: Mapping[str, Writer]) -> None:
    """Write the forms of a task, print the table, upload, and exit with 1 if one is worse than the trained model."""
    require_pushable(task)
    with terminal_log(), explain_storage_errors(task.folder or task.run or config.output_dir):
        found = exported(config, task, writers=writers)
    print(for_terminal(as_table(found)))
    if task.push is not None:
        print(push(task, list(found)))
    if any(parity.verdict == "worse" for parities in found.values() for parity in parities):
        sys.exit(1)


def exported(
    config: Config, task: WrittenFormsConfig, *, writers: Mapping[str, Writer] = WRITERS
) -> dict[str, list[Parity]]:
    """Write the forms that are not complete; return the comparisons of all, by folder."""
    subject = subject_of(config, task)
    digest = subject.digest()
    folders = {form: paths.join(subject.place, form) for form in subject.forms}
    complete = {form: _complete(folder, digest) for form, folder in folders.items()}
    with Proof(subject, config) as proof:
        for form, folder in folders.items():
            if complete[form] is not None:
                log.info("%s is complete", folder)
                continue
            log.info("writing %s", folder)
            complete[form] = _written(form, folder, write=writers[form], subject=subject, proof=proof, digest=digest)
    return {folder: found for form, folder in folders.items() if (found := complete[form]) is not None}


def _complete(folder: str, digest: str) -> list[Parity] | None:
    """Return the comparisons of a complete form; None if there is none, or one of other weights, or not compared so.

    Raises:
        ConfigError: the folder holds something that is not an export's.
    """
    paths.require_own(
        folder, marker=MARKER, begun=BEGUN, advice="move it away, or name another place with task.folder="
    )
    if not paths.exists(paths.join(folder, MARKER)):
        return None
    facts = strict_json.loads(paths.read_bytes(paths.join(folder, MARKER)))
    sizes = {name: paths.size_of(paths.join(folder, name)) for name in facts["files"]}
    parities = [Parity(**fields) for fields in facts["parity"]]
    if facts["digest"] != digest or sizes != {name: file["bytes"] for name, file in facts["files"].items()}:
        reason = "holds other weights, or other settings, or is incomplete"
    elif any(parity.verdict == "not checked" for parity in parities):
        reason = "was not compared with the trained model"
    elif any("kept" not in fields and fields["verdict"] == "worse" for fields in facts["parity"]):
        reason = "was compared with bounds that do not hold for large models"
    else:
        return parities
    log.info("%s %s: it is written anew", folder, reason)
    return None


def _written(form: str, folder: str, *, write: Writer, subject: Subject, proof: Proof, digest: str) -> list[Parity]:
    """Write one form with its comparisons and, last, its marker."""
    paths.make_dirs(folder)
    paths.write_text_atomic(paths.join(folder, BEGUN), "{}\n")
    for name in paths.list_names(folder):
        if name != BEGUN:
            paths.remove_tree(paths.join(folder, name))
    with _staged(folder) as local:
        written = write(local, subject)
        parities = [proof.check(local, copy) for copy in written.copies]
        files = {file.name: _facts(file) for file in sorted(Path(local).iterdir()) if file.name != BEGUN}
        _require_unchanged(files, written.digests, folder=folder)
        paths.write_text_atomic(paths.join(local, "parity.json"), as_json(parities))
        comparison = as_markdown(parities, files=files)
        paths.write_text_atomic(paths.join(local, "parity.md"), comparison)
        card = card_of(form, subject, written)
        text = page(card, place=paths.absolute(folder), comparison=comparison, files=list(files))
        paths.write_text_atomic(paths.join(local, CARD), text)
    facts = {"format": 1, "form": form, "digest": digest, "origin": subject.origin.text, **written.facts}
    facts |= {"files": files, "parity": [parity.fields() for parity in parities], "card": asdict(card)}
    paths.write_text_atomic(paths.join(folder, MARKER), strict_json.dumps(facts, indent=1) + "\n")
    paths.remove_tree(paths.join(folder, BEGUN))
    return parities


@contextmanager
def _staged(folder: str) -> Iterator[str]:
    """Yield a local folder to write to; of a remote one, its files are uploaded at the end."""
    if not paths.is_remote(folder):
        yield paths.absolute(folder)
        return
    with tempfile.TemporaryDirectory(prefix="export_") as local:
        yield local
        for file in sorted(Path(local).iterdir()):
            paths.copy_file(str(file), paths.join(folder, file.name))


def _facts(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256")
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def _require_unchanged(files: Mapping[str, Mapping[str, Any]], digests: Mapping[str, str], *, folder: str) -> None:
    """Require the files of weights to hold on disk what the writer gave them.

    Raises:
        ConfigError: a file differs, so the disk or another program changed it.
    """
    for name, digest in digests.items():
        if files.get(name, {}).get("sha256") != digest:
            raise ConfigError(
                f"{paths.join(folder, name)}; it does not hold what was written a moment ago; look at the disk, and "
                "that no other command writes there, and repeat the command."
            )
