"""What llama.cpp calls the parts of a tokenizer: types of tokens, and the ways in which text is divided into words."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens, `gguf.TokenType`."""
BLANK = "\u2581"
"""What SentencePiece has in the place of a blank."""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What tokenizers' `ByteLevel` with `use_regex` splits by."""
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")
DIGITS = "digits, then " + GPT2
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_REST}"
TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_REST}"
PRE_TOKENIZERS = {
    (GPT2, False): "gpt-2",
    (DIGITS, False): "smollm",
    (LLAMA3, True): "llama-bpe",
    (LLAMA3, False): "dbrx",
    (QWEN2, False): "qwen2",
    (QWEN35, False): "qwen35",
    (GPT4O, False): "gpt-4o",
    (TEKKEN, True): "tekken",
}
"""llama.cpp's name (src/llama-vocab.cpp) by regular expression and whether a word of the vocabulary is taken whole."""
APPROXIMATE = {"gpt-4o", "tekken"}
"""Names whose code in llama.cpp tells upper from lower case in ASCII alone."""
