"""Terminal output of a sweep: events line by line, and the current table below them."""

import shutil
import sys
from collections.abc import Sequence

UP_AND_CLEAR = "\x1b[{}F\x1b[0J"  # ECMA-48: cursor previous line (CPL), erase in page (ED)


class Screen:
    """Printer of a sweep's events and table.

    If `is_live`, the table is redrawn in place; else it is printed whenever a point ends.
    """

    def __init__(self, *, is_live: bool) -> None:
        self.is_live = is_live
        self._shown: list[str] = []

    def say(self, *lines: str, warning: bool = False) -> None:
        """Print permanent lines; warnings go to stderr."""
        self._clear()
        print(*lines, sep="\n", file=sys.stderr if warning else sys.stdout, flush=True)
        self._draw()

    def show(self, lines: Sequence[str], *, has_ended: bool) -> None:
        """Show the current table."""
        if self.is_live:
            self._clear()
            width, height = shutil.get_terminal_size()  # lines that wrap or scroll cannot be redrawn
            self._shown = [line[: width - 1] for line in lines[: height - 2]]
            self._draw()
        elif has_ended:
            print(*lines, sep="\n", flush=True)

    def close(self, lines: Sequence[str] = ()) -> None:
        """Clear the live table and print it in full."""
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
