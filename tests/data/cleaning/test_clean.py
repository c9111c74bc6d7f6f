import pickle
import unicodedata
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tpu_experiments.config.data_schema import CleanConfig
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.cleaning.clean import Cleaner, check_rules, collapse_blanks, with_commas
from tpu_experiments.data.documents import Document, Refused

ROMANIAN = "Ochii mei priveau cum se topește zăpada de pe acoperișul casei vechi."
ENGLISH = "The court held that the duty of care was owed to every user of the road."

# Blanks of all kinds, letters with marks of several classes, and what NFKC takes apart.
SIGNS = "aSsŞşŢţȘțĂ.?!\n \t\r\x0b\u00a0\u2003\u2028\u3000\u200b\u0327\u0326\u0322\u0306\u0334\u00a8\ufb01½…"
text_st = st.text(st.sampled_from(SIGNS), max_size=40)
rules_st = st.builds(
    CleanConfig,
    scope=st.sampled_from(["document", "paragraph"]),
    unicode=st.sampled_from(["keep", "nfc", "nfkc"]),
    romanian_letters=st.sampled_from(["keep", "comma"]),
    whitespace=st.sampled_from(["keep", "collapse"]),
    min_chars=st.none() | st.integers(1, 6),
    max_chars=st.none() | st.integers(6, 30),
    min_words=st.none() | st.integers(1, 3),
    punctuation=st.sampled_from([None, ".?!"]),
    max_paragraphs=st.none() | st.integers(1, 3),
)


def cleaned(content, **rules):
    """What a cleaner makes of a text, or of a list of turns, and what it counted."""
    cleaner = Cleaner(CleanConfig(**rules))
    if isinstance(content, str):
        document = Document("1", text=content, place="line 1 of a.jsonl")
    else:
        turns = tuple((role, turn) for role, turn in zip(["user", "assistant"] * len(content), content, strict=False))
        document = Document("1", messages=turns, place="line 1 of a.jsonl")
    result = cleaner.clean(document)
    if isinstance(result, Refused):
        assert result.place == document.place
        assert not result.is_bad_row
        return (result.reason, result.message), cleaner.changes
    assert (result.id, result.place) == (document.id, document.place)
    return result.text if isinstance(content, str) else [turn for _, turn in result.messages], cleaner.changes


@given(text=text_st, rules=rules_st)
@example("s\u0327\u0326\u0327.", CleanConfig(unicode="nfc", romanian_letters="comma"))
@example("\n\u00a8a.\n\n\n b", CleanConfig(scope="paragraph", unicode="nfkc", whitespace="collapse"))
def test_cleaning_what_it_kept_changes_nothing(text, rules):
    once = Cleaner(rules).clean(Document("", text=text))
    if isinstance(once, Document):
        again = Cleaner(rules)
        assert again.clean(once) is once
        assert not again.changes


@given(turns=st.lists(text_st, min_size=1, max_size=3), rules=rules_st)
def test_turns_are_cleaned_and_never_removed(turns, rules):
    messages = tuple(("user", turn) for turn in turns)
    result = Cleaner(rules).clean(Document("", messages=messages))
    each = [Cleaner(rules).clean(Document("", messages=(message,))) for message in messages]
    if isinstance(result, Refused):
        assert result.reason in {broken.reason for broken in each if isinstance(broken, Refused)}
    else:
        assert result.messages == tuple(document.messages[0] for document in each)
        assert Cleaner(rules).clean(result) is result


@given(text=text_st, rules=rules_st)
def test_paragraphs_keep_their_order_and_the_rules(text, rules):
    rules.scope = "paragraph"
    result = Cleaner(rules).clean(Document("", text=text))
    if isinstance(result, Document):
        kept = result.text.split("\n\n")
        assert len(kept) <= (rules.max_paragraphs or len(kept))
        for paragraph in kept:
            assert (rules.min_chars or 0) <= len(paragraph) <= (rules.max_chars or len(text) * 20)
            assert len(paragraph.split()) >= (rules.min_words or 1)
            assert not rules.punctuation or set(paragraph) & set(rules.punctuation)


