"""Low-rank adapters from first principles: y = W x + scale * B A x, W frozen (arXiv 2106.09685).

`inject` replaces Linear modules by name; the frozen weight keeps Hugging Face's name. `adapter_weights` draws A and B
(and, for PiSSA, takes them out of W). Shapes: A (r, in), B (out, r), DoRA's lengths of rows (out,), all float32.
Whether training changed anything is told by fingerprints of parameters at their start: a save that turns out to be the
base model is the loudest complaint of TPU users (huggingface/transformers#36004)."""

import copy
import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.config.model_schema import (
    ALL_LINEAR,
    PATTERNS,
    LoraConfig,
    is_named,
    is_saved,
    is_target,
    lora_of,
    pattern_key,
)
from tpu_experiments.models.adapters.dora import dora_of, row_norms
from tpu_experiments.models.adapters.embeddings import TiedHead, adapt_embedding, targeted_embedding
from tpu_experiments.models.adapters.embeddings import drawn as drawn_of_embedding
from tpu_experiments.models.adapters.experts import adapt_matrix, matched_matrices
from tpu_experiments.models.adapters.layouts import layout_of
from tpu_experiments.models.adapters.linear import LoraLinear, Siblings
from tpu_experiments.models.adapters.lost_in_peft import lost_in_peft
from tpu_experiments.models.adapters.low_rank_qat import RoundedLinear, fixed_point, fold
from tpu_experiments.models.adapters.quantised import Format, QuantLinear, quantised_shapes
from tpu_experiments.models.adapters.token_rows import add_token_rows
from tpu_experiments.models.parts.named import Named
from tpu_experiments.quantisation.grid import Grid
from tpu_experiments.runtime.stacked import (
    ADAPTER_PARTS,
    EMBEDDING_PARTS,
    TOKEN_ROWS,
    adapter_of,
    hugging_face_names,
    is_of_parameter,
    is_side_tensor,
    is_stack,
    unstacked,
)

