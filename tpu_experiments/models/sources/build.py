"""From a model source to a module on the device, tensor by tensor, with adapters; folded layers as one stack."""

import ctypes
import itertools
import logging
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig, ModelConfig, has_patterns
from tpu_experiments.models.adapters.embeddings import adapted_embedding
from tpu_experiments.models.adapters.experts import adapted_parameters
from tpu_experiments.models.adapters.layouts import LoraOfInputHeads, LoraOfOutputHeads, WideLora
from tpu_experiments.models.adapters.linear import LoraLinear, features_of
from tpu_experiments.models.adapters.lora import (
    A,
    B,
    ParameterReport,
    adapted_weights,
    adapter_weights,
    fingerprints,
    inject,
    vocabulary_weights,
)
from tpu_experiments.models.adapters.low_rank_qat import RoundedLinear, grid_of
from tpu_experiments.models.adapters.padded import (
    PADDING,
    PaddedLora,
    Padding,
    fitting_padding,
    padded_adapters,
    padded_family,
    with_padding,
)
from tpu_experiments.models.adapters.quantised import as_parts, format_of, quantise_linears, quantised_shapes
from tpu_experiments.models.adapters.token_rows import token_rows
from tpu_experiments.models.huggingface import CLASSIFIER, HuggingFaceModel, head_parameters
from tpu_experiments.models.parts.bitnet import make_ternary
from tpu_experiments.models.parts.contracted import LinearOfHeads
from tpu_experiments.models.parts.distances import pick_by_products
from tpu_experiments.models.parts.dropout import drop_by_rows
from tpu_experiments.models.parts.named import Named
from tpu_experiments.models.stack.fold import fold
from tpu_experiments.models.stack.recomputed import recompute
from tpu_experiments.runtime.kernels.attention import has_attention_kernel, reads_flat
from tpu_experiments.runtime.ops import Folding, InPlace, PlaceTensor, apart
from tpu_experiments.runtime.stacked import (
    adapter_of,
    hugging_face_names,
    is_adapter_part,
    is_side_tensor,
    is_stack,
)

log = logging.getLogger(__name__)
STARTS = ("pissa", "loftq")
"""Values of `lora.init` whose B A is not zero."""
MAKE_HEADS, TAKE_HEADS = ("q_proj", "k_proj", "v_proj", "Wqkv"), ("o_proj", "Wo")
"""Names of the projections whose outputs or inputs are heads, in transformers."""
HEAD_NORMS = ("q_norm", "k_norm")
"""Names of the norms of queries' and keys' heads in transformers."""
APART_TOKENS = 2
"""A chip's tokens for each output of down_proj from which it reads the MLP's activation behind a barrier."""


def stacked_weights(
    module: nn.Module,
    source: HuggingFaceModel,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    adapted: Mapping[str, bool],
    lora: LoraConfig,
    seed: int,
    initial: dict[str, Tensor],
    quantised: Collection[str] = (),
    wider: Mapping[str, tuple[int, ...]],
) -> Iterator[Named]:
    """Yield base weights and their adapters under the (folded) module's names, the largest first.

    During its upload a tensor exists twice, which costs least while little else is allocated.

    Args:
        shapes: shapes of the module's base weights.
        adapted: base weights with an adapter, under Hugging Face's names (`adapted_weights`, `adapted_parameters`).
        initial: receives the initial A and B of `STARTS`, under Hugging Face's names.
        quantised: base weights that are held as codes, under Hugging Face's names; each is quantised before the next
            is read.
        wider: columns and rows of zeros that weights get, by their names in the module (`paddings`).
    """
    names = sorted(shapes, key=lambda name: -math.prod(shapes[name]))
    rows, embedding = token_rows(module), adapted_embedding(module)
    weights = source.weights([part for name in names for part in hugging_face_names(name)])
    for name in names:
        made: dict[str, Tensor] = {}
        count = len(hugging_face_names(name))
        for index, base in enumerate(itertools.islice(weights, count)):
            items = held_as(base, source.model, quantised=quantised)
            if base.name in adapted:
                format = format_of(source.model) if base.name in quantised else None
                items = adapter_weights(
                    base,
                    lora=lora,
                    seed=seed,
                    is_transposed=adapted[base.name],
                    format=format,
                    grid=grid_of(source.model),
                )
            more = vocabulary_weights(base, rows=rows, embedding=embedding, lora=lora, seed=seed)
            for item in itertools.chain(items, more):
                if lora.init in STARTS and item.name.endswith((A, B)):
                    initial[item.name] = item.tensor.clone()
                _collect(made, item, base=base.name, name=name, index=index, count=count, wider=wider)
        del base, item  # otherwise they stay allocated while the next tensor is read
        while made:
            yield Named(*made.popitem())


