"""Run folders, overlays and reports that somebody sent, made to do harm: each attack ends in a sentence, exit code 2.

The payload of an attack leaves a mark when Python as much as imports it. Further attacks stand with what they are on:
chat templates in data/tokens/test_sandbox.py, code of a checkpoint in models/test_remote_code.py, links in
io/test_links.py, secrets in config/test_redaction.py.
"""

import copy
import functools
import http.server
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.config.composing import composed
from tests.training.runs import run as run_process
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import config_of_run, identity
from tpu_experiments.config.schema import Config
from tpu_experiments.config.trust import OWN_TARGETS, pack_problem
from tpu_experiments.runtime.processes.env import compile_cache_folder
from tpu_experiments.storage import paths
from tpu_experiments.storage.run_folder import RunFolder, config_yaml, with_settings_of_run
from tpu_experiments.tasks import evaluate, generate, report
from tpu_experiments.tasks.evaluate.subject import subject_of

pytestmark = pytest.mark.usefixtures("root_logger")
EAGER = ("hw.runtime=eager", "hw.num_threads=1")
MODEL = "_target_: tpu_experiments.models.huggingface.HuggingFaceModel"
READER = "_target_: tpu_experiments.data.reading.sources.read_documents"
TRAINER = "_target_: tpu_experiments.training.trainer.Trainer"
OPTIMIZER = "_target_: tpu_experiments.optim.adamw.AdamW"
LOGGER = "_target_: tpu_experiments.loggers.jsonl.JsonlLogger"
SECRET = "hf_FAKEsecretFAKEsecret"
LAUGHS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10) if i else 'ha, ha'}]\n" for i in range(10))

Change = tuple[str, str]
"""A piece of config.yaml and what the attacker writes in its place."""
CODE: dict[str, tuple[Change, ...]] = {
    "a module of its own": (("plugins: []", "plugins: [payload]"), (MODEL, "_target_: payload.Model")),
    "the standard library": (("plugins: []", "plugins: [subprocess]"), (MODEL, "_target_: subprocess.Popen")),
    "a plugin alone": (("plugins: []", "plugins: [payload]"),),
    "a plugin that is text": (("plugins: []", "plugins: payload"),),
    "a class without a plugin": ((MODEL, "_target_: payload.Model"),),
    "a function of this project": ((MODEL, "_target_: tpu_experiments.storage.paths.remove_tree"),),
    "a module behind this project's": ((MODEL, "_target_: tpu_experiments.planning.compiler.subprocess.run"),),
    "a class of another place": ((MODEL, "_target_: tpu_experiments.training.trainer.Trainer"),),
    "a name like this project's": ((MODEL, "_target_: tpu_experiments_payload.Model"),),
    "a reader": ((READER, "_target_: payload.read"),),
    "a trainer": ((TRAINER, "_target_: payload.Trainer"),),
    "an optimizer": ((OPTIMIZER, "_target_: payload.Optimizer"),),
    "a logger": ((LOGGER, "_target_: payload.Logger"),),
    "below options": (("options: {}", "options: {inner: [{_target_: os.system}]}"),),
    "at a place of its own": (("seed: 0", "seed: 0\nhooks: {start: {_target_: payload.Model}}"),),
    "code of a checkpoint": (("remote_code: refuse", "remote_code: run"),),
    "a YAML tag": (("seed: 0", "seed: !!python/object/apply:os.system ['touch <mark>']"),),
}
LEAKS: dict[str, tuple[Change, ...]] = {
    "the environment in a path": (("path: tpu", "path: http://127.0.0.1:<port>/${oc.env:HF_TOKEN}/x.jsonl #"),),
    "as a whole group": (("model:\n", "model: ${oc.env:HF_TOKEN}\nother:\n"),),
    "as a whole source": (("data:\n", "data: ${oc.decode:'{}'}\nother:\n"),),
    "in a number": (("seed: 0", "seed: ${oc.env:SEED}"),),
    "in a key": (("seed: 0", "seed: 0\n${oc.env:HF_TOKEN}: 1"),),
    "inside another": (("seed: 0", "seed: 0\nnote: ${oc.env:${oc.env:NAME}}"),),
    "behind an escaped backslash": (("seed: 0", "seed: 0\nnote: \\\\${oc.env:HF_TOKEN}"),),
    "of another value": (("seed: 0", "seed: ${trainer.seq_len}"),),
    "in a list": (("targets:\n", "targets:\n  - ${oc.env:HF_TOKEN}\n"),),
}
HEAVY: dict[str, tuple[Change, ...]] = {
    "a thousand million laughs": (("seed: 0", "seed: 0\n" + LAUGHS),),
    "ten thousand levels": (("seed: 0", "seed: 0\nnote: " + "[" * 10_000),),
    "an alias inside itself": (("seed: 0", "seed: 0\nnote: &n [*n]"),),
    "a million values": (("seed: 0", "seed: 0\nnote: [" + "1," * 1_000_000 + "1]"),),
    "a long number to base 60": (("seed: 0", "seed: 0\nnote: 1" + ":00" * 100_000),),
}
PLACES: dict[str, tuple[Change, ...]] = {
    "a source above its folder": (("sample_text:", "../../../stolen:"),),
    "a stage above its folder": (("  stages:\n    text:", "  stages:\n    x/../../../stolen:"),),
}
ALL = {
    f"{kind}: {name}": changes
    for kind, table in (("code", CODE), ("leak", LEAKS), ("heavy", HEAVY), ("place", PLACES))
    for name, changes in table.items()
}


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the payload leaves its mark; it can be imported, as what lies in the working folder can."""
    mark = tmp_path / "mark"
    text = f"open({str(mark)!r}, 'w').close()\n"
    text += "class Model:\n    def __init__(self, *a, **k): pass\nread = Trainer = Optimizer = Logger = Model\n"
    (tmp_path / "path").mkdir()
    for name in ("payload", "tpu_experiments_payload"):
        (tmp_path / "path" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "path")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("SEED", "3")
    return mark


@pytest.fixture
def server() -> Iterator[tuple[int, list[str]]]:
    """A port and what is asked for there."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=lambda: served.serve_forever(poll_interval=0.01))
        thread.start()
        yield served.server_address[1], asked
        served.shutdown()
        thread.join()


