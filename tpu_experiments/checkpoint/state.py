"""Trained tensors and optimizer state: copied from the device for a checkpoint, and restored from one.

On the device, equal layers may be folded into stacks; in a checkpoint every tensor has its Hugging Face name. Of
tensors that are sharded over several hosts, each host copies and writes only boxes that its own devices hold, and reads
only those that they need.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tpu_experiments.checkpoint.manifest import PROGRESS, folder_name
from tpu_experiments.checkpoint.pieces import Boxes, dealt, entry_name, parts_of
from tpu_experiments.checkpoint.progress import Progress
from tpu_experiments.checkpoint.reading import Groups, boxes_in, without_values
from tpu_experiments.checkpoint.store import read_latest
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.models.sources.build import return_freed_memory
from tpu_experiments.optim.base import State
from tpu_experiments.optim.ema import LAG
from tpu_experiments.optim.updates import Updates
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.runtime.boxes import Box
from tpu_experiments.runtime.host_copies import host_copy
from tpu_experiments.runtime.ops import PlaceTensor
from tpu_experiments.runtime.stacked import hugging_face_names, is_stack, stacked, unstacked
from tpu_experiments.storage import paths
from tpu_experiments.storage.tensors import described, file_name, require_finite, shards

PARAMETERS, OPTIMIZER = "parameters", "optimizer"
BoxesOf = Callable[[Tensor], Sequence[Box]]
"""Returns the boxes of a placed tensor that this process's devices hold."""


