"""Statistics from the manifests of prepared data, and warnings about suspicious ones."""

import json
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
MIN_RENDERED = 0.02
"""Share of the training documents that spell out marks of a chat format, from which on they are no accident."""
MIN_SPECIAL = 0.02
"""The same of documents with strings of the tokenizer's own special tokens."""
MIN_EMPTY_THOUGHTS = 0.01
MIN_ECHOES = 0.02
MIN_BLANK_ANSWERS = 0.05
MAX_SAME_ANSWER = 0.5
MIN_CUT, MIN_CUT_INSIDE, MIN_CUT_PEAK = 0.02, 0.6, 5
"""Documents of one length were cut there if they are this share of all, this share of them ends inside a sentence, and
they are this many times as many as those of a length nearby."""
MAX_SHORTENED = 0.05
"""Share of the training documents that are truncated or dropped because they are longer than a row."""
MAX_CONTRADICTED = 0.5
"""Share of the scored pairs whose rejected answer has the higher score, from which on the columns are swapped."""
MAX_LONGER = 0.75
"""Share of the pairs in which the same side is longer, from which on length is what is learnt."""
MIN_DOCUMENTS = 5
"""Fewer documents are alike by chance."""
ROW_MULTIPLE = 128
"""Recommended row lengths are multiples of this, which a TPU computes without padding."""
NOUNS = {"chat": "training conversation", "preference": "training pair"}
"""What documents with answers are called, by kind."""
ANSWERS_SHOWN = 8
"""Answers of a conversation that are listed separately; later ones are joined."""


@dataclass(frozen=True)
class Finding:
    """A suspicious property of the data, as a sentence."""

    severity: Literal["warning", "error"]
    source: str
    message: str
    """`data.<name>; the problem, the numbers; the remedy.`"""


def audit_findings(manifests: Sequence[Manifest], *, are_rows_learnt: bool = True) -> list[Finding]:
    """Return the findings, errors first, each in the order of the manifests.

    What is true of a source at every row length is said once.

    Args:
        are_rows_learnt: whether the training rows are trained on, whose tokens are counted here.
    """
    found = dict.fromkeys(
        finding for manifest in manifests for finding in _findings_of(manifest, are_rows_learnt=are_rows_learnt)
    )
    return sorted(found, key=lambda finding: finding.severity)