def held_as(item: Named, model: ModelConfig, *, quantised: Collection[str]) -> Iterator[Named]:
    """Yield a weight as its module holds it: as it is, or codes and scales."""
    format = format_of(model) if item.name in quantised else None
    if format is None:
        yield item
        return
    for name, tensor in as_parts(item.name, item.tensor, format=format):
        yield Named(name, tensor)


def _collect(
    made: dict[str, Tensor],
    item: Named,
    *,
    base: str,
    name: str,
    index: int,
    count: int,
    wider: Mapping[str, tuple[int, ...]],
) -> None:
    """Copy one layer's tensor into its stack; `name` is that of the stack of `base`."""
    _, _, leaf = item.name.rpartition(".")
    owner = adapter_of(name) if is_adapter_part(leaf) else name.rpartition(".")[0]
    target = name if item.name == base else f"{owner}.{leaf}"
    tensor = nn.functional.pad(item.tensor, wider[target]) if target in wider else item.tensor
    if not is_stack(name):
        made[target] = tensor
        return
    if target not in made:
        made[target] = tensor.new_empty(count, *tensor.shape)
    made[target][index] = tensor


TRIM_BYTES = 16 * 2**20


@dataclass
class BuiltModel:
    """A module whose frozen tensors are on the device, with its trainable parameters held separately.

    The module keeps its trainable parameters on the meta device. Every forward pass receives them from `trainable`, so
    that there is one copy of each, in float32.
    """

    module: nn.Module
    trainable: dict[str, Tensor]
    report: ParameterReport
    source: HuggingFaceModel
    initial: dict[str, Tensor]
    """Host copies of the initial A and B of `STARTS`; empty for other initialisations."""
    is_reduced: bool = False
    """Whether `initial` was taken out of the base (PiSSA), so that the export subtracts it."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Digests of the initial trainable parameters, under Hugging Face's names (models/adapters/lora.py)."""
    order: tuple[str, ...] = ()
    """Names of the trainable parameters in the order of their upload. torch_xla orders a program's results by it, so
    tensors that replace them later must be uploaded in the same order, or the step compiles as another program."""
    in_place: InPlace | None = None
    """Writes adapters into padded weights (models/adapters/padded.py); None where no weight is padded."""

    def weights_with_adapters(self) -> dict[str, Tensor]:
        """Return the padded weights with their adapters' current values in them, by the adapters' paths.

        A step computes with them (`padded.with_adapters`), and gives them back to `keep_weights`.
        """
        found: dict[str, Tensor] = {}
        if self.in_place is not None:
            for adapter in written_adapters(self.module):
                values = adapter.values(lambda owner, part: self.trainable[f"{owner.path}.{part}"].detach())
                found[adapter.path] = with_padding(adapter.weight, values)
        return found

    def keep_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Write a step's weights into the device's, in place: XLA reuses their buffers."""
        with torch.no_grad():
            for adapter in written_adapters(self.module) if weights else ():
                adapter.weight.copy_(weights[adapter.path])

    @property
    def taken_out(self) -> dict[str, Tensor]:
        """Initial A and B that the base lacks, which the export subtracts."""
        return self.initial if self.is_reduced else {}


def describe(source: HuggingFaceModel, *, lora: LoraConfig) -> tuple[nn.Module, ParameterReport]:
    """Build the module with its adapters on the meta device: names, shapes and counts, without memory.

    Raises:
        ConfigError: the values of the model's config are inconsistent, or an adapter cannot be placed where it is
            requested.
    """
    module = source.empty()
    make_ternary(module, source.model)
    quantise_linears(module, source.model)
    drop_by_rows(module)
    pick_by_products(module)
    head = head_parameters(module) if isinstance(module, PreTrainedModel) and source.head == CLASSIFIER else {}
    report = inject(
        module,
        lora,
        head=head,
        grid=grid_of(source.model),
        rounds_inputs=source.model.linear_activations == "int8",
    )
    named = {name for name, _ in module.named_parameters()}
    shared = [name.removesuffix(".weight") for name in adapted_weights(module) if name not in named]
    if shared:
        raise ConfigError(
            f"lora.targets=[{', '.join(lora.targets)}] matches {shared[0]}, whose weight is the embedding's "
            "(tie_word_embeddings); set lora.ensure_weight_tying=true for one adapter of both, or leave it out."
        )
    return module, report


def shapes_of_base(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every parameter that the model's source provides: all but adapters and scales.

    The shape of quantised weights is that of the checkpoint's.
    """
    dense = quantised_shapes(module)
    return {
        name: (*p.shape[:-2], *dense[name]) if name in dense else tuple(p.shape)
        for name, p in module.named_parameters()
        if not is_adapter_part(name) and not is_side_tensor(name)
    }


