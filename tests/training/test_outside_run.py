"""Whole runs whose answers a server writes, from the adapters' files, with transformers and peft."""

import math
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.training.runs import finished, records
from tests.training.vllm_server import BASE, Body, VllmServer, served
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.training.rollouts import RolloutStore

SAMPLES = Path(__file__).parents[2] / "tpu_experiments" / "samples"
RUN = (
    *("model=tiny", "data=sample_chat", "hw.runtime=eager", "objective=grpo", "rollout=vllm", f"rollout.model={BASE}"),
    *("rollout.prompts=2", "rollout.samples=3", "rollout.max_new_tokens=6", "rollout.max_seconds=500", "reward=length"),
    *(
        "rollout.rewards.length.arguments.most=3",
        "lora=all_linear_r8",
        "trainer.seq_len=128",
        "trainer.max_stage_steps=2",
    ),
    *("trainer.log_every_steps=1", "trainer.max_eval_rows=2", "checkpoint.every_steps=1", "sample.max_new_tokens=2"),
    "name=run",
)


class Reader:
    """The tiny base with the adapter of a folder; it draws one token after the other."""

    def __init__(self, *, shift: float = 0.0) -> None:
        self.shift, self.lock, self.offset = shift, threading.Lock(), 0
        self.models: dict[str, Any] = {}

    def model(self, folder: str) -> Any:
        content = (Path(folder) / "adapter_model.safetensors").read_bytes()
        if content not in self.models:
            base = AutoModelForCausalLM.from_pretrained(
                SAMPLES / "tiny_base", dtype=torch.float32, trust_remote_code=False
            )
            with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of peft 0.21 with transformers 5
                self.models[content] = PeftModel.from_pretrained(base, folder).eval()
        return self.models[content]

    def __call__(self, body: Body, folder: str | None) -> list[tuple[list[int], list[float | None]]]:
        assert folder is not None, "the base is never asked"
        with self.lock, torch.no_grad():
            model, found = self.model(folder), []
            for index in range(body["n"]):
                random = torch.Generator().manual_seed(body["seed"] + index + self.offset)
                ids: list[int] = []
                log_probs: list[float | None] = []
                while len(ids) < body["max_tokens"] and not (ids and ids[-1] in body["stop_token_ids"]):
                    own_V = torch.log_softmax(model(torch.tensor([body["prompt"] + ids])).logits[0, -1], -1)
                    drawn = (
                        own_V.argmax()
                        if not body["temperature"]
                        else torch.multinomial(own_V.exp(), 1, generator=random)
                    )
                    ids.append(int(drawn))
                    log_probs.append(float(own_V[ids[-1]]) - self.shift)
                found.append((ids, log_probs))
            return found


def server_of(reader: Reader) -> VllmServer:
    tokenizer = load_tokenizer(str(SAMPLES / "tokenizer"), revision=None, chat_template_path=None)
    return VllmServer(reader, lambda ids: str(tokenizer.decode(ids)), max_model_len=1024)


def rollout_of(output_dir: Path, number: int) -> Any:
    found = RolloutStore(str(output_dir / "run" / "rollouts")).read(number)
    assert found is not None
    return found


def test_a_run_learns_from_a_server_whose_log_probabilities_are_corrected(tmp_path: Path) -> None:
    reader = Reader(shift=0.25)
    with served(server_of(reader)) as server:
        finished(*RUN, f"rollout.url={server.url}", output_dir=tmp_path, as_typed=True)
    assert server.loras == {}
    assert list((tmp_path / "run" / "adapters").iterdir()) == []
    train = [record for record in records(tmp_path) if "train/weight" in record]
    assert len(train) == 2
    for record in train:
        assert record["train/weight"] == pytest.approx(math.exp(0.25), rel=1e-4)
        assert record["train/ratio"] == pytest.approx(1.0, abs=1e-5)
    for number in range(2):
        made = rollout_of(tmp_path, number)
        learnt_NT = made.learnt(masks_cut=False)
        np.testing.assert_allclose(made.sampler_logps_NT[learnt_NT] + 0.25, made.old_logps_NT[learnt_NT], atol=2e-5)
    assert len(reader.models) == 3  # as the run begins, and after each step


@pytest.mark.slow
def test_two_processes_learn_from_the_answers_that_one_asks_for(tmp_path: Path) -> None:
    made = {}
    with served(server_of(Reader())) as server:
        for num in (1, 2):
            hw = ("hw.parallel=spawn", f"hw.num_devices={num}")
            finished(*RUN, *hw, f"rollout.url={server.url}", output_dir=tmp_path / str(num), as_typed=True)
            made[num] = [rollout_of(tmp_path / str(num), number) for number in range(2)]
    for one, two in zip(made[1], made[2], strict=True):
        np.testing.assert_array_equal(one.ids_NT, two.ids_NT)
        np.testing.assert_array_equal(one.rewards_NF, two.rewards_NF)
        np.testing.assert_allclose(one.old_logps_NT, two.old_logps_NT, atol=1e-4)
    first, second = ([r["train/loss"] for r in records(tmp_path / n) if "train/loss" in r] for n in ("1", "2"))
    assert second == pytest.approx(first, abs=1e-5)
    assert not (tmp_path / "2" / "run" / "answers").exists()


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_from_what_the_server_answered(tmp_path: Path) -> None:
    """The server gives other answers each time, so that only what is written can lead to the same end."""
    reader = Reader()
    with served(server_of(reader)) as server:
        words = (*RUN, "trainer.max_stage_steps=3", f"rollout.url={server.url}")
        finished(*words, output_dir=tmp_path, as_typed=True)
        folder = tmp_path / "run"
        whole = (folder / "adapter" / "adapter_model.safetensors").read_bytes()
        (folder / "result.json").unlink()
        for step in (2, 3):
            shutil.rmtree(folder / "checkpoints" / f"step_{step:08d}")
        reader.offset = 10**6
        server.loras["left-by-another"] = ""
        server.loras[next(name for _, name in server.calls)] = str(folder / "adapters" / "v0")
        finished(*words, output_dir=tmp_path, as_typed=True)
    assert (folder / "adapter" / "adapter_model.safetensors").read_bytes() == whole
    assert list(server.loras) == ["left-by-another"]