@functools.cache
def written() -> tuple[str, str]:
    """config.yaml and identity.json of a run of this project."""
    config = composed(*EAGER)
    return config_yaml(config), json.dumps(identity(config))


@functools.cache
def command_of(task: str) -> Config:
    """The config of a command; composing one takes a second."""
    return composed(f"task={task}", *EAGER)


def of_command(task: str, **settings: object) -> Config:
    """A command with settings of its task."""
    command = copy.deepcopy(command_of(task))
    for name, value in settings.items():
        setattr(command.task, name, value)
    return command


def sent(folder: Path, *changes: Change, **names: object) -> Path:
    """A run folder as this project writes it, with the attacker's changes."""
    text, made = written()
    for old, new in changes:
        assert old in text, old
        for name, value in names.items():
            new = new.replace(f"<{name}>", str(value))
        text = text.replace(old, new, 1)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(text)
    (folder / "identity.json").write_text(made)
    return folder


def evaluated(folder: Path) -> None:
    evaluate.run(of_command("evaluate", run=str(folder), adapter="none"))


def generated(folder: Path) -> None:
    generate.run(of_command("generate", run=str(folder), prompt="x", weights="base"))


@pytest.mark.parametrize("task", [evaluated, generated])
@pytest.mark.parametrize("attack", ALL)
def test_a_run_folder_is_refused(
    attack: str, task: Callable[[Path], None], tmp_path: Path, mark: Path, server: tuple[int, list[str]]
) -> None:
    if (attack, task) == ("place: a stage above its folder", generated):
        pytest.skip("task=generate takes no stages")
    port, asked = server
    folder = sent(tmp_path / "outputs" / "evil", *ALL[attack], mark=mark, port=port)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        task(folder)
    assert re.match(rf"{folder}/config\.yaml; |.*its name is part of a folder's name", str(caught.value))
    assert SECRET not in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3
    assert not asked
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != "__pycache__"] == before


def test_a_run_folder_as_it_is_written_is_taken(tmp_path: Path) -> None:
    folder = sent(tmp_path / "run")
    text = (folder / "config.yaml").read_text()
    config_of_run(of_command("evaluate"), text=text, place="config.yaml")
    with pytest.raises(ConfigError, match="no adapter/, no model/ and no complete checkpoint"):
        generate.run(of_command("generate", run=str(folder), prompt="x"))