def percent(part: float, whole: float) -> str:
    """Format a share as `22.5 %`, or a dash where the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return (words, count) of every count above 0, the largest first; slugs become words."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [(slug.replace("_", " "), count) for slug, count in ordered if count]


def supervised_by_answer(manifest: Manifest) -> list[tuple[str, int]]:
    """Return (name, tokens that the training rows train on) of the 1st, 2nd, ... answer.

    From `ANSWERS_SHOWN` on, answers are joined.
    """
    tokens = [int(count) for count in manifest.get("noticed", {}).get("learnt_per_turn", {}).get("train", [])]
    named = [(f"answer {i + 1}", count) for i, count in enumerate(tokens)]
    if len(named) <= ANSWERS_SHOWN:
        return named
    late = ANSWERS_SHOWN - 1
    return [*named[:late], (f"answer {ANSWERS_SHOWN} on", sum(tokens[late:]))]


def overlaps_of(manifest: Manifest) -> list[tuple[str, str, str, int]]:
    """Return (split, content or prompt, the split it is also in, count) of every pair compared."""
    found = []
    for key, count in (manifest.get("overlaps") or {}).items():
        match = re.fullmatch(r"(\w+)_(content|prompt)_in_(\w+)", key)
        if match:
            found.append((match[1], match[2], match[3], int(count)))
    return found


def _findings_of(manifest: Manifest, *, are_rows_learnt: bool) -> Iterator[Finding]:
    name = manifest["source"]
    for severity, message in (
        *_lost(manifest),
        *_overlapping(manifest),
        *_across(manifest),
        *_suspicious(manifest, are_rows_learnt=are_rows_learnt),
        *_noticed(manifest),
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
                f"data.{name}; {other} holds {counted(count, 'document')} of the {split} split "
                f"({manifest['origins'][split]}) word for word; a score on them says nothing; leave them out of "
                f"{other} with data.{name}.held_out_copies=drop.",
            )
        elif count and split in own:
            yield (
                "warning",
                f"data.{name}; {other} holds the first question of {counted(count, 'document')} of the {split} "
                f"split ({manifest['origins'][split]}) too; a score on them is in part recall; take these questions "
                "out of one of the two, or read the score with that in mind.",
            )
        elif count and what == "content":
            yield (
                "error",
                f"data.{name}; {other} holds {counted(count, 'document')} of the {split} split word for word; "
                f"a score on them says nothing; set data.{name}.duplicates.exact=folded and prepare again.",
            )
        elif count:
            yield (
                "warning",
                f"data.{name}; {other} holds the first question of {counted(count, 'document')} of the {split} "
                f"split too; a score on them is in part recall; set data.{name}.split_by=first_turn, or read the score "
                "with that in mind.",
            )


def _across(manifest: Manifest) -> Found:
    """Report held-out documents that another source trains on."""
    name = manifest["source"]
    for shared in manifest.get("across") or []:
        other = shared["trained_by"]
        count = counted(shared["groups"], "text or first question", "texts or first questions")
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


def _suspicious(manifest: Manifest, *, are_rows_learnt: bool) -> Found:
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
        yield from _empty(manifest, split=split, numbers=numbers)
        if are_rows_learnt or split != "train":
            yield from _suspicious_split(manifest, split=split, numbers=numbers)


def _empty(manifest: Manifest, *, split: str, numbers: Mapping[str, Any]) -> Found:
    """Report a split without rows that some were wanted for."""
    name, fraction = manifest["source"], f"{'eval' if split == 'evaluation' else split}_fraction"
    wanted = manifest.get("config", {}).get(fraction, 1.0)
    if numbers["rows"] == 0 and wanted:
        key = f"data.{name}" if split == "train" else f"data.{name}.{fraction}={wanted}"
        yield "warning", f"{key}; the {split} split has 0 rows; add documents or change the fractions."


def _suspicious_split(manifest: Manifest, *, split: str, numbers: Mapping[str, Any]) -> Found:
    """Report what is odd in the tokens of a split's rows."""
    name, rows, tokens = manifest["source"], numbers["rows"], numbers["tokens"]
    supervised, seq_len = numbers["supervised_tokens"], manifest["seq_len"]
    # A labelled text has one token to learn, its label, however long it is.
    if tokens and "labels" not in manifest and supervised < MIN_SUPERVISED_SHARE * tokens:
        yield (
            "warning",
            f"data.{name}; {percent(supervised, tokens)} of the {split} tokens are supervised ({supervised:,} of "
            f"{tokens:,}); almost all computation goes into context; check data.{name}.format and the chat template.",
        )
    if split == "train":
        yield from _without_prompt(manifest, numbers=numbers)
        yield from _shortened(manifest, numbers=numbers)
    # Few rows are held out, and one row may be part empty however good the packing.
    if (
        split == "train"
        and manifest["packing"] == "best_fit"
        and tokens < MIN_PACKING_EFFICIENCY * (rows - 1) * seq_len
    ):
        yield (
            "warning",
            f"data.{name}; prepare.packing=best_fit fills {percent(tokens, rows * seq_len)} of the training rows; "
            f"many documents are a little longer than a half or a third of {seq_len:,} tokens and find no partner; use "
            "longer rows.",
        )


def _without_prompt(manifest: Manifest, *, numbers: Mapping[str, Any]) -> Found:
    """Report supervised answers that were separated from their questions."""
    lost, supervised, seq_len = without_prompt(numbers), numbers["supervised_tokens"], manifest["seq_len"]
    if lost <= MAX_WITHOUT_PROMPT * supervised:
        return
    yield (
        "warning",
        f"data.{manifest['source']}; {percent(lost, supervised)} of the supervised training tokens ({lost:,} of "
        f"{supervised:,}) have lost their prompt or a part of it: documents longer than {seq_len:,} tokens are split, "
        f"and their row begins inside the question or the answer; {_longer_rows(manifest)}, and "
        "prepare.long_documents=truncate keeps none of these tokens.",
    )


def _longer_rows(manifest: Manifest) -> str:
    """Return the row length that holds 99 % of the documents, or all of them, as a remedy."""
    lengths: dict[int, int] = {int(share): tokens for share, tokens in manifest["length_percentiles"].items()}
    longer = ((share, n) for share, n in sorted(lengths.items()) if share >= 99 and n > manifest["seq_len"])
    share, tokens = next(longer, (100, max(lengths.values(), default=int(manifest["seq_len"]))))
    row = math.ceil(tokens / ROW_MULTIPLE) * ROW_MULTIPLE
    return (
        f"trainer.seq_len={row} holds {share} % of the documents ({tokens:,} tokens or fewer), as trainer.seq_len=auto "
        "does up to model.row_tokens"
    )


