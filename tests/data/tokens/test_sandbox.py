"""Chat templates within limits: the texts of transformers' own environment, and an end to every bomb."""

import shutil
from pathlib import Path

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from tests.data import templates
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.tokens import sandbox
from tpu_experiments.data.tokens.chat import render
from tpu_experiments.data.tokens.sandbox import TemplateLimit, rendered
from tpu_experiments.data.tokens.tokenizer import CHAT_FORMATS, load_tokenizer

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
BOMBS = {
    "a range": "{% for i in range(10**9) %}{% endfor %}",
    "ranges in ranges": LOOPS + ENDS,
    "text in them": LOOPS + "x" * 1000 + ENDS,
    "what is printed in them": LOOPS + "{{ messages }}" + ENDS,
    "a power of a power": "{% set x = 2**4000 %}{{ x * x * x }}",
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
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tenth of the steps: the loops of the others take seconds."""
    monkeypatch.setattr(sandbox, "MAX_STEPS", 50_000)
    with pytest.raises(TemplateLimit):
        rendered(BOMBS[name], messages=[{"role": "user", "content": "?"}], add_generation_prompt=False, more={})


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


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of few steps, each of which takes long."""
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.02)
    slow = "{% for i in range(9999) %}{% set x = range(5000)|sort|list|length %}{% endfor %}"
    with pytest.raises(TemplateLimit, match="takes more than"):
        rendered(slow, messages=[{"role": "user", "content": "?"}], add_generation_prompt=False, more={})


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
    with pytest.raises(ConfigError, match=r"its chat template, or that of model\.chat_template_path=, makes a value"):
        render((("user", "now"),), tokenizer=tokenizer, ends_with="turn")
