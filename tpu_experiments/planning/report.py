"""A plan as JSON, as lines on the terminal and as one Markdown page, from the same tables; chart.py makes a picture."""

from dataclasses import asdict
from typing import Any

from tpu_experiments.config.escaping import for_markdown
from tpu_experiments.config.hardware import PriceConfig
from tpu_experiments.pages.table import markdown_line
from tpu_experiments.planning.money import Dollars
from tpu_experiments.planning.plan import Comparison, Plan, Tried

Cells = tuple[str, ...]


def comparison_cells(plan: Plan) -> list[Cells]:
    """Return one row per machine, this plan's first; empty without a comparison."""
    if not plan.comparisons:
        return []
    rows = [plan.as_comparison(), *plan.comparisons]
    speeds = [row.tokens_per_second for row in rows if row.tokens_per_second]
    header = (
        "hw",
        "chips",
        "fits",
        "step s",
        "tokens/s",
        "speed-up",
        "hours",
        "$ spot",
        "$ listed",
        "$/M tokens",
        "from",
    )
    return [header, *(_comparison(row, slowest=min(speeds, default=1.0)) for row in rows)]


def _comparison(row: Comparison, *, slowest: float) -> Cells:
    speed = row.tokens_per_second
    return (
        row.hw,
        str(row.chips),
        {True: "yes", False: "no", None: "?"}[row.fits],
        formatted(row.step_seconds, digits=3),
        formatted(speed, digits=0),
        "-" if speed is None else f"{speed / slowest:.1f}x",
        formatted(row.hours, digits=2),
        dollars_text(row.usd.spot),
        dollars_text(row.usd.on_demand),
        dollars_text(row.usd_per_million_tokens.on_demand),
        row.method,
    )


def ladder_cells(plan: Plan) -> list[Cells]:
    """Return one row per micro-batch tried; empty without a ladder."""
    if not plan.ladder:
        return []
    header = ("rows per chip", "GiB per chip", "predicted", "fits")
    return [
        header,
        *(
            (
                str(r.micro_batch),
                formatted(r.total_gib, digits=2),
                formatted(r.predicted_gib, digits=2),
                yes_or_no(r.fits),
            )
            for r in plan.ladder
        ),
    ]


def search_cells(plan: Plan) -> list[Cells]:
    """Return one row per combination, the best first; empty without a search."""
    if not plan.search:
        return []
    header: Cells
    if any(tried.iteration for tried in plan.search):
        header = (
            "outcome",
            "iteration s",
            "answers/s",
            "$ spot",
            "$ listed, 1,000 answers",
            "GiB per chip",
            "settings",
        )
        return [header, *(_rollout(tried, price=plan.hw.price) for tried in plan.search)]
    header = ("outcome", "step s", "GiB per chip", "settings")
    return [
        header,
        *(
            (t.outcome, formatted(t.step_seconds, digits=3), formatted(t.total_gib, digits=2), settings(t.overrides))
            for t in plan.search
        ),
    ]


def _rollout(tried: Tried, *, price: PriceConfig | None) -> Cells:
    found = tried.iteration
    usd = found.usd_per_thousand_answers(price) if found else Dollars(None, None)
    return (
        tried.outcome,
        formatted(found.seconds if found else None, digits=3),
        formatted(found.answers_per_second if found else None, digits=0),
        dollars_text(usd.spot),
        dollars_text(usd.on_demand),
        formatted(tried.total_gib, digits=2),
        settings(tried.overrides),
    )


def settings(overrides: tuple[str, ...]) -> str:
    """Join overrides in the form that the command line takes."""
    return " ".join(overrides) or "as configured"


def program_cells(plan: Plan) -> list[Cells]:
    """Return one row per program of the run."""
    header = ("program", "batch", "stages", "compiled in s", "GiB per chip", "estimated s")
    return [
        header,
        *(
            (
                p.name,
                p.shape,
                ", ".join(p.stages) or "-",
                formatted(p.compile_seconds, digits=0),
                formatted(p.total_gib, digits=2),
                formatted(p.estimated_seconds, digits=4),
            )
            for p in plan.programs
        ),
    ]


