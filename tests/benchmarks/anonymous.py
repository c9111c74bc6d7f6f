"""Anonymous memory of a process, which leaves out mapped files: they come and go with the page cache."""

import threading
from pathlib import Path


def anonymous_mib(pid: int | str = "self") -> float:
    """Return the anonymous memory of a process; 0 where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("RssAnon")), 0.0)


class Peak:
    """The most anonymous memory of this process since it was made, looked at every 20 ms by a thread."""

    def __init__(self) -> None:
        self.mib, self._done = anonymous_mib(), threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.mib = max(self.mib, anonymous_mib())

    def end(self) -> float:
        """Stop looking; return MiB."""
        self._done.set()
        return self.mib
