"""task=evaluate task.harness=[...] against lm-evaluation-harness's own `hf` backend, request by request."""

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.composing import composed
from tests.training.runs import finished, sized
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.tasks import evaluate
from tpu_experiments.tasks.evaluate import harness
from tpu_experiments.tasks.evaluate.looked_up import Answers
from tpu_experiments.tasks.report.runs import find_runs
from tpu_experiments.tasks.report.tables import results
from tpu_experiments.training.batches import load_run_tokenizer

pytestmark = [
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-evaluation-harness, the extra `harness`"),
    pytest.mark.xla,
    pytest.mark.usefixtures("root_logger", "plain_attention"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
EAGER = ("hw.runtime=eager", "hw.num_threads=1")
TRAINING = (*EAGER, "trainer.max_stage_steps=4", "sample.max_new_tokens=0")
TRAINING += ("optim.lr=0.02",)
NAME = "tiny_sample_text_sample_chat_cpu"
LIMIT = 96
COMMON = "dataset_path: json\ndataset_kwargs: {{data_files: {{test: {rows}}}}}\ntest_split: test\n"
TASKS = {
    "choice": 'output_type: multiple_choice\ndoc_to_text: "{{question}} "\ndoc_to_choice: "{{choices}}"\n'
    "doc_to_target: gold\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "text": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{question}} {{choices}}"\n'
    "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n",
    "short": 'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{choices[gold]}}"\n'
    'generation_kwargs: {until: ["."], max_gen_toks: 9}\nmetric_list: [{metric: exact_match}]\n',
    "drawn": 'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{choices[gold]}}"\n'
    "generation_kwargs: {do_sample: true, temperature: 1.0}\nmetric_list: [{metric: exact_match}]\n",
    "beams": 'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{choices[gold]}}"\n'
    "generation_kwargs: {num_beams: 4, max_gen_toks: 5}\nmetric_list: [{metric: exact_match}]\n",
}


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """Undo what lm_eval and its libraries set when they are imported, which other tests' processes would have."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of a run of four steps a stage."""
    folder = tmp_path_factory.mktemp("outputs")
    finished(*TRAINING, output_dir=folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks on real text, one of which lacks its rows."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = Path("tpu_experiments/samples/wiki_ro.jsonl").read_text(encoding="utf-8").splitlines()[:6]
    words = [json.loads(line)["text"].split() for line in lines]
    rows = [
        {"question": " ".join(own[: 8 + 5 * i]), "choices": [" ".join(own[k : k + 3]) for k in (40, 50, 60)], "gold": 0}
        for i, own in enumerate(words)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, text in TASKS.items():
        head = f"task: own_{name}\n{COMMON.format(rows=folder / 'rows.jsonl')}"
        (folder / f"{name}.yaml").write_text(head + text)
    lost = (folder / "choice.yaml").read_text().replace("own_choice", "own_lost").replace("rows.jsonl", "none.jsonl")
    (folder / "lost.yaml").write_text(lost)
    return folder


def evaluated(outputs: Path, tasks: Path, *names: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """The results of the tasks with these names."""
    words = [f"task.harness=[{','.join(f'own_{name}' for name in names)}]", f"task.harness_tasks={tasks}"]
    words += [f"task.seq_len={LIMIT}", f"output_dir={outputs}", *more]
    evaluate.run(composed("task=evaluate", *sized(TRAINING), *words))
    found: dict[str, Any] = json.loads((outputs / NAME / "harness_results.json").read_text())
    return found


def reference(outputs: Path, side: str) -> Any:
    """The harness's own backend over transformers and PEFT."""
    from lm_eval.models.huggingface import HFLM
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = outputs / NAME / "adapter"
    named = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = AutoModelForCausalLM.from_pretrained(named, dtype=torch.float32)
    if side == "trained":
        model = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    config = composed("task=evaluate", *sized(TRAINING), f"output_dir={outputs}")
    return HFLM(pretrained=model.eval(), tokenizer=load_run_tokenizer(config), max_length=LIMIT - 1, device="cpu")


@pytest.fixture(scope="module")
def answered(outputs: Path, tasks: Path) -> tuple[dict[str, Any], dict[str, Answers]]:
    """The results of three tasks, and what base and trained model answered to each request."""
    kept: list[Answers] = []
    whole = harness.figures_of

    def noted(task: Any, answers: Answers, **how: Any) -> dict[str, Any]:
        found = whole(task, answers, **how)
        kept.append(answers)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "figures_of", noted)
        results = evaluated(outputs, tasks, "choice", "text", "short")
    return results, dict(zip(("base", "trained"), kept[1:], strict=True))


@pytest.mark.parametrize("side", ["base", "trained"])
def test_every_request_has_the_answer_of_the_harness_own_backend(outputs, answered, side):
    from lm_eval.api.instance import Instance

    ours, theirs = answered[1][side], reference(outputs, side)
    requests = [(("", ""), list(context), list(behind)) for context, behind in ours.scores]
    assert len(requests) > 20
    found = theirs._loglikelihood_tokens(requests, disable_tqdm=True)
    for (nats, is_likeliest), (own, own_is) in zip(found, ours.scores.values(), strict=True):
        assert own == pytest.approx(nats, abs=2e-4)
        assert own_is == is_likeliest
    tokenizer = theirs.tokenizer
    for (prompt, num_new, until), text in ours.texts.items():
        how = {"until": list(until), "max_gen_toks": num_new, "do_sample": False}
        asked = Instance("generate_until", {}, (tokenizer.decode(list(prompt)), how), 0)
        assert theirs.generate_until([asked], disable_tqdm=True) == [text]


@pytest.mark.parametrize("side", ["base", "trained"])
def test_the_figures_are_those_of_the_harness_own_backend(outputs, tasks, answered, side):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    names = ["own_choice", "own_text", "own_short"]
    how = {"tasks": names, "task_manager": TaskManager(include_path=str(tasks)), "bootstrap_iters": 0}
    expected = simple_evaluate(model=reference(outputs, side), log_samples=False, **how)["results"]
    found = answered[0][side]["results"]
    for name in names:
        figures = {key: value for key, value in expected[name].items() if isinstance(value, float)}
        assert figures
        for key, value in figures.items():
            if "_stderr" not in key:
                assert found[name][key] == pytest.approx(value, rel=1e-4), (name, key)
    assert answered[0]["base"]["results"]["own_text"] != answered[0]["trained"]["results"]["own_text"]


def test_a_report_shows_the_figures_with_their_intervals(outputs, answered):
    (run,) = find_runs([str(outputs / NAME)])
    titles, (line,) = results([run], baseline=run)
    cell = line[titles.index("own_choice acc")]
    assert float(cell.text) == pytest.approx(answered[0]["trained"]["results"]["own_choice"]["acc,none"], abs=1e-4)
    low, high = map(float, cell.note.split(" to "))
    assert low < float(cell.text) < high


def test_a_run_of_preferences_scores_texts(outputs, tasks, tmp_path):
    """Its own objective sums pairs; the base of both is one."""
    names = f"task.harness=[own_choice] task.harness_tasks={tasks} task.seq_len={LIMIT} task.adapter=none"
    words = ("task=evaluate", *EAGER, *names.split(), f"output_dir={tmp_path}")
    found = []
    for own in ((), ("objective=dpo", "data=stories_pairs_ro")):
        evaluate.run(composed(*words, *own))
        (file,) = tmp_path.glob("evaluations/*/harness_results.json")
        found.append(json.loads(file.read_text())["base"])
        file.unlink()
    assert found[0] == found[1]


def test_contexts_that_lose_their_start_are_counted(outputs, tasks, caplog):
    evaluated(outputs, tasks, "choice", more=("task.seq_len=24",))
    (told,) = [record.message for record in caplog.records if "lose their start" in record.message]
    assert int(told.split()[1]) > 0


def test_a_request_that_was_not_made_before_has_no_answer():
    asked = Answers()
    assert asked.score(((1,), (2,))) == (0.0, False)
    whole = Answers(is_whole=True, scores=asked.scores)
    assert whole.score(((1,), (2,))) == (0.0, False)
    with pytest.raises(ConfigError, match="asks something else each time"):
        whole.score(((1,), (3,)))
    with pytest.raises(ConfigError, match="asks something else each time"):
        whole.text(((1,), 4, ()))


def test_settings_that_nothing_reads_are_refused():
    with pytest.raises(ConfigError, match=r"task\.generate=3 with task.harness="):
        composed("task=evaluate", "task.harness=[own_choice]", "task.generate=3")
    with pytest.raises(ConfigError, match=r"task\.harness_limit=3 without task.harness"):
        composed("task=evaluate", "task.harness_limit=3")


def test_what_cannot_be_asked_is_told(outputs, tasks):
    with pytest.raises(ConfigError, match="own_drawn draws its answers"):
        evaluated(outputs, tasks, "drawn")
    with pytest.raises(ConfigError, match="own_beams asks for num_beams in writing"):
        evaluated(outputs, tasks, "beams")
    with pytest.raises(ConfigError, match="harness_tasks=/none; there is no such folder"):
        evaluated(outputs, Path("/none"), "choice")
    with pytest.raises(ConfigError, match=r"'own_choice2', which is no task .* Near ones: own_choice, "):
        evaluated(outputs, tasks, "choice2")
    with pytest.raises(ConfigError, match=r"own_lost\]; lm-evaluation-harness stopped: FileNotFoundError"):
        evaluated(outputs, tasks, "lost")
