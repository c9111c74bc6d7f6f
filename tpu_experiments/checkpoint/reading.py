"""Reading and verifying the files of a checkpoint; tensors are kept in memory or read one by one.

Only verified bytes are used: a file that is read whole is compared with the manifest, and a tensor that is read by
itself with the checksum taken when its whole file equalled the manifest. Verification reads in pieces of 64 MiB.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from tpu_experiments.checkpoint.manifest import FileFacts, Manifest, foreign_file_error
from tpu_experiments.storage import paths
from tpu_experiments.storage.paths import read_range, size_of
from tpu_experiments.storage.tensors import Span, group_in, header_length, spans_in, tensors_in

PIECE_BYTES = 64 * 2**20
Groups = Mapping[str, Mapping[str, Tensor]]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Stored:
    """Location of one tensor in storage."""

    place: str
    span: Span
    sha256: str | None = None
    """SHA-256 of its bytes, taken when the whole file was verified; None for a file that was not."""


@dataclass(frozen=True)
class Verified:
    """Cached verification of a checkpoint that this process has read whole, or written and read back."""

    digest: str
    """SHA-256 of the manifest's text."""
    files: dict[str, dict[str, Stored]] | None = None
    """Locations of the tensors of each file; None for a checkpoint that was read back right after it was written."""


_verified: dict[str, Verified] = {}
"""Cached verifications by checkpoint folder."""


class StoredTensors(Mapping[str, Tensor]):
    """Tensors by name, read from storage at every access."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor into new memory.

        Raises:
            ValueError: its bytes have changed since the file was verified.
        """
        stored = self._stored[name]
        content = read(stored.place, stored.span.start, stored.span.stop)
        if stored.sha256 is not None and digest_of(content) != stored.sha256:
            raise ValueError(f"{stored.place} was changed while it was read: {name} has another SHA-256")
        return stored.span.view(content)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def without_values(self) -> dict[str, Tensor]:
        """Return the tensors on the meta device; nothing is read."""
        return {name: stored.span.on_meta() for name, stored in self._stored.items()}


