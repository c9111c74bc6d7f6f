"""A run on two hosts, as two processes that meet over TCP.

torch_xla's CPU device knows one process, so each computes the whole of what a slice would share: programs, feeds,
decisions, saves and resumes are those of several hosts; what crosses between their chips is not.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import forks
from tests.config.composing import composed
from tests.training.runs import SAME_SUMS, finished, records
from tpu_experiments.checkpoint.reading import tensors_below
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.mesh import mesh_of
from tpu_experiments.config.targets import locate
from tpu_experiments.models.sources.build import describe
from tpu_experiments.runtime.processes.hosts import Hosts
from tpu_experiments.runtime.sharding import ShardingTable
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.tasks.setup import check_hosts, require_same_data, require_shared
from tpu_experiments.training.batches import RunInputs

LAB = '''
import os, signal
from tpu_experiments.training.trainer import Trainer


class Struck(Trainer):
    """Sends its own process a signal behind a step, on the second host."""

    def between_steps(self, stage, *, last):
        name, _, step = os.environ.get("STRIKE", "").partition(" ")
        if name and self.runtime.rank == 1 and self.progress.step == int(step):
            os.kill(os.getpid(), getattr(signal, name))
        super().between_steps(stage, last=last)
'''
COMMON = (
    "model=qwen05b",
    "data=[sample_text]",
    "lora=all_linear_r8",
    "lora.dropout=0.1",
    "debug=smoke",
    "hw.parallel=spmd",
    "hw.num_devices=2",
    "trainer.max_stage_steps=12",
    "trainer.log_every_steps=2",
    "trainer.eval_every_steps=6",
    "trainer.max_eval_rows=8",
    "checkpoint.every_steps=3",
    "plugins=[host_lab]",
    "trainer._target_=host_lab.Struck",
    "name=run",
)


@pytest.fixture
def lab(tmp_path, monkeypatch) -> None:
    (tmp_path / "host_lab.py").write_text(LAB)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_two_hosts(output_dir: Path, *overrides: str, strike: str = "") -> tuple[list[int], list[str]]:
    """Exit codes and outputs of the two hosts."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "STRIKE": strike}
    command = ["run.py", *COMMON, "hw.num_hosts=2", f"output_dir={output_dir}", *overrides]
    hosts = [
        forks.start(command, env=kept | SAME_SUMS | place | {"RANK": str(rank)}, stderr=subprocess.STDOUT)
        for rank in range(2)
    ]
    outputs = [host.communicate(timeout=540)[0] for host in hosts]
    return [host.returncode for host in hosts], outputs


def checkpoints(output_dir: Path) -> list[str]:
    return sorted(path.parent.name for path in output_dir.glob("run/checkpoints/*/COMMIT.json"))


@pytest.mark.slow
def test_two_hosts_stopped_and_killed_end_as_one(tmp_path, lab):
    alone, together = tmp_path / "alone", tmp_path / "together"
    whole = finished(*COMMON, output_dir=alone)
    codes, outputs = on_two_hosts(together, strike="SIGTERM 5")
    assert codes == [75, 75], outputs
    assert checkpoints(together)[-1] == "step_00000005"
    assert "stopped on request" in outputs[0]
    assert "stopped on request" not in outputs[1]
    codes, outputs = on_two_hosts(together, strike="SIGKILL 8")
    assert codes == [1, -signal.SIGKILL], outputs
    assert "error: host 0 of 2 lost another (" in outputs[0]
    assert "The same command, on every host, resumes the run." in outputs[0]
    assert checkpoints(together)[-1] == "step_00000006"
    codes, outputs = on_two_hosts(together)
    assert codes == [0, 0], outputs
    assert "finished run" in outputs[0]
    assert "finished" not in outputs[1]
    for kind in ("adapter/adapter_model.safetensors", "checkpoints/step_00000012/optimizer.safetensors"):
        assert (together / "run" / kind).read_bytes() == (alone / "run" / kind).read_bytes(), kind
    assert measured(together) == measured(alone)
    assert whole["num_compiles"] == 3


