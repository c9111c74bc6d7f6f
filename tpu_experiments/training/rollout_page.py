"""Answers of some iterations with their rewards, as a page and as lines for the log."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.data.documents import beginning
from tpu_experiments.data.prompts import Prompt
from tpu_experiments.pages.page import page
from tpu_experiments.training.rollouts import Rollout

PAGE = "rollouts.html"
GROUPS = 3
"""Prompts shown of an iteration."""
ITERATIONS = 5
"""Iterations on a page."""
ANSWERS = 16
"""Answers shown to a prompt."""
MAX_CHARS = 2000
"""Characters of a prompt or an answer on a page."""


def shown_iterations(every: Sequence[int]) -> list[int]:
    """Return at most `ITERATIONS` of the iterations, evenly spaced, the last first.

    >>> shown_iterations(range(9))
    [8, 6, 4, 2, 0]
    """
    places = np.linspace(0, len(every) - 1, num=min(ITERATIONS, len(every)))
    return [every[round(place)] for place in places[::-1].tolist()]


def rollout_page(
    rollouts: Sequence[Rollout], *, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, name: str
) -> str:
    """Return the HTML of some iterations, of which the first is the newest.

    Args:
        prompts: those to train on, which the rollouts number.
        name: of the run.
    """
    newest = rollouts[0]
    tokens_N = newest.lengths_N - newest.prompt_lengths_N
    tiles = [
        (each, _shown(_mean(newest.rewards_NF[:, number])), "mean reward of the newest answers")
        for number, each in enumerate(newest.reward_names)
    ]
    tiles += [
        ("Length", f"{tokens_N.mean():.0f}", f"tokens of an answer, at most {tokens_N.max()}"),
        ("Cut off", f"{newest.is_cut_N.mean():.0%}", "of the answers have no end"),
        (
            "No spread",
            f"{_without_spread(newest):.0%}",
            "of the prompts, whose answers are all worth the same",
        ),
    ]
    return page(
        "rollouts.html",
        title=f"Answers of {name}",
        about=f"{name}: some prompts of {len(rollouts)} iterations, the newest first. An advantage above 0 makes the "
        "model write such an answer more often, one below 0 less often.",
        tiles=tiles,
        head=[*newest.reward_names, "advantage", "tokens", "answer"],
        iterations=[_section(found, prompts=prompts, tokenizer=tokenizer) for found in rollouts],
    )


def answer_lines(found: Rollout, *, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a prompt of an iteration with the best and the worst of its answers, for the log.

    The prompt is the first whose answers are not worth the same.
    """
    group = next((rows for rows in _groups(found) if found.advantage_N[rows].any()), _groups(found)[0])
    order = sorted(group, key=lambda row: -float(found.advantage_N[row]))
    lines = [f"answers to {beginning(prompts[int(found.prompt_index_N[group[0]])].text)!r}:"]
    for row in dict.fromkeys((order[0], order[-1])):
        worth = ", ".join(
            f"{name} {_shown(value)}"
            for name, value in zip(found.reward_names, found.rewards_NF[row].tolist(), strict=True)
        )
        lines.append(f"  {worth}: {beginning(_text(found, row, tokenizer=tokenizer))!r}")
    return lines


def _section(found: Rollout, *, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    groups = []
    for rows in _groups(found)[:GROUPS]:
        answers = []
        for row in rows[:ANSWERS]:
            text = _begun(_text(found, row, tokenizer=tokenizer)) + (" (cut off)" if found.is_cut_N[row] else "")
            rewards = map(_shown, found.rewards_NF[row].tolist())
            length = int(found.lengths_N[row] - found.prompt_lengths_N[row])
            answers.append((*rewards, f"{found.advantage_N[row]:+.2f}", f"{length:,}", text))
        more = f"{ANSWERS} of {len(rows):,} answers" if len(rows) > ANSWERS else ""
        groups.append((_begun(prompts[int(found.prompt_index_N[rows[0]])].text), more, answers))
    means = (f"{name} {_shown(_mean(found.rewards_NF[:, number]))}" for number, name in enumerate(found.reward_names))
    return {
        "title": f"Written after step {found.version:,}",
        "note": f"mean of {len(found.lengths_N):,} answers: {', '.join(means)}",
        "groups": groups,
    }


def _groups(found: Rollout) -> list[list[int]]:
    """Return the rows of each prompt, which are adjacent."""
    begins = np.flatnonzero(np.diff(found.prompt_index_N, prepend=-1))
    return [part.tolist() for part in np.split(np.arange(len(found.prompt_index_N)), begins[1:])]


def _without_spread(found: Rollout) -> float:
    groups = _groups(found)
    return sum(not found.advantage_N[rows].any() for rows in groups) / len(groups)


def _text(found: Rollout, row: int, *, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(found.answer_ids(row), skip_special_tokens=True))


def _begun(text: str) -> str:
    """Return at most `MAX_CHARS` characters of a text, with controls as escapes."""
    return for_terminal(text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 1]}…")


def _mean(values_N: NDArray[np.float64]) -> float:
    known = values_N[~np.isnan(values_N)]
    return float(known.mean()) if len(known) else np.nan


def _shown(value: float) -> str:
    return "none" if np.isnan(value) else f"{value:.2f}"
