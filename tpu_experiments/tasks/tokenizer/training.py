"""Training of a tokenizer of each kind by the library `tokenizers`, the same bytes for the same texts and settings.

The library's trainers keep every different word with its count: memory grows with the number of words, not with the
text. Three of its habits are worked around:

* WordPieceTrainer numbers continuing characters (`##a`) in the order of a hash table that differs from process to
  process, and numbers break ties. They are given to it beforehand, sorted.
* UnigramTrainer sums in such an order too, so that scores differ from run to run by up to 4e-11 nats. They are rounded
  to 1e-4 nats, and rare characters, which it scores in that order, are scored in the order of Unicode.
* UnigramTrainer takes as candidates the substrings of different words that different characters follow (Kudo,
  arXiv 1804.10959, over a suffix array), and separates words by one character. A whole word would be no candidate, and
  10 % more tokens be needed than with SentencePiece, whose words are in sentences here. So every second word of a text
  ends with `MARK`, which makes two followers; the mark is then taken out and the scores are normalised again.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.task_schema import NUM_BYTES, TokenizerTaskConfig
from tpu_experiments.data.tokens.words import WORDS_OF_DIGITS
from tpu_experiments.storage.gguf.splits import BLANK

Texts = Callable[[], Iterable[str]]
Pieces = list[tuple[str, float]]

MAX_LENGTH = 16
"""SentencePiece's max_sentencepiece_length."""
MARK = "\x01"
ASCII = [chr(code) for code in range(33, 127)]
"""Characters that every vocabulary has. Of a text `<0x41>`, whose six characters are all known, none is taken for the
byte."""
SCORE_DIGITS = 4
PENALTY = 1e-4
"""Distance of the scores that UnigramTrainer gives to characters which it has no estimate for."""
BYTE_SCORE = -1e6
"""Score of `<0x41>`, so that these six characters in a text are never read as the byte."""
_PAIR_OF_WORDS = re.compile(r"(\S+\s+\S+)")
_DIGITS = {"any": r"\p{N}+", "three": r"\p{N}{1,3}", "single": r"\p{N}"}
_FORMS: dict[str, list[normalizers.Normalizer]] = {"none": [], "nfc": [normalizers.NFC()], "nfkc": [normalizers.NFKC()]}


def trained(task: TokenizerTaskConfig, texts: Texts) -> PreTrainedTokenizerBase:
    """Train a tokenizer; `texts` is called once for the characters, if the kind needs them, and once to train.

    Raises:
        ConfigError: the texts have too few words for the vocabulary, or too many characters.
    """
    tokenizer = _TRAINERS[task.kind](task, texts)
    missing = task.total_size - len(tokenizer)
    assert missing >= task.reserved_tokens, f"{len(tokenizer)} entries of {task.total_size}"
    reserved = [AddedToken(f"<|reserved_{i}|>", special=True, normalized=False) for i in range(missing)]
    tokenizer.add_tokens(reserved, special_tokens=True)
    assert len(tokenizer) == task.total_size, f"{len(tokenizer)} entries, not {task.total_size}"
    return tokenizer


