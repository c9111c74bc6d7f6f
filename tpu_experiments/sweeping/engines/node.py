"""Run one point on a node of a Ray cluster.

Ray sends this module there as it is, before the node's own checkout is known to be the same, so it imports nothing of
this project at its top.
"""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

LOOK_SECONDS = 0.2
UNFIT_EXIT_CODE = 2
CODE = ("run.py", "tpu_experiments/**/*.py", "conf/**/*.yaml")
OF_RAY = ("RAY_JOB_ID", "RAY_RAYLET_PID")
"""Variables that make a process a worker of Ray, which a point is not."""


def code_digest(root: str) -> str | None:
    """Return the SHA-256 of the code and the settings in a checkout; None where there is none."""
    if not Path(root, "run.py").is_file():
        return None
    digest = hashlib.sha256()
    for pattern in CODE:
        for file in sorted(Path(root).glob(pattern)):
            content = file.read_bytes()
            digest.update(f"{file.relative_to(root)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def node_problem(root: str, digest: str, shared: str | None, *, folder: str) -> str | None:
    """Return why this node cannot run points, to be read after its address; None where it can.

    Args:
        root: the checkout's path, the same on every node.
        folder: where the sweep's command was started, which its relative paths begin at.
        digest: `code_digest` of it on the machine of the sweep.
        shared: a file that is in the sweep's folder; None where that is in a bucket.
    """
    here = code_digest(root)
    if here is None:
        return f"has no {root}/run.py; copy this checkout to the same path on every node, with its environment."
    if here != digest:
        return f"has other code or settings in {root} than this machine; copy this checkout there."
    if not os.path.isdir(folder):
        return f"has no folder {folder}, where this command was started; start it in {root}."
    if shared is not None and not os.path.exists(shared):
        return (
            f"does not see {os.path.dirname(shared)}, which is on this machine's disk; set output_dir to a bucket "
            "(output_dir=gs://bucket/runs) or to a disk that all nodes share."
        )
    return None


def run_point(
    words: Sequence[str],
    *,
    root: str,
    digest: str,
    shared: str | None,
    folder: str,
    log: str,
    given: Mapping[str, str],
    device: str,
) -> tuple[int, str]:
    """Run `run.py` with these words as a child, until it ends; return its exit code and what is wrong with the node.

    Ray's cancellation is a KeyboardInterrupt here: the child gets SIGTERM, saves, and its exit code is returned.

    Args:
        log: the file or object that takes the child's output.
        given: environment variables of the sweep's process that go before the node's own.
        device: `hw.device`.
    """
    # Ray's cancellation does nothing where SIGINT is ignored, as it is below nohup and in the background of a script.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    problem = node_problem(root, digest, shared, folder=folder)
    if problem is not None:
        return UNFIT_EXIT_CODE, f"this node {problem}"
    sys.path.insert(0, root)  # else another checkout that is installed here would be imported
    from tpu_experiments.runtime.processes.tether import tied_command
    from tpu_experiments.storage import paths
    from tpu_experiments.storage.spool import Mirror

    paths.make_dirs(paths.folder_of(log))
    output = Mirror.of_file(log)
    try:
        with output.local.open("ab") as stream:
            child = subprocess.Popen(
                tied_command([sys.executable, os.path.join(root, "run.py"), *words]),
                env=environment(os.environ, given=given, device=device),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                process_group=0,
            )
        return _followed(child, output.upload_if_due), ""
    finally:
        output.close()


def environment(own: Mapping[str, str], *, given: Mapping[str, str], device: str) -> dict[str, str]:
    """Return the variables of a point: the node's own, then those given, then those of its one chip.

    Ray limits OMP_NUM_THREADS to the CPUs of the task, which is right for a point on the CPU alone.
    """
    values = {name: value for name, value in own.items() if name not in OF_RAY}
    if device != "cpu":
        values.pop("OMP_NUM_THREADS", None)
    values |= given
    chip = values.get("TPU_VISIBLE_CHIPS", "")
    if device == "tpu" and chip.isdecimal():  # one of several chips, which Ray chose
        from tpu_experiments.runtime.processes.chips import chip_variables

        values |= chip_variables(int(chip))
    return values


def _followed(child: "subprocess.Popen[bytes]", upload_if_due: Callable[[], None]) -> int:
    """Wait for the child; it does not outlive this function."""
    try:
        while True:
            try:
                while child.poll() is None:
                    time.sleep(LOOK_SECONDS)
                    upload_if_due()
                assert child.returncode is not None
                return child.returncode
            except KeyboardInterrupt:
                child.terminate()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
