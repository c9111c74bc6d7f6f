"""Require of steps on torch_xla that they are one program, which reads nothing on the host."""

import math
from collections.abc import Sequence
from typing import Any

from tests.objectives.test_replaced_token import num_reads
from tpu_experiments.runtime.xla.replay import NUM_FIRST


def require_one_program(run: Any, runtime: Any, batches: Sequence[Any]) -> None:
    """Run steps on batches of one shape, of which more than `NUM_FIRST`, and require that nothing is compiled again."""
    import torch_xla.debug.metrics as met

    compiles = runtime.counters().num_compiles
    met.clear_counters()
    outputs = [run.program(batch) for batch in batches[:NUM_FIRST]]  # traced; the numbers that go into them are read
    runtime.wait()
    reads = num_reads(met)
    outputs += [run.program(batch) for batch in batches[NUM_FIRST:]]
    runtime.wait()
    assert [name for name in met.counter_names() if name.startswith("aten::")] == []
    assert num_reads(met) == reads
    assert runtime.counters().num_compiles == compiles + 1
    assert runtime.counters().compiles_after_warmup == 0
    assert all(math.isfinite(float(output.loss.cpu())) for output in outputs)
