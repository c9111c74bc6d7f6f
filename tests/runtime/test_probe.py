"""runtime/processes/probe.py in this process; tests/tasks/test_doctor_looks.py runs it as a child."""

import json

import pytest

from tpu_experiments.runtime.processes import probe


@pytest.mark.xla
@pytest.mark.parametrize(("runtime", "kind"), [("xla", "CPU"), ("eager", "cpu")])
def test_one_line_says_what_there_is(runtime: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    probe.main(runtime, "cpu")
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["sum"]) == (kind, 2.0)
    assert found["num_devices"] >= 1
    assert found["seconds"] >= 0
