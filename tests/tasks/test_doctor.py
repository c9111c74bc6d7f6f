"""task=doctor: every verdict from facts alone; those of machines that are not here are written down."""

import json
from dataclasses import replace

import pytest

from tests.tasks.verdicts import TPU, verdict_of
from tpu_experiments.config.task_schema import CHECKS as NAMES
from tpu_experiments.config.task_schema import DoctorTaskConfig
from tpu_experiments.planning.check import Finding as MemoryFinding
from tpu_experiments.planning.stored_plans import sizes_of
from tpu_experiments.runtime.processes import chips
from tpu_experiments.tasks import doctor
from tpu_experiments.tasks.doctor import devices, examination, places, sources
from tpu_experiments.tasks.doctor.finding import failed, not_checked, ok, warning, worst
from tpu_experiments.tasks.doctor.places import ModelFiles

GIB = 2**30
PROBED = devices.Probed(8, "TPU", 2.0, 9.0)
CHIPS = devices.Devices(tuple(f"/dev/vfio/{n}" for n in range(8)), (), 8, (), 0, PROBED)


@pytest.mark.parametrize(
    ("seen", "expected", "words"),
    [
        (CHIPS, "ok", "8 x tpu, started in 9.0 s"),
        (replace(CHIPS, nodes=(), num_pci_chips=0, probed=None), "failed", "no TPU"),
        (replace(CHIPS, nodes=(), probed=None), "failed", "no driver is bound"),
        (replace(CHIPS, closed_nodes=("/dev/vfio/0",), probed=None), "failed", "may not be opened"),
        (
            replace(CHIPS, holders=(chips.Holder(77, "python train.py", "/dev/vfio/1"),), probed=None),
            "failed",
            "process 77 (python train.py) holds /dev/vfio/1 | wait for its end, or end it: `kill 77`",
        ),
        (replace(CHIPS, probed=replace(PROBED, num_devices=4)), "failed",
         "4 of this machine's 8 chips started in 9.0 s, and hw=v6e8 has 8"),
        (replace(CHIPS, nodes=CHIPS.nodes[:4], probed=replace(PROBED, num_devices=4)), "failed",
         "4 x tpu, started in 9.0 s, and hw=v6e8 has 8 on a host | choose hw= with 4"),
        # As Kaggle's v5e-8 does.
        (replace(CHIPS, probed=replace(PROBED, num_devices=1)), "failed",
         "and hw=v6e8 has 8 on a host | unset what `variables` names; in a notebook, restart the session"),
        (replace(CHIPS, probed=devices.Probed(error="their process died of SIGABRT: Check failed: x")), "failed",
         "processes.probe xla tpu`; in a notebook, restart the session"),
        (replace(CHIPS, probed=devices.Probed(error="Invalid --2a886c8_slice_builder_worker_addresses specified.")),
         "failed", "`unset TPU_PROCESS_ADDRESSES` (Kaggle exports it as `local`)"),
        (replace(CHIPS, probed=devices.Probed(error="TPU initialization failed: Failed to connect to [::]:8353")),
         "failed", "| a container needs its host's network: `docker run --network=host`"),
        (replace(CHIPS, probed=replace(PROBED, kind="CPU")), "failed", "fell back to CPU"),
        (replace(CHIPS, probed=replace(PROBED, total=3.0)), "failed", "1 + 1 is 3.0"),
        (
            replace(CHIPS, num_hidden_processes=4, probed=devices.Probed(error="open(/dev/vfio/1): resource busy")),
            "failed",
            "busy; 4 processes of other users were not looked into | find the holder: `sudo lsof",
        ),
        (replace(CHIPS, probed=devices.Probed(error="no start within 120 s")), "failed", "processes.probe xla tpu"),
    ],
)  # fmt: skip
def test_devices(make_config, seen, expected, words):
    verdict, said = verdict_of(devices.judge_devices(seen, make_config(*TPU)))
    assert verdict == expected
    assert words in said


NO_DRIVER = "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"
ONE_T4 = devices.Probed(1, "cuda", 2.0, 3.0, name="Tesla T4", gib=14.75, has_bf16=False)


