from copy import deepcopy

import pytest

from tests.data.manifest_samples import manifest
from tpu_experiments.data.audit.findings import audit_findings, by_count, percent, supervised_by_answer


def changed(split, **numbers):
    """The sample manifest with other numbers in one split."""
    made = deepcopy(manifest())
    made["splits"][split].update(numbers)
    return made


def messages_of(made, severity):
    return [finding.message for finding in audit_findings([made]) if finding.severity == severity]


def test_sound_data_has_no_findings():
    assert audit_findings([manifest(), manifest(kind="text")]) == []


@pytest.mark.parametrize(
    ("made", "begins"),
    [
        (changed("test", supervised_tokens=159), "data.ultrachat_ro; 2.0 % of the test tokens are supervised (159 of"),
        (
            manifest(documents_out=229, documents_in=300, documents_reported={"too_short": 61, "empty": 10}),
            "data.ultrachat_ro; 71 of 300 documents (23.7 %) are left out, most of them for one reason: too short (61)",
        ),
        (changed("train", rows=98), "data.ultrachat_ro; prepare.packing=best_fit fills 88.7 % of the training rows"),
        (
            manifest(overlaps={"test_prompt_in_train": 1}),
            "data.ultrachat_ro; train holds the first question of 1 document of the test split too",
        ),
        (
            changed("train", supervised_without_prompt=1_000),
            "data.ultrachat_ro; 5.0 % of the supervised training tokens (1,000 of 20,000) have lost their prompt or "
            "a part of it: documents longer than 1,024 tokens are split, and their row begins inside the question or "
            "the answer; trainer.seq_len=2432 holds 99 % of the documents (2,400 tokens or fewer)",
        ),
        (changed("test", rows=0, tokens=0), "data.ultrachat_ro.test_fraction=0.1; the test split has 0 rows"),
        (changed("evaluation", rows=0, tokens=0), "data.ultrachat_ro.eval_fraction=0.1; the evaluation split has 0"),
    ],
    ids=["supervised", "reported", "packing", "prompts", "cut", "no_test_row", "no_evaluation_row"],
)
def test_each_suspicious_number_gives_one_warning(made, begins):
    (message,) = messages_of(made, "warning")
    assert message.startswith(begins)
    assert messages_of(made, "error") == []


def test_numbers_at_the_threshold_give_none():
    assert messages_of(changed("test", supervised_tokens=160), "warning") == []
    reported = manifest(documents_in=290, documents_reported={"too_short": 58}, documents_out=232)
    assert not [m for m in messages_of(reported, "warning") if "left out" in m]
    # 0.9 of 97 rows, and one more that may be part empty.
    assert messages_of(changed("train", rows=97, tokens=88_474), "warning") == []
    assert messages_of(manifest(packing="pad") | {"splits": changed("train", rows=200)["splits"]}, "warning") == []


def test_a_few_answers_without_their_question_are_none():
    assert messages_of(changed("train", supervised_without_prompt=600), "warning") == []
    made = changed("train", supervised_without_prompt=601)
    assert "trainer.seq_len=2432 holds 99 % " in messages_of(made, "warning")[0]
    made["seq_len"], made["length_percentiles"]["95"] = 512, 1_010
    assert "trainer.seq_len=1024 holds 95 % " in messages_of(made, "warning")[0]


def test_a_split_that_nobody_asked_for_may_be_empty():
    made = changed("test", rows=0, tokens=0, supervised_tokens=0)
    made["config"]["test_fraction"] = 0.0
    assert audit_findings([made]) == []


def test_held_out_content_in_train_and_lost_documents_are_errors():
    (message,) = messages_of(manifest(overlaps={"evaluation_content_in_train": 3}), "error")
    assert message.startswith("data.ultrachat_ro; train holds 3 documents of the evaluation split word for word")
    (message,) = messages_of(manifest(documents_in=241), "error")
    assert "241 documents were read, but 229 kept and 11 reported make 240" in message
    (message,) = messages_of(changed("train", documents=189), "error")
    assert "229 documents were kept, but the splits hold 228" in message


def test_errors_come_before_the_warnings_of_all_sources():
    first, second = (manifest(overlaps={f"test_{what}_in_train": 1}) for what in ("prompt", "content"))
    assert [finding.severity for finding in audit_findings([first, second])] == ["error", "warning"]


def test_late_answers_are_joined_and_none_is_lost():
    split = {"supervised_per_turn": list(range(1, 18)), "documents_per_turn": list(range(17, 0, -1))}
    answers = supervised_by_answer(split)
    assert answers[0] == ("answer 1", 1, 17)
    assert answers[-1] == ("answer 8 on", sum(range(8, 18)), 10)
    assert len(answers) == 8
    assert sum(tokens for _, tokens, _ in answers) == sum(range(1, 18))


def test_counts_are_ordered_and_zeros_left_out():
    assert by_count({"b": 1, "a_b": 1, "c": 5, "d": 0}) == [("c", 5), ("a b", 1), ("b", 1)]
    assert percent(1, 3) == "33.3 %"
    assert percent(0, 0) == "-"
