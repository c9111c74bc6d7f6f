"""Text generation with a static-shape cache: per bucket one program for prompts, one for new tokens.

Prompts are padded on the left, so that the rows of a batch write to the same slot. Legend: B rows, T slots of the
prompt, S slots in all, N tokens generated in one call, V vocabulary.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.generating import ChoiceConfig
from tpu_experiments.models.forward import attention_input
from tpu_experiments.models.generation.cache import FilledCache, FreshCache, kernel_left_out, slot_masks
from tpu_experiments.models.generation.choosing import next_ids
from tpu_experiments.runtime.base import Batch, Runtime
from tpu_experiments.runtime.loop import Tensors

log = logging.getLogger(__name__)


class Decoder:
    """Generates continuations of batches of prompts.

    Args:
        module: a model whose layers are not folded, on the runtime's device.
        num_rows: rows of every batch; rows without a prompt are filled and computed as well.
        tokens_per_call: N.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        runtime: Runtime,
        how: ChoiceConfig,
        num_rows: int,
        max_new_tokens: int,
        tokens_per_call: int,
        seed: int,
    ) -> None:
        self.module, self.runtime, self.how, self.num_rows = module.eval(), runtime, how, num_rows
        self.max_new_tokens, self.seed = max_new_tokens, seed
        self.tokens_per_call = max(1, min(tokens_per_call, max_new_tokens - 1))
        self.num_calls = -(-(max_new_tokens - 1) // self.tokens_per_call)
        self.buckets: dict[int, Bucket] = {}

    @property
    def num_programs(self) -> int:
        """Number of programs that the buckets used so far need."""
        return len(self.buckets) * (2 if self.num_calls else 1)

    def stream(self, prompts: Sequence[list[int]], *, draws: Sequence[int], bucket: int) -> Iterator[list[list[int]]]:
        """Yield the tokens generated so far for every prompt, after each read; the caller stops at will.

        Args:
            prompts: at most `num_rows`, none empty or longer than `bucket`.
            draws: a number for each prompt; with the seed it determines the sampling, whatever else is in the batch.
            bucket: T.
        """
        if bucket not in self.buckets:
            self.buckets[bucket] = Bucket(self, length=bucket)
            self._expect()
        # Row by row, so that an answer does not depend on the rows beside it.
        filled = [*prompts, *[prompts[-1]] * (self.num_rows - len(prompts))]
        uniforms_BN = np.stack([self._uniforms(draw) for draw in draws])
        uniforms_BN = np.pad(uniforms_BN, ((0, self.num_rows - len(prompts)), (0, 0)))
        with torch.no_grad():
            for written_BN in self.buckets[bucket].write(filled, torch.from_numpy(uniforms_BN)):
                yield written_BN[: len(prompts), : self.max_new_tokens].tolist()

    def _uniforms(self, draw: int) -> np.ndarray:
        random = np.random.Generator(np.random.Philox(key=np.array([self.seed % 2**64, draw], np.uint64)))
        return random.random(1 + self.num_calls * self.tokens_per_call, dtype=np.float32)

    def _expect(self) -> None:
        shapes: dict[str, set[tuple[int, ...]]] = {}
        for length in self.buckets:
            shapes |= {
                f"read {length}": {(self.num_rows, length)},
                f"write {length}": {(self.tokens_per_call, self.num_rows)},
            }
        self.runtime.expect(shapes)


class Bucket:
    """The two programs for prompts of one padded length, and the tensors on the device between them."""

    def __init__(self, decoder: Decoder, *, length: int) -> None:
        self.decoder, self.length = decoder, length
        self.num_slots = length + 1 + decoder.num_calls * decoder.tokens_per_call
        self.state: dict[str, Tensor] = {}
        runtime = decoder.runtime
        self.read_program = runtime.program(self.read, name=f"read {length}")
        self.write_program = runtime.program(self.write_some, name=f"write {length}", held=lambda: self.state)

    def write(self, prompts: Sequence[list[int]], uniforms_BN: Tensor) -> Iterator[Tensor]:
        """Yield the tokens generated so far (B, n) on the host: after the first one, then N at a time."""
        decoder, put = self.decoder, self.decoder.runtime.put
        ids_BT = torch.zeros(len(prompts), self.length, dtype=torch.int32)
        for row, ids in enumerate(prompts):
            ids_BT[row, self.length - len(ids) :] = torch.tensor(ids, dtype=torch.int32)
        pads_B = torch.tensor([self.length - len(ids) for ids in prompts], dtype=torch.int32)
        batch = put({"ids": ids_BT, "pads": pads_B, "uniforms": uniforms_BN[:, 0].contiguous()}, rows_dim=-1)
        self.state = self.read_program(batch)
        yield self._written(self.state["ids"], 1)
        for call in range(decoder.num_calls):
            begin = 1 + call * decoder.tokens_per_call
            end = begin + decoder.tokens_per_call
            batch = put({"uniforms": uniforms_BN[:, begin:end].T.contiguous()}, rows_dim=-1)
            yield self._written(self.write_program(batch)["ids"], end)

    def _written(self, ids_BS: Tensor, num: int) -> Tensor:
        return ids_BS.cpu()[:, self.length : self.length + num]

    def read(self, batch: Batch) -> dict[str, Tensor]:
        """Compute keys and values of prompts `ids` (B, T), and the first token after them (prefill program).

        Raises:
            ConfigError: the model's layers keep no keys and values.
        """
        module, ids_BT, pads_B = self.decoder.module, batch["ids"], batch["pads"]
        index_T = torch.arange(self.length, device=ids_BT.device, dtype=torch.int32)
        segments_BT = (index_T >= pads_B[:, None]).to(torch.int32)
        cache = FreshCache(self.num_slots)
        logits_BV = _logits(
            module,
            ids_BT,
            positions=(index_T - pads_B[:, None]).clamp(min=0),
            masks=attention_input(segments_BT, module=module),
            cache=cache,
        )
        layers = [cache.layers[index] for index in sorted(cache.layers)]
        if not layers:
            raise ConfigError(
                f"task=generate with {type(module).__name__}; its layers keep no keys and values, which is the only "
                "cache that is known here; use transformers' generate."
            )
        slot = torch.full((1,), self.length - 1, device=ids_BT.device, dtype=torch.int32)
        ids_BS = nn.functional.pad(ids_BT, (0, self.num_slots - self.length))
        state = self._with_next(logits_BV, ids_BS, slot, pads_B=pads_B, uniform_B=batch["uniforms"])
        return dict(zip(("ids", "slot"), state, strict=True)) | {"pads": pads_B} | _named(layers)

    def write_some(self, batch: Batch) -> dict[str, Tensor]:
        """Generate N more tokens in `state`; returns `ids` as a separate tensor (decoding program)."""
        new = self.more(batch)
        with torch.no_grad():
            for name, tensor in new.items():
                self.state[name].copy_(tensor)
        return {"ids": new["ids"]}

    def more(self, batch: Batch) -> dict[str, Tensor]:
        """Return what N more tokens, sampled by `uniforms` (N, B), change in `state`."""
        state = self.state
        names = [name for name in state if name != "pads"]

        def body(carry: Tensors, xs: Tensors, consts: Tensors) -> tuple[Tensors, Tensors]:
            return self.one_more(dict(zip(names, carry, strict=True)), pads_B=consts[0], uniform_B=xs[0]), ()

        carry = tuple(state[name] for name in names)
        new, _ = self.decoder.runtime.loop(body, carry=carry, xs=(batch["uniforms"],), consts=(state["pads"],))
        return dict(zip(names, new, strict=True))

    def one_more(self, state: dict[str, Tensor], *, pads_B: Tensor, uniform_B: Tensor) -> Tensors:
        """Return `state` with the token after `slot`; keys and values of the token in `slot` are written."""
        module, slot, ids_BS = self.decoder.module, state["slot"], state["ids"]
        layers = [(state[name], state[f"value{name[3:]}"]) for name in state if name.startswith("key")]
        with kernel_left_out(module):
            logits_BV = _logits(
                module,
                ids_BS.index_select(1, slot.long()),
                positions=slot - pads_B[:, None],
                masks=slot_masks(pads_B, slot=slot, num_slots=self.num_slots, module=module),
                cache=FilledCache(layers, slot=slot),
            )
        return (
            *self._with_next(logits_BV, ids_BS, slot, pads_B=pads_B, uniform_B=uniform_B),
            *_named(layers).values(),
        )

    def _with_next(self, logits_BV: Tensor, ids_BS: Tensor, slot: Tensor, **given: Tensor) -> Tensors:
        """Choose the next token; returns the ids with it in place, and its slot."""
        uniform_B = given.pop("uniform_B")
        token_B = next_ids(logits_BV, ids_BS=ids_BS, slot=slot, uniform_B=uniform_B, how=self.decoder.how, **given)
        return ids_BS.index_copy(1, (slot + 1).long(), token_B[:, None]), slot + 1


def _logits(module: nn.Module, ids_BT: Tensor, *, positions: Tensor, masks: Any, cache: Any) -> Tensor:
    """Return the logits of the last token of every row, (B, V)."""
    given = {"position_ids": positions, "attention_mask": masks, "past_key_values": cache}
    out = module(input_ids=ids_BT, use_cache=True, logits_to_keep=1, **given)
    logits_BV: Tensor = out.logits[:, -1]
    return logits_BV


def _named(layers: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Name keys and values, in the order of layers."""
    return {f"{kind}{i}": t for i, pair in enumerate(layers) for kind, t in zip(("key", "value"), pair, strict=True)}