def aligned(rows: list[Cells]) -> list[str]:
    """Return lines with columns as wide as their widest cell, the last one left-aligned."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))] if rows else []
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]


def formatted(value: float | None, *, digits: int) -> str:
    """Format a figure with thousands separators; `-` where unknown."""
    return "-" if value is None else f"{value:,.{digits}f}"


def yes_or_no(value: bool) -> str:
    """Return "yes" or "no"."""
    return "yes" if value else "no"


def both_prices(dollars: Dollars) -> str:
    """Format both prices: `$1.20 spot, $3.40 on demand`."""
    return f"{dollars_text(dollars.spot)} spot, {dollars_text(dollars.on_demand)} on demand"


def dollars_text(usd: float | None) -> str:
    """Format dollars with two decimals, with four below a dollar; `-` where unknown."""
    if usd is None:
        return "-"
    return f"${usd:,.2f}" if usd >= 1 or usd == 0 else f"${usd:.4f}"


ESTIMATE = "estimate"
NO_OTHER = "no other is compiled later: every stage, the evaluation and the sample have one batch shape each"


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the content of plan.json; what is not known is null."""
    made = {"versions": plan.versions, "libtpu_flags": list(plan.flags)}
    return _what(plan) | _memory(plan) | _effort(plan) | _length(plan) | _decoding(plan) | _iteration(plan) | made


def _what(plan: Plan) -> dict[str, Any]:
    hw = plan.hw
    return {
        "name": plan.name,
        "method": plan.method,
        "model": plan.model,
        "data": list(plan.data),
        "job": plan.job,
        "programs_key": plan.programs_key,
        "hw": hw.name,
        "topology": hw.topology,
        "chips": hw.num_devices,
        "chip": asdict(hw.chip) if hw.chip else None,
        "parallel": hw.parallel,
        "sharding": plan.sharding,
        "global_batch": plan.global_batch,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "seq_len": plan.seq_len,
        "notes": list(plan.notes),
    }


def _memory(plan: Plan) -> dict[str, Any]:
    memory, shortage = plan.memory, plan.shortage
    return {
        "fits": plan.fits,
        "hbm_gib_per_chip": {
            "arguments": memory.arguments,
            "temporaries": memory.temporaries,
            "outputs": memory.outputs,
            "total": memory.total,
            "limit": memory.limit,
            "headroom": memory.headroom,
            "classes": memory.classes,
            "source": memory.source,
            "program": plan.largest_program,
        },
        "does_not_fit": None
        if shortage is None
        else {
            "message": shortage.message,
            "used_gib": shortage.used_gib,
            "limit_gib": shortage.limit_gib,
            "largest_buffers": [
                {"count": b.count, "gib": b.gib, "shape": b.shape, "what": b.words} for b in shortage.buffers
            ],
            "remedies": list(shortage.remedies),
        },
        "micro_batch_ladder": [asdict(rung) for rung in plan.ladder],
        "search": [asdict(tried) for tried in plan.search],
        "orders": [asdict(order) for order in plan.orders],
        "num_programs": len(plan.programs),
        "why_no_other_program": NO_OTHER,
        "programs": [asdict(program) for program in plan.programs],
        "compile_seconds": plan.compile_seconds,
    }


def _effort(plan: Plan) -> dict[str, Any]:
    time, work = plan.time, plan.work
    transfers = work.transfers if work else ()
    return {
        "flops_per_token": plan.flops.total,
        "flops_per_token_parts": asdict(plan.flops) | {"model": plan.flops.model},
        "collectives": [
            {
                "kind": t.kind,
                "count": t.count,
                "bytes": t.num_bytes,
                "overlapped": t.num_overlapped,
                "chips": t.group_size,
            }
            for t in transfers
        ],
        "kernels": [asdict(kernel) for kernel in work.kernels] if work else [],
        "estimated_cycles": work.cycles if work else None,
        "estimated_cycles_by_class": plan.cycles_by_class,
        "estimated_step_seconds": time.total_s if time else None,
        "estimated_step_parts": {
            "compute": time.compute_s,
            "kernels": time.kernels_s,
            "network": time.network_s,
            "exposed_network": time.exposed_network_s,
            "uncalibrated_total": time.uncalibrated_s,
        }
        if time
        else None,
        "estimated_step_by_part": plan.seconds_by_part if time else None,
        "tokens_per_second_per_chip": time.tokens_per_second_per_chip if time else None,
        "rows_per_second": plan.global_batch / time.total_s if time else None,
        "mfu": time.mfu if time else None,
        "bound_by": time.bound_by if time else None,
        "calibration": asdict(plan.calibration),
    }


