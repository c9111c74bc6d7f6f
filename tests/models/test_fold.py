"""Folded layers compute what the layers one by one compute: same loss, same gradients, same names outside."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.tiers import only
from tests.training.tiny import Run, random_batch
from tpu_experiments.config.mesh import Mesh
from tpu_experiments.models.adapters.layouts import LoraOfInputHeads, LoraOfOutputHeads
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.parts.contracted import LinearOfHeads
from tpu_experiments.models.stack.fold import fold
from tpu_experiments.models.stack.layer_graph import SAVED, in_parts, source_of
from tpu_experiments.runtime.kernels.attention import install_attention_kernel
from tpu_experiments.runtime.kernels.delta import OF_PRODUCTS, DeltaKernel, install_delta_kernel
from tpu_experiments.runtime.kernels.grouped import GroupedProducts, install_grouped_products
from tpu_experiments.runtime.kernels.on_xla import XlaDeltaRule, _delta_computation, _grouped_computation
from tpu_experiments.runtime.ops import APART, Folding, HostMemory, python_loop
from tpu_experiments.runtime.stacked import hugging_face_names, is_stack, stacked, unstacked

pytestmark = pytest.mark.xla
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)
MODELS = {
    "mistral7b": ["model.tiny_arch.num_hidden_layers=3"],
    "qwen05b": ["model.tiny_arch.num_hidden_layers=3"],
    # a period of four: three layers of Gated DeltaNet, one of attention
    "qwen35_08b": [],
    # a period of four: three layers with RoPE, one without
    "smollm3_3b": [],
    "phi4_mini": [],
    # a period of two, and one layer left over
    "gemma3_270m": [
        "model.tiny_arch.num_hidden_layers=5",
        "+model.tiny_arch.layer_types=[sliding_attention,full_attention,sliding_attention,full_attention,sliding_attention]",
    ],
}


@pytest.fixture
def gradients_of(make_config):
    """Row losses and gradients of one accumulated batch, under Hugging Face's names."""
    from tpu_experiments.runtime.eager import EagerRuntime
    from tpu_experiments.runtime.xla.device import XlaRuntime

    def compute(
        model: str,
        *overrides: str,
        eager: bool = False,
        host: HostMemory | None = None,
        kernel: Any = None,
        products: GroupedProducts | None = None,
        delta: DeltaKernel | None = None,
        tokens: int = 32,
    ) -> tuple[Tensor, dict[str, Tensor], Run]:
        tiny = ("model.size=tiny", "model.dtype=float32", *MODELS[model])
        config = make_config(f"model={model}", *tiny, *(["hw.runtime=eager"] if eager else []), *overrides)
        runtime = EagerRuntime(config.hw) if eager else XlaRuntime(config.hw, sharding=config.sharding)
        install_attention_kernel(kernel)
        install_grouped_products(products)
        install_delta_kernel(delta)
        if host is not None:
            runtime.folding = replace(runtime.folding, host=host)
        run = Run(config, runtime)
        for name, parameter in run.parameters.items():  # B is zero at the start, and then A has no gradient
            if name.endswith(("lora_B", "lora_embedding_A")):
                parameter.add_(0.01)
        batch = runtime.put(
            random_batch(0, accumulation=2, rows=2, seq_len=tokens, dropout=config.lora.dropout), rows_dim=1
        )

        def gradients(batch: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
            return run.step.gradients(run.parameters, batch, torch.ones((), device=runtime.device))

        grads, losses = runtime.program(gradients, name="gradients")(batch)
        named = dict(zip(run.parameters, (g.cpu() for g in grads), strict=True))
        return losses.cpu(), unstacked(named), run

    yield compute
    install_attention_kernel(None)
    install_grouped_products(None)
    install_delta_kernel(None)


def agree(ours: tuple[Tensor, dict[str, Tensor], Run], plain: tuple[Tensor, dict[str, Tensor], Run]) -> None:
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-5, atol=0)
    assert list(ours[1]) == list(plain[1])
    for name, expected in plain[1].items():
        scale = float(expected.abs().max())
        assert scale > 0, name
        assert float((ours[1][name] - expected).abs().max()) / scale < 2e-5, name