@pytest.mark.parametrize(
    ("probed", "words", "expected", "said"),
    [
        (ONE_T4, ["hw=t4", "model.dtype=float16"], "ok", "1 x Tesla T4 of 14.75 GiB, started in 3.0 s"),
        (ONE_T4, ["hw=t4", "model.dtype=bfloat16"], "warning", "emulates model.dtype=bfloat16, slowly | model.dtype=f"),
        (ONE_T4, ["hw=t4x2", "model.dtype=float16"], "failed",
         "3.0 s, and hw=t4x2 has 2 | hw.num_devices=1, or look at CUDA_VISIBLE_DEVICES and `nvidia-smi`"),
        (replace(ONE_T4, name="NVIDIA L4", has_bf16=True), ["hw=gpu", "model.dtype=bfloat16"], "ok", "1 x NVIDIA L4"),
        (replace(ONE_T4, total=3.0), ["hw=gpu"], "failed", "1 + 1 is 3.0"),
        (devices.Probed(error=NO_DRIVER), ["hw=gpu"], "failed", "| no GPU here, or no driver: `nvidia-smi` must list"),
        (devices.Probed(error="AssertionError: Torch not compiled with CUDA enabled"), ["hw=gpu"], "failed",
         "| this torch is built for the CPU"),
    ],
)  # fmt: skip
def test_gpus(make_config, probed, words, expected, said):
    verdict, told = verdict_of(devices.judge_devices(devices.Devices((), (), 0, (), 0, probed), make_config(*words)))
    assert verdict == expected
    assert said in told


HOST = devices.Devices(CHIPS.nodes[:4], (), 4, (), 0, replace(PROBED, num_devices=4))
"""One of the four hosts of a v6e-16."""


@pytest.mark.parametrize(
    ("seen", "expected", "words"),
    [
        (HOST, "ok", "4 x tpu"),
        (replace(HOST, probed=replace(PROBED, num_devices=16)), "ok", "16 x tpu"),
        (replace(HOST, nodes=CHIPS.nodes), "failed", "8 chips, and a host of hw=v6e16 has 4"),
        (replace(HOST, probed=replace(PROBED, num_devices=1)), "warning", "4 chips, which did not start by themselves"),
        (replace(HOST, probed=devices.Probed(error="the devices did not start within 120 s")), "warning",
         "4 chips, which did not start by themselves: the devices did not start within 120 s | a run starts them"),
        (replace(HOST, probed=devices.Probed(error="worker addresses: expected 4, got 1")), "warning", "other hosts"),
        (replace(HOST, probed=devices.Probed(error="open(/dev/vfio/1): resource busy")), "failed", "find the holder"),
        (replace(HOST, probed=replace(PROBED, kind="CPU", num_devices=1)), "failed", "fell back to CPU"),
        (replace(HOST, probed=replace(PROBED, total=3.0, num_devices=4)), "failed", "1 + 1 is 3.0"),
        (replace(HOST, nodes=(), probed=None), "failed", "no driver is bound"),
    ],
)  # fmt: skip
def test_a_host_of_a_slice_is_judged_by_its_own_chips(make_config, seen, expected, words):
    """Whether they start without the other hosts is not what a run needs."""
    verdict, said = verdict_of(devices.judge_devices(seen, make_config(*TPU, "hw=v6e16", "output_dir=gs://bkt/runs")))
    assert (verdict, words in said) == (expected, True), said


