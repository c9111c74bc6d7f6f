"""task=serve: a page on this machine that chats with trained weights and their base, and OpenAI's chat completions.

The main thread writes all answers, one after the other: one device writes, and torch_xla traces in one thread. The
HTTP server's loop has a thread of its own; conversations are cut and tokenized in further threads.
"""

import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import NoReturn

from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import ServeTaskConfig
from tpu_experiments.loggers.runlog import start_run_log, stop_run_log
from tpu_experiments.models.sources.frozen import without_effect
from tpu_experiments.runtime.base import Runtime, UnexpectedProgram, device_name
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.runtime.stacked import is_of_linear
from tpu_experiments.storage.retry import explain_storage_errors
from tpu_experiments.tasks.generate.answers import Answers
from tpu_experiments.tasks.generate.decoder import decoder_of, decoder_over, llama_cpp_of, reader_of
from tpu_experiments.tasks.generate.origin import origin_of
from tpu_experiments.tasks.serve.connections import bound, server_of
from tpu_experiments.tasks.serve.server import application, token_of
from tpu_experiments.tasks.serve.writer import Writer

log = logging.getLogger(__name__)
TRAINED, BASE = "trained", "base"
"""Names of the models that a request may ask for."""


def run(config: Config) -> None:
    """Serve until Ctrl-C or SIGTERM; exit code 0 then, 2 refused, 1 failed.

    Raises:
        ConfigError: something the user can fix; nothing was served.
    """
    task = config.task
    assert isinstance(task, ServeTaskConfig), "conf/task/serve.yaml has this schema"
    start_run_log(None, rank=0)
    try:
        with explain_storage_errors(task.run or config.output_dir), _ends_on_sigterm(), bound(task) as listener:
            token = token_of(task)
            models, texts = models_of(config, task)
            writer = Writer(models)
            with served(writer, listener, task=task, token=token, title=_title(config, task), texts=texts) as address:
                print(address if token is None else f"{address}?token={token}", flush=True)
                log.info("open the printed address in a browser; Ctrl-C ends")
                writer.run()
    except UnexpectedProgram as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt as error:
        print(f"stopped by {str(error) or 'Ctrl-C'}", file=sys.stderr)
    finally:
        stop_run_log()


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """End the block by SIGTERM as by Ctrl-C."""

    def end(*_: int | FrameType | None) -> NoReturn:
        raise KeyboardInterrupt("SIGTERM")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def served(
    writer: Writer,
    listener: socket.socket,
    *,
    task: ServeTaskConfig,
    token: str | None,
    title: str,
    texts: Mapping[str, str],
) -> Iterator[str]:
    """Answer requests inside the block, in a thread of its own; yields the page's address.

    Args:
        token: as of `application`; so are `title` and `texts`.
    """
    port = listener.getsockname()[1]
    server = server_of(application(writer, task=task, port=port, token=token, title=title, texts=texts))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True)
    thread.start()
    try:
        yield f"http://{f'[{task.host}]' if ':' in task.host else task.host}:{port}/"
    finally:
        writer.stop()
        server.should_exit = True
        thread.join()


def _title(config: Config, task: ServeTaskConfig) -> str:
    """Return the name of the run, or of what stands for one."""
    folder = task.run or task.adapter or task.gguf
    return config.model.name if folder is None else folder.rstrip("/").rpartition("/")[2]


def models_of(config: Config, task: ServeTaskConfig) -> tuple[dict[str, Answers], dict[str, str]]:
    """Load what answers, and return it and where its weights come from, by name.

    Raises:
        ConfigError: weights are missing or do not match, or the tokenizer has no chat template.
    """
    origin = origin_of(config, task, dtype=task.dtype)
    reader, source = reader_of(origin, task, format="chat")
    is_base = task.weights == "base" or (task.run is None and task.adapter is None and task.gguf is None)
    if task.is_llama_cpp:
        llama = llama_cpp_of(config, reader, task=task)
        models, texts = {TRAINED: Answers(llama, reader, runtime=None)}, {TRAINED: f"{llama.file}, by llama.cpp"}
        return _with_base(models, texts, config, task, runtime=None)
    runtime = make_runtime(config)
    decoder = decoder_of(runtime, origin, source, task=task, num_rows=1, seed=config.seed)
    log.info("%s of model %s on %s", origin.text, origin.config.model.name, device_name(runtime))
    if is_base:
        return {BASE: Answers(decoder, reader, runtime=runtime)}, {BASE: origin.text}
    models, texts = {TRAINED: Answers(decoder, reader, runtime=runtime)}, {TRAINED: origin.text}
    is_apart = origin.reduced_with_seed is None and origin.config.model.linear == "plain"
    is_apart &= all(map(is_of_linear, origin.trained))  # else modules or rows were trained whole, or an embedding
    if task.base_beside and origin.lora.r and is_apart:
        module = without_effect(decoder.module, place=runtime.place)
        base = decoder_over(module, runtime, task=task, num_rows=1, seed=config.seed)
        return models | {BASE: Answers(base, reader, runtime=runtime)}, texts | {BASE: "the weights before training"}
    return _with_base(models, texts, config, task, runtime=runtime)


def _with_base(
    models: dict[str, Answers],
    texts: dict[str, str],
    config: Config,
    task: ServeTaskConfig,
    *,
    runtime: Runtime | None,
) -> tuple[dict[str, Answers], dict[str, str]]:
    """Add the weights before training, as a model of their own."""
    if not task.base_beside:
        return models, texts
    wanted = replace(task, weights="base" if task.run else "auto", adapter=None, gguf=None)
    origin = origin_of(replace(config, task=wanted), wanted, dtype=task.dtype)
    reader, source = reader_of(origin, task, format="chat")
    runtime = runtime or make_runtime(config)
    decoder = decoder_of(runtime, origin, source, task=task, num_rows=1, seed=config.seed)
    return models | {BASE: Answers(decoder, reader, runtime=runtime)}, texts | {BASE: origin.text}