def _length(plan: Plan) -> dict[str, Any]:
    cost, run = plan.cost, plan.run
    million = plan.usd_per_million_tokens
    return {
        "hours": cost.hours if cost else None,
        "hours_range": cost.hours_range if cost else None,
        "usd": asdict(cost.usd) if cost else asdict(Dollars(None, None)),
        "usd_range": asdict(cost.usd_range) if cost else None,
        "usd_per_epoch": asdict(cost.usd_per_epoch) if cost else None,
        "usd_per_million_tokens": million.on_demand,
        "usd_per_million_tokens_spot": million.spot,
        "spot_saving": cost.spot_saving if cost else None,
        "price": asdict(plan.hw.price) if plan.hw.price else None,
        "run": None
        if run is None
        else {
            "optimizer_steps": run.steps,
            "tokens": run.tokens,
            "epochs": run.epochs,
            "seconds": run.parts,
            "stages": [asdict(stage) for stage in run.stages],
            "assumptions": list(run.notes),
        },
        "comparisons": [asdict(row) for row in plan.comparisons],
    }


def _decoding(plan: Plan) -> dict[str, Any]:
    found = plan.decoding
    if found is None:
        return {}
    million = found.usd_per_million_tokens(plan.hw.price)
    further = {
        "fits": found.fits,
        "decode_seconds": found.decode_seconds,
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
        "share_of_floor": found.share_of_floor,
        "usd_per_million_tokens": million.on_demand,
        "usd_per_million_tokens_spot": million.spot,
    }
    return {"decoding": asdict(found) | further}


def _iteration(plan: Plan) -> dict[str, Any]:
    found = plan.iteration
    if found is None:
        return {}
    thousand = found.usd_per_thousand(plan.hw.price)
    further = {
        "seconds": found.seconds,
        "answers_per_second": found.answers_per_second,
        "usd_per_thousand": thousand.on_demand,
        "usd_per_thousand_spot": thousand.spot,
    }
    return {"iteration": asdict(found) | further}


def plan_table(plan: Plan) -> str:
    """Return the lines for the terminal."""
    rows = [*summary_rows(plan), *_table_rows(plan)]
    return "\n".join(f"  {label:<13} {text}" for label, text in rows)


def summary_rows(plan: Plan, *, has_tables: bool = False) -> list[tuple[str, str]]:
    """Return label and text of every line; a line with an empty label continues the one above.

    Args:
        has_tables: the programs have a table of their own, and no lines here.
    """
    hw, memory = plan.hw, plan.memory
    sharing = "chip" if plan.sharing_rows == 1 else f"{plan.sharing_rows} chips"
    divided = "" if plan.sharing_rows == 1 else f" / {plan.sharing_rows}"
    rows = [
        (
            "plan",
            f"{plan.model} on {hw.name} ({hw.num_devices} x {hw.chip.name if hw.chip else hw.device}), {plan.method}",
        ),
        (
            "batch",
            f"{plan.global_batch} rows = {plan.micro_batch} per {sharing} x {plan.accumulation} accumulated x "
            f"{hw.num_devices} chips{divided}, {plan.seq_len:,} tokens a row",
        ),
        (
            "fits" if plan.fits else "DOES NOT FIT",
            f"{memory.total:.2f} of {memory.limit:.2f} GiB per chip, {memory.headroom:+.2f} GiB head-room "
            f"({memory.source}; {plan.largest_program})",
        ),
        *(("", f"{gib:7.2f} GiB  {name}") for name, gib in memory.classes.items()),
        *_shortage_rows(plan),
        *_program_rows(plan)[: 1 if has_tables else None],
        *_order_rows(plan),
        ("work", f"{plan.flops.total / 1e9:.2f} GFLOP per token, of which {_parts_of_flops(plan)}"),
    ]
    assumed = [("assumed", assumption) for assumption in assumptions(plan)]
    return (
        rows
        + _time_rows(plan)
        + _money_rows(plan)
        + _decoding_rows(plan)
        + _iteration_rows(plan)
        + assumed
        + [("note", note) for note in plan.notes]
    )


def _shortage_rows(plan: Plan) -> list[tuple[str, str]]:
    if plan.shortage is None:
        return []
    buffers = [("", f"{_times(b.count)}{b.gib:7.2f} GiB  {b.words}  {b.shape}") for b in plan.shortage.buffers]
    by = "compiler" if plan.method == "compiled" else "why"
    return [(by, plan.shortage.message), *buffers, *(("try", remedy) for remedy in plan.shortage.remedies)]