def test_a_host_of_a_slice_is_asked_for_its_own_chips(make_config, monkeypatch):
    hw = make_config(*TPU, "hw=v6e16", "output_dir=gs://bkt/runs").hw
    for name in ("TPU_HOST_BOUNDS", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    alone = devices.alone_on_slice(hw)
    assert (alone["TPU_VISIBLE_CHIPS"], alone["TPU_CHIPS_PER_PROCESS_BOUNDS"]) == ("0,1,2,3", "2,2,1")
    assert (alone["TPU_PROCESS_BOUNDS"], alone["CLOUD_TPU_TASK_ID"]) == ("1,1,1", "0")
    assert "TPU_WORKER_ID" not in alone
    monkeypatch.setenv("TPU_WORKER_ID", "3")  # as GKE does, in place of metadata
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b,c,d")
    assert devices.alone_on_slice(hw) == alone | {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}


def test_processes_of_the_eager_runtime_share_a_cpu(make_config):
    config = make_config("hw.runtime=eager", "hw.parallel=spawn", "hw.num_devices=4")
    alone = replace(CHIPS, nodes=(), num_pci_chips=0, probed=devices.Probed(1, "cpu", 2.0, 1.0))
    assert devices.judge_devices(alone, config).verdict == "ok"


@pytest.mark.parametrize(
    ("lock", "expected", "words"),
    [
        (chips.LockFile(False), "ok", "none"),
        (chips.LockFile(True, 0, True, 91), "failed", "process 91 holds"),
        (chips.LockFile(True, 4321, False), "failed", "belongs to user 4321"),
        (chips.LockFile(True, 0, True), "warning", "sudo rm -f /tmp/libtpu_lockfile"),
    ],
)
def test_lock_file(make_config, monkeypatch, lock, expected, words):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    verdict, said = verdict_of(devices.judge_lock_file(lock, make_config(*TPU)))
    assert verdict == expected
    assert words in said
    assert devices.judge_lock_file(lock, make_config()).verdict == "ok"  # a CPU has none


@pytest.mark.parametrize(
    ("memlock", "expected", "words"),
    [
        (devices.Memlock(None), "ok", "unlimited"),
        (devices.Memlock(64 * GIB), "ok", "69 GB may be locked"),
        (devices.Memlock(8 * 2**20), "failed", "8,192 KiB of memory may be locked (RLIMIT_MEMLOCK)"),
        (devices.Memlock(8 * 2**20), "failed", "| systemd: -p LimitMEMLOCK=infinity; docker: --ulimit memlock=-1; GKE"),
        (devices.Memlock(8 * 2**20, is_exempt=True), "ok", "this user's rights pass that limit"),
        (devices.Memlock(8 * 2**20, is_notebook=True), "warning", "nothing to be done on a notebook service"),
    ],
)
def test_locked_memory(make_config, memlock, expected, words):
    verdict, said = verdict_of(devices.judge_memlock(memlock, make_config(*TPU)))
    assert (verdict, words in said) == (expected, True)
    assert devices.judge_memlock(memlock, make_config()).verdict == "ok"  # a CPU locks none


@pytest.mark.parametrize(
    ("text", "expected", "words"),
    [
        ("[always] madvise never\n", "ok", "always"),
        ("always [madvise] never\n", "warning", "set to madvise, so the TPU starts and ends more slowly"),
        ("always madvise [never]\n", "warning", "'echo always >/sys/kernel/mm/transparent_hugepage/enabled'`"),
        (None, "not checked", "does not say"),
    ],
)
def test_transparent_hugepages(make_config, tmp_path, text, expected, words):
    if text is not None:
        (tmp_path / "enabled").write_text(text)
    chosen = devices.inspect_hugepages(tmp_path / "enabled")
    verdict, said = verdict_of(devices.judge_hugepages(chosen, make_config(*TPU)))
    assert (verdict, words in said) == (expected, True)
    assert devices.judge_hugepages(chosen, make_config()).verdict == "ok"


@pytest.mark.parametrize(
    ("storage", "expected", "words"),
    [
        (places.Storage("gs://bkt/runs", 0.08, 0.03, "overwrites"), "ok", "append overwrites, which no run does there"),
        (places.Storage("gs://bkt/runs", 3.0, 0.1, "overwrites"), "warning", "region of the TPU"),
        (places.Storage("/content/drive", 0.1, 0.1, "overwrites"), "failed", "give the bucket itself"),
        (places.Storage("/runs", 0.001, 0.001), "ok", "append adds"),
        (places.Storage("gs://b", complaint="gs://b; Forbidden: this account may not write there; give it a role."),
         "failed", "gs://b; Forbidden | this account may not write there; give it a role"),
    ],
)  # fmt: skip
def test_output_dir(make_config, storage, expected, words):
    verdict, said = verdict_of(places.judge_output_dir(storage, make_config()))
    assert verdict == expected
    assert words in said


@pytest.mark.parametrize(
    ("words", "bytes_of_a_parameter"),
    [
        (("optim=adamw",), 12.0),
        (("optim=adamw", "optim.ema=0.9"), 16.0),
        (("optim=adamw8bit",), 6.0),
        (("optim=adafactor",), 4.0),
        (("optim=schedule_free_adamw",), 12.0),
        (("optim=muon",), 8.0 + 4.0 * 136_134_656 / 494_032_768),  # AdamW for the embedding
    ],
)
def test_the_disk_is_asked_for_what_the_optimizer_stores(make_config, words, bytes_of_a_parameter):
    """Qwen 2.5 0.5B with all its weights, in two checkpoints and a third that is being written."""
    config = make_config("model=qwen05b", "lora=none", "checkpoint.keep_last=2", *words)
    found = places.checkpoint_bytes(config, sizes_of(config.model)) / 3 / 494_032_768
    assert found == pytest.approx(bytes_of_a_parameter, rel=0.01)


def test_disk_and_compile_cache(make_config):
    config = make_config()
    spaces = (places.Space("the run", "/a", 5 * 10**9, 10**9), places.Space("the download", "/b", 10**9, 14 * 10**9))
    verdict, said = verdict_of(places.judge_disk(spaces, config))
    assert (verdict, "the download: 1.0 GB free in /b, 14 GB needed" in said, "the run" in said) == (
        "failed",
        True,
        False,
    )
    assert places.judge_disk(spaces[:1], config).verdict == "ok"
    closed = replace(spaces[0], refusal="Read-only file system")
    verdict, said = verdict_of(places.judge_disk((closed,), config))
    assert (verdict, "the run: /a takes no file (Read-only file system) | name another" in said) == ("failed", True)
    assert places.judge_compile_cache(places.CacheFolder("/c", False), config).verdict == "failed"
    kept = places.CacheFolder("/c", True, 7)
    assert "7 programs" in places.judge_compile_cache(kept, config).seen
    assert places.judge_compile_cache(kept, config).verdict == "warning"
    assert places.judge_compile_cache(kept, make_config("hw.runtime=torchtpu")).verdict == "ok"
    assert places.judge_compile_cache(places.CacheFolder(None), config).verdict == "ok"


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (sources.HostMemory(64 * GIB, 60 * GIB, 20 * GIB), "ok"),
        (sources.HostMemory(64 * GIB, 10 * GIB, 20 * GIB), "warning"),
        (sources.HostMemory(16 * GIB, 15 * GIB, 20 * GIB), "failed"),
        (sources.HostMemory(16 * GIB, 15 * GIB, None), "not checked"),
    ],
)
def test_host_memory(make_config, memory, expected):
    assert verdict_of(sources.judge_host_memory(memory, make_config(*TPU)))[0] == expected


