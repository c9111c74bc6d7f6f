"""Which modules a value of `lora.targets` names."""

import fnmatch

ALL_LINEAR = "all-linear"
"""Every Linear of every layer; PEFT has the same word."""


def is_target(name: str, target: str) -> bool:
    """Say whether `target` names the Linear `name`: by the last part of its name, by a glob, or as one of a layer."""
    *path, leaf = name.split(".")
    if target == ALL_LINEAR:
        return any(part.isdigit() for part in path)
    return leaf == target or fnmatch.fnmatchcase(name, target)
