"""The table of planned settings: for which commands its lines hold, what they change, and what they leave alone."""

from dataclasses import replace

import pytest

from tests.benchmarks.retune import words_of
from tests.config.composing import composed
from tests.tiers import only
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.defaults import with_lengths
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.tuned import KEPT, SPEED, value_of
from tpu_experiments.metrics.flops import read_decoder
from tpu_experiments.planning import tuned as table
from tpu_experiments.planning.analytic import estimated_time, largest_stage
from tpu_experiments.planning.saving import FASTEST, MARGIN, with_saving
from tpu_experiments.planning.tuned import (
    Line,
    facts_of,
    fastest,
    fields_of,
    leaves_room,
    lines,
    tuned,
    with_settings_of,
    write_line,
)
from tpu_experiments.storage.run_folder import RunFolder, with_settings_of_run

HEADLINE = ("model=mistral7b", "data=ultrachat_ro", "hw=v6e8")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FOLDED = {
    "model.stack": "scanned", "model.stack_group": 1, "model.remat": "save_dots", "sharding": "replicated",
    "trainer.loss_chunk_tokens": 2048, "hw.attention_block": 1024,
}  # fmt: skip


def settled_of(*words: str):
    return with_lengths(composed(*words), None)


def line(*, speed: float = 12_000.0, compiling: float = 200.0, **changed) -> Line:
    found = Line(
        model="mistral7b", hw="v6e8", row_tokens=4096, micro_tokens=4096, rank=16, targets=TARGETS,
        settings={**FOLDED, "model.stack": "unrolled"}, tokens_per_second=speed, step_tokens=65536, hbm_gib=26.48,
        compile_seconds=compiling, facts=facts_of(settled_of(*HEADLINE)), libtpu="0.0.21", date="2026-11-23",
    )  # fmt: skip
    return replace(found, **changed)


@pytest.fixture
def known(monkeypatch):
    """Put lines in the place of the shipped ones."""

    def put(*every: Line) -> None:
        monkeypatch.setattr(table, "lines", lambda: every)

    put(line())
    return put


def test_the_headline_takes_the_settings_of_its_line(known) -> None:
    before = settled_of(*HEADLINE)
    found = tuned(before)
    assert (before.model.stack, before.sharding.name, before.trainer.micro_batch_rows) == ("scanned", "fsdp", None)
    assert (found.model.stack, found.sharding.name, found.trainer.micro_batch_rows) == ("unrolled", "replicated", 1)
    assert found.sharding.rules == composed("sharding=replicated").sharding.rules
    assert found.tuned == "settled"
    shown = fields_of(found)
    assert shown is not None
    assert (shown["tokens_per_second"], shown["settings"]["model.stack"]) == (12_000.0, "unrolled")
    assert tuned(found) == found
    changed = {key for key in SPEED if value_of(before, key) != value_of(found, key)}
    assert replace(before, model=found.model, sharding=found.sharding, trainer=found.trainer, tuned="settled") == found
    assert changed == {"model.stack", "model.remat", "sharding", "trainer.micro_batch_rows"}


@pytest.mark.parametrize(
    "word",
    [
        "tuned=off",
        "lora.r=32",
        "lora=none",
        "lora.dora=true",
        "lora.target_parameters=[experts.down_proj]",
        "lora.modules_to_save=[lm_head]",
        "+lora.trainable_token_indices={embed_tokens: [5]}",
        "trainer.seq_len=8192",
        "model.stack_group=2",
        "model.remat=none",
        "trainer.micro_batch_rows=2",
        "sharding=hsdp",
        "hw.libtpu_flags=[]",
        "hw.num_devices=4",
        "hw.chip.program_hbm_gib=20",
        "model.arch.num_hidden_layers=40",
        "model.attention=sdpa",
        "model.size=tiny",
        "hw=v6e4",
        "model=qwen05b",
    ],
)
def test_what_was_not_planned_takes_no_line(known, word) -> None:
    config = settled_of(*HEADLINE, word)
    found = tuned(config)
    assert found == (config if config.tuned == "off" else with_saving(config, is_begun=False, is_logged=False))
    assert fields_of(found) is None


@pytest.mark.parametrize(
    "word", ["model.stack=unrolled", "sharding=replicated", "lora.r=8", "lora.targets=[q_proj]", "seed=3"]
)
def test_what_goes_with_a_line_does_not_keep_it_out(known, word) -> None:
    assert tuned(settled_of(*HEADLINE, word)).model.stack == "unrolled"


