"""Processes of Python that begin where torch and the other libraries are imported already.

`python run.py ...` spends 5 s of CPU on importing torch, transformers and matplotlib. Here a server imports them once
for each process of pytest, and every command is a fork of it. Nothing of the project and nothing of torch_xla or JAX is
imported before the fork, so each command still sets its environment first and imports them itself, as one that was
started from a shell. A command whose environment differs in what a preloaded library reads at import is started in the
ordinary way.

The server is this file, run as a program: `python tests/forks.py SOCKET`.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib.util
import io
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
PRELOADED = (
    "torch._dynamo",
    "torch._inductor.fx_passes.post_grad",  # torch_xla's stablehlo imports it: 1.1 s
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "scipy.optimize",  # by transformers' losses: 0.6 s
    "sympy",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "transformers",
    "transformers.tokenization_utils_fast",
    "datasets",
    "pyarrow.parquet",
    "gcsfs",
    "jinja2",
    "hydra.main",
    "hydra._internal.hydra",
    "hydra.core.plugins",
)
READ_AT_IMPORT = re.compile(
    r"(HF|HUGGINGFACE|TRANSFORMERS|DATASETS|ARROW|XDG|OMP|KMP|GOMP|OPENBLAS|MKL|GCSFS|MPL|TORCH|PYTORCH|CUDA|USE|LD|LC)_"
    r"|HOME$|LANG$|TMPDIR$|PYTHON(?!PATH$)"
)
"""Variables that a preloaded library or the interpreter reads when it starts; commands may differ in all others."""
ENVIRONMENT = dict(os.environ)
"""As it was when the tests began; the first command may be that of a test that has changed it."""
LIMIT = 1 << 20
"""Bytes of a request: arguments and environment."""


class Fork:
    """A command that is running, with the methods of subprocess.Popen that the tests use."""

    def __init__(self, server: "Server", pid: int, pipes: Sequence[Any]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout, self.stderr = pipes
        self._server = server

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        if self.returncode is None:
            self._server.collect(0.0)
            self.returncode = self._server.codes.pop(self.pid, None)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = 3600.0 if until is None else until - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            self._server.collect(left)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both pipes to their ends and wait; a pipe that is none reads as empty text."""
        texts = ["", ""]

        def read(at: int, pipe: io.TextIOBase) -> None:
            texts[at] = pipe.read()

        readers = [
            threading.Thread(target=read, args=(at, pipe), daemon=True)
            for at, pipe in enumerate((self.stdout, self.stderr))
            if pipe is not None
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> "Fork":
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()


class Server:
    """The process that is forked, and the exit codes that it reports."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        self._environment = ENVIRONMENT
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, cwd=REPOSITORY, env=self._environment, pass_fds=[theirs.fileno()])
        theirs.close()
        assert self._socket.recv(LIMIT), "the server could not import what it preloads"
        atexit.register(self.close)

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Tell whether that environment is the server's in what the preloaded libraries have read."""
        names = filter(READ_AT_IMPORT.match, {*environment, *self._environment})
        return all(environment.get(name) == self._environment.get(name) for name in names)

    def start(
        self, command: Sequence[str], *, folder: Path, environment: Mapping[str, str], outputs: Sequence[Any]
    ) -> Fork:
        """Fork, and run a script or `-m module` with its arguments; outputs are files, PIPE or DEVNULL."""
        pipes: list[Any] = [None, None]
        numbers, opened = [], []
        for at, output in enumerate(outputs):
            if output == subprocess.PIPE:
                reading, writing = os.pipe()
                pipes[at] = os.fdopen(reading, encoding="utf-8", errors="replace")
                opened.append(writing)
                numbers.append(writing)
            elif output == subprocess.STDOUT:
                numbers.append(numbers[0])
            elif output == subprocess.DEVNULL:
                opened.append(os.open(os.devnull, os.O_WRONLY))
                numbers.append(opened[-1])
            else:
                numbers.append(output.fileno())
        request = json.dumps({"command": list(command), "folder": str(folder), "environment": dict(environment)})
        socket.send_fds(self._socket, [request.encode()], numbers)
        for number in opened:
            os.close(number)
        self._pid: int | None = None
        while self._pid is None:
            self.collect(60.0)
        return Fork(self, self._pid, pipes)

    def collect(self, seconds: float) -> None:
        """Take one message of the server, waiting at most that long."""
        self._socket.settimeout(max(seconds, 1e-6))
        with contextlib.suppress(TimeoutError, BlockingIOError):
            kind, pid, code = json.loads(self._socket.recv(LIMIT))
            if kind == "started":
                self._pid = pid
            else:
                self.codes[pid] = code

    def close(self) -> None:
        """End the server, and what it forked."""
        self._socket.close()
        self._process.wait(timeout=10)


Process = Fork | subprocess.Popen[str]
_server: Server | None = None


def start(
    command: Sequence[str],
    *,
    cwd: Path = REPOSITORY,
    env: Mapping[str, str] | None = None,
    stdout: Any = subprocess.PIPE,
    stderr: Any = subprocess.PIPE,
) -> "Process":
    """Start Python on a script or on `-m module`, with arguments, as subprocess.Popen does in text mode."""
    global _server
    if _server is None:
        _server = Server()
    environment = dict(os.environ if env is None else env)
    if not _server.serves(environment):
        words = [sys.executable, *command]
        return subprocess.Popen(words, cwd=cwd, env=environment, stdout=stdout, stderr=stderr, text=True)
    return _server.start(command, folder=cwd, environment=environment, outputs=(stdout, stderr))


def run(
    command: Sequence[str], *, cwd: Path = REPOSITORY, env: Mapping[str, str] | None = None, timeout: float = 540
) -> "subprocess.CompletedProcess[str]":
    """Run Python on a script or on `-m module`, with arguments, and return its outputs, as subprocess.run does.

    Raises:
        subprocess.TimeoutExpired: it ran longer than `timeout` seconds, and was killed.
    """
    with start(command, cwd=cwd, env=env) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        code = process.wait()
    return subprocess.CompletedProcess(list(command), code, stdout, stderr)


def serve(number: int) -> list[str]:
    """Fork for each request until the socket closes; return, in a fork, the command that it is to run."""
    for name in PRELOADED:
        importlib.import_module(name)
    imported = {name.partition(".")[0] for name in sys.modules}
    assert not imported & {"torch_xla", "jax", "tpu_experiments"}, "these are imported by each command itself"
    # OpenBLAS and jemalloc have threads of their own, which they see to at a fork.
    assert threading.active_count() == 1, f"{threading.enumerate()}: a fork has only the thread that forks"
    gc.collect()
    gc.freeze()  # the pages stay shared
    client = socket.socket(fileno=number)
    waking, signalled = socket.socketpair()
    signalled.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
    running: set[int] = set()
    selector = selectors.DefaultSelector()
    for each in (client, waking):
        selector.register(each, selectors.EVENT_READ)
    client.send(json.dumps(["ready", 0, 0]).encode())
    while True:
        for key, _ in selector.select():
            if key.fileobj is waking:
                waking.recv(LIMIT)
                while running:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                    if not pid:
                        break
                    running.discard(pid)
                    client.send(json.dumps(["ended", pid, os.waitstatus_to_exitcode(status)]).encode())
                continue
            request, outputs, _, _ = socket.recv_fds(client, LIMIT, 2)
            if not request:  # pytest has ended
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                selector.close()
                for each in (client, waking, signalled):
                    each.close()
                return become(json.loads(request), outputs)
            running.add(pid)
            for output in outputs:
                os.close(output)
            client.send(json.dumps(["started", pid, 0]).encode())


def become(request: Mapping[str, Any], outputs: Sequence[int]) -> list[str]:
    """Take on the folder, the environment and the outputs of a request; return its command."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
        os.close(output)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    faulthandler.register(signal.SIGUSR2)  # writes every thread's stack to stderr
    return list(request["command"])


def main_module(command: Sequence[str]) -> tuple[types.CodeType, dict[str, Any]]:
    """Return the code of a script or module and the names of a new `__main__`, as the interpreter makes them."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if command[0] == "-m":
        sys.path.insert(0, os.getcwd())
        spec = importlib.util.find_spec(command[1])
        assert spec is not None
        assert spec.origin is not None
        path, arguments, main.__spec__ = spec.origin, command[2:], spec
    else:
        path, arguments = str(Path(command[0]).absolute()), command[1:]
        sys.path.insert(0, str(Path(path).parent))
    sys.argv[:] = [path if command[0] == "-m" else command[0], *arguments]
    main.__file__ = path
    main.__dict__["__builtins__"] = __builtins__
    return compile(Path(path).read_bytes(), path, "exec"), main.__dict__


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose `logging` would hide Python's
    # At the top level, so that the interpreter itself ends the command: exit codes, tracebacks, threads, exit hooks.
    _code, _names = main_module(serve(int(sys.argv[1])))
    exec(_code, _names)
