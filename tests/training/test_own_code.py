"""Steps with code of a user's own, which may change from step to step: each trains what it says, or is refused."""

import random
from types import SimpleNamespace

import pytest
import torch

from tests.tiers import only
from tests.training.tiny import Run, random_batch
from tpu_experiments.objectives.next_token import next_token_loss
from tpu_experiments.runtime.base import UnexpectedProgram
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.runtime.xla.host_reads import HostRead

pytestmark = pytest.mark.xla
NUM_STEPS = 12


class Lab:
    """A loss of a user's own; `python` is what its Python code knows besides the batch."""

    def __init__(self, device: torch.device) -> None:
        self.step = 0
        self.draws = random.Random(3)
        self.mean = torch.zeros(4, device=device)
        self.table = torch.ones(4, device=device)

    def branch_every_10(self, module, parameters, rows):
        sums, weights = next_token_loss(module, parameters, rows)
        if (self.step + 1) % 10 == 0:
            sums = sums + 50.0 * weights
        return sums, weights

    def number_every_5(self, module, parameters, rows):
        sums, weights = next_token_loss(module, parameters, rows)
        return sums * (2.5 if self.step % 5 == 0 else 1.5), weights

    def number_every_7(self, module, parameters, rows):
        sums, weights = next_token_loss(module, parameters, rows)
        return sums * (2.5 if self.step % 7 == 0 else 1.5), weights

    def random_number(self, module, parameters, rows):
        sums, weights = next_token_loss(module, parameters, rows)
        return sums * (2.5 if self.draws.random() < 0.3 else 1.5), weights

    def branch_on_data(self, module, parameters, rows):
        sums, weights = next_token_loss(module, parameters, rows)
        if (rows["ids"] == 7).sum().item() > 0:
            sums = sums * 2.0
        return sums, weights

    def list_of_numbers(self, module, parameters, rows):
        sums, weights = next_token_loss(module, parameters, rows)
        return sums * torch.tensor([1.5 + self.step, 2.0, 2.5, 3.0]).to(sums.device), weights

    def from_step_7_on(self, module, parameters, rows):
        sums, weights = next_token_loss(module, parameters, rows)
        return sums * (2.5 if self.step >= 7 else 1.5), weights

    def buffer_written_by_the_loss(self, module, parameters, rows):
        sums, weights = next_token_loss(module, parameters, rows)
        with torch.no_grad():
            self.mean.copy_(self.mean * 0.5 + sums.detach())
        return sums + 0.1 * self.mean, weights

    def table_changed_between_steps(self, module, parameters, rows):
        sums, weights = next_token_loss(module, parameters, rows)
        return sums * self.table, weights


RIGHT = (
    "number_every_5",
    "number_every_7",
    "random_number",
    "list_of_numbers",
    "from_step_7_on",
    "buffer_written_by_the_loss",
    "table_changed_between_steps",
)
REFUSED = {
    "branch_every_10": (
        UnexpectedProgram,
        r"train was compiled again at its call 10 .*a value that Python computes",
        10,
    ),
    "branch_on_data": (HostRead, r"train reads a tensor on the host .*\(item at training/test_own_code.py:\d+\)", 0),
}


@pytest.fixture
def losses(make_config):
    """Losses of each step of a case, up to where it is refused, and what refused it."""

    def run_case(name: str, *overrides: str) -> SimpleNamespace:
        config = make_config(
            "model=qwen05b",
            "model.size=tiny",
            "model.dtype=float32",
            "lora=all_linear_r8",
            "plugins=[tests]",
            "model.stack=unrolled",  # in a loop over layers a loss may not write buffers
            *overrides,
        )
        runtime = make_runtime(config)
        lab = Lab(runtime.device)
        run = Run(config, runtime, row_loss=getattr(lab, name))
        found: list[float] = []
        try:
            for step in range(NUM_STEPS):
                lab.step = step
                lab.table = torch.full((4,), 1.0 + step % 3).to(runtime.device)
                found += run.losses([random_batch(step)])
        except UnexpectedProgram as error:
            return SimpleNamespace(losses=found, error=error)
        return SimpleNamespace(losses=found, error=None)

    return run_case


@pytest.mark.parametrize("name", only(["number_every_5", "buffer_written_by_the_loss"], RIGHT))
def test_it_trains_what_plain_torch_trains(losses, name):
    expected, ours = losses(name, "hw.runtime=eager"), losses(name)
    assert ours.error is None
    assert ours.losses == pytest.approx(expected.losses, rel=2e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name_before_a_wrong_step(losses, name):
    kind, sentence, num_right = REFUSED[name]
    expected, ours = losses(name, "hw.runtime=eager"), losses(name)
    assert type(ours.error) is kind
    with pytest.raises(kind, match=sentence):
        raise ours.error
    assert ours.losses == pytest.approx(expected.losses[:num_right], rel=2e-5)