@pytest.mark.parametrize(
    ("model", "lora"),
    [
        pytest.param("mistral7b", "all_linear_r8", marks=pytest.mark.slow),
        ("gemma3_270m", "all_linear_r8"),
        ("qwen05b", "none"),
        pytest.param("qwen35_08b", "all_linear_r8", marks=pytest.mark.slow),
        pytest.param("smollm3_3b", "all_linear_r8", marks=pytest.mark.slow),
        ("phi4_mini", "all_linear_r8"),  # with LongRoPE, whose modules change their buffers
    ],
)
def test_folded_is_plain(gradients_of, model, lora):
    folded = gradients_of(model, f"lora={lora}")
    assert any(is_stack(name) for name in folded[2].parameters)
    agree(folded, gradients_of(model, f"lora={lora}", eager=True))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "layer_inputs"])
def test_folded_layers_with_the_kernel_of_the_gated_delta_rule_are_plain(gradients_of, remat):
    wide = [f"model.tiny_arch.linear_{part}_head_dim=128" for part in ("key", "value")]
    job = ("qwen35_08b", "lora=all_linear_r8", f"model.remat={remat}", *wide)
    _delta_computation.cache_clear()
    kernel = XlaDeltaRule(mesh=Mesh(), flops=OF_PRODUCTS, target="interpreted")
    folded = gradients_of(*job, delta=kernel, tokens=256)
    assert any(is_stack(name) for name in folded[2].parameters)
    assert _delta_computation.cache_info().misses == 2, "one shape, forward and backward"
    agree(folded, gradients_of(*job, eager=True, tokens=256))


@pytest.mark.parametrize("alpha", ["{q_proj: 4}", "{q_proj: 8}"])
def test_layers_whose_adapters_are_equal_fold(gradients_of, alpha):
    """Adapters that read one tensor are joined where their scales are equal (the second), whatever their ranks."""
    chosen = ["lora=all_linear_r8", "+lora.rank_pattern={q_proj: 4, down_proj: 3}", f"+lora.alpha_pattern={alpha}"]
    folded = gradients_of("qwen05b", *chosen)
    assert all(is_stack(name) for name in folded[2].parameters)
    agree(folded, gradients_of("qwen05b", *chosen, eager=True))


@pytest.mark.parametrize(
    ("model", "chosen"),
    [
        ("qwen05b", "+lora.trainable_token_indices={embed_tokens: [7, 300, 4]}"),
        ("mistral7b", "lora.targets=[q_proj,up_proj,embed_tokens]"),
        ("gemma3_270m", "lora.targets=[q_proj,up_proj,embed_tokens]"),
    ],
)
def test_folded_layers_with_rows_or_an_adapter_of_the_embedding_are_plain(gradients_of, model, chosen):
    """Tied or not; the head has the rows too, and the adapter where it is tied to it."""
    words = ["lora=all_linear_r8", chosen, "lora.ensure_weight_tying=true"]
    folded = gradients_of(model, *words)
    assert any(is_stack(name) for name in folded[2].parameters)
    agree(folded, gradients_of(model, *words, eager=True))


@pytest.mark.parametrize("names", ["lm_head,norm", "embed_tokens,layers.0.mlp"])
def test_modules_that_are_trained_whole_beside_adapters_fold(gradients_of, names):
    """Norms of all layers; a module of the first layer alone leaves the others to fold."""
    chosen = ["lora=all_linear_r8", f"lora.modules_to_save=[{names}]"]
    folded = gradients_of("mistral7b", *chosen)
    assert any(is_stack(name) for name in folded[2].parameters)
    agree(folded, gradients_of("mistral7b", *chosen, eager=True))


def test_layers_with_different_adapters_are_compiled_apart_and_the_log_says_so(gradients_of, caplog):
    chosen = ["lora=all_linear_r8", r"+lora.rank_pattern={layers\.1\..*: 4}"]
    apart = gradients_of("qwen05b", *chosen)
    assert not any(is_stack(name) for name in apart[2].parameters)
    assert "lora.rank_pattern or lora.alpha_pattern gives the layers different adapters" in caplog.text
    agree(apart, gradients_of("qwen05b", *chosen, eager=True))


