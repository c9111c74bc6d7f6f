"""task=serve: OpenAI's own client, clients that are many, slow, large or gone, and those without the token."""

import asyncio
import json
import logging
import re
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import openai
import pytest

from tests.tasks.test_serve import ASKED, SMALL, asked, opened, refusal, served, text_of
from tests.tasks.tiny_run import write_run
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.tasks.serve import connections, server, writer
from tpu_experiments.tasks.serve.requests import NOTES, OFF
from tpu_experiments.tasks.serve.writer import Busy, Job, Stopped, Writer

pytestmark = [pytest.mark.xla, pytest.mark.usefixtures("root_logger")]
HOT = {"model": "trained", "messages": ASKED, "temperature": 1.5}
TOKEN = "a-token-of-this-test"


@pytest.fixture
def run(make_config, tmp_path):
    return write_run(tmp_path / "my_run", make_config)


@pytest.fixture
def address(make_config, run):
    with served(make_config("task=serve", "task.port=0", f"task.run={run}", *SMALL)) as found:
        yield found


def client_of(address, **how):
    return openai.OpenAI(base_url=f"{address}v1", **{"api_key": "none", "max_retries": 0, "timeout": 60, **how})


def connected(address):
    host, port = re.match(r"http://(.*):(\d+)/", address).groups()
    return socket.create_connection((host, int(port)))


def head_of(length, *more):
    lines = ("POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", *more)
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def test_openais_client(address):
    with client_of(address) as client:
        assert [model.id for model in client.models.list()] == ["trained", "base"]
        assert client.models.retrieve("base").id == "base"
        with pytest.raises(openai.NotFoundError, match="org/other"):
            client.models.retrieve("org/other")
        write = client.chat.completions.create
        first = write(**HOT, seed=7, n=3)
        texts = [choice.message.content for choice in first.choices]
        assert [choice.index for choice in first.choices] == [0, 1, 2]
        assert len(set(texts)) == 3, "answers to one request are drawn apart"
        assert [choice.message.content for choice in write(**HOT, seed=7, n=3).choices] == texts, "and again the same"
        assert write(**HOT, seed=8).choices[0].message.content not in texts
        assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
        with write(**HOT, seed=7, n=2, stream=True, stream_options={"include_usage": True}) as stream:
            *events, counted = list(stream)
        streamed = ["", ""]
        for event in events:
            streamed[event.choices[0].index] += event.choices[0].delta.content or ""
        assert streamed == texts[:2]
        assert counted.usage.completion_tokens > 2
        with write(**HOT, seed=7, stream=True) as stream:
            assert all(event.usage is None for event in stream)
        likeliest = write(**{**HOT, "temperature": 0}).choices[0].message.content
        assert write(**HOT, top_p=0, seed=1).choices[0].message.content == likeliest
        assert write(**HOT, top_p=1, seed=1).choices[0].message.content != likeliest


def test_stop_texts_end_an_answer_before_them(address):
    with client_of(address) as client:
        write = client.chat.completions.create
        whole = write(**HOT, seed=3).choices[0].message.content
        for stops in (whole[4:7], [whole[5:7], "nowhere"], ["nowhere", whole[6:8], whole[4:6], "x" * 100]):
            first = min(at for stop in ([stops] if isinstance(stops, str) else stops) if (at := whole.find(stop)) >= 0)
            (choice,) = write(**HOT, seed=3, stop=stops).choices
            assert (choice.message.content, choice.finish_reason) == (whole[:first], "stop")
            with write(**HOT, seed=3, stop=stops, stream=True) as stream:
                events = [event.choices[0] for event in stream]
            assert "".join(event.delta.content or "" for event in events) == whole[:first]
            assert events[-1].finish_reason == "stop"
        assert write(**HOT, seed=3, stop=["nowhere"]).choices[0].message.content == whole


ON = {
    **{"frequency_penalty": 0.5, "presence_penalty": -1, "logit_bias": {"5": 100}, "logprobs": True, "top_logprobs": 2},
    **{"response_format": {"type": "json_object"}, "tools": [{"type": "function"}], "tool_choice": "required"},
    **{"functions": [{"name": "f"}], "function_call": {"name": "f"}, "modalities": ["text", "audio"]},
    **{"audio": {"voice": "alloy"}, "prediction": {"type": "content"}, "service_tier": "flex", "store": True},
    **{"reasoning_effort": "high", "verbosity": "low", "web_search_options": {}, "moderation": {"model": "m"}},
    **{"best_of": 2, "echo": True, "suffix": "a", "top_k": 4, "min_p": 0.1, "stream_option": {}, "Seed": 3},
    **{"parallel_tool_calls": 3, "prompt_cache_retention": "24h"},
}


