"""Division of a group of tensors into files of bounded size, and the names of these files.

It is greedy and in order, as transformers' `max_shard_size`: a tensor is never divided, so one that is larger than the
bound has a file of its own.
"""

import re
from collections.abc import Mapping

SUFFIX = ".safetensors"
TENSOR_FILE = re.compile(r"([A-Za-z0-9_]+)(?:-\d{5}-of-\d{5})?\.safetensors")


def shards(sizes: Mapping[str, int], *, max_bytes: float) -> list[list[str]]:
    """Return the names of the tensors of each file; one empty file if there are no tensors.

    Args:
        sizes: bytes of each tensor by name.
        max_bytes: of tensors in a file.

    >>> shards({"a": 3, "b": 3, "c": 9, "d": 1}, max_bytes=6)
    [['a', 'b'], ['c'], ['d']]
    """
    found: list[list[str]] = [[]]
    held = 0
    for name, num_bytes in sizes.items():
        if found[-1] and held + num_bytes > max_bytes:
            found.append([])
            held = 0
        found[-1].append(name)
        held += num_bytes
    return found


def file_name(group: str, number: int, count: int) -> str:
    """Return the name of file `number`, from 1, of the `count` files of a group.

    >>> file_name("optimizer", 2, 5), file_name("optimizer", 1, 1)
    ('optimizer-00002-of-00005.safetensors', 'optimizer.safetensors')
    """
    return f"{group}{SUFFIX}" if count == 1 else f"{group}-{number:05d}-of-{count:05d}{SUFFIX}"


def group_in(name: str) -> str | None:
    """Return the group of a file name; None for other names."""
    found = TENSOR_FILE.fullmatch(name)
    return found[1] if found else None
