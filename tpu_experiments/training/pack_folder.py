"""The folder, local to one machine, by which a sweep and the process of a pack (tasks/pack.py) talk."""

import json
from collections.abc import Sequence
from pathlib import Path

POINTS, ENDED, DROPPED = "points.json", "ended.jsonl", "dropped"


class PackFolder:
    """Command lines of a pack's runs, their exit codes as they end, and requests that one of them end."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def write(self, commands: Sequence[Sequence[str]]) -> None:
        """Write the command lines of the runs."""
        (self.folder / DROPPED).mkdir(parents=True, exist_ok=True)
        (self.folder / POINTS).write_text(json.dumps(commands))

    def commands(self) -> list[list[str]]:
        """Return the command lines of the runs."""
        found: list[list[str]] = json.loads((self.folder / POINTS).read_text())
        return found

    def end(self, name: str, code: int) -> None:
        """Note that a run has ended, with the exit code that it would have had as a process of its own."""
        with (self.folder / ENDED).open("a") as file:
            file.write(json.dumps([name, code]) + "\n")

    def codes(self) -> dict[str, int]:
        """Return the exit codes of the runs that have ended."""
        file = self.folder / ENDED
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return dict(json.loads(line) for line in lines)

    def drop(self, name: str) -> None:
        """Ask a run to save and end, without the others."""
        (self.folder / DROPPED / name).touch()

    def is_dropped(self, name: str) -> bool:
        """Return whether a run was asked to end by itself."""
        return (self.folder / DROPPED / name).exists()