def test_what_is_not_done_is_refused_by_name(address):
    assert set(OFF) <= set(ON)
    body = {"messages": ASKED, "max_tokens": 1}
    for name, value in ON.items():
        status, error = refusal(address, {**body, name: value})
        assert (status, error["param"], error["type"]) == (400, name, "invalid_request_error")
        assert error["message"].startswith(f"{name}=")
    off = {name: values[-1] for name, values in OFF.items() if values} | dict.fromkeys(ON, None) | {}
    notes = {name: {"a": "b"} if name == "metadata" else "me" for name in NOTES}
    given = {name: values[-1] for name, values in OFF.items() if values}
    for more in (off, given, notes, {"n": 1, "stop": None, "stream_options": None, "frequency_penalty": 0.0}):
        assert text_of(asked(address, max_tokens=1, **more))
    for name, turn in (("name", {"name": "Ana"}), ("tool_calls", {"tool_calls": [{"id": "1"}]})):
        status, error = refusal(address, {"messages": [{**ASKED[0], **turn}]})
        assert (status, error["param"]) == (400, f"messages.0.{name}")
    assert text_of(asked(address, max_tokens=1, messages=[{**ASKED[0], "name": None, "refusal": None}]))


@pytest.mark.slow
def test_two_hundred_requests_at_once(address):
    with client_of(address) as client, ThreadPoolExecutor(200) as pool:

        def status_of(number):
            try:
                return client.chat.completions.create(**HOT, seed=number, max_tokens=2).choices[0].finish_reason
            except openai.RateLimitError as error:
                return error.response.headers["Retry-After"]

        found = Counter(pool.map(status_of, range(200)))
    assert set(found) <= {"length", "stop", "5"}
    assert found["length"] + found["stop"] >= writer.MAX_OF_A_CLIENT
    assert text_of(asked(address)), "and it still answers"


def test_clients_that_are_slow_or_gone(address, monkeypatch):
    monkeypatch.setattr(connections, "RECEIVING_SECONDS", 1.0)
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 20)
    body = json.dumps({"messages": ASKED}).encode()
    begun = (b"", b"GET / HT", head_of(10**5), head_of(10**5, "Connection: keep-alive") + b'{"messages": [')
    slow = [connected(address) for _ in range(100)]
    for number, one in enumerate(slow):
        one.sendall(begun[number % len(begun)])
    assert text_of(asked(address)), "the slow make room"
    is_closed = [False] * len(slow)
    for number, one in enumerate(slow):
        one.settimeout(30)
        try:
            is_closed[number] = one.recv(1) == b""
        except ConnectionError:
            is_closed[number] = True
        one.close()
    assert all(is_closed)
    with connected(address) as twice:  # the second request of a connection may not be slow either
        twice.settimeout(30)
        twice.sendall(head_of(len(body)) + body + b"POST /v1")
        while got := twice.recv(65536):
            assert b"HTTP/1.1 200" in got or b"chat.completion" in got


LONGEST = 960
LONG = (f"task.max_new_tokens={LONGEST}", "task.buckets=[32]", "task.tokens_per_call=1", "hw.runtime=eager")


@pytest.fixture
def long_config(make_config, run):
    return make_config("task=serve", "task.port=0", f"task.run={run}", *LONG, "task.base_beside=false")


def test_a_client_that_leaves_is_not_written_for(long_config, caplog):
    caplog.set_level(logging.INFO, logger=writer.__name__)
    with served(long_config) as address:
        for stream in (True, False):
            body = json.dumps({"messages": ASKED, "stream": stream, "temperature": 100}).encode()
            with connected(address) as gone:
                gone.sendall(head_of(len(body)) + body)
                if stream:
                    assert gone.recv(16)
                else:
                    time.sleep(0.2)
        assert text_of(asked(address, max_tokens=1))
    written = [int(re.search(r"(\d+) tokens in", text)[1]) for text in caplog.messages if "tokens in" in text]
    assert 1 in written
    assert all(num < LONGEST for num in written)


def test_an_answer_has_its_time(long_config):
    with served(replace(long_config, task=replace(long_config.task, max_seconds=0.5))) as address:
        status, error = refusal(address, {"messages": ASKED, "temperature": 100})
        assert (status, error["code"], error["type"]) == (504, "timeout", "server_error")
        with client_of(address) as client, pytest.raises(openai.APIError, match=r"task\.max_seconds=0\.5; "):
            list(client.chat.completions.create(**{**HOT, "temperature": 100}, stream=True))