A, B, MAGNITUDE, LEARNT_SCALE, *_ = ADAPTER_PARTS
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that share one input tensor in most decoders; whether they do is checked at every call."""


@dataclass(frozen=True)
class ParameterReport:
    """Numbers of trained and of all parameters (tied ones once, adapters included in `total`)."""

    trainable: int
    total: int
    adapters: int

    def __str__(self) -> str:
        share = 100 * self.trainable / self.total
        return f"{self.trainable:,} of {self.total:,} parameters trained ({share:.3f} %), {self.adapters} adapters"


def scale_of(lora: LoraConfig) -> float:
    """Return alpha / r, or alpha / sqrt(r) for rsLoRA, of the settings of one module (`lora_of`)."""
    return lora.alpha / (lora.r if lora.scaling == "alpha_over_r" else math.sqrt(lora.r))


def inject(
    module: nn.Module,
    lora: LoraConfig,
    *,
    head: Collection[str] = (),
    grid: Grid | None = None,
    rounds_inputs: bool = False,
) -> ParameterReport:
    """Freeze `module` and give every matching Linear, matrix of experts, and the embedding an adapter.

    `r: 0` leaves every weight trainable.

    Args:
        head: parameters that are trained whole, as those of a classifier's head; their modules get no adapter, and
            neither do those of `lora.modules_to_save`.
        grid: integers that adapted weights are rounded to (`model.linear=lr_qat`).
        rounds_inputs: whether the inputs of those are rounded to 8 bits.

    Raises:
        ConfigError: a target matches no Linear; the names that exist are listed. Or a pattern applies to none, or an
            adapted weight cannot be rounded to the grid.
    """
    linears: dict[str, Any] = {name: part for name, part in module.named_modules() if is_linear(part)}
    if lora.r == 0:
        return report(module, adapters=0)
    module.requires_grad_(False)
    saved = saved_parameters(module, lora)
    for name in (*head, *saved):
        module.get_parameter(name).requires_grad_(True)
    linears = {name: part for name, part in linears.items() if f"{name}.weight" not in head}
    embedding, tied = targeted_embedding(module, lora)
    wanted = [target for target in lora.targets if not any(is_named(name, target) for name in (embedding, *tied))]
    matched = [name for name in _matched(linears, wanted) if not is_saved(f"{name}.weight", lora) and name not in tied]
    matrices = [name for name in matched_matrices(module, lora) if not is_saved(name, lora)]
    _require_patterns_apply(lora, [*matched, *matrices, *([embedding, *tied] if embedding else [])])
    for name in matrices:
        own = lora_of(lora, name)
        adapt_matrix(module, name, r=own.r, scale=scale_of(own))
    if embedding:
        _require_no_grid(embedding, grid)
        own = lora_of(lora, embedding)
        for other in tied:
            _require_equal(lora, embedding, other)
        adapt_embedding(module, embedding, tied, r=own.r, scale=scale_of(own), lora=lora)
    for name in matched:
        parent, _, leaf = name.rpartition(".")
        linear, own = linears[name], lora_of(lora, name)
        r, scale = own.r, scale_of(own)
        if grid is None:
            layout = dora_of(linear) if lora.dora else layout_of(linear)
            adapted = layout(linear, r=r, scale=scale, dropout=lora.dropout, name=name)
        else:
            whole = _require_on_grid(linear, name, grid)
            adapted = RoundedLinear(whole, r=r, scale=scale, grid=grid, rounds_inputs=rounds_inputs, name=name)
        setattr(module.get_submodule(parent), leaf, adapted)
    add_token_rows(module, lora)
    for parent in {name.rpartition(".")[0]: None for name in matched} if grid is None else ():
        _link_siblings(module.get_submodule(parent))  # those on a grid multiply nothing by A alone
    return report(module, adapters=len(matched) + len(matrices) + bool(embedding))


def saved_parameters(module: nn.Module, lora: LoraConfig) -> list[str]:
    """Return the names of the parameters of `lora.modules_to_save`, a tied one once.

    Raises:
        ConfigError: a name is of no module with parameters, or of a quantised one; or the parameter is the embedding
            and the head, and `lora.ensure_weight_tying` does not say that it is trained as both.
    """
    shown, quantised = ", ".join(lora.modules_to_save), quantised_shapes(module)
    found: set[str] = set()
    first: dict[int, str] = {}
    matched: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
        hits = [each for each in lora.modules_to_save if is_saved(name, replace(lora, modules_to_save=[each]))]
        matched |= dict.fromkeys(hits, name)
        found |= {first[id(parameter)]} if hits else set()
    for target in lora.modules_to_save:
        if target not in matched:
            leaves = {name.rpartition(".")[2] for name, part in module.named_modules() if part._parameters}
            raise ConfigError(
                f"lora.modules_to_save has {target!r}, with which no module that has weights ends. "
                f"{suggest(target, leaves)}"
            )
    codes = sorted(found.intersection(quantised))
    if codes:
        raise ConfigError(
            f"lora.modules_to_save=[{shown}] matches {codes[0]}, which is held as codes: they are not trained; leave "
            "it out, or use model.base=dense."
        )
    embedding = [name for name in shared_parameters(module) if name in found]
    if embedding and not lora.ensure_weight_tying:
        raise ConfigError(
            f"lora.modules_to_save=[{shown}]; {embedding[0]} is the embedding and the head (tie_word_embeddings), and "
            "PEFT trains a copy of it beside the other; set lora.ensure_weight_tying=true to train the one weight as "
            "both, or leave it out."
        )
    return sorted(found)


def shared_parameters(module: nn.Module) -> dict[str, list[str]]:
    """Return the other names of parameters that have several, as a head that is tied to the embedding."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: others for first, *others in names.values() if others}


