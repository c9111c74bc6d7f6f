import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_experiments.data.cleaning.duplicates import (
    NUM_PERMUTATIONS,
    Signer,
    bands_for,
    content_key,
    find_duplicates,
    prompt_key,
)
from tpu_experiments.data.documents import Document


def documents_of(texts):
    return [Document(str(i), text=text) for i, text in enumerate(texts)]


def keys_of(documents):
    return np.frombuffer(b"".join(map(content_key, documents)), "<u8").reshape(-1, 2)


def blocks_of(array, sizes):
    return np.split(array, np.cumsum(sizes)[:-1])


def words(rng, n):
    return [f"w{number}" for number in rng.integers(0, 10**9, n)]


def grams(text):
    parts = text.split()
    return {tuple(parts[i : i + 5]) for i in range(max(1, len(parts) - 4))}


def jaccard(one, other):
    return len(grams(one) & grams(other)) / len(grams(one) | grams(other))


def with_changes(parts, num_changes, rng):
    changed = list(parts)
    for place in rng.choice(len(parts), num_changes, replace=False):
        changed[place] = f"c{rng.integers(10**9)}"
    return changed


chat_st = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=5)), min_size=1, max_size=3)


@given(one=chat_st, other=chat_st)
def test_keys_are_equal_where_the_words_are(one, other):
    def normal(chat):
        return [(role, content.casefold().split()) for role, content in chat]

    first, second = (Document("", messages=tuple(chat)) for chat in (one, other))
    assert (content_key(first) == content_key(second)) == (normal(one) == normal(other))
    assert len(content_key(first)) == 16
    assert len(prompt_key(first)) == 8


def test_key_of_a_text():
    assert content_key(Document("1", text="Casa\u00a0 mea\n")) == content_key(Document("2", text="casa MEA"))
    assert content_key(Document("1", text="casa mea")) != content_key(Document("1", text="casamea"))
    assert content_key(Document("1", text="Straße")) == content_key(Document("1", text="STRASSE"))


def test_prompt_is_the_first_turn_of_the_user():
    system, question, answer = ("system", "Ești bun."), ("user", "Cine ești?"), ("assistant", "Eu.")
    key = prompt_key(Document("", messages=(system, question, answer)))
    assert key == prompt_key(Document("", messages=(("user", " cine  EȘTI?"),)))
    assert key == prompt_key(Document("", messages=(question, answer, ("user", "Altceva"))))
    assert key == prompt_key(Document("", text="cine ești?"))
    assert key != prompt_key(Document("", messages=(("user", "Altceva"), answer, question)))
    # Without a user turn it is the whole: two such conversations do not share a prompt.
    assert prompt_key(Document("", messages=(answer,))) != prompt_key(Document("", messages=(system,)))


def test_signatures_do_not_change_between_processes_and_versions():
    text = "Somnoroase păsărele pe la cuiburi se adună, se ascund în rămurele. Noapte bună!"
    program = (
        "import sys, hashlib\n"
        "from tpu_experiments.data.documents import Document\n"
        "from tpu_experiments.data.cleaning.duplicates import Signer, content_key, prompt_key\n"
        "d = Document('', text=sys.argv[1])\n"
        "print(hashlib.sha256(Signer().signatures([d]).astype('<u4').tobytes()).hexdigest()[:16])\n"
        "print(content_key(d).hex(), prompt_key(d).hex())\n"
    )
    found = subprocess.run([sys.executable, "-c", program, text], capture_output=True, text=True, check=True).stdout
    document = Document("", text=text)
    digest = hashlib.sha256(Signer().signatures([document]).astype("<u4").tobytes()).hexdigest()[:16]
    assert found.split() == [digest, content_key(document).hex(), prompt_key(document).hex()]
    assert digest == "22f508a105df2ccd"
    assert content_key(document).hex() == "72927076fa8aee3328d8f174f503aa72"
    assert prompt_key(document).hex() == "1d3fa2e8a6855439"


@pytest.mark.parametrize("text", ["", "unu", "unu doi trei", "unu doi trei patru cinci", "a b c d e f"])
def test_short_texts_have_signatures(text):
    signatures = Signer().signatures(documents_of([text, f" {text.upper()}\n", text + " altul"]))
    assert (signatures.shape, signatures.dtype) == ((3, NUM_PERMUTATIONS), np.uint32)
    assert np.array_equal(signatures[0], signatures[1])
    assert (signatures[0] == signatures[2]).mean() <= jaccard(text, text + " altul") + 0.15