def without_values(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors for callers that need types and shapes only; nothing is read from storage."""
    return tensors.without_values() if isinstance(tensors, StoredTensors) else tensors


def verify(target: str, manifest: Manifest) -> None:
    """Verify all files of a checkpoint against its manifest, sizes first; once per process.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file differs from the manifest.
        ConfigError: a file equals the manifest but cannot have been written by this program.
    """
    known = _verified.get(target)
    if known is None or known.digest != digest_of(manifest.text().encode()):
        _locate_all(target, manifest)


def remember(target: str, text: str) -> None:
    """Cache that a checkpoint with this manifest text was read back and equalled what was written."""
    _verified[target] = Verified(digest_of(text.encode()))


def forget(target: str) -> None:
    """Drop the cached verification of a checkpoint."""
    _verified.pop(target, None)


def read_groups(target: str, manifest: Manifest) -> Groups:
    """Read all tensors into memory, by group, verifying each file as it is read; raises as `verify` does."""
    files = {}
    for name, facts in manifest.files.items():
        if group_in(name) is not None:
            content = content_of(target, name, facts)
            try:
                files[name] = tensors_in(content)
            except ValueError as error:
                raise foreign_file_error(paths.join(target, name), str(error)) from error
    return _by_group(target, files)


def lazy_groups(target: str, manifest: Manifest) -> Groups:
    """Return all tensors by group, each read and verified at access; raises as `verify` does."""
    known = _verified.get(target)
    if known is None or known.files is None or known.digest != digest_of(manifest.text().encode()):
        known = _locate_all(target, manifest)
    return {group: StoredTensors(stored) for group, stored in _by_group(target, known.files or {}).items()}


def locate_verified(target: str, name: str, facts: FileFacts) -> dict[str, Stored]:
    """Verify a file, piece by piece, and return the locations of its tensors with a checksum for each.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it differs from the manifest.
        ConfigError: it equals the manifest but is no safetensors file.
    """
    require_size(target, name, facts)
    place, complaint = paths.join(target, name), None
    spans: dict[str, Span] = {}
    try:
        spans = spans_of(place, num_bytes=facts.num_bytes) if group_in(name) is not None else {}
    except ValueError as error:
        complaint = error
    whole, at = hashlib.sha256(), 0
    digests = {tensor: hashlib.sha256() for tensor in spans}
    for piece in _pieces(place, 0, facts.num_bytes):
        whole.update(piece)
        for tensor, span in spans.items():
            if span.start < at + len(piece) and span.stop > at:
                digests[tensor].update(memoryview(piece)[max(0, span.start - at) : span.stop - at])
        at += len(piece)
    _require_digest(name, whole.hexdigest(), facts)
    if complaint is not None:
        raise foreign_file_error(place, str(complaint)) from complaint
    return {tensor: Stored(place, span, digests[tensor].hexdigest()) for tensor, span in spans.items()}


def spans_of(place: str, *, num_bytes: int) -> dict[str, Span]:
    """Return the byte ranges, types and shapes of a file's tensors, from its header alone.

    Raises:
        ValueError: it is no safetensors file; the message has the reason.
    """
    length = header_length(read_range(place, 0, min(8, num_bytes)), num_bytes=num_bytes)
    return spans_in(read(place, 8, 8 + length), num_bytes=num_bytes)


def tensors_below(target: str, group: str, *, max_held_bytes: float) -> Mapping[str, Tensor]:
    """Return the tensors of one group of a checkpoint folder, complete or not, without verification.

    A group of more than `max_held_bytes` is not kept in memory: its tensors are read at access.

    Raises:
        ValueError: a file of the group is no safetensors file.
    """
    places = [paths.join(target, name) for name in paths.list_names(target) if group_in(name) == group]
    sizes = {place: size(place) for place in places}
    if sum(sizes.values()) <= max_held_bytes:
        return {name: t for place in places for name, t in tensors_in(read(place, 0, sizes[place])).items()}
    spans = ((place, name, span) for place in places for name, span in spans_of(place, num_bytes=sizes[place]).items())
    return StoredTensors({name: Stored(place, span) for place, name, span in spans})


def content_of(target: str, name: str, facts: FileFacts) -> bytearray:
    """Read a file whole and verify it against the manifest.

    Raises:
        FileNotFoundError: there is none.
        ValueError: its size or SHA-256 differs.
    """
    require_size(target, name, facts)
    content = read(paths.join(target, name), 0, facts.num_bytes)
    _require_digest(name, digest_of(content), facts)
    return content


def require_size(target: str, name: str, facts: FileFacts) -> None:
    """Compare a file's size with the manifest.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the size differs.
    """
    found = size(paths.join(target, name))
    if found != facts.num_bytes:
        raise ValueError(f"{name} differs from its commit record: {found:,} bytes, not {facts.num_bytes:,}")


def size(place: str) -> int:
    """Return the size of a file in bytes.

    Raises:
        FileNotFoundError: there is none.
    """
    found = size_of(place)
    if found is None:
        raise FileNotFoundError(f"{place} is missing")
    return found


def read(place: str, start: int, stop: int) -> bytearray:
    """Read bytes `start` to `stop` of a file, in pieces, so that memory holds them once (plus 64 MiB)."""
    content = bytearray(stop - start)
    at = 0
    for piece in _pieces(place, start, stop):
        content[at : at + len(piece)] = piece
        at += len(piece)
    return content


def digest_of(content: bytes | bytearray) -> str:
    """Return the SHA-256 as hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def _locate_all(target: str, manifest: Manifest) -> Verified:
    for name, facts in manifest.files.items():
        require_size(target, name, facts)
    files = {name: locate_verified(target, name, facts) for name, facts in manifest.files.items()}
    tensors = {name: stored for name, stored in files.items() if group_in(name) is not None}
    _verified[target] = Verified(digest_of(manifest.text().encode()), tensors)
    return _verified[target]


def _by_group(target: str, files: Mapping[str, Mapping[str, Item]]) -> dict[str, dict[str, Item]]:
    """Merge the tensors of each group's files."""
    groups: dict[str, dict[str, Item]] = {}
    for name, items in files.items():
        group = groups.setdefault(group_in(name) or name, {})
        twice = group.keys() & items.keys()
        if twice:
            raise foreign_file_error(paths.join(target, name), f"{min(twice)} is in another file as well")
        group |= items
    return groups


def _pieces(place: str, start: int, stop: int) -> Iterable[bytes]:
    for at in range(start, stop, PIECE_BYTES):
        yield read_range(place, at, min(at + PIECE_BYTES, stop))


def _require_digest(name: str, digest: str, facts: FileFacts) -> None:
    if digest != facts.sha256:
        raise ValueError(f"{name} differs from its commit record: another SHA-256")
