"""task=generate on a run's folder: what it writes is what PEFT and transformers write with that folder."""

import io
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from tests.training.runs import finished, run
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.export.full import write_model
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.storage import paths
from tpu_experiments.storage.run_folder import config_yaml
from tpu_experiments.tasks import generate

pytest_plugins = ("tests.gcs",)
pytestmark = [
    pytest.mark.xla,
    pytest.mark.usefixtures("root_logger"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft 0.21
]
BASE, TOKENIZER = "tpu_experiments/samples/tiny_base", "tpu_experiments/samples/tokenizer"
PROMPTS = ("Ce este Dunărea?", "Scrie o poveste scurtă despre un lup și o vulpe din pădure.")
NEW = 20
EAGER = ("hw.runtime=eager", "hw.num_threads=1")
SMALL = ("task=generate", f"task.max_new_tokens={NEW}", "task.buckets=[32,96]", *EAGER)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of two steps whose checkpoint is of a base that PiSSA reduced, and its adapter is not."""
    place = tmp_path_factory.mktemp("outputs")
    small = ("curriculum=single", "data=sample_chat", "trainer.max_stage_steps=2", "sample.max_new_tokens=0")
    finished(*small, "lora.init=pissa", "model.lr=0.05", *EAGER, "seed=7", output_dir=place)
    (folder,) = (path.parent for path in place.glob("*/result.json"))
    return folder


@pytest.fixture
def prompts_file(tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n\n")
    return tmp_path / "prompts.txt"


@pytest.fixture
def answers(make_config, prompts_file, tmp_path):
    """Lines of task.output for the two prompts."""

    def write(*overrides):
        output = tmp_path / "new" / "answers.jsonl"
        generate.run(make_config(*SMALL, f"task.prompts_file={prompts_file}", f"task.output={output}", *overrides))
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        output.unlink()
        return lines

    return write


def of_transformers(adapter=None, *, base=BASE, prompts=PROMPTS, is_chat=True):
    """Text by transformers' generate, each prompt for itself."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(TOKENIZER, revision=None, chat_template_path=None)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = model if adapter is None else PeftModel.from_pretrained(model, str(adapter))
    texts = []
    for prompt in prompts:
        text = tokenizer.bos_token + prompt
        if is_chat:
            turn = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        out = model.eval().generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
        texts.append(tokenizer.decode(out, skip_special_tokens=True))
    return [text.strip() for text in texts] if is_chat else texts


def texts(lines):
    return [line["text"] for line in lines]


def test_a_run_writes_what_peft_writes_with_its_adapter(trained, answers):
    expected = of_transformers(trained / "adapter")
    lines = answers(f"task.run={trained}")
    assert texts(lines) == expected
    assert [line["prompt"] for line in lines] == list(PROMPTS)
    assert all(0 < line["num_tokens"] <= NEW for line in lines)
    assert all(line["finished"] == (line["num_tokens"] < NEW) for line in lines)
    assert texts(answers(f"task.adapter={trained / 'adapter'}")) == expected  # model=tiny is the default
    assert texts(answers(f"task.run={trained}", "task.weights=checkpoint")) == expected


def test_an_adapter_of_another_base_is_named(trained, answers, tmp_path, caplog):
    shutil.copytree(trained / "adapter", tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    other = settings | {"base_model_name_or_path": "lab/other-base"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(other))
    with caplog.at_level("WARNING"):
        answers(f"task.adapter={tmp_path / 'adapter'}")
    assert "names lab/other-base as its base, and the model is tpu_experiments/samples/tiny_base" in caplog.text


def test_a_base_that_a_run_drew_at_random_is_its_own(answers, tmp_path, caplog):
    small = ("model=mistral7b", "model.size=tiny", "model.dtype=float32", "curriculum=single", "data=sample_chat")
    run = finished(*small, "trainer.max_stage_steps=1", "sample.max_new_tokens=0", *EAGER, output_dir=tmp_path / "out")
    with caplog.at_level("WARNING"):
        assert len(answers(f"task.run={tmp_path / 'out' / run['name']}")) == len(PROMPTS)
    assert "as its base" not in caplog.text


def test_answers_before_an_interruption_are_kept(make_config, prompts_file, tmp_path, monkeypatch, capsys):
    output = tmp_path / "answers.jsonl"
    batch = generate.Answers._batch

    def once(self, rows, **given):
        if self.num_answers:
            raise KeyboardInterrupt
        return batch(self, rows, **given)

    monkeypatch.setattr(generate.Answers, "_batch", once)
    given = (f"task.prompts_file={prompts_file}", f"task.output={output}", "task.batch_rows=1")
    with pytest.raises(SystemExit) as ended:
        generate.run(make_config(*SMALL, *given))
    assert ended.value.code == 1
    assert "stopped by Ctrl-C" in capsys.readouterr().err
    assert [json.loads(line)["prompt"] for line in output.read_text().splitlines()] == [PROMPTS[0]]


def test_the_base_of_a_run(trained, answers):
    expected = of_transformers()
    assert expected != of_transformers(trained / "adapter")
    assert texts(answers(f"task.run={trained}", "task.weights=base")) == expected
    assert texts(answers()) == expected


def test_plain_text_is_continued(trained, answers):
    assert texts(answers("task.format=text")) == of_transformers(is_chat=False)


def test_a_run_without_an_export_takes_its_checkpoint(trained, answers, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "adapter")
    assert texts(answers(f"task.run={tmp_path / 'run'}")) == of_transformers(trained / "adapter")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(ConfigError, match=r"no adapter/, no model/ and no complete checkpoint; .*task.weights=base"):
        answers(f"task.run={tmp_path / 'run'}")


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # gcsfs hands aiohttp files of 1 MiB so
def test_a_run_in_a_bucket(trained, answers, gcs_bucket):
    for file in (path for path in trained.rglob("*") if path.is_file()):
        paths.copy_file(str(file), f"{gcs_bucket}/run/{file.relative_to(trained).as_posix()}")
    expected = of_transformers(trained / "adapter")
    assert texts(answers(f"task.run={gcs_bucket}/run")) == expected
    assert texts(answers(f"task.run={gcs_bucket}/run", "task.weights=checkpoint")) == expected


def test_a_run_that_trained_every_weight(make_config, answers, tmp_path):
    config = make_config("lora=none")
    source = HuggingFaceModel(config.model, seed=0)
    names = list(dict(source.empty().named_parameters()))
    changed = {w.name: w.tensor * (1.2 if "mlp" in w.name else 1) for w in source.weights(names)}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(config_yaml(config))
    writing = {"config": source.config, "architecture": "MistralForCausalLM", "dtype": torch.float32}
    tokenizer = load_tokenizer(TOKENIZER, revision=None, chat_template_path=None)
    write_model(str(tmp_path / "run" / "model"), tensors=changed, tokenizer=tokenizer, **writing)
    expected = of_transformers(base=tmp_path / "run" / "model", is_chat=False)
    assert expected != of_transformers(is_chat=False)
    assert texts(answers(f"task.run={tmp_path / 'run'}", "task.format=text")) == expected
    assert texts(answers(f"task.base={tmp_path / 'run' / 'model'}", "task.format=text")) == expected


NORM = "model.norm.weight"
SPOILT = {
    "nothing": (lambda tensors: {}, r"/model; it holds no tensors of a model; .*\.$"),
    "some": (
        lambda tensors: {name: t for name, t in tensors.items() if name != NORM},
        rf"/model; it lacks 1 of the \d+ tensors of a whole model, first {NORM}; .*\.$",
    ),
    "no numbers": (
        lambda tensors: tensors | {NORM: torch.full_like(tensors[NORM], torch.nan)},
        rf"/model; it has (\d+) of \1 values of {NORM} that are NaN or infinite; .*\.$",
    ),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_model_that_is_not_whole_is_not_filled_up_from_the_base(make_config, tmp_path, kind):
    config = make_config("lora=none")
    source = HuggingFaceModel(config.model, seed=0)
    spoilt, told = SPOILT[kind]
    tensors = {w.name: w.tensor for w in source.weights(list(dict(source.empty().named_parameters())))}
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    (folder / "config.yaml").write_text(config_yaml(config))
    shutil.copy(f"{BASE}/config.json", folder / "model")
    save_file(spoilt(tensors), folder / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match=told):
        generate.run(make_config(*SMALL, f"task.run={folder}", "task.prompt=a", "task.format=text"))


def test_the_command_on_xla(trained, tmp_path):
    """Two programs, counted; the answer and nothing else on standard output."""
    more = (f"task.run={trained}", f"task.prompt='{PROMPTS[0]}'", *SMALL[:3])
    done = run(*more, output_dir=tmp_path / "none")
    assert done.returncode == 0, done.stderr
    assert done.stdout == of_transformers(trained / "adapter")[0] + "\n"
    assert "2 programs compiled, 2 needed (buckets 32)" in done.stderr
    assert not (tmp_path / "none").exists()


def test_prompts_at_the_terminal(trained, make_config, monkeypatch, capsys):
    long = "Dunărea " * 100
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPTS[0]}\n\n{long}\n{PROMPTS[1]}\n quit \nnever read\n"))
    generate.run(make_config(*SMALL, f"task.run={trained}", "task.keep_turns=false"))
    printed = capsys.readouterr()
    assert printed.out.splitlines() == "\n".join(of_transformers(trained / "adapter")).splitlines()
    assert "error: this prompt; it has" in printed.err
    assert "2 answers" in printed.err


def test_answers_drawn_for_a_prompt(answers):
    drawn = ("task.do_sample=true", "task.num_return_sequences=3", "task.batch_rows=4")
    lines = answers(*drawn)
    assert [line["prompt"] for line in lines] == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
    assert len(set(texts(lines))) == 6
    assert texts(answers(*drawn)) == texts(lines)
    assert texts(answers(*drawn, "task.batch_rows=1")) == texts(lines)
    assert not set(texts(answers(*drawn, "seed=1"))) & set(texts(lines))


REFUSED = {
    "no run": (["task.run={tmp}/nowhere"], "there is no config.yaml there"),
    "no config of a run": (["task.run={tmp}/odd"], "config.yaml; it is not what this program writes"),
    "no adapter": (["task.adapter={tmp}"], "no adapter_config.json or no adapter_model.safetensors there"),
    "another model": (["task.run={run}", "task.base={tmp}/small"], "it was trained on another model"),
    "no prompts": (["task.prompts_file={tmp}/none.txt"], r"it cannot be read \(FileNotFoundError\)"),
    "only blanks": (["task.prompts_file={tmp}/blank.txt"], "it holds no prompt"),
    "no JSON": (["task.prompts_file={tmp}/bad.jsonl"], r"line 2 of .*bad.jsonl; it is not JSON"),
    "no turn": (["task.prompts_file={tmp}/turns.jsonl"], "line 1 of .*; it needs `prompt`"),
    "too long": (["task.prompts_file={tmp}/long.txt"], r"it has \d+ tokens and the longest of task.buckets .* has 96"),
    "no room": (["task.prompt=a", "task.max_new_tokens=1000"], r"longer than the model allows \(max_position_emb"),
    "a system text": (["task.prompt=a", "task.format=text", "task.system=b"], "only a conversation has a system"),
    "there already": (["task.prompt=a", "task.output={tmp}/blank.txt"], "it exists; name another file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(trained, make_config, tmp_path, case):
    """One sentence, before any weight is on the device."""
    inputs = {"blank.txt": "\n \n", "bad.jsonl": '{"prompt": "a"}\n{', "long.txt": "Dunărea " * 200}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    inputs |= {"turns.jsonl": json.dumps({"messages": turns}), "odd/config.yaml": "model: {name: tiny, colour: red}\n"}
    for name, text in inputs.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copytree(BASE, tmp_path / "small")
    values = json.loads((tmp_path / "small" / "config.json").read_text())
    (tmp_path / "small" / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 2}))
    overrides, message = REFUSED[case]
    given = [each.format(tmp=tmp_path, run=trained) for each in overrides]
    prompt = [] if any("prompt" in each for each in given) else ["task.prompt=a"]
    with pytest.raises(ConfigError, match=message) as caught:
        generate.run(make_config(*SMALL, *given, *prompt))
    assert str(caught.value).endswith(".")