def characters_of(texts: Iterable[str], *, normalizer: normalizers.Normalizer | None, coverage: float) -> list[str]:
    """Return ASCII and the most frequent characters that make up this share of the texts, sorted; no blanks."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text if normalizer is None else normalizer.normalize_str(text))
    for character in list(counts):
        if character.isspace() or not character.isprintable() or character == BLANK:
            del counts[character]
    left, kept = coverage * counts.total(), list(ASCII)
    for character, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])):
        if left <= 0:
            break
        kept.append(character)
        left -= count
    return sorted(set(kept))


def _bbpe(task: TokenizerTaskConfig, texts: Texts) -> PreTrainedTokenizerBase:
    backend = Tokenizer(models.BPE())
    backend.normalizer = _FORMS[task.normalization][0] if _FORMS[task.normalization] else None
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=task.digits == "any")
    split = pre_tokenizers.Split(Regex(WORDS_OF_DIGITS[task.digits]), "isolated")
    backend.pre_tokenizer = byte_level if task.digits == "any" else pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=task.num_pieces + NUM_BYTES,
        min_frequency=task.min_frequency,
        max_token_length=task.max_token_length,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model = _model_after(backend, trainer, texts())
    _require_size(len(model["vocab"]) - NUM_BYTES, task=task)
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    backend.model = models.BPE(vocab=_numbered(_specials(task), pieces), merges=_merges(model))
    return _wrapped(backend, task)


def _spm_bpe(task: TokenizerTaskConfig, texts: Texts) -> PreTrainedTokenizerBase:
    backend = Tokenizer(models.BPE())
    backend.normalizer = _with_blanks(_FORMS[task.normalization])
    characters = _characters(task, texts, backend.normalizer)
    backend.pre_tokenizer = _sentencepiece_words(characters, digits=task.digits)
    trainer = trainers.BpeTrainer(
        vocab_size=task.num_pieces,
        min_frequency=task.min_frequency,
        max_token_length=task.max_token_length or MAX_LENGTH,
        initial_alphabet=[BLANK, *characters],
        show_progress=False,
    )
    model = _model_after(backend, trainer, texts())
    _require_size(len(model["vocab"]), task=task)
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    vocab = _numbered([*_specials(task), *_BYTES], pieces)
    unknown = task.specials["unk_token"]
    backend.model = models.BPE(vocab, _merges(model), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend.pre_tokenizer = None  # merges learnt within words join nothing else, as in Llama 2
    backend.decoder = _blanks_decoder()
    return _wrapped(backend, task)


def _unigram(task: TokenizerTaskConfig, texts: Texts) -> PreTrainedTokenizerBase:
    normalizer = _with_blanks(_FORMS[task.normalization])
    pieces = _unigram_pieces(task, texts, normalizer)
    names = _specials(task)
    vocab = [*((name, 0.0) for name in names), *((byte, BYTE_SCORE) for byte in _BYTES), *pieces]
    backend = Tokenizer(models.Unigram(vocab, names.index(task.specials["unk_token"]), True))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Split(BLANK, "merged_with_next")
    backend.decoder = _blanks_decoder()
    return _wrapped(backend, task)


def _deberta_v3(task: TokenizerTaskConfig, texts: Texts) -> PreTrainedTokenizerBase:
    from transformers import DebertaV2Tokenizer

    own = DebertaV2Tokenizer().backend_tokenizer.normalizer
    pieces = _unigram_pieces(task, texts, _with_blanks([own]))
    names = _specials(task)
    vocab = [*((name, 0.0) for name in names), *pieces]
    return DebertaV2Tokenizer(vocab=vocab, unk_id=names.index("[UNK]"), additional_special_tokens=task.additional)


def _wordpiece(task: TokenizerTaskConfig, texts: Texts) -> PreTrainedTokenizerBase:
    unknown = task.specials["unk_token"]
    backend = Tokenizer(models.WordPiece({unknown: 0}, unk_token=unknown))
    bert = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    backend.normalizer = normalizers.Sequence([*_FORMS[task.normalization], bert])
    characters = _characters(task, texts, backend.normalizer)
    digits = pre_tokenizers.Split(Regex(_DIGITS[task.digits]), "isolated")
    words = [pre_tokenizers.BertPreTokenizer(), *([] if task.digits == "any" else [digits])]
    rare = pre_tokenizers.Split(Regex(f"[^{_class_of(characters)}]+"), "removed")
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, rare])
    trainer = trainers.WordPieceTrainer(
        vocab_size=task.num_pieces,
        min_frequency=task.min_frequency,
        special_tokens=[*characters, *(f"##{character}" for character in characters)],
        show_progress=False,
    )
    model = _model_after(backend, trainer, texts())
    _require_size(len(model["vocab"]), task=task)
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    backend = Tokenizer(models.WordPiece(_numbered(_specials(task), pieces), unk_token=unknown))
    backend.normalizer = normalizers.Sequence([*_FORMS[task.normalization], bert])
    backend.pre_tokenizer = pre_tokenizers.Sequence(words)
    backend.decoder = decoders.WordPiece()
    tokenizer = _wrapped(backend, task)
    first, last = task.specials["cls_token"], task.specials["sep_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(name, backend.token_to_id(name)) for name in (first, last)],
    )
    tokenizer.backend_tokenizer.post_processor = backend.post_processor
    return tokenizer


_TRAINERS: dict[str, Callable[[TokenizerTaskConfig, Texts], PreTrainedTokenizerBase]] = {
    "bbpe": _bbpe,
    "spm_bpe": _spm_bpe,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "deberta_v3": _deberta_v3,
}
_BYTES = [f"<0x{byte:02X}>" for byte in range(NUM_BYTES)]


def _unigram_pieces(task: TokenizerTaskConfig, texts: Texts, normalizer: normalizers.Normalizer) -> Pieces:
    """Return the trained pieces with their scores, the likeliest first."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizer
    characters = _characters(task, texts, normalizer)
    backend.pre_tokenizer = _sentencepiece_words(characters, digits=task.digits)
    unknown = "<unk>"
    trainer = trainers.UnigramTrainer(
        vocab_size=task.num_pieces + 2,  # the mark and the unknown piece
        max_piece_length=task.max_token_length or MAX_LENGTH,
        initial_alphabet=characters,
        special_tokens=[unknown],
        unk_token=unknown,
        show_progress=False,
    )
    marked = (_PAIR_OF_WORDS.sub(rf"\1{MARK}", text.replace(MARK, "")) for text in texts())
    vocab = [(piece, score) for piece, score in _model_after(backend, trainer, marked)["vocab"] if piece != unknown]
    share = sum(math.exp(score) for piece, score in vocab if MARK in piece)
    pieces = [(piece, score - math.log1p(-share)) for piece, score in vocab if MARK not in piece]
    _require_size(len(pieces), task=task)
    rounded = [(piece, round(score, SCORE_DIGITS)) for piece, score in _in_order_of_unicode(pieces)]
    return sorted(rounded, key=lambda pair: (-pair[1], pair[0]))


