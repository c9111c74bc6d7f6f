"""task=tokenizer: the same bytes for the same data, ids that transformers reloads, true measures, nothing lost."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.config.composing import composed
from tests.training.runs import finished
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.task_schema import BYTE_KINDS, KINDS, TokenizerTaskConfig
from tpu_experiments.data.documents import Document
from tpu_experiments.data.tokens.tokenize import DocumentTokenizer
from tpu_experiments.data.tokens.tokenizer import load_tokenizer, pad_id
from tpu_experiments.data.tokens.words import words_of
from tpu_experiments.storage import paths
from tpu_experiments.tasks import tokenizer as task
from tpu_experiments.tasks.tokenizer.measures import HARD_LINES, Measures, as_table, encoded, measured
from tpu_experiments.tasks.tokenizer.training import trained

pytest_plugins = ("tests.gcs",)
pytestmark = pytest.mark.usefixtures("root_logger")
REPOSITORY = Path(__file__).parents[2]
WIKI = REPOSITORY / "tpu_experiments" / "samples" / "wiki_ro.jsonl"
TEXTS = [json.loads(line)["text"] for line in WIKI.read_text(encoding="utf-8").splitlines()]
SHIPPED = "tpu_experiments/samples/tokenizer"
SMALL = ("task=tokenizer", "data=sample_text", "task.vocab_size=1000", "prepare.workers=1")


def settings(kind: str, **values) -> TokenizerTaskConfig:
    return TokenizerTaskConfig(name="tokenizer", kind=kind, **({"vocab_size": 1000} | values))


def made(outputs: Path, *words: str) -> tuple[Path, list[Measures]]:
    """Run the task; its folder and measures."""
    config = composed(*SMALL, f"output_dir={outputs}", *words)
    folder = config.task.folder or f"{outputs}/tokenizers/{config.name}"
    return Path(folder), task.tokenizer_of(config, config.task, folder)


@pytest.fixture(scope="module", params=KINDS)
def of_kind(request, tmp_path_factory):
    """A kind, and the tokenizer of it as it was trained and as transformers loads it."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = trained(settings(request.param, reserved_tokens=3), lambda: TEXTS)
    tokenizer.save_pretrained(folder)
    return request.param, tokenizer, AutoTokenizer.from_pretrained(folder)


def test_transformers_reloads_the_same_ids(of_kind):
    kind, tokenizer, loaded = of_kind
    lines = [*HARD_LINES, *TEXTS[:20], "<|im_start|>user\nA</s>", "[MASK] x"]
    assert encoded(loaded, lines) == encoded(tokenizer, lines)
    assert loaded(lines)["input_ids"] == tokenizer(lines)["input_ids"]
    assert type(loaded).__name__ == ("DebertaV2Tokenizer" if kind == "deberta_v3" else "TokenizersBackend")


def test_size_special_and_reserved_tokens(of_kind):
    kind, _, loaded = of_kind
    assert len(loaded) == 1024
    assert sorted(loaded.get_vocab().values()) == list(range(1024))
    names = list(settings(kind).specials.values())
    assert loaded.convert_tokens_to_ids(names) == list(range(len(names)))
    assert loaded.pad_token_id == pad_id(loaded) == 0
    assert loaded.convert_tokens_to_ids([f"<|reserved_{i}|>" for i in range(27)]) == list(range(997, 1024))
    special = loaded.convert_tokens_to_ids([*names, "<|reserved_0|>", *settings(kind).additional])
    assert loaded.decode(special, skip_special_tokens=True) == ""
    if kind in BYTE_KINDS:
        assert (loaded.bos_token_id, loaded.eos_token_id) == (1, 2)
    else:
        assert loaded("x")["input_ids"][0] == loaded.cls_token_id
        assert loaded("x")["input_ids"][-1] == loaded.sep_token_id


def test_kinds_with_bytes_restore_every_line_and_the_others_count_what_they_lose(of_kind):
    kind, _, loaded = of_kind
    found = measured(loaded, TEXTS, name=kind)
    if kind in BYTE_KINDS:
        assert all(line.is_exact and line.unknown == 0 for line in found.hard)
        assert found.exact_lines == found.lines > 100
        assert found.unknown == 0
    else:
        assert found.hard[0].unknown > 0, "日本 occurs in no text"
        assert not found.hard[0].is_exact
        assert 0 < found.unknown < 0.01 * found.tokens


def test_the_measures_are_what_they_say():
    tokenizer = load_tokenizer(SHIPPED, revision=None, chat_template_path=None)
    found = measured(tokenizer, iter(["Un lup.\n\n  Două", "x"]), name="shipped")
    ids = encoded(tokenizer, ["Un lup.\n\n  Două", "x"])
    assert (found.texts, found.words, found.bytes, found.lines) == (2, 4, 17, 3)
    assert found.tokens == sum(map(len, ids))
    assert found.used == len({number for each in ids for number in each})
    assert found.tokens_per_word == found.tokens / 4
    assert found.longest[0] == max(map(tokenizer.decode, range(5, 4096)), key=len)
    assert Measures.of(json.loads(json.dumps(found.fields()))) == found


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_texts_give_the_same_bytes(kind):
    """Hash tables of the library differ from trainer to trainer, so a second one in this process is enough."""
    first, second = (trained(settings(kind), lambda: TEXTS).backend_tokenizer.to_str() for _ in range(2))
    assert first == second


