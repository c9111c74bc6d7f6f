"""Manuals: links and anchors lead somewhere, and commands compose to configs that the checks accept."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.config.composing import composition
from tpu_experiments.config.compose import to_config
from tpu_experiments.config.schema import register

REPOSITORY = Path(__file__).parents[1]
MANUALS = sorted(
    file
    for file in REPOSITORY.rglob("*.md")
    if not {".venv", "outputs", ".git", "node_modules"} & set(file.relative_to(REPOSITORY).parts)
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
TEST = re.compile(r"`(tests/[\w/]*test_\w+\.py)(?:::(\w+))?`")
FENCE = re.compile(r"^```.*?^```", re.S | re.M)
PLACEHOLDERS = {"...", "$JOB"}
FLAGS_OF_HYDRA = {"-m", "--multirun", "--resolve", "--help", "--cfg", "job"}


def name_of(file: Path) -> str:
    return file.relative_to(REPOSITORY).as_posix()


def anchors(markdown: str) -> set[str]:
    """Anchors that GitHub makes of headings: lower case, punctuation dropped, blanks to hyphens, repeats numbered."""
    found: dict[str, int] = {}
    anchored = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", FENCE.sub("", markdown), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        anchored.add(slug if slug not in found else f"{slug}-{found[slug]}")
        found[slug] = found.get(slug, 0) + 1
    return anchored


def broken_links(file: Path) -> list[str]:
    """Relative links of a manual that lead to no file, or to no heading of one."""
    wrong = []
    for link in LINK.findall(FENCE.sub("", file.read_text(encoding="utf-8"))):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        if not target.exists():
            wrong.append(f"{name_of(file)}: {link} leads to no file")
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            wrong.append(f"{name_of(file)}: {link} leads to no heading")
    return wrong


def commands_of(markdown: str) -> list[list[str]]:
    """Arguments of every `python run.py` that stands as a line of code, without its comment."""
    found = []
    for line in re.sub(r"\\\n\s*", " ", markdown).splitlines():
        match = re.match(r"(?: {4,}|)(?:bash launch/local\.sh )?python run\.py(?= |$)(.*)", line)
        if match:
            words = shlex.split(match[1], comments=True)
            end = next((i for i, word in enumerate(words) if word in ("&&", "|", ">")), len(words))
            found.append([word for word in words[:end] if word not in PLACEHOLDERS])
    return found


def first_point(words: list[str]) -> list[str]:
    """Overrides of a sweep's first point."""
    overrides = []
    for word, parsed in zip(words, OverridesParser.create().parse_overrides(words), strict=True):
        if parsed.is_sweep_override():
            word = f"{parsed.get_key_element()}={next(iter(parsed.sweep_string_iterator()))}"
        overrides.append(word)
    return overrides


def test_every_link_and_anchor_leads_somewhere() -> None:
    assert len(MANUALS) > 4
    assert [problem for file in MANUALS for problem in broken_links(file)] == []


def test_tests_that_manuals_name_are_there() -> None:
    missing = []
    for file in MANUALS:
        for path, name in TEST.findall(file.read_text(encoding="utf-8")):
            found = REPOSITORY / path
            if not found.is_file() or (name and f"def {name}(" not in found.read_text(encoding="utf-8")):
                missing.append(f"{name_of(file)}: {path}::{name}")
    assert not missing


def test_benchmarks_are_listed_and_their_results_short() -> None:
    """What holds today is read in one go; what was tried is in the log, and its length is free."""
    folder = REPOSITORY / "tests/benchmarks"
    listed = (folder / "README.md").read_text(encoding="utf-8")
    assert [file.name for file in sorted(folder.glob("[a-z]*.py")) if f"[{file.name}]" not in listed] == []
    assert len((folder / "RESULTS.md").read_text(encoding="utf-8").splitlines()) < 300


def test_a_broken_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.REPOSITORY", tmp_path)
    page = tmp_path / "a.md"
    page.write_text("# What it is\n[here](#what-it-is) [there](#nowhere) [file](b.md) [out](https://x.y/z)\n")
    assert broken_links(page) == ["a.md: #nowhere leads to no heading", "a.md: b.md leads to no file"]


def test_commands_are_read_as_a_shell_reads_them() -> None:
    text = "text python run.py a=1\n    python run.py -m 'x=[1,2]' \\\n        y=2,3   # both\n"
    text += "\npython run.py a=1 && rm b\n"
    assert commands_of(text) == [["-m", "x=[1,2]", "y=2,3"], ["a=1"]]
    assert first_point(["x=[1,2]", "y=2,3"]) == ["x=[1,2]", "y=2"]


def test_every_command_of_the_manuals_composes() -> None:
    register()
    commands = [(name_of(file), words) for file in MANUALS for words in commands_of(file.read_text(encoding="utf-8"))]
    assert len(commands) > 40
    refused, done = [], set[tuple[str, ...]]()
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        for name, words in commands:
            words = [word for word in words if word not in FLAGS_OF_HYDRA and not word.startswith("+plan=")]
            is_lacking = "sweep=optuna_lora" in words and find_spec("optuna") is None  # an extra
            if tuple(words) in done or is_lacking:
                continue
            done.add(tuple(words))
            try:
                to_config(composition(first_point(words)))
            except Exception as error:
                refused.append(f"{name}: python run.py {shlex.join(words)}: {error}")
    assert refused == []
