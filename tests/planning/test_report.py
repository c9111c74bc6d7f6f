"""plan.json has the keys that were asked for and holds together; page, table and picture show the same figures."""

import json
import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from tests.config.composing import composed
from tests.planning.examples import LORA, MISTRAL, example_plan, plan_that_does_not_fit
from tpu_experiments.planning.chart import memory_parts, plan_chart_svg, time_parts
from tpu_experiments.planning.decoding import Decoding
from tpu_experiments.planning.plan import Plan, analytic_chip_memory, chip_limit_gib
from tpu_experiments.planning.report import plan_json, plan_markdown, plan_table
from tpu_experiments.planning.work import StepSettings, analytic_memory
from tpu_experiments.storage.strict_json import dumps

ASKED = {
    "model",
    "hw",
    "chips",
    "parallel",
    "global_batch",
    "micro_batch",
    "seq_len",
    "fits",
    "hbm_gib_per_chip",
    "num_programs",
    "compile_seconds",
    "flops_per_token",
    "collectives",
    "estimated_cycles",
    "estimated_step_seconds",
    "tokens_per_second_per_chip",
    "mfu",
    "bound_by",
    "hours",
    "usd",
    "usd_per_million_tokens",
    "calibration",
    "versions",
}
SVG = "{http://www.w3.org/2000/svg}"
PLANS = {"fits": example_plan, "does not fit": plan_that_does_not_fit}


def analytic_plan() -> Plan:
    """What a machine without libtpu comes to."""
    hw = composed("hw=colab").hw
    estimate = analytic_memory(
        MISTRAL,
        step=StepSettings(seq_len=1024, micro_rows=1, trainable="lora", lora=LORA, recompute=True),
    )
    memory = analytic_chip_memory(estimate, hw=hw)
    return replace(
        plan_that_does_not_fit(), hw=hw, memory=memory, method="analytic", flags=(), global_batch=4, micro_batch=1
    )


@pytest.mark.parametrize("kind", PLANS)
def test_the_json_has_every_key_and_survives_strictly(kind: str) -> None:
    fields = plan_json(PLANS[kind]())
    assert set(fields) >= ASKED
    assert {"arguments", "temporaries", "outputs", "total", "limit"} <= set(fields["hbm_gib_per_chip"])
    assert {"spot", "on_demand"} == set(fields["usd"])
    assert {"factor", "source"} <= set(fields["calibration"])
    assert {"libtpu", "torch_xla"} <= set(fields["versions"])
    assert fields["libtpu_flags"] == list(PLANS[kind]().flags)
    assert json.loads(dumps(fields)) == json.loads(json.dumps(fields))


def test_the_json_holds_together() -> None:
    plan = example_plan()
    fields = plan_json(plan)
    assert plan.time is not None
    assert all({"kind", "count", "bytes"} <= set(collective) for collective in fields["collectives"])
    assert [c["kind"] for c in fields["collectives"]] == ["all-gather", "all-reduce"]
    assert fields["compile_seconds"] == 141.5
    assert fields["num_programs"] == 2
    assert fields["accumulation"] == 1
    assert fields["rows_per_second"] == pytest.approx(32 / plan.time.total_s)
    parts = fields["flops_per_token_parts"]
    assert sum(value for name, value in parts.items() if name != "model") == pytest.approx(fields["flops_per_token"])
    million = fields["usd_per_million_tokens"]
    assert million == pytest.approx(2.97 / 3600 / fields["tokens_per_second_per_chip"] * 1e6)
    assert fields["usd"]["on_demand"] == pytest.approx(fields["hours"] * 8 * 2.97)
    assert sum(fields["run"]["seconds"].values()) == pytest.approx(3600 * fields["hours"])


def test_what_is_not_known_is_null() -> None:
    fields = plan_json(plan_that_does_not_fit())
    assert not fields["fits"]
    assert {fields[key] for key in ("estimated_step_seconds", "mfu", "bound_by", "hours", "compile_seconds")} == {None}
    assert fields["usd"] == {"spot": None, "on_demand": None}
    assert fields["does_not_fit"]["largest_buffers"] == [
        {"count": 1, "gib": 2.0, "shape": "bf16[32,2048,2048]", "what": "attention scores"}
    ]


