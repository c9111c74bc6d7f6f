"""Chat templates within limits: the texts of transformers' own environment, and an end to every bomb."""

import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from tests.data import templates
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.tokens import sandbox
from tpu_experiments.data.tokens.chat import render
from tpu_experiments.data.tokens.sandbox import CHAT_FORMATS, TemplateLimit, rendered
from tpu_experiments.data.tokens.tokenizer import load_tokenizer

TOKENIZER = Path("tpu_experiments/samples/tokenizer")
PUBLISHED = {name: text for name, text in vars(templates).items() if name.isupper() and isinstance(text, str)}
PUBLISHED |= {file.stem: file.read_text(encoding="utf-8") for file in CHAT_FORMATS.glob("*.jinja")}
EACH, END = "{% for m in messages %}", "{% endfor %}"
TAGS = {
    "loops": f"{EACH}{{% if loop.last %}}{{{{ loop.length }}}}{{% break %}}{{% endif %}}{{{{ loop.previtem }}}}{END}",
    "macros": "{% macro f(m, n=2) %}<{{ m.role|upper }}{{ n }}>{% endmacro %}" + EACH + "{{ f(m) }}" + END,
    "namespaces": "{% set ns = namespace(n=0) %}" + EACH + "{% set ns.n = ns.n + 1 %}" + END + "{{ ns.n }}",
    "generation": EACH + "{% generation %}{{ m.content }}{% endgeneration %}\n" + END,
    "filters": "{{ messages|tojson(indent=2) }}{{ messages|map(attribute='role')|join(', ') }}{{ 'a\nb'|indent(2) }}",
    "pieces": "{{ messages[1:]|length }}{{ (messages[0].content ~ '!').split(' ')[-1] }}{{ {'a': [1, (2, 3)]} }}",
    "operators": "{{ 2 * 'ab' }}{{ '%s-%02d' % ('a', 3) }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ '{:>5}'.format(1) }}",
    "tests": "{{ 1 in [1, 2] }}{{ tools is none }}{{ nothing is defined }}{{ messages[0].content is string }}",
    "call": "{% macro w() %}[{{ caller() }}]{% endmacro %}{% call w() %}{{ messages[0].role }}{% endcall %}",
}
CONVERSATIONS = (
    (("user", "Ce faci? "), ("assistant", " Bine.\n")),
    (("system", "S {{ x }}"), ("user", "a"), ("assistant", "b %d"), ("user", "c")),
    (("assistant", "x"),),
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


@pytest.mark.parametrize("name", PUBLISHED | TAGS)
@pytest.mark.parametrize("turns", CONVERSATIONS, ids=len)
def test_the_text_is_transformers_own(name: str, turns: tuple[tuple[str, str], ...]) -> None:
    template = (PUBLISHED | TAGS)[name]
    messages = [{"role": role, "content": content} for role, content in turns]
    for prompt in (False, True):
        try:
            expected = render_jinja_template(
                [messages], chat_template=template, add_generation_prompt=prompt, **SPECIAL
            )[0][0]
        except TemplateError:
            with pytest.raises(TemplateError):
                rendered(template, messages=messages, add_generation_prompt=prompt, more=SPECIAL)
        else:
            assert rendered(template, messages=messages, add_generation_prompt=prompt, more=SPECIAL) == expected


LOOPS, ENDS = "{% for a in range(99999) %}" * 2, "{% endfor %}" * 2
DOUBLED = "{{% set ns = namespace(x={0}) %}}{{% for i in range(99) %}}{1}{{% endfor %}}{{{{ ns.x|{2} }}}}"
TEXT = "{% set x = 'a' * 100000 %}"
COLLIDING = "{% set p = 2**61 - 1 %}"
"""Its multiples all have the hash 0."""
NESTED = "{{% set ns = namespace(x=(1,)) %}}{{% for i in range(60) %}}{{% set ns.x = {} %}}{{% endfor %}}"
BOMBS = {
    "a range": "{% for i in range(10**9) %}{% endfor %}",
    "ranges in ranges": LOOPS + ENDS,
    "text in them": LOOPS + "x" * 1000 + ENDS,
    "what is printed in them": LOOPS + "{{ messages }}" + ENDS,
    "a power": "{{ 10**(10**10) }}",
    "text times a number": "{{ 'a' * 10**10 }}",
    "a number times text": "{{ 10**10 * 'a' }}",
    "a list times a number": "{{ [1] * 10**9 }}",
    "a wide format": "{{ '%999999999d' % 1 }}",
    "a wide format by a value": "{{ '%*d' % (999999999, 1) }}",
    "format()": "{{ '{:999999999}'.format(1) }}",
    "format() by a value": "{{ '{:{}}'.format(1, 999999999) }}",
    "the filter format": "{{ '%999999999d'|format(1) }}",
    "center": "{{ 'a'|center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "indent": "{{ 'a\nb'|indent(10**9) }}",
    "indent by text": "{% set x = 'a\n' * 50000 %}{{ x|indent('b' * 50000) }}",
    "tojson": "{{ [1, 2]|tojson(indent=10**9) }}",
    "batch": "{{ [1]|batch(10**9, 0)|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "replace": TEXT + "{{ x.replace('a', x) }}",
    "the filter replace": TEXT + "{{ x|replace('', x) }}",
    "join": TEXT + "{{ x.join(x) }}",
    "translate": TEXT + "{{ x.translate({97: x}) }}",
    "text that doubles": DOUBLED.format("'ab'", "{% set ns.x = ns.x + ns.x %}", "length"),
    "text that doubles by ~": DOUBLED.format("'ab'", "{% set ns.x = ns.x ~ ns.x %}", "length"),
    "a block that doubles": DOUBLED.format(
        "'ab'", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}", "length"
    ),
    "a list that doubles": DOUBLED.format("[1]", "{% set ns.x = ns.x + ns.x %}", "length"),
    "a tree of lists": DOUBLED.format("[1]", "{% set ns.x = [ns.x, ns.x] %}", "string"),
    "a tree of tuples": DOUBLED.format("1", "{% set ns.x = (ns.x, ns.x) %}", "string"),
    "a tree of mappings": DOUBLED.format("1", "{% set ns.x = {'a': ns.x, 'b': ns.x} %}", "tojson"),
    "a tree of dict()": DOUBLED.format("1", "{% set ns.x = dict(a=ns.x, b=ns.x) %}", "tojson"),
    "a macro that calls itself": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a loop that calls itself": "{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "brackets": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "negations": "{{ " + "not " * 30_000 + "1 }}",
    "nested loops": "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    "its own length": "a" * 10**6,
    "keys of one hash": COLLIDING + "{{ {}.fromkeys(range(0, 99999 * p, p)|list)|length }}",
    "unique over keys of one hash": COLLIDING + "{{ range(0, 99999 * p, p)|unique|list|length }}",
    "tuples of tuples hashed": NESTED.format("(ns.x, ns.x)") + "{{ {ns.x: 1} }}",
    "lists of lists compared": (
        "{% set a = namespace(x=[]) %}{% set b = namespace(x=[]) %}{% for i in range(60) %}"
        "{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}{{ a.x == b.x }}"
    ),
    "keys of one hash merged": COLLIDING + "{% set d = dict({}.fromkeys(range(0, 99999 * p, p))) %}{{ dict(d, **{}) }}",
    "an item of one hash": COLLIDING
    + "{% for i in range(0, 99999 * p, p) %}{% set _ = {p: 1, i: 2} %}{% endfor %}" * 99,
    "a power within a test": "{{ (7**(9**9)) is divisibleby(3) }}",
    "a number as text": (
        "{% for n in [3000000] %}{% for i in range(9999) %}{{ (2**n) * (3**n) * i > 3 }}{% endfor %}{% endfor %}"
    ),
    "a format of an octal": "{{ '%o' % (7**(10**8)) }}",
    "a precision": "{{ '%.999999999f' % 1.5 }}",
    "round": "{% for i in range(99999) %}{{ (2**60000)|round(-(10**9))}}{% endfor %}",
    "sort of long texts": "{% set x = ['a' * 10**7] * 999 %}{% for i in range(99999) %}{{ x|sort|length }}{% endfor %}",
    "sort by an attribute": "{% for i in range(99999) %}{{ range(99999)|sort(attribute='real')|length }}{% endfor %}",
    "groupby": "{% for i in range(99999) %}{{ range(99999)|groupby('real')|length }}{% endfor %}",
    "wordwrap": "{{ ('a ' * 10**7)|wordwrap(1) }}",
    "urlize": "{{ ('www.' * 10**6)|urlize }}",
    "striptags": "{{ ('<' * 10**7)|striptags }}",
    "pprint": NESTED.format("[ns.x, ns.x]") + "{{ ns.x|pprint }}",
    "batches of batches": "{{ range(99999)|batch(1)|map('batch', 99999, 0)|map('list')|list|length }}",
    "a sum of lists": "{{ ([[1] * 9999] * 99999)|sum(start=[])|length }}",
    "a join of a join": "{% set x = ['ab' * 9999] * 9999 %}{{ x|join(x|join) }}",
    "find": (
        "{% set x = 'a' * 10**6 %}"
        "{% for i in range(99999) %}{{ (x ~ 'b').count(x ~ 'c' ~ i) }}{{ x.find('a'*9999 ~ 'b') }}{% endfor %}"
    ),
    "a search in a list": (
        "{% set x = ['a' * 10**6 ~ 'b'] * 9999 %}{% for i in range(99999) %}{{ ('a' * 10**6 ~ 'c') in x }}{% endfor %}"
    ),
    "a cycler": (
        "{% set c = cycler(*range(99999)) %}"
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ c.next() }}{% endfor %}{% endfor %}"
    ),
    "a joiner": "{% set j = joiner('a' * 10**6) %}{% for i in range(99999) %}{{ j() }}{% endfor %}",
    "a namespace that grows": (
        "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = ns.x + [ns.x|length] %}{% endfor %}"
    ),
    "arguments": (
        "{% macro f() %}{{ varargs|length }}{% endmacro %}{% for i in range(99999) %}{{ f(*range(99999)) }}{% endfor %}"
    ),
    "title": (
        "{% set x = 'a ' * 10**6 %}{% for i in range(99999) %}{{ x|title|length }}{{ x.swapcase()|length }}{% endfor %}"
    ),
    "slices": "{% set x = 'ab' * 10**7 %}{% for i in range(99999) %}{{ x[::-1]|length }}{% endfor %}",
    "splitting": "{{ ('a' * 10**8)|list|length }}{{ ('a ' * 10**8).split()|length }}",
    "an error's text": "{{ raise_exception('a' * 10**10) }}",
    "a missing key's text": NESTED.format("(ns.x, ns.x)") + "{{ {}[ns.x] }}",
    "escapes": "{{ ('<' * 10**8)|forceescape|length }}",
    "encodings": "{{ ('\u20ac' * 10**9).encode('utf-16') }}",
    "a power folded when it is compiled": "{% if 0 %}{{ 9**(9**9) }}{% endif %}",
}


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that templates reach soon."""
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.05)
    monkeypatch.setattr(sandbox, "MAX_MEMORY", 2**27)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends(name: str, small_limits: None) -> None:
    with pytest.raises(TemplateLimit):
        rendered(BOMBS[name], messages=[{"role": "user", "content": "?"}], add_generation_prompt=False, more={})
    assert rendered("{{ messages|length }}", messages=[{}], add_generation_prompt=False, more={}) == "1"


ESCAPES = {
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "by format": "{{ '{0.__class__.__init__.__globals__}'.format(namespace) }}x{{ ''.__class__.a }}",
    "a namespace's class": "{% set ns = namespace(__class__=1) %}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}",
    "the messages changed": "{{ messages.append(1) }}",
    "the environment": "{{ self.environment.call }}{{ environment.tick(1) }}",
    "lipsum": "{{ lipsum.__globals__ }}",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_leads_out(name: str) -> None:
    with pytest.raises(TemplateError):
        rendered(ESCAPES[name], messages=[{"role": "user", "content": "?"}], add_generation_prompt=False, more={})


def test_the_clock_limits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 60.0)
    monkeypatch.setattr(sandbox, "MAX_CLOCK_SECONDS", 0.1)
    with pytest.raises(TemplateLimit, match=r"0\.1 s on the clock"):
        rendered(BOMBS["a power"], messages=[], add_generation_prompt=False, more={})


def test_a_process_that_was_ended_from_outside_is_replaced() -> None:
    text = [rendered("{{ messages|length }}", messages=[{}], add_generation_prompt=False, more={})]
    process = sandbox._renderer._process
    assert process is not None
    process.kill()
    text.append(rendered("{{ messages|length }}", messages=[{}], add_generation_prompt=False, more={}))
    assert text == ["1", "1"]


def test_the_package_s_own_templates_alone_are_rendered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more character makes a template somebody else's; the texts are equal."""
    asked: list[bytes] = []
    ask = sandbox._renderer.ask
    monkeypatch.setattr(sandbox._renderer, "ask", lambda request: asked.append(request) or ask(request))
    turns = [{"role": "user", "content": "a\ud800 <b>"}, {"role": "assistant", "content": "ț"}]
    for file in CHAT_FORMATS.glob("*.jinja"):
        asked.clear()
        template = file.read_text(encoding="utf-8")
        here = rendered(template, messages=turns, add_generation_prompt=False, more=SPECIAL)
        assert asked == []
        assert rendered(template + "{##}", messages=turns, add_generation_prompt=False, more=SPECIAL) == here
        assert len(asked) == 1