@pytest.mark.parametrize("lora", ["none", "experts", pytest.param("all_linear_r8", marks=pytest.mark.slow)])
def test_routed_experts_of_folded_layers_are_those_of_every_expert(gradients_of, lora):
    """Packed rows; the experts are trained (`lora=none`), have adapters, or are frozen under those of the attention."""
    arch = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    settings = [f"++model.tiny_arch.{name}={value}" for name, value in arch.items()]
    if lora == "experts":
        settings.append("lora.target_parameters=[experts.gate_up_proj,experts.down_proj]")
    settings += ["lora=none"] if lora == "none" else ["lora=all_linear_r8", "lora.targets=[q_proj,v_proj]"]
    _grouped_computation.cache_clear()
    folded = gradients_of("qwen05b", *settings, products=GroupedProducts(Mesh(), target="interpreted"))
    assert _grouped_computation.cache_info().misses
    assert any(is_stack(name) for name in folded[2].parameters)
    agree(folded, gradients_of("qwen05b", *settings, eager=True))


@pytest.mark.slow
def test_every_policy_gives_the_same_and_saves_more_than_the_last(gradients_of):
    plain = gradients_of("mistral7b", "lora=all_linear_r8", eager=True)
    saved = []
    for remat in (*SAVED, "none"):
        ours = gradients_of("mistral7b", "lora=all_linear_r8", f"model.remat={remat}")
        agree(ours, plain)
        (graph,) = ours[2].model.module.model.layers.graphs.values()
        saved.append(sum(source is None for source in graph.saved_inputs))
    offloaded, *saved = saved
    assert offloaded == saved[0] == 4, "what adapters multiply by their A, of four tensors"
    assert saved == sorted(set(saved)), "each policy saves more than the one before"


def test_what_the_kernel_gave_and_o_proj_takes_is_saved_once(gradients_of):
    """As the kernel's result; a second stack of the same numbers was 2 GiB of a Mistral 7B step."""
    from tpu_experiments.runtime.kernels.on_xla import XlaAttention

    layer, batch = ("mistral7b", "lora=all_linear_r8"), ("model.attention=flash", "model.remat=save_attention")
    ours = gradients_of(*layer, *batch, kernel=XlaAttention(mesh=Mesh(), target="interpreted"))
    agree(ours, gradients_of(*layer, eager=True))
    (graph,) = ours[2].model.module.model.layers.graphs.values()
    results = graph.forward.graph.output_node().args[0]
    computed = [results[1 + n] for n, source in enumerate(graph.saved_inputs) if source is None]
    computed = [node for node in computed if node.meta["val"].shape[-1] not in (8, 16, 24)]  # the adapters' own
    (kernel,) = {node.args[0] for node in computed}
    assert "attention" in kernel.target.name()
    assert [node.args[1] for node in computed] == [0, 1], "its result and its log-sum-exp"


@pytest.mark.parametrize(
    ("shape", "views", "same"),
    [
        ((2, 4, 6), [(0, 1), (0, 1)], True),
        ((2, 4, 6), [(2, 4, 2, 3), (1, 2), (1, 2), (2, 4, 6)], True),
        ((4, 4, 6), [(0, 1)], False),  # the same shape in another order
        ((8, 6), [(2, 4, 2, 3), (1, 2), (1, 2), (2, 4, 6)], True),  # rows and tokens were one dimension
        ((2, 4, 6), [(2, 8, 3)], False),  # features were split
    ],
)
def test_a_stack_is_read_only_where_a_layer_of_it_is_read_as_it_lies(shape, views, same):
    graph = fx.Graph()
    node = whole = graph.placeholder("saved")
    whole.meta["val"] = torch.empty(shape, device="meta")
    for view in views:
        transposes = len(view) == 2
        target = torch.ops.aten.transpose.int if transposes else torch.ops.aten.view.default
        node = graph.call_function(target, (node, *(view if transposes else (list(view),))))
    graph.output(node)
    node.meta["val"] = torch.empty(views[-1] if len(views[-1]) > 2 else shape, device="meta")
    assert source_of(node) is (whole if same else None)
    graph.create_node("call_function", torch.relu, (whole,))
    assert source_of(node) is None, "another reads it too"


def test_offloaded_are_the_inputs_of_layers_and_nothing_else(gradients_of):
    moved = []

    def place(tensor):
        moved.append(tuple(tensor.shape))
        return tensor.clone()

    host = HostMemory(put=place, fetch=place)
    ours = gradients_of("mistral7b", "lora=all_linear_r8", "model.remat=offload", host=host)
    agree(ours, gradients_of("mistral7b", "lora=all_linear_r8", eager=True))
    assert len(moved) == 2, "once in the body of each loop"
    assert {shape[-1] for shape in moved} == {ours[2].model.module.config.hidden_size}


