"""Chat templates within limits on time, memory and size, rendered by a process of its own (renderer.py).

The process is started by the first rendering, answers one request after the other, and ends with this one. The kernel
ends it at a limit, whatever the template does; the next rendering starts another. The templates of `CHAT_FORMATS` are
this package's own and are rendered in this process, at half the CPU time.
"""

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from tpu_experiments.data.tokens import renderer

CHAT_FORMATS = Path(__file__).with_name("chat_formats")
"""Folder of the Jinja templates of `model.chat_format`."""
MAX_SECONDS = 2.0
"""CPU time of one rendering; real templates take 20 to 200 microseconds."""
MAX_CLOCK_SECONDS = 20.0
"""Time on the clock: on a busy machine 2 s of CPU time take longer."""
MAX_MEMORY = 2**30
MEMORY_PER_INPUT = 64
"""Bytes of memory, added to `MAX_MEMORY` for each character of the request."""
MAX_CHARS = 2**20
"""Limit on the text, plus `CHARS_PER_INPUT` for each character of the request; templates rarely repeat their input."""
CHARS_PER_INPUT = 8
MAX_TEMPLATE_CHARS = 2**17
TRAINING_DAY = datetime(2024, 7, 26)
"""What `strftime_now` gives in training data, whenever that is prepared: the day that Llama 3.1's own template has."""
ITS_OWN = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
"""Signals by which a template ends the process: nesting that overflows the stack of C."""


class TemplateLimit(Exception):
    """A template exceeds a limit; the message says which."""


class _Renderer:
    """The process that renders, for one process with all its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes) -> bytes | int:
        """Return the answer to a request, or the status with which the process ended instead."""
        with self._lock:
            if self._process is None:
                command = [sys.executable, "-P", renderer.__file__]
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            line = b""
            try:
                process.stdin.write(request + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                pass
            finally:  # also when a signal's handler raises: the next request must not read this one's answer
                if not line.endswith(b"\n"):
                    self.close()
            return line if line.endswith(b"\n") else process.returncode

    def close(self) -> None:
        """End the process; returns after it has ended."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what it has not read is written
                    pipe.close()


_renderer = _Renderer()


def _forget() -> None:
    """Let a forked process start its own."""
    global _renderer
    _renderer = _Renderer()


os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: _renderer.close())


def rendered(
    template: str,
    *,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    more: Mapping[str, Any],
    tools: list[Any] | None = None,
    now: datetime = TRAINING_DAY,
) -> str:
    """Render a conversation; `more` are the special tokens by name, `tools` the schemas of functions.

    Args:
        now: what `strftime_now` gives.

    Raises:
        TemplateError: the template refuses the conversation, or fails on it.
        TemplateLimit: it exceeds a limit.
    """
    if len(template) > MAX_TEMPLATE_CHARS:
        raise TemplateLimit(f"is longer than {MAX_TEMPLATE_CHARS:,} characters")
    values = {
        "messages": list(messages),
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **more,
    }
    written = json.dumps(values, ensure_ascii=False)
    limits = {
        "seconds": MAX_SECONDS,
        "clock_seconds": MAX_CLOCK_SECONDS,
        "memory": MAX_MEMORY + MEMORY_PER_INPUT * len(written),
        "chars": MAX_CHARS + CHARS_PER_INPUT * len(written),
    }
    request = {"template": template, "now": now.isoformat(), **limits}
    own = template in _own_templates()
    said = renderer.answer({**request, "values": json.loads(written)}) if own else _asked(request, written)
    if "limit" in said:
        raise TemplateLimit(said["limit"])
    if "error" in said:
        raise TemplateError(said["error"])
    text: str = said["text"]
    return text


@functools.cache
def _own_templates() -> frozenset[str]:
    """Return the texts of the package's own templates, which need no limits."""
    return frozenset(file.read_text(encoding="utf-8") for file in CHAT_FORMATS.glob("*.jinja"))


def _asked(request: Mapping[str, Any], values: str) -> dict[str, str]:
    """Return the answer of the process that renders to a request with values, which are in JSON."""
    head = json.dumps(request, ensure_ascii=False)
    line = f'{head[:-1]}, "values": {values}}}'.encode("utf-8", "surrogatepass")
    answer = _renderer.ask(line)
    if isinstance(answer, int) and -answer not in (renderer.OF_CPU, renderer.OF_CLOCK, *ITS_OWN):
        answer = _renderer.ask(line)  # ended from outside, as by the kernel where memory is short
    if isinstance(answer, int):
        raise TemplateLimit(_end(answer))
    said: dict[str, str] = json.loads(answer.decode("utf-8", "surrogatepass"))
    return said


def _end(status: int) -> str:
    if -status == renderer.OF_CPU:
        return f"takes more than {MAX_SECONDS:g} s"
    if -status == renderer.OF_CLOCK:
        return f"takes more than {MAX_CLOCK_SECONDS:g} s on the clock"
    name = signal.Signals(-status).name if status < 0 else f"status {status}"
    return f"ends the process that renders it ({name})"