def _shortened(manifest: Manifest, *, numbers: Mapping[str, Any]) -> Found:
    """Report documents that are truncated or dropped because they are longer than a row."""
    name, cut, documents = manifest["source"], numbers["documents_truncated"], numbers["documents"]
    are_pairs = manifest["kind"] == "preference"
    if cut > MAX_SHORTENED * documents:
        yield (
            "warning",
            f"data.{name}; {_share(cut, documents, 'training pair' if are_pairs else 'training document')} are longer "
            f"than {manifest['seq_len']:,} tokens and "
            + ("their prompts are cut" if are_pairs else "truncated by prepare.long_documents=truncate")
            + f", {numbers['tokens_dropped']:,} tokens are dropped; {_longer_rows(manifest)}.",
        )
    dropped, read = manifest["documents_reported"].get("too_long", 0), manifest["documents_in"]
    if dropped > MAX_SHORTENED * read:
        yield (
            "warning",
            f"data.{name}; {_share(dropped, read, 'pair' if are_pairs else 'document')} are longer than "
            f"{manifest['seq_len']:,} tokens and left out"
            + (" with both answers, which are never cut" if are_pairs else " by prepare.long_documents=drop")
            + f"; {_longer_rows(manifest)}.",
        )


def _noticed(manifest: Manifest) -> Found:
    """Report what the training documents themselves show (data/steps/notices.py).

    Nothing of data that was prepared before 2026-11-28, which lacks the counts.
    """
    name, noticed = manifest["source"], manifest.get("noticed", {})
    if "documents" not in noticed:
        return
    documents, is_chat = noticed["documents"], manifest["kind"] in NOUNS
    kind = _noun(manifest)
    special = manifest["changes"].get("special_tokens_in_text", 0)
    if noticed["rendered"] > MIN_RENDERED * documents:
        remedy = (
            f"give conversations as `messages` with data.{name}.kind=chat (data.{name}.format=llama2 and "
            "human_assistant read texts with [INST] or ### Human), and the model's chat format writes its own marks"
        )
        if is_chat:
            remedy = "give each turn as a message of its own, without the marks of another chat format"
        yield (
            "warning",
            f"data.{name}; {_share(noticed['rendered'], documents, kind)} spell out marks of a chat format "
            f"({', '.join(noticed['markers'])}); they are plain text there and become several tokens, "
            f"learnt as any text is, never the control tokens of a chat; {remedy}.",
        )
    elif special > MIN_SPECIAL * manifest["documents_in"]:
        yield (
            "warning",
            f"data.{name}; {_share(special, manifest['documents_in'], 'document')} spell out special tokens of the "
            "tokenizer; they are read as plain text and become several tokens, never the special ones; take them out: "
            "beginning, end and turns of a document are marked by themselves.",
        )
    if noticed["empty_thoughts"] > MIN_EMPTY_THOUGHTS * documents:
        yield (
            "warning",
            f"data.{name}; {_share(noticed['empty_thoughts'], documents, kind)} have an empty block of reasoning "
            "(<think></think>) in a learnt answer, which the chat template writes where a turn has none; the model "
            "learns to answer without thinking; give the reasoning as `reasoning_content` of the turns, or, if it "
            "shall not reason, take a chat format without the block (model.chat_format=chatml).",
        )
    if is_chat:
        yield from _answers(manifest)
    if "pairs" in noticed:
        yield from _preferred(manifest)
    if "labels" not in manifest:
        yield from _cut(manifest, kind=kind)


def _noun(manifest: Manifest) -> str:
    """Return what a training document of a source is called."""
    if "answers" in manifest["noticed"]:
        return "training answer"
    return NOUNS.get(manifest["kind"], "training text")


