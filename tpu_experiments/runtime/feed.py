"""Batches assembled ahead in another thread, in their order; what either runtime's feed is made of."""

import itertools
import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
Info = TypeVar("Info")
Tensors = TypeVar("Tensors")


class Ahead(Generic[Item]):
    """The items of an iterator, made by a background thread at most `size` ahead.

    An exception of the iterator is raised here, after the items before it.
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
        """End the thread; waits for the item that is being made."""
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
    """One iterator of (info, tensors) dealt out to several readers in turn; the infos stay here.

    Reader i of n gets the tensors of items i, i + n, ...; items are made one at a time, in their order.
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
        """What reader `index` gets."""
        return Reader(self, index)

    def deal(self, index: int) -> Tensors:
        """The next tensors of reader `index`, once it is its turn; StopIteration after the last or an error."""
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
        """Deal no more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def info(self) -> Info:
        """The info of the next item, in their order."""
        return self._infos.popleft()

    def raise_if_early(self) -> None:
        """After the last tensors arrived: raise what ended the items early, or that some were lost on their way."""
        if self._error is not None:
            raise self._error
        if self._infos:
            raise RuntimeError(f"{len(self._infos)} batches were assembled and did not arrive on the device.")


class Reader(Generic[Tensors]):
    """An iterable for torch_xla's loader."""

    def __init__(self, dealer: Dealer[Info, Tensors], index: int) -> None:
        self._dealer, self._index = dealer, index

    def __iter__(self) -> Iterator[Tensors]:
        return self

    def __next__(self) -> Tensors:
        return self._dealer.deal(self._index)
