"""What the user sees of a run: its log as it grows, and now and then a line of state and money."""

import re
from collections.abc import Callable

STEP = re.compile(r"step +(\d+)/(\d+).*?(?:left (\S+))?\s*$", re.MULTILINE)


class Progress:
    """Lines already said are not said again."""

    def __init__(self, every: int = 15) -> None:
        self._every = every
        self._looks = 0
        self._last = ""

    def show(self, text: str, *, bill: str, say: Callable[[str], None]) -> None:
        """The new lines of the log; every 15th look the bill, with the newest step."""
        for line in text.replace("\r", "\n").splitlines():
            if line.strip():
                say(f"  {line}")
        if self._looks % self._every == 0:
            say(f"[{bill}{step_of(text)}]")
        self._looks += 1

    def is_new(self, line: str) -> bool:
        """Whether `line` differs from the last that `once` took."""
        return line != self._last

    def once(self, line: str) -> str:
        """The line, remembered."""
        self._last = line
        return line

    def reset(self) -> None:
        """The next line is said whatever it is."""
        self._last = ""


def step_of(text: str) -> str:
    """`, step 20/120, left 0:00:42` of the newest step line; empty where there is none."""
    found = list(STEP.finditer(text))
    if not found:
        return ""
    step, steps, left = found[-1].groups()
    return f", step {step}/{steps}" + (f", left {left}" if left else "")
