"""Text from token ids with a cache of one shape: one program reads prompts, one writes tokens, for each bucket.

A layer keeps the keys and values of every token, those that slide too: their window is in the mask. Layers of xLSTM
and of Gated DeltaNet keep a state of one size instead (mlstm.py, gated_delta.py). Prompts are padded on the left, so
that the rows of a batch write at one slot. The next token is chosen with static shapes and equals transformers' logits
processors; draws come from one uniform number a token, made on the host, so they are the same on every device for the
same logits. Legend: B rows, T slots of the prompt, S slots in all, N tokens written in one call, K key/value heads, D
head dimension, V vocabulary, C candidates."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tpu_experiments.config.errors import ConfigError, one_line
from tpu_experiments.config.task_schema import ChoiceConfig
from tpu_experiments.models.parts.attention import DECODE, FLASH
from tpu_experiments.models.parts.rope import frequencies_kept
from tpu_experiments.models.passes.draws import drawn
from tpu_experiments.models.passes.forward import (
    UNFIT,
    attention_input,
    by_layer_type,
    first_position,
    in_attention_form,
)
from tpu_experiments.runtime.base import Batch, Held, Runtime
from tpu_experiments.runtime.host_copies import on_host
from tpu_experiments.runtime.ops import BY_ROWS, LoopCall, Tensors, with_slot


class FreshCache:
    """Collects the keys and values of whole prompts (B, K, T, D) and returns them unchanged; and states of layers."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.layers: dict[int, tuple[Tensor, ...]] = {}

    def kept(self) -> list[tuple[Tensor, ...]]:
        """Return keys and values, or states, in the order of layers."""
        return [self.layers[index] for index in sorted(self.layers)]

    def state(self, layer_idx: int) -> None:
        """Return no state: these are the first tokens (models/families/delta_net.py)."""

    def keep(self, layer_idx: int, tensors: tuple[Tensor, ...]) -> None:
        """Store a layer's state after whole prompts."""
        self.layers[layer_idx] = tensors

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values, padded to (B, K, S, D); transformers' layers call it."""
        empty = (0, 0, 0, self.num_slots - key.shape[2])
        self.layers[layer_idx] = (F.pad(key, empty), F.pad(value, empty))
        return key, value

    def get_seq_length(self, *_: Any) -> int:
        """Return the number of tokens before those being computed, which is 0."""
        return 0


