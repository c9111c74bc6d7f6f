"""The page of answers shows each with its rewards, escaped; the log shows the best and the worst of a prompt."""

from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.data.preparing import REPOSITORY
from tests.training.test_rollouts import rollout
from tpu_experiments.data.prompts import Prompt
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.training.rollout_page import answer_lines, rollout_page, shown_iterations
from tpu_experiments.training.rollouts import ARRAYS


@pytest.fixture(scope="module")
def tokenizer():
    folder = REPOSITORY / "tpu_experiments" / "samples" / "tokenizer"
    return load_tokenizer(str(folder), revision=None, chat_template_path=None)


@pytest.fixture
def prompts():
    return [Prompt([1], f"Cât face {n} & <b>doi</b>?", {}) for n in range(9)]


def written(tokenizer, answers):
    """Rollout of two prompts whose answers are these texts, with their end marks."""
    found = rollout()
    ids_NT, lengths_N = np.zeros((4, 40), np.int32), np.zeros(4, np.int32)
    for row, answer in enumerate(answers):
        ids = tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
        begin = found.prompt_lengths_N[row]
        lengths_N[row] = begin + len(ids)
        ids_NT[row, begin : lengths_N[row]] = ids
    return replace(found, ids_NT=ids_NT, lengths_N=lengths_N)


def test_a_page_has_every_answer_with_its_rewards_and_nothing_of_it_is_markup(tokenizer, prompts):
    found = written(tokenizer, ["Zece.", "<script>alert(1)</script>", "Nu știu", "Unu."])
    text = rollout_page([found, replace(found, version=0)], prompts=prompts, tokenizer=tokenizer, name="a")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "Cât face 8 &amp; &lt;b&gt;doi&lt;/b&gt;?" in text
    cells = [line.strip() for line in text.splitlines() if line.strip().startswith("<tr><td>")]
    assert cells[0] == "<tr><td>1.00</td><td>0.25</td><td>+1.00</td><td>5</td><td>Zece.</td></tr>"
    assert cells[1].startswith("<tr><td>0.00</td><td>none</td><td>-1.00</td>")
    assert "Nu știu (cut off)" in cells[2]
    assert len(cells) == 8
    assert text.index("Written after step 6") < text.index("Written after step 0")
    assert "mean of 4 answers: number 0.50, length 0.53" in text


class Balance(HTMLParser):
    """Texts of cells, and the elements that are open; what is loaded from elsewhere fails."""

    def __init__(self):
        super().__init__()
        self.open, self.cells, self.kinds = [], [], set()

    def handle_starttag(self, tag, attrs):
        assert not {"src", "href", "onload", "onerror"} & {name for name, _ in attrs}, (tag, attrs)
        self.kinds.add(tag)
        if tag not in {"meta", "br"}:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["td"]:
            self.cells[-1] += data


def test_hostile_answers_are_text_and_a_page_is_bounded(tokenizer):
    hostile = "</td></table><img src=x onerror=alert(1)>{{ 7*7 }} **a**\u202eabc\x00\x1b[2J\n#### 4 \ud800 &amp;"
    prompts = [Prompt([1], hostile, {}) for _ in range(9)]
    found = written(tokenizer, ["</td></script><b>1</b>\n\u202e2", "<!-- ", "{% x %}", "&lt;"])
    text = rollout_page([found], prompts=prompts, tokenizer=tokenizer, name="</title><script>")
    page = Balance()
    page.feed(text.encode().decode())
    page.close()
    assert page.open == []
    assert not page.kinds & {"script", "img"}
    answers = page.cells[4::5]
    assert answers[0] == "</td></script><b>1</b>\n\\u202e2"
    assert answers[1:] == ["<!-- ", "{% x %} (cut off)", "&lt;"]
    assert "\\u202eabc\\x00\\x1b[2J\n#### 4 \\ud800 &amp;amp;" in text


def test_a_page_has_at_most_sixteen_answers_to_a_prompt_and_the_beginning_of_a_long_text(tokenizer):
    found = written(tokenizer, ["Zece."] * 4)
    many = {name: np.repeat(getattr(found, name), 10, axis=0) for name in ARRAYS if getattr(found, name) is not None}
    found = replace(found, **many | {"prompt_index_N": np.zeros(40, np.int32)})
    text = rollout_page([found], prompts=[Prompt([1], "x" * 10**6, {})], tokenizer=tokenizer, name="a")
    assert text.count("<tr><td>") == 16
    assert "16 of 40 answers" in text
    assert f"{'x' * 1999}…<" in text


def test_the_log_has_the_best_and_the_worst_of_the_first_prompt_with_both(tokenizer, prompts):
    found = written(tokenizer, ["Zece.", "Doi.\nTrei.", "Patru", "Unu."])
    lines = answer_lines(found, prompts=prompts, tokenizer=tokenizer)
    assert lines == [
        "answers to 'Cât face 8 & <b>doi</b>?':",
        "  number 1.00, length 0.25: 'Zece.'",
        "  number 0.00, length none: 'Doi. Trei.'",
    ]
    same = replace(found, advantage_N=np.array([0, 0, 0.5, -0.5], np.float32))
    assert answer_lines(same, prompts=prompts, tokenizer=tokenizer)[1] == "  number 1.00, length 1.00: 'Patru'"
    none = replace(found, advantage_N=np.zeros(4, np.float32))
    assert len(answer_lines(none, prompts=prompts, tokenizer=tokenizer)) == 3


def test_iterations_of_a_page_reach_from_the_first_to_the_last():
    assert shown_iterations([7]) == [7]
    assert shown_iterations([4, 8, 12]) == [12, 8, 4]
    assert shown_iterations(list(range(0, 400, 4))) == [396, 296, 200, 100, 0]
