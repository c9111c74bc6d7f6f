"""What one check says."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "failed", "not checked"]
ORDER: tuple[Verdict, ...] = ("ok", "not checked", "warning", "failed")


@dataclass(frozen=True)
class Finding:
    """Verdict of one check: what was seen, and what to do about it in one sentence."""

    verdict: Verdict
    seen: str
    remedy: str = ""


def ok(seen: str) -> Finding:
    """Nothing to do."""
    return Finding("ok", seen)


def warning(seen: str, remedy: str) -> Finding:
    """Training starts, and something of it will not be as expected."""
    return Finding("warning", seen, remedy)


def failed(seen: str, remedy: str) -> Finding:
    """Training would not start."""
    return Finding("failed", seen, remedy)


def not_checked(seen: str, remedy: str = "") -> Finding:
    """Nobody could look, or there is nothing to look at."""
    return Finding("not checked", seen, remedy)


def worst(findings: Iterable[Finding]) -> Finding:
    """One finding of several: the worst verdict, and what all of that verdict say."""
    found = list(findings)
    verdict = max((finding.verdict for finding in found), key=ORDER.index)
    same = [finding for finding in found if finding.verdict == verdict]
    remedies = dict.fromkeys(finding.remedy for finding in same if finding.remedy)
    return Finding(verdict, "; ".join(finding.seen for finding in same), "; ".join(remedies))


def shown_gb(num_bytes: float) -> str:
    """Bytes as GB (10^9), with a decimal below ten."""
    gigabytes = num_bytes / 1e9
    return f"{gigabytes:.1f} GB" if gigabytes < 10 else f"{gigabytes:.0f} GB"


def is_me(uid: int) -> bool:
    """Whether a file's owner is the user of this process; root may everything."""
    return os.geteuid() in (0, uid)
