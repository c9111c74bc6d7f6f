import hashlib
import json
import math
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training import vllm_server
from tests.training.vllm_server import (
    BASE,
    VllmServer,
    closes,
    fewer,
    half,
    no_json,
    of_choice,
    of_model,
    served,
    waits,
)
from tpu_experiments.checkpoint.errors import TrainingStopped
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.rollout_schema import RolloutConfig
from tpu_experiments.training import outside_sampler
from tpu_experiments.training.outside_sampler import OutsideSampler

VOCAB, END, NEW = 40, 39, 6
PROMPTS = [[1, 2, 3], [1, 2, 3], [1, 2, 3], [4, 5], [4, 5], [4, 5]]
DRAWS = [100, 101, 102, 200, 201, 202]


def decode(ids: list[int]) -> str:
    return " ".join(f"w{token}" for token in ids)


def logits_of(prompt: list[int], ids: list[int], shift: float) -> np.ndarray:
    """Logits that depend on the text so far and on the adapter."""
    text = np.array([*prompt, *ids], np.float64)
    return np.sin(np.arange(VOCAB) * (1 + 0.1 * text.sum() + shift)) * 2


def draw(
    body: vllm_server.Body, folder: str | None, *, mode: str = "processed"
) -> list[tuple[list[int], list[float | None]]]:
    """Draw as vLLM does: the i-th answer by the seed plus i; log-probabilities before or after the temperature."""
    shift = 0.0 if folder is None else json.loads((Path(folder) / "adapter_config.json").read_text())["shift"]
    found = []
    for index in range(body["n"]):
        random = np.random.default_rng(body["seed"] + index if "seed" in body else None)
        ids: list[int] = []
        log_probs: list[float | None] = []
        while len(ids) < body["max_tokens"] and not (ids and ids[-1] in body["stop_token_ids"]):
            raw = logits_of(body["prompt"], ids, shift)
            own = raw / (body["temperature"] or 1.0)
            own -= np.log(np.exp(own).sum())
            ids.append(int(random.choice(VOCAB, p=np.exp(own)) if body["temperature"] else raw.argmax()))
            log_probs.append(float((own if mode == "processed" else raw - np.log(np.exp(raw).sum()))[ids[-1]]))
        found.append((ids, log_probs))
    return found


def write(folder: str, parameters: Any) -> dict[str, str]:
    text = json.dumps({"shift": float(parameters["shift"])})
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "adapter_config.json").write_text(text)
    return {"adapter_model.safetensors": hashlib.sha256(text.encode()).hexdigest()}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_sampler, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(outside_sampler, "POLL_SECONDS", 0.02)


@pytest.fixture
def server() -> Iterator[VllmServer]:
    with served(VllmServer(draw, decode)) as running:
        yield running


def sampler_of(server: VllmServer | str, folder: Path, **more: Any) -> OutsideSampler:
    given: dict[str, Any] = {
        "base": BASE,
        "decode": decode,
        "num_tokens": 16,
        "write": write,
        "name": "run-1a2b",
        "seed": 0,
    }
    given |= {name: more.pop(name) for name in list(more) if name in given or name == "watch"}
    url = server if isinstance(server, str) else server.url
    own = {"sampler": "openai", "url": url, "max_new_tokens": NEW, "max_seconds": 20.0} | more
    return OutsideSampler(RolloutConfig(**own), folder=str(folder), ends=[END], vocab_size=VOCAB, **given)


def shifted(value: float) -> dict[str, torch.Tensor]:
    return {"shift": torch.tensor(value)}


def prepared(server: VllmServer, folder: Path, version: int = 0, **more: Any) -> OutsideSampler:
    sampler = sampler_of(server, folder, **more)
    sampler.start()
    sampler.prepare(shifted(0.5), version)
    return sampler


