"""Which documents are held out for evaluation: a hash of the content, so none ever moves."""

import hashlib


def is_held_out(content: str, *, eval_fraction: float) -> bool:
    """True for about `eval_fraction` of all contents; equal contents lie on the same side."""
    digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < eval_fraction * 2**64
