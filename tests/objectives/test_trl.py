"""Losses and gradients of preferences against TRL's own trainers, 20 steps side by side in float32."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.training.runs import REPOSITORY

MODELS = ("mistral", "qwen2", "gemma2")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradients_are_those_of_trl(model):
    """In a process of its own: TRL beside torch_xla takes its device."""
    words = [sys.executable, "-m", "tests.objectives.trl_losses", model]
    env = os.environ | {"USE_TORCH_XLA": "0", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, env=env, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 10
    for name, own in found.items():
        assert own["loss"] < 1e-5, (name, own)
        assert own["gradient"] < 1e-5 * max(1.0, own["largest_gradient"]), (name, own)
        assert own["first"] != own["last"], name