CHILD = """
import hashlib, json, sys
from tpu_experiments.config.task_schema import TokenizerTaskConfig
from tpu_experiments.tasks.tokenizer.training import trained
texts = [json.loads(line)["text"] for line in open(sys.argv[2], encoding="utf-8")]
tokenizer = trained(TokenizerTaskConfig(name="tokenizer", kind=sys.argv[1], vocab_size=8000), lambda: texts)
print(hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bytes_in_other_processes_with_other_threads(kind, shared_data):
    digests = set()
    for threads in ("1", "2"):
        words = [sys.executable, "-c", CHILD, kind, str(shared_data / "ro_text.jsonl")]
        done = subprocess.run(
            words, env=os.environ | {"RAYON_NUM_THREADS": threads}, cwd=REPOSITORY, capture_output=True, check=True
        )
        digests.add(done.stdout)
    assert len(digests) == 1


def test_rare_characters_of_unigram_are_scored_in_the_order_of_unicode():
    texts = [*TEXTS[:40], *(f"semnul {chr(0x4E00 + i)}" for i in range(60))]
    wanted = settings("unigram", character_coverage=1.0, vocab_size=1000)
    vocabs = [json.loads(trained(wanted, lambda: texts).backend_tokenizer.to_str())["model"]["vocab"] for _ in range(2)]
    assert vocabs[0] == vocabs[1]
    assert {chr(0x4E00 + i) for i in range(60)} <= {piece for piece, _ in vocabs[0]}


@pytest.mark.parametrize("kind", ["bbpe", "spm_bpe"])
@pytest.mark.parametrize("digits", ["any", "three", "single"])
def test_digits_in_a_token(kind, digits):
    numbers = [f"anul {1900 + i} are {i}{i}{i} zile și 12345678 bani" for i in range(90)] * 3
    tokenizer = trained(settings(kind, digits=digits, vocab_size=500, min_frequency=1), lambda: [*TEXTS, *numbers])
    longest = max(sum(c.isdigit() for c in token) for token in tokenizer.get_vocab() if "<" not in token)
    assert longest == {"any": 8, "three": 3, "single": 1}[digits]


@pytest.mark.parametrize("kind", ["bbpe", "spm_bpe"])
def test_a_preparation_encodes_it_word_by_word(kind):
    """The pipelines are GPT-2's, Llama 3's, Qwen 2's or Mistral's to the letter, which the fast path recognises."""
    for digits in ("any", "three", "single"):
        assert words_of(trained(settings(kind, digits=digits, vocab_size=500), lambda: TEXTS)) is not None


def test_unicode_forms():
    tokenizer = trained(settings("bbpe", normalization="nfkc"), lambda: TEXTS)
    assert encoded(tokenizer, ["ﬁ"]) == encoded(tokenizer, ["fi"])


def test_the_command_writes_it_once_and_prints_the_table(tmp_path):
    folder, found = made(tmp_path)
    names = {"tokenizer.json", "tokenizer_config.json", "measures.json", "report.html", "training.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert folder == tmp_path / "tokenizers" / "bbpe_sample_text_1000"
    page = (folder / "report.html").read_text()
    assert "日本 🚀" in page or "\\u65e5\\u672c" in page
    assert f"{found[0].tokens_per_word:.3f}" in page
    assert found[0].exact_rate == 1
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert made(tmp_path)[1] == found
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    _, beside = made(tmp_path, f"task.compare_with={SHIPPED}")
    assert beside[0] == found[0]
    assert [each.entries for each in beside] == [1024, 4096]
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before["tokenizer.json"]
    assert [line.split()[0] for line in as_table(beside).splitlines()[1:]] == ["bbpe_sample_text_1000", SHIPPED]


def test_nothing_is_written_over(tmp_path):
    folder, _ = made(tmp_path)
    content = (folder / "tokenizer.json").read_bytes()
    with pytest.raises(ConfigError, match=r"holds another tokenizer: kind bbpe \(here unigram\).*task\.folder="):
        made(tmp_path, "task.kind=unigram", f"task.folder={folder}")
    assert (folder / "tokenizer.json").read_bytes() == content
    own = tmp_path / "own"
    own.mkdir()
    (own / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds thesis\.tex and no training\.json"):
        made(tmp_path, f"task.folder={own}")
    assert [path.name for path in own.iterdir()] == ["thesis.tex"]


def test_a_killed_command_is_begun_again(tmp_path, monkeypatch):
    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(task, "measured", dies)
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path)
    folder, found = made(tmp_path)
    assert found[0].exact_rate == 1
    assert not (folder / "training_begun.json").exists()


REFUSED = {
    "task.vocab_size=200": r"task\.vocab_size=200; special tokens \(5\).*256 bytes leave nothing to train",
    "task.vocab_size=30000": r"the texts gave \d+ of 29739 entries to train.*set task\.vocab_size=\d+ or less",
    "task.kind=sentencepiece": r"task\.kind=sentencepiece; it is not a choice.*spm_bpe",
    "++task.special_tokens.bos=A": r"task\.special_tokens has 'bos'; there is no such special token.*bos_token",
    "task.additional_special_tokens=['<s>']": r"one is empty or there twice",
    "data.sample_text.clean.min_chars=999999": r"data=\[sample_text\]; of 0 documents none is left to train on",
    "data.sample_text.eval_fraction=0": r"none is left to measure on; raise data\.<name>\.eval_fraction",
    "task.compare_with=./nowhere": r"task\.compare_with=\./nowhere; there is no such folder",
}


@pytest.mark.parametrize("word", REFUSED)
def test_it_is_refused_in_one_sentence(word, tmp_path):
    words = [word] + ["data.sample_text.test_fraction=0"] * ("eval_fraction" in word)
    with pytest.raises(ConfigError, match=REFUSED[word]) as error:
        made(tmp_path, *words)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "tokenizers").exists()


def test_characters_that_leave_no_room_are_refused():
    texts = [" ".join(chr(0x4E00 + i) for i in range(700))] * 3
    with pytest.raises(ConfigError, match=r"the texts have 794 characters.*task\.character_coverage=1"):
        trained(settings("unigram", character_coverage=1.0), lambda: texts)
    with pytest.raises(ConfigError, match=r"794 characters, each twice, before"):
        trained(settings("wordpiece", character_coverage=1.0), lambda: texts)


@pytest.mark.parametrize("kind", ["unigram", "wordpiece", "deberta_v3", "spm_bpe", "bbpe"])
def test_a_few_words_are_refused(kind):
    with pytest.raises(ConfigError, match=r"task\.(vocab_size|kind)"):
        trained(settings(kind), lambda: ["unu doi"])


def test_the_size_that_a_refusal_names_works():
    with pytest.raises(ConfigError, match=r"set task\.vocab_size=(\d+)") as error:
        trained(settings("bbpe", vocab_size=9000), lambda: TEXTS)
    size = int(str(error.value).partition("set task.vocab_size=")[2].split()[0])
    assert len(trained(replace(settings("bbpe"), vocab_size=size), lambda: TEXTS)) >= size


def test_a_bucket(gcs_bucket, tmp_path):
    _, found = made(tmp_path, f"task.folder={gcs_bucket}/tokenizers/mine")
    assert json.loads(paths.read_text(f"{gcs_bucket}/tokenizers/mine/training.json"))["kind"] == "bbpe"
    words = (f"task.folder={gcs_bucket}/tokenizers/mine", f"task.compare_with={SHIPPED}")
    assert made(tmp_path, *words)[1][0] == found[0], "loaded from the bucket"


def test_a_chat_format_is_saved_with_it(tmp_path):
    folder, _ = made(tmp_path, "model.chat_format=chatml")
    loaded = load_tokenizer(str(folder), revision=None, chat_template_path=None)
    chat = Document("d", messages=(("user", "Ce bei?"), ("assistant", "Ceai.")))
    (tokens,) = DocumentTokenizer(loaded).tokenize([chat])
    text = loaded.decode(tokens.ids)
    assert "<|im_start|>assistant\nCeai.<|im_end|>" in text
    assert tokens.flags.any()


@pytest.mark.slow
@pytest.mark.xla
def test_a_model_trains_with_it(tmp_path):
    folder, _ = made(tmp_path, "model.chat_format=chatml")
    result = finished(
        f"model.tokenizer_path={folder}",
        "model.init=random",
        "model.arch.vocab_size=1024",
        "lora=none",
        "hw.runtime=eager",
        "hw.num_threads=1",
        "data=[sample_text,sample_chat]",
        "trainer.max_stage_steps=4",
        "trainer.eval_every_steps=0",
        "sample.max_new_tokens=4",
        output_dir=tmp_path / "runs",
    )
    assert result["eval_loss"] < result["eval_loss_before"]


FERTILITY = {"spm_bpe": "bpe", "unigram": "unigram"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FERTILITY)
def test_tokens_per_word_are_those_of_sentencepiece(kind, shared_data):
    pytest.importorskip("sentencepiece")
    from tests.benchmarks.tokenizers import comparison

    ours, theirs = comparison(kind, vocab_size=8000, file=shared_data / "ro_text.jsonl")
    assert ours <= 1.01 * theirs