def test_signatures_of_nothing():
    assert Signer().signatures([]).shape == (0, NUM_PERMUTATIONS)


def test_roles_do_not_count():
    chat = Document("", messages=(("user", "unu doi trei"), ("assistant", "patru cinci șase")))
    signatures = Signer().signatures([chat, Document("", text="unu doi trei patru cinci șase")])
    assert np.array_equal(signatures[0], signatures[1])


@pytest.mark.parametrize("num_words", [30, 300])
def test_estimates_are_near_the_truth(num_words):
    rng = np.random.default_rng(0)
    errors, expected = [], []
    for num_changes in [1, 2, 3, 5, 8] * 60:
        one = words(rng, num_words)
        pair = [" ".join(one), " ".join(with_changes(one, num_changes, rng))]
        signatures, truth = Signer().signatures(documents_of(pair)), jaccard(*pair)
        errors.append((signatures[0] == signatures[1]).mean() - truth)
        expected.append(truth * (1 - truth) / NUM_PERMUTATIONS)
    assert abs(np.mean(errors)) < 5 * np.sqrt(np.mean(expected) / len(errors)), "no bias"
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.sqrt(np.mean(expected)), rel=0.2)


def test_a_long_text_is_signed_in_parts():
    parts = words(np.random.default_rng(0), 40_000)
    whole, head, tail = Signer().signatures(documents_of(" ".join(p) for p in (parts, parts[:20_004], parts[20_000:])))
    assert np.array_equal(whole, np.minimum(head, tail))


# MinHashLSH(threshold=t, num_perm=128, weights=(0.02, 0.98)) of datasketch 2.0.0 has these (b, r).
@pytest.mark.parametrize(
    ("near", "bands"),
    [(0.5, (34, 3)), (0.6, (31, 4)), (0.7, (23, 5)), (0.8, (17, 7)), (0.9, (10, 12)), (0.95, (7, 18))],
)
def test_bands_are_those_of_datasketch(near, bands):
    assert bands_for(near) == bands


def reference(keys):
    seen, first = {}, []
    for index, key in enumerate(keys):
        first.append(seen.get(key, -1))
        seen.setdefault(key, index)
    return first


@given(texts=st.lists(st.sampled_from(["a", "A ", "b", "b  c", "B c", "d"])))
def test_the_first_of_equal_ones_stays(texts):
    documents = documents_of(texts)
    first_D, is_near_D = find_duplicates(keys_of(documents))
    assert first_D.tolist() == reference(map(content_key, documents))
    assert not is_near_D.any()


@given(halves=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1))
def test_both_halves_of_a_key_count(halves):
    first_D, _ = find_duplicates(np.array(halves, np.uint64))
    assert first_D.tolist() == reference(halves)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_blocks_make_no_difference(seed, sizes):
    rng = np.random.default_rng(seed)
    originals = [words(rng, 40) for _ in range(5)]
    texts = [" ".join(with_changes(originals[rng.integers(5)], rng.integers(3), rng)) for _ in range(sum(sizes))]
    documents = documents_of(texts)
    keys, signatures = keys_of(documents), Signer().signatures(documents)
    one_block = find_duplicates(keys, signatures=[signatures], near=0.6)
    blocks = find_duplicates(keys, signatures=blocks_of(signatures, sizes), near=0.6)
    assert np.array_equal(one_block, blocks)
    first_D, is_near_D = blocks
    for index in np.flatnonzero(first_D >= 0):
        assert first_D[index] < index
        alike = (signatures[index] == signatures[first_D[index]]).mean()
        assert alike >= 0.6 if is_near_D[index] else alike == 1