@pytest.mark.slow
def test_two_hosts_write_a_sharded_model_and_one_goes_on_with_it(tmp_path, lab):
    """Each host writes half of the shards; killed and resumed they end as one host alone, and one host can go on."""
    alone, together, elastic = (tmp_path / name for name in ("alone", "together", "elastic"))
    full = ("lora=none", "sharding=fsdp")
    finished(*COMMON, *full, output_dir=alone)
    codes, outputs = on_two_hosts(together, *full, strike="SIGKILL 8")
    assert codes == [1, -signal.SIGKILL], outputs
    assert checkpoints(together)[-1] == "step_00000006"
    shutil.copytree(together, elastic)
    codes, outputs = on_two_hosts(together, *full)
    assert codes == [0, 0], outputs
    last = together / "run/checkpoints/step_00000012"
    sizes = {path.name: path.stat().st_size for path in last.glob("*.safetensors")}
    assert sizes.keys() == {f"host-0{rank}-of-02.{group}.safetensors" for rank in (0, 1) for group in GROUPS}
    for group in GROUPS:
        first, second = (sizes[f"host-0{rank}-of-02.{group}.safetensors"] for rank in (0, 1))
        assert first == pytest.approx(second, rel=0.01)
    assert json.loads((last / "COMMIT.json").read_text())["proof"]["answer"]["equal_bits"] is True
    assert measured(together) == measured(alone)
    assert trained(together) == trained(alone)
    finished(*COMMON, *full, output_dir=elastic)
    assert trained(elastic) == trained(alone)


GROUPS = ("parameters", "optimizer")


def trained(output_dir: Path) -> dict[str, bytes]:
    """Bytes of every tensor of the last checkpoint and of the exported model, by group or folder and name."""
    found, folder = {}, output_dir / "run/checkpoints/step_00000012"
    for group in GROUPS:
        for name, tensor in tensors_below(str(folder), group, max_held_bytes=0).items():
            found[f"{group} {name}"] = tensor.numpy().tobytes()
    return found | {path.name: path.read_bytes() for path in (output_dir / "run/model").glob("*.safetensors")}


def measured(output_dir: Path) -> list[dict[str, object]]:
    """What the records say of the model."""
    kept = ("step", "train/", "eval/", "norms/", "sample")
    return [{k: v for k, v in record.items() if k.startswith(kept)} for record in records(output_dir)]


def test_a_folder_that_the_first_host_alone_sees_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=f"output_dir={tmp_path} with hw.num_hosts=2; host 1 does not see {tmp_path}/x"
    ):
        require_shared(RunFolder(str(tmp_path), "x"), Hosts(1, 2))


@pytest.mark.parametrize(
    ("overrides", "split"),
    [
        (("sharding=fsdp", "trainer.canary.when=always"), None),
        (("sharding=fsdp_tensor",), None),
        (("sharding=fsdp_tensor", "trainer.canary.when=always"), r"14 of 28 \(.*lora_B\) are split over the hosts"),
        (("sharding=fsdp", "lora=none", "trainer.canary.when=always"), r"16 of 21 \(.*weight\) are split over the"),
    ],
)
def test_the_gradient_check_needs_what_is_trained_whole_on_a_host(overrides, split):
    config = composed("model=mistral7b", "model.size=tiny", "data=uk_law", "hw=v6e16", "task=plan", *overrides)
    module, _ = describe(locate(config.model._target_, key="model")(config.model, seed=1), lora=config.lora)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}
    table = ShardingTable(config.sharding, mesh=mesh_of(config.hw, config.sharding))
    if split is None:
        check_hosts(config, table, shapes=shapes)
    else:
        with pytest.raises(ConfigError, match=split):
            check_hosts(config, table, shapes=shapes)


def test_hosts_that_prepared_other_rows_are_refused():
    class Two(Hosts):
        def gather(self, value):
            return [value, {"wiki": "beef"}]

    inputs = RunInputs(None, {"wiki": SimpleNamespace(audit_hashes={"wiki": "cafe"})}, [])
    with pytest.raises(ConfigError, match=r"data.wiki; the hosts have other rows \(cafe, beef, by host\)"):
        require_same_data(Two(0, 2), inputs)
