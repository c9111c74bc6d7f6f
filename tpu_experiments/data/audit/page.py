"""The audit as self-contained HTML: numbers, charts, and rows token by token.

<name>.html               an overview of all sources, and each of them where they are few
<name>/<source>-512.html  one source at one row length, where they are many
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
from markupsafe import Markup
from transformers import PreTrainedTokenizerBase

from tpu_experiments.data.audit.charts import bar_chart, histogram
from tpu_experiments.data.audit.findings import (
    Manifest,
    audit_findings,
    by_count,
    counted,
    overlaps_of,
    percent,
    supervised_by_answer,
)
from tpu_experiments.data.audit.rows import choose_rows, row_html, shown_pairs
from tpu_experiments.data.audit.summary import (
    answers_text,
    audit_hash,
    audit_json,
    duplicates_text,
    long_documents_text,
    not_read_text,
    origins_text,
    pairs_text,
    shortened,
)
from tpu_experiments.data.rows import RowSource
from tpu_experiments.pages.page import page
from tpu_experiments.storage import paths

REASONS_SHOWN = 8
ON_ONE_PAGE = 4
"""Maximum number of sources and row lengths on one page; each takes 0.25 MB with four rows of 1,024 tokens."""


def audit_pages(
    manifests: Sequence[Manifest],
    *,
    stores: Mapping[tuple[str, int], RowSource],
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    num_rows: int = 4,
) -> dict[str, str]:
    """Return HTML by file name: one page, or beyond `ON_ONE_PAGE` sources a page each, the overview last.

    `stores` are the training rows by source and row length, of which `num_rows` each are shown; a source without a
    store is shown without rows.
    """

    def sections(shown: Sequence[Manifest]) -> list[dict[str, Any]]:
        found = []
        for manifest in shown:
            store = stores.get((manifest["source"], manifest["seq_len"]))
            labels = list(manifest.get("labels", {}).get("train", {}))
            rows: list[tuple[int, str, Markup]] = []
            pairs: list[tuple[str, ...]] = []
            if store is not None and store.num_rows:
                rows = _rows(store, tokenizer=tokenizer, num_rows=num_rows, labels=labels)
                pairs = shown_pairs(store, tokenizer=tokenizer) if manifest["kind"] == "preference" else []
            found.append(_source(manifest) | {"rows": rows, "pairs": pairs})
        return found

    top = {"tiles": _tiles(manifests), "findings": audit_findings(manifests)}
    if len(manifests) <= ON_ONE_PAGE:
        overview = _overview(manifests, folder=None) if len(manifests) > 1 else None
        return {f"{name}.html": _page(manifests, sources=sections(manifests), overview=overview, **top)}
    pages = {}
    back = {"place": f"../{quote(name)}.html", "sources": len(_names(manifests))}
    for manifest in manifests:
        own = {"back": back, "findings": audit_findings([manifest]), "sources": sections([manifest])}
        pages[f"{name}/{_file_of(manifest)}"] = _page([manifest], **own)
    return pages | {f"{name}.html": _page(manifests, overview=_overview(manifests, folder=name), **top)}


def write_audit_pages(folder: str, pages: Mapping[str, str]) -> None:
    """Write the pages of `audit_pages` below a folder, the overview last."""
    for name, text in pages.items():
        place = paths.join(folder, name)
        paths.make_dirs(place.rpartition("/")[0])
        paths.write_text_atomic(place, text)


def _page(manifests: Sequence[Manifest], **parts: Any) -> str:
    empty: dict[str, Any] = {"tiles": [], "findings": [], "overview": None, "sources": [], "back": None}
    return page(
        "audit.html",
        title="Data audit: " + _named(manifests),
        about=_about(manifests),
        audit_hash=audit_json(manifests)["audit_hash"],
        **(empty | parts),
    )


def _file_of(manifest: Manifest) -> str:
    return f"{manifest['source']}-{manifest['seq_len']}.html"


def _about(manifests: Sequence[Manifest]) -> str:
    lengths = " and ".join(f"{n:,}" for n in sorted({m["seq_len"] for m in manifests}))
    tokenizers = ", ".join(dict.fromkeys(shortened(str(m["tokenizer"]), 60) for m in manifests))
    return f"{_named(manifests)}: rows of {lengths} tokens, tokenizer {tokenizers}"


def _named(manifests: Sequence[Manifest]) -> str:
    names = _names(manifests)
    more = f" and {len(names) - ON_ONE_PAGE} other sources" if len(names) > ON_ONE_PAGE else ""
    return ", ".join(names[:ON_ONE_PAGE]) + more


def _overview(manifests: Sequence[Manifest], *, folder: str | None) -> dict[str, Any]:
    """Return a table line per source and row length.

    It links to the source's page in `folder`, or to its section of this page where `folder` is None.
    """
    head = ("Source", "Row", "Kept", "Left out", "Train tokens", "Share", "Supervised", "Evaluation", "Test", "Overlap")
    total = {
        n: sum(_train(m)["tokens"] for m in manifests if m["seq_len"] == n) for n in {m["seq_len"] for m in manifests}
    }
    found = audit_findings(manifests)
    body = []
    for manifest in manifests:
        train, splits, seq_len = _train(manifest), manifest["splits"], manifest["seq_len"]
        held = [f"{splits.get(split, {}).get('documents', 0):,}" for split in ("evaluation", "test")]
        severities = [finding.severity for finding in found if finding.source == manifest["source"]]
        cells = (
            f"{seq_len:,}",
            f"{manifest['documents_out']:,}",
            f"{manifest['documents_in'] - manifest['documents_out']:,}",
            f"{train['tokens']:,}",
            percent(train["tokens"], total[seq_len]),
            percent(train["supervised_tokens"], train["tokens"]),
            *held,
            f"{_overlap([manifest])[0]:,}",
            ", ".join(counted(severities.count(s), s) for s in ("error", "warning") if s in severities) or "none",
        )
        place = f"#{_anchor(manifest)}" if folder is None else f"{quote(folder)}/{quote(_file_of(manifest))}"
        body.append((place, manifest["source"], cells))
    return {"head": (*head, "Findings"), "lines": body}


def _anchor(manifest: Manifest) -> str:
    return quote(f"{manifest['source']}-{manifest['seq_len']}")


def _train(manifest: Manifest) -> Mapping[str, Any]:
    found: Mapping[str, Any] = manifest["splits"].get("train", {"tokens": 0, "supervised_tokens": 0})
    return found


def _overlap(manifests: Sequence[Manifest]) -> tuple[int, int, int, int]:
    """Return the largest overlap count, then each: held-out documents in train, prompts, other sources."""
    pairs = [pair for m in manifests for pair in overlaps_of(m)]
    same, prompts = (sum(count for _, what, _, count in pairs if what == kind) for kind in ("content", "prompt"))
    across = sum(shared["groups"] for m in manifests for shared in m.get("across") or [])
    return max(same, prompts, across), same, prompts, across


def _names(manifests: Sequence[Manifest]) -> list[str]:
    return list(dict.fromkeys(m["source"] for m in manifests))


def _tiles(manifests: Sequence[Manifest]) -> list[tuple[str, str, str]]:
    """Return name, value and note of each summary tile."""
    # A source prepared at two lengths has the same documents twice.
    once = list({m["source"]: m for m in reversed(manifests)}.values())
    read, kept = (sum(m[key] for m in once) for key in ("documents_in", "documents_out"))
    reported = read - kept
    splits = [numbers for m in once for numbers in m["splits"].values()]
    tokens, supervised = (sum(n[key] for n in splits) for key in ("tokens", "supervised_tokens"))
    rows, held = 0, 0
    for m in manifests:
        here = sum(n["rows"] for n in m["splits"].values())
        rows, held = rows + here, held + here * m["seq_len"]
    filled = sum(n["tokens"] for m in manifests for n in m["splits"].values())
    worst, same, prompts, across = _overlap(once)
    return [
        ("Documents kept", f"{kept:,}", f"of {read:,} read; {reported:,} left out and reported"),
        ("Rows", f"{rows:,}", "what the model sees at once; several documents can share one"),
        ("Tokens", _large(tokens), "pieces of words that the model reads"),
        ("Supervised", percent(supervised, tokens), "of the tokens are learnt; the others are only read"),
        ("Rows filled", percent(filled, held), "the rest is padding"),
        (
            "Overlap",
            f"{worst:,}",
            f"{same:,} held-out documents are in train too, {prompts:,} by "
            f"their first question, {across:,} in another source",
        ),
    ]


def _large(count: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.2f} {word}"
    return f"{count:,}"


def _source(manifest: Manifest) -> dict[str, Any]:
    """Return the template values of one source at one row length, without its rows."""
    seq_len = manifest["seq_len"]
    numbers = [
        (
            split,
            *(f"{n.get(key, 0):,}" for key in ("documents", "rows", "tokens", "characters")),
            percent(n["supervised_tokens"], n["tokens"]),
            percent(n["tokens"], n["rows"] * seq_len),
        )
        for split, n in manifest["splits"].items()
    ]
    head = ("Split", "Documents", "Rows", "Tokens", "Characters", "Supervised", "Rows filled")
    return {
        "anchor": _anchor(manifest),
        "source": manifest["source"],
        "about": f"{manifest['kind']}, rows of {seq_len:,} tokens, packing {manifest['packing']}",
        "numbers": {"head": head, "body": numbers},
        "charts": [(title, Markup(svg), caption) for title, svg, caption in _chart_parts(manifest)],
        "facts": _facts(manifest),
        "examples": _examples(manifest),
    }


def _chart_parts(manifest: Manifest) -> Iterator[tuple[str, str, str]]:
    """Yield (title, SVG, caption) of every chart with data."""
    train: Mapping[str, Any] = manifest["splits"].get("train", {})
    lengths = train.get("length_histogram") or {"edges": [], "documents": []}
    if any(lengths["documents"]):
        title = "Length of documents"
        caption = f"Training documents by their number of tokens. A row holds {manifest['seq_len']:,}."
        yield title, histogram(lengths["documents"], edges=lengths["edges"], title=title), caption
    answers = supervised_by_answer(manifest)
    if manifest["kind"] == "chat" and answers:
        bars = [(name, float(tokens), percent(tokens, train["supervised_tokens"])) for name, tokens in answers]
        title = "Supervised tokens by answer"
        caption = "Which answer of a conversation the learnt tokens are in: the first, the second, and so on."
        yield title, bar_chart(bars, title=title, kind="learnt"), caption
    reported = by_count(manifest["documents_reported"])
    if reported:
        rest = sum(count for _, count in reported[REASONS_SHOWN:])
        shown = reported[:REASONS_SHOWN] + ([("other reasons", rest)] if rest else [])
        title = "Documents left out, by reason"
        total, read = sum(count for _, count in reported), manifest["documents_in"]
        caption = f"{total:,} of {read:,} documents ({percent(total, read)}). Each is named in reported.jsonl."
        yield title, bar_chart([(name, float(n), f"{n:,}") for name, n in shown], title=title), caption


def _facts(manifest: Manifest) -> list[tuple[str, str, str]]:
    """Return label, code and text of each fact; code or text may be empty."""
    changes = ", ".join(f"{change} {count:,}" for change, count in by_count(manifest["changes"]))
    overlaps = ", ".join(f"{split} {what} in {other} {count:,}" for split, what, other, count in overlaps_of(manifest))
    return [
        *([("Splits", "", origins_text(manifest))] if manifest.get("origins") else []),
        ("Changed or noticed", "", changes or "nothing"),
        *([("Not read (rows)", "", not_read_text(manifest))] if manifest.get("not_read") else []),
        *([("Pairs", "", pairs_text(manifest))] if pairs_text(manifest) else []),
        *([("Answers", "", answers_text(manifest))] if answers_text(manifest) else []),
        ("Longer than a row", "", long_documents_text(manifest)),
        ("Duplicates", "", duplicates_text(manifest)),
        ("Overlaps", "", overlaps or "not compared"),
        ("Audit hash", audit_hash(manifest), ""),
        ("Tokenizer", manifest["tokenizer_hash"], shortened(manifest["tokenizer"], 60)),
        ("Chat template", manifest["template_hash"], ""),
    ]


def _examples(manifest: Manifest) -> list[tuple[str, str, str, str]]:
    """Return reason, place, message and beginning of rows that were left out."""
    return [
        (reason.replace("_", " "), example["place"], example["message"], example.get("text", ""))
        for reason, examples in manifest["examples"].items()
        for example in examples
    ]


def _rows(
    store: RowSource, *, tokenizer: PreTrainedTokenizerBase, num_rows: int, labels: Sequence[str]
) -> list[tuple[int, str, Markup]]:
    """Return number, note and tokens of some rows."""
    chosen = choose_rows(store, num_rows=num_rows)
    rows = store.take(np.array([index for index, _ in chosen], np.int64))
    found = []
    for i, (index, why) in enumerate(chosen):
        row = rows.take(slice(i, i + 1))
        share = percent(row.num_supervised, row.num_tokens)
        segments = counted(int(row.segments_NT.max()), "segment")
        note = f"{why}; {segments}, {row.num_tokens:,} tokens, {share} supervised"
        found.append((index, note, Markup(row_html(row, tokenizer=tokenizer, labels=labels))))
    return found
