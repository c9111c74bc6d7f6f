"""Signatures of a program's inputs, names, shapes and types, and a description of how two differ."""

from collections.abc import Collection, Mapping

from torch import Tensor

Shape = tuple[int, ...]
Signature = tuple[tuple[str, Shape, str], ...]
"""(name, shape, dtype) of every tensor of a batch, in its order."""


def signature_of(batch: Mapping[str, Tensor]) -> Signature:
    """Return the signature of a batch."""
    return tuple((name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in batch.items())


def leading_shape(signature: Signature) -> Shape:
    """Return the shape of the first tensor, the token ids, which distinguishes the programs of a run."""
    return signature[0][1] if signature else ()


def shape_text(shape: Shape) -> str:
    """Format a shape as `1 x 16 x 128`; a scalar's is `()`."""
    return " x ".join(map(str, shape)) or "()"


def signature_text(signature: Signature) -> str:
    """Format a signature, grouped by shape and type: `ids, learn 1 x 16 x 128 int32; lr 1 float32`."""
    names: dict[str, list[str]] = {}
    for name, shape, dtype in signature:
        names.setdefault(f"{shape_text(shape)} {dtype}", []).append(name)
    return "; ".join(f"{', '.join(group)} {kind}" for kind, group in names.items())


def difference(now: Signature, *, seen: Collection[Signature], expected: Collection[Shape]) -> str:
    """Describe the inputs that differ from the nearest signature seen so far, with both shapes.

    Where none was seen, compare the shape of the first input with the expected ones.
    """
    if not seen:
        name, shape, _ = now[0]
        return f"{name} is {shape_text(shape)}, not {' or '.join(sorted(map(shape_text, expected)))}"
    before = min(seen, key=lambda one: len(set(one) ^ set(now)))
    old, new = ({name: f"{shape_text(shape)} {dtype}" for name, shape, dtype in one} for one in (before, now))
    changes: dict[str, list[str]] = {}
    for name in {**new, **old}:
        if old.get(name) != new.get(name):
            was_is = f"{old.get(name, 'not there')} and is {new.get(name, 'missing')}"
            changes.setdefault(was_is, []).append(name)
    shown = "; ".join(f"{', '.join(names)} was {was_is}" for was_is, names in changes.items())
    return shown or "its inputs come in another order"