@given(text=text_st | st.text())
def test_collapsed_blanks(text):
    collapsed = collapse_blanks(text)
    assert collapsed.split() == text.split()
    assert collapsed == collapsed.strip()
    assert all(not sign.isspace() or sign in " \n" for sign in collapsed)
    assert not any(run in collapsed for run in ("  ", " \n", "\n ", "\n\n\n"))
    assert collapse_blanks(collapsed) == collapsed


@given(text=text_st | st.text(), form=st.sampled_from(["NFC", "NFKC"]))
def test_commas_leave_a_text_in_its_form(text, form):
    result = with_commas(unicodedata.normalize(form, text), form=form)
    assert unicodedata.is_normalized(form, result)
    assert not set(result) & set("ŞşŢţ")


def test_only_the_four_letters_change():
    others = "".join(map(chr, range(0xC0, 0x250))).translate(dict.fromkeys(map(ord, "ŞşŢţ")))
    assert with_commas(others, form=None) == others
    assert with_commas("Şi-n Ţara şi viaţa", form=None) == "Și-n Țara și viața"


def test_without_rules_the_document_is_left_as_it_is():
    document = Document("1", text=" a\u00a0\n\n\n\nş ")
    assert Cleaner(CleanConfig()).clean(document) is document


def test_rewriting_is_counted_by_document():
    rules = {"unicode": "nfkc", "romanian_letters": "comma", "whitespace": "collapse"}
    changes = {"unicode": 1, "romanian_letters": 1, "whitespace": 1}
    assert cleaned("\ufb01e  şi …", **rules) == ("fie și ...", changes)
    assert cleaned(["\ufb01e şi", "\ufb01e  şi"], **rules) == (["fie și", "fie și"], changes)
    assert cleaned("fie", **rules) == ("fie", {})


@pytest.mark.parametrize(
    ("content", "rules", "reason", "message"),
    [
        (" \n", {}, "empty", "has no text."),
        ("Bună ziua.", {"min_chars": 40}, "too_few_chars", "has 10 characters, fewer than clean.min_chars=40."),
        ("Bună ziua.", {"max_chars": 5}, "too_many_chars", "has 10 characters, more than clean.max_chars=5."),
        ("Bună ziua.", {"min_words": 3}, "too_few_words", "has 2 words, fewer than clean.min_words=3."),
        ("ziua", {"punctuation": ".?"}, "no_punctuation", "has no punctuation, and clean.punctuation=.? asks for one."),
        (["Bună.", ""], {"min_chars": 1}, "too_few_chars", "has 0 characters in turn 2, fewer than clean.min_chars=1."),
        (
            "a\n\nb.",
            {"scope": "paragraph", "min_chars": 3},
            "no_paragraph",
            "has no paragraph left of 2: 2 too_few_chars.",
        ),
    ],
)
def test_refused_with_the_numbers(content, rules, reason, message):
    assert cleaned(content, **rules)[0] == (reason, message)


@pytest.mark.parametrize(
    ("rule", "kept", "refused"),
    [
        ({"min_chars": 3}, "abc", "ab"),
        ({"max_chars": 3}, "abc", "abcd"),
        ({"min_words": 2}, "a b", "ab"),
        ({"punctuation": ".?!"}, "a?", "a,"),
        ({"language": "ro"}, ROMANIAN, ENGLISH),
    ],
)
def test_limits(rule, kept, refused):
    assert cleaned(kept, **rule) == (kept, {})
    assert cleaned(refused, **rule)[0][0] != refused
    assert cleaned([kept, kept], **rule) == ([kept, kept], {})
    assert isinstance(cleaned([refused, refused], **rule)[0], tuple)


def test_rules_see_the_text_that_was_rewritten():
    assert cleaned("a          b", whitespace="collapse", max_chars=3) == ("a b", {"whitespace": 1})
    assert cleaned("wait…", unicode="nfkc", punctuation=".")[0] == "wait..."


