"""Longformer: transformers' logits, losses and gradients, one program without a host read, and what is exported."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.models.encoders import ENCODERS, packed_rows, source_of
from tests.models.test_classification import LABELS, labelled_rows, module_of
from tests.objectives.test_classify_runs import ADAPTERS, evaluated, loss_of, rows_of_test
from tests.objectives.test_replaced_token import num_reads
from tests.tiers import only
from tests.training.runs import finished, run
from tests.training.tiny import Run, random_batch
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.config.objectives.masked import MaskedConfig
from tpu_experiments.export.full import write_model
from tpu_experiments.models.families.classification import class_logits, texts_of
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.forward import logits_of
from tpu_experiments.models.sources.isolation import small_copy
from tpu_experiments.objectives.base import Computing
from tpu_experiments.objectives.classify import Classify
from tpu_experiments.objectives.masked import Masked
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.runtime.xla.replay import NUM_FIRST

pytestmark = pytest.mark.xla
LONGFORMER = next(one for one in ENCODERS if one.model_type == "longformer")
WINDOWS = [4, 8, 8, 4]
"""Of four layers; transformers pads to the largest, which must be a multiple of the others."""


def pair(auto, *, labels=(), **values):
    """The module that is trained and transformers' own, with the same large weights."""
    source = source_of(LONGFORMER, labels=labels, attention_window=WINDOWS, **values)
    ours = module_of(source)
    reference = auto.from_config(source.config, dtype=torch.float32).eval()
    reference.load_state_dict(ours.state_dict())
    return ours, reference


def test_random_weights_are_those_of_transformers():
    source = source_of(LONGFORMER)
    torch.manual_seed(0)
    reference = AutoModelForMaskedLM.from_config(source.config, dtype=torch.float32)
    names = [name for name, _ in reference.named_parameters()]
    assert names == [name for name, _ in source.empty().named_parameters()]
    assert all(torch.equal(own.tensor, reference.get_parameter(own.name)) for own in source.weights(names))


def test_packed_documents_have_transformers_logits_and_gradients():
    """Documents of 21 and 16 tokens are longer than every band."""
    ours, reference = pair(AutoModelForMaskedLM)
    rows = packed_rows()
    weights_TV = torch.randn(40, 512, generator=torch.Generator().manual_seed(3))
    parameters = {name: p.detach().clone().requires_grad_() for name, p in ours.named_parameters()}
    logits_BTV = logits_of(ours, parameters, rows, causal=False)
    total = expected = torch.zeros(())
    for number in (1, 2):
        here = rows["segments"][0] == number
        theirs = reference(input_ids=rows["ids"][:, here].long()).logits
        torch.testing.assert_close(logits_BTV[:, here], theirs, atol=1e-5, rtol=1e-5)
        total = total + (logits_BTV[:, here] * weights_TV[here]).sum()
        expected = expected + (theirs * weights_TV[here]).sum()
    found = torch.autograd.grad(total, list(parameters.values()))
    wanted = torch.autograd.grad(expected, list(reference.parameters()), allow_unused=True)
    for name, own, other in zip(parameters, found, wanted, strict=True):  # that of a key's bias is 0 but for rounding
        if "_global." in name:
            assert other is None
            assert not own.any(), name
        else:
            assert float((own - other).abs().max()) <= 2e-5 * float(other.abs().max()) + 1e-5, name


def test_texts_of_a_row_have_the_logits_of_transformers_with_a_global_first_token():
    ours, reference = pair(AutoModelForSequenceClassification, labels=LABELS)
    rows, texts, order = labelled_rows()
    named = dict(ours.named_parameters())
    with torch.no_grad():
        found = class_logits(ours, named, texts_of(rows))[:, :3]
        alone = torch.cat([reference(input_ids=ids[None]).logits for ids in texts])
        local = torch.cat([
            reference(input_ids=ids[None], global_attention_mask=torch.zeros_like(ids[None])).logits for ids in texts
        ])  # fmt: skip
    torch.testing.assert_close(found, alone[torch.tensor(order)], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(alone, local, atol=1e-2)


def test_the_check_before_a_run_has_narrow_bands():
    """Wider than its documents, a band would hide nothing there."""
    for windows in (512, [512] * 4):
        assert small_copy(source_of(LONGFORMER, attention_window=windows).config).attention_window in (4, [4, 4])


def test_attention_that_it_has_not_is_refused():
    with pytest.raises(ConfigError, match=r"model\.attention=sdpa; .* use model\.attention=eager"):
        source_of(LONGFORMER, attention="sdpa").empty()


def test_a_checkpoint_is_loaded_and_exported_again(tmp_path):
    _, reference = pair(AutoModelForMaskedLM)
    reference.save_pretrained(tmp_path / "theirs")
    model = ModelConfig(name="x", path=str(tmp_path / "theirs"), dtype="float32", attention="eager")
    source = HuggingFaceModel(model, seed=0, head="masked_lm", causal=False)
    module = source.empty()
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    source.require_weights(shapes)
    weights = {named.name: named.tensor for named in source.weights(list(shapes))}
    write_model(
        str(tmp_path / "ours"),
        tensors=weights,
        config=source.export_config,
        architecture=type(module).__name__,
        dtype=torch.float32,
        tokenizer=AutoTokenizer.from_pretrained("tpu_experiments/samples/tokenizer"),
    )
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "ours", trust_remote_code=False).eval()
    ids = packed_rows()["ids"][:, :21].long()
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, reference(input_ids=ids).logits)


