"""How a recurrent layer computes a row: as one product of all its tokens, or in chunks."""

PARALLEL_TOKENS = 512
"""Longest row in the parallel form: the decays of a row of 2,048 in one product take 27 % more time a step than four
chunks do (planned for v5e-8, tests/benchmarks/RESULTS.md)."""
CHUNK_TOKENS = 512
"""Tokens of a chunk of longer rows: few chunks, since each is compiled. Chunks of 64 tokens, which transformers' class
has, take the compiler 4 to 7 times as long as one (rows of 512 and 1,024 tokens on torch_xla's CPU device)."""


def chunk_of(num_tokens: int) -> int:
    """Return the tokens of a chunk of rows of this length; all of them in the parallel form."""
    return num_tokens if num_tokens <= PARALLEL_TOKENS else CHUNK_TOKENS


DELTA_CHUNK_TOKENS = 128
"""Most tokens of a chunk of the gated delta rule: a TPU's lanes. A chunk of 64, as in transformers, has matrices of as
many bytes there, and a row twice as many of them."""


def delta_chunk_of(num_tokens: int) -> int:
    """Return the tokens of a chunk of the gated delta rule for rows of this length, a power of two."""
    return min(DELTA_CHUNK_TOKENS, 1 << (num_tokens - 1).bit_length())
