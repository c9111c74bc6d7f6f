"""task=generate: write text with a trained or a base model.

Prompts come from the command, a file or a terminal.
"""

import logging
import sys
from collections.abc import Iterator

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.config.targets import locate
from tpu_experiments.config.task_schema import GenerateTaskConfig
from tpu_experiments.loggers.runlog import start_run_log, stop_run_log
from tpu_experiments.models.frozen import build_frozen
from tpu_experiments.models.generation import Decoder
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.runtime.base import Runtime, UnexpectedProgram
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.retry import explain_storage_errors
from tpu_experiments.tasks.generate.answers import Answer, Answers, Reader
from tpu_experiments.tasks.generate.origin import Origin, origin_of
from tpu_experiments.tasks.generate.prompts import Prompt, ends_of, given_prompts, ids_of, kind_of, typed, user_turn
from tpu_experiments.training.batches import load_run_tokenizer

log = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Generate; exit code 0 done, 2 refused, 1 failed.

    Raises:
        ConfigError: something the user can fix; nothing was written.
    """
    task = config.task
    assert isinstance(task, GenerateTaskConfig), "conf/task/generate.yaml has this schema"
    start_run_log(None, rank=0)
    try:
        with explain_storage_errors(task.run or config.output_dir):
            _run(config, task)
    except UnexpectedProgram as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("error: stopped by Ctrl-C before all prompts were answered", file=sys.stderr)
        sys.exit(1)
    finally:
        stop_run_log()


def _run(config: Config, task: GenerateTaskConfig) -> None:
    if task.output is not None and paths.exists(task.output):
        raise ConfigError(f"task.output={task.output}; it exists; name another file, or remove it.")
    prompts = given_prompts(task)
    origin = origin_of(config, task, dtype=task.dtype)
    reader, source = _reader(origin, task)
    ids = [reader.ids(prompt) for prompt in prompts]
    for prompt, own in zip(prompts, ids, strict=True):
        reader.bucket(own, place=prompt.place)
    runtime = make_runtime(config)
    decoder = _decoder(runtime, origin, source, config=config, num_prompts=len(prompts))
    log.info("%s of model %s, %s, on %s", origin.text, origin.config.model.name, reader.kind, runtime.device)
    answers = Answers(decoder, reader, runtime=runtime, num_sequences=task.num_return_sequences)
    if prompts:
        _write_answers(answers, list(zip(prompts, ids, strict=True)), output=task.output)
    else:
        _answer_typed_lines(answers, task)
    log.info("%s", answers.account())


def _reader(origin: Origin, task: GenerateTaskConfig) -> tuple[Reader, HuggingFaceModel]:
    """Return how prompts are tokenized and answers end, and the source of the model's weights."""
    config = origin.config
    tokenizer = load_run_tokenizer(config)
    kind = kind_of(origin, tokenizer, task)
    source: HuggingFaceModel = locate(config.model._target_, key="model")(config.model, seed=config.seed)
    limit = getattr(source.config, "max_position_embeddings", None)
    vocab_size = int(source.config.vocab_size)

    def ids(prompt: Prompt) -> list[int]:
        return ids_of(prompt, kind=kind, tokenizer=tokenizer, vocab_size=vocab_size)

    ends = ends_of(tokenizer, kind=kind, config=source.config, folder=source.folder)
    return Reader(ids, tokenizer, ends, kind, _buckets(task, limit=limit)), source


def _buckets(task: GenerateTaskConfig, *, limit: int | None) -> list[int]:
    """Return the prompt lengths that leave room for the answer.

    Raises:
        ConfigError: none does.
    """
    more = -(-task.max_new_tokens // task.tokens_per_call) * task.tokens_per_call
    fitting = [bucket for bucket in sorted(set(task.buckets)) if limit is None or bucket + more <= limit]
    if not fitting:
        raise ConfigError(
            f"task.buckets={task.buckets} with task.max_new_tokens={task.max_new_tokens}; prompt and answer together "
            f"are longer than the model allows (max_position_embeddings={limit}); use shorter ones."
        )
    return fitting


def _decoder(
    runtime: Runtime, origin: Origin, source: HuggingFaceModel, *, config: Config, num_prompts: int
) -> Decoder:
    task = config.task
    assert isinstance(task, GenerateTaskConfig)
    module = build_frozen(
        source,
        lora=origin.lora,
        trained=origin.trained,
        place=runtime.place,
        reduced_with_seed=origin.reduced_with_seed,
        origin=origin.text,
    )
    return Decoder(
        module,
        runtime=runtime,
        choice=task,
        num_rows=min(task.batch_rows, max(1, num_prompts) * task.num_return_sequences),
        max_new_tokens=task.max_new_tokens,
        tokens_per_call=task.tokens_per_call,
        seed=config.seed,
    )


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
                print(f"{answer.prompt.place}: {answer.prompt.shown}\n{answer.text}\n", flush=True)
    finally:  # after Ctrl-C, keep the answers so far
        if output is not None and found:
            lines = [strict_json.dumps(found[number].fields()) + "\n" for number in sorted(found)]
            paths.make_dirs(paths.folder_of(output))
            paths.write_text_atomic(output, "".join(lines))
            log.info("%d answers: %s", len(found), output)


def _answer_typed_lines(answers: Answers, task: GenerateTaskConfig) -> None:
    """Answer typed lines independently of each other; print an error for one that is refused."""
    for line in typed(_lines()):
        prompt = user_turn(line, task, place="this prompt")
        try:
            ids = answers.reader.ids(prompt)
            answers.reader.bucket(ids, place=prompt.place)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        try:
            for _ in answers.answer_all([(prompt, ids)], live=True):
                pass
        except KeyboardInterrupt:  # ends this answer, not the conversation
            print(flush=True)
        log.info("%s", answers.account())


def _lines() -> Iterator[str]:
    """Yield typed lines, up to the end of the input or Ctrl-C."""
    sign = ""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # gives input() its line editing

        sign = "> "
        print("one prompt a line; exit or quit ends", file=sys.stderr)
    while True:
        try:
            yield input(sign)
        except (EOFError, KeyboardInterrupt):
            return
