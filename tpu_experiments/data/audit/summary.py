"""The audit of prepared data: an identifying hash, a table, JSON, and findings.

All of it is computed from the manifests, so that an audit can be repeated without the data.
"""

import hashlib
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tpu_experiments.data.audit.findings import (
    Manifest,
    audit_findings,
    by_count,
    overlaps_of,
    percent,
    supervised_by_answer,
    without_prompt,
)
from tpu_experiments.data.steps.labels import label_text

COLUMNS = 100
NAMES_SHOWN = 20
SHOWN_WHOLE = 8
"""Up to this many sources and row lengths the table has more than the sizes of their splits; the page has
everything."""
_NO_BREAK = "\u00a0"

_WHAT_THE_DATA_IS = (
    "format",
    "kind",
    "seq_len",
    "packing",
    "long_documents",
    "pad_id",
    "max_token_id",
    "tokenizer_hash",
    "template_hash",
    "documents_in",
    "documents_out",
    "documents_reported",
    "changes",
    "splits",
    "length_percentiles",
    "overlaps",
    "config",
)


def audit_hash(manifest: Manifest) -> str:
    """Return 16 hex digits that change with the prepared data and with nothing else.

    The name and path of the source, the path of the tokenizer, examples, times and memory are not hashed.
    """
    return _hash({key: manifest.get(key) for key in _WHAT_THE_DATA_IS})


def audit_json(manifests: Sequence[Manifest]) -> dict[str, Any]:
    """Return all manifests with their audit hashes, one hash over all of them, and the findings."""
    hashes = [audit_hash(manifest) for manifest in manifests]
    return {
        "format": 1,
        "audit_hash": _hash(sorted(hashes)),
        "sources": [{**m, "audit_hash": own} for m, own in zip(manifests, hashes, strict=True)],
        "findings": [asdict(finding) for finding in audit_findings(manifests)],
    }


def audit_table(manifests: Sequence[Manifest]) -> str:
    """Return the table that `task=prepare` prints: every source and split, at most 100 columns wide.

    With up to `SHOWN_WHOLE` manifests each has a section of details.
    """
    lines = list(_split_lines(manifests))
    for manifest in manifests if len(manifests) <= SHOWN_WHOLE else []:
        lines += ["", *_source_lines(manifest)]
    for severity in ("error", "warning"):
        messages = [f.message for f in audit_findings(manifests) if f.severity == severity]
        if messages:
            lines += ["", f"{severity}s", *(line for message in messages for line in _wrapped("  - ", message))]
    return "\n".join(lines) + "\n"


def _hash(value: Any) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _split_lines(manifests: Sequence[Manifest]) -> Iterator[str]:
    header = ("source", "split", "documents", "rows", "tokens", "supervised", "packed")
    yield _columns(*header)
    for manifest in manifests:
        name = manifest["source"]
        for split, n in manifest["splits"].items():
            learnt = percent(n["supervised_tokens"], n["tokens"])
            filled = percent(n["tokens"], n["rows"] * manifest["seq_len"])
            counts = (f"{n['documents']:,}", f"{n['rows']:,}", f"{n['tokens']:,}")
            yield _columns(name, split, *counts, learnt, filled)
            name = ""


def _columns(source: str, split: str, documents: str, rows: str, tokens: str, learnt: str, filled: str) -> str:
    names = f"{shortened(source, 20):<22}{split:<12}"
    return f"{names}{documents:>14}{rows:>14}{tokens:>18}{learnt:>11}{filled:>9}"


def _source_lines(manifest: Manifest) -> Iterator[str]:
    seq_len, packing, long = manifest["seq_len"], manifest["packing"], manifest["long_documents"]
    yield from _wrapped(
        "", f"{manifest['source']}: {manifest['kind']}, rows of {seq_len:,} tokens, {packing}, long documents: {long}"
    )
    for label, text in _facts(manifest):
        yield from _wrapped(f"  {label:<18}", text)


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    reported, read = manifest["documents_reported"], manifest["documents_in"]
    total = sum(reported.values())
    reasons = _listed(f"{reason} {count:,}" for reason, count in by_count(reported))
    yield "reported", f"{total:,} of {read:,} documents ({percent(total, read)}){': ' if reasons else ''}{reasons}"
    for reason, examples in manifest["examples"].items():
        if examples:
            text = f"{reason.replace('_', ' ')}: {examples[0]['place']} {examples[0]['message']}"
            # A message may quote the file, and a control character of it would reach the terminal.
            readable = "".join(character if character.isprintable() else " " for character in text)
            yield "  for example", shortened(readable, 2 * (COLUMNS - 20))
    if manifest.get("origins"):
        yield "splits", origins_text(manifest)
    changes = _listed(f"{change} {count:,}" for change, count in by_count(manifest["changes"]))
    yield "changed", changes or "nothing"
    if manifest.get("not_read"):
        yield "not read", not_read_text(manifest)
    if manifest["length_percentiles"]:
        yield "document length", lengths_text(manifest)
    yield "long documents", long_documents_text(manifest)
    train = manifest["splits"].get("train", {})
    learnt = train.get("supervised_tokens", 0)
    answers = [f"{label} {percent(tokens, learnt)}" for label, tokens in supervised_by_answer(manifest)]
    if manifest["kind"] == "chat" and answers:
        yield "supervised in", _listed(answers)
    if pairs_text(manifest):
        yield "pairs", pairs_text(manifest)
    if answers_text(manifest):
        yield "answers", answers_text(manifest)
    for split, counts in manifest.get("labels", {}).items():
        yield f"labels in {split}", label_text(counts, labels=list(counts))
    yield "duplicates", duplicates_text(manifest)
    pairs = overlaps_of(manifest)
    overlaps = _listed(f"{split} {what} in {other} {count:,}" for split, what, other, count in pairs)
    yield "overlaps", overlaps or "not compared"
    others = manifest.get("across") or []
    if others:
        yield "other sources", _listed(f"{s['split']} in train of {s['trained_by']} {s['groups']:,}" for s in others)
    yield "tokenizer", f"{shortened(manifest['tokenizer'], 60)} ({manifest['tokenizer_hash']})"
    yield "chat template", manifest["template_hash"]
    yield "audit hash", audit_hash(manifest)


