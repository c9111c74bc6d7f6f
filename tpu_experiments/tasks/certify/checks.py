"""Verdicts of a certificate's checks."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tpu_experiments.config.errors import ConfigError, one_line

log = logging.getLogger(__name__)
Verdict = Literal["right", "refused", "failed", "not checked"]
EXIT_CODES: dict[Verdict, int] = {"right": 0, "refused": 2, "failed": 1, "not checked": 1}
NEEDED = ("isolation", "logits")
"""Checks without which nothing is right, where they were asked for."""


@dataclass(frozen=True)
class Check:
    """One line of a certificate."""

    name: str
    verdict: Verdict
    said: str
    """The reason, or what was seen, in one sentence."""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """What a check that found nothing wrong has seen."""

    said: str
    figures: dict[str, Any] = field(default_factory=dict)


class Wrong(Exception):
    """Raised by a check whose two sides differ; the text says by how much."""


class NotChecked(Exception):
    """Raised by a check for which there is nothing to look at; the text says why."""


def checked(name: str, look: Callable[[], Seen]) -> Check:
    """Make one check; whatever it raises becomes its verdict."""
    began = time.monotonic()
    figures: dict[str, Any] = {}
    verdict: Verdict
    try:
        seen = look()
        verdict, said, figures = "right", seen.said, seen.figures
    except NotChecked as error:
        verdict, said = "not checked", str(error)
    except ConfigError as error:
        verdict, said = "refused", " ".join(str(error).split())
    except Wrong as error:
        verdict, said = "failed", str(error)
    except Exception as error:  # a class of transformers raises what it likes; the other checks go on
        log.debug("check %s", name, exc_info=True)
        verdict, said = "failed", f"ended with {one_line(error, most=300)}"
    found = Check(name, verdict, said, round(time.monotonic() - began, 1), figures)
    log.info("%s: %s (%.1f s)", name, verdict, found.seconds)
    return found


def within(apart: dict[str, float], *, most: float, what: str) -> Seen:
    """Return what two sides that agree have seen.

    Raises:
        Wrong: one of the differences is larger than `most`, or no number.
    """
    wrong = {name: value for name, value in apart.items() if not value <= most}
    if wrong:
        shown = ", ".join(f"{name} by {value:.2g}" for name, value in wrong.items())
        raise Wrong(f"{what} differ: {shown} of the largest, and rounding explains {most:g}")
    return Seen(f"{what} agree to {max(apart.values()):.1g} of the largest", dict(apart))


def verdict_of(checks: Sequence[Check]) -> Verdict:
    """Return the verdict of all checks: failed or refused if one is, right only if what is `NEEDED` was compared."""
    verdicts = {check.verdict for check in checks}
    if "failed" in verdicts:
        return "failed"
    if "refused" in verdicts:
        return "refused"
    is_open = any(check.verdict == "not checked" for check in checks if check.name in NEEDED)
    return "not checked" if is_open or "right" not in verdicts else "right"