def test_the_memory_of_a_7b_model(make_config):
    once = sources.inspect_host_memory(make_config(*TPU)).needed
    assert once == pytest.approx(7_241_732_096 * 2 * 1.01 + sources.BASE_BYTES, rel=1e-6)
    spawned = make_config(*TPU, "hw.parallel=spawn", "sharding=replicated")
    assert sources.inspect_host_memory(spawned).needed == 8 * once


def test_chip_memory(make_config):
    config, known = make_config(*TPU), MemoryFinding("it takes 40 of 31.25 GiB", "known")
    assert sources.judge_chip_memory(None, config).verdict == "ok"
    assert verdict_of(sources.judge_chip_memory(known, config))[0] == "failed"
    assert verdict_of(sources.judge_chip_memory(replace(known, certainty="estimated"), config))[0] == "warning"
    assert sources.judge_chip_memory(None, make_config()).verdict == "not checked"
    assert sources.judge_chip_memory(None, make_config("hw=gpu")).verdict == "not checked"
    assert sources.judge_chip_memory(None, make_config("hw=h100")).verdict == "ok"


LACKING = ModelFiles("hub")


@pytest.mark.parametrize(
    ("model", "expected", "words"),
    [
        (sources.Model("x", ModelFiles("drawn", None, True)), "ok", "drawn"),
        (sources.Model("a/b", ModelFiles("hub", "/c", True)), "ok", "in the Hub's cache"),
        (
            sources.Model("a/b", ModelFiles("hub", "/c"), is_offline=True),
            "failed",
            "(begun), and HF_HUB_OFFLINE is set",
        ),
        (sources.Model("a/b", LACKING, "gives it", True), "ok", "the Hub gives it (a token)"),
        (sources.Model("a/b", LACKING, "gated"), "failed", "a/b is gated, no token | accept its terms"),
        (sources.Model("a/b", LACKING, "missing"), "failed", "mend model.path="),
        (sources.Model("a/b", LACKING, "no answer"), "failed", "does not answer"),
        (sources.Model("/m", ModelFiles("folder", "/m")), "failed", "lacks config.json or weights"),
        (sources.Model("./m", ModelFiles("missing")), "failed", "is no folder"),
    ],
)
def test_model(make_config, model, expected, words):
    verdict, said = verdict_of(sources.judge_model(model, make_config()))
    assert verdict == expected
    assert words in said


