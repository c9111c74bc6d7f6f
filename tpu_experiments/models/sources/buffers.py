"""Buffers of a model, and tensors that its modules keep as attributes: computed, or read from the checkpoint.

A model is built on the meta device. What a checkpoint does not hold (RoPE's frequencies, masks) is computed on the
host as transformers' from_pretrained does it. What it holds beside the parameters, the persistent buffers, is read:
biases of routers, scalars of layers, Apertus' beta. Their initial values are those of an untrained model, or none."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tpu_experiments.config.errors import ConfigError


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint holds, by name."""
    held = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name in held}


def shapes_of_buffers(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return empty tensors of torch's class Buffer on the meta device, by which writers know buffers."""
    return {name: nn.Buffer(torch.empty_like(buffer, device="meta")) for name, buffer in buffers.items()}


def put_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a buffer of a module, by its name in it."""
    owner, _, leaf = name.rpartition(".")
    module.get_submodule(owner)._buffers[leaf] = value


def compute_buffers(module: PreTrainedModel) -> set[str]:
    """Compute a module's buffers on the host by transformers' own initialisation; parameters are left alone.

    Returns:
        Names of buffers that it does not set, which are zero.
    """
    for parameter in module.parameters():
        parameter._is_hf_initialized = True  # transformers' mark: do not touch
    ones = _computed(module, start=1)  # twice: what keeps the value that it had before was not set
    zeros = _computed(module, start=0)
    return {name for name, value in zeros.items() if not torch.equal(value, ones[name])}


def _computed(module: PreTrainedModel, *, start: int) -> dict[str, Tensor]:
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.full_like(buffer, start, device="cpu")
        part._is_hf_initialized = next(part.buffers(), None) is None  # a class may set those of its parts (Falcon H1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module.initialize_weights()
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def keep_made_tensors(module: nn.Module, rehearse: Callable[[], None]) -> None:
    """Run a forward pass on the meta device, and make buffers of the tensors that modules keep from it.

    Modules are left as they were before it: Phi-3's RoPE keeps its frequencies for long rows as an attribute, and
    others replace buffers. The tensors are computed by calling such a module alone on the host.

    Raises:
        ConfigError: a module keeps tensors that depend on weights.
    """
    calls: dict[nn.Module, tuple[Any, Any]] = {}

    def note(part: nn.Module, inputs: Any, keywords: Any) -> None:
        calls[part] = (inputs, keywords)

    parts = dict(module.named_modules())
    before = {path: (dict(vars(part)), dict(part._buffers)) for path, part in parts.items()}
    hooks = [part.register_forward_pre_hook(note, with_kwargs=True) for part in parts.values()]
    try:
        rehearse()
    finally:
        for hook in hooks:
            hook.remove()
        made = {path: set(_tensors_of(part)) - set(before[path][0]) for path, part in parts.items()}
        for path, (attributes, buffers) in before.items():
            own = parts[path]
            own.__dict__.clear()
            own.__dict__.update(attributes)
            own._buffers.clear()
            own._buffers.update(buffers)
    for path, names in made.items():
        if names:
            kept = _kept_by(parts[path], *calls[parts[path]])
            for name in names & kept.keys():
                parts[path].register_buffer(name, kept[name], persistent=False)


def _kept_by(part: nn.Module, inputs: Any, keywords: Any) -> dict[str, Tensor]:
    """Call a copy of a module on the host, with ones as its inputs, and return the tensors that it keeps."""
    if any(p.is_meta for p in part.parameters()):
        return {}
    own = copy.deepcopy(part)
    with torch.no_grad():
        own(*_on_host(inputs), **_on_host(keywords))
    return _tensors_of(own)


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.ones_like(value, device="cpu")
    if isinstance(value, dict):
        return {key: _on_host(each) for key, each in value.items()}
    return tuple(map(_on_host, value)) if isinstance(value, tuple) else value


def _tensors_of(part: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in vars(part).items() if isinstance(value, Tensor)}


def require_values(module: nn.Module, *, origin: str) -> None:
    """Require every buffer, and every tensor that a module keeps as an attribute, to have values.

    Raises:
        ConfigError: one is on the meta device.
    """
    empty = [*(name for name, buffer in module.named_buffers() if buffer.is_meta), *_empty_attributes(module)]
    if empty:
        raise ConfigError(
            f"{origin}; {len(empty)} tensors of {type(module).__name__} are neither weights nor computed from the "
            f"config, first {empty[0]!r}: they would have no values; take another model."
        )


def _empty_attributes(module: nn.Module) -> Iterator[str]:
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules") and any(t.is_meta for t in _flat(value)):
                yield f"{path}.{name}" if path else name


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    elif type(value) is dict:
        yield from _flat(list(value.values()))
