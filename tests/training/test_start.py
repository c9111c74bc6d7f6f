"""A run starts from another's checkpoint, export or adapter, or is refused before anything is made."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.hub import HubServer
from tests.jobs import of_tiny_job
from tests.training.runs import REPOSITORY, SAME_SUMS, finished, run
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.export.peft import write_adapter
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.sources.build import describe
from tpu_experiments.storage.run_folder import open_run
from tpu_experiments.training.start import find_start

pytestmark = pytest.mark.xla
SMALL = (
    "hw.runtime=eager",
    "lora=all_linear_r8",
    "trainer.seq_len=64",
    "trainer.global_batch_rows=8",
    "trainer.log_every_steps=2",
    "trainer.eval_every_steps=0",
    "trainer.max_eval_rows=8",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=9",
    "sample.max_new_tokens=0",
    "data=sample_text",
    "curriculum=single",
    "schedule=constant",
    "schedule.warmup_steps=0",
    "trainer.max_stage_steps=4",
)
LORA = "parameters.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Folder and result of the run that others start from."""
    folder = tmp_path_factory.mktemp("source")
    return folder / "first", finished(*SMALL, "name=first", output_dir=folder)


def tensors(folder, step, group="parameters"):
    return load_file(folder / "checkpoints" / f"step_{step:08d}" / f"{group}.safetensors")


def begun_with(folder):
    """A run of one step that moves nothing: its checkpoint has the weights that it began with."""
    return tensors(folder, 1), tensors(folder, 1, "optimizer")


STILL = ("trainer.max_stage_steps=1", "optim.lr=1e-30", "checkpoint.prove=false")


def test_weights_alone_begin_where_the_other_run_ended(source, tmp_path):
    first, before = source
    result = finished(*SMALL, "name=second", f"start.run={first}", output_dir=tmp_path)
    assert result["eval_loss_before"] == before["eval_loss"]
    assert result["eval_loss"] != before["eval_loss"]
    start = result["start"]
    assert (start["run"], start["step"], start["kind"], start["take"]) == (str(first), 4, "checkpoint", "weights")
    assert start["data"] == before["data_audit"]
    moments = tensors(tmp_path / "second", 2, "optimizer")
    assert float(moments["/count"]) == 2, "the optimizer began anew"
    card = (tmp_path / "second" / "README.md").read_text()
    assert f"started from `{first}`: its checkpoint of step 4 (weights alone; SHA-256 {start['sha256'][:16]})" in card
    provenance = json.loads((tmp_path / "second" / "provenance.json").read_text())
    assert provenance["lives"][0]["start"] == start


def test_with_the_optimizers_state_it_is_the_step_that_would_have_come(source, tmp_path):
    """Four steps, then four of another run with another seed's data: moments and their count go on."""
    first, _ = source
    finished(*SMALL, *STILL, "name=all", f"start.run={first}", "start.take=all", "start.step=2", output_dir=tmp_path)
    weights, moments = begun_with(tmp_path / "all")
    assert all((weights[name] == t).all() for name, t in tensors(first, 2).items())
    there = tensors(first, 2, "optimizer")
    assert float(moments["/count"]) == float(there["/count"]) + 1
    fresh = finished(*SMALL, *STILL, "name=alone", f"start.run={first}", "start.step=2", output_dir=tmp_path / "b")
    _, alone = begun_with(tmp_path / "b" / "alone")
    assert fresh["start"]["step"] == 2
    for name, there_too in alone.items():
        if name.endswith("/first"):  # the same rows and weights: the same gradient
            torch.testing.assert_close(moments[name], 0.9 * there[name] + there_too, rtol=1e-5, atol=1e-9)