def test_answers_are_those_that_the_adapter_draws_with_their_log_probabilities(
    server: VllmServer, tmp_path: Path
) -> None:
    sampler = prepared(server, tmp_path)
    found = sampler.sample(PROMPTS, draws=DRAWS, iteration=0)
    folder = str(tmp_path / "v0")
    for first, prompt in ((0, [1, 2, 3]), (3, [4, 5])):
        body = {
            "prompt": prompt,
            "n": 3,
            "seed": outside_sampler._seed(0, DRAWS[first]),
            "max_tokens": NEW,
            "stop_token_ids": [END],
            "temperature": 1.0,
        }
        for row, (ids, log_probs) in enumerate(draw(body, folder), start=first):
            assert found.lengths_B[row] == len(ids)
            np.testing.assert_array_equal(found.ids_BN[row], ids + [0] * (NEW - len(ids)))
            np.testing.assert_allclose(found.log_probs_BN[row], log_probs + [0.0] * (NEW - len(ids)), rtol=1e-6)
    assert len({tuple(ids) for ids in found.ids_BN.tolist()}) > 3
    first = max(server.asked, key=lambda body: len(body["prompt"]))
    assert first["prompt"] == [1, 2, 3]
    # Whatever is not said here vLLM takes from the model's generation_config.json.
    assert first | {"seed": 0} == {
        **{"model": first["model"], "prompt": [1, 2, 3], "n": 3, "max_tokens": NEW, "temperature": 1.0, "seed": 0},
        **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
        **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": True, "stop_token_ids": [END]},
        **{"skip_special_tokens": False, "return_token_ids": True, "logprobs": 1},
    }
    assert re.fullmatch(r"run-1a2b-v0-[0-9a-f]{8}", first["model"])
    assert dict(sampler.counts) == {}


def test_likeliest_answers_are_asked_for_one_by_one(server: VllmServer, tmp_path: Path) -> None:
    sampler = prepared(server, tmp_path, temperature=0.7)
    found = sampler.sample([[1, 2, 3], [1, 2, 3]], draws=[0, 0], iteration=0, temperature=0.0)
    assert [body["n"] for body in server.asked] == [1, 1]
    ids: list[int] = []
    while len(ids) < NEW and END not in ids:
        ids.append(int(logits_of([1, 2, 3], ids, 0.5).argmax()))
    assert found.ids_BN[:, : len(ids)].tolist() == [ids, ids]


def test_each_version_has_a_name_and_old_ones_go_before_new_ones_come(server: VllmServer, tmp_path: Path) -> None:
    sampler = sampler_of(server, tmp_path, max_lag=1)
    server.loras = {"run-1a2b-v7-00000000": "", "another-v7-00000000": ""}
    sampler.start()
    assert list(server.loras) == ["another-v7-00000000"]
    server.loras.clear()
    answers = []
    for version in range(3):
        sampler.prepare(shifted(version / 2), version)
        answers.append(sampler.sample(PROMPTS, draws=DRAWS, iteration=version).ids_BN.tobytes())
    assert len(set(answers)) == 3
    assert server.most_loras == 2
    assert [name[:11] for name in server.loras] == ["run-1a2b-v1", "run-1a2b-v2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v1", "v2"]
    sampler.prepare(shifted(1.0), 2)  # as after a resume: the same bytes have the same name
    assert [what for what, _ in server.calls].count("load") == 3
    sampler.prepare(shifted(9.0), 1)  # as after a rollback: what is newer, or has other bytes, goes
    assert [name[:11] for name in server.loras] == ["run-1a2b-v1"]
    sampler.close()
    assert server.loras == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "counted"),
    [
        (closes, "repeated"),
        (503, "repeated"),
        (429, "repeated"),
        (500, "wrong"),
        (half, "wrong"),
        (no_json, "wrong"),
        (fewer, "wrong"),
        (of_model(BASE), "stale"),
        (of_model("run-1a2b-v9-00000000"), "stale"),
        (of_choice(token_ids=lambda ids: ids[:1], finish_reason="abort"), "wrong"),
        (of_choice(logprobs={"token_logprobs": [-1.0]}), "wrong"),
    ],
)
def test_a_fault_that_passes_changes_no_answer(
    fault: vllm_server.Fault, counted: str, server: VllmServer, tmp_path: Path
) -> None:
    sampler = prepared(server, tmp_path)
    expected = sampler.sample(PROMPTS, draws=DRAWS, iteration=0)
    server.faults.extend([fault, fault])
    found = sampler.sample(PROMPTS, draws=DRAWS, iteration=0)
    np.testing.assert_array_equal(found.ids_BN, expected.ids_BN)
    np.testing.assert_array_equal(found.log_probs_BN, expected.log_probs_BN)
    assert sampler.counts[counted] == (6 if counted == "stale" else 2)
    assert sampler.counts["repeated"] == 2


