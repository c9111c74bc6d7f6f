"""Formulas for the seconds of a step, held against the compiled steps of conf/tuned.yaml, and their constants fitted.

    python -m tests.benchmarks.roofline

Prints for every line how long the formulas say that a step takes, as a multiple of the compiled one, and the constants
that make the logarithms of these multiples smallest in the mean square. Mixtures of experts, of which there is one
line, are left out of the fit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple

import numpy as np
from scipy.optimize import least_squares

from tests.benchmarks.retune import words_of
from tests.config.composing import composed
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.schema import Config
from tpu_experiments.metrics.flops import read_decoder
from tpu_experiments.planning.analytic import flops_of, step_settings
from tpu_experiments.planning.roofline import FITTED, Constants, roofline_time
from tpu_experiments.planning.tuned import lines

Multiple = Callable[[Constants], float]


def multiple_of(config: Config, speed: float) -> Multiple:
    """Return how long formulas say that a step takes, as a multiple of the compiled one, by their constants.

    Args:
        speed: compiled tokens per second of a chip.
    """
    arch, geometry = config.model.arch, resolve_stages(config)[0].geometry
    flops, step = flops_of(config, arch, seq_len=geometry.seq_len), step_settings(config, geometry)
    tokens = geometry.global_rows * geometry.seq_len / config.hw.num_devices

    def multiple(constants: Constants) -> float:
        time = roofline_time(flops, arch, step=step, tokens=tokens, hw=config.hw, constants=constants)
        return speed / time.tokens_per_second_per_chip

    return multiple


def fitted(multiples: Sequence[Multiple]) -> tuple[Constants, float]:
    """Return the best constants, and the standard deviation of the logarithms of the multiples with them."""

    def errors(values: Sequence[float]) -> list[float]:
        return [math.log(multiple(Constants(*values))) for multiple in multiples]

    upper = [1.0] + [math.inf] * (len(astuple(FITTED)) - 1)
    found = least_squares(errors, astuple(FITTED), bounds=(0.1, upper))
    return Constants(*(round(float(value), 3) for value in found.x)), float(np.std(found.fun))


def main() -> None:
    """Print every line's multiple, and the constants."""
    used: dict[float, Multiple] = {}  # of lines with the same figure, as of Colab and v5e1, one
    shown: list[tuple[float, str]] = []
    for line in lines():
        config = composed(*words_of(line), "tuned=off", "task=plan")
        multiple = multiple_of(config, line.tokens_per_second)
        stack, remat = line.settings["model.stack"], line.settings["model.remat"]
        shown.append((multiple(FITTED), f"{line.model} {line.hw} {line.row_tokens} {stack} {remat}"))
        if not read_decoder(config.model.arch).stacked:
            used[line.tokens_per_second] = multiple
    for found, words in sorted(shown):
        print(f"{found:.2f} {words}")
    constants, deviation = fitted(list(used.values()))
    print(f"{len(used)} lines: {constants}, standard deviation {deviation:.3f}; in use {FITTED}")


if __name__ == "__main__":
    main()
