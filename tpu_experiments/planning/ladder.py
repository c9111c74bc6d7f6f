"""Search for the largest micro-batch, from what a first compilation's headroom predicts."""

from collections.abc import Callable

from tpu_experiments.planning.plan import ChipMemory, Plan, Rung

Try = Callable[[int], Plan]
"""Maps rows per chip to the plan with that micro-batch."""


def rungs_of(plan: Plan) -> list[int]:
    """Return the micro-batches that divide the rows a chip has of the global batch."""
    rows = plan.micro_batch * plan.accumulation
    return [n for n in range(1, rows + 1) if rows % n == 0]


def predicted_gib(memory: ChipMemory, *, micro: int, at: int) -> float:
    """Predict the memory with `micro` rows, from `memory` with `at` rows.

    All temporaries are taken to grow with the rows.
    """
    return memory.arguments + memory.outputs + memory.temporaries * micro / at


def climb(first: Plan, attempt: Try) -> tuple[int | None, dict[int, Plan], str]:
    """Find the largest micro-batch that compiles within the memory.

    It begins at the prediction and goes up to the first that does not fit, or down to the first that does.

    Returns:
        The micro-batch, None where not even one row fits; every plan made; and a sentence on how well the first
        compilation predicted it.
    """
    sizes, made = rungs_of(first), {first.micro_batch: first}

    def fits(position: int) -> bool:
        micro = sizes[position]
        if micro not in made:
            made[micro] = attempt(micro)
        return made[micro].fits

    limit = first.memory.limit
    within = [n for n in sizes if predicted_gib(first.memory, micro=n, at=first.micro_batch) <= limit]
    guess = at = sizes.index(within[-1]) if within else 0
    if fits(at):
        while at + 1 < len(sizes) and fits(at + 1):
            at += 1
    else:
        while at > 0 and not fits(at - 1):
            at -= 1
        at -= 1
    if at < 0:
        return None, made, f"micro-batch: none fits, the head-room of {first.micro_batch} rows predicted {sizes[guess]}"
    words = (
        f"micro-batch: the largest that fits is {sizes[at]} rows per chip; the head-room of {first.micro_batch} "
        f"predicted {sizes[guess]}, {abs(at - guess)} steps of the ladder away"
    )
    return sizes[at], made, words


def rungs(first: Plan, made: dict[int, Plan]) -> tuple[Rung, ...]:
    """Return every try, the smallest first."""
    return tuple(
        Rung(
            micro_batch=micro,
            total_gib=plan.memory.total,
            fits=plan.fits,
            predicted_gib=None if plan is first else predicted_gib(first.memory, micro=micro, at=first.micro_batch),
        )
        for micro, plan in sorted(made.items())
    )
