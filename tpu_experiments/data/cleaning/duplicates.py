"""Documents that repeat an earlier one of their source: equal by a hash, or alike by MinHash and banding.

MinHash (Broder 1997): under a random permutation of all word 5-grams, two documents have the same smallest one with
probability equal to their Jaccard similarity; the share of equal entries in two signatures estimates it, with a
standard error of sqrt(J (1 - J) / 128). Banding (Leskovec, Rajaraman & Ullman, Mining of Massive Datasets, ch. 3): only
documents that agree in all rows of a band are compared.

Which of many numbers are among others, in little memory."""

import functools
import hashlib
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.data.documents import Document

AT_ONCE = 2**20  # 8 MiB of places


def is_among(values_D: NDArray[np.uint64], known_K: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether (D,) each value is one of K sorted ones; beside the result no array of D entries is made."""
    found_D = np.zeros(len(values_D), np.bool_)
    for start in range(0, len(values_D) if len(known_K) else 0, AT_ONCE):
        part = slice(start, start + AT_ONCE)
        place_B = np.minimum(np.searchsorted(known_K, values_D[part]), len(known_K) - 1)
        found_D[part] = known_K[place_B] == values_D[part]
    return found_D


NUM_PERMUTATIONS = 128
WORDS = 5  # in an n-gram; a shorter document is one n-gram of all its words

MISS_WEIGHT = 0.98
"""Weight of missed pairs against pairs compared in vain when bands are chosen. At a similarity of 0.8 a pair is then
compared with probability 0.98 (0.40 at the weight of 0.5 that datasketch defaults to); in vain costs time only."""

MAX_LEADERS = 8  # documents of a bucket that all others of it are compared with
COMPARED_AT_ONCE = 2**16  # pairs; 64 MiB of signatures
GRAMS_AT_ONCE = 2**14  # 8 MiB of permuted hashes


def content_key(document: Document) -> bytes:
    """16 bytes, equal for documents with the same words (and roles): case-folded, runs of blanks made one."""
    return hashlib.blake2b(_content(document).encode(), digest_size=16).digest()


def exact_key(document: Document) -> bytes:
    """16 bytes, equal for documents with the same text (and roles), letter for letter."""
    return hashlib.blake2b(document.content.encode(), digest_size=16).digest()


def prompt_key(document: Document) -> bytes:
    """8 bytes, equal for conversations whose first user turn has the same words; of the whole where there is none."""
    prompts = (content for role, content in document.messages or () if role == "user")
    prompt = next(prompts, None)
    text = _content(document) if prompt is None else _normal(prompt)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def group_key(document: Document) -> bytes:
    """8 bytes, equal for documents of one `group`."""
    assert document.group is not None, "the reader has set what split_by names"
    return hashlib.blake2b(document.group.encode(errors="surrogatepass"), digest_size=8).digest()


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())


def _content(document: Document) -> str:
    if document.messages is None:
        return _normal(document.text or "")
    # The two separators are blanks to str.split, so no normal text holds one.
    turns = [f"{role}\x1f{_normal(content)}" for role, content in document.messages]
    return "\x1e".join([*turns, *map(_normal, document.extras), *([_normal(document.tools)] if document.tools else [])])


class Signer:
    """Makes MinHash signatures with datasketch; they are the same in every process and on every machine."""

    def __init__(self) -> None:
        from datasketch import MinHash  # two seconds, for scipy

        # The n-grams come hashed already. "affine32": a h + b modulo 2^32 with odd a, on finalised hashes.
        self._empty = MinHash(num_perm=NUM_PERMUTATIONS, seed=1, hashfunc=int, scheme="affine32")

    def signatures(self, documents: Sequence[Document]) -> NDArray[np.uint32]:
        """(D, 128) signatures of D documents; roles do not count."""
        signatures_DP = np.empty((len(documents), NUM_PERMUTATIONS), np.uint32)
        for row, document in enumerate(documents):
            contents = [content for _, content in document.messages or ()] or [document.text or ""]
            grams = _gram_hashes(" ".join([*contents, *document.extras])).tolist()
            sketch = self._empty.copy()
            for start in range(0, len(grams), GRAMS_AT_ONCE):
                sketch.update_batch(grams[start : start + GRAMS_AT_ONCE])
            signatures_DP[row] = sketch.hashvalues
        return signatures_DP


def mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of MurmurHash3 (Appleby), a bijection of 64-bit integers in which every bit depends on all."""
    numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return numbers ^ (numbers >> np.uint64(33))


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd


def _gram_hashes(text: str) -> NDArray[np.uint32]:
    """Hash (G,) of each run of 5 words, at least one."""
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
    """The earlier document that each of D documents repeats; a first occurrence repeats none.

    A near duplicate points to the earliest document that its signature was found to be alike to. That one may itself
    repeat a still earlier one, which the two need not be alike to; of such a chain only the first stays.

    Memory is about 60 bytes a document: one band of signatures is looked at at a time, and the blocks one after the
    other, so a sequence that opens a block's file when it is asked for it keeps no more than one open.

    Args:
        keys_D2: `content_key` or `exact_key` of each document.
        signatures: of the same documents in order, in blocks (D_b, P); only looked at with `near`.
        near: share of equal entries from which signatures are alike; None looks for exact duplicates only.

    Returns:
        Index (D,) of the earlier document or -1, and whether (D,) it is repeated nearly, not exactly.
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
    """Index (D,) of the first document with the same key, -1 for that one itself."""
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
    """Indices (M,), ascending, of the documents whose 64 bits another one has too: the only ones that can be equal."""
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
    """Fill in `first_D` from one band: M documents whose hashes of the band are equal are in one bucket.

    The earliest of a bucket is its leader, with which the others are compared; those that are not alike to it make
    up the bucket of the next round.
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
    """Signatures of D documents that lie in blocks, read by band or by document."""

    def __init__(self, blocks: Sequence[NDArray[np.uint32]]) -> None:
        self.blocks = blocks
        self.bounds = np.cumsum([0, *(len(block) for block in blocks)])
        self.num_documents = int(self.bounds[-1])

    def band_hashes(self, columns: slice) -> NDArray[np.uint64]:
        """A hash (D,) of these entries of each signature."""
        hashes_D = np.empty(self.num_documents, np.uint64)
        for number, block in enumerate(self.blocks):
            band_BR = np.ascontiguousarray(block[:, columns]).astype(np.uint64)
            hashes_B = np.zeros(len(band_BR), np.uint64)
            for row in range(band_BR.shape[1]):
                hashes_B = mixed(hashes_B + band_BR[:, row])
            hashes_D[self.bounds[number] : self.bounds[number + 1]] = hashes_B
        return hashes_D

    def similarities(self, documents_K: NDArray[np.int64], others_K: NDArray[np.int64]) -> NDArray[np.float64]:
        """Share (K,) of equal entries in the signatures of K pairs."""
        similarities_K = np.empty(len(documents_K))
        order_K = np.argsort(documents_K)  # so that a part of them lies in few blocks
        for start in range(0, len(order_K), COMPARED_AT_ONCE):
            part = order_K[start : start + COMPARED_AT_ONCE]
            similarities_K[part] = (self._take(documents_K[part]) == self._take(others_K[part])).mean(axis=1)
        return similarities_K

    def _take(self, documents_K: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Signatures (K, P) of these documents."""
        signatures_KP = np.empty((len(documents_K), NUM_PERMUTATIONS), np.uint32)
        order_K = np.argsort(documents_K)
        bounds = np.searchsorted(documents_K[order_K], self.bounds)
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            inside = order_K[bounds[number] : bounds[number + 1]]
            signatures_KP[inside] = self.blocks[number][documents_K[inside] - self.bounds[number]]
        return signatures_KP


@functools.cache
def bands_for(near: float) -> tuple[int, int]:
    """Number of bands, and of rows of a band, that suit a threshold.

    The choice of datasketch's `MinHashLSH` (Zhu): a pair of similarity s shares a band of r rows with probability
    1 - (1 - s^r)^b; of all b and r, those with the least weighted sum of its integral below the threshold (compared in
    vain) and of the rest of it above (missed).
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