WORDS = ("model=longformer_base", "model.size=tiny", "model.dtype=float32", "sharding=replicated",
         "model.tiny_arch.hidden_size=32")  # fmt: skip
LABELLED = ("objective=classify", "objective.labels=[a,b,c]")
CASES = {
    "mlm": ("objective=mlm", "lora=none"),
    "classify, adapters": (*LABELLED, "lora.r=4", "lora.targets=[all-linear]"),
    "classify": (*LABELLED, "lora=none"),
    "mlm, unrolled": ("objective=mlm", "lora=none", "model.stack=unrolled"),
}


def run_of(config):
    """A run, and the batches that it takes."""
    runtime = make_runtime(config)
    is_masked = isinstance(config.objective, MaskedConfig)
    objective = Masked(computing=Computing(loop=runtime.loop)) if is_masked else Classify(labels=("a", "b", "c"))
    run = Run(config, runtime, row_loss=objective.row_loss, count=objective.count)
    # Rows of a length that no other test has: what this process has compiled before is not compiled again.
    sent = [random_batch(i, rows=2, seq_len=44) for i in range(NUM_FIRST + 2)]
    noise = torch.arange(2, dtype=torch.int32)[None]
    more = [{"noise": noise} if is_masked else {"noise": noise, "label": batch["ids"] % 3} for batch in sent]
    return run, [runtime.put(batch | own, rows_dim=1) for batch, own in zip(sent, more, strict=True)]


@pytest.mark.parametrize("case", only(["mlm", "classify, adapters"], CASES))
def test_on_xla_one_program_without_a_host_read_trains_as_plain_torch_does(make_config, case):
    import torch_xla.debug.metrics as met

    run, batches = run_of(make_config(*WORDS, *CASES[case]))
    before = {name: p.cpu().clone() for name, p in run.parameters.items()}
    compiles = run.runtime.counters().num_compiles
    met.clear_counters()
    outputs = [run.program(batch) for batch in batches[:NUM_FIRST]]  # traced; the numbers that go into them are read
    run.runtime.wait()
    reads = num_reads(met)
    outputs += [run.program(batch) for batch in batches[NUM_FIRST:]]
    run.runtime.wait()
    assert [name for name in met.counter_names() if name.startswith("aten::")] == []
    assert num_reads(met) == reads
    assert run.runtime.counters().num_compiles == compiles + 1
    losses = [float(output.loss.cpu()) for output in outputs]
    is_still = {name for name, p in run.parameters.items() if torch.equal(p.cpu(), before[name])}
    # Without global tokens their projections have no gradient: biases stay, and weight decay alone moves matrices.
    assert is_still == {name for name in before if "mlm" in case and name.endswith("_global.bias")}
    plain, sent = run_of(make_config(*WORDS, *CASES[case], "hw.runtime=eager"))
    assert losses == pytest.approx([float(plain.program(batch).loss) for batch in sent], rel=1e-5)


@pytest.mark.slow
def test_a_whole_run_exports_what_transformers_loads_and_is_scored(tmp_path):
    words = ("model=longformer_base", "objective=mlm", 'objective.mask_token="<|im_end|>"', "data=sample_text")
    words += ("debug=smoke", "lora=none", "sharding=replicated", "hw.runtime=eager", "name=long")
    finished(*words, "trainer.max_stage_steps=2", output_dir=tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "long" / "model", dtype=torch.float32).eval()
    ours = source_of(LONGFORMER).built(loaded.config, dtype=torch.float32).eval()
    ours.load_state_dict(loaded.state_dict())
    rows = packed_rows(rows=1)
    with torch.no_grad():
        found = logits_of(ours, dict(ours.named_parameters()), rows, causal=False)[0, :21]
        torch.testing.assert_close(found, loaded(input_ids=rows["ids"][:, :21].long()).logits[0], atol=1e-5, rtol=1e-5)
    done = run("task=evaluate", f"task.run={tmp_path / 'long'}", "hw.runtime=eager", output_dir=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_loads_a_classifiers_adapter_onto_transformers_class(tmp_path):
    """Adapters are on the projections of global tokens too."""
    from peft import PeftModel

    words = ["model=longformer_base" if word == "model=modernbert_base" else word for word in ADAPTERS]
    result = finished(*words, output_dir=tmp_path)
    place = tmp_path / "labels"
    assert any("query_global.lora_B" in name for name in load_file(place / "adapter" / "adapter_model.safetensors"))
    _, found = evaluated(tmp_path, tmp_path)
    base = AutoModelForSequenceClassification.from_pretrained(result["base_path"], trust_remote_code=False)
    model = PeftModel.from_pretrained(base, place / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(place / "adapter")
    with torch.no_grad():
        expected = loss_of(model, tokenizer, rows_of_test(tmp_path))
    assert found["loss"] == pytest.approx(expected, abs=1e-4)
