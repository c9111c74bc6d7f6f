"""Chat templates in jinja2's immutable sandbox, with limits on work and size.

A template comes with a tokenizer and is untrusted code. The sandbox blocks Python's internals and `range(10**9)`, but
not nested loops, `2**10**10`, `'a' * 10**10`, `'%999999999d' % 1`, or a text that doubles itself. So that every
rendering terminates:

- each iteration, call, filter and test counts as a step, and the CPU time is checked every `STEPS_PER_LOOK` steps;
- no text is longer than the limit, and no list or mapping has more text and entries, nested values counted each time
  they occur. Operators, filters and methods whose result can be longer than their input are checked before the call;
- printed characters are counted, in loops also those of literal text.

Tags, filters and variables are those of `transformers.utils.chat_template_utils`; tests compare the texts.
"""

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 500_000
MAX_CHARS = 2**20
"""Limit on one text, plus `CHARS_PER_INPUT` for each character of the conversation; templates rarely repeat their
input."""
CHARS_PER_INPUT = 8
CHARS_PER_ENTRY = 16
"""Characters that an entry of a list or mapping counts as, for its memory."""
MAX_SECONDS = 2.0
"""CPU time of one rendering; real templates take 20 to 200 microseconds."""
STEPS_PER_LOOK = 256
MAX_BITS = 4096
MAX_TEMPLATE_CHARS = 2**17
TRAINING_DAY = datetime(2024, 7, 26)
"""What `strftime_now` gives in training data, whenever that is prepared: the day that Llama 3.1's own template has."""
LEFT_OUT = ("urlize", "wordwrap", "pprint", "striptags", "filesizeformat", "random")
"""Filters that are removed: their time grows faster than their text, or no chat needs them."""
GROWING = re.compile(
    r"replace|translate|join|[lr]just|center|zfill|expandtabs|encode|to_bytes|_tojson"
    r"|do_(replace|join|center|indent|batch|slice|xmlattr|round|sum)"
)
"""Methods and filters whose result can be larger than their input: they pad, repeat, or insert text."""
WIDE = re.compile(r"\d{4}|\*|\{[^{}]*\{")
"""A format width or precision of four digits, or one taken from another value."""


class TemplateLimit(Exception):
    """A template exceeds a limit; the message says which."""


@dataclass
class Budget:
    """Remaining steps, characters and CPU time of one rendering."""

    max_chars: int
    now: datetime = TRAINING_DAY
    steps: int = field(default_factory=lambda: MAX_STEPS)
    printed: int = 0
    begun: float = field(default_factory=time.thread_time)

    def step(self, chars: int = 0) -> None:
        """Count a step that prints `chars` characters."""
        self.steps -= 1
        self.printed += chars
        if self.steps < 0:
            raise TemplateLimit(f"takes more than {MAX_STEPS:,} steps")
        if self.printed > self.max_chars:
            raise TemplateLimit(f"prints more than {self.max_chars:,} characters")
        if self.steps % STEPS_PER_LOOK == 0 and time.thread_time() - self.begun > MAX_SECONDS:
            raise TemplateLimit(f"takes more than {MAX_SECONDS:g} s")

    def require(self, chars: int) -> None:
        """Raise if a value of `chars` characters is too large; called before it is made where possible."""
        if chars > self.max_chars:
            raise TemplateLimit(f"makes a value of more than {self.max_chars:,} characters")


