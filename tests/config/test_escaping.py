"""Names from files reach a terminal, a log, a card and a page as text, whatever is in them."""

import ast
import logging
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.config.composing import composed
from tests.planning.examples import example_plan
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.escaping import as_code, fenced, for_markdown, for_terminal
from tpu_experiments.export.card import Card, page
from tpu_experiments.loggers.plan_estimates import PlanEstimates
from tpu_experiments.loggers.runlog import FILE_FORMAT, Formatter, TerminalFormatter
from tpu_experiments.planning.report import plan_markdown
from tpu_experiments.storage.retry import StorageFailed
from tpu_experiments.sweeping.leaderboard import FINISHED, Row, markdown
from tpu_experiments.tasks.export.parity import Parity
from tpu_experiments.tasks.export.report import as_markdown
from tpu_experiments.training.card import card
from tpu_experiments.training.outputs import estimates_text

CONTROLS = {
    "clears the screen": "a\x1b[2J\x1b[Hb",
    "a title": "a\x1b]0;owned\x07b",
    "a link": "a\x1b]8;;https://x\x1b\\b\x1b]8;;\x1b\\",
    "C1": "a\x9b2Jb\x85c",
    "writes over": "error\rfine ",
    "erases": "bad\b\b\bgood",
    "bell and null": "a\x07\x00b\x7f",
    "right to left": "a\u202egpj.exe",
    "isolates": "\u2066a\u2069",
    "line separators": "a\u2028b\u2029c",
    "half a pair": "a\udc9bb",
}
MARKDOWN = {
    "an image": "<img src=x onerror=alert(1)>",
    "a script": "</code></summary></details><script>alert(1)</script>",
    "ends its code": "a`<script>alert(1)</script>`b",
    "ends its block": "a\n```\n<script>alert(1)</script>\n",
    "ends a longer block": "````\n<iframe src=x>\n`````\n<b>",
    "a heading": "a\n\n# Results\n\nall is well",
    "a link": "[click](javascript:alert(1)) ![x](y.png)",
    "cells": "a | b || <u>c</u> \\| d",
    "a comment": "<!-- ",
    "a reference": "&lt;b&gt;&#60;i&#62;",
    "ends a string": '"); import os; os.system("x") #',
    "a shell's command": "$(touch x); `touch y`",
}
VISIBLE = re.compile(r"[^\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]*")


@pytest.mark.parametrize("name", CONTROLS)
def test_a_terminal_gets_escapes(name: str) -> None:
    text = CONTROLS[name]
    record = logging.LogRecord("a", logging.WARNING, "f", 1, "tensor %s", (text,), None)
    written = [
        for_terminal(text),
        str(ConfigError(f"path={text}; it is wrong.")),
        str(pickle.loads(pickle.dumps(ConfigError(text)))),
        str(StorageFailed(text)),
        Formatter(FILE_FORMAT).format(record),
        TerminalFormatter(rank=0).format(record),
    ]
    for each in written:
        assert VISIBLE.fullmatch(each)
        each.encode()


def test_what_is_written_in_any_language_stays() -> None:
    text = "Ziua bună\tשלום\nनमस्ते \u200dمرحبا 👩‍👩‍👧 ไทย\u200b -> `a`"
    assert for_terminal(text) == text


@pytest.mark.parametrize("name", MARKDOWN)
def test_markdown_shows_the_text(name: str) -> None:
    text = MARKDOWN[name]
    for written in (for_markdown(text), as_code(text)):
        shown = MarkdownIt("commonmark").enable("table").parse(f"x {written} y")[1]
        parts = [part.content for part in shown.children or []]
        assert {part.type for part in shown.children or []} <= {"text", "code_inline", "text_special"}
        assert "".join(parts).split() == ["x", *text.split(), "y"]
    [block] = MarkdownIt("commonmark").parse(fenced(text, language="yaml"))
    assert block.type == "fence"
    assert block.content.rstrip("\n") == text.rstrip("\n")


