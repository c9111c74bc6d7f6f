"""Variables that a command sets before torch is imported."""

import os
from unittest import mock

from tests.config.composing import composed
from tpu_experiments.runtime.processes.env import prepare_environment


def test_a_plan_by_torchtpu_keeps_torch_from_looking_for_chips() -> None:
    hw = composed("task=plan", "hw=v6e1", "hw.runtime=torchtpu").hw
    with mock.patch.dict(os.environ):
        os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
        prepare_environment(hw, is_planned=True)
        assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