def test_norms_of_heads_read_them_behind_a_barrier(gradients_of):
    job = ("gemma3_270m", "lora=none", "model.remat=layer_inputs")
    ours = gradients_of(*job)
    agree(ours, gradients_of(*job, eager=True))
    for graph in ours[2].model.module.model.layers.graphs.values():
        for part, num in ((graph.forward, 2), (graph.backward, 4)):  # queries and keys; computed again, and gradients
            found = [node for node in part.graph.nodes if node.target is APART and node.meta["val"].ndim == 4]
            assert len(found) == num


def is_apart(node: Any) -> bool:
    """Tell whether a node is the barrier behind a named value."""
    return node.target is APART and node.args[0].target is torch.ops.tpu_experiments.named.default


@pytest.mark.parametrize(
    ("model", "remat", "num"),
    [
        ("mistral7b", "save_dots", 6),
        ("mistral7b", "layer_inputs", 0),
        ("gemma3_270m", "save_dots", 12),
        ("phi4_mini", "save_dots", 3),
        ("qwen35_08b", "save_dots", 27),
    ],
)
def test_saved_projections_are_read_behind_a_barrier(gradients_of, model, remat, num):
    ours = gradients_of(model, "lora=all_linear_r8", f"model.remat={remat}")
    agree(ours, gradients_of(model, "lora=all_linear_r8", eager=True))
    found = []
    for graph in ours[2].model.module.model.layers.graphs.values():
        results = graph.forward.graph.output_node().args[0]
        assert not any(node.target is APART for node in results if node), "stacks take what the products computed"
        found += [node.args[0].args[1] for node in graph.forward.graph.nodes if is_apart(node)]
    assert len(found) == num, "all but down_proj's, in each layer of the period"
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    of_delta = {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"}
    others = {"phi4_mini": {"qkv_proj", "o_proj", "gate_up_proj"}, "qwen35_08b": names | of_delta}
    assert not num or set(found) == others.get(model, names)


def test_adapters_of_folded_layers_multiply_rows_and_tokens_as_they_are(gradients_of):
    """And scale A, not the product: either decides what XLA computes again, and what it writes."""
    ours = gradients_of("mistral7b", "lora=all_linear_r8", "lora.alpha=24")
    agree(ours, gradients_of("mistral7b", "lora=all_linear_r8", "lora.alpha=24", eager=True))
    (graph,) = ours[2].model.module.model.layers.graphs.values()
    ranks = {8, 16, 24}  # of one adapter, of two and of three that read one tensor
    for part in (graph.forward, graph.backward):
        values = [(node.target, node.meta.get("val")) for node in part.graph.nodes]
        found = [(target, *value.shape) for target, value in values if isinstance(value, torch.Tensor)]
        small = [target for target, *shape in found if len(shape) > 1 and {shape[0], shape[-1]} & ranks]
        assert torch.ops.aten.mm.default not in small
        assert any(target is torch.ops.tpu_experiments.contraction.default for target in small)
        of_tokens = [target for target, *shape in found if len(shape) == 3 and shape[-1] in ranks]
        assert torch.ops.aten.mul.Tensor not in of_tokens


def test_sums_over_tokens_are_made_one_for_each_part_of_the_rows():
    graph = fx.Graph()
    given = [
        torch.randn(*shape, generator=torch.Generator().manual_seed(0)) for shape in ((4, 3, 5), (4, 3, 2), (12, 5))
    ]
    x, low, rows = (graph.placeholder(name) for name in ("x", "low", "rows"))
    for node, tensor in zip((x, low, rows), given, strict=True):
        node.meta["val"] = tensor

    def call(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    aten, product = torch.ops.aten, torch.ops.tpu_experiments.contraction.default
    scaled = call(aten.mul.Tensor, call(product, low, x, [0, 1], [0, 1]), 3.0)
    first, second = (call(aten.slice.Tensor, scaled, 0, start, start + 1) for start in (0, 1))
    turned = call(aten.transpose.int, call(product, x, low, [0, 1], [0, 1]), 0, 1)
    viewed = call(aten.view.default, call(product, rows, rows, [0], [0]), [25])
    summed = call(aten.view.default, call(aten.sum.dim_IntList, x, [0, 1], True), [5])
    heads = call(aten.view.default, x, [4, 3, 5, 1])
    heads.meta["val"] = given[0][..., None]
    of_heads = call(product, heads, low, [0, 1], [0, 1])
    of_features = call(product, x, x, [2], [2])
    read_again = call(product, low, low, [0, 1], [0, 1])
    other = call(aten.neg.default, read_again)
    of_hidden = call(product, low, x, [0, 1], [0, 1])
    graph.output([of_hidden, first, second, turned, viewed, summed, of_features, read_again, other, of_heads])
    module = fx.GraphModule({}, graph)
    plain = module(*given)
    assert in_parts(module, 5, set(range(1, 9))) == {}, "neither 4 nor 12 rows are split into 5"
    places = in_parts(module, 2, set(range(1, 10)))
    assert places == {1: 3.0, 2: 3.0, 3: 1.0, 4: 1.0, 5: 1.0}
    for place, (found, expected) in enumerate(zip(module(*given), plain, strict=True)):
        assert found.shape == ((2, *expected.shape) if place in places else expected.shape)
        torch.testing.assert_close(found.sum(0) * places[place] if place in places else found, expected)
    # The second half of the rows is in the second sum alone.
    halves = module(*(torch.cat([tensor[: len(tensor) // 2], tensor[: len(tensor) // 2] * 0]) for tensor in given))
    assert all(halves[place][0].any() and not halves[place][1].any() for place in places)


@pytest.mark.parametrize(
    ("model", "stack", "lora"),
    [
        ("qwen05b", "scanned", "all_linear_r8"),
        ("qwen05b", "unrolled", "none"),
        ("gemma3_270m", "unrolled", "all_linear_r8"),
        pytest.param("mistral7b", "scanned", "all_linear_r8", marks=pytest.mark.slow),
    ],
)
def test_projections_that_write_and_read_heads_compute_the_same(gradients_of, model, stack, lora):
    """With biases (Qwen 2), norms of heads (Gemma 3), grouped keys, and dropout of what o_proj's adapter reads."""
    from tpu_experiments.runtime.kernels.on_xla import XlaAttention

    dropout = () if lora == "none" else ("lora.dropout=0.5",)
    job = (f"lora={lora}", *dropout, f"model.stack={stack}", "model.remat=save_dots")
    kernel = XlaAttention(mesh=Mesh(), target="interpreted")
    ours = gradients_of(model, *job, "model.attention=flash", kernel=kernel)
    heads = {
        (part.leaf, getattr(part, "input_heads", 0), getattr(part, "output_heads", 0))
        for part in ours[2].model.module.modules()
        if isinstance(part, LoraOfInputHeads | LoraOfOutputHeads | LinearOfHeads)
    }
    config = ours[2].model.module.config
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    assert heads == {("q_proj", 0, queries), ("k_proj", 0, keys), ("v_proj", 0, keys), ("o_proj", queries, 0)}
    agree(ours, gradients_of(model, *job, eager=True))


@pytest.mark.slow
@pytest.mark.parametrize("model", only(["gemma3_270m"], MODELS))
def test_dropout_has_the_same_masks_forward_and_backward_folded_and_layer_by_layer(gradients_of, model):
    """Masks are a function of row, layer, projection and place: nothing of them is saved."""
    overrides = ("lora=all_linear_r8", "lora.dropout=0.5", "model.remat=layer_inputs")
    folded = gradients_of(model, *overrides)
    agree(folded, gradients_of(model, *overrides, eager=True))
    numbers = set()
    for graph in folded[2].model.module.model.layers.graphs.values():
        saved = [node for node in graph.forward.graph.output_node().args[0][1:] if node.op != "placeholder"]
        assert {node.args[1] for node in saved} == {"low"}
        numbers.add(len(saved))
    # Layers of Gated DeltaNet have adapters in their MLP alone, on two tensors.
    assert numbers == ({2, 4} if model == "qwen35_08b" else {4}), "what adapters multiply by their A, of four tensors"


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("mistral7b", ["lora.dropout=0.5"]),
        pytest.param("gemma3_270m", ["model.base=int8"], marks=pytest.mark.slow),
        pytest.param("qwen05b", ["model.base=nf4"], marks=pytest.mark.slow),
        pytest.param("qwen05b", ["lora.init=pissa"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_lengths_of_rows_folded_are_those_layer_by_layer(gradients_of, model, more):
    """Saved are what adapters multiply by their A, of four tensors, and the norms of seven weights."""
    overrides = ("lora=all_linear_r8", "lora.dora=true", "model.remat=layer_inputs", *more)
    folded = gradients_of(model, *overrides)
    agree(folded, gradients_of(model, *overrides, eager=True))
    for graph in folded[2].model.module.model.layers.graphs.values():
        saved = [node for node in graph.forward.graph.output_node().args[0][1:] if node.op != "placeholder"]
        assert len(saved) == 4 + 7
        assert {node.args[1] for node in saved} == {"low"}


@pytest.mark.slow
@pytest.mark.parametrize("dropout", ["0", pytest.param("0.5", marks=pytest.mark.slow)])
def test_lengths_of_rows_need_no_product_of_a_projection_again(gradients_of, dropout):
    """Saved is the output before it gets its length, which the length's gradient reads."""
    overrides = ("lora=all_linear_r8", f"lora.dropout={dropout}", "model.remat=save_dots")
    folded = gradients_of("mistral7b", *overrides, "lora.dora=true")
    agree(folded, gradients_of("mistral7b", *overrides, "lora.dora=true", eager=True))
    plain = gradients_of("mistral7b", *overrides)
    forward, backward = (ours - theirs for ours, theirs in zip(*map(num_products, (folded, plain)), strict=True))
    second = 7 * (dropout != "0")  # with dropout W is multiplied twice
    # Where there is no length, B (A x) and its gradients are contractions, and not among these.
    assert forward == 4 * 7 + second, "B (A x), and for the norms W A^T, A A^T and B (A A^T)"
    assert backward == 2 * 7 + second, "both gradients of B (A x)"


def num_products(found: tuple[Tensor, dict[str, Tensor], Run]) -> tuple[int, int]:
    """Matrix products of a layer's forward and of its backward pass."""
    (graph,) = found[2].model.module.model.layers.graphs.values()
    parts = [part.graph.nodes for part in (graph.forward, graph.backward)]
    forward, backward = (sum(node.target in PRODUCTS for node in nodes) for nodes in parts)
    return forward, backward


def test_several_layers_in_one_iteration(gradients_of):
    """Five layers by two: two iterations, and one layer left over."""
    overrides = ("lora=all_linear_r8", "model.tiny_arch.num_hidden_layers=5")
    grouped = gradients_of("mistral7b", *overrides, "model.stack_group=2")
    names = {name for name in grouped[2].parameters if "up_proj.lora_A" in name}
    assert names == {f"model.layers.{stack}.mlp.up_proj.lora_A" for stack in ("0:4:2", "1:4:2", "4")}
    agree(grouped, gradients_of("mistral7b", *overrides, eager=True))


@pytest.mark.parametrize(("group", "taken"), [(1, 1), (2, 2), (3, 3), (4, 3), (99, 3)])
def test_an_iteration_holds_half_of_the_layers_at_most(make_config, group, taken):
    config = make_config("model=mistral7b", "model.size=tiny", "model.tiny_arch.num_hidden_layers=6")
    source = HuggingFaceModel(config.model, seed=0)
    module = source.empty()
    rehearse = partial(source.rehearse, module)
    assert fold(module, Folding(python_loop), rehearse=rehearse, remat="none", group=group) == taken


def test_layers_that_do_not_repeat_stay_as_they_are(make_config):
    config = make_config("model=gemma3_270m", "model.size=tiny")  # six layers are one period
    source = HuggingFaceModel(config.model, seed=0)
    module = source.empty()
    names = [name for name, _ in module.named_parameters()]
    assert fold(module, Folding(python_loop), rehearse=partial(source.rehearse, module), remat="none") == 0
    assert [name for name, _ in module.named_parameters()] == names


def test_names_and_back():
    name = "model.layers.1:6:2.mlp.up_proj.weight"
    assert hugging_face_names(name) == [f"model.layers.{i}.mlp.up_proj.weight" for i in (1, 3, 5)]
    whole = {name: torch.randn(3, 4, 2), "lm_head.weight": torch.randn(5, 2), "": torch.ones(1)}
    apart = unstacked(whole)
    assert list(apart) == ["", "lm_head.weight", *hugging_face_names(name)]
    for key, tensor in whole.items():
        assert torch.equal(stacked(apart, key), tensor)
