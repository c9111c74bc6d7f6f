"""The formulas against the matrix products that stand in the training program itself, recomputation included."""

import pytest

from tests.config.composing import composed
from tests.training.tiny import Run, random_batch
from tpu_experiments.config import model_schema
from tpu_experiments.metrics import flops
from tpu_experiments.metrics import flops as flops_module
from tpu_experiments.metrics.flops import read_decoder, utilisation
from tpu_experiments.models.stack import layer_graph
from tpu_experiments.objectives.base import trained_flops

ROWS, SEQ_LEN = 2, 64


FIRST_READERS = tuple(f".layers.0.self_attn.{name}_proj" for name in "qkv")


@pytest.mark.xla
@pytest.mark.parametrize(
    ("model", "remat", "lora"),
    [
        ("mistral7b", "layer_inputs", "none"),
        *(("qwen05b", remat, "all_linear_r8") for remat in ("none", "layer_inputs", "save_attention", "save_dots")),
        pytest.param("gemma3_270m", "layer_inputs", "all_linear_r8", marks=pytest.mark.slow),
        pytest.param("gemma3_270m", "layer_inputs", "none", marks=pytest.mark.slow),
        *(pytest.param("gemma3_270m", r, "all_linear_r8", marks=pytest.mark.slow) for r in ("none", "save_dots")),
        pytest.param("smollm3_3b", "layer_inputs", "all_linear_r8", marks=pytest.mark.slow),
        *(("phi4_mini", remat, "all_linear_r8") for remat in ("layer_inputs", "save_dots")),
        ("gemma4_e2b", "none", "all_linear_r8"),
    ],
)
def test_the_program_has_the_products_that_are_counted(model: str, remat: str, lora: str) -> None:
    from tpu_experiments.planning.hlo.program import read_program
    from tpu_experiments.runtime.xla.device import XlaRuntime
    from tpu_experiments.runtime.xla.programs import hlo_of

    deeper = ["model.tiny_arch.num_hidden_layers=12"] if model == "gemma3_270m" else []
    config = composed(
        f"model={model}", "model.size=tiny", "model.dtype=float32", "model.attention=sdpa", f"model.remat={remat}",
        f"lora={lora}", *deeper,
    )  # fmt: skip
    runtime = XlaRuntime(config.hw, sharding=config.sharding)
    run = Run(config, runtime)
    batch = runtime.put(random_batch(0, rows=ROWS, seq_len=SEQ_LEN), rows_dim=1)
    found = read_program(hlo_of(run.step(run.parameters, run.state, batch)[2])).dot_flops
    arch = run.model.source.config
    flops = trained_flops(config, arch, seq_len=SEQ_LEN)
    sizes = read_decoder(arch)
    # Plain attention computes all T x T scores, not the causal half.
    causal = flops.attention / 3
    wide = getattr(sizes, "wide_dim", sizes.head_dim)
    every = 4.0 * sizes.num_heads * SEQ_LEN * sum(sizes.head_dim if window else wide for window in sizes.windows)
    again = {"none": 0.0, "layer_inputs": 1.0}.get(remat, 0.5)
    expected = flops.total + (3 + again) * (every - causal)
    if model == "gemma4_e2b":  # unrolled, so that nothing needs the gradient of what the first layer reads
        first = [shape for name, shape in sizes.adapted_by_name(config.lora).items() if name.endswith(FIRST_READERS)]
        unneeded = sum(wide * (high + config.lora.r) for wide, high in first)
        expected -= 2.0 * (unneeded + sizes.multiplied["per_layer_model_projection"])
    assert found / (ROWS * SEQ_LEN) == pytest.approx(expected, rel=1e-9)
    assert flops.model == pytest.approx(flops.total - flops.recomputation)