class FilledCache:
    """Writes the key and value of one token into its slot and returns all slots.

    Args:
        layers: keys and values (B, K, S, D), written in place where that is not XLA's to decide; or states.
        slot: number of the token's slot, (1,) int32.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, ...]], *, slot: Tensor) -> None:
        self.layers, self.slot = list(layers), slot

    def kept(self) -> Sequence[tuple[Tensor, ...]]:
        """Return keys and values, or states, in the order of layers."""
        return self.layers

    def state(self, layer_idx: int) -> tuple[Tensor, ...]:
        """Return a layer's state after the tokens before (models/families/delta_net.py)."""
        return self.layers[layer_idx]

    def keep(self, layer_idx: int, tensors: tuple[Tensor, ...]) -> None:
        """Replace a layer's state."""
        self.layers[layer_idx] = tensors

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write a layer's key and value of one token and return all slots; transformers' layers call it."""
        keys, values = self.layers[layer_idx]
        written = self._written(keys, key), self._written(values, value)
        self.layers[layer_idx] = written
        return written

    def _written(self, into: Tensor, part: Tensor) -> Tensor:
        if (
            into.device.type == "xla"
        ):  # of index_copy XLA makes a scatter, for which it copies a cache into another layout
            return with_slot(into, part, self.slot, 2)
        return into.index_copy_(2, self.slot.long(), part)

    def get_seq_length(self, *_: Any) -> int:
        """Return the number of slots; unused by the model, which is given positions and masks."""
        return int(self.layers[0][0].shape[2])


def slot_masks(pads_B: Tensor, *, slot: Tensor, num_slots: int, module: nn.Module) -> Any:
    """Return the model's `attention_mask` for the token in `slot` (1,): the slots it attends to per row.

    Rows begin after `pads_B` slots of padding. Boolean (B, 1, 1, S), one for each type of layer where the model has
    types, in the form that the module's attention expects.
    """
    index_S = torch.arange(num_slots, device=pads_B.device, dtype=torch.int32)
    full = ((index_S >= pads_B[:, None]) & (index_S <= slot))[:, None, None]

    def mask_of(window: int | None, chunk: int | None) -> Tensor:
        if chunk:
            begin_B1 = torch.div(slot - pads_B[:, None], chunk, rounding_mode="floor") * chunk + pads_B[:, None]
            return full & (index_S >= begin_B1)[:, None, None]
        return full & (index_S > slot - window) if window else full

    return in_attention_form(by_layer_type(mask_of, config=module.config), module)


@contextmanager
def without_kernel(module: nn.Module) -> Iterator[None]:
    """Replace the attention kernel and sdpa by attention to a cache (`decode`) inside the block.

    The kernel of `model.attention=flash` takes whole rows only. A class that does not take its attention from
    transformers' table keeps sdpa: by any other name Falcon's adds masks of truth values to its scores.
    """
    config: Any = module.config
    chosen = config._attn_implementation
    if chosen == FLASH or (chosen == "sdpa" and getattr(module, "_supports_attention_backend", True)):
        config._attn_implementation = DECODE
    try:
        yield
    finally:
        config._attn_implementation = chosen


def next_ids(
    logits_BV: Tensor,
    *,
    ids_BS: Tensor,
    pads_B: Tensor,
    slot: Tensor,
    uniform_B: Tensor,
    choice: ChoiceConfig,
    shape: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the next token of every row; returns ids (B,) int32 and their log-probabilities (B,) float32.

    A log-probability is that of the distribution that the token was drawn from; of the likeliest token, which is not
    drawn, that at temperature 1.

    Args:
        ids_BS: prompts and generated tokens, each row after `pads_B` slots of padding and up to `slot` (1,).
        uniform_B: float32 in [0, 1); unused without sampling.
        shape: float32 (1,) temperature or (2,) temperature and `top_p`, in the place of `choice`'s; a temperature of 0
            takes the likeliest token.
    """
    scores_BV = processed(logits_BV.to(torch.float32), ids_BS=ids_BS, pads_B=pads_B, slot=slot, choice=choice)
    if not choice.do_sample:
        token_B = scores_BV.argmax(-1).to(torch.int32)
        return token_B, _log_probs(scores_BV, token_B)
    if shape is not None:
        is_sampled = shape[:1] > 0
        heat = torch.where(is_sampled, shape[:1], 1.0)
        shape = torch.cat([heat, shape[1:]])
    top_p = choice.top_p if shape is None or len(shape) == 1 else None
    if choice.top_k == 0 and top_p == 1:
        scores_BV = scores_BV / (choice.temperature if shape is None else shape)
        token_B = drawn(scores_BV, uniform_B)
        if shape is not None:
            token_B = torch.where(is_sampled, token_B, scores_BV.argmax(-1).to(torch.int32))
        return token_B, _log_probs(scores_BV, token_B)
    if shape is not None:  # the number 0 takes the first candidate, which is the likeliest
        uniform_B = torch.where(is_sampled, uniform_B, 0.0)
    return drawn_of(*candidates(scores_BV, choice=choice, shape=shape), uniform_B)


def _log_probs(scores_BV: Tensor, token_B: Tensor) -> Tensor:
    return scores_BV.gather(1, token_B[:, None].long())[:, 0] - torch.logsumexp(scores_BV, -1)


