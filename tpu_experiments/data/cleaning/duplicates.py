"""Exact and near duplicates within a source: equal hashes, or similar MinHash signatures.

MinHash (Broder 1997): under a random permutation of all word 5-grams, two documents have the same smallest one with
probability equal to their Jaccard similarity; the share of equal entries in two signatures estimates it, with a
standard error of sqrt(J (1 - J) / 128). Banding (Leskovec, Rajaraman & Ullman, Mining of Massive Datasets, ch. 3): only
documents that agree in all rows of a band are compared.

`is_among` is the membership test of uint64 hashes that the search and the splits use.
"""

import functools
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.data.documents import Document

AT_ONCE = 2**20  # values per chunk: 8 MiB of indices


def is_among(values_D: NDArray[np.uint64], known_K: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return whether (D,) each value is one of K sorted ones, by chunked binary search.

    Beside the result no array of D entries is allocated.
    """
    found_D = np.zeros(len(values_D), np.bool_)
    for start in range(0, len(values_D) if len(known_K) else 0, AT_ONCE):
        part = slice(start, start + AT_ONCE)
        place_B = np.minimum(np.searchsorted(known_K, values_D[part]), len(known_K) - 1)
        found_D[part] = known_K[place_B] == values_D[part]
    return found_D


NUM_PERMUTATIONS = 128
WORDS = 5  # in an n-gram; a shorter document is one n-gram of all its words

MISS_WEIGHT = 0.98
"""Weight of missed pairs against pairs compared needlessly, when bands are chosen. At a similarity of 0.8 a pair is
then compared with probability 0.98 (0.40 at the weight of 0.5 that datasketch defaults to); a needless comparison
only costs time."""

MAX_LEADERS = 8  # documents of a bucket that its others are compared with
COMPARED_AT_ONCE = 2**16  # pairs; 64 MiB of signatures
GRAMS_AT_ONCE = 2**14  # 8 MiB of permuted hashes


def content_key(document: Document) -> bytes:
    """Return 16 bytes, equal for documents with the same words (and roles), ignoring case and blanks.

    Case-folded, runs of blanks collapsed to one.
    """
    return hashlib.blake2b(_content(document).encode(), digest_size=16).digest()


def exact_key(document: Document) -> bytes:
    """Return 16 bytes, equal for documents with the same text (and roles, and label), letter for letter."""
    label = "" if document.label is None else f"\0{document.label}"
    return hashlib.blake2b(f"{document.content}{label}".encode(), digest_size=16).digest()


def prompt_key(document: Document) -> bytes:
    """Return 8 bytes, equal for conversations whose first user turns have the same words.

    Computed over the whole document where there is no user turn. Of preference pairs it is equal where the whole
    prompts have the same words, whatever the system text.
    """
    if document.rejected is not None:
        turns = (f"{role}\x1f{_normal(content)}" for role, content in document.prompt if role != "system")
        return hashlib.blake2b("\x1e".join(turns).encode(), digest_size=8).digest()
    prompts = (content for role, content in document.messages or () if role == "user")
    prompt = next(prompts, None)
    text = _content(document) if prompt is None else _normal(prompt)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def group_key(document: Document) -> bytes:
    """Return 8 bytes, equal for documents of one `group`."""
    assert document.group is not None, "the reader has set what split_by names"
    return hashlib.blake2b(document.group.encode(errors="surrogatepass"), digest_size=8).digest()


@functools.lru_cache(maxsize=64)  # a prompt is compared with others, and is in both conversations of a pair
def _normal(text: str) -> str:
    return " ".join(text.casefold().split())


def _content(document: Document) -> str:
    if document.messages is None:
        return _normal(document.text or "")
    if document.rejected is not None:
        return f"{_content(replace(document, rejected=None))}\x1d{_content(document.rejected)}"
    # str.split treats the two separators as blanks, so no normalised text contains one.
    turns = [f"{role}\x1f{_normal(content)}" for role, content in document.messages]
    tools, label = ([each] if each else [] for each in (_normal(document.tools), document.label))
    return "\x1e".join([*turns, *map(_normal, document.extras), *tools, *label])


class Signer:
    """MinHash signatures by datasketch, identical in every process and on every machine."""

    def __init__(self) -> None:
        from datasketch import MinHash  # two seconds, for scipy

        # The n-grams are hashed already. "affine32": a h + b modulo 2^32 with odd a, on finalised hashes.
        self._empty = MinHash(num_perm=NUM_PERMUTATIONS, seed=1, hashfunc=int, scheme="affine32")

    def signatures(self, documents: Sequence[Document]) -> NDArray[np.uint32]:
        """Return (D, 128) signatures of D documents; roles are ignored."""
        signatures_DP = np.empty((len(documents), NUM_PERMUTATIONS), np.uint32)
        for row, document in enumerate(documents):
            halves = [document] if document.rejected is None else [document, document.rejected]
            contents = [text for half in halves for text in _texts(half)]
            grams = _gram_hashes(" ".join(contents)).tolist()
            sketch = self._empty.copy()
            for start in range(0, len(grams), GRAMS_AT_ONCE):
                sketch.update_batch(grams[start : start + GRAMS_AT_ONCE])
            signatures_DP[row] = sketch.hashvalues
        return signatures_DP


def _texts(document: Document) -> list[str]:
    contents = [content for _, content in document.messages or ()] or [document.text or ""]
    return [*contents, *document.extras]


def mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of MurmurHash3 (Appleby), a bijection of uint64.

    Every output bit depends on all input bits.
    """
    numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return numbers ^ (numbers >> np.uint64(33))


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd


def _gram_hashes(text: str) -> NDArray[np.uint32]:
    """Return the hash (G,) of each run of 5 words; a shorter text is one run."""
    words = _normal(text).encode().split(b" ")
    words_W = mixed(np.fromiter(map(zlib.crc32, words), np.uint64, len(words)))
    size = min(WORDS, len(words))
    num_grams = len(words) - size + 1
    grams_G = np.zeros(num_grams, np.uint64)
    for place in range(size):
        grams_G = grams_G * _GOLDEN + words_W[place : place + num_grams]
    return (mixed(grams_G) >> np.uint64(32)).astype(np.uint32)


def find_duplicates(
    keys_D2: NDArray[np.uint64], *, signatures: Sequence[NDArray[np.uint32]] | None = None, near: float | None = None
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the earlier document that each of D documents duplicates; first occurrences duplicate none.

    A near duplicate points to the earliest document found to have a similar signature. That one may itself duplicate a
    still earlier one, which the near duplicate need not be similar to; of such a chain only the earliest document is
    kept.

    Memory is about 60 bytes a document: one band of signatures is processed at a time, one block after the other, so a
    sequence that opens a block's file on access has no more than one open.

    Args:
        keys_D2: `content_key` or `exact_key` of each document.
        signatures: of the same documents in order, in blocks (D_b, P); only used with `near`.
        near: share of equal entries from which signatures count as similar; None finds exact duplicates only.

    Returns:
        Index (D,) of the earlier document or -1, and whether (D,) it is duplicated nearly, not exactly.
    """
    first_D = _exact(keys_D2)
    is_near_D = np.zeros(len(first_D), np.bool_)
    if near is None or len(first_D) == 0:
        return first_D, is_near_D
    assert signatures is not None, "near duplicates are found by their signatures"
    blocks = _Blocks(signatures)
    assert blocks.num_documents == len(first_D), f"{blocks.num_documents} signatures of {len(first_D)} documents"
    searched_M = np.flatnonzero(first_D < 0)
    num_bands, num_rows = bands_for(near)
    for band in range(num_bands):
        hashes_M = blocks.band_hashes(slice(band * num_rows, (band + 1) * num_rows))[searched_M]
        _search(searched_M, hashes_M=hashes_M, blocks=blocks, near=near, first_D=first_D)
    is_near_D[searched_M] = first_D[searched_M] >= 0
    return first_D, is_near_D


def _exact(keys_D2: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the index (D,) of the first document with the same key, -1 for that one itself."""
    first_D = np.full(len(keys_D2), -1, np.int64)
    documents_M = _sharing_first_half(keys_D2[:, 0])
    keys_M2 = keys_D2[documents_M]
    order_M = np.lexsort((keys_M2[:, 1], keys_M2[:, 0]))  # stable: equal keys stay in reading order
    sorted_M2 = keys_M2[order_M]
    starts_M = np.ones(len(order_M), np.bool_)
    starts_M[1:] = (sorted_M2[1:] != sorted_M2[:-1]).any(axis=1)
    leaders_M = order_M[starts_M][np.cumsum(starts_M) - 1]
    first_D[documents_M[order_M[~starts_M]]] = documents_M[leaders_M[~starts_M]]
    return first_D


def _sharing_first_half(halves_D: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the ascending indices (M,) of documents that share 64 bits with another.

    Only these can be equal.
    """
    sorted_D = np.sort(halves_D)
    repeated = np.unique(sorted_D[1:][sorted_D[1:] == sorted_D[:-1]])
    del sorted_D
    return np.flatnonzero(is_among(halves_D, repeated))


def _search(
    documents_M: NDArray[np.int64],
    *,
    hashes_M: NDArray[np.uint64],
    blocks: "_Blocks",
    near: float,
    first_D: NDArray[np.int64],
) -> None:
    """Fill in `first_D` from one band: of M documents, those with equal band hashes form a bucket.

    The earliest document of a bucket is its leader, which the others are compared with; those that are not similar to
    it form the bucket of the next round.
    """
    order_M = np.argsort(hashes_M, kind="stable")  # stable: a bucket is in reading order
    sorted_M = hashes_M[order_M]
    starts_M = np.concatenate(([True], sorted_M[1:] != sorted_M[:-1]))
    shared_M = ~(starts_M & np.append(starts_M[1:], True))
    members_K, starts_K = documents_M[order_M[shared_M]], starts_M[shared_M]
    del order_M, sorted_M, starts_M, shared_M
    for _ in range(MAX_LEADERS):
        buckets_K = np.cumsum(starts_K)
        leaders_K = members_K[starts_K][buckets_K - 1]
        known_K = first_D[members_K]
        open_K = ~starts_K & ((known_K < 0) | (known_K > leaders_K))
        members_K, leaders_K, buckets_K = members_K[open_K], leaders_K[open_K], buckets_K[open_K]
        alike_K = blocks.similarities(members_K, leaders_K) >= near
        first_D[members_K[alike_K]] = leaders_K[alike_K]
        members_K, buckets_K = members_K[~alike_K], buckets_K[~alike_K]
        if len(members_K) == 0:
            return
        starts_K = np.diff(buckets_K, prepend=0) > 0


class _Blocks:
    """Signatures of D documents in blocks, read by band or by document."""

    def __init__(self, blocks: Sequence[NDArray[np.uint32]]) -> None:
        self.blocks = blocks
        self.bounds = np.cumsum([0, *(len(block) for block in blocks)])
        self.num_documents = int(self.bounds[-1])

    def band_hashes(self, columns: slice) -> NDArray[np.uint64]:
        """Return a hash (D,) of these columns of each signature."""
        hashes_D = np.empty(self.num_documents, np.uint64)
        for number, block in enumerate(self.blocks):
            band_BR = np.ascontiguousarray(block[:, columns]).astype(np.uint64)
            hashes_B = np.zeros(len(band_BR), np.uint64)
            for row in range(band_BR.shape[1]):
                hashes_B = mixed(hashes_B + band_BR[:, row])
            hashes_D[self.bounds[number] : self.bounds[number + 1]] = hashes_B
        return hashes_D

    def similarities(self, documents_K: NDArray[np.int64], others_K: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the share (K,) of equal entries in the signatures of K pairs."""
        similarities_K = np.empty(len(documents_K))
        order_K = np.argsort(documents_K)  # so that each chunk reads few blocks
        for start in range(0, len(order_K), COMPARED_AT_ONCE):
            part = order_K[start : start + COMPARED_AT_ONCE]
            similarities_K[part] = (self._take(documents_K[part]) == self._take(others_K[part])).mean(axis=1)
        return similarities_K

    def _take(self, documents_K: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the signatures (K, P) of these documents."""
        signatures_KP = np.empty((len(documents_K), NUM_PERMUTATIONS), np.uint32)
        order_K = np.argsort(documents_K)
        bounds = np.searchsorted(documents_K[order_K], self.bounds)
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            inside = order_K[bounds[number] : bounds[number + 1]]
            signatures_KP[inside] = self.blocks[number][documents_K[inside] - self.bounds[number]]
        return signatures_KP


@functools.cache
def bands_for(near: float) -> tuple[int, int]:
    """Return the number of bands, and of rows in a band, that suit a threshold.

    The criterion of datasketch's `MinHashLSH` (Zhu): a pair of similarity s shares a band of r rows with probability 1
    - (1 - s^r)^b. Of all b and r, those are chosen that minimise the weighted sum of this probability's integral below
    the threshold (needless comparisons) and of its complement's above (missed pairs).
    """
    steps_S = (np.arange(4000) + 0.5) / 4000
    best, choice = np.inf, (1, 1)
    for num_bands in range(1, NUM_PERMUTATIONS + 1):
        for num_rows in range(1, NUM_PERMUTATIONS // num_bands + 1):
            found_S = 1 - (1 - steps_S**num_rows) ** num_bands
            in_vain, missed = found_S[steps_S < near].sum(), (1 - found_S[steps_S >= near]).sum()
            error = (1 - MISS_WEIGHT) * in_vain + MISS_WEIGHT * missed
            if error < best:
                best, choice = error, (num_bands, num_rows)
    return choice