def _times(count: int) -> str:
    return f"{count} x" if count > 1 else ""


def _program_rows(plan: Plan) -> list[tuple[str, str]]:
    if not plan.programs:
        return []
    seconds = plan.compile_seconds
    compiled = "not compiled" if seconds is None else f"compiled in {seconds:.0f} s here"
    return [
        ("programs", f"{len(plan.programs)} in all, {compiled}; {NO_OTHER}"),
        *(("", line) for line in aligned([(*row, "") for row in program_cells(plan)])),
    ]


def _order_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return the orders of the chips that were compared, and the collectives that are others in each of them."""
    if not plan.orders:
        return []
    differing = [order for order in plan.orders if order.differs]
    rows = [("orders", f"{len(plan.orders)} other orders of the chips compiled, {len(differing)} to another program")]
    for order in differing:
        listed = ", ".join(map(str, order.devices))
        what = f"{len(order.changed)} kinds of collectives and {order.other_instructions} other instructions differ"
        rows += [("", f"{listed}: {what}"), *(("", f"  {changed}") for changed in order.changed)]
    if any(order.rounds_otherwise for order in differing):
        rows.append(("", "sums are rounded otherwise there: a run that does not learn may learn in another order"))
    elif differing:
        rows.append(("", "no sum is among them: values are moved as they are, and results are the same"))
    return rows


def _parts_of_flops(plan: Plan) -> str:
    parts = {name.replace("_", " "): value for name, value in asdict(plan.flops).items() if value}
    return ", ".join(f"{name} {100 * value / plan.flops.total:.0f} %" for name, value in parts.items())


def _time_rows(plan: Plan) -> list[tuple[str, str]]:
    time, calibration = plan.time, plan.calibration
    if time is None:
        return [("time", "no estimate: the step does not fit")]
    error = "" if calibration.relative_error is None else f", +-{100 * calibration.relative_error:.0f} %"
    parts = f"XLA {time.compute_s:.3f} + kernels {time.kernels_s:.3f} + exposed network {time.exposed_network_s:.3f} s"
    return [
        (
            "step",
            f"{time.total_s:.3f} s ({ESTIMATE}, {time.method}), bound by {time.bound_by}, MFU {100 * time.mfu:.1f} %",
        ),
        ("", f"{parts}, x {calibration.factor:.3f} (calibration: {calibration.source}{error})"),
        *_part_rows(plan),
        (
            "speed",
            f"{time.tokens_per_second_per_chip:,.0f} tokens/s per chip, {plan.global_batch / time.total_s:,.1f} rows/s",
        ),
    ]


def _part_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return the step's time by part, without the parts that take none."""
    shares = ", ".join(f"{part} {1000 * second:,.1f}" for part, second in plan.seconds_by_part.items() if second)
    return [("", f"by part, ms: {shares}")] if shares else []


def _money_rows(plan: Plan) -> list[tuple[str, str]]:
    rows, cost, run = [], plan.cost, plan.run
    if cost and run:
        span = f" ({cost.hours_range[0]:.2f} to {cost.hours_range[1]:.2f})" if cost.hours_range else ""
        parts = ", ".join(f"{name} {seconds / 3600:.2f}" for name, seconds in run.parts.items() if seconds)
        rows += [("run", f"{run.steps:,} steps, {run.tokens:,} tokens, {cost.hours:.2f} h{span}: {parts}")]
        rows += [("money", f"{both_prices(cost.usd)} for the run; {both_prices(cost.usd_per_epoch)} per epoch")]
    if plan.time and plan.hw.price is not None:
        price = plan.hw.price
        rows += [
            ("", f"{both_prices(plan.usd_per_million_tokens)} per million tokens in steady state"),
            ("price", f"{price.region}, {price.date}: {price.source}"),
        ]
    if plan.hw.price is None:
        rows += [("price", f"unknown for hw={plan.hw.name}; set hw.price in conf/hw")]
    return rows