def require_read_by_peft(module: nn.Module, lora: LoraConfig) -> None:
    """Require PEFT to read each adapter as that of its module.

    Raises:
        ConfigError: it would take some for those of experts.
    """
    if not isinstance(module, PreTrainedModel):
        return
    matched = [name.removesuffix(".weight") for name in adapted_weights(module)]
    lost = lost_in_peft(module, matched)
    if lost:
        leaves = sorted({name.rpartition(".")[2] for name in lost})
        kept = sorted({name.rpartition(".")[2] for name in matched} - set(leaves))
        raise ConfigError(
            f"lora.targets=[{','.join(lora.targets)}]; PEFT leaves adapters of {', '.join(leaves)} out when it reads "
            f"those of a {module.config.model_type}, since it takes them for its experts' ({len(lost)} of "
            f"{len(matched)} modules, first {lost[0]}); use lora.targets=[{','.join(kept)}]."
        )


def is_linear(part: nn.Module) -> bool:
    """Return whether a module computes W x, or W x + b, and nothing else.

    Subclasses of Linear may compute something else (PhiMoE's router returns experts and their weights, DeepSeek V4's
    grouped projection), so that each is probed on a few numbers.
    """
    if not isinstance(part, nn.Linear) or type(part) is nn.Linear:
        return isinstance(part, nn.Linear | Conv1D | QuantLinear)
    plain, x = nn.Linear(3, 2, bias=part.bias is not None, device="cpu"), torch.tensor([[[0.5, -2.0, 30.0]]])
    probe = copy.copy(part)
    probe._parameters = dict(plain._parameters)
    try:
        out = probe(x)
    except Exception:  # it needs other shapes or inputs
        return False
    return isinstance(out, Tensor) and out.shape == (1, 1, 2) and torch.allclose(out, plain(x))


def _require_on_grid(linear: nn.Module, name: str, grid: Grid) -> nn.Linear:
    """Return a Linear whose weight can be rounded to the grid.

    Raises:
        ConfigError: it is GPT-2's Conv1D, or a group does not divide its width.
    """
    if type(linear) is not nn.Linear:
        raise ConfigError(
            f"model.linear=lr_qat; {name} is a {type(linear).__name__}, and weights of Linear modules alone are "
            "rounded; leave it out of lora.targets, or use model.linear=plain."
        )
    if linear.in_features % grid.columns_of(linear.in_features):
        raise ConfigError(
            f"model.linear_group={grid.group}; {name} has {linear.in_features} input features, which are no whole "
            "groups; use a divisor of that, or 0 for one scale a row."
        )
    return linear


def _require_equal(lora: LoraConfig, embedding: str, head: str) -> None:
    """Require one rank and alpha of an embedding and the head that shares its adapter: PEFT scales each by its own."""
    ours, theirs = ((own.r, own.alpha) for own in (lora_of(lora, name) for name in (embedding, head)))
    if ours != theirs:
        raise ConfigError(
            f"lora.rank_pattern or lora.alpha_pattern gives {embedding} rank {ours[0]} and alpha {ours[1]:g}, and "
            f"{head}, which shares its adapter (lora.ensure_weight_tying), {theirs[0]} and {theirs[1]:g}; name both."
        )


def _require_no_grid(embedding: str, grid: Grid | None) -> None:
    """Refuse an adapter of an embedding where adapters decide how weights are rounded."""
    if grid is not None:
        raise ConfigError(
            f"model.linear=lr_qat and lora.targets has {embedding}; weights of Linear modules alone are rounded; leave "
            "it out of lora.targets, or use model.linear=plain."
        )


