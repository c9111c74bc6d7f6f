"""Lower the two programs that generate text (models/passes/generation.py) on placeholders."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tpu_experiments.models.passes.generation import NEW, Bucket, Decoder
from tpu_experiments.runtime.lowered import Lowered


def lowered_decoding(decoder: Decoder, *, length: int, with_shape: int = 0) -> tuple[Lowered, Lowered]:
    """Lower the reading of prompts of `length` tokens, and the writing of `decoder.tokens_per_call` tokens.

    Args:
        decoder: its runtime lowers programs instead of running them.
        with_shape: 1 where the temperature is an input of the programs, 2 where `top_p` is one as well.
    """
    runtime: Any = decoder.runtime
    bucket, rows = Bucket(decoder, length=length), decoder.num_rows
    more = {"shape": torch.empty(with_shape, device="meta")} if with_shape else {}
    prompts = {"ids": _ids(rows, length), "pads": _ids(rows), "uniforms": torch.empty(rows, device="meta"), **more}
    kept: dict[str, Tensor] = {}

    def prefill(sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made = bucket.prefill(sent)
        kept.update({n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in made.items() if n not in NEW})
        return made

    def write(sent: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        bucket.state = {name: sent[name] for name in kept}
        return bucket.next_states({name: tensor for name, tensor in sent.items() if name not in kept})

    with torch.no_grad():
        read: Lowered = runtime.lower(prefill, name="read", batch=prompts, rows_dim=0, as_run=bucket.prefill_program)
        uniforms = {"uniforms": torch.empty(rows, decoder.tokens_per_call, device="meta"), **more}
        written: Lowered = runtime.lower(
            write,
            name="write",
            batch=uniforms | kept,
            rows_dim=0,
            renewed=lambda out: [(bucket.state[name], tensor) for name, tensor in out[0].items()],
            as_run=bucket.decode_program,
        )
    return replace(read, has_split_results=True), written


def _ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")
