"""Peak resident memory of this process and all its descendants in total."""

import contextlib
import threading

import psutil

GIB = 2**30
INTERVAL_SECONDS = 1.0  # reading the page tables takes some 20 ms a GiB


class PeakMemory:
    """Context that samples memory in use as proportional set size (PSS).

    A page that n processes share counts as 1/n for each.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak_memory", daemon=True)

    @property
    def gib(self) -> float:
        """Largest sum seen so far, in GiB."""
        return self.peak_bytes / GIB

    def __enter__(self) -> "PeakMemory":
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            self._sample()

    def _sample(self) -> None:
        me = psutil.Process()
        total = 0
        for process in [me, *me.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().pss
        self.peak_bytes = max(self.peak_bytes, total)