def _require_patterns_apply(lora: LoraConfig, matched: Collection[str]) -> None:
    """Require every pattern of a rank or alpha to be that of an adapted module.

    Raises:
        ConfigError: one is of none, or of those alone that an earlier one matches.
    """
    for key in PATTERNS:
        patterns: dict[str, Any] = getattr(lora, key)
        unused = set(patterns).difference(pattern_key(patterns, name) for name in matched)
        for pattern in sorted(unused):
            names = {name.rpartition(".")[2] for name in matched}
            raise ConfigError(
                f"lora.{key} has {pattern!r}, which applies to no adapted module: it matches none by its whole name or "
                f"the end of it from a dot on, or an earlier one does. {suggest(pattern, names)}"
            )


def _link_siblings(parent: nn.Module) -> None:
    """Link the adapters of one module that may read the same tensor, of one scale."""
    for names in SAME_INPUT:
        members = [part for part in (getattr(parent, name, None) for name in names) if isinstance(part, LoraLinear)]
        for scale in dict.fromkeys(member.scale for member in members):
            alike = [member for member in members if member.scale == scale]
            if len(alike) > 1 and len({m.in_features for m in alike}) == 1:
                Siblings.link(alike)


def _matched(linears: Mapping[str, nn.Module], targets: list[str]) -> list[str]:
    names: dict[str, None] = {}
    for target in targets:
        hits = [name for name in linears if is_target(name, target)]
        if not hits:
            leaves = {name.rpartition(".")[2] for name in linears} | {ALL_LINEAR}
            raise ConfigError(
                f"lora.targets has {target!r}, which matches no Linear of the model. {suggest(target, leaves)}"
            )
        names |= dict.fromkeys(hits)
    return [name for name in linears if name in names]


def report(module: nn.Module, *, adapters: int) -> ParameterReport:
    """Count parameters, tied ones once; quantised weights as those that they stand for, their scales not."""
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    dense = quantised_shapes(module)
    named = ((name, p) for name, p in module.named_parameters() if not is_side_tensor(name))
    total = sum(math.prod(dense[name]) if name in dense else p.numel() for name, p in named)
    return ParameterReport(trainable, total, adapters)


def adapted_weights(module: nn.Module) -> dict[str, bool]:
    """Return the names of the weights of Linear modules with an adapter; true where the weight is (in, out)."""
    parts = ((name, part) for name, part in module.named_modules() if isinstance(part, LoraLinear))
    return {f"{name}.weight": part.is_transposed for name, part in parts if not isinstance(part, TiedHead)}


def vocabulary_weights(
    base: Named, *, rows: Mapping[str, list[int]], embedding: tuple[str, bool], lora: LoraConfig, seed: int
) -> Iterator[Named]:
    """Yield what is trained beside an embedding's or head's weight: its own rows, or A and B of an embedding.

    It is drawn as in `adapter_weights`.

    Args:
        rows: tokens whose rows are trained, as of `token_rows`.
        embedding: what `adapted_embedding` returns.
    """
    prefix = base.name.removesuffix("weight")
    if base.name in rows:
        yield Named(prefix + TOKEN_ROWS, base.tensor[rows[base.name]].to(torch.float32))
    adapted, is_tied = embedding
    if base.name == adapted:
        rank, generator = lora_of(lora, prefix.removesuffix(".")).r, _generator(base.name, seed)
        pair = drawn_of_embedding(tuple(base.tensor.shape), r=rank, is_tied=is_tied, generator=generator)
        yield from (Named(prefix + part, tensor) for part, tensor in zip(EMBEDDING_PARTS, pair, strict=True))


