"""Statistics from the manifests of prepared data, and warnings about suspicious ones."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Manifest = dict[str, Any]
"""The manifest.json of one source at one row length."""

MIN_SUPERVISED_SHARE = 0.02
MAX_REPORTED_SHARE = 0.2
MIN_PACKING_EFFICIENCY = 0.9
MAX_WITHOUT_PROMPT = 0.03
"""Maximum share of the supervised training tokens in answers whose question is in another row."""
ROW_MULTIPLE = 128
"""Recommended row lengths are multiples of this, which a TPU computes without padding."""
ANSWERS_SHOWN = 8
"""Answers of a conversation that are listed separately; later ones are joined."""


@dataclass(frozen=True)
class Finding:
    """A suspicious property of the data, as a sentence."""

    severity: Literal["warning", "error"]
    source: str
    message: str
    """`data.<name>; the problem, the numbers; the remedy.`"""


def audit_findings(manifests: Sequence[Manifest]) -> list[Finding]:
    """Return the findings, errors first, each in the order of the manifests.

    What is true of a source at every row length is said once.
    """
    found = dict.fromkeys(finding for manifest in manifests for finding in _findings_of(manifest))
    return sorted(found, key=lambda finding: finding.severity)


def percent(part: float, whole: float) -> str:
    """Format a share as `22.5 %`, or a dash where the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return (words, count) of every count above 0, the largest first; slugs become words."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [(slug.replace("_", " "), count) for slug, count in ordered if count]


