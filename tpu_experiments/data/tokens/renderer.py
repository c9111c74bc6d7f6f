"""Render chat templates in a process of its own, which the kernel ends at a limit; sandbox.py starts it.

A template comes with a tokenizer and is untrusted code. jinja2's sandbox keeps it from Python's internals, but not from
`2**10**10`, nested loops, or keys that all have one hash, and a loop in C heeds no handler of Python's. So each request
arms timers whose signals have their default action, which is the process's end, and sets a limit on its memory.

Requests and answers are lines of JSON. Tags, filters and variables are those of
`transformers.utils.chat_template_utils`; tests compare the texts. Nothing of this package is imported.
"""

import functools
import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

OF_CPU, OF_CLOCK = signal.SIGPROF, signal.SIGALRM
"""Signals that end the process when a rendering has used its CPU time, and its time on the clock."""
MAX_ERROR_CHARS = 500


class _Generation(Extension):
    """`{% generation %}`, which marks answers for transformers; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's name and type)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body as a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _ChatNamespace(Namespace):
    """Namespace without names that start with an underscore, as in transformers; printing it is opaque."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _require_plain(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_plain(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _require_plain(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace takes no name like {name!r}")


class _ChatDict:
    """`dict(...)` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON, without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    del environment.filters["random"], environment.globals["lipsum"]  # data is the same when it is prepared again
    environment.globals |= {"raise_exception": _raise_exception, "dict": _ChatDict(), "namespace": _ChatNamespace}
    return environment


@functools.lru_cache(maxsize=16)
def _compiled(text: str) -> Template:
    return _environment().from_string(text)


def answer(request: Mapping[str, Any]) -> dict[str, str]:
    """Return the rendered `text`, the `error` of the template, or the `limit` that it exceeds."""
    now = datetime.fromisoformat(request["now"])
    try:
        text = _compiled(request["template"]).render(strftime_now=now.strftime, **request["values"])
    except MemoryError:
        return {"limit": f"takes more than {request['memory'] >> 20:,} MiB of memory"}
    except (RecursionError, SyntaxError):  # the latter is Python's own parser's
        return {"limit": "calls itself or nests too deeply"}
    except OverflowError as error:  # `range(10**9)`
        return {"limit": f"goes beyond a limit of jinja2's sandbox ({error})"}
    except TemplateError as error:
        return {"error": str(error)[:MAX_ERROR_CHARS]}
    except Exception as error:  # of its own expressions
        return {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]}
    if len(text) > request["chars"]:
        return {"limit": f"prints more than {request['chars']:,} characters"}
    return {"text": text}


def _limited_answer(line: bytes) -> bytes:
    request = json.loads(line.decode("utf-8", "surrogatepass"))
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    signal.setitimer(signal.ITIMER_REAL, request["clock_seconds"])
    _limit_memory(request["memory"])
    try:
        written = json.dumps(answer(request), ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (MemoryError, RecursionError):  # while its error was written
        written = b'{"limit": "has an error that cannot be written"}'
    _limit_memory(resource.RLIM_INFINITY)
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return written


def _limit_memory(size: int) -> None:
    """Limit the address space to `size` bytes, or to less where the process already may have no more."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limits = [limit for limit in (size, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits, default=resource.RLIM_INFINITY), hard))


def main() -> None:
    """Answer requests until standard input ends, which it does with the process that asks."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: the process that asks handles them
        signal.signal(number, signal.SIG_IGN)
    for number in (OF_CPU, OF_CLOCK):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (OF_CPU, OF_CLOCK))
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(_limited_answer(line) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
