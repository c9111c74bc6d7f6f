"""A folder with launch/local.sh, wheels of a few lines and fakes of df, uname and Python."""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "launch" / "local.sh"
PLENTY_DF = 'echo Filesystem Blocks Used Available; echo "disk 1 1 99000000 1% /"'


@dataclass
class Checkout:
    root: Path
    bin: Path
    wheels: Path
    script = "local.sh"

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def lock(self) -> Path:
        return self.root / "launch" / "requirements.lock"

    @property
    def tiny(self) -> Path:
        return next(self.venv.glob("lib/python*/site-packages/tiny.py"))

    def environ(self, **extra: str) -> dict[str, str]:
        ours = ("TPU_EXPERIMENTS_", "PIP_", "UV_", "VIRTUAL_ENV", "PYTHON")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        kept |= {"PATH": f"{self.bin}:{kept['PATH']}", "PYTHON": sys.executable}
        kept |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": self.wheels.as_uri()}
        return {k: v for k, v in (kept | {"PIP_CONFIG_FILE": os.devnull} | extra).items() if v}

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(self.root / "launch" / self.script), *command],
            env=self.environ(**env),
            cwd="/",
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        with self.start(*command, **env) as process:
            out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def fake(self, name: str, body: str) -> Path:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    def fake_python(self, name: str, patch: str) -> Path:
        """A Python that runs `patch` before the script's own questions."""
        code = f"import sys; {patch}; exec(sys.argv[1])"
        return self.fake(name, f'exec {shlex.quote(sys.executable)} -c {shlex.quote(code)} "$2"')

    def add_wheel(self, name: str, version: str, files: dict[str, str]) -> None:
        """Builds a wheel and appends its entry, with its hash, to the lock."""
        info = f"{name}-{version}.dist-info"
        files = files | {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        files[f"{info}/RECORD"] = f"{info}/RECORD,,\n" + "".join(
            f"{path},,{len(text)}\n" for path, text in files.items()
        )
        wheel = self.wheels / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path, text in files.items():
                entry = zipfile.ZipInfo(path)
                entry.external_attr = 0o100755 << 16  # pip wants a regular file, executable
                archive.writestr(entry, text)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        with self.lock.open("a") as lock:
            lock.write(f"{name}=={version} \\\n    --hash=sha256:{digest}\n")


def make_checkout(folder: Path) -> Checkout:
    checkout = Checkout(folder / "a checkout", folder / "bin", folder / "wheels")
    for path in (checkout.root / "launch", checkout.bin, checkout.wheels):
        path.mkdir(parents=True)
    shutil.copy(SCRIPT, checkout.root / "launch")
    checkout.fake("df", PLENTY_DF)
    checkout.add_wheel("tiny", "1.0", {"tiny.py": "answer = 42\n"})
    return checkout
