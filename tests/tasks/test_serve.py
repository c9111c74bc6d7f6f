"""task=serve: real requests to a real server; the answers are those of task=generate."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tasks.tiny_run import write_form, write_run
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.tasks import generate, serve
from tpu_experiments.tasks.serve.connections import bound
from tpu_experiments.tasks.serve.requests import ChatRequest
from tpu_experiments.tasks.serve.server import MAX_BODY_BYTES, is_own_name, token_of
from tpu_experiments.tasks.serve.writer import Writer

pytestmark = [pytest.mark.xla, pytest.mark.usefixtures("root_logger")]
REPOSITORY = Path(__file__).parents[2]
SMALL = ("task.max_new_tokens=12", "task.buckets=[32,64]", "hw.runtime=eager")
ASKED = [{"role": "user", "content": "Ce este Dunărea?"}]
LONG = [{"role": "user", "content": "Spune ceva despre Dunăre."}, {"role": "assistant", "content": "Este lungă."}] * 4


@contextmanager
def served(config):
    """Address of a server whose answers a thread writes."""
    task = config.task
    with bound(task) as listener:
        models, texts = serve.models_of(config, task)
        writer, title = Writer(models), serve._title(config, task)
        given = {"task": task, "token": token_of(task), "title": title, "texts": texts}
        with serve.served(writer, listener, **given) as address:
            thread = threading.Thread(target=writer.run)
            thread.start()
            try:
                yield address
            finally:
                writer.stop()
                thread.join(30)


@pytest.fixture
def run(make_config, tmp_path):
    return write_run(tmp_path / "my_run", make_config)


@pytest.fixture
def address(make_config, run):
    with served(make_config("task=serve", "task.port=0", f"task.run={run}", *SMALL)) as found:
        yield found


def opened(address, body, *, path="v1/chat/completions", headers=(), method=None):
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    given = {"Content-Type": "application/json", **dict(headers)}
    request = urllib.request.Request(address + path, data=data, headers=given, method=method)
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60)


def asked(address, **fields):
    with opened(address, {"messages": ASKED, "temperature": 0, **fields}) as response:
        return json.load(response)


def text_of(answer):
    return answer["choices"][0]["message"]["content"]


def events(response):
    lines = [line.decode().removeprefix("data: ").strip() for line in response if line.startswith(b"data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def by_generate(make_config, capsys, run, *overrides):
    capsys.readouterr()
    given = ("task=generate", f"task.run={run}", f"task.prompt='{ASKED[0]['content']}'", *SMALL)
    generate.run(make_config(*given, *overrides))
    return capsys.readouterr().out.strip()


def test_both_models_answer_as_task_generate_does(make_config, run, address, capsys):
    trained, base = asked(address), asked(address, model="base")
    assert text_of(trained) == by_generate(make_config, capsys, run)
    assert text_of(base) == by_generate(make_config, capsys, run, "task.weights=base")
    assert text_of(trained) != text_of(base)
    usage = trained["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    short = asked(address, max_tokens=3)
    assert short["usage"]["completion_tokens"] == 3
    assert short["choices"][0]["finish_reason"] == "length"
    assert text_of(trained).startswith(text_of(short))
    with opened(address, None, path="v1/models") as response:
        assert [model["id"] for model in json.load(response)["data"]] == ["trained", "base"]
    draws = {text_of(asked(address, temperature=1.5)) for _ in range(3)}
    assert len(draws) == 3, "each request draws anew"
    more = {"stream": True, "stream_options": {"include_usage": True}}
    with opened(address, {"messages": ASKED, "temperature": 0, **more}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        *pieces, last, counted = events(response)
    assert len(pieces) > 1, "not all at once"
    assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == text_of(trained)
    assert last["choices"][0]["finish_reason"] in ("stop", "length")
    assert (counted["usage"], counted["choices"]) == (usage, [])


def test_two_requests_at_once(address):
    alone = {model: text_of(asked(address, model=model)) for model in ("trained", "base")}
    models = ["trained", "base"] * 4
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda model: text_of(asked(address, model=model)), models))
    assert together == [alone[model] for model in models]
    host, port = re.match(r"http://(.*):(\d+)/", address).groups()
    with socket.create_connection((host, int(port))) as gone:  # leaves in the middle of its answer
        body = json.dumps({"messages": ASKED, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        gone.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        gone.recv(16)
    assert text_of(asked(address)) == alone["trained"]


def test_the_page(address):
    with opened(address, None, path="") as response:
        html, policy = response.read().decode(), response.headers["Content-Security-Policy"]
    assert "<h1>my_run</h1>" in html
    assert re.findall(r'data-model="(\w+)"', html) == ["trained", "base"]
    assert not re.search(r'(src|href)="?(https?:)?//', html), "it loads nothing"
    (nonce,) = re.findall(r'<script nonce="([^"]+)">', html)
    assert f"script-src 'nonce-{nonce}'" in policy
    labelled = set(re.findall(r'label for="(\w+)"', html)) | set(re.findall(r'<label>[^<]+<input id="(\w+)"', html))
    assert labelled == {"text", "temperature", "tokens", "system"}


def test_the_system_text(make_config, run):
    texts = {"its own": ("system", "Lung."), "none": ("system", " "), "the command's": None}
    task = make_config("task=serve", "task.system=Scurt.").task
    found = {}
    for name, first in texts.items():
        turns = [] if first is None else [{"role": first[0], "content": first[1]}]
        found[name] = ChatRequest(messages=[*turns, *ASKED]).conversation(task)
    asks = ("user", ASKED[0]["content"])
    assert found == {
        "its own": (("system", "Lung."), asks),
        "none": (asks,),
        "the command's": (("system", "Scurt."), asks),
    }
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    in_parts = ChatRequest(messages=[{"role": "user", "content": parts}])
    assert in_parts.conversation(task)[-1] == ("user", "ab")


def test_a_conversation_that_is_too_long_loses_its_oldest_turns(address):
    answer = asked(address, messages=[*LONG, *ASKED])
    assert answer["usage"]["turns_left_out"] >= 2
    assert answer["usage"]["turns_left_out"] % 2 == 0
    assert answer["usage"]["prompt_tokens"] <= 64


REFUSED = {
    "no JSON": (b"{", (), 400, "the body is not JSON"),
    "nested": (b"[" * 100_000, (), 400, "error parsing the body"),
    "no object": (b"[1]", (), 400, "the body=[1]; "),
    "no messages": ({}, (), 400, "messages; it is missing"),
    "an answer last": ({"messages": LONG}, (), 400, "the last turn must be the user's"),
    "an odd turn": ({"messages": [{"role": "king", "content": "a"}]}, (), 400, 'messages.0.role="king"; '),
    "no text": ({"messages": [{"role": "user", "content": [{"image": 1}]}]}, (), 400, "messages.0.content"),
    "too long": ({"messages": [{"role": "user", "content": "Dunărea " * 200}]}, (), 400, "the longest of task.buckets"),
    "half a pair": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', (), 400, "surrogate pair"),
    "many tokens": ({"messages": ASKED, "max_tokens": 13}, (), 400, "max_tokens=13; it must be 1 to 12"),
    "no tokens": ({"messages": ASKED, "max_completion_tokens": 0}, (), 400, "max_completion_tokens=0; it must be 1 to"),
    "a truth": ({"messages": ASKED, "max_tokens": True}, (), 400, "max_tokens=true; "),
    "cold": ({"messages": ASKED, "temperature": -1}, (), 400, "temperature=-1; "),
    "no number": (b'{"messages": [{"role": "user", "content": "a"}], "top_p": NaN}', (), 400, "top_p=NaN; "),
    "a model": ({"messages": ASKED, "model": "other"}, (), 404, "use trained or base"),
    "nine answers": ({"messages": ASKED, "n": 9}, (), 400, "n=9; "),
    "five stops": ({"messages": ASKED, "stop": list("abcde")}, (), 400, "stop="),
    "an empty stop": ({"messages": ASKED, "stop": ""}, (), 400, "stop.0="),
    "a form": (b"a=1", {"Content-Type": "text/plain"}, 415, "no application/json"),
    "too large": (b"1", {"Content-Length": str(MAX_BODY_BYTES + 1)}, 413, f"at most {MAX_BODY_BYTES}"),
    "another origin": ({"messages": ASKED}, {"Origin": "http://evil.example"}, 403, "only the page of this server"),
    "no origin": ({"messages": ASKED}, {"Origin": "null"}, 403, "only the page of this server"),
    "a rebound name": ({"messages": ASKED}, {"Host": "evil.example:7860"}, 403, "this server has another name"),
    "a like name": ({"messages": ASKED}, {"Host": "127.0.0.1.evil.example"}, 403, "this server has another name"),
    "a broken name": ({"messages": ASKED}, {"Host": "[::1"}, 403, "this server has another name"),
}


def refusal(address, body, **how):
    """Status and error of a request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        opened(address, body, **how)
    with refused.value as error:
        return error.code, json.load(error)["error"]


