"""Variables that a command sets before torch is imported."""

import os
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