def adapter_weights(
    base: Named,
    *,
    lora: LoraConfig,
    seed: int,
    is_transposed: bool = False,
    format: Format | None = None,
    grid: Grid | None = None,
) -> Iterator[Named]:
    """Yield the base weight (for PiSSA reduced by B A), A, B, and with DoRA the lengths of rows.

    With a grid the weight is Phi0, and its scales follow A and B.

    The draw depends on the seed and the parameter's name alone, so it is the same on any number of devices.

    Args:
        base: a weight (out, in), or one such of each expert (E, out, in).
        is_transposed: the weight is (in, out), as in `adapted_weights`.
        format: of a base that is yielded as codes and scales.
        grid: integers that the weight is rounded to in training.
    """
    prefix = f"{adapter_of(base.name)}."
    lora = lora_of(lora, base.name.removesuffix(".weight"))
    whole = base.tensor.mT if is_transposed else base.tensor
    if is_of_parameter(prefix):
        a, b = _drawn(tuple(whole.shape), name=base.name, lora=lora, seed=seed)
        yield from (base, Named(prefix + A, a), Named(prefix + B, b))
        return
    if lora.init == "pissa":
        weight, a, b = _pissa(whole, r=lora.r, scale=scale_of(lora))
    else:
        weight, (a, b) = whole, _drawn(tuple(whole.shape), name=base.name, lora=lora, seed=seed)
    if grid is not None:
        phi, scales = fixed_point(weight, grid)
        for name, tensor in (("weight", phi), (A, a), (B, b), (LEARNT_SCALE, scales)):
            yield Named(prefix + name, tensor)
        return
    parts = {"weight": weight} if format is None else format.quantise(weight)
    if format is not None and (lora.dora or lora.init == "loftq"):
        weight = format.decode(parts, dtype=weight.dtype)
        if lora.init == "loftq":  # arXiv 2310.08659, one step: the base's codes stay those of W
            a, b = principal(whole.to(torch.float32) - weight, r=lora.r, scale=scale_of(lora))
    for name, tensor in parts.items():
        yield Named(prefix + name, tensor.t().contiguous() if is_transposed else tensor)
    yield Named(prefix + A, a)
    yield Named(prefix + B, b)
    if lora.dora:
        yield Named(prefix + MAGNITUDE, lengths_of_rows(weight, a, b, scale=scale_of(lora)))