def test_an_adapter_that_a_restarted_server_lost_is_loaded_again(server: VllmServer, tmp_path: Path) -> None:
    sampler = prepared(server, tmp_path)
    expected = sampler.sample(PROMPTS, draws=DRAWS, iteration=0)
    server.loras.clear()
    np.testing.assert_array_equal(sampler.sample(PROMPTS, draws=DRAWS, iteration=0).ids_BN, expected.ids_BN)
    assert len(server.loras) == 1


def test_a_server_that_comes_back_is_used(tmp_path: Path) -> None:
    with served(VllmServer(draw, decode)) as first:
        sampler = prepared(first, tmp_path)
        expected = sampler.sample(PROMPTS, draws=DRAWS, iteration=0)
        port = int(first.url.rpartition(":")[2])
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(sampler.sample(PROMPTS, draws=DRAWS, iteration=0)))
    thread.start()
    while sampler.counts["repeated"] < 3:
        time.sleep(0.01)
    with served(VllmServer(draw, decode), port=port):
        thread.join()
    np.testing.assert_array_equal(found[0].ids_BN, expected.ids_BN)


def test_an_answer_of_a_version_within_the_lag_is_taken(server: VllmServer, tmp_path: Path) -> None:
    sampler = prepared(server, tmp_path)
    sampler.sample(PROMPTS, draws=DRAWS, iteration=0)
    assert sampler.lag == 0
    (before,) = server.loras
    sampler.prepare(shifted(1.5), 1)
    server.faults.append(of_model(before))
    sampler.sample(PROMPTS, draws=DRAWS, iteration=1)
    assert (sampler.lag, sampler.counts["stale"], sampler.counts["repeated"]) == (1, 0, 0)


def test_log_probabilities_that_are_missing_are_nan(server: VllmServer, tmp_path: Path) -> None:
    def fewer_known(exchange: vllm_server.Exchange) -> None:
        first, second, third = exchange.answer["choices"]
        first["logprobs"]["token_logprobs"][0] = None
        second["logprobs"]["token_logprobs"][0] = -9999.0
        third["logprobs"] = None

    sampler = prepared(server, tmp_path)
    server.faults.append(fewer_known)
    found = sampler.sample(PROMPTS[:3], draws=DRAWS[:3], iteration=0)
    for row, num in enumerate((1, 1, found.lengths_B[2])):
        assert np.isnan(found.log_probs_BN[row]).sum() == num
        assert np.isnan(found.log_probs_BN[row, :num]).all()
    assert sampler.counts["no_logp"] == 2 + found.lengths_B[2]


