"""The trainer's own programs, lowered by TorchTPU without a TPU: traced on meta tensors, interpreted on placeholders.

make_fx traces the step on tensors of the meta device, since TorchTPU's placeholders have no device that autograd
knows; TorchTPU's interpreter runs the graph on placeholders and gives StableHLO. `lower` is the counterpart of
runtime/xla/tracing.py, and gives the same `Lowered`.
"""

import io
import operator
import os
import re
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.scan import scan_op
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.mesh import Mesh, mesh_of
from tpu_experiments.config.model_schema import ShardingConfig
from tpu_experiments.runtime.base import flattened
from tpu_experiments.runtime.kernels.attention import MAX_BLOCK, holds_rows, install_attention_kernel
from tpu_experiments.runtime.kernels.delta import install_delta_kernel
from tpu_experiments.runtime.kernels.grouped import install_grouped_products
from tpu_experiments.runtime.kernels.on_torchtpu import (
    NAMES,
    PRODUCTS,
    LaterAttention,
    lowered_call,
    lowered_product,
)
from tpu_experiments.runtime.lowered import (
    BATCH,
    Argument,
    DevicelessRuntime,
    Lowered,
    PlannedProgram,
    axes_of,
    kind_of,
)
from tpu_experiments.runtime.ops import Folding
from tpu_experiments.runtime.sharding import ShardingTable
from tpu_experiments.runtime.tpu.buffers import storage_of
from tpu_experiments.runtime.tpu.collectives import OPERATORS, folding_over, lowered_operator, sum_over_chips
from tpu_experiments.runtime.tpu.loop import REVERSED, results_of, tensors_of

NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_TOPOLOGY": "1x1",
}
"""Without these TorchTPU asks a metadata server for minutes. What is lowered does not depend on the type."""
NAMED = "tpu_experiments.named.default"
"""Operator of models/parts/named.py that gives a value a name for the policy of what is saved."""
LOWERED = (*NAMES, *OPERATORS, *PRODUCTS)
"""Operators of this package that are lowered here."""


@dataclass(frozen=True)
class Target:
    """What a program is lowered for."""

    max_block: int = MAX_BLOCK
    """Tokens in the largest block of an attention kernel."""
    holds_rows: bool = True
    """Whether the chip's vector memory holds a row of several blocks."""
    num_processes: int = 1
    """Processes that sums are over, each of which runs the program."""
    row_shards: int = 1
    """Parts that XLA splits the rows of a batch into, and `head_shards` the heads."""
    head_shards: int = 1

    @staticmethod
    def of(hw: HwConfig, *, mesh: Mesh) -> "Target":
        """Return the target of a run's programs."""
        holds = holds_rows(hw.chip)
        if hw.parallel == "spmd":
            return Target(hw.attention_block, holds, row_shards=mesh.num_shards, head_shards=mesh.tensor)
        return Target(hw.attention_block, holds, num_processes=hw.num_devices)


ONE_CHIP = Target()


TracedFunction = tuple[fx.GraphModule, list[tuple[str, Tensor]], dict[StorageWeakRef, int]]
"""A graph, its inputs by name in order, and the numbers of the results that take inputs' buffers."""