def test_large_requests(address):
    turns = [{"role": "assistant" if n % 2 else "user", "content": f"{n}"} for n in range(10_001)]
    assert asked(address, messages=turns)["usage"]["turns_left_out"] > 9_000
    large = json.dumps({"messages": [*ASKED, {"role": "user", "content": "a" * 2**20}]}).encode()
    assert refusal(address, large)[0] == 413
    chunks = [b"%x\r\n%s\r\n" % (2**16, b" " * 2**16)] * 17
    with connected(address) as endless:  # a body that does not say how long it is
        endless.settimeout(30)
        endless.sendall(head_of(1).replace(b"Content-Length: 1", b"Transfer-Encoding: chunked") + b"".join(chunks))
        assert b" 413 " in endless.recv(65536).splitlines()[0]
    with connected(address) as odd:  # no HTTP; uvicorn's own answer
        odd.settimeout(30)
        odd.sendall(b"no HTTP at all\r\n\r\n")
        assert b"HTTP/1.1 400" in odd.recv(65536)
    one_turn = {"messages": [{"role": "user", "content": "a " * (2**19 - 100)}]}
    assert refusal(address, one_turn)[0] == 400, "one turn of a mebibyte is counted, and refused"


def test_a_token_is_needed(make_config, run, monkeypatch):
    config = make_config("task=serve", "task.port=0", "task.host=0.0.0.0", f"task.run={run}", *SMALL)
    made = {server.token_of(config.task) for _ in range(2)}
    assert len(made) == 2
    assert all(len(token) >= 32 for token in made)
    assert server.token_of(make_config("task=serve").task) is None
    for wrong in ("short", "a token with blanks in it", "un-jeton-pentru-Dunăre"):
        monkeypatch.setenv(server.TOKEN_VARIABLE, wrong)
        with pytest.raises(ConfigError, match=server.TOKEN_VARIABLE) as refused:
            server.token_of(config.task)
        assert wrong not in str(refused.value)
    monkeypatch.setenv(server.TOKEN_VARIABLE, TOKEN)
    with served(config) as printed:
        address = printed.replace("0.0.0.0", "127.0.0.1")
        for headers in (
            {},
            {"Authorization": f"Bearer {TOKEN}x"},
            {"Authorization": "Bearer ă"},
            {"Authorization": TOKEN},
        ):
            for path, body in (("v1/chat/completions", {"messages": ASKED}), ("v1/models", None), ("", None)):
                status, error = refusal(address, body, path=path, headers=encoded(headers))
                assert (status, error["code"]) == (401, "invalid_api_key")
        assert refusal(address, None, path=f"v1/models?token={TOKEN}")[0] == 401, "only the page has it in its address"
        with opened(address, None, path=f"?token={TOKEN}") as response:
            assert b"<h1>my_run</h1>" in response.read()
        with client_of(address, api_key=TOKEN) as client:
            assert client.chat.completions.create(**HOT, max_tokens=1).choices
        with client_of(address) as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def encoded(headers):
    return {name: value.encode("utf-8").decode("latin-1") for name, value in headers.items()}


def test_clients_take_turns():
    async def found():
        pieces = asyncio.Queue()
        desk = Writer({})
        for client, names in (("many", "abcd"), ("one", "x"), ("two", "yz")):
            desk.ask([Job(name, 0, None, pieces) for name in names], client=client)
        order = "".join(desk._next().question for _ in range(4))
        desk.ask([Job("w", 0, None, pieces)], client="one")
        order += "".join(desk._next().question for _ in range(3))
        desk.stop()
        with pytest.raises(Stopped):
            desk.ask([], client="one")
        _, told = await pieces.get()
        return order, type(told), desk._next()

    assert asyncio.run(found()) == ("axybzcw", Stopped, None)


def test_one_client_leaves_room_for_others():
    desk = Writer({})
    visits = [desk.admitted("many") for _ in range(writer.MAX_OF_A_CLIENT)]
    for visit in visits:
        visit.__enter__()
    with pytest.raises(Busy), desk.admitted("many"):
        pass
    with desk.admitted("one"):
        pass
    visits.pop().__exit__(None, None, None)
    with desk.admitted("many"):
        pass
    for visit in visits:
        visit.__exit__(None, None, None)
    assert not desk._num_requests


def test_a_server_that_ends_tells_who_waits(long_config):
    with ThreadPoolExecutor(3) as pool:
        with served(long_config) as address:
            told = [pool.submit(refusal, address, {"messages": ASKED, "temperature": 100}) for _ in range(3)]
            time.sleep(0.5)
        assert {answer.result()[0] for answer in told} == {503}


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_a_missing_extra_is_refused_with_the_config(make_config, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"pip install 'tpu_experiments\[serve\]'"):
        make_config("task=serve")
