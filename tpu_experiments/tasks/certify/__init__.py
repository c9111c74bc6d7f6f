"""task=certify: one page that says what holds of a model here, before anything is trained with it.

<output_dir>/certificates/<name>/certificate.json, certificate.md

Numerics are compared on a small copy of the config with random weights, which a folder with config.json alone has too;
those of the checkpoint itself, where its weights are there, on as many of its layers as there are kinds of
(models/sources/loaded.py). The step of the full size is planned.
"""

import datetime
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.config.identity import config_hash
from tpu_experiments.config.redaction import redacted_arguments
from tpu_experiments.config.schema import Config
from tpu_experiments.config.targets import locate
from tpu_experiments.config.task_schema import CertifyTaskConfig
from tpu_experiments.loggers.runlog import terminal_log
from tpu_experiments.models.huggingface import shapes_only, silent, with_small_files
from tpu_experiments.objectives.base import model_source
from tpu_experiments.runtime.kernels.attention import without_attention_kernel
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.retry import explain_storage_errors
from tpu_experiments.tasks.certify import machines, tokens
from tpu_experiments.tasks.certify.checks import EXIT_CODES, NotChecked, Seen, checked
from tpu_experiments.tasks.certify.page import as_markdown, certificate
from tpu_experiments.tasks.certify.subject import Subject
from tpu_experiments.tasks.export.readers import quiet

log = logging.getLogger(__name__)
CERTIFICATE, PAGE, FOLDER = "certificate.json", "certificate.md", "certificates"
ADVICE = "move it away, or name another place with name= or output_dir="


def run(config: Config) -> None:
    """Make the checks and write the page; exit code 0 right, 2 refused, 1 failed or not checked.

    Raises:
        ConfigError: nothing can be certified; nothing was written.
    """
    task = config.task
    assert isinstance(task, CertifyTaskConfig), "conf/task/certify.yaml has this schema"
    folder = paths.join(config.output_dir, FOLDER, str(config.name))
    with terminal_log(), explain_storage_errors(folder):
        paths.require_own(folder, marker=CERTIFICATE, begun=CERTIFICATE, advice=ADVICE)
        content = certified(config, task)
        paths.make_dirs(folder)
        paths.write_text_atomic(paths.join(folder, PAGE), as_markdown(content))
        paths.write_text_atomic(paths.join(folder, CERTIFICATE), strict_json.dumps(content, indent=1) + "\n")
    for check in content["checks"]:
        print(for_terminal(f"{check['name']:<14}{check['verdict']:<13}{check['said']}"))
    print(for_terminal(f"{config.name} is {content['verdict']}: {paths.join(folder, PAGE)}"))
    code = EXIT_CODES[content["verdict"]]
    if code:
        sys.exit(code)


def certified(config: Config, task: CertifyTaskConfig) -> dict[str, Any]:
    """Return the content of a model's certificate.

    Raises:
        ConfigError: the model's config cannot be read, or its weights are not computed as they are.
    """
    if config.model.linear != "plain":
        raise ConfigError(
            f"model.linear={config.model.linear} with task=certify; a certificate is of weights that are computed as "
            "they are; leave it out."
        )
    config = replace(config, model=with_small_files(config.model))
    kind: Any = locate(config.model._target_, key="model")
    source = model_source(config, kind=shapes_only(kind))
    with ExitStack() as stack:
        stack.enter_context(silent())
        stack.enter_context(quiet())
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="certify_")))
        subject = Subject(config, source, place)
        each = dict(looks(subject, task))
        # Steps first, with the kernel: torch 2.9 sizes its autograd queues at the first backward pass of the process,
        # and one without torch_xla's device would leave its traces none.
        made = {name: checked(name, look) for name, look in each.items() if name.startswith("step")}
        stack.enter_context(without_attention_kernel())
        made |= {name: checked(name, look) for name, look in each.items() if name not in made}
        checks = [made[name] for name in each]
        return certificate(checks, about=about(subject, config), files=subject.files())


def about(subject: Subject, config: Config) -> dict[str, Any]:
    """Return what a certificate is of."""
    return {
        "name": str(config.name),
        "model": f"{subject.source.config.model_type}, {subject.source.reference}",
        "copy": subject.copy_text,
        "config_hash": config_hash(config),
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(redacted_arguments(sys.argv)),
    }


Look = tuple[str, Callable[[], Seen]]


def looks(subject: Subject, task: CertifyTaskConfig) -> Iterator[Look]:
    """Yield the checks that were asked for, in the order of the page."""
    config = subject.config
    steps = {
        f"step {machine}": partial(machines.look_at_step, machine, config=config, task=task)
        for machine in machines.machines_of(config, task)
    }
    every: dict[str, Callable[[], Seen]] = {
        "isolation": subject.isolation,
        "logits": subject.logits,
        "weights": subject.weights,
        "adapter": subject.adapter,
        "folded": subject.folded,
        "export": subject.export,
        "generation": subject.generation,
        **(steps or {"step": no_machine}),
        "tokenizer": subject.texts,
        "chat": partial(subject.chats, tokens.look_at_turns),
        "tools": partial(subject.chats, tokens.look_at_tools),
        "reasoning": partial(subject.chats, tokens.look_at_reasoning),
    }
    yield from ((name, look) for name, look in every.items() if not task.checks or name.split()[0] in task.checks)


def no_machine() -> Seen:
    """Say that no machine was named."""
    raise NotChecked("no machine was named; name one with hw=v5e8, or several with task.machines=[v5e8,v6e8]")
