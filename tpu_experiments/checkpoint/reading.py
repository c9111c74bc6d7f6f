"""Reading and verifying the files of a checkpoint; tensors are kept in memory or read one by one.

Only verified bytes are used: a file that is read whole is compared with the manifest, and a tensor that is read by
itself with the checksum taken when its whole file equalled the manifest. Verification reads in pieces of 64 MiB. A
tensor that several hosts have written in pieces is assembled; a reader that needs a part of it reads only the pieces
with elements of that part.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tpu_experiments.checkpoint.manifest import FileFacts, Manifest, foreign_file_error
from tpu_experiments.checkpoint.pieces import (
    Described,
    Piece,
    assembled,
    deal_files,
    piece_of,
    require_tiling,
)
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.runtime.boxes import Box
from tpu_experiments.runtime.processes.hosts import Hosts
from tpu_experiments.storage import paths
from tpu_experiments.storage.paths import read_range, size_of
from tpu_experiments.storage.tensors import (
    Span,
    group_in,
    header_length,
    is_of_host,
    metadata_in,
    spans_in,
    tensors_in,
)

PIECE_BYTES = 64 * 2**20
Groups = Mapping[str, Mapping[str, Tensor]]
Item = TypeVar("Item", bound=Described)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Stored:
    """Location of one tensor in storage, or of a piece of one."""

    place: str
    span: Span
    sha256: str | None = None
    """SHA-256 of its bytes, taken when the whole file was verified; None for a file that was not."""

    @property
    def dtype(self) -> torch.dtype:
        """Return its data type."""
        return self.span.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its sizes."""
        return self.span.shape

    def read(self, name: str) -> Tensor:
        """Read it into new memory.

        Args:
            name: of the tensor, for the message.

        Raises:
            ValueError: its bytes have changed since the file was verified.
        """
        content = read(self.place, self.span.start, self.span.stop)
        if self.sha256 is not None and digest_of(content) != self.sha256:
            raise ValueError(f"{self.place} was changed while it was read: {name} has another SHA-256")
        return self.span.view(content)


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

    def __init__(self, stored: Mapping[str, Sequence[Piece[Stored]]]) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor into new memory.

        Raises:
            ValueError: its bytes have changed since the file was verified.
        """
        pieces = self._stored[name]
        if len(pieces) == 1 and pieces[0].is_whole:
            return pieces[0].item.read(name)
        return self.boxes(name, [Box.whole(pieces[0].shape)])[0]

    def boxes(self, name: str, boxes: Sequence[Box]) -> list[Tensor]:
        """Read boxes of a tensor into new memory, from the pieces that have elements of them; raises as reading one.

        A piece is read once and whole, since its checksum is that of all of its bytes; one is in memory at a time.
        """
        pieces = self._stored[name]
        found = [torch.empty(box.shape, dtype=pieces[0].item.dtype) for box in boxes]
        for piece in pieces:
            overlaps = [piece.box.overlap(box) for box in boxes]
            if not any(overlaps):
                continue
            values = piece.item.read(name)
            for target, box, common in zip(found, boxes, overlaps, strict=True):
                if common is not None:
                    target[common.relative_to(box).slices] = values[common.relative_to(piece.box).slices]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def without_values(self) -> dict[str, Tensor]:
        """Return the tensors on the meta device; nothing is read."""
        return {
            name: torch.empty(pieces[0].shape, dtype=pieces[0].item.dtype, device="meta")
            for name, pieces in self._stored.items()
        }


def boxes_in(tensors: Mapping[str, Tensor], name: str, boxes: Sequence[Box]) -> list[Tensor]:
    """Return boxes of a tensor; where the tensors are in storage, only the pieces with these are read."""
    if isinstance(tensors, StoredTensors):
        return tensors.boxes(name, boxes)
    tensor = tensors[name]
    return [tensor[box.slices] for box in boxes]


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
    groups = _by_group(target, files)
    return {group: {name: assembled(pieces) for name, pieces in found.items()} for group, found in groups.items()}


def lazy_groups(target: str, manifest: Manifest) -> Groups:
    """Return all tensors by group, each read and verified at access; raises as `verify` does."""
    known = _verified.get(target)
    if known is None or not _is_located(target, manifest.text()):
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


def metadata_of(place: str) -> dict[str, str]:
    """Return the texts that a file of tensors has beside them.

    Raises:
        ValueError: it is no safetensors file; the message has the reason.
    """
    num_bytes = size(place)
    length = header_length(read_range(place, 0, min(8, num_bytes)), num_bytes=num_bytes)
    return metadata_in(read(place, 8, 8 + length))


def tensors_below(
    target: str, group: str, *, max_held_bytes: float, left_out: Collection[str] = ()
) -> Mapping[str, Tensor]:
    """Return the tensors of one group of a checkpoint folder, complete or not, without verification.

    A group of more than `max_held_bytes` is not kept in memory: its tensors are read at access.

    Args:
        left_out: names of tensors that are not returned.

    Raises:
        ValueError: a file of the group is no safetensors file.
    """
    names = [name for name in paths.list_names(target) if group_in(name) == group]
    places = {name: paths.join(target, name) for name in names}
    sizes = {name: size(place) for name, place in places.items()}
    if sum(sizes.values()) <= max_held_bytes:
        held = {name: tensors_in(read(place, 0, sizes[name])) for name, place in places.items()}
        found = _by_group(target, held).get(group, {})
        return {name: assembled(pieces) for name, pieces in found.items() if name not in left_out}
    stored = {
        name: {tensor: Stored(place, span) for tensor, span in spans_of(place, num_bytes=sizes[name]).items()}
        for name, place in places.items()
    }
    parts = _by_group(target, stored).get(group, {})
    return StoredTensors({name: pieces for name, pieces in parts.items() if name not in left_out})


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


def verify_with(hosts: Hosts, target: str, read_manifest: Callable[[str], Manifest]) -> Manifest:
    """Verify a checkpoint with all hosts, each a part of its files; a collective with one result on all.

    Later reads of this process verify nothing again.

    Raises:
        ValueError: a file is missing or differs from the manifest, or the hosts see different ones.
        ConfigError: this program cannot have written a file.
    """
    manifest, *others = _on_all(hosts, lambda: read_manifest(target))
    text = manifest.text()
    if any(other.text() != text for other in others):
        raise ValueError("the hosts see different commit records")
    if hosts.any(not _is_located(target, text)):
        files = deal_files({name: facts.num_bytes for name, facts in manifest.files.items()}, num_hosts=hosts.size)
        parts = _on_all(hosts, lambda: _located(target, manifest, files[hosts.rank]))
        _keep(target, manifest, {name: stored for part in parts for name, stored in part.items()})
    return manifest


def _on_all(hosts: Hosts, action: Callable[[], Result]) -> list[Result]:
    """Return the results of an action on all hosts, by rank; a refusal or an incomplete file on one raises on all.

    A host with another error ends, and the others with it (`HostWatch`).

    Raises:
        ConfigError: the action raised it on a host.
        ValueError: a file was missing or incomplete on a host.
    """
    result, refusal, incomplete = None, None, None
    try:
        result = action()
    except ConfigError as error:
        refusal = str(error)
    except (FileNotFoundError, IsADirectoryError, ValueError) as error:
        incomplete = str(error)
    found = hosts.gather((result, refusal, incomplete))
    for _, text, _ in found:
        if text is not None:
            raise ConfigError(text)
    for rank, (_, _, text) in enumerate(found):
        if text is not None:
            raise ValueError(f"{text}, as host {rank} found")
    return [each for each, _, _ in found]


def _located(target: str, manifest: Manifest, names: Iterable[str]) -> dict[str, dict[str, Stored]]:
    """Verify files of a checkpoint and return the locations of their tensors."""
    return {name: locate_verified(target, name, manifest.files[name]) for name in names}


def _locate_all(target: str, manifest: Manifest) -> Verified:
    for name, facts in manifest.files.items():
        require_size(target, name, facts)
    return _keep(target, manifest, _located(target, manifest, manifest.files))


def _keep(target: str, manifest: Manifest, files: Mapping[str, dict[str, Stored]]) -> Verified:
    """Cache the locations of a verified checkpoint's tensors."""
    tensors = {name: files[name] for name in manifest.files if group_in(name) is not None}
    _verified[target] = Verified(digest_of(manifest.text().encode()), tensors)
    return _verified[target]