@dataclass(frozen=True)
class HostPieces:
    """What one of several hosts writes of a state."""

    host: tuple[int, int]
    """Rank of the host, and the number of hosts."""
    boxes: dict[str, Boxes]
    """Boxes of every device tensor that it writes, by group."""
    copy: Callable[[Tensor, Sequence[Box]], list[Tensor]]
    """Copies boxes of a device tensor to the host."""

    def on_host(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return host copies of this host's boxes of some tensors of a group, by the names that files have for them."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            own = self.boxes[group].get(name, ())
            for box, values in zip(own, self.copy(tensor, own), strict=True):
                for part, shape, inner, layer in parts_of(name, tensor.shape, box):
                    found[entry_name(part, inner, shape)] = values if layer is None else values[layer - box.start[0]]
        return found

    def sizes(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the bytes of `on_host` by name; nothing is copied."""
        return {
            entry_name(part, inner, shape): inner.num_elements * tensor.element_size()
            for name, tensor in tensors.items()
            for box in self.boxes[group].get(name, ())
            for part, shape, inner, _ in parts_of(name, tensor.shape, box)
        }


@dataclass(frozen=True)
class Snapshot:
    """Everything that a step changes, as of one step: on the device, or copied to host memory."""

    progress: Progress
    groups: dict[str, dict[str, Tensor]]
    """`optimizer` and `parameters`, written in this order."""
    is_copy: bool = False
    """Whether the tensors are host copies under the names that files have, which later steps do not change."""
    pieces: HostPieces | None = None
    """What this host writes of the tensors; None if one process writes them whole."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors, or of what this host writes of them."""
        return sum(sum(self._sizes(group, tensors).values()) for group, tensors in self.groups.items())

    def copied(self) -> "Snapshot":
        """Return a copy of all tensors in host memory, or of what this host writes of them; waits for the device."""
        groups = {group: self._on_host(group, tensors) for group, tensors in self.groups.items()}
        return Snapshot(self.progress, groups, is_copy=True, pieces=self.pieces)

    def _on_host(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return to_host(tensors) if self.pieces is None else self.pieces.on_host(group, tensors)

    def _sizes(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Return bytes by the names that files have."""
        if self.pieces is None or self.is_copy:
            return _sizes(tensors)
        return self.pieces.sizes(group, tensors)

    def files(self, group: str, *, max_bytes: float) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield name and host tensors of each file of a group, of at most `max_bytes` or one tensor.

        Device tensors are copied when their file is requested: at a time as many as `max_bytes` hold, at least one,
        which may be a stack over layers and have several files.
        """
        tensors = self.groups[group]
        own = {name: sizes for name, t in tensors.items() if (sizes := self._sizes(group, {name: t}))}
        loads = shards({name: sum(sizes.values()) for name, sizes in own.items()}, max_bytes=max_bytes)
        files = [
            shards(self._sizes(group, {name: tensors[name] for name in load}), max_bytes=max_bytes) for load in loads
        ]
        host = None if self.pieces is None else self.pieces.host
        number, count = 0, sum(map(len, files))
        for load, parts in zip(loads, files, strict=True):
            chosen = {name: tensors[name] for name in load}
            copies = chosen if self.is_copy else self._on_host(group, chosen)
            return_freed_memory()  # the device copy leaves up to half of its size with the allocator
            for names in parts:
                number += 1
                yield file_name(group, number, count, host=host), {name: copies[name] for name in names}
            del copies  # free before the next copy is made


def zero_state(updates: Updates, parameters: Mapping[str, Tensor], *, zeros: Callable[..., Tensor]) -> State:
    """Return initial optimizer state, each slot created by `zeros(shape, name=, dtype=)`."""
    shapes = {name: torch.empty(p.shape, device="meta") for name, p in parameters.items()}
    return {
        name: {slot: zeros(t.shape, name=f"{name}/{slot}", dtype=t.dtype) for slot, t in slots.items()}
        for name, slots in updates.init(shapes).items()
    }


def snapshot(progress: Progress, *, parameters: Mapping[str, Tensor], state: State) -> Snapshot:
    """Return what the next step will change, uncopied; copy or write it before that step."""
    return Snapshot(copy.deepcopy(progress), {OPTIMIZER: flat(state), PARAMETERS: dict(parameters)})


def divided(state: Snapshot, runtime: Runtime) -> Snapshot:
    """Return the state with what this host writes of it, where a tensor is sharded and there are several hosts.

    Otherwise the state as it is, which rank 0 writes. A collective of the hosts.
    """
    if not any(are_sharded_over_hosts(tensors, runtime) for tensors in state.groups.values()):
        return state
    own = {group: {name: runtime.boxes(t) for name, t in tensors.items()} for group, tensors in state.groups.items()}
    held, rank, loads = runtime.hosts.gather(own), runtime.hosts.rank, [0] * runtime.hosts.size
    boxes: dict[str, Boxes] = {
        group: dealt([each[group] for each in held], tensors, loads=loads)[rank]
        for group, tensors in state.groups.items()
    }
    return replace(state, pieces=HostPieces((rank, runtime.hosts.size), boxes, runtime.copy_boxes))


def are_sharded_over_hosts(tensors: Mapping[str, Tensor], runtime: Runtime) -> bool:
    """Return whether there are several hosts and one of the placed tensors is sharded; the same on every host."""
    if runtime.hosts.size == 1:
        return False
    return any(not box.is_whole(tensor.shape) for tensor in tensors.values() for box in runtime.boxes(tensor))


def boxes_needed(runtime: Runtime) -> BoxesOf | None:
    """Return what gives the boxes of a tensor that this host reads; None where a single host reads whole tensors."""
    return runtime.boxes if runtime.hosts.size > 1 else None


def read_state(
    folder: str,
    *,
    parameters: dict[str, Tensor],
    state: State,
    place: PlaceTensor,
    order: Sequence[str] = (),
    stages: Mapping[str, int] | None = None,
    before: int | None = None,
    max_held_bytes: float = math.inf,
    boxes: BoxesOf | None = None,
) -> Progress | None:
    """Restore the newest complete checkpoint (of a step below `before`) into the run's tensors.

    Returns None if there is none. One above `max_held_bytes` is read tensor by tensor (of a stack over layers all
    parts), after every byte of it was verified against its manifest.

    Args:
        order: names of the parameters in the order to place them, which a traced program depends on
            (`BuiltModel.order`); by default theirs.
        stages: steps of each stage of the curriculum by name, in order; None does not check the position.
        max_held_bytes: bytes above which the checkpoint is not held in memory as a whole.
        boxes: gives the boxes of each of the run's tensors that this process needs, on one of several hosts; None reads
            whole tensors.

    Raises:
        ConfigError: the checkpoint has other tensors than the run, NaN or infinite values, or a position that does not
            exist in this curriculum; or it changed during the read.
    """
    begun: list[int] = []

    def restore(values: dict[str, Any], groups: Groups) -> Progress:
        progress = progress_of(values, folder=folder, stages=stages)
        target = paths.join(folder, folder_name(progress.step))
        shapes = {PARAMETERS: shapes_of(parameters), OPTIMIZER: shapes_of(flat(state))}
        for group, expected in shapes.items():
            found = without_values(groups.get(group, {}))
            require_tensors(found, expected, place=paths.join(target, f"{group}.safetensors"))
        begun.append(progress.step)
        place_on_device(
            groups, parameters=parameters, state=state, place=place, order=order, source=target, boxes=boxes
        )
        return progress

    found = read_latest(folder, restore, before=before, max_held_bytes=max_held_bytes if boxes is None else 0)
    if found is None and begun:
        raise ConfigError(
            f"{folder}; the checkpoint of step {begun[-1]} was changed while it was read, and there is none before it; "
            "find out what else writes there, then start again."
        )
    return found


def newest_parameters(folder: str, *, max_held_bytes: float) -> tuple[int, Mapping[str, Tensor]] | None:
    """Return step and trained tensors of the newest complete checkpoint, or None; averages where the run keeps them.

    The tensors of a checkpoint above `max_held_bytes` are read one by one, when they are accessed.
    """

    def restore(progress: dict[str, Any], groups: Groups) -> tuple[int, Mapping[str, Tensor]]:
        return progress_of(progress, folder=folder).step, averaged(groups)

    return read_latest(folder, restore, max_held_bytes=max_held_bytes)


def averaged(groups: Groups) -> Mapping[str, Tensor]:
    """Return a checkpoint's parameters, or their averages where its run keeps such (optim/ema.py)."""
    parameters, slots = groups.get(PARAMETERS, {}), groups.get(OPTIMIZER, {})
    return _Averaged(parameters, slots) if any(name.endswith(f"/{LAG}") for name in slots) else parameters


class _Averaged(Mapping[str, Tensor]):
    """View of the averages of a checkpoint's parameters, computed when one is accessed."""

    def __init__(self, parameters: Mapping[str, Tensor], slots: Mapping[str, Tensor]) -> None:
        self._parameters, self._slots = parameters, slots

    def __getitem__(self, name: str) -> Tensor:
        return self._parameters[name] + self._slots[f"{name}/{LAG}"]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def flat(state: State) -> dict[str, Tensor]:
    """Return optimizer state by `<parameter>/<slot>`."""
    return {f"{name}/{slot}": t for name, slots in state.items() for slot, t in slots.items()}


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous copies on the host, under Hugging Face's names; host tensors are copied too."""
    copies = {name: host_copy(t) for name, t in tensors.items()}
    return {name: t.contiguous() for name, t in unstacked(copies).items()}


def to_host_one_by_one(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield as `to_host`, in the order of `shapes_of`, copying one device tensor at a time."""
    for name, tensor in tensors.items():
        yield from to_host({name: tensor}).items()


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return meta tensors with the dtypes and shapes of a checkpoint, under Hugging Face's names."""
    return {
        part: torch.empty(t.shape[1:] if is_stack(name) else t.shape, dtype=t.dtype, device="meta")
        for name, t in tensors.items()
        for part in hugging_face_names(name)
    }


ADVICE = "it is the checkpoint of another run, or was changed; choose another name=, or remove that checkpoint."


def require_tensors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, place: str, advice: str = ADVICE
) -> None:
    """Compare a checkpoint's tensors with those of this run, by name, type and shape.

    Args:
        advice: how to fix a difference, appended to the error message.

    Raises:
        ConfigError: they differ; the first one is named with both shapes.
    """
    missing, extra = _missing(expected, found), _missing(found, expected)
    if missing or extra:
        raise ConfigError(
            f"{place}; it lacks {len(missing)} tensors of this run{_first(missing)} and has {len(extra)} that this run "
            f"has not{_first(extra)}; {advice}"
        )
    for name, tensor in expected.items():
        if described(found[name]) != described(tensor):
            raise ConfigError(f"{place}; {name} is {described(found[name])}, and {described(tensor)} here; {advice}")


def place_on_device(
    groups: Mapping[str, Mapping[str, Tensor]],
    *,
    parameters: dict[str, Tensor],
    state: State,
    place: PlaceTensor,
    order: Sequence[str],
    source: str,
    boxes: BoxesOf | None = None,
) -> None:
    """Place a checkpoint's tensors as the run's own, `parameters` before `optimizer`.

    `source` is the checkpoint's folder, `order` that of the parameters, `boxes` as for `read_state`.

    Raises:
        ConfigError: a tensor holds NaN or infinite values.
    """

    def placed(group: str, name: str, now: Tensor) -> Tensor:
        own = None if boxes is None else boxes(now)
        tensor, parts = with_boxes(groups[group], name, now, boxes=own)
        for part in parts:
            require_finite(part, name=f"{group} {name}", place=source)
        return place(tensor, name=name)

    for name in order or tuple(parameters):
        parameters[name] = placed(PARAMETERS, name, parameters[name])
    for name, slots in state.items():
        for slot in slots:
            slots[slot] = placed(OPTIMIZER, f"{name}/{slot}", slots[slot])


def with_boxes(
    tensors: Mapping[str, Tensor], name: str, like: Tensor, *, boxes: Sequence[Box] | None
) -> tuple[Tensor, list[Tensor]]:
    """Return the host tensor `name`, a stack or not, from tensors under Hugging Face's names, and its known parts.

    With `boxes` only these are read. The rest of the tensor's memory is left untouched, so that the operating system
    provides none for it, and must not be used.

    Args:
        like: a tensor of the same shape.
    """
    if boxes is None or any(box.is_whole(like.shape) for box in boxes):
        whole = stacked(tensors, name)
        return whole, [whole]
    wanted: dict[tuple[str, int | None], list[Box]] = {}
    for box in boxes:
        for part, _, inner, layer in parts_of(name, like.shape, box):
            wanted.setdefault((part, layer), []).append(inner)
    tensor, parts = torch.empty(like.shape, dtype=like.dtype), []
    for (part, layer), own in wanted.items():
        target = tensor if layer is None else tensor[layer]
        for box, values in zip(own, boxes_in(tensors, part, own), strict=True):
            target[box.slices] = values
            parts.append(target[box.slices])
    return tensor, parts


def progress_of(values: Mapping[str, Any], *, folder: str, stages: Mapping[str, int] | None = None) -> Progress:
    """Parse progress.json of a checkpoint in `folder`.

    Args:
        stages: as for `read_state`.

    Raises:
        ConfigError: the values are invalid, or are not a position in these stages.
    """
    try:
        progress = Progress.from_dict(values)
        if stages is not None:
            progress.require_stages(stages)
    except ValueError as error:
        step = values.get("step")
        target = paths.join(folder, folder_name(step)) if type(step) is int and step >= 0 else folder
        raise ConfigError(
            f"{paths.join(target, PROGRESS)}; {error}, where no run of this config is: it is from another version of "
            "this program, or was changed; remove that checkpoint's folder to resume from the one before, or choose "
            "another name=."
        ) from error
    return progress


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return bytes by Hugging Face's names, the parts of a stack in order."""
    return {
        part: t.nbytes // len(parts)
        for name, t in tensors.items()
        for parts in [hugging_face_names(name)]
        for part in parts
    }


def _missing(names: Iterable[str], present: Mapping[str, Tensor]) -> list[str]:
    return [name for name in names if name not in present]


def _first(names: list[str]) -> str:
    return f" (first {names[0][:200]})" if names else ""