def folded_weight(
    base: Named, trained: Mapping[str, Tensor], *, lora: LoraConfig, grid: Grid, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the integers (out, in) int8 of a base weight and their scales: as trained, and as training began.

    Args:
        trained: host tensors of the adapter under Hugging Face's names.
        dtype: in which the model computed in training.
    """
    prefix = base.name.removesuffix("weight")
    lora = lora_of(lora, prefix.removesuffix("."))
    a, b, scales = (trained[prefix + part].to(torch.float32) for part in (A, B, LEARNT_SCALE))
    phi, first = fixed_point(base.tensor, grid)
    folded, start = (fold(phi, a, each, grid=grid, scale=scale_of(lora), dtype=dtype) for each in (b, 0 * b))
    return (folded, scales), (start, first)


def _drawn(shape: tuple[int, ...], *, name: str, lora: LoraConfig, seed: int) -> tuple[Tensor, Tensor]:
    """Draw A and B for a weight (out, in), or for one of each expert (E, out, in); their product is zero."""
    *experts, high, wide = shape
    generator = _generator(name, seed)
    if lora.init == "a_zero":
        # standard deviation of A in b_zero, Kaiming-uniform with a = sqrt(5), for B's fan-in r
        b = torch.randn((*experts, high, lora.r), generator=generator) / math.sqrt(3 * lora.r)
        return torch.zeros(*experts, lora.r, wide), b
    bound = 1 / math.sqrt(wide)  # Kaiming-uniform with a = sqrt(5), as nn.Linear
    a = torch.empty(*experts, lora.r, wide).uniform_(-bound, bound, generator=generator)
    return a, torch.zeros(*experts, high, lora.r)


def _generator(name: str, seed: int) -> torch.Generator:
    """Return a generator for the adapter of a weight."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def drawn_adapters(
    module: nn.Module, names: Sequence[str], *, lora: LoraConfig, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the A and B of `adapter_weights` by their names in a (folded) module, whose own may have another rank.

    The start must depend on shapes alone (`lora.init` b_zero or a_zero).
    """
    for name in names:
        owner, _, part = name.rpartition(".")
        linear = module.get_submodule(owner)
        assert isinstance(linear, LoraLinear)
        shape = (linear.out_features, linear.in_features)
        parts = [
            _drawn(shape, name=f"{each.rpartition('.')[0]}.weight", lora=lora, seed=seed)[part == B]
            for each in hugging_face_names(name)
        ]
        yield name, torch.stack(parts) if is_stack(name) else parts[0]


def lengths_of_rows(weight: Tensor, a: Tensor, b: Tensor, *, scale: float) -> Tensor:
    """Return the norms of the rows of W + scale B A; of a weight on the meta device, an empty tensor."""
    if weight.is_meta:
        return torch.empty(len(weight), device="meta")
    return row_norms(weight, a, b, scale=scale)


def _pissa(weight: Tensor, *, r: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Split W into W - scale B A, A and B by its r largest singular values (PiSSA, arXiv 2404.02948)."""
    full = weight.to(torch.float32)
    a, b = principal(full, r=r, scale=scale)
    return (full - scale * b @ a).to(weight.dtype), a, b


def principal(matrix: Tensor, *, r: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return A and B whose scale B A is the closest matrix of rank r, by the r largest singular values.

    A = sqrt(S_r) V_r^T and B = U_r sqrt(S_r), each divided by sqrt(scale).
    """
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    root = torch.sqrt(s[:r] / scale)
    return root[:, None] * vt[:r], u[:, :r] * root


MAX_ELEMENTS = 2**20
"""Upper bound of the evenly spaced elements that are hashed of a tensor: adapters are hashed whole, and all of a
7-billion-parameter model would be 28 GB to hash."""


def fingerprint(tensor: Tensor) -> str:
    """Return a digest of a host tensor's values as float32."""
    flat = tensor.detach().reshape(-1)
    step = max(1, math.ceil(flat.numel() / MAX_ELEMENTS))
    sample = flat[::step].to(torch.float32).contiguous()
    return hashlib.sha256(sample.numpy().data).hexdigest()


def fingerprints(name: str, tensor: Tensor) -> dict[str, str]:
    """Return fingerprints under Hugging Face's names, one per layer of a stack."""
    return {part: fingerprint(values) for part, values in unstacked({name: tensor}).items()}


def num_changed(tensors: Mapping[str, Tensor], initial: Mapping[str, str]) -> int:
    """Count the tensors whose fingerprint is not that of `initial`."""
    return sum(fingerprint(tensor) != initial[name] for name, tensor in tensors.items())


def effects(tensors: Mapping[str, Tensor], *, start: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the Frobenius norm of B A for every adapted module, of experts over all of them, without the scale.

    Where `start` has A0 and B0 (PiSSA, LoftQ), it is that of B A - B0 A0. |B A|^2 is the sum of (B^T B) * (A A^T), two
    r x r matrices, so the product itself is never formed. B A - B0 A0 is (B - B0) A + B0 (A - A0), which loses no
    digits where little has changed. Float64 throughout, by numpy: torch's threads wait for each other at every small
    product (14 modules, busy machine: 1.4 s instead of 0.05 s).
    """
    found: dict[str, float] = {}
    for name in tensors:
        module, _, kind = name.rpartition(".")
        if kind != A:
            continue
        a, b = _float64(tensors[name]), _float64(tensors[f"{module}.{B}"])
        if name in start:
            a0, b0 = _float64(start[name]), _float64(start[f"{module}.{B}"])
            a, b = np.concatenate([a, a - a0], axis=0), np.concatenate([b - b0, b0], axis=1)
        found[module] = math.sqrt(max(0.0, float(((b.swapaxes(-1, -2) @ b) * (a @ a.swapaxes(-1, -2))).sum())))
    return found


def _float64(tensor: Tensor) -> NDArray[np.float64]:
    values: NDArray[np.float64] = tensor.detach().to(torch.float32).numpy().astype(np.float64)
    return values