def test_the_table_says_what_matters() -> None:
    plan = example_plan()
    text = plan_table(plan)
    assert plan.time is not None
    assert plan.cost is not None
    for shown in (
        "8.60 of 31.25 GiB per chip, +22.65 GiB head-room",
        "2 in all, compiled in 142 s here",
        f"{plan.time.total_s:.3f} s (estimate, compiled), bound by",
        "calibration: a <measurement> & another, +-8 %",
        f"{plan.cost.hours:.2f} h",
        "idle set-up 0.08",
        "europe-west4, 2026-07-01",
        "t4x2",
        "assumed       t4x2: FLOPs at an assumed 35 % of the datasheet's peak",
        "assumed       weights are read at 0.25 GiB/s",
        "2 in all, compiled in 142 s here; no other is compiled later: every stage",
        "fits   1.250          8.60  trainer.micro_batch_rows=4 sharding=fsdp",
        "ladder                   16         33.00      27.80  no",
    ):
        assert shown in text
    assert max(len(line) for line in text.splitlines()) < 200


def test_the_table_of_a_step_that_does_not_fit() -> None:
    text = plan_table(plan_that_does_not_fit())
    for shown in ("DOES NOT FIT", "-4.97 GiB", "Used 36.22G", "attention scores", "trainer.micro_batch_rows=1"):
        assert shown in text
    assert "no estimate: the step does not fit" in text
    assert "unknown for hw=colab" in plan_table(analytic_plan())


def answers_beside(plan: Plan, **changed: Any) -> Plan:
    """The plan with 64 answers of 512 tokens, 511 of them in 64 calls of 8."""
    found = Decoding(
        rows=64,
        prompt_tokens=512,
        new_tokens=512,
        computed_tokens=512,
        prefill_seconds=0.25,
        token_seconds=2.5e-3,
        floor_seconds=2e-3,
        classes={"weights": 0.92, "cache": 0.75, "temporaries": 0.08},
        total_gib=1.75,
        beside_gib=3.95,
        limit_gib=31.25,
        num_devices=8,
        compile_seconds=12.0,
        merge_seconds=0.02,
    )
    return replace(plan, decoding=replace(found, **changed))


def test_answers_have_their_speed_memory_and_price() -> None:
    plan = answers_beside(example_plan())
    text, fields = plan_table(plan), plan_json(plan)["decoding"]
    for shown in (
        "decode        64 answers at once, prompts of 512 tokens + 512 new ones",
        "2.50 ms a token (estimate; floor of the HBM 2.00, 80 %), 25,600 tokens/s",
        "copy of the weights 0.020 + prefill 0.250 + decoding 1.280 = 1.550 s for all",
        "1.75 GiB per chip (weights 0.92, cache 0.75, temporaries 0.08), 3.95 of 31.25 beside what training keeps",
    ):
        assert shown in text
    price = plan.hw.price
    assert price is not None
    dollars = 1.55 / 3600 * 8 * price.usd_per_chip_hour_spot / (64 * 512) * 1e6
    assert fields["usd_per_million_tokens_spot"] == pytest.approx(dollars)
    assert f"${dollars:.4f} spot" in text
    assert fields["fits"]
    assert "decoding" not in plan_json(example_plan())
    assert "per million tokens of answers" in plan_markdown(plan)


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"beside_gib": 32.0}, "32.00 of 31.25 beside what training keeps: DOES NOT FIT"),
     ({"token_seconds": None}, "new ones: no estimate, they do not fit")],
)  # fmt: skip
def test_answers_that_do_not_fit_say_so(changed: dict[str, Any], said: str) -> None:
    plan = answers_beside(example_plan(), **changed)
    assert said in plan_table(plan)
    assert not plan_json(plan)["decoding"]["fits"]


@pytest.mark.parametrize("kind", PLANS)
def test_the_page_is_made_of_whole_tables(kind: str) -> None:
    page = plan_markdown(PLANS[kind](), chart="plan.svg")
    assert "![memory and step time](plan.svg)" in page
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    assert page.count("|---") >= 2
    rendered = MarkdownIt("commonmark").enable("table").render(page)
    assert "|" not in re.sub(r"<t[dh].*?</t[dh]>", "", rendered), "every line of a table is in one"
    assert rendered.count("<table>") == page.count("\n|---")
    assert not re.search(r"<t[dh]>[^<]*  ", rendered), "a renderer collapses what spaces align"


