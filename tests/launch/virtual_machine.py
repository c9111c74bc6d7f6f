"""A checkout on a machine of its own: a home that is empty, and a lock of wheels of a few lines.

One of the wheels holds no package but the place of this environment's, so that run.py finds torch_xla and all else
without 8 GB being installed.
"""

import json
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

from tests.launch.checkout import Checkout, make_checkout

REPOSITORY = Path(__file__).parents[2]
NO_LOOKS = "task.checks=[settings]"
"""Has task=doctor look at nothing that takes seconds."""


class VirtualMachine(Checkout):
    """Runs launch/startup.sh."""

    script = "startup.sh"

    @property
    def home(self) -> Path:
        return self.root.parent / "home"

    def environ(self, **extra: str) -> dict[str, str]:
        unset = {"XDG_CACHE_HOME": "", "TPU_SKIP_MDS_QUERY": "", "TPU_ACCELERATOR_TYPE": ""}
        return super().environ(**{"HOME": str(self.home), **unset, **extra})


def make_machine(folder: Path) -> VirtualMachine:
    """The checkout has the repository's own files: code by links, so that its bytecode is there."""
    plain = make_checkout(folder)
    machine = VirtualMachine(plain.root, plain.bin, plain.wheels)
    machine.home.mkdir()
    for name in ("startup.sh", "on_vm.py", "__init__.py"):
        shutil.copy(REPOSITORY / "launch" / name, machine.root / "launch")
    for name in ("run.py", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, machine.root)
    shutil.copytree(REPOSITORY / "conf", machine.root / "conf", ignore=shutil.ignore_patterns("local"))
    (machine.root / "tpu_experiments").symlink_to(REPOSITORY / "tpu_experiments")
    machine.add_wheel("shared", "1.0", {"shared.pth": sysconfig.get_path("purelib") + "\n"})
    return machine


@contextmanager
def metadata_server(accelerator_type: str, *, runtime_version: str) -> Iterator[str]:
    """The address of a server that answers as that of a TPU VM does."""
    tpu_env = f"ACCELERATOR_TYPE: '{accelerator_type}'\nNODE_ID: 'n'\nRUNTIME_VERSION: '{runtime_version}'\n"
    answer = json.dumps({"accelerator-type": accelerator_type, "tpu-env": tpu_env}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_asked = self.path.startswith("/computeMetadata/v1/instance/attributes/")
            self.send_response(200 if is_asked and self.headers["Metadata-Flavor"] == "Google" else 403)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
