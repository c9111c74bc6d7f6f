"""A GGUF file as llama.cpp reads it, through the library that the package xllamacpp ships.

xllamacpp wraps llama.cpp's server, which gives the probabilities of one next token. Those of every token of a document
come from llama.cpp's own C functions (include/llama.h), which its extension module exports.
"""

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

CHUNK = 128
"""Tokens in one call of `llama_decode`: llama.cpp keeps logits (CHUNK, V) beside those that are returned."""
F32 = 0
"""ggml's number of float32."""
NO_FLASH_ATTENTION = 0
ERROR = 4
"""ggml's level of error messages."""


class _ModelParams(ctypes.Structure):
    """The beginning of `llama_model_params`, and room for more than its rest (78 bytes in xllamacpp 2026.10)."""

    _fields_ = (
        ("devices", ctypes.c_void_p),
        ("tensor_buft_overrides", ctypes.c_void_p),
        ("n_gpu_layers", ctypes.c_int32),
        ("split_mode", ctypes.c_int32),
        ("rest", ctypes.c_uint8 * 232),
    )


class _ContextParams(ctypes.Structure):
    """The beginning of `llama_context_params`, and room for more than its rest (168 bytes in xllamacpp 2026.10)."""

    _fields_ = (
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("n_rs_seq", ctypes.c_uint32),
        ("n_outputs_max", ctypes.c_uint32),
        ("n_outputs_max_per_seq", ctypes.c_uint32),
        ("n_threads", ctypes.c_int32),
        ("n_threads_batch", ctypes.c_int32),
        ("ctx_type", ctypes.c_int32),
        ("rope_scaling_type", ctypes.c_int32),
        ("pooling_type", ctypes.c_int32),
        ("attention_type", ctypes.c_int32),
        ("flash_attn_type", ctypes.c_int32),
        ("rope_freq_base", ctypes.c_float),
        ("rope_freq_scale", ctypes.c_float),
        ("yarn_ext_factor", ctypes.c_float),
        ("yarn_attn_factor", ctypes.c_float),
        ("yarn_beta_fast", ctypes.c_float),
        ("yarn_beta_slow", ctypes.c_float),
        ("yarn_orig_ctx", ctypes.c_uint32),
        ("defrag_thold", ctypes.c_float),
        ("cb_eval", ctypes.c_void_p),
        ("cb_eval_user_data", ctypes.c_void_p),
        ("type_k", ctypes.c_int32),
        ("type_v", ctypes.c_int32),
        ("rest", ctypes.c_uint8 * 144),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


DEFAULTS: dict[str, float] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "yarn_beta_slow": -1.0,
    "type_k": 1,
    "type_v": 1,
}
"""Values of llama.cpp's `llama_context_default_params`, which stand elsewhere in a build of another layout."""
MODEL_DEFAULTS = {"n_gpu_layers": -1, "split_mode": 1}
_errors: list[str] = []
"""Error messages of the model that is being read."""


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _keep_errors(level: int, text: bytes | None, _: object) -> None:
    if level == ERROR and text:
        _errors.append(text.decode(errors="replace").strip())


@cache
def _library() -> Any:
    """Load llama.cpp and declare the functions that are called.

    Raises:
        ImportError: xllamacpp is not installed, or its structs are laid out in another way.
    """
    import xllamacpp  # type: ignore[import-untyped]

    lib = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "llama_model_default_params": (_ModelParams, []),
        "llama_context_default_params": (_ContextParams, []),
        "llama_log_set": (None, [pointer, pointer]),
        "llama_backend_init": (None, []),
        "llama_model_load_from_file": (pointer, [text, _ModelParams]),
        "llama_model_free": (None, [pointer]),
        "llama_model_get_vocab": (pointer, [pointer]),
        "llama_vocab_n_tokens": (number, [pointer]),
        "llama_init_from_model": (pointer, [pointer, _ContextParams]),
        "llama_free": (None, [pointer]),
        "llama_decode": (number, [pointer, _Batch]),
        "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [pointer, number]),
        "llama_tokenize": (
            number,
            [pointer, text, number, ctypes.POINTER(number), number, ctypes.c_bool, ctypes.c_bool],
        ),
    }
    for name, (returned, taken) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = returned, taken
    context, model = lib.llama_context_default_params(), lib.llama_model_default_params()
    found = {name: getattr(context, name) for name in DEFAULTS} | {
        name: getattr(model, name) for name in MODEL_DEFAULTS
    }
    if found != DEFAULTS | MODEL_DEFAULTS:
        raise ImportError("another layout", name=f"xllamacpp 2026.10 (there is {version('xllamacpp')})")
    lib.llama_log_set(ctypes.cast(_keep_errors, pointer), None)
    lib.llama_backend_init()
    return lib