@pytest.mark.parametrize(
    ("changes", "override"),
    [
        (CODE["a module of its own"], "plugins=[payload]"),
        (CODE["a plugin alone"], "plugins=[payload]"),
        (CODE["a trainer"], "plugins=[payload]"),
        (CODE["code of a checkpoint"], "model.remote_code=run"),
    ],
)
def test_what_the_command_names_itself_is_taken(
    changes: tuple[Change, ...], override: str, tmp_path: Path, mark: Path
) -> None:
    text = (sent(tmp_path / "run", *changes) / "config.yaml").read_text()
    command = composed("task=evaluate", *EAGER, override)
    assert config_of_run(command, text=text, place="config.yaml").plugins == command.plugins
    with pytest.raises(ConfigError):
        config_of_run(of_command("evaluate"), text=text, place="config.yaml")


def test_a_process_ends_with_2_and_runs_nothing(tmp_path: Path, mark: Path) -> None:
    folder = sent(tmp_path / "outputs" / "evil", *CODE["a module of its own"])
    (folder / "adapter").mkdir()
    done = run_process(
        "task=generate",
        f"task.run={folder}",
        "task.prompt=x",
        *EAGER,
        output_dir=tmp_path / "out",
        env={"PYTHONPATH": str(tmp_path / "path")},
    )
    assert done.returncode == 2, done.stderr
    assert "error: " in done.stderr
    assert "plugins has 'payload'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not mark.exists()


def test_every_class_that_conf_names_is_one_of_this_projects_own() -> None:
    configs: list[Config] = [composed(), composed("optim=adafactor"), composed("logger=[wandb,console]")]
    named = {
        (point, node._target_)
        for config in configs
        for point, nodes in (
            ("model", [config.model]),
            ("data.*", config.data.values()),
            ("optim", [config.optim]),
            ("trainer", [config.trainer]),
            ("logger.*", config.logger.values()),
        )
        for node in nodes
    }
    assert {(p, t) for p, targets in OWN_TARGETS.items() for t in targets} >= named


def test_where_prepared_rows_are_written_is_the_commands(tmp_path: Path) -> None:
    changes = (("  folder: null", f"  folder: {tmp_path}/elsewhere"), ("  workers: null", "  workers: 5000"))
    text = (sent(tmp_path / "run", *changes) / "config.yaml").read_text()
    command = composed("task=evaluate", *EAGER, f"prepare.folder={tmp_path}/own", "prepare.workers=2")
    found = config_of_run(command, text=text, place="config.yaml").prepare
    assert (found.folder, found.workers) == (f"{tmp_path}/own", 2)


def test_compiled_programs_beside_a_run_folder_are_not_loaded(tmp_path: Path) -> None:
    """They are machine code; the folder that a command evaluates may have come with some."""
    folder = sent(tmp_path / "outputs" / "evil")
    (folder / "model").mkdir()
    (folder / "result.json").write_text('{"status": "finished"}')
    (folder / "adapter").mkdir()
    on_tpu = ("hw=v6e1", f"output_dir={tmp_path}/mine", f"hw.compile_cache={tmp_path}/mine/compile_cache")
    config = composed("task=evaluate", *on_tpu, f"task.run={folder}", "task.adapter=none")
    subject = subject_of_base(config)
    assert compile_cache_folder(subject, process=0) == f"{tmp_path}/mine/compile_cache"
    assert subject.output_dir == f"{tmp_path}/outputs"


def subject_of_base(config: Config) -> Config:
    """The config that task=evaluate runs with; its adapter is not looked at."""
    from tpu_experiments.tasks.evaluate.subject import _config_of, task_of
    from tpu_experiments.training.given import run_to_evaluate

    task = task_of(config)
    return _config_of(run_to_evaluate(config, task), config, task)


