"""task=certify: what is right is right, what is refused is refused, and every seeded fault is found."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests import forks
from tests.data.small_tokenizers import byte_level, with_template
from tests.hub import HubServer
from tests.tasks.certify_faults import FAULTS, verdicts_with
from tests.tiers import only
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.tokens import tokenize
from tpu_experiments.data.tokens.tokenizer import CHAT_FORMATS
from tpu_experiments.tasks.certify import tokens
from tpu_experiments.tasks.certify.checks import Check, NotChecked, Wrong, checked, verdict_of, within
from tpu_experiments.tasks.certify.page import digest_of

pytestmark = [pytest.mark.xla, pytest.mark.filterwarnings("ignore")]  # PEFT's and transformers' own
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENIZER = "model.tokenizer_path=tpu_experiments/samples/tokenizer"
BATCH = ("trainer.seq_len=128", "trainer.global_batch_rows=8", "data=sample_chat", "data_size=sample")


def certify(folder: Path, *words: str, place: Path) -> Any:
    command = ["run.py", "task=certify", "model=qwen05b", f"model.path={folder}", TOKENIZER, "name=x", *BATCH, *words]
    return forks.run([*command, f"output_dir={place}"])


def config_of(kind: str, **values: Any) -> Any:
    return CONFIG_MAPPING[kind](**SIZES | values)


def content_of(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "certificates" / "x" / "certificate.json").read_text())
    return found


def test_a_folder_with_a_config_alone_is_certified_and_the_page_is_signed(tmp_path):
    config_of("qwen2").save_pretrained(tmp_path / "model")
    words = ("hw=v5e8", "task.machines=[v6e1]", "task.method=analytic")
    done = certify(tmp_path / "model", *words, place=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    content = content_of(tmp_path)
    verdicts = {check["name"]: check["verdict"] for check in content["checks"]}
    assert verdicts == {
        **dict.fromkeys(("isolation", "logits", "adapter", "folded", "export", "generation"), "right"),
        **{"weights": "not checked", "step v5e8": "right", "step v6e1": "right"},
        **{"tokenizer": "right", "chat": "right", "tools": "not checked", "reasoning": "not checked"},
    }, content["checks"]
    step = next(check for check in content["checks"] if check["name"] == "step v5e8")["figures"]
    assert step["method"] == "analytic"
    assert 0 < step["gib"] < step["limit_gib"]
    assert content["sha256"] == digest_of(content)
    assert content["sha256"] != digest_of(content | {"verdict": "failed"})
    file = tmp_path / "model" / "config.json"
    assert content["files"][str(file)] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert content["versions"]["torch"] == torch.__version__.partition("+")[0] or content["versions"]["torch"]
    page = (tmp_path / "certificates" / "x" / "certificate.md").read_text()
    assert f"`{content['sha256']}`" in page
    assert len(re.findall(r"^\| [\w ]+ \| (?:right|not checked) \|", page, re.M)) == len(verdicts)


def test_a_refused_model_has_exit_code_2_and_a_page_with_the_sentence(tmp_path):
    config_of("bert").save_pretrained(tmp_path / "model")
    done = certify(tmp_path / "model", "task.checks=[isolation,logits]", "model.attention=eager", place=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    (isolation, logits) = content_of(tmp_path)["checks"]
    assert (isolation["verdict"], logits["verdict"]) == ("refused", "not checked")
    assert "bert are not those that it computes for a document alone" in isolation["said"]


def test_nothing_of_others_is_written_over_and_nothing_refused_is_written(tmp_path):
    own = tmp_path / "certificates" / "x"
    own.mkdir(parents=True)
    (own / "notes.txt").write_text("mine")
    config_of("qwen2").save_pretrained(tmp_path / "model")
    done = certify(tmp_path / "model", place=tmp_path)
    assert done.returncode == 2
    assert "it holds notes.txt and no certificate.json" in done.stderr
    assert [file.name for file in own.iterdir()] == ["notes.txt"]
    other = certify(tmp_path / "none", place=tmp_path / "y")
    assert other.returncode == 2
    assert "there is no such folder" in other.stderr
    assert not (tmp_path / "y").exists()
    wrong = certify(tmp_path / "model", "task.checks=[isolatoin]", place=tmp_path / "y")
    assert wrong.returncode == 2
    assert "task.checks has 'isolatoin'; there is no such check. Did you mean 'isolation'?" in wrong.stderr


def test_weights_are_compared_where_they_are_there(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of("qwen2"), dtype=torch.float32).save_pretrained(tmp_path / "model")
    done = certify(tmp_path / "model", "task.checks=[weights]", place=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (weights,) = content_of(tmp_path)["checks"]
    assert weights["said"].startswith("with all 2 layers the logits agree to")
    assert str(tmp_path / "model" / "model.safetensors") in content_of(tmp_path)["files"]


def with_bias(folder):
    """A tensor that nothing reads, since the config has no biases."""
    file = folder / "model.safetensors"
    bias = {"model.layers.1.mlp.up_proj.bias": torch.ones(96)}
    save_file({**load_file(file), **bias}, file, {"format": "pt"})


def with_one_layer(folder):
    """Weights of two layers, and a config of one."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 1, "layer_types": None}))