def pairs_text(manifest: Manifest) -> str:
    """Format the counts of training pairs, which side is longer, and the scores that contradict; "" without pairs."""
    pairs = manifest.get("noticed", {}).get("pairs")
    if not pairs:
        return ""
    count = pairs["count"]
    chosen, rejected = (pairs[f"{side}_tokens"] / count for side in ("chosen", "rejected"))
    scores = f"scores contradict the order in {pairs['contradicted']:,} of {pairs['scored']:,}"
    left_out = count - manifest["splits"].get("train", {}).get("documents", 0)
    return _listed(
        (
            f"{count:,} to train",
            *([f"{left_out:,} of them too long for a row but counted here"] if left_out > 0 else []),
            f"chosen {chosen:.1f} tokens on average",
            f"rejected {rejected:.1f}",
            f"chosen longer in {percent(pairs['chosen_longer'], count)}",
            f"rejected longer in {percent(pairs['rejected_longer'], count)}",
            *([scores] if pairs["scored"] else ["no scores"]),
        )
    )


def answers_text(manifest: Manifest) -> str:
    """Format the counts of single training answers by label, and the weights that balance them; "" without any.

    By KTO's paper (arXiv 2402.01306, section 4.2) the weight of the good ones times their number is 1 to 4/3 of that of
    the bad ones.
    """
    answers = manifest.get("noticed", {}).get("answers")
    if not answers:
        return ""
    good, bad = answers["good"], answers["bad"]
    parts = [f"{count:,} {name} ({percent(count, good + bad)})" for name, count in answers.items()]
    if good and bad:
        ratio = good / bad
        key, least, most = ("un", ratio * 3 / 4, ratio) if ratio > 1 else ("", 1 / ratio, 4 / 3 / ratio)
        parts.append(f"balanced by objective.{key}desirable_weight={least:.2f} to {most:.2f}")
    return _listed(parts)


def lengths_text(manifest: Manifest) -> str:
    """Format the length percentiles of the training documents, before packing."""
    tokens = manifest["length_percentiles"]
    shares = _listed(f"{share} % up to {tokens[share]:,}" for share in ("50", "90", "95", "99"))
    return f"{shares}, longest {tokens['100']:,} tokens"


def long_documents_text(manifest: Manifest) -> str:
    """Format the counts of documents longer than a row, over all splits."""
    splits = manifest["splits"].values()
    keys = ("documents_split", "documents_truncated", "documents_truncated_in_turn", "tokens_dropped")
    split, cut, cut_inside, dropped = (sum(numbers.get(key, 0) for numbers in splits) for key in keys)
    text = f"{split:,} split, {cut:,} truncated ({cut_inside:,} inside a turn), {dropped:,} tokens dropped"
    lost = sum(map(without_prompt, splits))
    return text + (f", {lost:,} supervised tokens without their whole prompt" if lost else "")


def origins_text(manifest: Mapping[str, Any]) -> str:
    """Format the origin of each split, where the split hash alone does not decide."""
    return "; ".join(f"{split}: {words}" for split, words in manifest["origins"].items())


def not_read_text(manifest: Mapping[str, Any]) -> str:
    """Format the fields of the rows that were not read, with the number of rows that have each, the largest first."""
    counts = sorted(manifest.get("not_read", {}).items(), key=lambda item: (-item[1], item[0]))
    more = f" and {len(counts) - NAMES_SHOWN} more" if len(counts) > NAMES_SHOWN else ""
    return ", ".join(f"{name} {count:,}" for name, count in counts[:NAMES_SHOWN]) + more


def duplicates_text(manifest: Manifest) -> str:
    """Format the number of duplicates left out, and the rules of the search."""
    rules = manifest.get("config", {}).get("duplicates", {})
    reported = manifest["documents_reported"]
    folded = " (case and blanks folded)" if rules.get("exact") == "folded" else ""
    exact = "kept" if rules.get("exact") == "keep" else f"{reported.get('exact_duplicate', 0):,} left out{folded}"
    near = f"{reported.get('near_duplicate', 0):,} left out"
    near = "kept in one split" if rules.get("near_copies") == "keep" else near
    similar = f"{near} (similarity {rules['near']})" if rules.get("near") else ""
    held_out = reported.get("held_out_copy")
    copies = f", of held-out documents {held_out:,} left out" if held_out else ""
    return f"exact {exact}, near {similar or 'not looked for'}{copies}"


def shortened(text: str, width: int) -> str:
    """Return `text` with its middle elided if it is longer than `width` characters."""
    half = (width - 1) // 2
    return text if len(text) <= width else f"{text[: width - 1 - half]}…{text[-half:]}"


def _listed(items: Iterable[str]) -> str:
    """Join items with commas; `_wrapped` does not break inside of one."""
    return ", ".join(item.replace(" ", _NO_BREAK) for item in items)


def _wrapped(label: str, text: str) -> list[str]:
    """Wrap `text` after `label`, further lines aligned with its first."""
    indent = " " * len(label)
    lines = textwrap.wrap(text, COLUMNS, initial_indent=label, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace(_NO_BREAK, " ") for line in lines]