def test_paragraphs_are_judged_one_by_one():
    paragraphs = [ROMANIAN, "Scurt.", ENGLISH, "fără punct " * 5, ROMANIAN + " Da?", ROMANIAN + " Nu.", "Rest."]
    rules = CleanConfig(
        scope="paragraph", whitespace="collapse", min_chars=40, punctuation=".?!", language="ro", max_paragraphs=3
    )
    text, changes = cleaned("\n \n\n".join(paragraphs) + "\n", **vars(rules))
    assert text == "\n\n".join([ROMANIAN, ROMANIAN + " Da?", ROMANIAN + " Nu."])
    left_out = ["too_few_chars", "language", "no_punctuation", "over_max"]
    assert changes == {"whitespace": 1} | {f"paragraphs_{reason}": 1 for reason in left_out}
    refused, _ = cleaned("\n\n".join(paragraphs[1:4]), **vars(rules))
    assert refused == (
        "no_paragraph",
        "has no paragraph left of 3: 1 too_few_chars, 1 language, 1 no_punctuation.",
    )


def test_a_line_end_ends_no_paragraph():
    verse = "Somnoroase păsărele\nPe la cuiburi se adună."
    assert cleaned(verse, scope="paragraph", punctuation=".")[0] == verse
    windows = verse.replace("\n", "\r\n")
    assert cleaned(f"{windows}\r\n\r\nx", scope="paragraph", min_chars=3, whitespace="collapse")[0] == verse


def test_language_is_that_of_the_whole_conversation():
    assert cleaned([ROMANIAN, "OK.", ROMANIAN], language="ro") == ([ROMANIAN, "OK.", ROMANIAN], {})
    (reason, message), _ = cleaned([ENGLISH, ENGLISH], language="ro", language_min_probability=0.5)
    assert reason == "language"
    assert message == "has probability 0.000 of clean.language=ro, below clean.language_min_probability=0.5."


def test_a_cleaner_can_be_sent_to_a_worker():
    rules = CleanConfig(unicode="nfkc", romanian_letters="comma", whitespace="collapse", language="ro")
    cleaner = pickle.loads(pickle.dumps(Cleaner(rules)))
    assert cleaner.clean(Document("", text=ROMANIAN + "  ")).text == ROMANIAN
    assert cleaner.changes == Counter(whitespace=1)


@pytest.mark.parametrize(
    ("rules", "kind", "message"),
    [
        ({"language": "rom"}, "text", "data.a.clean.language=rom; there is no such language code. Did you mean 'ro'?"),
        (
            {"min_chars": 9, "max_chars": 5},
            "text",
            "data.a.clean.min_chars=9; it is more than data.a.clean.max_chars=5",
        ),
        ({"scope": "paragraph"}, "chat", "data.a.clean.scope=paragraph; a gives conversations"),
        ({"max_paragraphs": 8}, "text", "data.a.clean.max_paragraphs=8; paragraphs are only checked with"),
    ],
)
def test_rules_that_cannot_be(rules, kind, message):
    with pytest.raises(ConfigError) as caught:
        check_rules(CleanConfig(**rules), source="a", kind=kind)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_rules_that_can_be(kind):
    scope = {"scope": "paragraph", "max_paragraphs": 8} if kind == "text" else {}
    check_rules(CleanConfig(language="ro", min_chars=5, max_chars=5, **scope), source="a", kind=kind)
    check_rules(CleanConfig(), source="a", kind=kind)


def test_reasoning_is_rewritten_as_its_answer_is():
    extras = ("", '{"reasoning_content": "Fiindcă aşa  e.", "tool_calls": []}', "{}", "")
    told = (("user", "De ce?"), ("assistant", "Aşa e."), ("tool", "1"), ("assistant", "Da."))
    cleaner = Cleaner(CleanConfig(romanian_letters="comma", whitespace="collapse"))
    found = cleaner.clean(Document("1", messages=told, extras=extras))
    assert found.messages[1][1] == "Așa e."
    assert found.extras == ("", '{"reasoning_content": "Fiindcă așa e.", "tool_calls": []}', "{}", "")
    assert cleaner.changes == {"romanian_letters": 1, "whitespace": 1}
    assert cleaner.clean(found) == found
