"""Python code that a checkpoint or a tokenizer brings: refused, ignored or run, as `model.remote_code` says."""

import ast
import io
import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.config.composing import composed
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.models.huggingface import HuggingFaceModel, config_from_arch
from tpu_experiments.models.sources.build import describe
from tpu_experiments.training.card import _usage

PACKAGE = Path(__file__).parents[2] / "tpu_experiments"
SAMPLES = PACKAGE / "samples"
CODE = """
open({mark!r}, "w").close()
from transformers import MistralConfig, MistralForCausalLM
class OwnConfig(MistralConfig):
    model_type = {kind!r}
class OwnModel(MistralForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where code of the checkpoint leaves a mark; a question on the terminal is answered with yes."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 99))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    return tmp_path / "mark"


def checkpoint(tmp_path: Path, *, kind: str) -> Path:
    """The shipped base with code of its own, under a model type that transformers knows or does not know."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(SAMPLES / "tiny_base", folder)
    (folder / "own.py").write_text(CODE.format(mark=str(tmp_path / "mark"), kind=kind))
    values = json.loads((folder / "config.json").read_text())
    values |= {"auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}, "model_type": kind}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def of(folder: Path, remote_code: str = "refuse") -> HuggingFaceModel:
    config = composed()
    config.model.path, config.model.remote_code = str(folder), remote_code
    config.model.init, config.model.size = "pretrained", "full"
    return HuggingFaceModel(config.model, seed=0)


@pytest.mark.parametrize("kind", ["mistral", "own_kind"])
def test_a_checkpoint_with_code_is_refused_and_nothing_is_asked(kind: str, tmp_path: Path, mark: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path=.*auto_map.*model\.remote_code=run") as caught:
        of(checkpoint(tmp_path, kind=kind))
    assert len(str(caught.value).splitlines()) == 1
    assert not mark.exists()


def test_it_is_ignored_where_transformers_has_a_class(tmp_path: Path, mark: Path) -> None:
    source = of(checkpoint(tmp_path, kind="mistral"), "ignore")
    assert type(source.empty()).__module__.startswith("transformers.")
    assert "auto_map" not in source.config.to_dict()
    assert not mark.exists()


def test_it_cannot_be_ignored_where_there_is_none(tmp_path: Path, mark: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path="):
        of(checkpoint(tmp_path, kind="own_kind"), "ignore")
    assert not mark.exists()


def test_it_runs_where_that_is_said(tmp_path: Path, mark: Path) -> None:
    source = of(checkpoint(tmp_path, kind="own_kind"), "run")
    module, _ = describe(source, lora=composed().lora)
    assert mark.exists()
    assert type(source.empty()).__name__ == "OwnModel"
    names = list(dict(source.empty().named_parameters()))
    expected = {w.name: w.tensor for w in of(SAMPLES / "tiny_base").weights(names)}
    assert all(torch.equal(w.tensor, expected[w.name]) for w in source.weights(names))
    assert any(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": [None, "own.Own"]}, ["own.Own", None]])
def test_a_tokenizer_with_code_is_refused(auto_map: object, tmp_path: Path, mark: Path) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(SAMPLES / "tokenizer", folder)
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Own: pass\n")
    values = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(values | {"auto_map": auto_map}))
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path=.*auto_map"):
        load_tokenizer(str(folder), revision=None, chat_template_path=None)
    load_tokenizer(str(folder), revision=None, chat_template_path=None, remote_code="ignore")
    assert not mark.exists()


def test_random_weights_have_no_code_beside_them() -> None:
    with pytest.raises(ConfigError, match=r"model\.arch\.auto_map; "):
        config_from_arch({"model_type": "mistral", "auto_map": {"AutoModelForCausalLM": "x--y.Z"}})


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "tiny_base", tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (tmp_path / "base" / "model.safetensors.index.json").write_text(json.dumps(index))
    source = of(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"names '\.\./outside\.safetensors', which is no file of that folder"):
        source.require_weights({"model.norm.weight": (1,)})


@pytest.mark.parametrize("r", [0, 8])
def test_the_card_says_that_code_was_run(r: int) -> None:
    config: Config = composed(f"lora.r={r}") if r else composed("lora=none")
    result = {"adapter_path": "x", "base_path": "y"}
    assert "trust_remote_code" not in _usage(result, config)
    config.model.remote_code = "run"
    text = _usage(result, config)
    assert "trust_remote_code=True" in text
    assert "Python code that" in text


def test_every_call_that_can_run_code_says_whether_it_may() -> None:
    """transformers asks on the terminal where nothing is said."""
    silent = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            if name in ("from_pretrained", "from_config", "get_class_from_dynamic_module"):
                said = {keyword.arg for keyword in node.keywords}  # type: ignore[attr-defined]
                silent += [] if "trust_remote_code" in said else [f"{file}:{node.lineno}"]
    assert not silent
