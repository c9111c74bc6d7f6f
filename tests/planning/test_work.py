"""FLOPs against PyTorch's own counter over a real forward and backward pass; memory against compiled programs."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.config.composing import composed
from tests.planning.examples import LORA, MISTRAL, TARGETS
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.config.schema import STATE_BYTES, AdafactorConfig
from tpu_experiments.metrics.flops import Recomputed, decoder_flops, flops_of_token, mean_keys, read_decoder
from tpu_experiments.models.adapters.lora import inject
from tpu_experiments.models.adapters.low_rank_qat import grid_of
from tpu_experiments.optim.updates import optimizer_of
from tpu_experiments.planning.analytic import step_settings
from tpu_experiments.planning.work import StepSettings, analytic_memory, flash_attention_flops

# A CPU backward pass: the XLA device must be there before the first one of a process (tests/conftest.py).
pytestmark = pytest.mark.xla
SEQ_LEN, ROWS = 64, 2
R16 = ("lora=all_linear_r16",)
OF_MODULES = (*R16, r"+lora.rank_pattern={layers\.\(1|2\)\..*: 48, q_proj: 64}", "+lora.alpha_pattern={k_proj: 8}")
PLAIN: dict[str, Any] = {"rank_pattern": {}, "alpha_pattern": {}}
FULL = LoraConfig(r=0)
TINY = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "sliding_window": 16,
}


def counted(kind: str, *, lora: bool) -> float:
    """FLOPs per token of one forward and backward pass that PyTorch executes, attention over all T x T scores."""
    config = AutoConfig.for_model(kind, **TINY, attn_implementation="eager")
    module = AutoModelForCausalLM.from_config(config)
    if lora:
        inject(module, composed("model=tiny", "lora=all_linear_r8").lora)
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                torch.nn.init.ones_(parameter)
    ids = torch.arange(ROWS * SEQ_LEN).reshape(ROWS, SEQ_LEN) % 512
    with FlopCounterMode(display=False) as counter:
        module(input_ids=ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops() / (ROWS * SEQ_LEN)


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "qwen2", "llama"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_flops_are_those_that_pytorch_counts(kind: str, lora: bool) -> None:
    arch = {"model_type": kind, **TINY}
    decoder = read_decoder(arch)
    flops = flops_of_token(arch, seq_len=SEQ_LEN, lora=LoraConfig(r=8 if lora else 0, targets=list(TARGETS)))
    every_score = 12.0 * TINY["num_attention_heads"] * TINY["head_dim"] * TINY["num_hidden_layers"] * SEQ_LEN
    expected = flops.total - flops.attention + every_score
    if lora:  # nothing below the first layer is trained: its q, k and v need no gradient of their input
        first = [decoder.projections[name] for name in ("q_proj", "k_proj", "v_proj")]
        expected -= sum(2 * wide * high + 2 * 8 * wide for wide, high in first)
    assert counted(kind, lora=lora) == pytest.approx(expected, rel=2e-3)  # RoPE's angles are a product as well


@pytest.mark.parametrize(("seq_len", "window"), [(7, None), (16, 5), (16, 16), (16, 99), (4, 1)])
def test_mean_keys_by_counting(seq_len: int, window: int | None) -> None:
    index = torch.arange(seq_len)
    distance = index[:, None] - index[None, :]
    seen = (distance >= 0) & (distance < (window or seq_len))
    assert mean_keys(seq_len, window=window) == pytest.approx(float(seen.sum()) / seq_len)


def test_lora_is_four_n_and_full_training_six() -> None:
    elements = read_decoder(MISTRAL).matrices - read_decoder(MISTRAL).embedding  # the embedding is looked up
    lora = flops_of_token(MISTRAL, seq_len=2048, lora=LORA)
    full = flops_of_token(MISTRAL, seq_len=2048, lora=FULL)
    assert lora.total - lora.attention - lora.lora == pytest.approx(4 * elements)
    assert full.total - full.attention == pytest.approx(6 * elements)
    assert lora.weight_gradient == full.lora == 0


def test_recomputation_is_a_forward_pass_up_to_the_last_projection_and_not_counted_as_useful() -> None:
    settings = {"seq_len": 2048, "lora": LORA}
    once, twice = flops_of_token(MISTRAL, **settings), flops_of_token(MISTRAL, **settings, recomputed=Recomputed())
    assert twice.model == pytest.approx(once.total)
    last = 2.0 * 32 * 14336 * 4096  # nothing reads what down_proj would give again
    adapters = 2.0 * 32 * 16 * (4096 + 2 * 1024 + 4096 + 2 * 14336)  # B of the others; what A gives is kept
    assert twice.recomputation == pytest.approx(once.forward + once.attention / 3 + adapters - last)
    assert once.recomputation == 0


def test_lengths_of_rows_have_another_product_with_dropout_and_recompute_the_last_projection() -> None:
    settings = {"seq_len": 2048, "recomputed": Recomputed()}
    lengths = replace(LORA, dora=True)
    plain, dora = (flops_of_token(MISTRAL, **settings, lora=lora) for lora in (LORA, lengths))
    assert dora.model == plain.model
    last = 2.0 * 32 * 14336 * 4096  # whose outputs the gradient of their lengths reads
    assert dora.recomputation == pytest.approx(plain.recomputation + last + 2.0 * 32 * 16 * 4096)
    twice = flops_of_token(MISTRAL, **settings, lora=replace(lengths, dropout=0.1))
    assert twice.lora == pytest.approx(dora.lora + 2 * dora.forward)
    assert twice.recomputation == pytest.approx(dora.recomputation + dora.forward)


def test_lengths_of_rows_are_float32_with_two_moments() -> None:
    settings = {"trainable": "lora", "lora": LORA, "seq_len": 2048, "micro_rows": 1}
    plain = analytic_memory(MISTRAL, step=StepSettings(**settings))
    dora = analytic_memory(MISTRAL, step=StepSettings(**settings | {"lora": replace(LORA, dora=True)}))
    rows = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert (dora.adapters - plain.adapters) * 2**30 == pytest.approx(4 * rows)
    assert dora.optimizer == pytest.approx(2 * dora.adapters)
    assert (dora.activations - plain.activations) * 2**30 == pytest.approx(2048 * 2 * rows)


def test_gemma_spends_most_on_its_vocabulary() -> None:
    flops = flops_of_token(composed("model=gemma3_270m").model.arch, seq_len=1024, lora=FULL)
    assert 0.55 < flops.head / flops.total < 0.65


def test_a_window_bounds_the_cost_of_long_rows() -> None:
    far = flops_of_token(MISTRAL, seq_len=32768, lora=FULL).attention
    near = flops_of_token(MISTRAL | {"sliding_window": 4096}, seq_len=32768, lora=FULL).attention
    assert far / near == pytest.approx(16384.5 / 3840.06, rel=1e-4)


def test_flash_kernels_execute_what_maxtext_s_recipe_does() -> None:
    """5.94e14 FLOP per chip: Mistral 7B, 6 x 8192, forward twice (recomputed) and backward (the design note)."""
    sizes = {"batch": 6, "heads": 32, "queries": 8192, "keys": 8192, "head_dim": 128}
    forward = flash_attention_flops(**sizes, direction="forward")
    backward = flash_attention_flops(**sizes, direction="backward")
    assert backward == sum(flash_attention_flops(**sizes, direction=f"backward_{part}") for part in ("dkv", "dq"))
    assert 32 * (2 * forward + backward) == pytest.approx(5.94e14, rel=0.03)
    assert flash_attention_flops(**sizes, direction="forward", causal=False) == 2 * forward


# (settings, GiB of arguments, GiB of temporaries) that the TPU's compiler reported; table of the design note.
COMPILED = {
    "pallas 1 x 2048": ({"seq_len": 2048, "micro_rows": 1, "recompute": True, "attention": "flash"}, 13.97, 1.24),
    "sdpa 1 x 2048": ({"seq_len": 2048, "micro_rows": 1, "recompute": True}, 13.97, 2.13),
    "pallas 4 x 2048": ({"seq_len": 2048, "micro_rows": 4, "recompute": True, "attention": "flash"}, 13.97, 6.42),
    "not recomputed": ({"seq_len": 2048, "micro_rows": 1}, 13.97, 36.22 - 13.97),
}


@pytest.mark.parametrize("case", COMPILED)
def test_analytic_memory_against_the_compiler(case: str) -> None:
    settings, arguments, temporaries = COMPILED[case]
    memory = analytic_memory(MISTRAL, step=StepSettings(trainable="lora", lora=LORA, **settings))
    assert memory.arguments == pytest.approx(arguments, rel=0.01)
    assert 0.75 * temporaries < memory.temporaries < 1.45 * temporaries
    assert memory.total == pytest.approx(memory.arguments + memory.temporaries)
    assert memory.source == "analytic"


def test_rounded_weights_take_a_byte_and_the_gradient_of_every_one() -> None:
    plain, rounded = (flops_of_token(MISTRAL, seq_len=2048, lora=LORA, rounded=r) for r in (False, True))
    assert plain.lora > 0
    assert rounded.lora == 0
    assert rounded.weight_gradient == rounded.forward == plain.forward
    step = {"seq_len": 2048, "micro_rows": 1, "trainable": "lora", "recompute": True}
    step |= {"lora": LORA}
    matrices, rows = (32 * sum(product) for product in (
        [a * b for a, b in read_decoder(MISTRAL).projections.values()],
        [high for _, high in read_decoder(MISTRAL).projections.values()],
    ))  # fmt: skip
    dense, whole, groups = (analytic_memory(MISTRAL, step=StepSettings(**step, group=g)) for g in (None, 0, 128))
    assert (dense.base - whole.base) * 2**30 == pytest.approx(matrices)
    assert (whole.adapters - dense.adapters) * 2**30 == pytest.approx(4 * rows)
    assert (groups.adapters - dense.adapters) * 2**30 == pytest.approx(4 * matrices / 128)
    assert whole.optimizer == pytest.approx(2 * whole.adapters)


def test_analytic_memory_sharded_against_the_compiler() -> None:
    """1.75 + 0.80 GiB per chip, with adapters and state split as well; ours stay whole."""
    settings = {"seq_len": 1024, "micro_rows": 1, "recompute": True, "sharding": "fsdp", "chips": 8}
    memory = analytic_memory(MISTRAL, step=StepSettings(trainable="lora", lora=LORA, **settings))
    whole = 7 / 8 * (memory.adapters + memory.optimizer)
    assert memory.arguments - whole == pytest.approx(1.75, rel=0.01)
    assert 0.75 * 0.80 < memory.temporaries < 1.45 * 0.80


def test_every_weight_trained_is_float32_with_two_moments() -> None:
    arch = composed("model=qwen05b").model.arch
    step = StepSettings(seq_len=128, micro_rows=1, trainable="full")
    memory = analytic_memory(arch, step=step)
    assert memory.base == 0
    assert memory.adapters == pytest.approx(494_032_768 * 4 / 2**30)
    assert memory.optimizer == pytest.approx(2 * memory.adapters)
    factored = STATE_BYTES[AdafactorConfig._target_]
    adafactor = analytic_memory(arch, step=replace(step, state_bytes=factored))
    assert adafactor.optimizer < 0.01 * memory.optimizer


def test_ranks_of_single_modules_are_counted_as_injected() -> None:
    """Parameters, FLOPs of A and B, and on XLA no recomputation, which a loop over equal layers alone has."""
    config = composed("model=qwen05b", *OF_MODULES, "hw=v5e1", "model.stack=scanned", "model.remat=layer_inputs")
    arch, lora = config.model.arch, config.lora
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**arch), trust_remote_code=False)
    trained = inject(module, lora).trainable
    decoder = read_decoder(arch)
    assert decoder.adapter_parameters(lora) == trained
    assert not decoder.has_equal_layers(lora)
    assert decoder.has_equal_layers(replace(lora, rank_pattern={"q_proj": 64}))
    flops, equal = (
        decoder_flops(replace(config, lora=each), arch, seq_len=256) for each in (lora, replace(lora, **PLAIN))
    )
    assert flops.lora == 6.0 * trained
    assert flops.recomputation == 0 < equal.recomputation
    geometry = resolve_stages(config)[0].geometry
    memory, one_rank = (
        analytic_memory(arch, step=step_settings(replace(config, lora=each), geometry))
        for each in (lora, replace(lora, **PLAIN))
    )
    assert memory.adapters * 2**30 == 4 * trained
    assert memory.activations > 2 * one_rank.activations


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("mistral7b", "lm_head,norm"),
        ("mistral7b", "embed_tokens,layers.3.mlp"),
        ("qwen05b", "embed_tokens"),
        ("qwen05b", "lm_head,norm"),
        ("gemma3_270m", "norm,self_attn.q_proj"),
    ],
)
def test_modules_that_are_trained_whole_are_counted_as_injected(model: str, names: str) -> None:
    words = (f"lora.modules_to_save=[{names}]", "lora.ensure_weight_tying=true", "hw=v5e1")
    config = composed(f"model={model}", *R16, *words)
    arch, lora = config.model.arch, config.lora
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**arch))
    trained, decoder = inject(module, lora).trainable, read_decoder(arch)
    saved = sum(map(math.prod, decoder.saved_by_name(lora).values()))
    assert decoder.adapter_parameters(lora) + saved == trained
    trains_head = module.lm_head.weight.requires_grad
    assert decoder.trains_head(lora) == trains_head
    plain = replace(lora, modules_to_save=[])
    flops, without = (flops_of_token(arch, seq_len=256, lora=each) for each in (lora, plain))
    assert flops.head / without.head == (1.5 if trains_head else 1.0)
    whole = {n: p for n, p in module.named_parameters() if p.requires_grad and "lora_" not in n}
    in_layers = sum(p.numel() for n, p in whole.items() if p.ndim > 1 and ".layers." in n)
    assert flops.weight_gradient == 2.0 * in_layers
    step = step_settings(config, resolve_stages(config)[0].geometry)
    memory, base = (analytic_memory(arch, step=replace(step, lora=each)) for each in (lora, plain))
    assert memory.adapters * 2**30 == pytest.approx(4 * trained)
    assert memory.optimizer == pytest.approx(2 * memory.adapters)
    matrices = saved - sum(p.numel() for p in module.parameters() if p.requires_grad and p.ndim == 1)
    assert (base.base - memory.base) * 2**30 == pytest.approx(2 * matrices, abs=1)


OF_EMBEDDING = "lora.targets=[q_proj,embed_tokens]"
OF_ROWS = "+lora.trainable_token_indices={embed_tokens: [5, 7, 9], lm_head: [5, 7, 9]}"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("mistral7b", (OF_EMBEDDING,)),
        ("mistral7b", ("lora.targets=[q_proj,embed_tokens,lm_head]",)),
        ("mistral7b", (OF_ROWS,)),
        ("qwen05b", (OF_EMBEDDING, "lora.ensure_weight_tying=true")),
        ("qwen05b", ("lora.targets=[q_proj,lm_head]", "lora.ensure_weight_tying=true")),
        ("gemma3_270m", (OF_EMBEDDING,)),
        ("gemma3_270m", (OF_ROWS, "lora.modules_to_save=[norm]")),
    ],
)
def test_what_is_trained_of_an_embedding_is_counted_as_injected(model: str, words: tuple[str, ...]) -> None:
    config = composed(f"model={model}", *R16, *words, "hw=v5e1")
    arch, lora = config.model.arch, config.lora
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**arch))
    trained, decoder = inject(module, lora).trainable, read_decoder(arch)
    saved = sum(map(math.prod, decoder.saved_by_name(lora).values()))
    rows = decoder.hidden * sum(decoder.rows_by_name(lora).values())
    assert decoder.adapter_parameters(lora) + saved + rows == trained
    step = step_settings(config, resolve_stages(config)[0].geometry)
    memory = analytic_memory(arch, step=step)
    assert memory.adapters * 2**30 == pytest.approx(4 * trained)
    assert memory.optimizer == pytest.approx(2 * memory.adapters)
    plain = replace(lora, targets=[name for name in lora.targets if name.endswith("_proj")], trainable_token_indices={})
    flops, without = (flops_of_token(arch, seq_len=256, lora=each) for each in (lora, plain))
    per_rank = {"embed_tokens": decoder.hidden, "lm_head": decoder.hidden + decoder.vocab_size}
    of_vocabulary = [name for name in lora.targets if name in per_rank]
    if decoder.shares_adapter(lora):
        of_vocabulary = list(per_rank)
    assert flops.lora - without.lora == 3 * 2.0 * lora.r * sum(per_rank[name] for name in of_vocabulary)
    assert not decoder.trains_head(lora)
    assert flops.head == without.head


@pytest.mark.parametrize("choice", [R16, (*R16, "lora.dora=true"), ("lora=none",), OF_MODULES])
def test_moments_of_8_bits_have_the_bytes_of_the_optimizer_s_own_state(choice: tuple[str, ...]) -> None:
    """2.03 bytes for each trained element; norms, and B of k and v with 2,048 elements, have 8."""
    config = composed("model=qwen05b", *choice, "optim=adamw8bit", "hw=v5e1")
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.model.arch))
    if config.lora.r:
        inject(module, config.lora)
    trained = {n: p for n, p in module.named_parameters() if "lora_" in n or not config.lora.r}
    state = optimizer_of(config).init(trained)
    expected = sum(t.nbytes for name, slots in state.items() if name for t in slots.values()) / 2**30
    settings = step_settings(config, resolve_stages(config)[0].geometry)
    memory = analytic_memory(config.model.arch, step=settings)
    assert memory.optimizer == pytest.approx(expected, rel=1e-3)
    assert 2.03 <= 4 * memory.optimizer / memory.adapters < 2.2


QAT = ("model.linear=lr_qat", "model.linear_group=128")


@pytest.mark.parametrize(
    "words",
    [
        (OF_EMBEDDING,),
        (OF_ROWS,),
        ("lora.modules_to_save=[embed_tokens,norm,layers.3.mlp]", "lora.ensure_weight_tying=true"),
        QAT,
        (*QAT[:1], "lora.targets=[q_proj]"),
        ("lora=none",),
    ],
)
def test_muon_has_one_moment_of_matrices_of_layers_and_adapters_and_two_of_the_rest(words: tuple[str, ...]) -> None:
    config = composed("model=qwen05b", *R16, *words, "optim=muon", "hw=v5e1")
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.model.arch), trust_remote_code=False)
    inject(module, config.lora, grid=grid_of(config.model))
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    state = optimizer_of(config).init(trained)
    expected = sum(t.nbytes for name, slots in state.items() if name for t in slots.values())
    memory = analytic_memory(config.model.arch, step=step_settings(config, resolve_stages(config)[0].geometry))
    assert memory.optimizer * 2**30 == pytest.approx(expected)


def test_what_is_saved_by_name_is_what_is_not_computed_again() -> None:
    """The output of down_proj, which the gradient of its lengths reads."""
    lora = replace(LORA, dora=True)
    flops = [flops_of_token(MISTRAL, seq_len=2048, lora=lora, recomputed=Recomputed(n)) for n in ((), ("down_proj",))]
    assert flops[0].recomputation - flops[1].recomputation == pytest.approx(2.0 * 32 * (14336 + 16) * 4096)
    step = StepSettings(trainable="lora", lora=lora, seq_len=2048, micro_rows=1, recompute=True)
    memory = [analytic_memory(MISTRAL, step=replace(step, saved=names)) for names in ((), ("down_proj",))]
    assert (memory[1].activations - memory[0].activations) * 2**30 == pytest.approx(2 * 2048 * 32 * 4096)


def test_gemma_s_vocabulary_is_what_128_rows_cannot_hold() -> None:
    """128 rows of 1,024 tokens: 128 x 1024 x 262144 x 6 bytes of logits alone."""
    arch = composed("model=gemma3_270m").model.arch
    memory = analytic_memory(
        arch, step=StepSettings(seq_len=1024, micro_rows=128, trainable="lora", lora=replace(LORA, r=8))
    )
    assert memory.logits == pytest.approx(192.0)
    small = analytic_memory(
        arch, step=StepSettings(seq_len=1024, micro_rows=4, trainable="lora", lora=replace(LORA, r=8))
    )
    assert small.logits == pytest.approx(6.0)