def kinds_of(text: str) -> list[str]:
    """Kinds of all parts of a page, and the headings' texts."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    headings = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    inline = [part.type for token in tokens for part in token.children or []]
    return [*(token.type + ":" + token.content * (token.type == "html_block") for token in tokens), *inline, *headings]


@pytest.mark.parametrize("form", ["peft", "merged", "gguf", "vptq"])
@pytest.mark.parametrize("name", MARKDOWN)
def test_the_card_of_an_export_has_the_parts_of_an_innocent_one(name: str, form: str) -> None:
    text = "/base/" + MARKDOWN[name]
    cards = [
        page(
            Card(form, "run", base=base, rank=8, revision=base, runs_code=True),
            place=f"/place/{base}",
            comparison="# Parity\n",
            files=[f"{base}.gguf"],
        )
        for base in ("/base/innocent", text)
    ]
    assert kinds_of(cards[1].partition("\n---\n")[2]) == kinds_of(cards[0].partition("\n---\n")[2])
    for code in re.findall(r"^```+python\n(.*?)^```", cards[1], re.DOTALL | re.MULTILINE):
        strings = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
        assert text in strings or f"/place/{text}" in strings
        assert not [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import)]


RESULT = {
    "name": "run",
    "num_trainable": 1,
    "num_parameters": 2,
    "adapter_path": "/runs/run/adapter",
    "eval_sources": {"text": 1.0},
    "eval_sources_before": {"text": 2.0},
    "eval_source_measures": {},
    "eval_source_measures_before": {},
    "eval_tokens": 3,
    "perplexity": 2.0,
    "data_audit": {},
    "sample_before": "b",
    "sample_after": "a",
    "tokens_per_second": 1.0,
    "num_compiles": 1,
    "compiles_after_warmup": 0,
    "versions": {},
    "git_commit": None,
    "config_hash": "x",
}


@pytest.mark.parametrize("name", MARKDOWN)
def test_the_card_of_a_run_has_the_parts_of_an_innocent_one(name: str) -> None:
    def written(text: str) -> str:
        config = composed("model=tiny", "data=[sample_text]")
        config.model.path, config.model.size, config.sample.prompt = f"/base/{text}", "full", text
        for source in config.data.values():
            source.path, source.sample_path, source.revision = f"/data/{text}", f"/data/{text}", text
        stages = resolve_stages(config)
        records = [
            {
                "steps": 1,
                "tokens": 1,
                "first_train_loss": 1.0,
                "last_train_loss": 1.0,
                "eval_loss": 1.0,
                "ended_by": text,
                "restored_step": None,
            }
            for _ in stages
        ]
        start = {"run": text, "kind": "adapter", "take": "weights", "sha256": "0" * 64}
        answers = {"sample_before": text.replace("\n", " "), "sample_after": text.replace("\n", " ")}
        return card(RESULT | answers | {"stages": records, "start": start}, config, stages)

    hostile, innocent = (kinds_of(written(text).partition("\n---\n")[2]) for text in (MARKDOWN[name], "innocent"))
    assert [kind for kind in hostile if kind != "text_special"] == [kind for kind in innocent if kind != "text_special"]


def leaderboard_page(text: str) -> str:
    changed = {"model.path": text, f"data.{text}.path": text}
    row = Row(text, changed, [f"model.path={text}"], text, FINISHED, eval_loss=1.0, findings=[text])
    return markdown([row], name=text, folder=f"/lab/{text}")


def parity_page(text: str) -> str:
    found = Parity("merged", "worse", text, text, "float32", text, perplexity=2.0, **FIGURES)
    return as_markdown([found], files={text: {"bytes": 1, "sha256": "0"}})


def plan_page(text: str) -> str:
    return plan_markdown(replace(example_plan(), model=text, notes=[text]))


def figures_page(text: str) -> str:
    known = PlanEstimates(source="compiled", file=text, step_seconds={text: 1.0}, hbm_gib=1.0, reason=text)
    return estimates_text(known) + estimates_text(replace(known, source=None))


FIGURES = {
    name: 1
    for name in ("documents", "tokens", "export_perplexity", "perplexity_ratio", "max_log_prob_diff", "lines", "greedy")
} | {"same_greedy": 1}


@pytest.mark.parametrize("name", MARKDOWN)
@pytest.mark.parametrize("written", [leaderboard_page, parity_page, plan_page, figures_page])
def test_other_pages_have_the_parts_of_innocent_ones(name: str, written: Callable[[str], str]) -> None:
    """Of a sweep, a comparison, a plan, and the few figures of one."""
    hostile, innocent = (
        [kind for kind in kinds_of(written(text)) if kind not in ("text_special", "softbreak")]
        for text in (MARKDOWN[name], "innocent")
    )
    assert len(hostile) == len(innocent)
    blocks = [[kind for kind in kinds if re.match("[a-z_]+:", kind)] for kinds in (hostile, innocent)]
    assert blocks[0] == blocks[1]


def test_a_hanging_template_with_a_hostile_name_is_refused_by_a_sentence(tmp_path: Path) -> None:
    """The whole command: exit code 2, within the limit, and nothing that a terminal obeys."""
    template = tmp_path / "a\u202eajnij.b"
    template.write_text("{% set p = 2**61 - 1 %}{{ {}.fromkeys(range(0, 99999 * p, p)|list)|length }}")
    command = [sys.executable, "run.py", "task=prepare", "model=tiny", "data=[sample_chat]", "hw=cpu"]
    command += [f'model.chat_template_path="{template}"', f"prepare.folder={tmp_path / 'out'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=dict(os.environ), check=False)
    assert done.returncode == 2, done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.startswith("error: model.chat_template_path=")
    assert "a\\u202eajnij.b; it takes more than 2 s" in said
    assert VISIBLE.fullmatch(done.stderr)