_budget: ContextVar[Budget] = ContextVar("budget")


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
    values = [value for message in messages for value in message.values()]
    size = sum(len(value) if isinstance(value, str) else len(json.dumps(value)) for value in [*values, tools or ""])
    token = _budget.set(Budget(MAX_CHARS + CHARS_PER_INPUT * size, now))
    try:
        return _compiled(template).render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **more
        )
    except OverflowError as error:  # `range(10**9)`
        raise TemplateLimit(f"goes beyond a limit of jinja2's sandbox ({error})") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # of its own expressions
        raise TemplateError(f"{type(error).__name__}: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise TemplateLimit("calls itself or nests too deeply") from error
    finally:
        _budget.reset(token)


@functools.lru_cache(maxsize=16)
def _compiled(text: str) -> Template:
    """Compile a template with step counting.

    Raises:
        TemplateError: it is not a template.
        TemplateLimit: it is too long, or nested too deeply.
    """
    if len(text) > MAX_TEMPLATE_CHARS:
        raise TemplateLimit(f"is longer than {MAX_TEMPLATE_CHARS:,} characters")
    environment = _Environment()
    try:
        tree = _Counting().visit(environment.parse(text))
        tree.set_environment(environment)
        code = environment.compile(tree)
    except (RecursionError, MemoryError, SyntaxError) as error:  # the last two are Python's own parser's
        raise TemplateLimit("is nested too deeply") from error
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


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


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, charging the budget of the current rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_printed,
            optimized=False,  # constant folding would evaluate `2**10**10` at compile time
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: _counted(call) for name, call in self.filters.items() if name not in LEFT_OUT}
        self.tests = {name: _counted(call) for name, call in self.tests.items()}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _ChatDict(),
            "namespace": _ChatNamespace,
        }

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result can be longer than its operands."""
        if operator == "+":
            return _sized(left + right)
        if operator == "**":
            _require_bits(left, right)
        elif operator == "*":
            _require_product(left, right)
        elif operator == "%" and isinstance(left, str | bytes):
            _require_narrow(left)
        return _sized(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __called: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (jinja2's)
        """Call a function, macro or method."""
        method = getattr(__called, "__wrapped__", __called)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if owner is __self:  # `tick` and `sized`, which the template cannot name
            return __called(*args)
        _budget.get().step()
        if isinstance(owner, str | bytes | int | float | list | tuple | dict):
            _require_growth(method.__name__, owner, [*args, *kwargs.values()])
        return _sized(super().call(__context, __called, *args, **kwargs))

    def tick(self, chars: int) -> str:
        """Count an iteration or macro call whose body prints `chars` literal characters."""
        _budget.get().step(chars)
        return ""

    def sized(self, value: Any) -> Any:
        """Check the size of a value that the template constructs."""
        return _sized(value)


class _Counting(NodeTransformer):
    """Transformer that inserts `tick` into each repeatable body, and wraps constructed values in `sized`."""

    def visit_body(self, node: Any) -> Any:
        """Insert `tick` into a loop, macro or call block."""
        self.generic_visit(node)
        data = [part.data for output in node.body for part in output.find_all(nodes.TemplateData)]
        call = nodes.Call(nodes.EnvironmentAttribute("tick"), [nodes.Const(sum(map(len, data)))], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_body

    def visit_made(self, node: Any) -> Any:
        """Wrap a concatenation, list, tuple or mapping in `sized`."""
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":  # `for a, b in pairs`
            return node
        return nodes.Call(nodes.EnvironmentAttribute("sized"), [node], [], None, None).set_lineno(node.lineno)

    visit_Concat = visit_List = visit_Tuple = visit_Dict = visit_made


def _counted(call: Any) -> Callable[..., Any]:
    """Wrap a filter or test, which takes its value first, or after the context that jinja2 passes."""

    @functools.wraps(call)  # keeps jinja2's attribute that requests the context
    def counted(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        given = args[1:] if hasattr(call, "jinja_pass_arg") else args
        if given:
            _require_growth(call.__name__, given[0], [*given[1:], *kwargs.values()])
        return _sized(call(*args, **kwargs))

    return counted


def _sized(value: Any) -> Any:
    """Return the value after checking its size, nested values counted each time they occur."""
    if isinstance(value, str | bytes):
        if len(value) > MAX_CHARS:
            _budget.get().require(len(value))
    elif isinstance(value, list | tuple | dict | set | frozenset):
        budget = _budget.get()
        budget.require(int(_written_size(value, most=budget.max_chars)))
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise TemplateLimit(f"makes a number of more than {MAX_BITS:,} bits")
    return value


def _written_size(value: Any, *, most: float) -> float:
    """Return the characters and entries of a value, with repeats; counting stops above `most`."""
    total, left = 0, [value]
    while left and total <= most:
        one = left.pop()
        total += CHARS_PER_ENTRY
        if isinstance(one, str | bytes):
            total += len(one)
        elif isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            left += one
    return total


def _require_growth(name: str, value: Any, arguments: list[Any]) -> None:
    """Check the size of a result before calling a filter or method that can enlarge its value.

    It may add text for each character, entry or line, or take widths, numbers of copies, or formats.
    """
    if name in ("format", "format_map", "do_format", "strftime"):
        for text in (value, *arguments):
            if isinstance(text, str | bytes):
                _require_narrow(text)
        return
    if name in ("range", "do_default", "do_int", "do_float", "fromkeys"):
        return
    grown = [_extent(argument) for argument in arguments]
    budget = _budget.get()
    if grown and max(grown) > 1:
        budget.require((_extent(value) + 1) * max(grown) if GROWING.fullmatch(name) else max(grown))


def _extent(value: Any) -> int:
    """Return a number's absolute value, the length of a text, or the size of a collection with repeats."""
    if isinstance(value, int | float):
        return int(min(abs(value), 2**62)) if value == value else 0
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | list | tuple | set | frozenset):
        return 1  # a generator: its result is checked afterwards
    return int(_written_size(value, most=2**40))


def _require_bits(base: Any, exponent: Any) -> None:
    bits = base.bit_length() if isinstance(base, int) else 1
    if isinstance(exponent, int) and bits * abs(exponent) > MAX_BITS:
        raise TemplateLimit(f"makes a number of more than {MAX_BITS:,} bits")


def _require_product(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
            _budget.get().require(int(_written_size(value, most=2**40)) * max(times, 0))


def _require_narrow(text: str | bytes) -> None:
    if WIDE.search(text if isinstance(text, str) else text.decode("latin-1")):
        raise TemplateLimit("formats with a width of four digits or more, or one that a value gives")


@pass_context
def _printed(context: Context, value: Any) -> str:
    """Return the text that `{{ value }}` prints."""
    text = value if type(value) is str else str(_sized(value))
    _budget.get().step(len(text))
    return text


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


def _strftime_now(form: str) -> str:
    _require_narrow(form)
    return _budget.get().now.strftime(form)