def test_a_url_that_only_the_run_folder_names_is_said_before_it_is_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = (("path: tpu_experiments/samples/wiki_ro.jsonl", "path: http://127.0.0.1:9/x.jsonl"),)
    text = (sent(tmp_path / "run", *changes) / "config.yaml").read_text()
    with caplog.at_level("WARNING"):
        config_of_run(of_command("evaluate"), text=text, place="config.yaml")
    assert "config.yaml has the URL data.sample_text.path=http://127.0.0.1:9/x.jsonl" in caplog.text
    caplog.clear()
    own = composed("task=evaluate", *EAGER, "data.sample_text.path=http://127.0.0.1:9/x.jsonl")
    config_of_run(own, text=text, place="config.yaml")
    assert not caplog.text


@pytest.mark.parametrize(
    "url",
    [
        "reference://x::{tmp}/refs.json",
        "simplecache::http://127.0.0.1:9/x.jsonl",
        "zip://x.jsonl::{tmp}/x.zip",
        "ssh://127.0.0.1/x.jsonl",
        "github://a:b@c/x.jsonl",
        "jar://x.jsonl",
        "data:text/plain://,x",
    ],
)
def test_an_address_is_of_storage_or_of_a_web_server(url: str, tmp_path: Path) -> None:
    """fsspec's `reference://` renders templates of its file, and others run ssh, unpack or mount."""
    with pytest.raises(ConfigError, match="is not opened; give a local path, or a URL of"):
        paths.filesystem_of(url.format(tmp=tmp_path))


OVERLAYS = {
    "laughs": LAUGHS.replace("a0:", "trainer.options:"),
    "levels": "trainer.options: " + "[" * 5_000,
    "mapped levels": "trainer.options: " + "{a: " * 5_000,
    "values": "trainer.options: [" + "1," * 300_000 + "1]",
    "an alias inside itself": "trainer.options: &a [*a]",
    "a date that is none": "seed: 2026-02-31",
}


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_is_refused(name: str, tmp_path: Path) -> None:
    from tpu_experiments.command_line import with_plan_overlay

    file = tmp_path / "best.yaml"
    file.write_text(OVERLAYS[name])
    with pytest.raises(ConfigError, match=r"\+plan=") as caught:
        with_plan_overlay([f"+plan={file}"])
    assert len(str(caught.value)) < 500


def test_an_overlay_that_is_no_text_is_refused(tmp_path: Path) -> None:
    from tpu_experiments.command_line import with_plan_overlay

    (tmp_path / "best.yaml").write_bytes(b"\x80\x04\x95")
    for file in (tmp_path / "best.yaml", tmp_path):
        with pytest.raises(ConfigError, match=r"\+plan=.*it cannot be read"):
            with_plan_overlay([f"+plan={file}"])


def test_a_config_path_begins_at_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpu_experiments.command_line import with_whole_paths

    monkeypatch.chdir(tmp_path)
    assert with_whole_paths(["--config-path=mine"]) == [f"--config-path={tmp_path}/mine"]
    assert with_whole_paths(["-cp", "mine", "x=mine"]) == ["-cp", f"{tmp_path}/mine", "x=mine"]
    assert with_whole_paths(["--config-dir", "mine"]) == ["--config-dir", "mine"]


def test_yaml_of_a_config_folder_is_refused_before_hydra_reads_it(tmp_path: Path) -> None:
    from tpu_experiments.command_line import check_yaml

    check_yaml([])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.yaml").write_text(LAUGHS)
    (tmp_path.parent / "linked").mkdir()
    (tmp_path.parent / "linked" / "data").symlink_to(tmp_path / "data")
    (tmp_path / "round").symlink_to(tmp_path)
    for given in (
        *([f"--config-dir={tmp_path}"], ["-cd", str(tmp_path)], ["--config-path", str(tmp_path)]),
        *([f"hydra.searchpath=[file://{tmp_path}]"], [f"+hydra.searchpath=[pkg://x,'file://{tmp_path}']"]),
        [f"hydra.searchpath=['file://{os.path.relpath(tmp_path)}']"],
        ["-cd", f"{tmp_path.parent}/linked"],
    ):
        with pytest.raises(ConfigError, match=r"x\.yaml; written out it has more than 10,000 keys and values"):
            check_yaml(given)


REPORTED = {"laughs": LAUGHS, "levels": "a: " + "[" * 5_000}


@pytest.mark.parametrize("name", REPORTED)
def test_a_report_refuses_a_config_that_would_fill_the_memory(name: str, tmp_path: Path) -> None:
    folder = sent(tmp_path / "outputs" / "run")
    (folder / "config.yaml").write_text(REPORTED[name])
    with pytest.raises(ConfigError, match=r"config\.yaml; "):
        report.run(composed("task=report", f"output_dir={tmp_path}/outputs"))