def test_refusals(address):
    found = {}
    for name, (body, headers, _, text) in REFUSED.items():
        status, error = refusal(address, body, headers=headers)
        found[name] = (status, text if text in error["message"] else error["message"])
        assert set(error) == {"message", "type", "param", "code"}
    assert found == {name: (status, text) for name, (_, _, status, text) in REFUSED.items()}
    for path, method, status in (("v2", "GET", 404), ("v1/models", "POST", 405), ("v1/models/a/b", "GET", 404)):
        assert refusal(address, None if method == "GET" else b"{}", path=path, method=method)[0] == status
    for path, method in (("", "HEAD"), ("v1/models", "HEAD"), ("v1/chat/completions", "OPTIONS")):
        with opened(address, None, path=path, method=method) as response:
            assert response.status in (200, 204)
            assert "Access-Control-Allow-Origin" not in response.headers, "no other site may read it"
    own = address.rstrip("/")
    with opened(address, {"messages": ASKED, "max_tokens": 1}, headers={"Origin": own}) as response:
        assert json.load(response)["object"] == "chat.completion"


def test_names_of_a_server_that_others_reach(make_config):
    task = make_config("task=serve", "task.port=0", "task.host=0.0.0.0").task
    names = ("10.0.0.7:7860", "[::1]:80", "localhost", socket.gethostname(), "evil.example", "")
    assert [is_own_name(name, task=task) for name in names] == [True, True, True, True, False, False]
    with bound(task) as listener:
        taken = make_config("task=serve", f"task.port={listener.getsockname()[1]}", "task.host=0.0.0.0")
        with pytest.raises(ConfigError, match=r"nothing can listen there .*; name another port"):
            bound(taken.task)
    for host in ("a..b", "x" * 70 + ".example"):
        with pytest.raises(ConfigError, match=r"nothing can listen there .*; name another port"):
            bound(replace(task, host=host))