OF_PAIRS = ("data=ultrafeedback_binarized", "curriculum=single")


@pytest.mark.parametrize("word", ["objective=dpo", "objective=simpo", "objective=orpo", "objective.beta=0.5"])
def test_preferences_take_the_lines_of_next_tokens(known, word) -> None:
    """Their steps are planned alike: 12,639 of 12,640 tokens/s, and 1.001 times the memory."""
    config = settled_of(*HEADLINE, *OF_PAIRS, "objective=dpo", word)
    assert facts_of(config) != facts_of(settled_of(*HEADLINE))
    assert tuned(config).model.stack == "unrolled"


def test_a_line_of_preferences_is_theirs_alone(known) -> None:
    config = settled_of(*HEADLINE, *OF_PAIRS, "objective=dpo")
    known(line(facts=facts_of(config)))
    assert tuned(config).model.stack == "unrolled"
    assert tuned(settled_of(*HEADLINE)).model.stack == "scanned"


def test_an_objective_with_a_further_pass_takes_no_line_of_next_tokens(known) -> None:
    config = settled_of(*HEADLINE, *OF_PAIRS, "objective=kto")
    assert tuned(config) == config


def test_words_of_the_command_win_where_they_are_the_shipped_values(known, monkeypatch) -> None:
    monkeypatch.setattr(table, "given", lambda config: {"model.stack"})
    assert tuned(settled_of(*HEADLINE)).model.stack == "scanned"


@pytest.mark.parametrize(("seq_len", "rows"), [(4096, 1), (2048, 2), (1024, 4), (512, 8)])
def test_shorter_rows_are_as_many_as_make_no_more_tokens(known, seq_len, rows) -> None:
    found = tuned(settled_of(*HEADLINE, f"trainer.seq_len={seq_len}"))
    assert found.trainer.micro_batch_rows == rows
    assert found.model.stack == "unrolled"


@pytest.mark.parametrize(("steps", "stack"), [(10, "scanned"), (300, "scanned"), (900, "unrolled"), (None, "unrolled")])
def test_folded_or_unrolled_by_the_whole_time(known, steps, stack) -> None:
    """0.683 against 0.819 s a step, and 200 against 100 s: 733 steps earn it."""
    known(line(), line(speed=10_000.0, compiling=100.0, settings=FOLDED))
    words = () if steps is None else (f"curriculum.stages.main.steps={steps}", "curriculum.stages.main.epochs=null")
    assert tuned(settled_of(*HEADLINE, "curriculum=single", *words)).model.stack == stack


def test_measured_tokens_count_more_than_what_is_known_beforehand(known) -> None:
    known(line(), line(speed=10_000.0, compiling=100.0, settings=FOLDED))
    config = settled_of(*HEADLINE)
    assert tuned(config, totals={"ultrachat_ro": 1_000_000}).model.stack == "scanned"
    assert tuned(config, totals={"ultrachat_ro": None}).model.stack == "unrolled"


def test_a_run_keeps_what_belongs_to_its_identity(known, tmp_path) -> None:
    words = (*HEADLINE, f"output_dir={tmp_path}", "name=first")
    begun = tuned(settled_of(*words))
    RunFolder(str(tmp_path), "first").create(begun)
    known()  # another version of the table, or none
    again = with_lengths(with_settings_of_run(composed(*words)), None)
    assert {key: value_of(again, key) for key in KEPT} == {key: value_of(begun, key) for key in KEPT}
    assert tuned(again, is_begun=True).sharding.name == "fsdp"
    known(line(settings={**FOLDED, "model.remat": "none"}), line())
    assert tuned(again, is_begun=True).sharding.name == "replicated"
    assert tuned(again, is_begun=True).model.remat == "save_dots"


def test_a_run_of_before_is_not_changed(known, tmp_path) -> None:
    words = (*HEADLINE, f"output_dir={tmp_path}", "name=before")
    RunFolder(str(tmp_path), "before").create(replace(settled_of(*words), tuned="off"))
    again = with_lengths(with_settings_of_run(composed(*words)), None)
    assert tuned(again, is_begun=True) == again