@pytest.mark.slow
def test_its_own_checkpoint_wins_and_the_start_is_not_read_again(source, tmp_path):
    """Killed and resumed with what it started from gone, it ends with the same bytes."""
    first, _ = source
    own = tmp_path / "copy" / "first"
    shutil.copytree(first, own)
    words = (*SMALL, "name=whole", f"start.run={own}")
    whole = finished(*words, output_dir=tmp_path / "out")
    folder = tmp_path / "out" / "whole"
    adapter = (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step_00000004")
    shutil.rmtree(own)
    again = finished(*words, output_dir=tmp_path / "out")
    assert (folder / "adapter" / "adapter_model.safetensors").read_bytes() == adapter
    assert again["start"] == whole["start"]
    assert (again["eval_loss_before"], again["eval_loss"]) == (whole["eval_loss_before"], whole["eval_loss"])
    assert again["proof"]["trained"] == whole["proof"]["trained"]
    changed = run(*SMALL, "name=whole", output_dir=tmp_path / "out")
    assert changed.returncode == 2
    assert f"was made with start.run='{own}', now None" in changed.stderr


@pytest.mark.slow
def test_an_export_and_an_adapter_of_peft_give_the_same_start(source, tmp_path):
    first, before = source
    alone = tmp_path / "alone" / "first"
    shutil.copytree(first, alone)
    shutil.rmtree(alone / "checkpoints")
    exported = finished(*SMALL, *STILL, "name=export", f"start.run={alone}", output_dir=tmp_path / "a")
    plain = finished(*SMALL, *STILL, "name=plain", f"start.run={alone / 'adapter'}", output_dir=tmp_path / "b")
    for result in (exported, plain):
        assert result["eval_loss_before"] == before["eval_loss"]
        assert result["start"]["kind"] == "adapter"
    assert exported["start"]["sha256"] == plain["start"]["sha256"] == before["proof"]["sha256"]


@pytest.mark.slow
def test_an_adapter_on_the_hub_starts_a_run(source, tmp_path):
    first, before = source

    def started(name, place):
        """A process of its own: the Hub's client reads its address when it is imported."""
        words = of_tiny_job((*SMALL, *STILL, f"name={name}", f"start.run={place}", f"output_dir={tmp_path / 'a'}"))
        env = os.environ | SAME_SUMS | hub.environment(tmp_path / "home")
        command = [sys.executable, "run.py", *words]
        return subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=300)

    with HubServer(first / "adapter") as hub:
        done, missing = started("hub", "hf://org/set"), started("none", "hf://org/none")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "a" / "hub" / "result.json").read_text())
    assert result["eval_loss_before"] == before["eval_loss"]
    assert (result["start"]["kind"], result["start"]["run"]) == ("adapter", "hf://org/set")
    assert result["start"]["sha256"] == before["proof"]["sha256"]
    assert missing.returncode == 2, missing.stderr
    assert "error: start.run=hf://org/none; there is neither identity.json of a run nor" in missing.stderr
    assert not (tmp_path / "a" / "none").exists()


@pytest.mark.parametrize("place", ["hf://owner", "hf://datasets/org/set", "https://hub.example/a", "hf://"])
def test_a_place_of_another_kind_is_refused_by_its_form(place, make_config):
    with pytest.raises(ConfigError, match=re.escape(f"start.run={place}; ")):
        make_config(f"start.run={place}")
    for good in ("hf://org/set", "hf://org/set@v1.0/adapter", "gs://bucket/runs/a", "outputs/a"):
        assert make_config(f"start.run={good}").start.run == good


@pytest.mark.slow
def test_a_fully_trained_run_starts_another(tmp_path):
    full = (*SMALL, "lora=none", "optim.lr=1e-3")
    before = finished(*full, "name=full", output_dir=tmp_path / "a")
    result = finished(*full, "name=next", f"start.run={tmp_path / 'a' / 'full'}", output_dir=tmp_path / "b")
    assert result["eval_loss_before"] == before["eval_loss"]
    shutil.rmtree(tmp_path / "a" / "full" / "checkpoints")
    again = finished(*full, "name=again", f"start.run={tmp_path / 'a' / 'full'}", output_dir=tmp_path / "c")
    assert (again["start"]["kind"], again["eval_loss_before"]) == ("model", before["eval_loss"])
    wrong = run(*SMALL, "name=lora", f"start.run={tmp_path / 'a' / 'full'}", output_dir=tmp_path / "d")
    assert wrong.returncode == 2
    assert "it trained all weights (lora.r=0), and this run adapters; give its model/ as the base" in wrong.stderr


REFUSED = {
    "rank": (("lora.r=4",), "it was trained with lora.r=8, now 4; restore the values, or merge"),
    "scale": (("lora.alpha=5",), "it was trained with lora.alpha=16"),
    "lengths of rows": (("lora.dora=true",), "it was trained with lora.dora=False, now True"),
    "rounded weights": (("model.linear=lr_qat",), "it was trained with model.linear='plain', now 'lr_qat'"),
    "targets": (("lora.targets=[q_proj]",), "it lacks 0 tensors of this run and has "),
    "base": (("model=qwen05b", "model.size=tiny"), "it was trained with model.path="),
    "optimizer": (
        ("optim=adafactor", "start.take=all"),
        "it was trained with optim._target_='tpu_experiments.optim.adamw.AdamW'",
    ),
    "no such step": (("start.step=3",), "has no complete checkpoint of that step, and folders of steps 2, 4; name one"),
    "all weights": (("lora=none",), "it is an adapter, and this run trains all weights; merge it into its base"),
    "a reduced base": (("lora.init=pissa",), "lora.init='b_zero', now 'pissa'"),
}