def build_model(
    source: HuggingFaceModel,
    *,
    lora: LoraConfig,
    seed: int,
    place: PlaceTensor,
    folding: Folding | None = None,
    is_trained: bool = False,
    is_packed: bool = False,
) -> BuiltModel:
    """Load `source` onto the device and return its module and trainable parameters.

    Args:
        place: uploads one host tensor with the sharding of the parameter of that name.
        folding: stacks equal layers into one that runs in a loop; None leaves the layers unstacked, for plain torch.
        is_trained: whether steps will train the adapters, which weights are then padded to hold where that pays.
        is_packed: whether several adapters will run in one program, which multiply features and no heads.
    """
    module, report = describe(source, lora=lora)
    adapted, quantised = adapted_weights(module) | adapted_parameters(module), set(quantised_shapes(module))
    source.require_weights(shapes_of_base(module))
    _lay_out(module, source, folding, is_packed=is_packed)
    is_folded = any(is_stack(name) for name, _ in module.named_parameters())
    if folding is not None and source.model.stack == "scanned" and not is_folded and has_patterns(lora):
        log.warning(
            "lora.rank_pattern or lora.alpha_pattern gives the layers different adapters: each layer "
            "is compiled separately, and all activations are saved for the backward pass, as with model.stack=unrolled"
        )
    in_place = folding.in_place if folding is not None and is_trained else None
    if in_place is not None:
        pad_weights(module, in_place)
    initial: dict[str, Tensor] = {}
    weights = stacked_weights(
        module,
        source,
        shapes_of_base(module),
        adapted=adapted,
        lora=lora,
        seed=seed,
        initial=initial,
        quantised=quantised,
        wider=paddings(module),
    )
    marks: dict[str, str] = {}
    trainable = placed_weights(module, weights, place=place, marks=marks)
    placed_buffers(module, place=place)
    names = [name for name, p in module.named_parameters() if p.requires_grad]  # weights may come in any order
    in_order = {name: trainable[name] for name in names}
    is_reduced = lora.init == "pissa"
    made = BuiltModel(module, in_order, report, source, initial, is_reduced, marks, tuple(trainable))
    if in_place is not None and written_adapters(module):
        made.in_place = in_place
        in_place.kept.clear()
        in_place.kept.update({f"{part.path}.weight": part.weight for part in written_adapters(module)})
    return made


def _lay_out(module: nn.Module, source: HuggingFaceModel, folding: Folding | None, *, is_packed: bool) -> None:
    """Change how a module computes, not what: heads and activations apart, layers folded or recomputed."""
    chosen = source.model
    for part in module.modules():
        if isinstance(part, WideLora | RoundedLinear):
            part.row_shards = folding.row_shards if folding is not None else 1
    if folding is not None:
        read_heads_apart(module)
    if folding is not None and chosen.stack == "unrolled":
        read_activations_apart(module, row_shards=folding.row_shards)
    if chosen.attention == "flash" and has_attention_kernel():
        work_on_heads(module, with_adapters=not is_packed)
    if chosen.stack == "scanned" and folding is None and chosen.remat != "none":
        recompute(module, remat=chosen.remat, saved=chosen.saved)
    elif chosen.stack == "scanned" and folding is not None:
        fold(
            module,
            folding,
            rehearse=lambda: source.rehearse(module),
            remat=chosen.remat,
            saved=chosen.saved,
            group=chosen.stack_group,
        )