@pytest.mark.xla
@pytest.mark.parametrize(
    ("chunk", "lora"), [(SEQ_LEN, "none"), pytest.param(16, "all_linear_r8", marks=pytest.mark.slow)]
)
def test_an_xlstm_has_the_products_that_are_counted(chunk: int, lora: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpu_experiments.models.families import mlstm
    from tpu_experiments.planning.hlo.program import read_program
    from tpu_experiments.runtime.xla.device import XlaRuntime
    from tpu_experiments.runtime.xla.programs import hlo_of

    for module in (mlstm, flops_module):
        monkeypatch.setattr(module, "chunk_of", lambda _: chunk)
    words = ["model=xlstm_small", "model.size=tiny", "model.dtype=float32"]
    targets = [] if lora == "none" else ["lora.targets=[all-linear]"]
    config = composed(*words, f"lora={lora}", *targets)
    runtime = XlaRuntime(config.hw, sharding=config.sharding)
    run = Run(config, runtime)
    batch = runtime.put(random_batch(0, rows=ROWS, seq_len=SEQ_LEN), rows_dim=1)
    found = read_program(hlo_of(run.step(run.parameters, run.state, batch)[2])).dot_flops
    arch = run.model.source.config
    sizes = read_decoder(arch)
    assert sizes.parameters == sum(p.numel() for name, p in run.model.source.empty().named_parameters())
    counted = trained_flops(config, arch, seq_len=SEQ_LEN)
    # All scores of a chunk are computed, not the causal half.
    outside = (
        4 * 2.0 * sizes.num_layers * (arch.hidden_size * 1.5) * (chunk - flops_module.mean_keys(chunk, window=None))
    )
    assert found / (ROWS * SEQ_LEN) == pytest.approx(counted.total + outside, rel=1e-9)


@pytest.mark.xla
@pytest.mark.parametrize(
    ("chunk", "lora", "remat"),
    [
        (16, "none", "layer_inputs"),
        (16, "all_linear_r8", "save_dots"),
        pytest.param(64, "all_linear_r8", "layer_inputs", marks=pytest.mark.slow),
    ],
)
def test_a_gated_delta_net_has_the_products_that_are_counted(
    chunk: int, lora: str, remat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpu_experiments.models.families import gated_delta
    from tpu_experiments.planning.hlo.program import read_program
    from tpu_experiments.runtime.xla.device import XlaRuntime
    from tpu_experiments.runtime.xla.programs import hlo_of

    for module in (gated_delta, flops_module):
        monkeypatch.setattr(module, "delta_chunk_of", lambda _: chunk)
    words = [
        "model=qwen35_08b",
        "model.size=tiny",
        "model.dtype=float32",
        "model.attention=sdpa",
        f"model.remat={remat}",
    ]
    config = composed(*words, f"lora={lora}", *([] if lora == "none" else ["lora.targets=[all-linear]"]))
    runtime = XlaRuntime(config.hw, sharding=config.sharding)
    run = Run(config, runtime)
    batch = runtime.put(random_batch(0, rows=ROWS, seq_len=SEQ_LEN), rows_dim=1)
    found = read_program(hlo_of(run.step(run.parameters, run.state, batch)[2])).dot_flops
    arch = run.model.source.config
    sizes = read_decoder(arch)
    assert sizes.parameters == sum(p.numel() for name, p in run.model.source.empty().named_parameters())
    assert sizes.copies["q_proj"] == 2
    counted = trained_flops(config, arch, seq_len=SEQ_LEN)
    # Plain attention computes all T x T scores, not the causal half.
    all_scores = SEQ_LEN - flops_module.mean_keys(SEQ_LEN, window=None)
    again = {"layer_inputs": 1.0, "save_dots": 0.5}[remat]
    outside = (3 + again) * 4.0 * sizes.num_heads * sizes.head_dim * sizes.copies["q_proj"] * all_scores
    assert found / (ROWS * SEQ_LEN) == pytest.approx(counted.total + outside, rel=2e-2)


def test_what_a_policy_saves_is_what_the_layers_save() -> None:
    assert model_schema.SAVED is layer_graph.SAVED


def test_a_named_projection_is_not_computed_again() -> None:
    arch = composed("model=mistral7b").model.arch
    plain = trained_flops(composed("model=mistral7b"), arch, seq_len=1024)
    saved = trained_flops(composed("model=mistral7b", "model.saved=[up_proj]"), arch, seq_len=1024)
    one = 2.0 * 32 * (4096 * 14336 + 16 * 14336)
    assert plain.recomputation - saved.recomputation == pytest.approx(one)
    assert plain.model == saved.model


def test_unrolled_layers_are_computed_once() -> None:
    config = composed("model=qwen05b", "model.stack=unrolled")
    assert trained_flops(config, config.model.arch, seq_len=512).recomputation == 0


def test_utilisation_is_the_share_of_all_chips_peak() -> None:
    # 8 x 918 TFLOP/s for half a second are 3.672e15 FLOPs.
    assert utilisation(0.918e15, seconds=0.5, peak_tflops=918.0, num_devices=8) == pytest.approx(0.25)


@pytest.mark.xla
@pytest.mark.parametrize(
    ("model", "attention"),
    [
        ("modernbert_base", "sdpa"),
        ("eurobert_210m", "sdpa"),
        ("deberta_v3_base", "eager"),
        ("longformer_base", "eager"),
    ],
)
def test_encoders_have_the_products_that_are_counted(model: str, attention: str) -> None:
    import torch

    from tpu_experiments.config.masking import num_places
    from tpu_experiments.models.passes.loss import NUM_FIRST
    from tpu_experiments.objectives.base import Computing
    from tpu_experiments.objectives.masked import Masked
    from tpu_experiments.planning.hlo.program import read_program
    from tpu_experiments.runtime.xla.device import XlaRuntime
    from tpu_experiments.runtime.xla.programs import hlo_of

    config = composed(
        f"model={model}", "objective=mlm", "model.size=tiny", "model.dtype=float32", f"model.attention={attention}",
        "lora=none", "sharding=replicated", "model.stack=unrolled",
    )  # fmt: skip
    runtime = XlaRuntime(config.hw, sharding=config.sharding)
    objective = Masked(computing=Computing(loop=runtime.loop))
    run = Run(config, runtime, row_loss=objective.row_loss, count=objective.count)
    host = random_batch(0, rows=ROWS, seq_len=SEQ_LEN) | {"noise": torch.zeros(1, ROWS, dtype=torch.int32)}
    batch = runtime.put(host, rows_dim=1)
    found = read_program(hlo_of(run.step(run.parameters, run.state, batch)[2])).dot_flops / (ROWS * SEQ_LEN)
    arch = run.model.source.config
    flops = trained_flops(config, arch, seq_len=SEQ_LEN)
    # Plain attention computes all T x T scores, not the window's; the backward pass computes the logits again, and the
    # forward pass those of the first tokens; a bias is a feature more of the head.
    layers, hidden, vocab = arch.num_hidden_layers, arch.hidden_size, arch.vocab_size
    outside = 3 * 4.0 * hidden * sum(SEQ_LEN - keys for keys in flops_module.keys_of_encoder(arch, seq_len=SEQ_LEN))
    share, bias = num_places(SEQ_LEN, rate=0.15) / SEQ_LEN, 0 if model == "eurobert_210m" else 1
    head = 2.0 * share * ((hidden + bias) * (vocab + min(NUM_FIRST, vocab)) + 3 * bias * vocab)
    distances = 0.0
    if model == "deberta_v3_base":  # embeddings of distances by queries' and keys' weights, once a micro-batch
        distances = 3 * 2.0 * 2 * layers * 2 * arch.position_buckets * hidden**2 / (ROWS * SEQ_LEN)
        # Two kinds of distances are picked from all by products with ones and zeros, whose gradient is one more.
        distances += 2 * 2 * 2.0 * layers * arch.num_attention_heads * 2 * arch.position_buckets * SEQ_LEN
    if model == "longformer_base":  # global projections of one token
        distances = 3 * 2.0 * layers * 3 * hidden**2 / SEQ_LEN
    assert found == pytest.approx(flops.total + outside + head + distances, rel=1e-9)


@pytest.mark.xla
@pytest.mark.parametrize("lora", ["none", "all_linear_r8"])
def test_kto_has_the_products_of_its_second_forward_pass(lora: str) -> None:
    """That over the mismatched answers, which has no backward pass."""
    import torch

    from tpu_experiments.objectives.base import Computing
    from tpu_experiments.objectives.kto import Kto
    from tpu_experiments.planning.hlo.program import read_program
    from tpu_experiments.runtime.xla.device import XlaRuntime
    from tpu_experiments.runtime.xla.programs import hlo_of

    config = composed(
        "model=qwen05b", "objective=kto", "data=stories_pairs_ro", "model.size=tiny", "model.dtype=float32",
        f"lora={lora}", "model.attention=sdpa", "model.remat=none",
    )  # fmt: skip
    runtime = XlaRuntime(config.hw, sharding=config.sharding)
    objective = Kto(computing=Computing(loop=runtime.loop))
    run = Run(config, runtime, row_loss=objective.row_loss, count=objective.count)
    host = random_batch(0, rows=ROWS, seq_len=SEQ_LEN) | {"reference": torch.zeros(1, ROWS, SEQ_LEN)}
    found = read_program(hlo_of(run.step(run.parameters, run.state, runtime.put(host, rows_dim=1))[2])).dot_flops
    arch = run.model.source.config
    flops = trained_flops(config, arch, seq_len=SEQ_LEN)
    sizes = read_decoder(arch)
    every = 4.0 * sizes.num_heads * sizes.head_dim * sizes.num_layers * SEQ_LEN
    assert found / (ROWS * SEQ_LEN) == pytest.approx(flops.total + 4 * every - flops.attention, rel=1e-9)


@pytest.mark.xla
def test_masked_diffusion_has_the_products_of_both_sides() -> None:
    import torch

    from tpu_experiments.models.passes.loss import NUM_FIRST
    from tpu_experiments.objectives.base import Computing
    from tpu_experiments.objectives.masked_diffusion import MaskedDiffusion
    from tpu_experiments.planning.hlo.program import read_program
    from tpu_experiments.runtime.xla.device import XlaRuntime
    from tpu_experiments.runtime.xla.programs import hlo_of

    config = composed(
        "model=llama_mini", "objective=masked_diffusion", "model.size=tiny", "model.dtype=float32", "lora=none",
        "model.attention=sdpa", "sharding=replicated", "model.stack=unrolled",
    )  # fmt: skip
    runtime = XlaRuntime(config.hw, sharding=config.sharding)
    objective = MaskedDiffusion(computing=Computing(loop=runtime.loop))
    run = Run(config, runtime, row_loss=objective.row_loss, count=objective.count)
    host = random_batch(0, rows=ROWS, seq_len=SEQ_LEN) | {"noise": torch.zeros(1, ROWS, dtype=torch.int32)}
    batch = runtime.put(host, rows_dim=1)
    found = read_program(hlo_of(run.step(run.parameters, run.state, batch)[2])).dot_flops / (ROWS * SEQ_LEN)
    arch = run.model.source.config
    flops = trained_flops(config, arch, seq_len=SEQ_LEN)
    # The backward pass computes the logits again, and the forward pass those of the first tokens.
    head = 2.0 * arch.hidden_size * (arch.vocab_size + NUM_FIRST)
    assert found == pytest.approx(flops.total + head, rel=1e-9)
    causal = trained_flops(composed("model=llama_mini", "lora=none"), arch, seq_len=SEQ_LEN)
    assert flops.attention / causal.attention == pytest.approx(2 * SEQ_LEN / (SEQ_LEN + 1))


def test_keys_within_a_window_are_on_both_sides() -> None:
    seen = [sum(abs(query - key) <= 3 for key in range(10)) for query in range(10)]
    assert flops.mean_keys(10, window=3, causal=False) == sum(seen) / 10
    assert flops.mean_keys(10, window=None, causal=False) == 10


@pytest.mark.slow
@pytest.mark.xla
@pytest.mark.parametrize("model", ["modernbert_base", "eurobert_210m", "longformer_base"])
def test_classifiers_have_the_products_that_are_counted(model: str) -> None:
    """ModernBERT's head reads one state of a text, EuroBERT's every token."""
    from tpu_experiments.objectives.classify import Classify
    from tpu_experiments.planning.hlo.program import read_program
    from tpu_experiments.runtime.xla.device import XlaRuntime
    from tpu_experiments.runtime.xla.programs import hlo_of

    config = composed(
        f"model={model}", "objective=classify", "objective.labels=[a,b,c]", "model.size=tiny", "model.dtype=float32",
        "model.attention=eager", "lora=none", "sharding=replicated", "model.stack=unrolled",
    )  # fmt: skip
    runtime = XlaRuntime(config.hw, sharding=config.sharding)
    objective = Classify(labels=("a", "b", "c"))
    run = Run(config, runtime, row_loss=objective.row_loss, count=objective.count)
    host = random_batch(0, rows=ROWS, seq_len=SEQ_LEN)
    batch = runtime.put(host | {"label": host["learn"]}, rows_dim=1)
    found = read_program(hlo_of(run.step(run.parameters, run.state, batch)[2])).dot_flops / (ROWS * SEQ_LEN)
    arch = run.model.source.config
    flops = trained_flops(config, arch, seq_len=SEQ_LEN)
    keys = flops_module.keys_of_encoder(arch, seq_len=SEQ_LEN)
    outside = 3 * 4.0 * arch.hidden_size * sum(SEQ_LEN - each for each in keys)
    if model == "longformer_base":  # all pairs of tokens again, for those that are global
        outside += 3 * 4.0 * arch.hidden_size * arch.num_hidden_layers * SEQ_LEN
    assert found == pytest.approx(flops.total + outside, rel=1e-9)


@pytest.mark.xla
@pytest.mark.parametrize(
    "model_type",
    [
        "smollm3",
        "granite",
        "ministral3",
        "gemma",
        "gemma2",
        "ernie4_5",
        "cohere",
        "cohere2",
        "seed_oss",
        "exaone4",
        "llama",
        "qwen2",
        "qwen3",
    ],
)
def test_a_dense_decoder_has_the_matrices_that_are_counted(model_type: str) -> None:
    """Every parameter of transformers' class with its default sizes, and the Linear modules that LoRA may adapt."""
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    sizes = read_decoder(config)
    assert sizes.parameters == sum(p.numel() for p in module.parameters())
    linears = {n: (m.in_features, m.out_features) for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    assert dict(sizes._linears()) == linears