class TracingRuntime(DevicelessRuntime):
    """A `Runtime` without devices, whose programs are lowered by TorchTPU instead of run."""

    def __init__(self, hw: HwConfig, *, sharding: ShardingConfig) -> None:
        super().__init__()
        self.device = torch.device("meta")
        self.mesh = mesh_of(hw, sharding)
        self.table = ShardingTable(sharding, mesh=self.mesh) if hw.parallel == "spmd" else None
        install_attention_kernel(LaterAttention() if hw.device == "tpu" else None)
        install_grouped_products(None)
        install_delta_kernel(None)
        self.target = Target.of(hw, mesh=self.mesh)
        self.num_devices = hw.num_devices
        self.rank, self.world_size = 0, hw.num_devices if hw.parallel == "spawn" else 1
        self.share = 0, self.world_size
        folding = folding_over(self.mesh, self.table, device=hw.device)
        self.folding: Folding | None = folding
        self.loop, self.constrain = folding.loop, folding.constrain

    def seed(self, value: int) -> None: ...

    def placeholder(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)

    def sum_over_processes(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors if self.world_size == 1 else sum_over_chips(tensors)

    def lower(
        self,
        function: Callable[[dict[str, Tensor]], Any],
        *,
        name: str,
        batch: Mapping[str, Tensor],
        rows_dim: int,
        renewed: Callable[[Any], Sequence[tuple[Tensor, Tensor]]] = lambda out: (),
        num_adapters: int = 1,
        as_run: PlannedProgram[Any] | None = None,
    ) -> Lowered:
        """Lower `function` for host tensors like `batch`.

        Args:
            rows_dim: dimension of the batch that is split over the devices.
            renewed: maps the function's result to pairs (placeholder, new value) of everything that the run overwrites.
            as_run: the run's own program, lowered in the place of `function`: its text is then the run's, which can
                load what was compiled of it (planned.py).

        Raises:
            ConfigError: the program calls an operator of this package that is not lowered here yet.
        """
        started = time.perf_counter()
        sent = self.put(batch, rows_dim=rows_dim)
        if as_run is None:
            graph, read, aliases = self._traced(function, sent, renewed=renewed)
        else:
            graph, read, aliases = self._traced_as_run(as_run, sent)
        text = stablehlo_of(graph, [tensor for _, tensor in read], target=self.target)
        in_use = {storage_of(tensor) for _, tensor in read}
        return Lowered(
            name,
            tuple(next(iter(batch.values())).shape),
            module=text.encode(),
            form="stablehlo",
            arguments=tuple(
                self._argument(key, t, rows_dim=rows_dim, alias=aliases.get(storage_of(t))) for key, t in read
            ),
            resident=tuple(
                self._argument(key, t, rows_dim=rows_dim) for key, t in self.placed if storage_of(t) not in in_use
            ),
            mesh=self.mesh if self.table is not None else Mesh(),
            num_replicas=self.share[1],
            trace_seconds=time.perf_counter() - started,
            num_adapters=num_adapters,
        )

    def _traced(
        self,
        function: Callable[[dict[str, Tensor]], Any],
        sent: dict[str, Tensor],
        *,
        renewed: Callable[[Any], Sequence[tuple[Tensor, Tensor]]],
    ) -> TracedFunction:
        given = [*self.placed, *((BATCH + key, tensor) for key, tensor in sent.items())]
        aliases: dict[StorageWeakRef, int] = {}

        def run(_: list[Tensor]) -> list[Tensor]:
            out = function(sent)
            pairs = list(renewed(out))
            aliases.update({storage_of(old): index for index, (old, _) in enumerate(pairs)})
            new_values = [value for _, value in pairs]
            known = {id(value) for value in new_values}
            return new_values + [t for t in tensors_of(out) if id(t) not in known]

        run([])  # what is computed once, outside a graph: layers' own graphs, and whether the head is a product
        load()
        graph = make_fx(run, tracing_mode="real")([tensor for _, tensor in given])
        _refuse_draws(graph)
        return graph, as_function_of(graph, given), aliases

    def _traced_as_run(self, program: PlannedProgram[Any], sent: dict[str, Tensor]) -> TracedFunction:
        """Trace as a run does (device.py), with the names of a plan."""
        names = {storage_of(tensor): name for name, tensor in self.placed}  # others come with each call, as a batch

        def run(_: list[Tensor]) -> list[Tensor]:
            leaves, _build = flattened(program.function(sent))
            return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        load()
        given = by_role(sent, held=program.held())
        graph, inputs, written = function_of(run, given, known=lambda tensor: storage_of(tensor) in names)
        aliases = {storage_of(inputs[number][1]): index for index, number in enumerate(written)}
        read = [(names.get(storage_of(t), BATCH + name.removeprefix(BATCH)), t) for name, t in inputs]
        return graph, read, aliases

    def _argument(self, name: str, tensor: Tensor, *, rows_dim: int, alias: int | None = None) -> Argument:
        shape = tuple(tensor.shape)
        axes = axes_of(name, shape, table=self.table, mesh=self.mesh, rows_dim=rows_dim)
        return Argument(name, shape, kind_of(tensor), axes, alias)


def by_role(batch: Mapping[str, Tensor], *, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a call by `held/<name>` and `batch/<name>`, the batch's in the order of their names."""
    return {**{f"held/{name}": t for name, t in held.items()}, **{BATCH + name: batch[name] for name in sorted(batch)}}


def function_of(
    run: Callable[[list[Tensor]], list[Tensor]], given: Mapping[str, Tensor], *, known: Callable[[Tensor], bool]
) -> tuple[fx.GraphModule, list[tuple[str, Tensor]], list[int]]:
    """Trace a function that may write into tensors, as one that returns their new values first.

    Args:
        given: tensors that another call may have others for.
        known: whether a tensor has values on the device; those that the function reads become inputs without a name.

    Returns:
        The graph, its inputs in order, and the numbers of the inputs that are written.

    Raises:
        ConfigError: the program draws by torch's own generator, or calls an operator that is not lowered here yet.
        RuntimeError: it reads a tensor whose values nobody has, or one after writing it.
    """
    run([])  # what is computed once, outside a graph: layers' own graphs, and whether the head is a product
    graph = make_fx(run, tracing_mode="real")(list(given.values()))
    _refuse_draws(graph)
    fixed: dict[StorageWeakRef, Tensor] = {}
    own = {storage_of(tensor) for tensor in given.values()}
    for node in graph.graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(node.target)(graph)
        if isinstance(value, Tensor) and storage_of(value) not in own and known(value):
            fixed.setdefault(storage_of(value), value.detach())
    last = list(graph.graph.find_nodes(op="placeholder"))[-1]
    for number, tensor in enumerate(fixed.values()):
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"fixed_{number}")
        last.meta["val"] = tensor
    every = [*given.items(), *(("", tensor) for tensor in fixed.values())]
    written = written_in(graph, every)
    read = as_function_of(graph, every, keeps=written)
    inputs = graph.graph.find_nodes(op="placeholder")
    return graph, read, [inputs.index(node) for node in written]


def _refuse_draws(graph: fx.GraphModule) -> None:
    parts = [part for part in graph.modules() if isinstance(part, fx.GraphModule)]
    for node in (node for part in parts for node in part.graph.nodes):
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ConfigError(
                f"hw.runtime=torchtpu; the program draws by torch's own generator ({node.target}), as dropout inside a "
                "model's sdpa attention does, and TorchTPU's programs have no seed yet; set it to 0, or use "
                "hw.runtime=xla."
            )


def written_in(graph: fx.GraphModule, given: Sequence[tuple[str, Tensor]]) -> list[fx.Node]:
    """Have the graph return first what it writes into its inputs; return those inputs in that order.

    Raises:
        RuntimeError: an input is read after it is written, or the value has another shape or type.
    """
    nodes = graph.graph.find_nodes(op="placeholder")
    of_storage = {storage_of(tensor): node for (_, tensor), node in zip(given, nodes, strict=True)}
    values: dict[fx.Node, Any] = {}
    for node in list(graph.graph.nodes):
        sources = [_source(graph, one, of_storage) for one in node.all_input_nodes]
        if any(source in values for source in sources):
            raise RuntimeError(f"a program reads a tensor after writing it ({node.target})")
        if str(node.target) != "aten.copy_.default":
            continue
        into, value = _source(graph, node.args[0], of_storage), node.args[1]
        old, new = into.meta["val"] if into is not None else node.args[0].meta["val"], value.meta["val"]
        if into is None or (old.shape, old.dtype) != (new.shape, new.dtype):
            raise RuntimeError(f"a program writes {tuple(new.shape)} {new.dtype} into {tuple(old.shape)} {old.dtype}")
        values[into] = value
        node.replace_all_uses_with(value)
        graph.graph.erase_node(node)
    output = graph.graph.output_node()
    results: Any = output.args[0]
    output.args = ([*values.values(), *results],)
    return list(values)


def _source(graph: fx.GraphModule, node: Any, of_storage: Mapping[StorageWeakRef, fx.Node]) -> fx.Node | None:
    """Return the input that a node is or that holds its constant's storage; None for other nodes."""
    if node.op == "placeholder":
        return node
    value = operator.attrgetter(node.target)(graph) if node.op == "get_attr" else None
    return of_storage.get(storage_of(value)) if isinstance(value, Tensor) else None


def as_function_of(
    graph: fx.GraphModule, given: Sequence[tuple[str, Tensor]], *, keeps: Collection[fx.Node] = ()
) -> list[tuple[str, Tensor]]:
    """Make the graph, in place, a function of those given tensors that it reads, on the TPU; return them.

    make_fx has an input for every given tensor, and holds a parameter, which shares the storage of one, as a constant.

    Args:
        keeps: inputs that stay though nothing reads them.

    Raises:
        ConfigError: the program calls an operator of this package that is not lowered here yet.
        RuntimeError: the graph reads another tensor, whose values a plan does not have.
    """
    nodes = graph.graph.find_nodes(op="placeholder")
    of_storage = {storage_of(t): node for (_, t), node in zip(given, nodes, strict=True)}
    for node in list(graph.graph.nodes):
        if node.op == "get_attr":
            value = operator.attrgetter(node.target)(graph)
            if not isinstance(value, Tensor):
                continue  # the body of a loop
            source = of_storage.get(storage_of(value)) or _written_out(graph, value, before=node)
            if source is None:
                raise RuntimeError(f"a traced program reads a tensor of {tuple(value.shape)} that was not placed")
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)
    for part in graph.modules():
        if isinstance(part, fx.GraphModule):
            _on_tpu(part)
    read = [(pair, node) for pair, node in zip(given, nodes, strict=True) if node.users or node in keeps]
    for node in nodes:
        if not node.users and node not in keeps:
            graph.graph.erase_node(node)
    graph.graph.set_codegen(fx.graph.CodeGen())
    graph.recompile()
    return [pair for pair, _ in read]