def written_adapters(module: nn.Module) -> list[PaddedLora]:
    """Return the adapters that a step writes into their weights."""
    return [part for part in padded_adapters(module).values() if part.is_written]


def pad_weights(module: nn.Module, in_place: InPlace) -> None:
    """Choose the weights that are padded to hold their adapters; sharded ones in a loop over layers only."""
    paths = {id(part): path for path, part in module.named_modules() if isinstance(part, LoraLinear)}
    for part in list(module.modules()):
        if not isinstance(part, LoraLinear) or part is not part.siblings.members[0]:
            continue
        family = [(member, paths[id(member)]) for member in part.siblings.members]
        chosen = [(member, path, fitting_padding(member, in_loop=is_stack(path))) for member, path in family]
        places = {_place_of(member.weight, path, padding, in_place) for member, path, padding in chosen}
        if len(places) == 1 and (place := places.pop()):
            parts = None if place == "gathered" else in_place.uninitialised_parts
            for padded in padded_family(chosen, is_gathered=place == "gathered", parts=parts):
                module.set_submodule(padded.path, padded)


def _place_of(weight: Tensor, path: str, padding: Padding, in_place: InPlace) -> Literal["", "whole", "gathered"]:
    """Return where padding of the weight at a path is written: on every device, where a loop gathers it, or not."""
    name, shape = f"{path}.weight", tuple(weight.shape)
    if padding and in_place.is_whole(name, shape):
        return "whole"
    along = -1 if padding == "columns" else -2
    return "gathered" if padding and is_stack(name) and in_place.is_gathered(name, shape, along=along) else ""


