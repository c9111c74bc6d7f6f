"""Variables that a command sets before torch is imported."""

import os
import subprocess
import sys
from unittest import mock

from tests.config.composing import composed
from tpu_experiments.runtime.processes.env import prepare_environment, variables


def test_a_plan_by_torchtpu_keeps_torch_from_looking_for_chips() -> None:
    hw = composed("task=plan", "hw=v6e1", "hw.runtime=torchtpu").hw
    with mock.patch.dict(os.environ):
        os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
        prepare_environment(hw, is_planned=True)
        assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


def test_code_that_layers_share_is_in_a_tpu_s_program_once() -> None:
    """The flags of a config come later, and may turn that off."""
    always = "--xla_tpu_enable_deduplicated_calls"
    with mock.patch.dict(os.environ):
        os.environ.pop("LIBTPU_INIT_ARGS", None)
        assert "LIBTPU_INIT_ARGS" not in variables(composed().hw)
        assert variables(composed("hw=v5e1").hw)["LIBTPU_INIT_ARGS"] == f"{always}=true"
        own = variables(composed("hw=v5e1", f"hw.libtpu_flags=[{always}\\=false]").hw)
        assert own["LIBTPU_INIT_ARGS"].split() == [f"{always}=true", f"{always}=false"]


def test_vector_memory_of_an_operation_is_a_flag_in_kib() -> None:
    """A flag of the config comes later, and counts."""
    limit = "--xla_tpu_scoped_vmem_limit_kib"
    with mock.patch.dict(os.environ):
        os.environ.pop("LIBTPU_INIT_ARGS", None)
        found = variables(composed("hw=v6e8", "hw.fusion_memory_mib=48", f"hw.libtpu_flags=[{limit}\\=1024]").hw)
        assert found["LIBTPU_INIT_ARGS"].split()[1:] == [f"{limit}={48 * 1024}", f"{limit}=1024"]
        assert limit not in variables(composed("hw=v6e8", "hw.fusion_memory_mib=null").hw)["LIBTPU_INIT_ARGS"]


SETTLED = """
import os
os.environ["LIBTPU_INIT_ARGS"] = "--mine=1"
import torch_xla
from tests.config.composing import composed
from tpu_experiments.runtime.processes.env import change_flags, variables
before, after = composed("hw=v6e8").hw, composed("hw=v6e8", "hw.fusion_memory_mib=48").hw
os.environ["LIBTPU_INIT_ARGS"] = variables(before)["LIBTPU_INIT_ARGS"] + " --of_torch_xla=1"
change_flags(before, before)
print(os.environ["LIBTPU_INIT_ARGS"])
change_flags(before, after)
print(os.environ["LIBTPU_INIT_ARGS"])
torch_xla.device()
change_flags(before, after)  # as the second run of a pack does
change_flags(after, before)
"""
READ_LATE = """
import os
import torch_xla
os.environ["LIBTPU_INIT_ARGS"] = "--xla_tpu_nonsense=1"
torch_xla.device()
"""


def output_of(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "LIBTPU_INIT_ARGS"} | variables
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=240)


def test_settings_of_the_table_replace_flags_until_a_device_is_used() -> None:
    found = output_of(SETTLED, PJRT_DEVICE="CPU")
    before, after = (line.split() for line in found.stdout.splitlines())
    assert "--xla_tpu_scoped_vmem_limit_kib=98304" in before
    assert "--xla_tpu_scoped_vmem_limit_kib=98304" not in after
    assert {"--mine=1", "--of_torch_xla=1", "--xla_tpu_scoped_vmem_limit_kib=49152"} <= set(after)
    assert found.stderr.splitlines()[-1] == (
        "RuntimeError: a device was used before the flags of libtpu were known; use none earlier"
    )


def test_libtpu_reads_its_flags_when_the_first_device_is_used() -> None:
    """So those that are set after torch_xla was imported count. There is no TPU: libtpu reads them before it looks."""
    found = output_of(READ_LATE, PJRT_DEVICE="TPU", TPU_SKIP_MDS_QUERY="1")
    assert "Unknown command line flag 'xla_tpu_nonsense'" in found.stderr
