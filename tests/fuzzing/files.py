"""Hostile files: everything that the product reads, with values of every kind, cut, torn, or something else."""

import bz2
import gzip
import io
import json
import lzma
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.fuzzing.commands import TOY
from tests.fuzzing.server import REPOSITORY, Case, outcomes, place_of

SAMPLES = REPOSITORY / "tpu_experiments" / "samples"
BOTH = (*TOY, "data=[sample_text,sample_chat]", "trainer.max_stage_steps=2", "output_dir={tmp}/runs")
DEEP = "[" * 3000 + "]" * 3000

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 0.5, -0.5, 1e308, float("nan"), float("inf"), -float("inf"), 2**31, 2**63),
    *(
        2**64,
        10**30,
        -(2**63),
        "",
        " ",
        "abc",
        "1",
        "ăîș🙂",
        "\ud800",
        "a\0b",
        "x" * 5000,
        "../../x",
        "${seed}",
        "/",
        "\n",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        [0],
        [""],
        {"a": 1},
        {"": None},
        [1, "a", None],
        [[[[[]]]]],
        list(range(300)),
        "nan",
        "os.system",
    ),
)
BYTES: tuple[bytes, ...] = (
    *(
        b"",
        b"\n",
        b"\0",
        b"null",
        b"[]",
        b"{}",
        b"0",
        b'""',
        b"x",
        b"\xff\xfe\x00",
        b"\xef\xbb\xbf{}",
        b"\x80\x04K\x01.",
        b"{",
        b"[1,",
    ),
    *(
        DEEP.encode(),
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b"nan",
        b"- a\n- b\n",
        b"a: b: c",
        b"%PDF-1.4",
        b"\x1f\x8b\x08",
        b"PAR1",
    ),
    *(
        b"\0" * 4096,
        b"9" * 5000,
        b"# only a comment\n",
        b"text\n",
        b"&a [*a]\n",
        b"!!python/object/apply:os.system [x]\n",
        b"a: !x y\n",
    ),
)


def make_fixtures(folder: Path) -> None:
    """Two run folders, one that ended and one that was left in the middle, and what was prepared for them."""
    words = {
        name: (*BOTH, f"name={name}", "checkpoint.every_steps=1", "checkpoint.keep_last=9") for name in ("done", "part")
    }
    cases = [Case(n, "train", given, limit_seconds=300) for n, given in enumerate(words.values())]
    for outcome in outcomes(cases, folder=folder, processes=len(cases), keeping=True):
        assert outcome.verdict == "trained", outcome.shown
    (folder / "runs").mkdir()
    for case, name in zip(cases, words, strict=True):
        shutil.move(place_of(case, folder) / "runs" / name, folder / "runs" / name)
    shutil.move(place_of(cases[0], folder) / "runs" / "prepared", folder / "prepared")
    part = folder / "runs" / "part"
    (part / "result.json").unlink()
    shutil.rmtree(part / "adapter")
    steps = sorted((part / "checkpoints").iterdir())
    for step in steps[2:]:
        shutil.rmtree(step)


def file_case(number: int, *, seed: int, fixtures: Path) -> Case:
    """The case of this number; the same for the same seed."""
    draw = random.Random(f"{seed} file {number}")
    make = draw.choices(list(MAKERS), list(MAKERS.values()))[0]
    return make(number, draw, fixtures)


# What is done to a file