@pytest.mark.slow
def test_weights_alone_and_other_bases(make_config, run):
    """What is beside what: a merged model has its run's base as a model of its own; `base` alone is one model."""
    write_form(run, make_config)
    for words, names in (
        (("task.weights=merged",), ["trained", "base"]),
        (("task.weights=base",), ["base"]),
        (("task.base_beside=false",), ["trained"]),
    ):
        config = make_config("task=serve", f"task.run={run}", *SMALL, *words)
        models, texts = serve.models_of(config, config.task)
        assert list(models) == list(texts) == names
    adapter = make_config("task=serve", f"task.adapter={run / 'adapter'}", *SMALL)
    assert list(serve.models_of(adapter, adapter.task)[0]) == ["trained", "base"]
    assert serve._title(adapter, adapter.task) == "adapter"
    with pytest.raises(ConfigError, match=r"task.do_sample=false with task=serve; .* 0 takes the likeliest"):
        make_config("task=serve", "task.do_sample=false")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_without_an_error(make_config, run, capsys, number):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = []

    def ask_and_interrupt():
        try:  # before the weights are there, the connection waits
            for _ in range(600):
                with suppress(urllib.error.URLError):
                    found.append(text_of(asked(f"http://127.0.0.1:{port}/")))
                    break
                time.sleep(0.1)
        finally:
            os.kill(os.getpid(), number)

    client = threading.Thread(target=ask_and_interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    try:
        client.start()
        serve.run(make_config("task=serve", f"task.port={port}", f"task.run={run}", *SMALL))
        client.join()
    finally:
        signal.signal(signal.SIGINT, before)
    printed = capsys.readouterr()
    assert printed.out == f"http://127.0.0.1:{port}/\n"
    assert f"stopped by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}" in printed.err
    assert found
    assert found[0]


# A shell's background ignores Ctrl-C, and what is started there inherits it.
COMMAND = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[0] = "run.py"
runpy.run_path("run.py", run_name="__main__")
"""


@pytest.mark.slow
def test_another_temperature_or_model_compiles_nothing(run, tmp_path):
    """The command, on torch_xla: the base has the programs of the trained model."""
    words = ["task=serve", "model=tiny", f"task.run={run}", "task.port=0", *SMALL[:2], "hw.runtime=xla"]
    log = tmp_path / "log.txt"
    environment = {name: value for name, value in os.environ.items() if name != "PJRT_DEVICE"}
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words, f"output_dir={tmp_path / 'none'}"],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            address = process.stdout.readline().strip()
            assert address, log.read_text()
            answers = [asked(address, temperature=heat, model=m) for heat in (0, 0.5) for m in ("trained", "base")]
            answers.append(asked(address, temperature=0.7, top_p=0.3, seed=3, stop="a", n=2))
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()
            process.communicate()
    assert text_of(answers[0]) != text_of(answers[1])
    assert not (tmp_path / "none").exists()
    assert log.read_text().count("compiled 1 program(s)") == 2
