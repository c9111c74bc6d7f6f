"""What a run was told before it began, in its own folder and under TensorBoard's TEXT tab: the audit and the plan.

<run>/audit.html, audit.json   and audit/ where sources are many, as task=prepare writes them
<run>/plan.md, plan.json       the compiled plan of the same programs; else what formulas say, or why nobody does
"""

from tpu_experiments.data.audit.page import audit_pages, write_audit_pages
from tpu_experiments.data.audit.summary import audit_json, audit_table
from tpu_experiments.io import paths, strict_json
from tpu_experiments.io.folder import RunFolder
from tpu_experiments.logging.base import Loggers
from tpu_experiments.logging.promise import Promise
from tpu_experiments.training.inputs import RunInputs


def write_pages(folder: RunFolder, *, inputs: RunInputs, promise: Promise, loggers: Loggers, is_new: bool) -> None:
    """Write the files that are not there; `is_new` shows them to the loggers too, which a resumed run has done."""
    if not paths.exists(folder.path("audit.html")):
        write_audit(folder, inputs)
    if not paths.exists(folder.path("plan.md")):
        write_plan(folder, promise)
    if is_new:
        loggers.text(0, tag="audit", text=f"```\n{audit_table(manifests_of(inputs))}```")
        loggers.text(0, tag="plan", text=paths.read_text(folder.path("plan.md")))


def manifests_of(inputs: RunInputs) -> list[dict[str, object]]:
    """Return the manifests of every source at every row length."""
    return [manifest for source in inputs.sources.values() for manifest in source.manifests.values()]


def write_audit(folder: RunFolder, inputs: RunInputs) -> None:
    """Write the audit, audit.html last, since `write_pages` checks for it."""
    sources, manifests = inputs.sources.values(), manifests_of(inputs)
    stores = {(s.name, length): s.store("train", length) for s in sources for length in s.manifests}
    pages = audit_pages(manifests, stores=stores, tokenizer=inputs.tokenizer, name="audit")
    paths.write_text_atomic(folder.path("audit.json"), strict_json.dumps(audit_json(manifests), indent=1) + "\n")
    write_audit_pages(folder.path(), pages)


def write_plan(folder: RunFolder, promise: Promise) -> None:
    """Copy the plan's files, or write the few known figures."""
    text = promise_text(promise)
    if promise.file is not None:
        page = paths.join(promise.file.rpartition("/")[0], "plan.md")
        paths.write_text_atomic(folder.path("plan.json"), paths.read_text(promise.file))
        text = paths.read_text(page) if paths.exists(page) else text
    paths.write_text_atomic(folder.path("plan.md"), text)


def promise_text(promise: Promise) -> str:
    """Return the plan's figures as Markdown."""
    if promise.source is None:
        return f"No plan: {promise.reason}.\n"
    lines = [f"Plan: {promise.source}{f' ({promise.file})' if promise.file else ''}", ""]
    lines += [f"- stage {name}: {seconds:.3g} s a step" for name, seconds in promise.step_seconds.items()]
    lines += [f"- {promise.hbm_gib:.2f} GiB stay on a chip between steps"] if promise.hbm_gib is not None else []
    lines += [f"- {promise.reason}"] if promise.reason else []
    return "\n".join(lines) + "\n"