def with_a_nan(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def with_an_index_alone(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def with_another_format(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (with_bias, "1 tensor that Qwen2ForCausalLM has not"),
        pytest.param(with_one_layer, "tensors that Qwen2ForCausalLM has not", marks=pytest.mark.slow),
        pytest.param(with_a_nan, "NaN", marks=pytest.mark.slow),
        (with_an_index_alone, "model-00001-of-00002.safetensors"),
        pytest.param(with_another_format, "no model.safetensors and no", marks=pytest.mark.slow),
    ],
)
def test_weights_that_training_refuses_are_refused(fault, said, tmp_path):
    """transformers leaves out what it does not know, and the layers behind the compared ones of a large model."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of("qwen2"), dtype=torch.float32).save_pretrained(tmp_path / "model")
    fault(tmp_path / "model")
    done = certify(tmp_path / "model", "task.checks=[weights]", place=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    (weights,) = content_of(tmp_path)["checks"]
    assert weights["verdict"] == "refused"
    assert said in weights["said"]


def test_a_compilation_that_takes_too_long_is_ended_and_formulas_plan(tmp_path):
    config_of("qwen2").save_pretrained(tmp_path / "model")
    words = ("task.checks=[step]", "hw=v5e1", "task.method=compiled", "task.compile_minutes=0.0001")
    done = certify(tmp_path / "model", *words, place=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (step,) = content_of(tmp_path)["checks"]
    assert "by formulas, since compiling took more than 0.0001 minutes" in step["said"]


# ---- seeded faults ------------------------------------------------------------------------------------------

QUICK = {
    "adapters with twice the scale": ("llama", {"adapter", "export"}),
    "documents of a row together": ("llama", {"isolation"}),
    "no RoPE": ("llama", {"logits"}),
    "biases left out": ("qwen2", {"logits"}),
    "heads exchanged": ("qwen2", {"logits"}),
    "buffers that are not set": ("qwen3", {"logits"}),
    "windows one token longer": ("mistral", {"isolation"}),
    "a tied head of its own": ("gemma2", {"adapter", "export"}),
    "head without its cap": ("gemma2", {"adapter"}),
    "folded layers backwards": ("gemma2", {"folded"}),
    "half an adapter merged": ("llama", {"export"}),
    "the token after the next is learnt": ("llama", {"adapter"}),
}
IN_EVERY_RUN = ("adapters with twice the scale", "documents of a row together", "no RoPE", "half an adapter merged")


@pytest.mark.parametrize("fault", only(IN_EVERY_RUN, QUICK))
def test_a_seeded_fault_is_found(fault, make_config, tmp_path, monkeypatch):
    family, found_by = QUICK[fault]
    FAULTS[fault](monkeypatch)
    verdicts = verdicts_with(family, make_config, tmp_path)
    wrong = {name for name, check in verdicts.items() if check.verdict in ("failed", "refused")}
    assert found_by <= wrong, verdicts


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_without_a_fault_all_is_right(family, make_config, tmp_path):
    verdicts = verdicts_with(family, make_config, tmp_path)
    assert {check.verdict for check in verdicts.values()} == {"right"}, verdicts


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("llama", ("lora.targets=[q_proj,embed_tokens]", "+lora.trainable_token_indices={lm_head: [5, 3000]}")),
        ("gemma2", ("lora.targets=[q_proj,embed_tokens]", "lora.ensure_weight_tying=true")),
        pytest.param("gemma2", ("+lora.trainable_token_indices={embed_tokens: [5]}",), marks=pytest.mark.slow),
    ],
)
def test_what_is_trained_of_the_vocabulary_is_compared_too(family, words, make_config, tmp_path):
    verdicts = verdicts_with(family, make_config, tmp_path, *words)
    assert {check.verdict for check in verdicts.values()} == {"right"}, verdicts
    assert verdicts["adapter"].figures["gradients"] is not None
    assert "embed_tokens" in verdicts["adapter"].figures["targets"]


# ---- tokenizers and templates -------------------------------------------------------------------------------


def format_of(name: str, *markers: str) -> Any:
    template = (CHAT_FORMATS / f"{name}.jinja").read_text(encoding="utf-8")
    return with_template(byte_level(), template, *markers)


QWEN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@pytest.fixture
def config():
    return CONFIG_MAPPING["llama"](vocab_size=600, bos_token_id=1, eos_token_id=2)


def test_qwen3s_format_learns_ends_tools_and_reasoning(config):
    tokenizer = format_of("qwen3", *QWEN)
    seen = tokens.look_at_turns(tokenizer, config=config, folder=None)
    assert seen.figures == {"ends": ["<|im_end|>"] * 4}
    assert "'<|im_end|>'" in tokens.look_at_tools(tokenizer, config=config, folder=None).said
    assert "'<|im_end|>'" in tokens.look_at_reasoning(tokenizer, config=config, folder=None).said
    assert tokens.look_at_texts(tokenizer, config=config).figures["end"] == tokenizer.eos_token_id


def test_a_template_without_a_place_for_tools_or_none_at_all_is_not_checked(config):
    plain = format_of("chatml")
    tokens.look_at_turns(plain, config=config, folder=None)
    with pytest.raises(NotChecked, match="such rows are refused: a conversation has"):
        tokens.look_at_tools(plain, config=config, folder=None)
    with pytest.raises(NotChecked, match="there is no chat template"):
        tokens.look_at_turns(byte_level(), config=config, folder=None)


def test_an_end_that_is_not_learnt_is_found(config, monkeypatch):
    tokenizer = format_of("qwen3", *QWEN)
    plain = tokenize.flags_of

    def mutant(encoding, *, rendered):
        flags = plain(encoding, rendered=rendered)
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        flags[[n for n, token in enumerate(encoding.ids) if token == end]] = 0
        return flags

    monkeypatch.setattr(tokenize, "flags_of", mutant)
    with pytest.raises(Wrong, match=r"which ends no answer|answers are learnt"):
        tokens.look_at_turns(tokenizer, config=config, folder=None)


def test_tokens_without_an_embedding_are_found(config):
    config.vocab_size = 100
    with pytest.raises(Wrong, match=r"token \d+ has no embedding: the model has 100"):
        tokens.look_at_texts(byte_level(), config=config)


def test_a_template_that_refuses_conversations_is_refused(config):
    tokenizer = with_template(byte_level(), "{{ raise_exception('no') }}")
    with pytest.raises(ConfigError, match="refuses"):
        tokens.look_at_turns(tokenizer, config=config, folder=None)


# ---- verdicts -----------------------------------------------------------------------------------------------


def test_verdicts():
    def ends_with(error):
        def look():
            raise error

        return checked("x", look)

    assert ends_with(ConfigError("a=b; no.")).verdict == "refused"
    assert ends_with(KeyError("inv_freq")) == Check("x", "failed", "ended with KeyError: 'inv_freq'", 0.0)
    with pytest.raises(Wrong, match=r"logits differ: flash by nan of the largest, and rounding explains 1e-05"):
        within({"head": 1e-7, "flash": float("nan")}, most=1e-5, what="logits")
    made = {verdict: Check("x", verdict, "") for verdict in ("right", "refused", "failed", "not checked")}
    assert verdict_of([made["right"], made["refused"], made["failed"]]) == "failed"
    assert verdict_of([made["right"], made["refused"], made["not checked"]]) == "refused"
    assert verdict_of([made["right"], made["not checked"]]) == "right"
    assert verdict_of([made["right"], Check("logits", "not checked", "")]) == "not checked"
    assert verdict_of([made["not checked"]]) == "not checked"


def test_a_model_of_which_no_copy_is_computed_is_not_right(make_config, tmp_path, monkeypatch):
    for copied in ("small_copy", "shallow_copy"):
        monkeypatch.setattr(f"tpu_experiments.models.sources.isolation.{copied}", lambda config: config.no_such_value)
    verdicts = verdicts_with("llama", make_config, tmp_path)
    assert verdicts["isolation"].verdict == "refused"
    assert "cannot be checked for transformers' llama, which computes no small copy" in verdicts["isolation"].said


@pytest.mark.slow
def test_the_step_is_compiled_for_each_machine(tmp_path):
    config_of("qwen2").save_pretrained(tmp_path / "model")
    words = ("task.checks=[adapter,step]", "hw=v5e1", "task.machines=[v6e1]", "task.method=compiled")
    done = certify(tmp_path / "model", *words, place=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    adapter, *steps = content_of(tmp_path)["checks"]
    assert adapter["verdict"] == "right", "its gradients are taken beside torch_xla's device"
    assert len(steps) == 2
    for step in steps:
        assert "compiled by libtpu" in step["said"]
        assert step["figures"]["method"] == "compiled"


def test_of_a_hub_id_no_weights_are_fetched(tmp_path):
    (tmp_path / "set").mkdir()
    config_of("qwen2").save_pretrained(tmp_path / "set")
    (tmp_path / "set" / "model.safetensors").write_bytes(b"never read")
    words = ["run.py", "task=certify", "model=qwen05b", "model.path=org/set", TOKENIZER, "name=x", *BATCH]
    with HubServer(tmp_path / "set") as hub:
        env = os.environ | hub.environment(tmp_path / "home")
        command = [sys.executable, *words, "task.checks=[isolation,weights]", f"output_dir={tmp_path}"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert hub.reads["config.json"] == 1
        assert hub.reads["model.safetensors"] == 0
    assert done.returncode == 0, done.stdout + done.stderr
    isolation, weights = content_of(tmp_path)["checks"]
    assert (isolation["verdict"], weights["verdict"]) == ("right", "not checked")
