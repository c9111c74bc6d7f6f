"""Print a run's log as it grows, and periodically its progress and cost."""

import re
from collections.abc import Callable

STEP = re.compile(r"step +(\d+)/(\d+).*?(?:left (\S+))?\s*$", re.MULTILINE)


class Progress:
    """Printer of new log lines and of status lines without repetition."""

    def __init__(self, every: int = 15) -> None:
        self._every = every
        self._looks = 0
        self._last = ""

    def show(self, text: str, *, bill: str, say: Callable[[str], None]) -> None:
        """Print the new log lines, and at every 15th call the bill with the newest step."""
        for line in text.replace("\r", "\n").splitlines():
            if line.strip():
                say(f"  {line}")
        if self._looks % self._every == 0:
            say(f"[{bill}{step_of(text)}]")
        self._looks += 1

    def is_new(self, line: str) -> bool:
        """Return whether `line` differs from the last one passed to `once`."""
        return line != self._last

    def once(self, line: str) -> str:
        """Remember `line` and return it."""
        self._last = line
        return line

    def reset(self) -> None:
        """Forget the last line, so that any next line is printed."""
        self._last = ""


def step_of(text: str) -> str:
    """Return `, step 20/120, left 0:00:42` from the newest step line, or an empty string."""
    found = list(STEP.finditer(text))
    if not found:
        return ""
    step, steps, left = found[-1].groups()
    return f", step {step}/{steps}" + (f", left {left}" if left else "")