def _written_out(graph: fx.GraphModule, value: Tensor, *, before: fx.Node) -> fx.Node | None:
    """Return a number that a model makes into a tensor in its forward pass as a constant; None for other tensors."""
    if value.ndim or value.device.type == "meta":
        return None
    with graph.graph.inserting_before(before):
        kept: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        return graph.graph.call_function(torch.ops.aten.scalar_tensor.default, (value.item(),), kept)


def _on_tpu(graph: fx.GraphModule) -> None:
    """Have a graph make its tensors on the TPU, and drop names of values."""
    for node in list(graph.graph.nodes):
        if str(node.target) == NAMED:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        elif str(node.target).startswith("tpu_experiments.") and str(node.target) not in LOWERED:
            raise ConfigError(
                f"hw.runtime=torchtpu; the program calls {node.target}, which is not lowered by TorchTPU yet; use "
                "hw.runtime=xla."
            )
        elif "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("tpu")}
    graph.recompile()


def load() -> None:
    """Load TorchTPU, which gives torch the device `tpu`, as on a machine without one."""
    os.environ.update({name: os.environ.get(name, value) for name, value in NO_TPU.items()})
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        from torch_tpu import _loader

        _loader._init_device("tpu")


def running_sum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return sums up to every place of a dimension, in log2(n) additions of the tensor and itself, shifted.

    TorchTPU lowers cumsum to chlo.scan, on which XLA's compiler for the CPU aborts (jaxlib 0.12: "Check failed:
    operand_maps.size() == 1").
    """
    x = x.to(dtype or (x.dtype if x.is_floating_point() else torch.int64))
    dim, shift = dim % x.ndim, 1
    while shift < x.shape[dim]:
        before = x.narrow(dim, 0, x.shape[dim] - shift)
        x = x + torch.nn.functional.pad(before, [0, 0] * (x.ndim - 1 - dim) + [shift, 0])
        shift *= 2
    return x


def stablehlo_of(graph: fx.GraphModule, inputs: Sequence[Tensor], *, target: Target = ONE_CHIP) -> str:
    """Return the StableHLO of a graph as text, by TorchTPU; `load` has been called.

    Args:
        target: what it is lowered for.
    """
    from torch_tpu._internal.compile import tpu_torch_compile

    text: str = tpu_torch_compile.serialize_mlir_text(module_of(graph, inputs, target=target))
    # Its own name is of the Python lines that called it, and a plan's would not be a run's.
    return re.sub(r"\Amodule @\w+", "module @program", text)


def module_of(graph: fx.GraphModule, inputs: Sequence[Tensor], *, target: Target) -> Any:
    """Return TorchTPU's module of a graph for inputs like these."""
    from torch_tpu._internal.compile import tpu_torch_compile
    from torch_tpu._internal.execution_mode import EagerMode, set_eager_mode
    from torch_tpu._internal.export.export import EagerLikeFxInterpreter

    class Interpreter(EagerLikeFxInterpreter):
        """TorchTPU's interpreter with a loop of its own.

        Its own handler of `scan` (torch_tpu 0.2.0) compiles the body by itself, for which it needs a TPU.
        """

        def call_function(self, op: Any, args: Any, kwargs: Any) -> Any:
            if op is scan_op:
                return scanned(*args)
            if str(op) in NAMES:
                return lowered_call(
                    NAMES[str(op)],
                    args,
                    max_block=target.max_block,
                    holds_rows=target.holds_rows,
                    num_shards=target.row_shards,
                    head_shards=target.head_shards,
                )
            if str(op) in PRODUCTS:
                return lowered_product(str(op), args)
            if op is torch.ops.aten.cumsum.default:
                return running_sum(*args, **kwargs)
            if str(op) in OPERATORS:
                return lowered_operator(str(op), args, num=target.num_processes)
            return super().call_function(op, args, kwargs)

    def scanned(body: fx.GraphModule, carry: Any, xs: Any, others: Any) -> Any:
        is_reverse = any(node.meta.get("custom", {}).get(REVERSED) for node in body.graph.nodes)
        directions = tpu_torch_compile.ScanDirection
        slices = [torch.empty(x.shape[1:], dtype=x.dtype, device="meta") for x in xs]
        ys = results_of(body)[len(carry) :]
        return tpu_torch_compile.create_scan_op(
            inits=list(carry),
            inputs=[*xs, *others],
            body_module=module_of(body, [*carry, *slices, *others], target=target),
            scan_direction=directions.kReverse if is_reverse else directions.kForward,
            dummy_ys=[torch.zeros((len(xs[0]), *y.shape), dtype=y.dtype, device="meta") for y in ys],
            num_scan_inputs=len(xs),
        )

    like = [tpu_torch_compile.placeholder(list(t.shape), t.dtype, False) for t in inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that its names are experimental
        with set_eager_mode(EagerMode._INTERNAL_COMPILE_FX_GRAPH):
            outputs = tensors_of(Interpreter(graph).run(*like))
            return tpu_torch_compile.build_mlir(outputs, like)