def test_a_table_is_written_line_by_line_and_read_back(tmp_path) -> None:
    file = tmp_path / "tuned.yaml"
    slow, fast = line(settings=FOLDED, speed=1.0), line()
    for each in (slow, fast, replace(slow, tokens_per_second=2.0), replace(fast, tokens_per_second=11_000.0)):
        write_line(each, file=file)
    assert lines(file) == (fast, replace(slow, tokens_per_second=2.0)), "the faster one stays"
    newer = replace(fast, tokens_per_second=11_000.0, libtpu="0.0.22")
    write_line(newer, file=file)
    assert lines(file) == (newer, replace(slow, tokens_per_second=2.0)), "another compiler's plan is another plan"


def test_a_line_that_no_search_writes_is_refused(tmp_path) -> None:
    file = tmp_path / "tuned.yaml"
    file.write_text("- {model: mistral7b, targets: []}\n")
    with pytest.raises(ConfigError, match=r"tuned\.yaml; a line of it is not what task=plan .* tuned=off"):
        lines(file)


SHIPPED = lines()


ONE_OF_A_MODEL = {each.model: str(each) for each in SHIPPED}.values()


@pytest.mark.parametrize(
    "each", only(ONE_OF_A_MODEL, SHIPPED), ids=lambda each: f"{each.model}-{each.hw}-{each.row_tokens}-{each.words}"
)
def test_a_shipped_line_holds_for_the_command_that_it_is_of(each) -> None:
    """Else a file of conf/model or conf/hw was changed, and the search has to be made again."""
    words = (f"model={each.model}", f"hw={each.hw}", f"trainer.seq_len={each.row_tokens}", f"lora.r={each.rank}")
    words += (f"lora.targets=[{','.join(each.targets)}]", "trainer.global_batch_rows=64")
    made = [composed(*words, *more) for more in ((), ("model.base=int8",))]  # the table does not say of which base
    [config] = [config for config in made if facts_of(config) == each.facts]
    assert with_settings_of(config, each) is not None
    best = fastest(config)
    assert best is not None
    assert best.tokens_per_second >= each.tokens_per_second


def test_less_than_half_of_a_known_speed_is_reported(known, caplog) -> None:
    config = settled_of(*HEADLINE, "tuned=off")
    assert table.tuned_notes(config, 6_000.0) == []
    [note] = table.tuned_notes(config, 5_999.0)
    assert "less than half of the 12,000 tokens/s per chip" in note
    assert "model.stack=unrolled" in note
    assert "5,999 tokens/s per chip are less than half" in caplog.text


@pytest.mark.parametrize(("machine", "memory"), [("colab", None), ("v6e8", 66)])
def test_a_line_s_words_are_what_a_command_takes(machine, memory) -> None:
    """Vector memory that the compiler chooses is null there."""
    found = next(x for x in lines() if x.hw == machine and x.settings["hw.fusion_memory_mib"] == memory)
    config = composed(f"model={found.model}", "data=sample_text", f"hw={machine}", *found.words.split())
    assert {key: value_of(config, key) for key in found.settings} == found.settings


@pytest.mark.parametrize("each", {each.model: each for each in SHIPPED}.values(), ids=lambda each: each.model)
def test_a_line_can_be_planned_again_from_what_it_holds(each) -> None:
    """By `python -m tests.benchmarks.retune`."""
    assert facts_of(composed(*words_of(each), "tuned=off", "task=plan")) == each.facts


def test_every_line_leaves_room_for_other_programs() -> None:
    assert [leaves_room(gib, hw=composed("hw=v6e8").hw) for gib in (31.0, 31.01)] == [True, False]
    for each in lines():
        assert leaves_room(each.hbm_gib, hw=composed(f"hw={each.hw}").hw), each


OF_EACH_KIND = {(line.model, line.settings["model.stack"], line.settings["model.remat"]): line for line in lines()}


@pytest.mark.parametrize(
    "line", OF_EACH_KIND.values(), ids=lambda line: f"{line.model} on {line.hw}, {line.words[:20]}"
)
def test_formulas_give_about_what_the_compiler_gave(line) -> None:
    config = composed(*words_of(line), "tuned=off", "task=plan")
    stage, memory = largest_stage(config, config.model.arch, resolve_stages(config))
    time = estimated_time(config, config.model.arch, geometry=stage.geometry)
    if not read_decoder(config.model.arch).stacked:  # sorting tokens by expert is not counted
        assert 0.7 < line.tokens_per_second / time.tokens_per_second_per_chip < 1.35
    assert 0.9 * line.hbm_gib < memory.total < 1.7 * line.hbm_gib
    if line.settings["model.remat"] == FASTEST:  # chosen by formulas where no line is
        assert MARGIN * memory.total > line.hbm_gib