def test_a_report_runs_nothing_resolves_nothing_and_writes_no_script(tmp_path: Path, mark: Path) -> None:
    script = "<script>alert(1)</script>"
    for name, seed in (("one", 0), ("two", 1)):
        folder = sent(
            tmp_path / "outputs" / name, ("seed: 0", f"seed: '{script}{seed}'"), (MODEL, "_target_: payload.Model")
        )
        text = (folder / "config.yaml").read_text()
        note = f"note: ${{oc.env:HF_TOKEN}}{seed}\n'{script}': {seed}\nHF_TOKEN: {SECRET}{seed}\n"
        (folder / "config.yaml").write_text(text + note)
        lines = [{"step": step, "train/loss": 1.0, script: 2.0, "note": script} for step in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = {"status": "finished", "eval_loss": 1.0, "name": script, "hw": script, "model": script}
        (folder / "result.json").write_text(json.dumps(result))
    report.run(composed("task=report", f"output_dir={tmp_path}/outputs"))
    (page,) = (tmp_path / "outputs" / "reports").rglob("report.html")
    assert "<script>alert" not in page.read_text()
    assert SECRET not in page.read_text()
    assert not mark.exists()
    assert os.environ["HF_TOKEN"] == SECRET


def test_a_literal_interpolation_is_written_so_that_it_is_read_as_text(tmp_path: Path) -> None:
    for prompt in ("${oc.env:HF_TOKEN}", r"a \${x} b", "${", r"\\${x", "$${x:'y'}"):
        config = composed(*EAGER)
        config.trainer.options = {"note": prompt}
        folder = RunFolder(str(tmp_path), "run")
        folder.create(config)
        found = config_of_run(of_command("evaluate"), text=paths.read_text(folder.config_path), place="x")
        assert found.trainer.options == {"note": prompt}


FOREIGN_PLACES: dict[str, Change] = {
    "a template of the system": ("chat_template_path: null", "chat_template_path: /etc/passwd"),
    "a template of the process": ("chat_template_path: null", "chat_template_path: /proc/self/environ"),
    "a template that is any file": ("chat_template_path: null", "chat_template_path: <tmp>/notes.txt"),
    "a template by a URL of a file": ("chat_template_path: null", "chat_template_path: file:///etc/passwd"),
    "a template that links to another file": ("chat_template_path: null", "chat_template_path: <run>/linked.jinja"),
    "a template up and down": ("chat_template_path: null", "chat_template_path: ../../../../../../etc/passwd"),
    "a tokenizer of the system": ("tokenizer_path: ", "tokenizer_path: /etc #"),
    "a tokenizer in a hidden folder": ("tokenizer_path: ", "tokenizer_path: <tmp>/.secret #"),
    "a model of the system": ("  path: tpu_experiments/samples/tiny_base", "  path: /proc/self/cwd/../../../../../etc"),
    "a tokenizer through a link": ("tokenizer_path: ", "tokenizer_path: <run>/link #"),
}
READ_BY_EVALUATE: dict[str, Change] = {
    "data of the system": ("path: tpu_experiments/samples/wiki_ro.jsonl", "path: /etc/passwd"),
    "data in a hidden folder": ("path: tpu_experiments/samples/wiki_ro.jsonl", "path: <tmp>/.secret/a.jsonl"),
    "data through a link": ("path: tpu_experiments/samples/wiki_ro.jsonl", "path: <run>/linked.txt"),
    "questions of the system": ("    questions: {}", "    questions: {x: /etc/passwd}"),
    "held-out data of the system": ("    eval_path: null", "    eval_path: /var/log/syslog.txt"),
}


@pytest.mark.parametrize("attack", [*FOREIGN_PLACES, *READ_BY_EVALUATE])
def test_a_file_that_is_none_of_a_runs_own_is_not_read_for_it(attack: str, tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "evil"
    sent(run, (FOREIGN_PLACES | READ_BY_EVALUATE)[attack], tmp=tmp_path, run=run)
    (tmp_path / ".secret").mkdir()
    (tmp_path / ".secret" / "a.jsonl").write_text('{"text": "secret"}\n')
    (tmp_path / "notes.txt").write_text("secret")
    for name, target in (("linked.jinja", "notes.txt"), ("linked.txt", "notes.txt"), ("link", ".secret")):
        (run / name).symlink_to(tmp_path / target)
    for task in (evaluated, generated)[: 2 if attack in FOREIGN_PLACES else 1]:
        with pytest.raises(
            ConfigError, match=r"config\.yaml; (model|data)\..*; a run folder may come from anywhere"
        ) as said:
            task(run)
        assert len(str(said.value).splitlines()) == 1


def test_places_of_a_run_of_ones_own_are_read_and_those_that_the_command_names(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("x")
    (tmp_path / "t.txt").write_text("x")
    run = sent(tmp_path / "run", ("chat_template_path: null", f"chat_template_path: {tmp_path}/t.jinja"))
    text = (run / "config.yaml").read_text()
    found = config_of_run(of_command("evaluate"), text=text, place=f"{run}/config.yaml")
    assert found.model.chat_template_path == f"{tmp_path}/t.jinja"
    text = text.replace("t.jinja", "t.txt")
    with pytest.raises(ConfigError, match=r"t\.txt' is no file that ends in \.jinja"):
        config_of_run(of_command("evaluate"), text=text, place=f"{run}/config.yaml")
    own = composed("task=evaluate", *EAGER, f"model.chat_template_path={tmp_path}/t.txt")
    assert config_of_run(own, text=text, place=f"{run}/config.yaml").model.chat_template_path == f"{tmp_path}/t.txt"


@pytest.mark.parametrize(
    ("key", "value"),
    [("model.remat", "x"), ("model.stack_group", "2"), ("trainer.loss_chunk_tokens", [1]), ("model.stack", None)],
)
def test_speed_settings_of_an_identity_have_their_kinds(key: str, value: object, tmp_path: Path) -> None:
    config = composed(*EAGER, f"output_dir={tmp_path}", "name=run")
    RunFolder(str(tmp_path), "run").create(config)
    file = tmp_path / "run" / "identity.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=rf"name=run; {file}: {key}=.*; restore the file, or choose another name="):
        with_settings_of_run(config)


@pytest.mark.parametrize("key", ["output_dir", "plugins", "trainer._target_", "model.remote_code", "hw.env", "lora.r"])
def test_a_table_of_settings_sets_speed_settings_alone(key: str, tmp_path: Path) -> None:
    from tpu_experiments.planning.tuned import TABLE, lines

    table = tmp_path / "tuned.yaml"
    table.write_text(TABLE.read_text().replace("model.stack: ", f"{key}: x, model.stack: ", 1))
    with pytest.raises(
        ConfigError, match=rf"tuned\.yaml; .*it sets '{key}', and such a file may set only model\.stack"
    ):
        lines(table)
    table.write_text(TABLE.read_text().replace("model.stack: unrolled", "model.stack: 3", 1))
    with pytest.raises(ConfigError, match=r"model\.stack=3 is not of type str"):
        lines(table)


@pytest.mark.parametrize(
    "word",
    [
        *("plugins=[payload]", "trainer._target_=payload.Trainer", "optim._target_=payload.Optimizer"),
        *("model.remote_code=run", "output_dir=/tmp/elsewhere", "hydra.searchpath=[file:///tmp/evil]"),
        *("+model.arch={}", "~local", "model=../../x", "data.sample_text.path=/etc/passwd", "++optim._target_=x.Y"),
        "objective._target_=payload.Objective",
    ],
)
def test_a_pack_runs_the_words_of_its_sweep(word: str) -> None:
    own = ["model=tiny", "data=sample_text", "lora.r=4", "output_dir='outputs/sweeps/x'", "name='lora.r=4'"]
    assert pack_problem([*own, "lora.r=8", "objective.beta=0.2", "optim=adafactor", "seed=1", "name='a'"], own) is None
    said = pack_problem([*own, word], own)
    assert said is not None
    assert said.startswith(f"{word!r} is none of this command's words")


def test_subjects_are_found_as_before(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the run is not finished and has no checkpoint"):
        subject_of(composed("task=evaluate", *EAGER, f"task.run={sent(tmp_path / 'run')}"))
