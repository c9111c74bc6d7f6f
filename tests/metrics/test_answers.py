"""ROUGE of answers with letters that rouge-score's own tokenizer does not know, and exact match."""

import pytest

from tpu_experiments.metrics.held_out import SCORES, answer_scores


def scores(written, reference):
    return dict(zip(SCORES, answer_scores([written], [reference])[0].tolist(), strict=True))


def test_letters_with_marks_are_parts_of_words():
    found = scores("Țara șase", "Țara Țării")
    assert found["rouge1"] == pytest.approx(0.5)  # the other tokenizer sees `ara`, `ase` and `ara`, `rii`
    assert found["rouge2"] == 0.0


def test_case_punctuation_and_unicode_form_do_not_count():
    assert scores("s\u0326ase ȚĂRI!", "Șase țări")["rougeL"] == 1.0


def test_the_order_of_words_counts_for_rouge_l():
    found = scores("c b a", "a b c")
    assert (found["rouge1"], found["rougeL"]) == pytest.approx((1.0, 1 / 3))


def test_an_exact_match_is_to_the_letter():
    assert scores(" Da. ", "Da.")["exact_match"] == 1.0
    assert scores("da.", "Da.")["exact_match"] == 0.0


def test_no_answer_scores_nothing():
    assert list(scores("", "Da.").values()) == [0.0] * 4