def supervised_by_answer(split: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Return (name, supervised tokens, documents that have it) of the 1st, 2nd, ... answer.

    From `ANSWERS_SHOWN` on, answers are joined.
    """
    tokens = [int(count) for count in split.get("supervised_per_turn") or []]
    documents = [int(count) for count in split.get("documents_per_turn") or []]
    documents += [0] * (len(tokens) - len(documents))
    named = [(f"answer {i + 1}", tokens[i], documents[i]) for i in range(len(tokens))]
    if len(named) <= ANSWERS_SHOWN:
        return named
    late = ANSWERS_SHOWN - 1
    # A document with any later answer also has the first of the joined ones, so that one's count is theirs.
    return [*named[:late], (f"answer {ANSWERS_SHOWN} on", sum(tokens[late:]), documents[late])]


def overlaps_of(manifest: Manifest) -> list[tuple[str, str, str, int]]:
    """Return (split, content or prompt, the split it is also in, count) of every pair compared."""
    found = []
    for key, count in (manifest.get("overlaps") or {}).items():
        match = re.fullmatch(r"(\w+)_(content|prompt)_in_(\w+)", key)
        if match:
            found.append((match[1], match[2], match[3], int(count)))
    return found


def _findings_of(manifest: Manifest) -> Iterator[Finding]:
    name = manifest["source"]
    for severity, message in (
        *_lost(manifest),
        *_overlapping(manifest),
        *_across(manifest),
        *_suspicious(manifest),
    ):
        yield Finding(severity, name, message)


Found = Iterator[tuple[Literal["warning", "error"], str]]


def _lost(manifest: Manifest) -> Found:
    """Report documents that are missing from the counts."""
    name, read, kept = manifest["source"], manifest["documents_in"], manifest["documents_out"]
    reported = sum(manifest["documents_reported"].values())
    if read != kept + reported:
        yield (
            "error",
            f"data.{name}; {read:,} documents were read, but {kept:,} kept and {reported:,} reported make "
            f"{kept + reported:,}; please report this as a bug of the preparation.",
        )
    placed = sum(numbers["documents"] for numbers in manifest["splits"].values())
    if placed != kept:
        yield (
            "error",
            f"data.{name}; {kept:,} documents were kept, but the splits hold {placed:,}; please report this as a bug "
            "of the preparation.",
        )


def _overlapping(manifest: Manifest) -> Found:
    name, own = manifest["source"], manifest.get("config", {}).get("own_splits", [])
    for split, what, other, count in overlaps_of(manifest):
        if count and split in own and what == "content":
            yield (
                "error",
                f"data.{name}; {other} holds {_counted(count, 'document')} of the {split} split "
                f"({manifest['origins'][split]}) word for word; a score on them says nothing; leave them out of "
                f"{other} with data.{name}.held_out_copies=drop.",
            )
        elif count and split in own:
            yield (
                "warning",
                f"data.{name}; {other} holds the first question of {_counted(count, 'document')} of the {split} "
                f"split ({manifest['origins'][split]}) too; a score on them is in part recall; take these questions "
                "out of one of the two, or read the score with that in mind.",
            )
        elif count and what == "content":
            yield (
                "error",
                f"data.{name}; {other} holds {_counted(count, 'document')} of the {split} split word for word; "
                f"a score on them says nothing; set data.{name}.duplicates.exact=folded and prepare again.",
            )
        elif count:
            yield (
                "warning",
                f"data.{name}; {other} holds the first question of {_counted(count, 'document')} of the {split} "
                f"split too; a score on them is in part recall; set data.{name}.split_by=first_turn, or read the score "
                "with that in mind.",
            )


def _across(manifest: Manifest) -> Found:
    """Report held-out documents that another source trains on."""
    name = manifest["source"]
    for shared in manifest.get("across") or []:
        other = shared["trained_by"]
        count = _counted(shared["groups"], "text or first question", "texts or first questions")
        own, theirs = (shared["fractions"][key] for key in (name, other))
        remedy = (
            f"give both the same eval_fraction (now {own[0]} and {theirs[0]}) and test_fraction ({own[1]} and "
            f"{theirs[1]}): then both hold out the same."
        )
        if shared.get("is_joined"):
            remedy = "make one source of the two, or drop near copies (duplicates.near_copies=drop)."
        if shared.get("is_own"):
            remedy = f"one of the two has evaluation or test files of its own: take these out of data.{other}.path."
        yield (
            "error",
            f"data.{name}; data.{other} trains on {count} of its "
            f"{shared['split']} split; a score on them says nothing; {remedy}",
        )


def _suspicious(manifest: Manifest) -> Found:
    name, read = manifest["source"], manifest["documents_in"]
    reported = manifest["documents_reported"]
    if sum(reported.values()) > MAX_REPORTED_SHARE * read:
        reason, count = by_count(reported)[0]
        yield (
            "warning",
            f"data.{name}; {sum(reported.values()):,} of {read:,} documents ({percent(sum(reported.values()), read)}) "
            f"are left out, most of them for one reason: {reason} ({count:,}); read the examples, then mend the file "
            f"or loosen the rule in data.{name}.",
        )
    for split, numbers in manifest["splits"].items():
        yield from _suspicious_split(manifest, split=split, numbers=numbers)


def _suspicious_split(manifest: Manifest, *, split: str, numbers: Mapping[str, Any]) -> Found:
    name, rows, tokens = manifest["source"], numbers["rows"], numbers["tokens"]
    supervised, seq_len = numbers["supervised_tokens"], manifest["seq_len"]
    fraction = f"{'eval' if split == 'evaluation' else split}_fraction"
    wanted = manifest.get("config", {}).get(fraction, 1.0)
    if rows == 0 and wanted:
        key = f"data.{name}" if split == "train" else f"data.{name}.{fraction}={wanted}"
        yield "warning", f"{key}; the {split} split has 0 rows; add documents or change the fractions."
    # A labelled text has one token to learn, its label, however long it is.
    if tokens and "labels" not in manifest and supervised < MIN_SUPERVISED_SHARE * tokens:
        yield (
            "warning",
            f"data.{name}; {percent(supervised, tokens)} of the {split} tokens are supervised ({supervised:,} of "
            f"{tokens:,}); almost all computation goes into context; check data.{name}.format and the chat template.",
        )
    if split == "train":
        yield from _without_prompt(manifest, numbers=numbers)
    # Few rows are held out, and one row may be part empty however good the packing.
    if (
        split == "train"
        and manifest["packing"] == "best_fit"
        and tokens < MIN_PACKING_EFFICIENCY * (rows - 1) * seq_len
    ):
        yield (
            "warning",
            f"data.{name}; prepare.packing=best_fit fills {percent(tokens, rows * seq_len)} of the training rows; "
            f"many documents are a little longer than half of {seq_len:,} tokens and find no partner; use longer rows.",
        )


def _without_prompt(manifest: Manifest, *, numbers: Mapping[str, Any]) -> Found:
    """Report supervised answers that were separated from their questions."""
    lost, supervised, seq_len = without_prompt(numbers), numbers["supervised_tokens"], manifest["seq_len"]
    if lost <= MAX_WITHOUT_PROMPT * supervised:
        return
    lengths: dict[int, int] = {int(share): tokens for share, tokens in manifest["length_percentiles"].items()}
    longer = ((share, tokens) for share, tokens in sorted(lengths.items()) if share >= 95 and tokens > seq_len)
    share, tokens = next(longer, (100, max(lengths.values(), default=int(seq_len))))
    row = math.ceil(tokens / ROW_MULTIPLE) * ROW_MULTIPLE
    yield (
        "warning",
        f"data.{manifest['source']}; {percent(lost, supervised)} of the supervised training tokens ({lost:,} of "
        f"{supervised:,}) have lost their prompt or a part of it: documents longer than {seq_len:,} tokens are split, "
        f"and their row begins inside the question or the answer; trainer.seq_len={row} holds {share} % of the "
        f"documents ({tokens:,} tokens or fewer), and prepare.long_documents=truncate keeps none of these tokens.",
    )


def without_prompt(numbers: Mapping[str, Any]) -> int:
    """Return a split's supervised tokens in answers whose question begins in another row.

    0 for a manifest without the count.
    """
    return int(numbers.get("supervised_without_prompt", 0))


def _counted(count: int, noun: str, several: str = "") -> str:
    return f"{count:,} {noun if count == 1 else several or f'{noun}s'}"
