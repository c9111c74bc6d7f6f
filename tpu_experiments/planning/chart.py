"""The chart of a plan as hand-written SVG: memory by class against the HBM limit, step time by part."""

from dataclasses import dataclass
from xml.sax.saxutils import escape

from tpu_experiments.planning.plan import Plan

WIDTH, LEFT, RIGHT, BAR = 900, 24, 24, 44
SPAN = WIDTH - LEFT - RIGHT
LINE = 20
LIMIT_GAP = 30
"""Space between heading and bar, for the label of the HBM line."""
LETTER = 7.0
"""Width of a letter at 12 px, rounded up."""
# Okabe and Ito's palette, distinguishable with any colour vision; without yellow, which is hard to see on white.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#332288", "#88CCEE")
LIGHT = {"#E69F00", "#CC79A7", "#56B4E9", "#88CCEE"}
"""Those of the colours on which white letters are hard to read."""
OVER = "#B00020"
ROOM = "#BBBBBB"


@dataclass(frozen=True)
class Unit:
    """Unit in which the figures of one bar are written; small plans use MiB and ms."""

    name: str
    factor: float
    digits: int

    def number(self, value: float) -> str:
        """Format without the unit's name."""
        return f"{value * self.factor:.{self.digits}f}"

    def shown(self, value: float) -> str:
        """Format with the unit's name."""
        return f"{self.number(value)} {self.name}"


def plan_chart_svg(plan: Plan) -> str:
    """Return an SVG document of two bars with their legends."""
    memory, top = _memory_bar(plan, top=56)
    time, bottom = _time_bar(plan, top=top + 36)
    machine = f"{plan.hw.num_devices} x {plan.hw.chip.name}" if plan.hw.chip else plan.hw.device
    title = f"{plan.model} on {plan.hw.name} ({machine}), {plan.micro_batch} x {plan.seq_len:,} tokens per chip"
    body = [_text(LEFT, 30, title, size=17, weight="bold"), *memory, *time]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom}" viewBox="0 0 {WIDTH} {bottom}" '
        f'font-family="sans-serif" role="img">\n<title>{escape(title)}</title>\n'
        f'<rect width="{WIDTH}" height="{bottom}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def memory_parts(plan: Plan) -> dict[str, float]:
    """Return GiB by class; the rest of the total is `other`."""
    memory = plan.memory
    parts = dict(memory.classes) or {"arguments": memory.arguments, "temporaries": memory.temporaries}
    rest = memory.total - sum(parts.values())
    return parts | ({"other": rest} if rest > 0.005 * memory.total else {})


def time_parts(plan: Plan) -> dict[str, float]:
    """Return calibrated seconds by part, which sum to the step.

    XLA's part is split by class of fusion where that is known.
    """
    time = plan.time
    if time is None:
        return {}
    cycles = {name: count for name, count in plan.cycles_by_class.items() if count > 0}
    whole = sum(cycles.values())
    xla = {name: time.compute_s * count / whole for name, count in cycles.items()} if whole else {"XLA": time.compute_s}
    parts = xla | {"Pallas kernels": time.kernels_s, "exposed network": time.exposed_network_s}
    scale = time.total_s / time.uncalibrated_s
    return {name.replace("_", " "): seconds * scale for name, seconds in parts.items() if seconds > 0}


def _memory_bar(plan: Plan, *, top: int) -> tuple[list[str], int]:
    memory, parts = plan.memory, memory_parts(plan)
    verdict = "fits" if plan.fits else "does not fit"
    heading = f"Memory per chip: {memory.total:.2f} of {memory.limit:.2f} GiB, {verdict} ({memory.source})"
    known = memory.limit < float("inf")
    scale = SPAN / (1.04 * max(memory.total, memory.limit if known else 0.0))
    unit = Unit("MiB", 1024.0, 1) if memory.total < 1 else Unit("GiB", 1.0, 2)
    bar, bottom = _bar(parts, heading=heading, unit=unit, top=top, scale=scale, gap=LIMIT_GAP)
    if known:
        x, y = LEFT + memory.limit * scale, top + LIMIT_GAP
        bar.insert(0, f'<path d="M{LEFT} {y}H{x:.1f}V{y + BAR}H{LEFT}Z" fill="none" stroke="{ROOM}"/>')
        bar.append(
            f'<line x1="{x:.1f}" y1="{y - 5}" x2="{x:.1f}" y2="{y + BAR + 5}" stroke="{OVER}" stroke-width="2.5"/>'
        )
        bar.append(_text(x - 4, y - 8, f"HBM {memory.limit:.2f}", fill=OVER, anchor="end"))
    return bar, bottom


def _time_bar(plan: Plan, *, top: int) -> tuple[list[str], int]:
    time, parts = plan.time, time_parts(plan)
    if time is None:
        return [_text(LEFT, top, "Step time: no estimate, the step does not fit", size=14)], top + LINE
    unit = Unit("ms", 1000.0, 3) if time.total_s < 0.1 else Unit("s", 1.0, 3)
    heading = (
        f"Step time (estimate): {unit.shown(time.total_s)}, bound by {time.bound_by}, MFU {100 * time.mfu:.1f} %, "
        f"calibration x {plan.calibration.factor:.2f}"
    )
    return _bar(parts, heading=heading, unit=unit, top=top, scale=SPAN / (1.04 * sum(parts.values())))


def _bar(
    parts: dict[str, float], *, heading: str, unit: Unit, top: int, scale: float, gap: int = 14
) -> tuple[list[str], int]:
    """Draw a stacked bar with its heading above and its legend below; also returns the y at which it ends."""
    drawn, x, y = [_text(LEFT, top, heading, size=14)], float(LEFT), top + gap
    legend_x, legend_y = LEFT, y + BAR + 22
    for index, (name, value) in enumerate(parts.items()):
        colour, width = COLOURS[index % len(COLOURS)], value * scale
        label = f"{name} {unit.shown(value)}"
        drawn.append(
            f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{BAR}" fill="{colour}">'
            f"<title>{escape(label)}</title></rect>"
        )
        number = unit.number(value)
        if width > LETTER * (len(number) + 2):
            ink = "#222222" if colour in LIGHT else "#ffffff"
            drawn.append(_text(x + width / 2, y + BAR / 2 + 4, number, fill=ink, anchor="middle"))
        length = int(LETTER * len(label)) + 34
        if legend_x + length > WIDTH - RIGHT:
            legend_x, legend_y = LEFT, legend_y + LINE
        drawn.append(f'<rect x="{legend_x}" y="{legend_y - 10}" width="12" height="12" fill="{colour}"/>')
        drawn.append(_text(legend_x + 17, legend_y, label))
        x, legend_x = x + width, legend_x + length
    return drawn, legend_y + LINE


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    fill: str = "#222222",
    anchor: str = "start",
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