def _preferred(manifest: Manifest) -> Found:
    """Report pairs whose scores contradict their order, and a side that is nearly always the longer one."""
    name, pairs = manifest["source"], manifest["noticed"]["pairs"]
    count, scored, contradicted = pairs["count"], pairs["scored"], pairs["contradicted"]
    if scored >= MIN_DOCUMENTS and contradicted > MAX_CONTRADICTED * scored:
        yield (
            "error",
            f"data.{name}; {_share(contradicted, scored, 'training pair')} with scores have the higher score at the "
            "rejected answer; the columns are swapped, and the model learns what was rejected; name them the other way "
            f"round: 'data.{name}.fields={{chosen: ..., rejected: ...}}'.",
        )
    elif contradicted:
        yield (
            "warning",
            f"data.{name}; {_share(contradicted, scored, 'training pair')} with scores have the higher score at the "
            "rejected answer; look at them, and mend these rows or leave them out.",
        )
    for side, other in (("chosen", "rejected"), ("rejected", "chosen")):
        longer = pairs[f"{side}_longer"]
        if longer >= MIN_DOCUMENTS and longer > MAX_LONGER * count:
            means = (pairs[f"{each}_tokens"] / count for each in (side, other))
            yield (
                "warning",
                f"data.{name}; the {side} answer is the longer one of {_share(longer, count, 'training pair')}, "
                "{:.1f} tokens on average against {:.1f}; ".format(*means)
                + "the model learns the length before anything else; balance the pairs, or take a loss by mean "
                "log-probabilities, which a length does not change.",
            )


def _answers(manifest: Manifest) -> Found:
    """Report answers that are all the same, repeat their question or are blank."""
    name, noticed, read = manifest["source"], manifest["noticed"], manifest["documents_in"]
    documents, kind = noticed["documents"], _noun(manifest)
    same, echoes = noticed["same_answer"], noticed["echoes"]
    if same["documents"] >= MIN_DOCUMENTS and same["documents"] > MAX_SAME_ANSWER * documents:
        yield (
            "warning",
            f"data.{name}; {_share(same['documents'], documents, kind)} end with one and the same answer "
            f"({json.dumps(same['text'], ensure_ascii=False)}); the model learns to give it whatever is asked; leave "
            f"most of them out, or name the field that holds the answers (data.{name}.fields).",
        )
    if echoes >= MIN_DOCUMENTS and echoes > MIN_ECHOES * documents:
        yield (
            "warning",
            f"data.{name}; {_share(echoes, documents, kind)} end with an answer that repeats the turn before it word "
            f"for word; the model learns to echo; leave these rows out, or check data.{name}.fields.",
        )
    blank = manifest["changes"].get("blank_answer_not_learnt", 0)
    if blank >= MIN_DOCUMENTS and blank > MIN_BLANK_ANSWERS * read:
        yield (
            "warning",
            f"data.{name}; {counted(blank, 'answer')} in {counted(read, 'document')} are blank and not learnt; check "
            f"that data.{name}.fields names the field that holds the answers, or leave these rows out.",
        )


def _cut(manifest: Manifest, *, kind: str) -> Found:
    """Report answers or texts that were cut at one length when the data was made."""
    noticed = manifest["noticed"]
    documents = noticed["documents"]
    for unit, ends in noticed["equal_ends"].items():
        count, inside = ends["documents"], ends["inside_a_sentence"]
        if (
            count >= max(MIN_DOCUMENTS, MIN_CUT * documents)
            and inside >= MIN_CUT_INSIDE * count
            and count >= MIN_CUT_PEAK * ends["near"]
        ):
            what = "end with an answer of" if manifest["kind"] in NOUNS else "have"
            yield (
                "warning",
                f"data.{manifest['source']}; {_share(count, documents, kind)} {what} exactly {ends['length']:,} "
                f"{unit}, {inside:,} of them end inside a sentence; they were cut there when the data was made "
                "(max_tokens, max_length), and the model learns to stop in the middle; make them again with a higher "
                "limit, or leave these rows out.",
            )
            return


def _share(part: int, whole: int, noun: str) -> str:
    """Format `95 of 96 training texts (99.0 %)`."""
    return f"{part:,} of {counted(whole, noun)} ({percent(part, whole)})"


def without_prompt(numbers: Mapping[str, Any]) -> int:
    """Return a split's supervised tokens in answers whose question begins in another row.

    0 for a manifest without the count.
    """
    return int(numbers.get("supervised_without_prompt", 0))


def counted(count: int, noun: str, several: str = "") -> str:
    """Return `1 document` or `1,234 documents`."""
    return f"{count:,} {noun if count == 1 else several or f'{noun}s'}"
