"""The closing lines of a run, from a result that is whole, has no finite loss, or was changed."""

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.runs import REPOSITORY, finished, run
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.loggers.closing_lines import summary
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.sweeping import leaderboard
from tpu_experiments.sweeping.leaderboard import Row

TOY = (
    *("model=tiny", "data=[sample_text,sample_chat]", "debug=smoke", "hw.runtime=eager", "trainer.max_stage_steps=1"),
    *("trainer.max_eval_rows=2", "trainer.global_batch_rows=2", "logger=jsonl", "name=toy"),
)
WRONG = ("\n", None, [], {}, [[1]], {"a": {"b": 1}}, -1e308, True)


LOADED = """
import runpy, sys
sys.argv = ["run.py", *sys.argv[1:]]
runpy.run_path("run.py", run_name="__main__")
print("loaded:", *[name for name in ("torch", "torch_xla", "transformers") if name in sys.modules])
"""


@pytest.fixture(scope="module")
def output_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def result(output_dir: Path) -> dict[str, Any]:
    """Of a run of two stages."""
    return finished(*TOY, output_dir=output_dir)


def test_a_finished_run_is_reported_without_torch(result: dict[str, Any], output_dir: Path) -> None:
    command = [sys.executable, "-c", LOADED, *TOY, f"output_dir={output_dir}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("finished toy")
    assert "name=toy was finished before; nothing was run." in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_a_run_says_every_finding_in_its_log_its_last_lines_and_its_result(
    result: dict[str, Any], output_dir: Path
) -> None:
    """Rows of 64 tokens cut most of the conversations; a run that goes on says so again."""
    (finding,) = result["findings"]
    assert finding["severity"] == "warning"
    assert finding["message"].startswith("data.sample_chat; 43.4 % of the supervised training tokens")
    log = output_dir / "toy" / "run.log"
    assert log.read_text().count(finding["message"]) == 1
    assert json.loads((output_dir / "toy" / "audit.json").read_text())["findings"] == result["findings"]
    again = run(*TOY, output_dir=output_dir)
    assert f"\n  warning         {finding['message']}\n" in again.stdout
    stored = output_dir / "toy" / "result.json"
    stored.unlink()
    resumed = run(*TOY, output_dir=output_dir)
    assert resumed.returncode == 0, resumed.stderr
    assert f"warning: {finding['message']}" in resumed.stderr
    assert f"\n  warning         {finding['message']}\n" in resumed.stdout
    assert log.read_text().count(finding["message"]) == 2
    assert json.loads(stored.read_text())["findings"] == result["findings"]


def test_the_runs_of_a_sweep_say_what_they_have_in_common_once() -> None:
    rows = [Row(f"lora.r={rank}", {}, status="finished", findings=["data.a; x; y."]) for rank in (4, 8)]
    assert leaderboard.findings([*rows, Row("running", {})]) == ["Finding: data.a; x; y."]
    rows[0].findings.append("data.b; x; y.")
    assert leaderboard.findings(rows) == ["Finding: data.a; x; y.", "Finding (1 of 2 points): data.b; x; y."]
    assert "\n\nFinding: data.a; x; y.\n\n" in leaderboard.markdown(rows, name="t", folder="/lab")


def places(value: Any, *keys: Any) -> Iterator[tuple[Any, ...]]:
    """Where each part of a JSON value is, the value itself left out."""
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*keys, key)
        yield from places(part, *keys, key)


