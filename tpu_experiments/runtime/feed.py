"""Prefetching of batches in background threads, in order; the parts of both runtimes' `feed`."""

import itertools
import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
Info = TypeVar("Info")
Tensors = TypeVar("Tensors")


class Prefetcher(Generic[Item]):
    """Iterator whose items are made by a background thread, at most `size` ahead.

    An exception of the underlying iterator is raised to the consumer after the items before it.
    """

    def __init__(self, items: Iterator[Item], *, size: int) -> None:
        self._items, self._size = items, size
        self._ready: deque[Item] = deque()
        self._changed = threading.Condition()
        self._ended = self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fill, name="feed", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
        if self._error is not None:
            raise self._error
        raise StopIteration

    def close(self) -> None:
        """End the thread, after the item that is being made."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def _fill(self) -> None:
        try:
            while self._wait_for_room():
                item = next(self._items)
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
        except StopIteration:
            pass
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) < self._size or self._closed)
            return not self._closed


class Dealer(Generic[Info, Tensors]):
    """Deals the tensors of an iterator of (info, tensors) to several readers in turn; keeps the infos.

    Reader i of n gets the tensors of items i, i + n, ...; items are made one at a time, in order.
    """

    def __init__(self, items: Iterator[tuple[Info, Tensors]], *, num_readers: int) -> None:
        self._items, self._num_readers = items, num_readers
        self._infos: deque[Info] = deque()
        self._turns = itertools.cycle(range(num_readers))
        self._turn = next(self._turns)
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None

    def reader(self, index: int) -> "Reader[Tensors]":
        """Return the iterator over the tensors of reader `index`."""
        return Reader(self, index)

    def deal(self, index: int) -> Tensors:
        """Return the next tensors of reader `index`, blocking until its turn.

        Raises:
            StopIteration: after the last item or an error of the iterator (see `raise_if_early`).
        """
        with self._changed:
            self._changed.wait_for(lambda: self._turn == index or self._ended)
            if self._ended:
                raise StopIteration
            try:
                info, tensors = next(self._items)
            except BaseException as error:
                self._error = None if isinstance(error, StopIteration) else error
                self.end()
                raise StopIteration from error
            self._infos.append(info)
            self._turn = next(self._turns)
            self._changed.notify_all()
            return tensors

    def end(self) -> None:
        """Stop dealing: every reader ends at its next item."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def info(self) -> Info:
        """Return the info of the next item, in order."""
        return self._infos.popleft()

    def raise_if_early(self) -> None:
        """Check, after the last tensors arrived, that no item is missing.

        Raises:
            BaseException: the error that ended the items early.
            RuntimeError: tensors of some items did not arrive.
        """
        if self._error is not None:
            raise self._error
        if self._infos:
            raise RuntimeError(f"{len(self._infos)} batches were assembled and did not arrive on the device.")


class Reader(Generic[Tensors]):
    """Iterator over one reader's share, in the form that torch_xla's loader takes."""

    def __init__(self, dealer: Dealer[Info, Tensors], index: int) -> None:
        self._dealer, self._index = dealer, index

    def __iter__(self) -> Iterator[Tensors]:
        return self

    def __next__(self) -> Tensors:
        return self._dealer.deal(self._index)