def drawn_of(probabilities_BC: Tensor, ids_BC: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids (B,) int32 drawn from candidates by uniform numbers (B,) float32 in [0, 1), and log-probabilities."""
    reached_BC = probabilities_BC.cumsum(-1)
    # Inverse transform sampling. Scaled by the last sum, the distribution function reaches 1 despite rounding.
    place_B1 = (reached_BC <= uniform_B[:, None] * reached_BC[:, -1:]).sum(-1, keepdim=True)
    possible_B1 = (probabilities_BC > 0).sum(-1, keepdim=True)
    place_B1 = torch.minimum(place_B1, possible_B1 - 1)
    shares_B1 = probabilities_BC.gather(1, place_B1) / reached_BC[:, -1:]
    return ids_BC.gather(1, place_B1)[:, 0].to(torch.int32), torch.log(shares_B1)[:, 0]


def processed(logits_BV: Tensor, *, ids_BS: Tensor, pads_B: Tensor, slot: Tensor, choice: ChoiceConfig) -> Tensor:
    """Apply `repetition_penalty` and `no_repeat_ngram_size` to logits; padding does not count as text."""
    index_S = torch.arange(ids_BS.shape[1], device=ids_BS.device, dtype=torch.int32)
    is_text_BS = (index_S >= pads_B[:, None]) & (index_S <= slot)
    scores_BV, penalty = logits_BV, choice.repetition_penalty
    if penalty != 1:
        punished = torch.where(scores_BV < 0, scores_BV * penalty, scores_BV / penalty)
        scores_BV = torch.where(_occurring(ids_BS, where=is_text_BS, like=scores_BV), punished, scores_BV)
    if choice.no_repeat_ngram_size:
        ends_BS = is_text_BS & _ends_of_repeats(ids_BS, pads_B=pads_B, slot=slot, size=choice.no_repeat_ngram_size)
        scores_BV = scores_BV.masked_fill(_occurring(ids_BS, where=ends_BS, like=scores_BV), -torch.inf)
    return scores_BV


def candidates(scores_BV: Tensor, *, choice: ChoiceConfig, shape: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return probabilities and ids (B, C) of the tokens to sample from, likeliest first.

    Tokens outside `top_p` have probability 0. Of tokens that tie for the last place of `top_k`, transformers keeps all,
    and this keeps `top_k` in total.
    """
    num_ids = scores_BV.shape[-1]
    temperature = choice.temperature if shape is None else shape[:1]
    top_p = choice.top_p if shape is None or len(shape) == 1 else shape[1:]
    scaled_BV = scores_BV / temperature
    best_BC, ids_BC = torch.topk(scaled_BV, min(choice.top_k or num_ids, num_ids), dim=-1)
    probabilities_BC = torch.softmax(best_BC, dim=-1)
    before_BC = probabilities_BC.cumsum(-1) - probabilities_BC
    return torch.where(before_BC < top_p, probabilities_BC, 0.0), ids_BC


def _occurring(ids_BS: Tensor, *, where: Tensor, like: Tensor) -> Tensor:
    """Return which ids occur in a row's slots `where`: boolean (B, V)."""
    rows, num_ids = like.shape
    counts = torch.zeros(rows, num_ids + 1, device=like.device, dtype=torch.int32)  # an extra id takes the others
    targets = torch.where(where, ids_BS, num_ids).long()
    return counts.scatter(1, targets, torch.ones_like(ids_BS))[:, :num_ids] > 0


def _ends_of_repeats(ids_BS: Tensor, *, pads_B: Tensor, slot: Tensor, size: int) -> Tensor:
    """Return the slots (B, S) whose token, written next, would repeat an earlier run of `size` tokens."""
    index_S = torch.arange(ids_BS.shape[1], device=ids_BS.device, dtype=torch.int32)
    begins_B1 = pads_B[:, None] + size - 1
    match_BS = (index_S >= begins_B1) & (slot + 1 >= begins_B1)
    for back in range(1, size):
        place = (slot - (back - 1)).clamp(min=0).long()
        match_BS = match_BS & (ids_BS.roll(back, dims=1) == ids_BS.index_select(1, place))
    return match_BS


NEW = ("tokens", "log_probs")
"""Names of what the programs return of new tokens: ids, int32, and log-probabilities (`next_ids`), float32."""
SMALLEST = 1e-6
"""Smallest `top_p` of a call: the likeliest token alone, as 0 means in other programs."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one call are sampled with `do_sample`, in the place of the settings'."""

    temperature: float
    """0 takes the likeliest token."""
    top_p: float | None = None
    """None: the setting's. Either every call has one, or none: it is an input of the programs."""


@dataclass(frozen=True)
class Completions:
    """Answers to a batch of prompts, in arrays of one shape; 0 behind an answer's end."""

    ids_BN: NDArray[np.int32]
    log_probs_BN: NDArray[np.float32]
    """Of the tokens, as of `next_ids`."""
    lengths_B: NDArray[np.int64]
    """Tokens of each answer, the one that ended it included."""


def calls_of(max_new_tokens: int, *, tokens_per_call: int) -> tuple[int, int]:
    """Return the calls that an answer takes after its first token, and the tokens that one of them writes."""
    per_call = max(1, min(tokens_per_call, max_new_tokens - 1))
    return -(-(max_new_tokens - 1) // per_call), per_call


def program_shapes(
    buckets: Iterable[int], *, num_rows: int, max_new_tokens: int, tokens_per_call: int
) -> dict[str, set[tuple[int, ...]]]:
    """Return the shapes that a decoder's programs of these buckets are compiled for, as `Runtime.expect` takes them."""
    num_calls, per_call = calls_of(max_new_tokens, tokens_per_call=tokens_per_call)
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for length in buckets:
        shapes[f"read {length}"] = {(num_rows, length)}
        if num_calls:
            shapes[f"write {length}"] = {(num_rows, per_call)}
    return shapes


class Decoder:
    """Generates continuations of batches of prompts.

    Args:
        module: a model whose layers are not folded, on the runtime's device.
        num_rows: rows of every batch, rounded up to a multiple of the devices that split them; rows without a prompt
            are filled and computed as well.
        tokens_per_call: N.
        weights: returns the module's tensors by name, where they are replaced between calls (training/merged.py).
        is_alone: whether the runtime has no programs but these: then no other shapes of theirs are compiled. Otherwise
            the caller declares `program_shapes` with those of its own.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        runtime: Runtime,
        choice: ChoiceConfig,
        num_rows: int,
        max_new_tokens: int,
        tokens_per_call: int,
        seed: int,
        weights: Held = dict,
        is_alone: bool = True,
    ) -> None:
        self.module, self.runtime, self.choice = module.eval(), runtime, choice
        parts = runtime.folding.row_shards if runtime.folding is not None else 1
        self.num_rows = -(-num_rows // parts) * parts
        self.max_new_tokens, self.seed, self.weights, self.is_alone = max_new_tokens, seed, weights, is_alone
        self.num_calls, self.tokens_per_call = calls_of(max_new_tokens, tokens_per_call=tokens_per_call)
        self.buckets: dict[int, Bucket] = {}

    @property
    def num_programs(self) -> int:
        """Number of programs that the buckets used so far need."""
        return len(self.buckets) * (2 if self.num_calls else 1)

    def stream(
        self,
        prompts: Sequence[list[int]],
        *,
        draws: Sequence[int],
        bucket: int,
        sampling: Sampling | None = None,
    ) -> Iterator[list[list[int]]]:
        """Yield the tokens generated so far for every prompt, after each read; the caller stops at will.

        Args:
            prompts: at most `num_rows`, none empty or longer than `bucket`.
            draws: a number for each prompt; with the seed it determines the sampling, whatever else is in the batch.
            bucket: T.
            sampling: an input of the programs: another one compiles nothing. Either every call has one, or none.
        """
        written: list[list[int]] = [[] for _ in prompts]
        for tokens_BN, _ in self._new(prompts, draws=draws, bucket=bucket, sampling=sampling):
            for row, new in zip(written, tokens_BN.tolist(), strict=True):
                row += new
            yield [row[: self.max_new_tokens] for row in written]

    def complete(
        self,
        prompts: Sequence[list[int]],
        *,
        draws: Sequence[int],
        bucket: int,
        ends: Collection[int] = (),
        sampling: Sampling | None = None,
    ) -> "Completions":
        """Return the whole answers to prompts, with the log-probabilities of their tokens; arguments as of `stream`.

        Args:
            ends: ids that end an answer, which they are part of. Once all answers have ended, no more is computed.
        """
        tokens, log_probs, num = [], [], 0
        lengths_B = np.full(len(prompts), self.max_new_tokens)
        for tokens_BN, log_probs_BN in self._new(prompts, draws=draws, bucket=bucket, sampling=sampling):
            tokens.append(tokens_BN.numpy())
            log_probs.append(log_probs_BN.numpy())
            is_end_BN = np.isin(tokens[-1], list(ends))
            own_B = np.where(is_end_BN.any(1), num + is_end_BN.argmax(1) + 1, self.max_new_tokens)
            lengths_B = np.minimum(lengths_B, own_B)
            num += tokens_BN.shape[1]
            if num >= lengths_B.max():
                break
        shape = len(prompts), self.max_new_tokens
        found = Completions(np.zeros(shape, np.int32), np.zeros(shape, np.float32), lengths_B)
        for whole, parts in ((found.ids_BN, tokens), (found.log_probs_BN, log_probs)):
            part = np.concatenate(parts, 1)[:, : self.max_new_tokens]
            whole[:, : part.shape[1]] = part
            whole[np.arange(self.max_new_tokens) >= lengths_B[:, None]] = 0
        return found

    def _new(
        self, prompts: Sequence[list[int]], *, draws: Sequence[int], bucket: int, sampling: Sampling | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield new tokens (R, n) and log-probabilities of R prompts after each read."""
        if bucket not in self.buckets:
            self.buckets[bucket] = Bucket(self, length=bucket)
            if self.is_alone:
                how = {"max_new_tokens": self.max_new_tokens, "tokens_per_call": self.tokens_per_call}
                self.runtime.expect(program_shapes(self.buckets, num_rows=self.num_rows, **how))
        # Row by row, so that an answer does not depend on the rows beside it.
        filled = [*prompts, *[prompts[-1]] * (self.num_rows - len(prompts))]
        uniforms_BN = np.stack([self._uniforms(draw) for draw in draws])
        uniforms_BN = np.pad(uniforms_BN, ((0, self.num_rows - len(prompts)), (0, 0)))
        given = None
        if sampling is not None:
            top_p = [] if sampling.top_p is None else [max(sampling.top_p, SMALLEST)]
            given = torch.tensor([sampling.temperature, *top_p])
        with torch.no_grad():
            for new in self.buckets[bucket].generate(filled, torch.from_numpy(uniforms_BN), shape=given):
                tokens_BN, log_probs_BN = (tensor[: len(prompts)] for tensor in new)
                yield tokens_BN, log_probs_BN

    def _uniforms(self, draw: int) -> np.ndarray:
        random = np.random.Generator(np.random.Philox(key=np.array([self.seed % 2**64, draw], np.uint64)))
        return random.random(1 + self.num_calls * self.tokens_per_call, dtype=np.float32)


class Bucket:
    """The two programs for prompts of one padded length, and the tensors on the device between them."""

    def __init__(self, decoder: Decoder, *, length: int) -> None:
        self.decoder, self.length = decoder, length
        self.num_slots = length + decoder.num_calls * decoder.tokens_per_call
        """S of keys and values; token ids have one more, as the last token is read by nothing."""
        self.state: dict[str, Tensor] = {}
        runtime, weights = decoder.runtime, decoder.weights
        self.prefill_program = runtime.program(self.prefill, name=f"read {length}", held=weights)
        self.decode_program = runtime.program(
            self.generate_tokens, name=f"write {length}", held=lambda: {**self.state, **weights()}
        )

    def generate(
        self, prompts: Sequence[list[int]], uniforms_BN: Tensor, *, shape: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield new tokens (B, n) and their log-probabilities on the host: the first one, then N at a time."""
        decoder, put = self.decoder, self.decoder.runtime.put
        ids_BT = torch.zeros(len(prompts), self.length, dtype=torch.int32)
        for row, ids in enumerate(prompts):
            ids_BT[row, self.length - len(ids) :] = torch.tensor(ids, dtype=torch.int32)
        pads_B = torch.tensor([self.length - len(ids) for ids in prompts], dtype=torch.int32)
        more = {} if shape is None else {"shape": shape}
        batch = put({"ids": ids_BT, "pads": pads_B, "uniforms": uniforms_BN[:, 0].contiguous(), **more}, rows_dim=0)
        self.state = {}  # frees the cache of the batch before
        self.state = self.prefill_program(batch)
        yield self._on_host({name: self.state.pop(name) for name in NEW})
        for call in range(decoder.num_calls):
            begin = 1 + call * decoder.tokens_per_call
            end = begin + decoder.tokens_per_call
            batch = put({"uniforms": uniforms_BN[:, begin:end].contiguous(), **more}, rows_dim=0)
            yield self._on_host(self.decode_program(batch))

    def _on_host(self, new: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        tokens_BN, log_probs_BN = (on_host(new[name]).T for name in NEW)
        return tokens_BN, log_probs_BN

    def prefill(self, batch: Batch) -> dict[str, Tensor]:
        """Compute what layers keep of prompts `ids` (B, T), and the first token after them (prefill program).

        Raises:
            ConfigError: the model's layers keep neither keys and values nor a state.
        """
        module: Any = self.decoder.module
        ids_BT, pads_B = batch["ids"], batch["pads"]
        index_T = torch.arange(self.length, device=ids_BT.device, dtype=torch.int32)
        segments_BT = (index_T >= pads_B[:, None]).to(torch.int32)
        cache = module.empty_cache() if has_own_cache(module) else FreshCache(self.num_slots)
        positions = (index_T - pads_B[:, None]).clamp(min=0)
        try:
            logits_BV = _logits(
                module, ids_BT, positions=positions, masks=attention_input(segments_BT, module=module), cache=cache
            )
        except ConfigError:
            raise
        except UNFIT as error:
            raise _no_cache(module, f" ({one_line(error)})") from error
        layers = cache.kept()
        if not layers:
            raise _no_cache(module)
        layers = [tuple(self._by_rows(tensor) for tensor in kept) for kept in layers]
        slot = torch.full((1,), self.length - 1, device=ids_BT.device, dtype=torch.int32)
        ids_BS = self._by_rows(nn.functional.pad(ids_BT, (0, self.num_slots + 1 - self.length)))
        how = {"uniform_B": batch["uniforms"], "shape": batch.get("shape")}
        state, new = self._with_next(logits_BV, ids_BS, slot, pads_B=pads_B, **how)
        found = dict(zip(("ids", "slot"), state, strict=True)) | {"pads": pads_B} | _named(layers)
        return found | self._whole(tuple(tensor[None] for tensor in new))

    def generate_tokens(self, batch: Batch) -> dict[str, Tensor]:
        """Generate N more tokens in `state`; returns `NEW` of them, (N, B) each (decoding program)."""
        changed, new = self.next_states(batch)
        with torch.no_grad():
            for name, tensor in changed.items():
                self.state[name].copy_(tensor)
        return new

    def next_states(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what N more tokens, sampled by `uniforms` (B, N), change in `state`, and `NEW` of them."""
        state = self.state
        names = [name for name in state if name != "pads"]

        def body(carry: Tensors, xs: Tensors, consts: Tensors) -> tuple[Tensors, Tensors]:
            current = dict(zip(names, carry, strict=True))
            shape = consts[1] if len(consts) > 1 else None
            return self.next_state(current, pads_B=consts[0], uniform_B=xs[0], shape=shape)

        carry = tuple(state[name] for name in names)
        consts = (state["pads"], *(batch[name] for name in ("shape",) if name in batch))
        call = LoopCall(body, carry=carry, xs=(batch["uniforms"].T,), consts=consts)
        changed, new = self.decoder.runtime.loop(call)
        return dict(zip(names, changed, strict=True)), self._whole(new)

    def next_state(
        self, state: dict[str, Tensor], *, pads_B: Tensor, uniform_B: Tensor, shape: Tensor | None
    ) -> tuple[Tensors, Tensors]:
        """Return `state` with the token after `slot`, and `NEW` of it; layers have read the token in `slot`."""
        module: Any = self.decoder.module
        slot, ids_BS = state["slot"], state["ids"]
        layers = _layers(state)
        cache = module.filled_cache(layers) if has_own_cache(module) else FilledCache(layers, slot=slot)
        with without_kernel(module):
            logits_BV = _logits(
                module,
                ids_BS.index_select(1, slot.long()),
                positions=slot - pads_B[:, None],
                masks=self._masks(pads_B, slot=slot),
                cache=cache,
            )
        written, new = self._with_next(logits_BV, ids_BS, slot, pads_B=pads_B, uniform_B=uniform_B, shape=shape)
        return (*written, *_named(cache.kept()).values()), new

    def _whole(self, new: Tensors) -> dict[str, Tensor]:
        """Return `NEW` by name, whole on every device, so that the host reads them from any."""
        constrain = self.decoder.runtime.constrain
        return {name: constrain(tensor, axes=()) for name, tensor in zip(NEW, new, strict=True)}

    def _by_rows(self, tensor: Tensor) -> Tensor:
        return self.decoder.runtime.constrain(tensor, axes=BY_ROWS)

    def _masks(self, pads_B: Tensor, *, slot: Tensor) -> Any:
        """Return the model's `attention_mask` for one token; None where a state has seen all tokens before it."""
        module = self.decoder.module
        if has_own_cache(module):
            return None
        return slot_masks(pads_B, slot=slot, num_slots=self.num_slots, module=module)

    def _with_next(self, logits_BV: Tensor, ids_BS: Tensor, slot: Tensor, **given: Any) -> tuple[Tensors, Tensors]:
        """Choose the next token; returns the ids with it in place and its slot, and `NEW` of it, (B,) each."""
        new = next_ids(logits_BV, ids_BS=ids_BS, slot=slot, choice=self.decoder.choice, **given)
        return (ids_BS.index_copy(1, (slot + 1).long(), new[0][:, None]), slot + 1), new


def _no_cache(module: nn.Module, reason: str = "") -> ConfigError:
    return ConfigError(
        f"task=generate with {type(module).__name__}; its layers keep no keys and values, nor states that are known "
        f"here{reason}; use transformers' generate."
    )


def _logits(module: nn.Module, ids_BT: Tensor, *, positions: Tensor, masks: Any, cache: Any) -> Tensor:
    """Return the logits of the last token of every row, (B, V)."""
    first = first_position(module)
    positions = positions + first if first else positions
    given = {"position_ids": positions, "attention_mask": masks, "past_key_values": cache}
    keep: Any = 1
    if getattr(module.config, "num_kv_shared_layers", 0):  # of a number, these layers would compute its tokens alone
        keep = torch.full((1,), ids_BT.shape[1] - 1, device=ids_BT.device)
    with frequencies_kept(module):
        out = module(input_ids=ids_BT, use_cache=True, logits_to_keep=keep, **given)
    logits_BV: Tensor = out.logits[:, -1]
    return logits_BV


def has_own_cache(module: nn.Module) -> bool:
    """Return whether a model makes its cache itself: by `empty_cache()` and `filled_cache(layers)`."""
    return hasattr(module, "empty_cache")


def _named(layers: Sequence[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """Name the tensors that layers keep, in the order of layers."""
    return {f"layer{i}.{j}": tensor for i, kept in enumerate(layers) for j, tensor in enumerate(kept)}


def _layers(state: dict[str, Tensor]) -> list[tuple[Tensor, ...]]:
    """Return the tensors that `_named` named, layer by layer."""
    layers: dict[str, list[Tensor]] = {}
    for name, tensor in state.items():
        layer, is_kept, _ = name.partition(".")
        if is_kept:
            layers.setdefault(layer, []).append(tensor)
    return [tuple(kept) for kept in layers.values()]
