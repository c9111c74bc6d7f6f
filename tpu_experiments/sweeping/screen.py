"""A sweep on the terminal: what happened, line by line, and under it the table as it stands now."""

import shutil
import sys
from collections.abc import Sequence

UP_AND_CLEAR = "\x1b[{}F\x1b[0J"  # ECMA-48 CPL and ED


class Screen:
    """Where `is_live`, the table is drawn over itself; else it is printed when a point has ended."""

    def __init__(self, *, is_live: bool) -> None:
        self.is_live = is_live
        self._shown: list[str] = []

    def say(self, *lines: str, warning: bool = False) -> None:
        """Lines that stay; warnings go to stderr."""
        self._clear()
        print(*lines, sep="\n", file=sys.stderr if warning else sys.stdout, flush=True)
        self._draw()

    def show(self, lines: Sequence[str], *, has_ended: bool) -> None:
        """The table now."""
        if self.is_live:
            self._clear()
            width, height = shutil.get_terminal_size()  # a line that wraps or scrolls away could not be drawn over
            self._shown = [line[: width - 1] for line in lines[: height - 2]]
            self._draw()
        elif has_ended:
            print(*lines, sep="\n", flush=True)

    def close(self, lines: Sequence[str] = ()) -> None:
        """The table stays, whole."""
        self._clear()
        self._shown = []
        if self.is_live and lines:
            print(*lines, sep="\n", flush=True)

    def _clear(self) -> None:
        if self._shown:
            sys.stdout.write(UP_AND_CLEAR.format(len(self._shown)))
            sys.stdout.flush()

    def _draw(self) -> None:
        if self._shown:
            print(*self._shown, sep="\n", flush=True)