@pytest.mark.parametrize(
    ("rows", "expected", "words"),
    [
        (sources.Rows("/d/a.jsonl", "here"), "ok", "data.a.path=/d/a.jsonl"),
        (sources.Rows("gs://bkt/a.jsonl", "missing"), "failed", "is not there"),
        (sources.Rows("lab/rows", "hub", "gives it"), "ok", "lab/rows"),
        (sources.Rows("lab/rows", "hub", "missing"), "failed", "the Hub shows none of that name"),
        (sources.Rows("lab/rows", "hub", "gated"), "failed", "accept its terms"),
        (sources.Rows("lab/rows", "hub", "no answer"), "warning", "set data.a.path=FILE"),
    ],
)
def test_data(make_config, rows, expected, words):
    verdict, said = verdict_of(
        sources.judge_data({"a.path": rows, "b.path": sources.Rows("/d", "here")}, make_config())
    )
    assert verdict == expected
    assert words in said


def test_the_worst_verdict_counts():
    assert worst([ok("a"), not_checked("b"), warning("c", "d"), ok("e")]) == warning("c", "d")
    assert worst([failed("a", "x"), warning("c", "d"), failed("b", "x")]) == failed("a; b", "x")


def test_every_check_is_a_choice():
    assert tuple(check.name for check in examination.CHECKS) == NAMES


def test_the_report_and_the_exit_code(make_config, tmp_path, capsys, monkeypatch):
    file = tmp_path / "new" / "report.json"
    monkeypatch.setenv("PJRT_LOCAL_PROCESS_COUNT", "8")
    given = ("task=doctor", f"output_dir={tmp_path}", f"task.json={file}")
    with pytest.raises(SystemExit) as ended:
        doctor.run(make_config(*given, "task.checks=[variables,run,data]"))
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "variables        failed       PJRT_LOCAL_PROCESS_COUNT=8" in printed
    assert printed.rstrip().endswith("would not start on this machine: variables")
    stored = json.loads(file.read_text())
    assert stored["would_start"] is False
    assert {name: each["verdict"] for name, each in stored["checks"].items()} == {
        "variables": "failed", "run": "ok", "data": "ok",
    }  # fmt: skip
    doctor.run(make_config(*given, "task.checks=[run,data]"))
    assert (
        "nothing found that would keep name=tiny_sample_text_sample_chat_cpu from starting" in capsys.readouterr().out
    )


def test_a_check_that_breaks_or_hangs_leaves_the_others(make_config, monkeypatch):
    def broken(config, task):
        raise OSError("no such thing")

    from threading import Event

    never = Event()
    checks = (
        examination.Check("run", broken, places.judge_run),
        examination.Check(
            "output_dir", lambda config, task: never.wait(), places.judge_output_dir, if_timed_out="failed"
        ),
        examination.Check("settings", lambda config, task: (), places.judge_settings),
    )
    monkeypatch.setattr(examination, "CHECKS", checks)
    monkeypatch.setattr(examination, "SLACK_SECONDS", 0.0)
    results = examination.examine(make_config(), DoctorTaskConfig("doctor", timeout_seconds=0.2))
    never.set()
    assert [result.finding.verdict for result in results] == ["not checked", "failed", "ok"]
    assert "OSError: no such thing" in results[0].finding.seen
    assert not examination.would_start(results)