@pytest.fixture
def found(make_config, tmp_path):
    """What a run with these words starts from; looking makes nothing."""

    def find(*words):
        config = make_config(*SMALL, "name=other", f"output_dir={tmp_path / 'out'}", *words)
        module, _ = describe(HuggingFaceModel(config.model, seed=config.seed), lora=config.lora)
        point = find_start(config, module)
        assert not (tmp_path / "out").exists()
        return point

    return find


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_match_is_refused(source, found, case):
    first, _ = source
    words, sentence = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        found(f"start.run={first}", *words)
    message = str(caught.value)
    assert message.startswith("start.")
    assert len(message.splitlines()) == 1
    assert sentence in message


def test_it_is_refused_before_any_work(source, tmp_path):
    first, _ = source
    done = run(*SMALL, "name=other", f"start.run={first}", "lora.r=4", output_dir=tmp_path / "out")
    assert done.returncode == 2, done.stdout + done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith(f"error: start.run={first}; it was trained")]
    assert not (tmp_path / "out").exists()


def test_weights_that_were_drawn_belong_to_their_seed(make_config, tmp_path):
    words = ("model.size=tiny", "model=qwen05b", "name=x", f"output_dir={tmp_path}")
    first = make_config(*words)
    open_run(first).create(first)
    other = make_config(*words, "name=y", "seed=1", f"start.run={tmp_path / 'x'}")
    module, _ = describe(HuggingFaceModel(other.model, seed=1), lora=other.lora)
    with pytest.raises(ConfigError, match="it was trained with seed=0, now 1; restore the values"):
        find_start(other, module)


def test_of_pissa_the_export_is_the_start(make_config, tmp_path):
    """A checkpoint of it is for the reduced base, which only the same run makes again."""
    first = make_config("lora.init=pissa", "lora.r=8", "lora.alpha=16", "name=x", f"output_dir={tmp_path}")
    open_run(first).create(first)
    other = make_config("lora.r=8", "lora.alpha=16", "name=y", f"start.run={tmp_path / 'x'}")
    module, _ = describe(HuggingFaceModel(other.model, seed=0), lora=other.lora)
    with pytest.raises(ConfigError, match=r"start from its export: start\.run=.*/adapter lora\.r=16 lora\.alpha=32\."):
        find_start(other, module)


def test_an_adapter_with_ranks_of_single_modules_wants_the_same(make_config, tmp_path):
    """Of the folder of an adapter and of a run; the sentence has the words for the command."""
    words = ("lora.r=8", "lora.alpha=16", "model.size=tiny")
    own = ("+lora.rank_pattern={q_proj: 4}", "+lora.alpha_pattern={layers.0.*: 3, q_proj: 2}")
    first = make_config(*words, *own, "name=x", f"output_dir={tmp_path}")
    folder = open_run(first)
    folder.create(first)
    module, _ = describe(HuggingFaceModel(first.model, seed=0), lora=first.lora)
    drawn = {n: torch.zeros(p.shape) for n, p in module.named_parameters() if p.requires_grad}
    write_adapter(
        folder.path("adapter"), parameters=drawn, initial={}, lora=first.lora, base_path="tiny", revision=None
    )
    start = f"start.run={tmp_path / 'x/adapter'}"
    assert find_start(make_config(*words, *own, "name=y", start), module).kind == "adapter"
    told = "'+lora.rank_pattern={q_proj:4}' '+lora.alpha_pattern={layers.0.*:3.0,q_proj:2.0}'"
    others = (
        own[:1],
        own[1:],
        (own[0], "+lora.alpha_pattern={layers.0.*: 3, q_proj: 5}"),
        (own[0], "+lora.alpha_pattern={q_proj: 2, layers.0.*: 3}"),  # of several that match, the first applies
    )
    for other in others:
        config = make_config(*words, *other, "name=y", start)
        module, _ = describe(HuggingFaceModel(config.model, seed=0), lora=config.lora)
        with pytest.raises(ConfigError) as caught:
            find_start(config, module)
        assert told in str(caught.value)
        run = make_config(*words, *other, "name=y", f"start.run={tmp_path / 'x'}")
        with pytest.raises(ConfigError, match=r"it was trained with lora\.\w+_pattern.*; restore the values, or merge"):
            find_start(run, module)