class LlamaCppModel:
    """A GGUF file in memory. It computes on the CPU with a KV cache of float32 and without flash attention.

    Args:
        drops_blank: whether a text's first blank is left out before llama.cpp splits it, because llama.cpp puts one
            there and the tokenizer does not.

    Raises:
        ImportError: xllamacpp is not installed, or is a release of another layout.
        OSError: llama.cpp cannot load the file.
    """

    def __init__(self, file: str, *, drops_blank: bool = False) -> None:
        self._lib, self._drops_blank = _library(), drops_blank
        self.name = f"llama.cpp (xllamacpp {version('xllamacpp')})"
        params = self._lib.llama_model_default_params()
        params.n_gpu_layers = 0
        _errors.clear()
        self._model = self._lib.llama_model_load_from_file(file.encode(), params)
        if not self._model:
            raise OSError("; ".join(_errors[:3]) or "llama.cpp gives no reason")
        weakref.finalize(self, self._lib.llama_model_free, self._model)
        self._vocab = self._lib.llama_model_get_vocab(self._model)
        self.vocab_size: int = self._lib.llama_vocab_n_tokens(self._vocab)

    def ids(self, text: str, *, adds: bool = False) -> list[int]:
        """Return the tokens of a text, in which names of control tokens are plain text.

        Args:
            adds: whether the tokens that the file puts around a text are among them.
        """
        data = (text.removeprefix(" ") if self._drops_blank else text).encode()
        ids = (ctypes.c_int32 * (len(data) + 16))()
        count = self._lib.llama_tokenize(self._vocab, data, len(data), ids, len(ids), adds, False)
        if count < 0:
            raise RuntimeError(f"llama.cpp gives {-count} tokens for {len(data)} bytes")
        return ids[:count]

    @torch.no_grad()
    def log_probs(self, ids: Sequence[int]) -> Tensor:
        """Return the log-probabilities (T, V) of the token after each of `ids`."""
        out_TV = torch.empty(len(ids), self.vocab_size)
        with self.context(len(ids)) as context:
            for start in range(0, len(ids), CHUNK):
                piece = ids[start : start + CHUNK]
                self._decode(context, piece, start=start)
                for row in range(len(piece)):
                    out_TV[start + row] = self._logits(context, row)
        return torch.log_softmax(out_TV, -1)

    @torch.no_grad()
    def greedy(self, ids: Sequence[int], *, num: int) -> list[int]:
        """Return the likeliest continuation."""
        written: list[int] = []
        with self.context(len(ids) + num) as context:
            for start in range(0, len(ids), CHUNK):
                piece = ids[start : start + CHUNK]
                self._decode(context, piece, start=start)
            last = len(piece) - 1
            while len(written) < num:
                written.append(int(self._logits(context, last).argmax()))
                self._decode(context, written[-1:], start=len(ids) + len(written) - 1)
                last = 0
        return written

    @contextmanager
    def context(self, length: int) -> Iterator[int]:
        """Yield the address of an empty context for `length` tokens."""
        params = self._lib.llama_context_default_params()
        params.n_ctx = -(-length // CHUNK) * CHUNK
        params.n_batch = params.n_ubatch = CHUNK
        params.n_outputs_max = params.n_outputs_max_per_seq = 0  # as many as n_batch
        params.type_k = params.type_v = F32
        params.flash_attn_type = NO_FLASH_ATTENTION
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        _errors.clear()
        made = self._lib.llama_init_from_model(self._model, params)
        if not made:
            raise RuntimeError("; ".join(_errors[:3]) or "llama.cpp makes no context")
        try:
            yield made
        finally:
            self._lib.llama_free(made)

    def _decode(self, context: int, ids: Sequence[int], *, start: int) -> None:
        """Append tokens at positions from `start` on; the logits of each are kept until the next call."""
        count = len(ids)
        batch = _Batch(
            n_tokens=count,
            token=(ctypes.c_int32 * count)(*ids),
            pos=(ctypes.c_int32 * count)(*range(start, start + count)),
            logits=(ctypes.c_int8 * count)(*[1] * count),
        )
        code = self._lib.llama_decode(context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returns {code} at token {start}: {'; '.join(_errors[:3])}")

    def _logits(self, context: int, row: int) -> Tensor:
        address = self._lib.llama_get_logits_ith(context, row)
        if not address:
            raise RuntimeError(f"llama.cpp has no logits of token {row}")
        logits_V = (ctypes.c_float * self.vocab_size).from_address(ctypes.addressof(address.contents))
        return torch.frombuffer(logits_V, dtype=torch.float32).clone()
