"""Layers of Gated DeltaNet on torch_xla: one program a step and two to write, gradients of padding, rules, refusals.

Packed rows, adapters in PEFT and losses of steps are in test_families.py and test_decoders.py, folded layers in
test_fold.py, the rule in test_gated_delta.py."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.config.composing import composed
from tests.models.generation.small import prompts_of
from tests.models.one_program import require_one_program
from tests.models.test_families import alone
from tests.training.tiny import Run, random_batch
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.mesh import mesh_of
from tpu_experiments.config.model_schema import LoraConfig, ModelConfig
from tpu_experiments.config.task_schema import ChoiceConfig
from tpu_experiments.models.families import delta_net, gated_delta
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.forward import logits_of
from tpu_experiments.models.passes.generation import Decoder
from tpu_experiments.models.sources.build import build_model
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.models.sources.isolation import require_isolation
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.runtime.sharding import ShardingTable
from tpu_experiments.runtime.xla.replay import NUM_FIRST

pytestmark = pytest.mark.xla  # importing transformers' models imports torch_xla
TINY = ("model=qwen35_08b", "model.size=tiny", "model.dtype=float32")
TWO = ("+model.tiny_arch.layer_types=[linear_attention,full_attention]", "model.tiny_arch.num_hidden_layers=2")
NEW, BUCKET = 6, 16


def test_the_preset_has_the_parameters_that_it_names():
    config = composed("model=qwen35_08b", "lora=none")
    module = HuggingFaceModel(replace(config.model, init="random"), seed=0).empty()
    assert sum(p.numel() for p in module.parameters()) == 752_393_024
    assert sum(type(part) is delta_net.DeltaNet for part in module.modules()) == 18


def test_steps_on_xla_are_one_program_without_a_host_read(monkeypatch):
    """Rows of 38 tokens, in chunks of 16 with what is left over."""
    monkeypatch.setattr(gated_delta, "delta_chunk_of", lambda _: 16)
    config = composed(*TINY, *TWO, "lora=all_linear_r8", "lora.targets=[all-linear]")
    runtime = make_runtime(config)
    run = Run(config, runtime)
    batches = [runtime.put(random_batch(i, rows=2, seq_len=38), rows_dim=1) for i in range(NUM_FIRST + 3)]
    require_one_program(run, runtime, batches)


def test_gradients_of_a_row_that_ends_in_much_padding_are_finite():
    """70 tokens of padding have one key and the same decay, and fill a chunk."""
    config = composed(*TINY, *TWO, "lora=none", "hw.runtime=eager")
    run = Run(config, EagerRuntime(config.hw))
    batch = random_batch(0, rows=1, seq_len=96)
    for name in ("ids", "learn", "positions", "segments"):
        batch[name][..., 26:] = 0
    gradients, losses = run.step.gradients(run.parameters, batch, torch.ones(()))
    assert losses.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.slow
def test_tokens_from_the_states_are_those_of_transformers_in_two_programs():
    config = composed(*TINY, *TWO, "+model.tiny_arch.initializer_range=0.2")
    source = HuggingFaceModel(config.model, seed=0)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32, attn_implementation="eager").eval()
    prompts, expected = prompts_of(1, 7, BUCKET), []
    for ids in prompts:
        found = list(ids)
        with torch.no_grad():
            for _ in range(NEW):
                found.append(int(theirs(input_ids=torch.tensor([found]), use_cache=False).logits[0, -1].argmax()))
        expected.append(found[len(ids) :])
    runtime = make_runtime(config)
    trained = {name: p.detach() for name, p in theirs.named_parameters()}
    module = build_frozen(source, lora=LoraConfig(r=0), trained=trained, place=runtime.place)
    how = {"num_rows": 3, "max_new_tokens": NEW, "tokens_per_call": 5, "seed": 0}
    decoder = Decoder(module, runtime=runtime, choice=ChoiceConfig(), **how)
    before = runtime.counters().num_compiles
    for _ in range(2):
        *_, written = decoder.stream(prompts, draws=range(3), bucket=BUCKET)
        assert written == expected
    assert runtime.counters().num_compiles - before == decoder.num_programs == 2
    shapes = [tuple(t.shape) for name, t in decoder.buckets[BUCKET].state.items() if name.startswith("layer0")]
    assert shapes == [(3, 3, 128), (3, 4, 16, 16)]  # of no slots


def test_the_text_of_a_checkpoint_that_sees_is_loaded(tmp_path):
    """As the Hub's are: with a vision tower, and a head for further tokens, whose names transformers ignores."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {**composed(*TINY, *TWO).model.tiny_arch, "tie_word_embeddings": True}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 64}
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    theirs = Qwen3_5ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    save_file({**stored, "mtp.fc.weight": torch.zeros(64, 128)}, tmp_path / "model.safetensors")
    source = HuggingFaceModel(ModelConfig(name="x", path=str(tmp_path), dtype="float32", attention="flash"), seed=0)
    built = build_model(source, lora=LoraConfig(r=0), seed=0, place=lambda tensor, name: tensor)
    rows = {name: tensor[0, :1] for name, tensor in random_batch(3).items() if name != "lr"}
    with torch.no_grad():
        ours = logits_of(built.module.eval(), built.trainable, rows)[0][rows["segments"][0] > 0]
    torch.testing.assert_close(ours, alone(theirs, rows), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sharding", ["fsdp", "fsdp_tensor"])
def test_every_large_matrix_is_split(sharding):
    config = composed("model=qwen35_08b", "lora=none", f"sharding={sharding}", "hw=v5e8")
    module = HuggingFaceModel(replace(config.model, init="random"), seed=0).empty()
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    table = ShardingTable(config.sharding, mesh=mesh_of(config.hw, config.sharding))
    table.check(shapes)
    whole = {name for name, shape in shapes.items() if len(shape) == 2 and not any(table.axes(name, shape))}
    assert {name.rpartition("linear_attn.")[2] for name in whole} == {"in_proj_a.weight", "in_proj_b.weight"}


def test_layers_that_do_not_end_a_document_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plain = gated_delta.over_rows
    monkeypatch.setattr(delta_net, "over_rows", lambda rule, segments: plain(rule, torch.ones_like(segments)))
    with pytest.raises(ConfigError, match="qwen3_5_text a document changes the logits of the next one"):
        require_isolation(HuggingFaceModel(composed(*TINY).model, seed=0), is_packed=True)


def test_a_class_that_is_not_known_is_refused(monkeypatch):
    monkeypatch.delitem(delta_net.CLASSES, "Qwen3_5GatedDeltaNet")
    source = HuggingFaceModel(composed(*TINY).model, seed=0)
    with pytest.raises(ConfigError, match="qwen3_5_text; 0 of its 6 linear_attention layers are of a class"):
        source.empty()