def changed_json(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    """JSON with one to three of its values replaced, taken out or doubled."""
    tree = json.loads(content)
    said = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        tree, words = _changed(draw, tree)
        said.append(words)
    text = json.dumps(tree, ensure_ascii=draw.random() < 0.5)
    return text.encode(errors="surrogatepass"), "; ".join(said)


def _changed(draw: random.Random, tree: Any) -> tuple[Any, str]:
    places: list[tuple[Any, Any, str]] = []
    _walk(tree, "", places)
    if not places:
        value = draw.choice(VALUES)
        return value, f"all: {value!r:.60}"
    by_depth = sorted(places, key=lambda place: place[2].count("."))
    holder, key, name = draw.choice(by_depth[:60] if draw.random() < 0.7 else places)
    how = draw.choice(("value", "value", "value", "value", "gone", "wrapped", "doubled", "text"))
    if how == "gone":
        del holder[key]
    elif how == "wrapped":
        holder[key] = draw.choice(([holder[key]], {"x": holder[key]}))
    elif how == "doubled" and isinstance(holder[key], list | str | int | float):
        holder[key] = holder[key] * 2
    elif how == "text":
        holder[key] = str(holder[key])
    else:
        holder[key] = draw.choice(VALUES)
        return tree, f"{name}={holder[key]!r:.60}"
    return tree, f"{name} {how}"


def _walk(node: Any, name: str, places: list[tuple[Any, Any, str]]) -> None:
    if len(places) > 2000:
        return
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in list(items):
        places.append((node, key, f"{name}.{key}"))
        _walk(value, f"{name}.{key}", places)


def changed_yaml(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    """YAML with values replaced, as JSON's are."""
    tree = yaml.safe_load(content)
    text, said = changed_json(draw, json.dumps(tree).encode())
    return yaml.safe_dump(json.loads(text), allow_unicode=True).encode(errors="surrogatepass"), said


def changed_bytes(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    """Cut, with bytes replaced, with something at its end, or something else."""
    how = draw.choice(("cut", "flipped", "replaced", "longer", "other"))
    if how == "cut" and content:
        size = draw.randrange(len(content))
        return content[:size], f"cut to {size} of {len(content)} bytes"
    if how == "flipped" and content:
        new = bytearray(content)
        for _ in range(draw.choice((1, 3, 20))):
            new[draw.randrange(min(len(new), draw.choice((64, 2048, len(new)))))] = draw.randrange(256)
        return bytes(new), "bytes flipped"
    if how == "longer":
        return content + draw.choice(BYTES), "something at its end"
    value = draw.choice(BYTES)
    return value, f"replaced by {value[:40]!r}"


def changed_safetensors(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    """A header with other values, of the right length."""
    size = int.from_bytes(content[:8], "little")
    header, said = changed_json(draw, content[8 : 8 + size])
    return len(header).to_bytes(8, "little") + header + content[8 + size :], said


def harm(draw: random.Random, path: Path) -> str:
    """Change one file; the words say how."""
    content = path.read_bytes()
    structured: dict[str, Callable[[random.Random, bytes], tuple[bytes, str]]] = {
        ".json": changed_json,
        ".yaml": changed_yaml,
        ".safetensors": changed_safetensors,
    }
    by_structure = structured.get(path.suffix)
    if draw.random() < 0.04:
        path.unlink()
        path.mkdir()
        return f"{path.name} is a folder"
    if by_structure is not None and draw.random() < 0.75:
        new, said = by_structure(draw, content)
    elif path.suffix == ".jsonl" and draw.random() < 0.6:
        new, said = _changed_line(draw, content)
    else:
        new, said = changed_bytes(draw, content)
    path.write_bytes(new)
    return f"{path.name}: {said}"


def _changed_line(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    lines = content.splitlines()
    if not lines:
        return changed_bytes(draw, content)
    number = draw.randrange(len(lines))
    lines[number], said = changed_json(draw, lines[number])
    return b"\n".join(lines) + b"\n", f"line {number + 1}: {said}"


# What is read


def _model(number: int, draw: random.Random, fixtures: Path) -> Case:
    plan = draw.random() < 0.15
    name = draw.choice(("config.json", "config.json", "config.json", "model.safetensors", "index", "index", "two"))
    spare = random.Random(draw.random())
    said: list[str] = []

    def lay(place: Path) -> None:
        folder = place / "model"
        shutil.copytree(SAMPLES / "tiny_base", folder)
        shutil.copytree(SAMPLES / "tokenizer", folder, dirs_exist_ok=True)
        _lay_prepared(place, fixtures, below="out")
        if name == "index":
            _indexed(folder)
            said.append(harm(spare, folder / "model.safetensors.index.json"))
        elif name == "two":
            said.append(harm(spare, folder / "config.json"))
            said.append(harm(spare, folder / "model.safetensors"))
        else:
            said.append(harm(spare, folder / name))

    words = ("model.path={tmp}/model", *(("lora=none",) if draw.random() < 0.2 else ()))
    if draw.random() < 0.15:
        words += ("task=generate", "task.prompt=Salut", "task.max_new_tokens=2")
    elif plan:
        words += ("task=plan", "task.method=analytic", "hw=v5e8", "trainer.global_batch_rows=8", "hw.runtime=xla")
    return Case(number, "model", (*TOY, *words), lay=lay, guarded=("model",), said=said)


def _indexed(folder: Path) -> None:
    """The same model with an index over two files."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _tokenizer(number: int, draw: random.Random, fixtures: Path) -> Case:
    name = draw.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"))
    spare = random.Random(draw.random())
    said: list[str] = []

    def lay(place: Path) -> None:
        shutil.copytree(SAMPLES / "tokenizer", place / "tokenizer")
        if name == "chat_template.jinja" and spare.random() < 0.6:
            template = spare.choice(TEMPLATES)
            (place / "tokenizer" / name).write_text(template)
            said.append(template)
        else:
            said.append(harm(spare, place / "tokenizer" / name))

    words = ("data=[sample_text,sample_chat]", "model.tokenizer_path={tmp}/tokenizer")
    if draw.random() < 0.2:
        words += ("task=prepare",)
    elif draw.random() < 0.2:
        words += ("task=generate", "task.prompt=Salut", "task.max_new_tokens=2")
    return Case(number, "tokenizer", (*TOY, *words), lay=lay, guarded=("tokenizer",), said=said)


TEMPLATES = (
    *(
        "",
        "{{",
        "{% for m in messages %}",
        "{{ messages[0].x.y }}",
        "{{ 1/0 }}",
        "{{ messages }}",
        "{{ none + 1 }}",
        "{% include 'x' %}",
    ),
    *(
        "{{ raise_exception('no') }}",
        "{{ messages | length }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ [].pop() }}",
    ),
    *(
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ messages[99].role }}",
        "{{ 'x' * 10 }}",
        "{{ strftime_now('%Y') }}",
        "{{ x() }}",
    ),
    *(
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ messages[0]['content'] | tojson }}",
        "\udc80".encode("utf-8", "replace").decode(),
    ),
)


def _adapter(number: int, draw: random.Random, fixtures: Path) -> Case:
    name = draw.choice(("adapter_config.json", "adapter_model.safetensors"))
    return _of_run(
        number,
        draw,
        fixtures,
        kind="adapter",
        names=(f"adapter/{name}",),
        words=draw.choice(
            (
                ("task=generate", "task.prompt=Salut", "task.max_new_tokens=2", "task.adapter={tmp}/runs/done/adapter"),
                ("task=evaluate", "task.run={tmp}/runs/done", "task.resamples=100", "task.max_documents=3"),
            )
        ),
    )


def _run_config(number: int, draw: random.Random, fixtures: Path) -> Case:
    return _of_run(
        number,
        draw,
        fixtures,
        kind="run config",
        names=("config.yaml", "config.yaml", "identity.json", "result.json"),
        words=draw.choice(
            (
                ("task=generate", "task.prompt=Salut", "task.max_new_tokens=2", "task.run={tmp}/runs/done"),
                ("task=evaluate", "task.run={tmp}/runs/done", "task.resamples=100", "task.max_documents=3"),
                (
                    *BOTH[-2:],
                    "data=[sample_text,sample_chat]",
                    "name=done",
                    "checkpoint.every_steps=1",
                    "checkpoint.keep_last=9",
                ),
            )
        ),
    )


def _report(number: int, draw: random.Random, fixtures: Path) -> Case:
    names = (
        "metrics.jsonl",
        "metrics.jsonl",
        "result.json",
        "provenance.json",
        "identity.json",
        "config.yaml",
        "audit.json",
        "lives",
    )
    return _of_run(number, draw, fixtures, kind="report", names=names, words=("task=report", "task.runs=[{tmp}/runs]"))


def _resume(number: int, draw: random.Random, fixtures: Path) -> Case:
    names = (
        "metrics.jsonl",
        "provenance.json",
        "identity.json",
        "config.yaml",
        "lives",
        "progress.json",
        "COMMIT.json",
        "optimizer.safetensors",
        "parameters.safetensors",
        "audit.json",
        "run.log",
        "README.md",
    )
    words = (*BOTH, "name=part", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    return _of_run(number, draw, fixtures, kind="resume", names=names, words=words, run="part", bare=True)


def _prepared(number: int, draw: random.Random, fixtures: Path) -> Case:
    spare = random.Random(draw.random())
    said: list[str] = []

    def lay(place: Path) -> None:
        _lay_prepared(place, fixtures, below="runs")
        files = sorted(p for p in (place / "runs" / "prepared").rglob("*") if p.is_file())
        manifests = [p for p in files if p.name in ("manifest.json", "blocks.json", "00000.json")]
        said.append(harm(spare, spare.choice(manifests if spare.random() < 0.6 else files)))

    words = (*BOTH, *(("task=prepare",) if draw.random() < 0.3 else ()))
    return Case(number, "prepared", words, lay=lay, said=said)


def _of_run(
    number: int,
    draw: random.Random,
    fixtures: Path,
    *,
    kind: str,
    names: tuple[str, ...],
    words: tuple[str, ...],
    run: str = "done",
    bare: bool = False,
) -> Case:
    name = draw.choice(names)
    spare = random.Random(draw.random())
    said: list[str] = []

    def lay(place: Path) -> None:
        folder = place / "runs" / run
        shutil.copytree(fixtures / "runs" / run, folder)
        _lay_prepared(place, fixtures, below="runs")
        found = sorted(
            p for p in folder.rglob("*") if p.is_file() and (p.name == Path(name).name or p.parent.name == name)
        )
        said.append(harm(spare, spare.choice(found)))

    return Case(number, kind, words if bare else (*TOY, *words), lay=lay, said=said)


def _lay_prepared(place: Path, fixtures: Path, *, below: str) -> None:
    shutil.copytree(fixtures / "prepared", place / below / "prepared")


def _yaml(number: int, draw: random.Random, fixtures: Path) -> Case:
    """A recipe of the user's own, an overlay, or a plugin."""
    spare = random.Random(draw.random())
    said: list[str] = []
    kind = draw.choice(("experiment", "experiment", "plan", "plan", "plugin", "model"))

    def lay(place: Path) -> None:
        _lay_prepared(place, fixtures, below="out")
        folder = place / "own"
        for name in ("experiment", "model"):
            (folder / name).mkdir(parents=True)
        if kind == "plugin":
            text = spare.choice(PLUGINS)
            (place / "work" / "own_plugin.py").write_text(text)
            said.append(text)
            return
        file = {
            "plan": folder / "best.yaml",
            "experiment": folder / "experiment" / "mine.yaml",
            "model": folder / "model" / "mine.yaml",
        }[kind]
        if spare.random() < 0.5:
            file.write_text({"plan": PLAN, "experiment": RECIPE, "model": MODEL}[kind])
            said.append(harm(spare, file))
        else:
            text = spare.choice(YAMLS).encode()
            file.write_bytes(text)
            said.append(f"{file.name}: {text[:80]!r}")

    words = {
        "experiment": ("hydra.searchpath=[file://{tmp}/own]", "+experiment=mine"),
        "model": ("hydra.searchpath=[file://{tmp}/own]", "model=mine"),
        "plan": ("+plan={tmp}/own/best.yaml",),
        "plugin": ("plugins=[own_plugin]", "trainer._target_=own_plugin.Mine"),
    }[kind]
    return Case(number, f"yaml {kind}", (*TOY, *words), lay=lay, guarded=("own",), said=said)


RECIPE = """\
# @package _global_
defaults:
  - override /model: tiny
  - override /lora: all_linear_r8
name: mine
trainer: {seq_len: 64}
optim: {lr: 0.001}
"""
MODEL = """\
defaults: [base, _self_]
name: mine
path: tpu_experiments/samples/tiny_base
tokenizer_path: tpu_experiments/samples/tokenizer
dtype: float32
lr: 0.005
"""
PLAN = "model.remat: none\ntrainer.micro_batch_rows: 4\nsharding: fsdp\n"
YAMLS = (
    *(
        "",
        "a",
        "[]",
        "- a",
        "{",
        "a: [",
        "a: b: c",
        "\t",
        "a: 1\na: 2\n",
        "&a [*a]",
        "*x",
        "!!python/name:os.system ''",
        "a: !x y",
    ),
    *(
        "trainer: null",
        "trainer: []",
        "trainer: 1",
        "trainer: {seq_len: null}",
        "lora.r: []",
        "model: {arch: []}",
        "seed: 2001-01-01",
    ),
    *(
        "seed: 0x10",
        "seed: 1_0",
        "seed: 1:30",
        "name: 1",
        "name: yes",
        "1: 2",
        "null: 1",
        "true: 1",
        "? [a]\n: b",
        "? {a: 1}\n: b",
    ),
    *(
        "defaults: [x]",
        "defaults: 1",
        "defaults: [_self_, _self_]",
        "defaults: {a: b}",
        "defaults: [{a: b}]",
        "defaults: [override /x: y]",
    ),
    *(
        "# @package x.y.z\na: 1",
        "# @package\na: 1",
        "# @package _global_\na: 1",
        "seed: ${seed}",
        "seed: ${x}",
        "hw.env: {a: b}",
        'name: "\\0"',
    ),
    *(
        'hw: {env: {"a\\0": b}}',
        '# @package _global_\nhw: {env: {"a": "\\0"}}',
        '# @package _global_\nhw: {env: {"": "1"}}',
        "lora.r: 10000000000000000000000",
    ),
    *(
        '# @package _global_\nname: "a\\nb"',
        '# @package _global_\noutput_dir: "a\\0b"',
        '# @package _global_\nsample: {prompt: "\\0"}',
        "...",
        "---\na: 1\n---\nb: 1",
    ),
    *(
        "x" * 5000,
        "a: " + "[" * 500 + "]" * 500,
        "\ufeffseed: 1",
        "seed: !!int x",
        "seed: !!float x",
        "seed: !!binary x",
        "a: !!timestamp x",
        "<<: 1",
        "<<: [1]",
    ),
    *(
        '# @package _global_\nmodel: {path: "a\\0b"}',
        '# @package _global_\ndata: {sample_text: {path: "a\\0b"}}',
        "=: 1",
        "a: =",
        "seed: .nan",
        "seed: .inf",
    ),
)
PLUGINS = (
    *(
        "",
        "x",
        "(",
        "import nothing_of_that_name",
        "Mine = 1",
        "class Mine: pass",
        "def Mine(): pass",
        "from nowhere import Mine",
    ),
    *(
        "class Mine:\n    def __init__(self, *a, **k): pass\n",
        "\0",
        "Mine = None",
        "raise SystemExit(3)",
        "from tpu_experiments import *",
    ),
    "from tpu_experiments.training.trainer import Trainer\nclass Mine(Trainer): pass\n",
)


def _data(number: int, draw: random.Random, fixtures: Path) -> Case:
    spare = random.Random(draw.random())
    said: list[str] = []
    suffix = draw.choice((".jsonl", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".parquet", ".arrow", ".txt"))
    packed = draw.choice(("", "", "", ".gz", ".bz2", ".xz", ".zst")) if suffix not in (".parquet", ".arrow") else ""
    shape = draw.choice(list(ROWS))
    kind, fmt = ROWS[shape][:2]

    def lay(place: Path) -> None:
        rows = ROWS[shape][2]()
        (place / "data").mkdir()
        if spare.random() < 0.5:
            tree, words = changed_json(spare, json.dumps(rows).encode())
            rows = json.loads(tree)
            said.append(words)
        content = _written(rows, suffix)
        if not said or spare.random() < 0.3:
            content, words = changed_bytes(spare, content)
            said.append(words)
        content = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": _zst}[packed](
            content
        )
        if packed and spare.random() < 0.3:
            content, words = changed_bytes(spare, content)
            said.append(f"packed: {words}")
        (place / "data" / f"a{suffix}{packed}").write_bytes(content)
        said.append(f"{shape} as {suffix}{packed}")

    name = "sample_text" if kind == "text" else "sample_chat"
    format_word = f"data.{name}.format={draw.choice(('auto', 'auto', fmt))}"
    whole = f"data.{name}.path={{tmp}}/data" + draw.choice(("", f"/a{suffix}{packed}", "/*", f"/*{suffix}{packed}"))
    words = (f"data={name}", whole, format_word, f"data.{name}.on_bad_row={draw.choice(('stop', 'skip'))}")
    extra = (
        *((f"data.{name}.duplicates.near=0.8",) if draw.random() < 0.2 else ()),
        *((f"data.{name}.clean.language=ro",) if draw.random() < 0.1 else ()),
        *((f"data.{name}.clean.whitespace=collapse",) if draw.random() < 0.1 else ()),
        *(("task=prepare",) if draw.random() < 0.3 else ()),
        *(("prepare.documents=keep",) if draw.random() < 0.2 else ()),
    )
    return Case(number, "data", (*TOY, *words, *extra), lay=lay, guarded=("data",), said=said)


def _text_rows() -> list[Any]:
    return [{"text": f"Propoziția numărul {n} despre Dunăre și munți. " * 6, "id": str(n)} for n in range(40)]


def _message_rows() -> list[Any]:
    turns = [{"role": "user", "content": "Ce este?"}, {"role": "assistant", "content": "Un râu lung, cu multe brațe."}]
    return [{"messages": [dict(turn, content=f"{turn['content']} {n}") for turn in turns * 2]} for n in range(40)]


def _alternating_rows() -> list[Any]:
    return [{"data": [f"Întrebarea {n}?", f"Răspunsul {n} este acesta."] * 2} for n in range(40)]


def _instruction_rows() -> list[Any]:
    return [{"instruction": f"Scrie {n}", "input": "", "output": f"Am scris {n} aici."} for n in range(40)]


ROWS: dict[str, tuple[str, str, Callable[[], list[Any]]]] = {
    "texts": ("text", "text", _text_rows),
    "messages": ("chat", "messages", _message_rows),
    "alternating": ("chat", "alternating", _alternating_rows),
    "instruction": ("chat", "instruction", _instruction_rows),
}


def _written(rows: Any, suffix: str) -> bytes:
    import csv

    import pyarrow
    import pyarrow.parquet

    listed = rows if isinstance(rows, list) else [rows]
    if suffix in (".parquet", ".arrow"):
        file = io.BytesIO()
        try:
            table = pyarrow.Table.from_pylist([row for row in listed if isinstance(row, dict)])
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError, UnicodeError):
            table = pyarrow.table({"text": [json.dumps(row) for row in listed]})
        if suffix == ".parquet":
            pyarrow.parquet.write_table(table, file)
        else:
            with pyarrow.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
        return file.getvalue()
    if suffix == ".json":
        return json.dumps(rows).encode()
    if suffix == ".jsonl":
        return b"\n".join(json.dumps(row).encode() for row in listed) + b"\n"
    if suffix == ".txt":
        return "\n".join(str(row) for row in listed).encode(errors="surrogatepass")
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t" if suffix == ".tsv" else ",")
    names = list(listed[0]) if listed and isinstance(listed[0], dict) else ["text"]
    writer.writerow(names)
    for row in listed:
        writer.writerow(list(row.values()) if isinstance(row, dict) else [row])
    return text.getvalue().encode(errors="surrogatepass")


def _zst(content: bytes) -> bytes:
    import zstandard

    return bytes(zstandard.compress(content))


def _prompts(number: int, draw: random.Random, fixtures: Path) -> Case:
    spare = random.Random(draw.random())
    said: list[str] = []
    name = draw.choice(("prompts.jsonl", "prompts.jsonl", "prompts.txt"))

    def lay(place: Path) -> None:
        (place / "own").mkdir()
        rows = [
            {"prompt": "Salut"},
            {"messages": [{"role": "user", "content": "Ce?"}]},
            {"instruction": "a", "input": "b"},
        ]
        lines = [json.dumps(row) for row in rows] if name.endswith("l") else ["Salut", "Ce?"]
        (place / "own" / name).write_text("\n".join(lines) + "\n")
        said.append(harm(spare, place / "own" / name))

    words = (
        "task=generate",
        f"task.prompts_file={{tmp}}/own/{name}",
        "task.max_new_tokens=2",
        "task.output={tmp}/out/a.jsonl",
    )
    return Case(number, "prompts", (*TOY, *words), lay=lay, guarded=("own",), said=said)


MAKERS: dict[Callable[[int, random.Random, Path], Case], int] = {
    _model: 22,
    _tokenizer: 12,
    _adapter: 9,
    _run_config: 11,
    _report: 8,
    _resume: 14,
    _prepared: 7,
    _yaml: 13,
    _data: 24,
    _prompts: 5,
}