def paddings(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the columns and rows of zeros that padded weights end with, by name, as torch's `pad` takes them."""
    by_kind: dict[str, tuple[int, ...]] = {
        "columns": (0, PADDING, 0, 0),
        "rows": (0, 0, 0, PADDING),
        "both": (0, PADDING, 0, PADDING),
    }
    return {f"{part.path}.weight": by_kind[part.padding] for part in padded_adapters(module).values()}


def work_on_heads(module: nn.Module, *, with_adapters: bool) -> None:
    """Have projections of attention write and read heads where the kernel wants them first.

    Their products then write (T, D) of each head at once, and o_proj reads it: views of features as heads, which do not
    fill the lanes, would be copied (tests/benchmarks/RESULTS.md).
    """
    for name, part in list(module.named_modules()):
        head_dim = getattr(part, "head_dim", 0)
        made = {leaf: found for leaf in (*MAKE_HEADS, *TAKE_HEADS) if (found := getattr(part, leaf, None)) is not None}
        takers = [found for leaf, found in made.items() if leaf in TAKE_HEADS]
        if not head_dim or not takers or features_of(takers[0])[0] % head_dim:
            continue
        if reads_flat(heads=features_of(takers[0])[0] // head_dim, head_dim=head_dim):
            continue
        for leaf, projection in made.items():
            takes = leaf in TAKE_HEADS
            count = features_of(projection)[0 if takes else 1] // head_dim
            if isinstance(projection, LoraLinear) and projection.is_formula and with_adapters:
                setattr(part, leaf, (LoraOfInputHeads if takes else LoraOfOutputHeads)(projection, heads=count))
            elif type(projection) is nn.Linear:
                which = "input_heads" if takes else "output_heads"
                setattr(part, leaf, LinearOfHeads(projection, name=f"{name}.{leaf}", **{which: count}))


def read_heads_apart(module: nn.Module) -> None:
    """Have norms of queries' and keys' heads, (B, N, T, D) in Gemma 3 and (B, T, N, D) in Qwen 3, read them apart.

    The view of a projection as heads is another layout on a TPU. Without the barrier XLA copies it in float32, for the
    norm and once more behind it; with it, once in bf16 (tests/benchmarks/RESULTS.md).
    """
    for name, part in module.named_modules():
        if name.rpartition(".")[2] in HEAD_NORMS:
            part.register_forward_pre_hook(_apart)


def read_activations_apart(module: nn.Module, *, row_shards: int) -> None:
    """Have an adapted down_proj, and its adapter, read the MLP's activation behind a barrier, where tokens are many.

    XLA otherwise computes it in each product that reads it, forward and backward, from the outputs of gate_proj and
    up_proj. Behind the barrier it is written once, and kept for the backward pass: planned, a step of Qwen2.5 0.5B on
    v5e-8 takes 0.202 instead of 0.209 s, and of Gemma 3 270M 1.020 instead of 1.028 s, for 1 GiB more. A model that
    fills the chip loses (Mistral 7B, a row of 4,096 tokens on v6e: 11,183 instead of 12,167 tokens/s), and so does a
    loop over layers, where it goes through a stack (tests/benchmarks/RESULTS.md).
    """

    def read_apart(part: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *rest = inputs
        are_many = math.prod(x.shape[:-1]) >= APART_TOKENS * part.out_features * row_shards
        return (apart(x), *rest) if are_many else inputs

    for part in module.modules():
        if isinstance(part, LoraLinear) and part.leaf == "down_proj":
            part.register_forward_pre_hook(read_apart)


def _apart(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    heads, *rest = inputs
    return (apart(heads), *rest) if heads.ndim == 4 else inputs


def placed_buffers(module: nn.Module, *, place: PlaceTensor) -> None:
    """Upload the buffers that no checkpoint holds (RoPE frequencies), once all weights are uploaded."""
    module.tie_weights()  # type: ignore[operator]  # placing replaced the shared embedding
    for name, buffer in list(module.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._buffers[leaf] = place(buffer, name=name)


def placed_weights(
    module: nn.Module, weights: Iterator[Named], *, place: PlaceTensor, marks: dict[str, str]
) -> dict[str, Tensor]:
    """Upload weights: frozen ones into the module, trainable ones into the returned dict, in float32.

    `marks` receives the fingerprints of the trainable ones.

    Raises:
        ConfigError: `weights` leaves one out, which would stay without values.
    """
    trainable: dict[str, Tensor] = {}
    names: dict[int, list[str]] = {}  # a tied weight has several; RoBERTa's kin name the head's first
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    lacking = {name for name, _ in module.named_parameters()}
    passed_bytes = 0
    for item in weights:
        lacking.discard(item.name)
        if module.get_parameter(item.name).requires_grad:
            marks |= {} if item.tensor.is_meta else fingerprints(item.name, item.tensor)  # a plan has no values
            trainable[item.name] = place(item.tensor.to(torch.float32), name=item.name)
        else:
            path, _, leaf = item.name.rpartition(".")
            owner: Any = module.get_submodule(path)
            frozen = place(item.tensor, name=item.name)
            # A Parameter is an alias of the tensor. In spmd torch_xla writes to the tensor behind it, and a program's
            # result replaces what the alias has: one that steps write into has to be the tensor itself.
            is_written = leaf == "weight" and isinstance(owner, PaddedLora) and owner.is_written
            held = frozen if is_written else nn.Parameter(frozen, requires_grad=False)
            for name in names.pop(id(owner._parameters[leaf])):
                path, _, leaf = name.rpartition(".")
                module.get_submodule(path)._parameters[leaf] = held  # type: ignore[assignment]
        passed_bytes += item.tensor.nbytes
        del item  # otherwise it stays allocated while the next tensor is read
        if passed_bytes >= TRIM_BYTES:
            passed_bytes = 0
            return_freed_memory()
    if lacking:
        raise ConfigError(
            f"{type(module).__name__}; {len(lacking)} of its parameters were not loaded, first {min(lacking)!r}: they "
            "would have no values; report it with the model's name."
        )
    return trainable


def return_freed_memory() -> None:
    """Return freed heap blocks to the operating system by glibc's malloc_trim.

    Host copies of tensors below 32 MiB come from glibc's heap, interleaved with the device's buffers. Without this, a
    model of small tensors held up to three times its weights after loading (measured on torch_xla's CPU device, 316 MiB
    of 4 MiB tensors: 947 MiB). It costs 0.2 s per 640 MiB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