def test_recall_and_precision_at_known_similarities():
    rng = np.random.default_rng(1)
    texts, copy_of = [], {}
    for _ in range(1500):
        one = words(rng, 120)
        copy_of[len(texts) + 1] = len(texts)
        texts += [" ".join(one), " ".join(with_changes(one, rng.integers(1, 9), rng))]
    documents = documents_of(texts)
    signatures = blocks_of(Signer().signatures(documents), [100] * 30)
    first_D, is_near_D = find_duplicates(keys_of(documents), signatures=signatures, near=0.8)
    truth = {copy: jaccard(texts[copy], texts[original]) for copy, original in copy_of.items()}
    found = set(np.flatnonzero(is_near_D).tolist())
    assert all(first_D[index] == copy_of[index] for index in found), "unrelated documents are never joined"
    clear = {index for index, similarity in truth.items() if similarity >= 0.88}
    unlike = {index for index, similarity in truth.items() if similarity <= 0.72}
    assert min(len(clear), len(unlike)) > 100
    assert len(clear & found) / len(clear) > 0.97
    assert len(unlike & found) / len(unlike) < 0.03


def test_a_chain_leaves_its_first():
    rng = np.random.default_rng(2)
    chain = [words(rng, 200)]
    for place in range(0, 120, 4):  # one more of the words each time: neighbours alike, the ends not
        chain.append([*chain[-1]])
        chain[-1][place] = f"c{place}"
    texts = [" ".join(parts) for parts in chain]
    documents = documents_of(texts)
    first_D, is_near_D = find_duplicates(keys_of(documents), signatures=[Signer().signatures(documents)], near=0.8)
    assert jaccard(texts[0], texts[-1]) < 0.4
    assert first_D[0] == -1
    assert is_near_D[1:].mean() > 0.8
    assert all(jaccard(texts[index], texts[first_D[index]]) > 0.65 for index in np.flatnonzero(is_near_D))


def test_a_bucket_of_unlike_documents_hides_no_copy():
    rng = np.random.default_rng(3)
    signatures = rng.integers(0, 2**32, (6, NUM_PERMUTATIONS), dtype=np.uint32)
    signatures[:, :60] = signatures[0, :60]  # similarity 0.47, and one bucket in 8 bands of 7
    signatures = np.concatenate([signatures, signatures[4:]])
    keys = np.arange(16, dtype=np.uint64).reshape(8, 2)
    first_D, is_near_D = find_duplicates(keys, signatures=[signatures], near=0.8)
    assert first_D.tolist() == [-1] * 6 + [4, 5]
    assert is_near_D.tolist() == [False] * 6 + [True] * 2


def test_exact_copies_are_not_near_ones():
    documents = documents_of(["unu doi trei patru cinci", "Unu doi trei  patru cinci", "șase"])
    first_D, is_near_D = find_duplicates(keys_of(documents), signatures=[Signer().signatures(documents)], near=0.8)
    assert first_D.tolist() == [-1, 0, -1]
    assert not is_near_D.any()


@pytest.mark.parametrize("near", [None, 0.8])
def test_no_documents(near):
    first_D, is_near_D = find_duplicates(np.empty((0, 2), np.uint64), signatures=[], near=near)
    assert (first_D.shape, is_near_D.shape) == ((0,), (0,))


MEMORY_PROGRAM = """
import resource, sys
from collections.abc import Sequence
from pathlib import Path
import numpy as np
from tpu_experiments.data.cleaning.duplicates import find_duplicates

class OpenedFiles(Sequence):  # each block is opened when it is asked for
    files = sorted(Path(sys.argv[1]).glob("*.npy"))
    def __len__(self):
        return len(self.files)
    def __getitem__(self, index):
        return np.load(self.files[index], mmap_mode="r")

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

keys = np.arange(200_000, dtype=np.uint64).reshape(-1, 2)
find_duplicates(keys[:10], signatures=[OpenedFiles()[0][:10]], near=0.8)
before = peak_mib()
_, is_near = find_duplicates(keys, signatures=OpenedFiles(), near=0.8)
print(peak_mib() - before, is_near.sum())
"""


def test_memory_is_less_than_the_signatures(tmp_path):
    """100,000 documents have 49 MiB of signatures; 10 million were searched in 613 MiB."""
    rng = np.random.default_rng(0)
    for block in range(50):
        signatures = rng.integers(0, 2**32, (2000, NUM_PERMUTATIONS), dtype=np.uint32)
        signatures[:200] = signatures[200:400]
        np.save(tmp_path / f"{block:03d}.npy", signatures)
    arguments = [sys.executable, "-c", MEMORY_PROGRAM, str(tmp_path)]
    output = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split()
    assert int(output[1]) == 50 * 200
    assert float(output[0]) < 30