def _in_order_of_unicode(pieces: Pieces) -> Pieces:
    """Give the scores of characters without an estimate, which the trainer spaces by `PENALTY`, in Unicode's order."""
    lowest = min(score for _, score in pieces)
    steps = {piece: (score - lowest) / PENALTY for piece, score in pieces if len(piece) == 1}
    spaced = sorted(p for p, step in steps.items() if step < len(steps) + 0.5 and abs(step - round(step)) < 1e-4)
    score_of = dict(pieces)
    scores = sorted(score_of[piece] for piece in spaced)
    return list((score_of | dict(zip(spaced, scores, strict=True))).items())


def _characters(task: TokenizerTaskConfig, texts: Texts, normalizer: normalizers.Normalizer) -> list[str]:
    """Return the characters of the vocabulary.

    Raises:
        ConfigError: there are more than the vocabulary has room for.
    """
    characters = characters_of(texts(), normalizer=normalizer, coverage=task.character_coverage)
    needed = (2 if task.kind == "wordpiece" else 1) * len(characters)
    if needed >= task.num_pieces:
        of_each = ", each twice," if task.kind == "wordpiece" else ""
        raise ConfigError(
            f"task.vocab_size={task.vocab_size}; {task.num_pieces} entries can be trained, and the texts have "
            f"{len(characters)} characters{of_each} before any word; raise it, or lower task.character_coverage="
            f"{task.character_coverage:g}."
        )
    return characters


def _sentencepiece_words(characters: list[str], *, digits: str) -> pre_tokenizers.PreTokenizer:
    """Return the division of a text for training: letters, digits and the rest apart, a blank before each.

    SentencePiece divides by script, in which digits and punctuation are one; here they are two. Characters that are not
    among `characters` are left out.
    """
    lead = f"{BLANK}?" if digits == "any" else ""
    kinds = (rf"{BLANK}?[\p{{L}}\p{{M}}]+", lead + _DIGITS[digits], rf"{BLANK}?[^{BLANK}{MARK}\p{{L}}\p{{M}}\p{{N}}]+")
    words = "|".join(f"{kind}{MARK}?" for kind in (*kinds, BLANK))
    rare = f"[^{_class_of([*characters, BLANK, MARK])}]+"
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(rare), "removed"), pre_tokenizers.Split(Regex(words), "isolated")]
    )


def _class_of(characters: list[str]) -> str:
    r"""Return the inside of a character class in Oniguruma's syntax.

    >>> _class_of(["a", "]"])
    '\\x{61}\\x{5d}'
    """
    return "".join(f"\\x{{{ord(character):x}}}" for character in characters)


def _with_blanks(forms: list[normalizers.Normalizer]) -> normalizers.Normalizer:
    """Return Mistral's normalizer: U+2581 for blanks, and one before the text."""
    return normalizers.Sequence([*forms, normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])


def _blanks_decoder() -> decoders.Decoder:
    """Return Mistral's decoder, the inverse of `_with_blanks`."""
    return decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def _model_after(backend: Tokenizer, trainer: Any, texts: Iterable[str]) -> dict[str, Any]:
    """Train, and return the model as in tokenizer.json.

    Raises:
        ConfigError: the library cannot train on these texts.
    """
    try:
        backend.train_from_iterator(_not_empty(texts), trainer)
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(f"task.kind; the tokenizer cannot be trained on these texts ({error}); add text.") from error
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    return model


def _not_empty(texts: Iterable[str]) -> Iterator[str]:
    return (text for text in texts if text)


def _merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    return [(first, second) for first, second in model["merges"]]


def _require_size(found: int, *, task: TokenizerTaskConfig) -> None:
    """Require as many trained entries as the vocabulary has room for.

    Raises:
        ConfigError: the texts gave fewer.
    """
    if found < task.num_pieces:
        most = task.vocab_size - task.num_pieces + found
        merged = "" if task.kind in ("unigram", "deberta_v3") else f" with task.min_frequency={task.min_frequency}"
        raise ConfigError(
            f"task.vocab_size={task.vocab_size}; the texts gave {found} of {task.num_pieces} entries to train{merged}; "
            f"set task.vocab_size={most} or less, or add text."
        )
    assert found == task.num_pieces, f"{found} entries trained, {task.num_pieces} asked for"


def _specials(task: TokenizerTaskConfig) -> list[str]:
    return [*task.specials.values(), *task.additional]


def _numbered(first: list[str], pieces: list[str]) -> dict[str, int]:
    """Return the vocabulary; a piece equal to a special token is left to that.

    Raises:
        ConfigError: one is.
    """
    same = sorted(set(first) & set(pieces))
    if same:
        raise ConfigError(
            f"task.special_tokens; {same[0]!r} is also an entry that the text gave; write it as text does not."
        )
    return {piece: number for number, piece in enumerate([*first, *pieces])}


def _wrapped(backend: Tokenizer, task: TokenizerTaskConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of transformers with the task's special tokens."""
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _specials(task)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **task.specials,
        additional_special_tokens=task.additional,
        clean_up_tokenization_spaces=False,
    )