def test_an_adapter_with_rows_of_tokens_wants_the_same_over_the_same_matrix(make_config, tmp_path):
    """Rows have an order; PEFT writes the matrix beside them where it has other rows than the base's config."""
    words = ("lora.r=8", "lora.alpha=16", "model.size=tiny")
    key = "+lora.trainable_token_indices="
    first = make_config(*words, f"{key}{{embed_tokens: [7, 5]}}", "name=x", f"output_dir={tmp_path}")
    folder = open_run(first)
    folder.create(first)
    source = HuggingFaceModel(first.model, seed=0)
    module, _ = describe(source, lora=first.lora)
    drawn = {n: torch.zeros(p.shape) for n, p in module.named_parameters() if p.requires_grad}
    write_adapter(
        folder.path("adapter"), parameters=drawn, initial={}, lora=first.lora, base_path="tiny", revision=None
    )
    start = f"start.run={tmp_path / 'x/adapter'}"
    same = make_config(*words, f"{key}{{embed_tokens: [7, 5]}}", "name=y", start)
    assert find_start(same, module).kind == "adapter"
    for tokens in ("{embed_tokens: [5, 7]}", "{embed_tokens: [7, 6]}"):
        config = make_config(*words, f"{key}{tokens}", "name=y", start)
        told = r"write .* '\+lora.trainable_token_indices=\{model.embed_tokens:\[7,5\]\}'"
        with pytest.raises(ConfigError, match=told):
            find_start(config, describe(source, lora=config.lora)[0])
        run = make_config(*words, f"{key}{tokens}", "name=y", f"start.run={tmp_path / 'x'}")
        with pytest.raises(ConfigError, match=r"it was trained with lora.trainable_token_indices.*; restore"):
            find_start(run, describe(source, lora=run.lora)[0])
    file = tmp_path / "x/adapter/adapter_model.safetensors"
    (base,) = source.weights(["model.embed_tokens.weight"])
    beside = {"base_model.model.model.embed_tokens.token_adapter.base_layer.weight": base.tensor}
    save_file({**load_file(file), **beside}, file)
    assert find_start(same, module).kind == "adapter"
    save_file({**load_file(file), **{name: tensor + 1 for name, tensor in beside.items()}}, file)
    with pytest.raises(ConfigError, match=r"it holds a model.embed_tokens.weight .* that is not the one of model"):
        find_start(same, module)


@pytest.mark.parametrize("source", ["x", "x/adapter"])
@pytest.mark.parametrize("base", ["dense", "int8"])
def test_adapters_of_loftq_belong_to_the_codes_that_they_complete(make_config, tmp_path, source, base):
    """Over another base they would add what NF4 lost to weights that lost nothing."""
    nf4 = ("lora.r=8", "lora.alpha=16", "model.size=tiny", "model.base=nf4", "lora.init=loftq")
    first = make_config(*nf4, "name=x", f"output_dir={tmp_path}")
    folder = open_run(first)
    folder.create(first)
    module, _ = describe(HuggingFaceModel(first.model, seed=0), lora=first.lora)
    drawn = {n: torch.zeros(p.shape) for n, p in module.named_parameters() if p.requires_grad}
    write_adapter(
        folder.path("adapter"), parameters=drawn, initial={}, lora=first.lora, base_path="base", revision=None
    )
    start = f"start.run={tmp_path / source}"
    same = make_config(*nf4, "name=y", start)
    if source == "x/adapter":
        assert find_start(same, module).kind == "adapter"
    other = make_config(*nf4[:3], f"model.base={base}", "name=y", start)
    module, _ = describe(HuggingFaceModel(other.model, seed=0), lora=other.lora)
    with pytest.raises(ConfigError, match=rf"model\.base='nf4', now '{base}'; restore the values: LoftQ's adapters"):
        find_start(other, module)


def flip_last_byte(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_damaged_source_is_refused(source, found, tmp_path):
    """A byte of a checkpoint, of an export; nothing there; the run itself; a step without a run."""
    first, _ = source
    own = tmp_path / "first"
    shutil.copytree(first, own)
    flip_last_byte(own / "checkpoints" / "step_00000004" / LORA)
    assert found(f"start.run={own}").step == 2, "a torn checkpoint is passed over, as on a resume"

    def refused(*words: str) -> str:
        with pytest.raises(ConfigError) as caught:
            found(*words)
        return str(caught.value)

    assert "has no complete checkpoint of that step" in refused(f"start.run={own}", "start.step=4")
    shutil.rmtree(own / "checkpoints")
    assert "holds no optimizer state" in refused(f"start.run={own}", "start.take=all")
    flip_last_byte(own / "adapter" / "adapter_model.safetensors")
    assert "has not the SHA-256 that its run's result.json names" in refused(f"start.run={own}")
    assert "there is neither identity.json of a run nor adapter_config.json" in refused(f"start.run={tmp_path}")
    assert "start.step=2 without start.run=" in refused("start.step=2")
    assert "it is this very run" in refused(f"start.run={tmp_path / 'out' / 'other'}")
