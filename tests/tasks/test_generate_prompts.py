"""Prompts of every form, where an answer to them ends, and settings of task=generate that do not go together."""

import json
from types import SimpleNamespace

import pytest

from tests import forks
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.export.generation import ends_of
from tpu_experiments.tasks.generate import prompts
from tpu_experiments.tasks.generate.answers import Reader

pytestmark = pytest.mark.xla  # importing the task imports torch_xla
TOKENIZER = "tpu_experiments/samples/tokenizer"


def test_prompts_of_every_form(make_config, tmp_path):
    """An instruction and its input are joined as in training; a system text goes where the template has it."""
    task = make_config("task=generate", "task.system=Scurt.", f"task.prompts_file={tmp_path}/p.jsonl").task
    turns = [("user", "d"), ("assistant", "e"), ("user", "f")]
    lines = [
        {"prompt": "a"},
        {"instruction": "b", "input": "c"},
        {"messages": [{"role": role, "content": text} for role, text in turns]},
        {"messages": [{"role": "system", "content": "own"}, {"role": "human", "content": "g"}]},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    system = ("system", "Scurt.")
    assert [prompt.messages for prompt in prompts.given_prompts(task)] == [
        (system, ("user", "a")),
        (system, ("user", "b\n\nc")),
        (system, *turns),
        (("system", "own"), ("user", "g")),
    ]


def test_an_instruction_in_the_format_of_the_run():
    tokenizer = load_tokenizer(TOKENIZER, revision=None, chat_template_path=None, chat_format="instruction_response")
    task = SimpleNamespace(input="un text", system=None)
    prompt = prompts.user_turn("Rezumă.", task, place="task.prompt")
    ids = prompts.ids_of(prompt, kind="chat", tokenizer=tokenizer, vocab_size=4096)
    assert tokenizer.decode(ids) == "<s>### Instruction:\nRezumă.\n\nun text\n\n### Response:\n"


TEXT_ENDS = "{% for m in messages %}{{ m.content }} [END]\n{% endfor %}"


@pytest.mark.parametrize(
    ("chat_format", "end", "ids"),
    [
        ("chatml", "<|im_end|>", {2, 4, 5}),
        ("instruction_response", "</s>", {2, 5}),
        ("plain", "</s>", {2, 5}),
        ("llama2", "</s>", {2, 5}),
        (TEXT_ENDS, " [END]", {2, 5}),
    ],
)
def test_an_answer_ends_where_its_turn_does(chat_format, end, ids, tmp_path):
    """At a token of the chat format where it has one, at its text where it has none, and at the end of sequence."""
    own = "tokenizer" if chat_format == TEXT_ENDS else chat_format
    tokenizer = load_tokenizer(TOKENIZER, revision=None, chat_template_path=None, chat_format=own)
    if chat_format == TEXT_ENDS:
        tokenizer.chat_template = TEXT_ENDS
    ends = ends_of(tokenizer, kind="chat", config=SimpleNamespace(eos_token_id=[2, 5]), folder=tmp_path)
    assert ends.ids == ids
    reader = Reader(lambda prompt: [], tokenizer, ends, "chat", [8])
    for written, is_finished in ((f"Da.{end} mai", True), ("Da.", False)):
        answer = reader.answer(None, tokenizer(written, add_special_tokens=False)["input_ids"])
        assert (answer.text, answer.finished) == ("Da.", is_finished)


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_half_of_a_surrogate_pair_is_refused_by_line(make_config, tmp_path, kind):
    task = make_config("task=generate", f"task.prompts_file={tmp_path}/p.jsonl").task
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "a\\ud800"}\n')
    tokenizer = load_tokenizer(TOKENIZER, revision=None, chat_template_path=None)
    fine, half = prompts.given_prompts(task)
    assert prompts.ids_of(fine, kind=kind, tokenizer=tokenizer, vocab_size=4096)
    with pytest.raises(ConfigError, match=r"line 2 of .*p\.jsonl; it has half of a surrogate pair \('\\ud800'\)"):
        prompts.ids_of(half, kind=kind, tokenizer=tokenizer, vocab_size=4096)


def test_a_line_that_is_nested_too_deeply_is_refused(make_config, tmp_path):
    task = make_config("task=generate", f"task.prompts_file={tmp_path}/p.jsonl").task
    (tmp_path / "p.jsonl").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"line 1 of .*; it is not JSON \(maximum recursion depth"):
        prompts.given_prompts(task)


@pytest.mark.parametrize("content", ["", "[1]", "{", '"x"', "[" * 100_000, "7"])
def test_a_generation_config_that_is_no_object_is_refused(content, tmp_path):
    (tmp_path / "generation_config.json").write_text(content)
    tokenizer = load_tokenizer(TOKENIZER, revision=None, chat_template_path=None)
    config = SimpleNamespace(eos_token_id=2)
    with pytest.raises(ConfigError, match=r"generation_config.json; it is no JSON object"):
        ends_of(tokenizer, kind="text", config=config, folder=tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.prompt=a", "task.prompts_file=b.txt"], "one of them is answered"),
        (["task.prompt=' '"], "task.prompt=; it is empty"),
        (["task.prompts_file=b.csv"], "neither .txt nor .jsonl"),
        (["task.output=a.jsonl"], "task.output=a.jsonl without task.prompt="),
        (["task.weights=base"], "task.weights=base without task.run="),
        (["task.run=a", "task.weights=base", "task.adapter=b"], "leave one out"),
        (["task.num_return_sequences=2"], "set task.do_sample=true"),
        (["task.buckets=[]"], "task.buckets=\\[\\]; prompts are padded"),
        (["task.top_p=0"], "task.top_p=0.0; it must be above 0"),
        (["task.dtype=float64"], "task.dtype=float64; it is not a choice"),
        (["hw.runtime=eager", "hw.parallel=spawn", "hw.num_devices=2"], "hw.parallel=spawn with task=generate; one"),
        (["task=serve", "hw=v6e8"], "hw.parallel=spmd with task=serve; one process and, but for task=generate, one d"),
    ],
)
def test_settings_that_do_not_go_together(make_config, overrides, message):
    with pytest.raises(ConfigError, match=message):
        make_config("task=generate", *overrides)


@pytest.mark.slow
def test_rows_over_four_devices_are_answered_as_by_one(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"Ce este numărul {number}?\n" for number in range(6)))
    found = {}
    for devices in (1, 4):
        output = tmp_path / f"{devices}.jsonl"
        spread = ["hw.parallel=spmd", "hw.num_devices=4"] if devices > 1 else []
        words = ["task=generate", "model=tiny", "task.format=text", "task.do_sample=true", "task.top_k=0", *spread]
        words += ["task.max_new_tokens=12", "task.buckets=[32]", "task.batch_rows=6", f"task.prompts_file={prompts}"]
        done = forks.run(["run.py", "~local", *words, f"task.output={output}", f"output_dir={tmp_path}"])
        assert done.returncode == 0, done.stderr[-3000:]
        assert "2 programs compiled, 2 needed" in done.stderr
        found[devices] = output.read_text()
    assert len(found[1].splitlines()) == 6
    assert found[1] == found[4]
