"""task=generate: write text with a trained or a base model.

Prompts come from the command, a file or a terminal.
"""

import logging
import sys
from dataclasses import replace
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import GenerateTaskConfig
from tpu_experiments.loggers.runlog import terminal_log
from tpu_experiments.objectives.base import objective_class
from tpu_experiments.runtime.base import UnexpectedProgram, device_name
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.runtime.sharding import read_alone
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.retry import explain_storage_errors
from tpu_experiments.tasks.generate.answers import Answer, Answers, Continuations
from tpu_experiments.tasks.generate.conversation import answer_typed_lines
from tpu_experiments.tasks.generate.decoder import decoder_of, denoiser_of, llama_cpp_of, reader_of
from tpu_experiments.tasks.generate.origin import origin_of
from tpu_experiments.tasks.generate.prompts import Prompt, given_prompts

log = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Generate; exit code 0 done, 2 refused, 1 failed.

    Raises:
        ConfigError: something the user can fix; nothing was written.
    """
    task = config.task
    assert isinstance(task, GenerateTaskConfig), "conf/task/generate.yaml has this schema"
    try:
        with terminal_log(), explain_storage_errors(task.run or config.output_dir):
            _run(config, task)
    except UnexpectedProgram as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("error: stopped by Ctrl-C before all prompts were answered", file=sys.stderr)
        sys.exit(1)


def _run(config: Config, task: GenerateTaskConfig) -> None:
    if task.output is not None and paths.exists(task.output):
        raise ConfigError(f"task.output={task.output}; it exists; name another file, or remove it.")
    prompts = given_prompts(task)
    origin = origin_of(config, task, dtype=task.dtype)
    reader, source = reader_of(origin, task, format=task.format)
    ids = [reader.ids(prompt) for prompt in prompts]
    for prompt, own in zip(prompts, ids, strict=True):
        reader.bucket(own, place=prompt.place)
    decoder: Continuations
    if task.is_llama_cpp:
        runtime = None
        decoder = llama_cpp_of(config, reader, task=task)
        log.info("%s, %s, by llama.cpp", decoder.file, reader.kind)
    else:
        runtime = make_runtime(replace(config, sharding=read_alone(config.sharding)))
        num_rows = min(task.batch_rows, max(1, len(prompts)) * task.num_return_sequences)
        how: dict[str, Any] = {"task": task, "num_rows": num_rows, "seed": config.seed}
        made_of = denoiser_of if objective_class(origin.config).denoises else decoder_of
        decoder = made_of(runtime, origin, source, **how)
        log.info("%s of model %s, %s, on %s", origin.text, origin.config.model.name, reader.kind, device_name(runtime))
    answers = Answers(decoder, reader, runtime=runtime, num_sequences=task.num_return_sequences)
    if prompts:
        _write_answers(answers, list(zip(prompts, ids, strict=True)), output=task.output)
    else:
        answer_typed_lines(answers, task)
    log.info("%s", answers.account())


def _write_answers(answers: Answers, given: list[tuple[Prompt, list[int]]], *, output: str | None) -> None:
    """Answer all prompts; `output` keeps their order."""
    found: dict[int, Answer] = {}
    num = len(given) * answers.num_sequences
    try:
        for number, answer in answers.answer_all(given, live=len(given) == 1):
            found[number] = answer
            if output is not None:
                log.info("%d of %d answers", len(found), num)
            elif len(given) > 1:
                print(for_terminal(f"{answer.prompt.place}: {answer.prompt.shown}\n{answer.text}\n"), flush=True)
    finally:  # after Ctrl-C, keep the answers so far
        if output is not None and found:
            lines = [strict_json.dumps(found[number].fields()) + "\n" for number in sorted(found)]
            paths.make_dirs(paths.folder_of(output))
            paths.write_text_atomic(output, "".join(lines))
            log.info("%d answers: %s", len(found), output)
