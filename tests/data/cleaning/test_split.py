import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_experiments.data.cleaning.duplicates import content_key, prompt_key
from tpu_experiments.data.cleaning.split import overlaps, split_codes
from tpu_experiments.data.documents import Document

TRAIN, EVALUATION, TEST = range(3)

fractions_st = st.floats(0, 0.5, exclude_max=True)


def keys_of(texts):
    return np.frombuffer(b"".join(content_key(Document("", text=text)) for text in texts), "<u8").reshape(-1, 2)


KEYS_D2 = keys_of(f"document {i}" for i in range(10_000))


@given(eval_fraction=fractions_st, test_fraction=fractions_st)
def test_shares_are_about_the_fractions(eval_fraction, test_fraction):
    counts = np.bincount(
        split_codes(KEYS_D2[:, 0], eval_fraction=eval_fraction, test_fraction=test_fraction), minlength=3
    )
    expected = 10_000 * np.array([1 - eval_fraction - test_fraction, eval_fraction, test_fraction])
    assert np.all(abs(counts - expected) < 200)


@given(eval_fraction=fractions_st, one=fractions_st, other=fractions_st)
def test_the_test_fraction_moves_nothing_out_of_evaluation(eval_fraction, one, other):
    first, second = (split_codes(KEYS_D2[:, 0], eval_fraction=eval_fraction, test_fraction=f) for f in (one, other))
    assert np.array_equal(first == EVALUATION, second == EVALUATION)


@given(small=fractions_st, large=fractions_st)
def test_a_larger_evaluation_keeps_what_was_held_out(small, large):
    small, large = sorted((small, large))
    first, second = (split_codes(KEYS_D2[:, 0], eval_fraction=f, test_fraction=0.1) for f in (small, large))
    assert np.all(second[first == EVALUATION] == EVALUATION)


@given(old=st.lists(st.text(), min_size=1), new=st.lists(st.text()), order=st.randoms())
def test_new_documents_move_none_of_the_old_ones(old, new, order):
    fractions = {"eval_fraction": 0.3, "test_fraction": 0.3}
    before = dict(zip(old, split_codes(keys_of(old)[:, 0], **fractions).tolist(), strict=True))
    grown = old + new
    order.shuffle(grown)
    after = dict(zip(grown, split_codes(keys_of(grown)[:, 0], **fractions).tolist(), strict=True))
    assert before.items() <= after.items()


@given(words=st.lists(st.sampled_from(["Casa", "mea", "ȘI", "a", "ta"]), min_size=1), blanks=st.sampled_from(" \n\t"))
def test_copies_in_other_case_or_blanks_are_on_the_same_side(words, blanks):
    one, other = " ".join(words), blanks + (2 * blanks).join(words).swapcase() + blanks
    assert np.array_equal(keys_of([one]), keys_of([other]))


@pytest.mark.parametrize(("eval_fraction", "test_fraction", "only"), [(0, 0, TRAIN), (0, 1, TEST), (0.5, 0.5, None)])
def test_ends(eval_fraction, test_fraction, only):
    codes = split_codes(KEYS_D2[:, 0], eval_fraction=eval_fraction, test_fraction=test_fraction)
    assert set(codes) == ({EVALUATION, TEST} if only is None else {only})


def test_no_documents():
    codes = split_codes(np.empty(0, np.uint64), eval_fraction=0.1, test_fraction=0.1)
    assert (codes.shape, codes.dtype) == ((0,), np.int8)


def test_split_does_not_change_between_versions():
    codes = split_codes(KEYS_D2[:100, 0], eval_fraction=0.1, test_fraction=0.1)
    assert np.flatnonzero(codes == EVALUATION).tolist() == [1, 6, 9, 19, 23, 28, 29, 30, 36, 37, 56, 61, 86, 96, 97]
    assert np.flatnonzero(codes == TEST).tolist() == [11, 14, 18, 22, 57, 71, 93]


def test_overlaps():
    def chat(prompt, answer):
        return Document("", messages=(("user", prompt), ("assistant", answer)))

    documents = [chat("Cine?", "Eu."), chat("cine? ", "Tu."), chat("Unde?", "Aici."), chat("Când?", "Azi.")]
    documents += [chat("Cine?", "Eu."), chat("Unde?", "Acolo.")]
    keys = np.frombuffer(b"".join(map(content_key, documents)), "<u8").reshape(-1, 2)
    prompts = np.frombuffer(b"".join(map(prompt_key, documents)), "<u8")
    dropped = -1

    def counted(*codes):
        return {
            name.replace("_in_train", ""): n for name, n in overlaps(keys, prompts, np.array(codes, np.int8)).items()
        }

    none = dict.fromkeys(["evaluation_content", "evaluation_prompt", "test_content", "test_prompt"], 0)
    assert counted(TRAIN, EVALUATION, TEST, TEST, dropped, dropped) == none | {"evaluation_prompt": 1}
    assert counted(TRAIN, EVALUATION, TEST, TEST, dropped, TRAIN) == none | {"evaluation_prompt": 1, "test_prompt": 1}
    assert counted(TRAIN, dropped, TEST, TEST, EVALUATION, TEST) == none | {
        "evaluation_content": 1,
        "evaluation_prompt": 1,
    }
    assert counted(*[TRAIN] * 6) == counted(*[TEST] * 6) == none


def test_contents_are_compared_by_the_whole_key():
    keys = np.array([[1, 2], [1, 3], [1, 2]], np.uint64)
    counts = overlaps(keys, np.arange(3, dtype=np.uint64), np.array([TRAIN, TEST, EVALUATION], np.int8))
    assert (counts["test_content_in_train"], counts["evaluation_content_in_train"]) == (0, 1)
