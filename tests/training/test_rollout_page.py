"""The page of answers shows each with its rewards, escaped; the log shows the best and the worst of a prompt."""

from dataclasses import replace

import numpy as np
import pytest

from tests.data.preparing import REPOSITORY
from tests.training.test_rollouts import rollout
from tpu_experiments.data.prompts import Prompt
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.training.rollout_page import answer_lines, rollout_page, shown_iterations


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
