from copy import deepcopy

import pytest

from tests.data.manifest_samples import manifest, noticed
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


def ends(length=2_048, **counts):
    """Ends of one length in one unit, and nothing suspicious in the other."""
    sound = noticed()["equal_ends"]
    return {"equal_ends": {**sound, "characters": {**sound["characters"], "length": length, **counts}}}


@pytest.mark.parametrize(
    ("counts", "below", "says"),
    [
        (
            {"rendered": 4, "markers": ["<|im_start|>", "[INST]"]},
            {"rendered": 3},
            "4 of 190 training conversations (2.1 %) spell out marks of a chat format (<|im_start|>, [INST])",
        ),
        (
            {"empty_thoughts": 2},
            {"empty_thoughts": 1},
            "2 of 190 training conversations (1.1 %) have an empty block of reasoning (<think></think>) in a learnt "
            "answer",
        ),
        (
            {"same_answer": {"documents": 96, "text": 'Nu "știu".'}},
            {"same_answer": {"documents": 95, "text": ""}},
            '96 of 190 training conversations (50.5 %) end with one and the same answer ("Nu \\"știu\\"."); the',
        ),
        (
            {"echoes": 5},
            {"echoes": 4},
            "5 of 190 training conversations (2.6 %) end with an answer that repeats the turn before it",
        ),
        (
            ends(documents=10, inside_a_sentence=6),
            ends(documents=10, inside_a_sentence=5),
            "10 of 190 training conversations (5.3 %) end with an answer of exactly 2,048 characters, 6 of them end",
        ),
        (ends(documents=5, inside_a_sentence=4, near=1.0), ends(documents=5, inside_a_sentence=4, near=1.01), "5 of"),
        (ends(documents=5, inside_a_sentence=5), ends(documents=4, inside_a_sentence=4), "5 of 190"),
    ],
    ids=["rendered", "empty_thoughts", "same_answer", "echoes", "cut", "cut_beside_its_neighbours", "cut_in_few"],
)
def test_what_the_documents_show_gives_one_warning_from_a_share_on(counts, below, says):
    (message,) = messages_of(manifest(noticed=noticed(**counts)), "warning")
    assert message.startswith(f"data.ultrachat_ro; {says}")
    assert messages_of(manifest(noticed=noticed(**below)), "warning") == []


def test_texts_are_told_what_to_make_of_marks():
    counts = noticed(
        rendered=190, markers=["### Human: and ### Assistant:"], same_answer={"documents": 190, "text": ""}
    )
    (message,) = messages_of(manifest(kind="text", noticed=counts), "warning")
    assert "give conversations as `messages` with data.ultrachat_ro.kind=chat" in message
    made = manifest(kind="text", changes={"special_tokens_in_text": 5})
    (message,) = messages_of(made, "warning")
    assert message.startswith("data.ultrachat_ro; 5 of 240 documents (2.1 %) spell out special tokens of the tokenizer")
    made["noticed"] = noticed(rendered=4)
    assert len(messages_of(made, "warning")) == 1, "marks of a chat are said once"
    cut = noticed(**ends(documents=10, inside_a_sentence=9))
    assert (
        "190 training texts (5.3 %) have exactly 2,048" in messages_of(manifest(kind="text", noticed=cut), "warning")[0]
    )
    assert messages_of(manifest(kind="text", noticed=cut, labels={"train": {"da": 190}}), "warning") == []


def test_documents_that_are_shortened_are_found():
    made = changed("train", documents_truncated=10, tokens_dropped=4_000)
    (message,) = messages_of(made, "warning")
    assert message.startswith(
        "data.ultrachat_ro; 10 of 190 training documents (5.3 %) are longer than 1,024 tokens and"
    )
    assert "4,000 tokens are dropped; trainer.seq_len=2432 holds 99 % of the documents" in message
    assert messages_of(changed("train", documents_truncated=9), "warning") == []
    made = manifest(documents_reported={"too_long": 13}, documents_in=242)
    (message,) = messages_of(made, "warning")
    assert message.startswith(
        "data.ultrachat_ro; 13 of 242 documents (5.4 %) are longer than 1,024 tokens and left out"
    )
    made = manifest(changes={"blank_answer_not_learnt": 13})
    (message,) = messages_of(made, "warning")
    assert message.startswith("data.ultrachat_ro; 13 answers in 240 documents are blank and not learnt")
    assert messages_of(manifest(changes={"blank_answer_not_learnt": 12}), "warning") == []


def test_data_of_earlier_versions_has_no_such_counts():
    made = manifest()
    del made["noticed"]
    assert audit_findings([made]) == supervised_by_answer(made) == []
    assert audit_findings([manifest(noticed={"learnt_per_turn": {"train": [1]}})]) == []


def test_a_finding_of_every_row_length_is_said_once():
    both = [manifest(seq_len=n, noticed=noticed(empty_thoughts=9)) for n in (512, 1_024)]
    assert len(audit_findings(both)) == 1


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
    made["seq_len"] = 2_500
    assert "trainer.seq_len=5120 holds 100 % " in messages_of(made, "warning")[0]


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
    answers = supervised_by_answer(manifest(noticed=noticed(learnt_per_turn={"train": list(range(1, 18))})))
    assert answers[0] == ("answer 1", 1)
    assert answers[-1] == ("answer 8 on", sum(range(8, 18)))
    assert len(answers) == 8
    assert sum(tokens for _, tokens in answers) == sum(range(1, 18))


def test_counts_are_ordered_and_zeros_left_out():
    assert by_count({"b": 1, "a_b": 1, "c": 5, "d": 0}) == [("c", 5), ("a b", 1), ("b", 1)]
    assert percent(1, 3) == "33.3 %"
    assert percent(0, 0) == "-"