def test_what_stands_behind_an_end_is_cut(server: VllmServer, tmp_path: Path) -> None:
    sampler = prepared(server, tmp_path)
    own = {"token_ids": [5, END, 7, 8], "logprobs": {"token_logprobs": [-1.0, -2.0, -3.0, -4.0]}}
    server.faults.append(of_choice(text="w5", **own))
    found = sampler.sample(PROMPTS[:1], draws=DRAWS[:1], iteration=0)
    assert found.lengths_B.tolist() == [2]
    assert found.ids_BN.tolist() == [[5, END, 0, 0, 0, 0]]
    assert found.log_probs_BN.tolist() == [[-1.0, -2.0, 0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("fault", "num", "sentence"),
    [
        (500, 4, "answers the 2 prompts of iteration 7: HTTP 500: the engine is not ready"),
        (400, 1, r"does not accept a prompt of \d tokens .HTTP 400: the engine is not ready."),
        (no_json, 4, "its answer to /v1/completions is no JSON: '<html>log in</html>'"),
        (of_model("other"), 4, "it answers as 'other' where 'run-1a2b-v0-"),
        (of_choice(token_ids=None), 1, "no token ids; vLLM has them from 0.10.2 on"),
        (
            of_choice(prompt_token_ids=[0, 1, 2, 3]),
            1,
            r"another prompt than it was given: 4 tokens, 0, 1, 2, 3, ..., for \d",
        ),
        (of_choice(token_ids=[5, 40]), 1, "token ids up to 40, the model's are below 40"),
        (
            of_choice(token_ids=[5, 6], finish_reason="length"),
            1,
            r"it cuts answers at 2 tokens after a prompt of \d, where 6",
        ),
        (of_choice(token_ids=[], finish_reason="abort"), 4, "an answer breaks off after 0 tokens .abort."),
    ],
)
def test_a_fault_that_stays_ends_the_run_with_one_sentence(
    fault: vllm_server.Fault, num: int, sentence: str, server: VllmServer, tmp_path: Path
) -> None:
    sampler = prepared(server, tmp_path)
    server.faults.extend([fault] * 40)
    with pytest.raises(TrainingStopped, match=sentence) as found:
        sampler.sample(PROMPTS[:3] + PROMPTS[3:], draws=DRAWS, iteration=7)
    text = str(found.value)
    assert text.startswith(f"rollout.url={server.url}; ")
    assert text.endswith("; then the same command goes on.")
    assert "\n" not in text
    assert num <= len(server.asked) <= 2 * num


def test_texts_of_another_tokenizer_end_the_run(server: VllmServer, tmp_path: Path) -> None:
    server.decode = lambda ids: " ".join(f"v{token}" for token in ids)
    with pytest.raises(TrainingStopped, match=r"none of 6 answers has the same text there and here, as 'v.* and 'w"):
        prepared(server, tmp_path).sample(PROMPTS, draws=DRAWS, iteration=0)


def test_a_server_that_is_too_slow_ends_the_run_in_time(server: VllmServer, tmp_path: Path) -> None:
    sampler = prepared(server, tmp_path, max_seconds=0.6)
    server.faults.extend([waits(30.0)] * 20)
    with pytest.raises(
        TrainingStopped, match=r"nothing answers the 2 prompts of iteration 0 within rollout.max_seconds=0.6: "
    ):
        sampler.sample(PROMPTS, draws=DRAWS, iteration=0)


def test_a_request_to_stop_ends_the_wait(server: VllmServer, tmp_path: Path) -> None:
    asked = []

    def watch() -> None:
        if server.asked:
            asked.append(True)
            raise InterruptedError

    sampler = prepared(server, tmp_path, watch=watch)
    server.faults.extend([waits(30.0)] * 2)
    with pytest.raises(InterruptedError):
        sampler.sample(PROMPTS, draws=DRAWS, iteration=0)
    assert asked == [True]


def test_seeds_that_a_server_does_not_take_are_left_out(server: VllmServer, tmp_path: Path) -> None:
    """As vLLM's torch_xla backend: Torch XLA does not support per-request seed."""

    def strict(body: vllm_server.Body, folder: str | None) -> Any:
        return draw(body, folder)

    inner = server.complete

    def complete(body: vllm_server.Body) -> Any:
        if "seed" in body:
            server.asked.append(body)
            return vllm_server.error(400, "Torch XLA does not support per-request seed.")
        return inner(body)

    server.complete = complete  # type: ignore[method-assign]
    sampler = prepared(server, tmp_path)
    found = sampler.sample(PROMPTS, draws=DRAWS, iteration=0)
    assert (found.lengths_B > 0).all()
    before = len(server.asked)
    sampler.sample(PROMPTS, draws=DRAWS, iteration=1)
    assert all("seed" not in body for body in server.asked[before:])


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_log_probabilities_before_the_temperature_are_found_out(mode: str, tmp_path: Path) -> None:
    def complete(exchange_body: vllm_server.Body, folder: str | None) -> Any:
        return draw(exchange_body, folder, mode=mode)

    with served(VllmServer(complete, decode)) as server:
        inner = server.complete

        def with_top(body: vllm_server.Body) -> Any:
            status, exchange = inner(body)
            if body.get("return_tokens_as_token_ids"):
                raw_V = logits_of(body["prompt"], [], 0.5) / (body["temperature"] if mode == "processed" else 1.0)
                own_V = raw_V - np.log(np.exp(raw_V).sum())
                top = {f"token_id:{token}": float(own_V[token]) for token in np.argsort(-own_V)[:2]}
                exchange.answer["choices"][0]["logprobs"]["top_logprobs"] = [top]
            return status, exchange

        server.complete = with_top  # type: ignore[method-assign]
        sampler = prepared(server, tmp_path, temperature=0.7)
        if mode == "raw":
            with pytest.raises(
                TrainingStopped, match=r"rollout.temperature=0.7 draws; start it with --logprobs-mode processed"
            ):
                sampler.sample(PROMPTS, draws=DRAWS, iteration=0)
            return
        found = sampler.sample(PROMPTS, draws=DRAWS, iteration=0)
        assert (found.log_probs_BN <= 0).all()
        num = len(server.asked)
        sampler.sample(PROMPTS, draws=DRAWS, iteration=1)
        assert len(server.asked) == num + 2  # it is asked once


def test_a_server_that_does_not_fit_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(server: VllmServer | str, **more: Any) -> str:
        with pytest.raises(ConfigError) as found:
            sampler_of(server, tmp_path, **more).start()
        return str(found.value)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert re.match(rf"rollout.url={gone}; no server answers there \(ClientConnectorError.*vllm serve", problem(gone))
    assert "it is no address; write one as http://localhost:8000" in problem("localhost")
    with served(VllmServer(draw, decode, max_model_len=12, api_key="secret")) as server:
        assert f"it wants the key in the environment variable {outside_sampler.API_KEY}" in problem(server)
        monkeypatch.setenv(outside_sampler.API_KEY, "secret")
        assert problem(server, model="bass").startswith("rollout.model=bass; ")
        assert "Did you mean 'base'?" in problem(server, model="bass")
        assert "texts have at most 12 tokens, rows have 16; start it with --max-model-len 16" in problem(server)
        server.max_model_len, server.loads_adapters = 64, False
        sampler = sampler_of(f"{server.url}/v1/", tmp_path)
        sampler.start()
        with pytest.raises(
            TrainingStopped, match=r"it loads no adapters .HTTP 404: Not Found.; start it with `VLLM_ALLOW"
        ):
            sampler.prepare(shifted(0.0), 0)


def test_an_adapter_that_the_server_cannot_see_ends_the_run(server: VllmServer, tmp_path: Path) -> None:
    def elsewhere(folder: str, parameters: Any) -> dict[str, str]:
        return write(f"{folder}-not-there", parameters)

    sampler = sampler_of(server, tmp_path, write=elsewhere)
    with pytest.raises(
        TrainingStopped, match=r"it does not load .*/v0 \(HTTP 404: No adapter found for .*adapter_folder"
    ):
        sampler.prepare(shifted(0.0), 0)
    server.load_faults.extend([503, 500])
    prepared(server, tmp_path)
    assert len(server.loras) == 1


def test_no_answer_is_finite_by_accident() -> None:
    assert [outside_sampler._log_prob(value) for value in (-0.5, 0.0)] == [-0.5, 0.0]
    assert all(math.isnan(outside_sampler._log_prob(value)) for value in (None, -9999.0, math.nan, -math.inf, "x"))