def test_the_page_has_the_datasheet_and_the_other_machines() -> None:
    page = plan_markdown(example_plan())
    for shown in (
        "| peak_tflops_bf16 | 918.0 |",
        "## Collectives",
        "## Micro-batches",
        "| t4x2 | 2 | ? |",
        "libtpu 0.0.21",
        "as in a run: `--xla_tpu_enable_deduplicated_calls=true --xla_tpu_enable_flash_attention=false`",
    ):
        assert shown in page


@pytest.mark.parametrize("make", [example_plan, plan_that_does_not_fit, analytic_plan])
def test_the_bars_are_as_long_as_their_figures(make) -> None:
    plan = make()
    root = ElementTree.fromstring(plan_chart_svg(plan))
    bars = [r for r in root.iter(f"{SVG}rect") if r.get("height") == "44"]
    widths = [float(bar.get("width", 0)) for bar in bars]
    memory, time = memory_parts(plan), time_parts(plan)
    assert len(bars) == len(memory) + len(time)
    (line,) = root.iter(f"{SVG}line")
    scale = (float(line.get("x1", 0)) - 24) / plan.memory.limit
    assert sum(widths[: len(memory)]) == pytest.approx(plan.memory.total * scale, abs=4)
    assert max(float(bar.get("x", 0)) + float(bar.get("width", 0)) for bar in bars) <= 900
    assert max(float(text.get("y", 0)) for text in root.iter(f"{SVG}text")) < float(root.get("height", 0))


def test_the_label_of_a_limit_far_below_the_total_has_a_line_of_its_own() -> None:
    plan = plan_that_does_not_fit()
    plan = replace(plan, memory=replace(plan.memory, temporaries=200.0))
    texts = {
        text.text or "": float(text.get("y", 0))
        for text in ElementTree.fromstring(plan_chart_svg(plan)).iter(f"{SVG}text")
    }
    (heading,) = [y for text, y in texts.items() if text.startswith("Memory per chip")]
    assert texts["HBM 31.25"] - heading > 16
    assert all(abs(y - texts["HBM 31.25"]) > 16 for text, y in texts.items() if text != "HBM 31.25")


def test_the_parts_sum_to_the_whole() -> None:
    plan = example_plan()
    assert plan.time is not None
    assert sum(memory_parts(plan).values()) == pytest.approx(plan.memory.total)
    assert sum(time_parts(plan).values()) == pytest.approx(plan.time.total_s)
    assert list(time_parts(plan)) == ["matmul", "elementwise", "gather scatter", "Pallas kernels", "exposed network"]
    assert next(iter(time_parts(replace(plan, cycles_by_class={})))) == "XLA"


def test_names_cannot_break_the_picture() -> None:
    svg = plan_chart_svg(replace(example_plan(), model="<b> & co"))
    texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert texts[0] is not None
    assert texts[0].startswith("<b> & co on v6e8")


def test_an_analytic_plan_is_called_one() -> None:
    plan = analytic_plan()
    assert plan_json(plan)["method"] == "analytic"
    assert plan_json(plan)["hbm_gib_per_chip"]["source"] == "analytic"
    assert "(analytic; train)" in plan_table(plan)
    assert sum(plan.memory.classes.values()) == pytest.approx(plan.memory.total)


def test_a_plan_for_a_cpu_has_no_limit_and_still_a_picture() -> None:
    plan = example_plan()
    hw = composed("hw=cpu").hw
    assert chip_limit_gib(hw) == float("inf")
    assert chip_limit_gib(composed("hw=v5e8").hw) == 15.75
    plan = replace(plan, hw=hw, memory=replace(plan.memory, limit=float("inf")))
    assert not list(ElementTree.fromstring(plan_chart_svg(plan)).iter(f"{SVG}line"))
    assert json.loads(dumps(plan_json(plan)))["hbm_gib_per_chip"]["limit"] is None