def _decoding_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return what answers take that are written beside training."""
    found = plan.decoding
    if found is None:
        return []
    what = f"{found.rows:,} answers at once, prompts of {found.prompt_tokens:,} tokens + {found.new_tokens:,} new ones"
    parts = ", ".join(f"{name} {gib:.2f}" for name, gib in found.classes.items())
    beside = (
        f"{found.total_gib:.2f} GiB per chip ({parts}), {found.beside_gib:.2f} of {found.limit_gib:.2f} beside what "
        "training keeps"
    )
    if found.token_seconds is None or found.prefill_seconds is None or found.decode_seconds is None:
        return [("decode", f"{what}: no estimate, they do not fit"), ("", beside)]
    words = "" if found.fits else ": DOES NOT FIT"
    rows = [
        ("decode", what),
        (
            "",
            f"{1e3 * found.token_seconds:.2f} ms a token ({ESTIMATE}; floor of the HBM "
            f"{1e3 * found.floor_seconds:.2f}, {100 * (found.share_of_floor or 0):.0f} %), "
            f"{found.tokens_per_second or 0:,.0f} tokens/s",
        ),
        (
            "",
            f"copy of the weights {found.merge_seconds:.3f} + prefill {found.prefill_seconds:.3f} + decoding "
            f"{found.decode_seconds:.3f} = {found.seconds or 0:.3f} s for all",
        ),
        ("", f"{beside}{words}"),
    ]
    if plan.hw.price is not None:
        million = found.usd_per_million_tokens(plan.hw.price)
        rows += [("", f"{both_prices(million)} per million tokens of answers, their prompts included")]
    return rows


def _iteration_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return what an iteration takes of a run on its own answers."""
    found = plan.iteration
    if found is None:
        return []
    parts = " + ".join(f"{name} {seconds:.3f}" for name, seconds in found.parts.items() if seconds)
    what = f"{found.prompts:,} prompts x {found.samples:,} answers, {found.updates} optimizer steps"
    rows = [
        ("iteration", f"{found.seconds:.3f} s ({ESTIMATE}): {what}, {found.answers_per_second:,.0f} answers/s"),
        ("", parts),
    ]
    if plan.hw.price is not None:
        rows += [("", f"{both_prices(found.usd_per_thousand(plan.hw.price))} per 1,000 iterations")]
    return rows


def _table_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return the rows that the page shows as separate tables."""
    tables = {"tried": search_cells(plan), "ladder": ladder_cells(plan), "beside": comparison_cells(plan)}
    return [(label, line) for label, cells in tables.items() for line in aligned(cells)]


def assumptions(plan: Plan) -> list[str]:
    """Return the assumptions behind the length of the run and the rows of other machines."""
    return [*(plan.run.notes if plan.run else ()), *(row.assumption for row in plan.comparisons if row.assumption)]


def plan_markdown(plan: Plan, *, chart: str | None = None) -> str:
    """Return one Markdown page: figures as tables, the chip's datasheet, the assumptions.

    Args:
        chart: path of the picture, relative to the page.
    """
    verdict = "fits" if plan.fits else "does **not** fit"
    lines = [
        f"# {for_markdown(f'{plan.model} on {plan.hw.name}')}",
        "",
        f"The step {verdict} ({plan.method}). Every time is an {ESTIMATE}.",
    ]
    lines += ["", f"![memory and step time]({chart})"] if chart else []
    summary = summary_rows(plan, has_tables=True)
    lines += ["", *_table([("", ""), *summary], is_first_bold=True)]
    if plan.hw.chip:
        facts = asdict(plan.hw.chip)
        lines += ["", "## Chip", "", *_table([("datasheet", ""), *((k, str(v)) for k, v in facts.items())])]
    if plan.work and plan.work.transfers:
        moved = [
            (t.kind, f"{t.count:,}", f"{t.num_bytes / 1e9:.3f}", f"{t.num_overlapped:,}") for t in plan.work.transfers
        ]
        lines += ["", "## Collectives", "", *_table([("kind", "count", "GB per chip and step", "overlapped"), *moved])]
    for title, cells in (
        ("Programs", program_cells(plan) if plan.programs else []),
        ("Micro-batches", ladder_cells(plan)),
        ("Settings tried", search_cells(plan)),
        ("Machines side by side", comparison_cells(plan)),
    ):
        lines += ["", f"## {title}", "", *_table(cells)] if cells else []
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    flags = f" Flags of libtpu, as in a run: `{' '.join(plan.flags)}`." if plan.flags else ""
    return "\n".join([*lines, "", f"Made with {versions}.{flags}", ""])


def _table(rows: list[tuple[str, ...]], *, is_first_bold: bool = False) -> list[str]:
    cells = [[for_markdown(cell) for cell in row] for row in rows]
    if is_first_bold:
        cells = [[f"**{first}**" if first else "", *others] for first, *others in cells]
    lines = [markdown_line(row) for row in cells]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]
