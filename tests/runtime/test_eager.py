"""Threads of the eager runtime: the config's number, OMP_NUM_THREADS, or a part of the usable cores."""

import os

import pytest
import torch

from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.runtime.eager import EagerRuntime, threads_of


@pytest.mark.parametrize(("given", "expected"), [("3", 3), ("0", None), ("", None), ("4,2", None)])
def test_the_environment_counts_where_it_is_a_number(given, expected, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert threads_of(1) == (expected or len(os.sched_getaffinity(0)))
    assert threads_of(10_000) == (expected or 1)


def test_the_config_s_number_is_first(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = torch.get_num_threads()
    try:
        hw = {"name": "cpu", "device": "cpu", "runtime": "eager", "parallel": "inline", "num_devices": 1}
        EagerRuntime(HwConfig(**hw, num_threads=2))
        assert torch.get_num_threads() == 2
        EagerRuntime(HwConfig(**hw))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