def test_an_interrupted_rendering_leaves_nothing_for_the_next() -> None:
    """As when a stop's signal comes while a conversation is rendered."""

    def interrupt(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(InterruptedError):
            rendered(BOMBS["a power"], messages=[], add_generation_prompt=False, more={})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rendered("next", messages=[], add_generation_prompt=False, more={}) == "next"


def test_threads_get_their_own_texts() -> None:
    def text(number: int) -> str:
        return rendered(f"{number}", messages=[], add_generation_prompt=False, more={})

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(text, range(200))) == list(map(str, range(200)))


def test_a_long_conversation_is_no_bomb() -> None:
    messages = [{"role": role, "content": "a b\n" * 100_000} for role in ("user", "assistant") * 3]
    expected = render_jinja_template([messages], chat_template=templates.QWEN25, **SPECIAL)[0][0]
    assert len(expected) > sandbox.MAX_CHARS
    assert rendered(templates.QWEN25, messages=messages, add_generation_prompt=False, more=SPECIAL) == expected


def test_the_place_of_the_template_is_named(tmp_path: Path) -> None:
    bomb = BOMBS["a range"]
    (tmp_path / "bomb.jinja").write_text(bomb)
    with pytest.raises(ConfigError, match=r"^model\.chat_template_path=.*bomb\.jinja; it goes beyond a limit"):
        load_tokenizer(str(TOKENIZER), revision=None, chat_template_path=str(tmp_path / "bomb.jinja"))
    shutil.copytree(TOKENIZER, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(bomb)
    with pytest.raises(
        ConfigError, match=r"^model\.tokenizer_path=.*/tokenizer; its chat template goes beyond a limit"
    ):
        load_tokenizer(str(tmp_path / "tokenizer"), revision=None, chat_template_path=None)


def test_a_bomb_that_waits_for_a_word_is_refused_where_it_goes_off(tmp_path: Path) -> None:
    trap = "{% if messages[0].content == 'now' %}" + BOMBS["text times a number"] + "{% endif %}x"
    (tmp_path / "trap.jinja").write_text(trap)
    tokenizer = load_tokenizer(str(TOKENIZER), revision=None, chat_template_path=str(tmp_path / "trap.jinja"))
    assert render((("user", "later"),), tokenizer=tokenizer, ends_with="turn") == "x"
    with pytest.raises(
        ConfigError, match=r"its chat template, or that of model\.chat_template_path=, takes more than 1,024 MiB"
    ):
        render((("user", "now"),), tokenizer=tokenizer, ends_with="turn")