def changed(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The result with one part of another kind, or without it."""
    for *parents, key in places(result):
        for wrong in (*WRONG, ...):
            other = copy.deepcopy(result)
            holder: Any = other
            for parent in parents:
                holder = holder[parent]
            if wrong is ...:
                del holder[key]
            else:
                holder[key] = wrong
            yield other


def test_a_result_of_another_kind_is_refused_or_left_out(result: dict[str, Any]) -> None:
    folder, refused = RunFolder("/lab", "toy"), 0
    for number, other in enumerate(changed(result)):
        try:
            with folder.reading_result():
                assert summary(other, folder=folder).startswith("finished ")
        except ConfigError:
            refused += 1
        row = Row(f"point {number}", {})
        row.fill_from_result(other)
        better = Row("other", {}, status="finished", eval_loss=1.0, tokens_per_second=2.0)
        assert leaderboard.markdown([row, better], name="t", folder="/lab")
    assert 100 < refused < number


def test_losses_that_are_not_finite_are_shown_as_a_dash(result: dict[str, Any]) -> None:
    """result.json has null where a loss was NaN or infinite (storage/strict_json.py)."""
    lost = {**result, "eval_loss": None, "perplexity": None, "eval_sources": dict.fromkeys(result["eval_sources"])}
    lines = summary(json.loads(json.dumps(lost)), folder=RunFolder(str(Path("/lab")), "toy"))
    assert f"  held-out loss   {result['eval_loss_before']:.4f} -> -  (perplexity -)" in lines.splitlines()


def test_what_comes_next_starts_from_this_run(result: dict[str, Any]) -> None:
    words = ["model=qwen05b", "data=uk_law", "hw=v5e8", "name=toy", "lora.r=4", "output_dir=gs://lab/runs"]
    on_tpu = summary({**result, "hw": "v5e8"}, folder=RunFolder("gs://lab/runs", "toy"), arguments=words)
    sweep = "model=qwen05b data=uk_law hw=v5e8 output_dir=gs://lab/runs name=toy_ranks lora.r=8,16,32"
    assert on_tpu.partition("next:\n")[2].splitlines() == [
        "  tensorboard --logdir_spec toy:gs://lab/runs/toy/tensorboard --load_fast=false",
        "  python run.py task=generate task.run=gs://lab/runs/toy hw=v5e1   # type prompts to it",
        "  python run.py task=evaluate task.run=gs://lab/runs/toy hw=v5e8   # on its test split, beside its base",
        "  python run.py task=export task.run=gs://lab/runs/toy   # merged, and proven; task.forms=[gguf] too",
        f"  python run.py -m {sweep}   # the same at other ranks",
    ]
    full = {**result, "adapter_path": "a b/toy/model"}
    here = summary(full, folder=RunFolder("a b", "toy"), arguments=["lora=none", "optim.lr=1e-3"])
    assert here.partition("next:\n")[2].splitlines() == [
        "  tensorboard --logdir_spec 'toy:a b/toy/tensorboard'",
        "  python run.py task=generate 'task.run=\"a b/toy\"'   # type prompts to it",
        "  python run.py task=evaluate 'task.run=\"a b/toy\"'   # on its test split, beside its base",
        "  python run.py task=export 'task.run=\"a b/toy\"'   # merged, and proven; task.forms=[gguf] too",
    ]


def test_code_and_folders_of_your_own_are_in_the_commands(result: dict[str, Any]) -> None:
    words = ["--config-dir", "/lab/conf", "plugins=[my_lab]", "objective=per_row", "-m", "name=toy"]
    lines = summary({**result, "is_evaluated": False}, folder=RunFolder("/a", "toy"), arguments=words)
    assert lines.partition("next:\n")[2].splitlines()[1:] == [
        "  python run.py task=generate task.run=/a/toy 'plugins=[my_lab]'   # type prompts to it",
        "  python run.py task=export task.run=/a/toy 'plugins=[my_lab]'   # merged, and proven; task.forms=[gguf] too",
        "  python run.py -m --config-dir /lab/conf 'plugins=[my_lab]' objective=per_row name=toy_ranks lora.r=8,16,32"
        "   # the same at other ranks",
    ]


def test_the_score_of_questions_comes_first(result: dict[str, Any], output_dir: Path) -> None:
    score = {"before": 0.05, "after": 56 / 60, "asked": 60, "whole_before": 0.0, "whole_after": 56 / 60}
    example = {
        "question": "Ce bea Ana?",
        "expected": "Ana bea ceai.",
        "before": "Ana bea.\n Ana",
        "after": "Ana bea apă.",
    }
    skill = {"before": 0.05, "after": 56 / 60, "asked": 60, "sets": {"one": score}, "examples": [example]}
    folder = RunFolder(str(output_dir), "toy")
    lines = summary(result | {"skill": skill}, folder=folder, arguments=()).splitlines()
    assert lines[1] == "  questions       one: 3 of 60 (5 %) -> 56 of 60 (93 %) right"
    assert lines[2:6] == [
        "    asked         Ce bea Ana?",
        "      before      Ana bea. Ana",
        "      after       Ana bea apă.",
        "      expected    Ana bea ceai.",
    ]
    assert "0 of 60 whole answers were right before" in lines[6]
    assert result["skill"] is None
