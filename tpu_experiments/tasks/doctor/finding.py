"""Findings of the checks, and how several are combined."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "failed", "not checked"]
ORDER: tuple[Verdict, ...] = ("ok", "not checked", "warning", "failed")


@dataclass(frozen=True)
class Finding:
    """Verdict of one check: what was observed, and a remedy in one sentence."""

    verdict: Verdict
    seen: str
    remedy: str = ""


def ok(seen: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding("ok", seen)


def warning(seen: str, remedy: str) -> Finding:
    """Return a finding with which training starts, but not entirely as expected."""
    return Finding("warning", seen, remedy)


def failed(seen: str, remedy: str) -> Finding:
    """Return a finding with which training would not start."""
    return Finding("failed", seen, remedy)


def not_checked(seen: str, remedy: str = "") -> Finding:
    """Return a finding for what could not be checked, or does not exist."""
    return Finding("not checked", seen, remedy)


def worst(findings: Iterable[Finding]) -> Finding:
    """Combine findings: the worst verdict, with the observations and remedies of all that share it."""
    found = list(findings)
    verdict = max((finding.verdict for finding in found), key=ORDER.index)
    same = [finding for finding in found if finding.verdict == verdict]
    remedies = dict.fromkeys(finding.remedy for finding in same if finding.remedy)
    return Finding(verdict, "; ".join(finding.seen for finding in same), "; ".join(remedies))


def shown_gb(num_bytes: float) -> str:
    """Format bytes as GB (10^9), with a decimal below ten."""
    gigabytes = num_bytes / 1e9
    return f"{gigabytes:.1f} GB" if gigabytes < 10 else f"{gigabytes:.0f} GB"


def is_me(uid: int) -> bool:
    """Return whether this process has the rights of a file's owner; root always has."""
    return os.geteuid() in (0, uid)