def _is_located(target: str, text: str) -> bool:
    known = _verified.get(target)
    return known is not None and known.files is not None and known.digest == digest_of(text.encode())


def _by_group(target: str, files: Mapping[str, Mapping[str, Item]]) -> dict[str, dict[str, list[Piece[Item]]]]:
    """Return the pieces of each group's tensors by name; of files of one process each tensor is a whole piece.

    Raises:
        ConfigError: the pieces of a tensor are not one tensor, or it is in two files.
    """
    groups: dict[str, dict[str, list[Piece[Item]]]] = {}
    for name, items in files.items():
        group = groups.setdefault(group_in(name) or name, {})
        if not is_of_host(name):
            twice = group.keys() & items.keys()
            if twice:
                raise foreign_file_error(paths.join(target, name), f"{min(twice)} is in another file as well")
            group |= {tensor: [Piece.whole(item)] for tensor, item in items.items()}
            continue
        try:
            for entry, item in items.items():
                tensor, piece = piece_of(entry, item)
                group.setdefault(tensor, []).append(piece)
        except ValueError as error:
            raise foreign_file_error(paths.join(target, name), str(error)) from error
    for group_name, tensors in groups.items():
        for tensor, pieces in tensors.items():
            try:
                require_tiling(tensor, pieces)
            except ValueError as error:
                raise foreign_file_error(f"{target} ({group_name})", str(error)) from error
    return groups


def _pieces(place: str, start: int, stop: int) -> Iterable[bytes]:
    for at in range(start, stop, PIECE_BYTES):
        yield read_range(place, at, min(at + PIECE_BYTES, stop))


def _require_digest(name: str, digest: str, facts: FileFacts) -> None:
    if digest != facts.sha256:
        raise ValueError(f"{name} differs from its commit record: another SHA-256")
