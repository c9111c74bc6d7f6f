"""Text from a masked diffusion model (LLaDA, arXiv 2502.09992): an answer of masked tokens, filled block by block.

The answer begins as mask tokens. Its blocks are filled from left to right, each in a fixed number of steps: a step
predicts every masked token of the block from the prompt and the whole answer, and keeps those that the model is surest
of; the others stay masked. After n of N steps floor(n K / N) tokens of the block are filled, so that shapes are static
and one program, for each bucket of prompt lengths, fills any block. Nothing is cached, since every token's keys and
values change with the others. Draws are hashes of one word a prompt, the same on every device for the same logits.
Legend: B rows, T slots of the prompt, S slots in all, K tokens of a block, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tpu_experiments.config.task_schema import ChoiceConfig, DenoisingConfig
from tpu_experiments.models.parts.dropout import GOLDEN, hashed, token_words, uniform
from tpu_experiments.models.passes.forward import attention_input
from tpu_experiments.models.passes.generation import Sampling, candidates, drawn_of
from tpu_experiments.runtime.base import Batch, Runtime
from tpu_experiments.runtime.host_copies import on_host
from tpu_experiments.runtime.ops import LoopCall, Tensors

CHOSEN, KEPT = range(2)
"""Sites of the draws of a token: which one it is, and, with random remasking, whether it is kept."""


class Denoiser:
    """Fills answers of batches of prompts; has the methods of models/passes/generation.py's Decoder.

    Args:
        module: a decoder without its causal mask, whose layers are not folded, on the runtime's device.
        mask_id: the mask token, which is never an answer's.
        num_rows: rows of every batch; rows without a prompt are filled and computed as well.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        runtime: Runtime,
        choice: ChoiceConfig,
        settings: DenoisingConfig,
        mask_id: int,
        num_rows: int,
        max_new_tokens: int,
        seed: int,
    ) -> None:
        self.module, self.runtime, self.choice, self.settings = module.eval(), runtime, choice, settings
        self.mask_id, self.num_rows, self.max_new_tokens, self.seed = mask_id, num_rows, max_new_tokens, seed
        self.num_blocks = -(-max_new_tokens // settings.block)
        self.programs: dict[int, Any] = {}

    @property
    def buckets(self) -> tuple[int, ...]:
        """Return the prompt lengths used so far."""
        return tuple(self.programs)

    @property
    def num_programs(self) -> int:
        """Return the number of programs that these lengths need: one each."""
        return len(self.programs)

    def stream(
        self,
        prompts: Sequence[list[int]],
        *,
        draws: Sequence[int],
        bucket: int,
        sampling: Sampling | None = None,
    ) -> Iterator[list[list[int]]]:
        """Yield the answer so far of every prompt, after each block; the caller stops at will.

        Args:
            prompts: at most `num_rows`, none empty or longer than `bucket`.
            draws: a number for each prompt; with the seed it determines the sampling, whatever else is in the batch.
            bucket: T.
            sampling: must be None; that of `choice` is constant in the program.
        """
        assert sampling is None, "task=serve refuses models of masked diffusion"
        slots, block = bucket + self.num_blocks * self.settings.block, self.settings.block
        if bucket not in self.programs:
            self.programs[bucket] = self.runtime.program(self.fill_block, name=f"denoise {bucket}")
            self.runtime.expect({f"denoise {b}": {(self.num_rows, slots - bucket + b)} for b in self.programs})
        filled = [*prompts, *[prompts[-1]] * (self.num_rows - len(prompts))]
        ids_BS = torch.full((self.num_rows, slots), self.mask_id, dtype=torch.int32)
        for row, ids in enumerate(filled):
            ids_BS[row, bucket - len(ids) : bucket] = torch.tensor(ids, dtype=torch.int32)
        words = [self._word(draw) for draw in draws]
        given = {
            "ids": ids_BS,
            "pads": torch.tensor([bucket - len(ids) for ids in filled], dtype=torch.int32),
            "words": torch.tensor([*words, *[words[-1]] * (self.num_rows - len(words))], dtype=torch.int32),
            "first": torch.tensor([bucket], dtype=torch.int32),
        }
        batch = self.runtime.put(given, rows_dim=-1)
        with torch.no_grad():
            for number in range(1, self.num_blocks + 1):
                batch = self.programs[bucket](batch)
                end = min(bucket + number * block, bucket + self.max_new_tokens)
                yield on_host(batch["ids"])[: len(prompts), bucket:end].tolist()

    def _word(self, draw: int) -> int:
        random = np.random.Philox(key=np.array([self.seed % 2**64, draw], np.uint64))
        return int(random.random_raw() >> 32) - 2**31

    def fill_block(self, batch: Batch) -> dict[str, Tensor]:
        """Fill the block that begins at slot `first`; returns the batch with it filled and the next one's `first`.

        Slots before it in `ids` (B, S) hold the prompt, after `pads` slots of padding, and finished blocks.
        """
        steps, block, device = self.settings.steps, self.settings.block, batch["ids"].device
        # int32 arithmetic of small numbers, so that no table of the schedule is written into the program.
        number_N = torch.arange(1, steps + 1, dtype=torch.int32, device=device)
        filled_N = torch.div(number_N * block, steps, rounding_mode="floor")

        def body(carry: Tensors, xs: Tensors, consts: Tensors) -> tuple[Tensors, Tensors]:
            pads_B, words_B, first = consts
            return (self.next_state(carry[0], xs, pads_B=pads_B, words_B=words_B, first=first),), ()

        consts = (batch["pads"], batch["words"], batch["first"])
        (ids_BS,), _ = self.runtime.loop(LoopCall(body, carry=(batch["ids"],), xs=(number_N, filled_N), consts=consts))
        return {**batch, "ids": ids_BS, "first": batch["first"] + block}

    def next_state(self, ids_BS: Tensor, xs: Tensors, *, pads_B: Tensor, words_B: Tensor, first: Tensor) -> Tensor:
        """Return the ids after one step; `xs` are its number and the tokens of the block that are then filled."""
        number, num_filled = xs
        slot_K = first + torch.arange(self.settings.block, dtype=torch.int32, device=ids_BS.device)
        logits_BKV = self.logits(ids_BS, pads_B=pads_B, slot_K=slot_K)
        key_B = hashed(words_B ^ ((first * (self.settings.steps + 1) + number) * GOLDEN))
        chosen_BK = self.chosen(logits_BKV, key_B)
        sure_BK = self.sureness(logits_BKV, chosen_BK, key_B)
        block_BK = ids_BS.index_select(1, slot_K.long())
        is_masked_BK = block_BK == self.mask_id
        is_kept_BK = ranks(torch.where(is_masked_BK, sure_BK, 2.0)) < num_filled
        return ids_BS.index_copy(1, slot_K.long(), torch.where(is_masked_BK & is_kept_BK, chosen_BK, block_BK))

    def logits(self, ids_BS: Tensor, *, pads_B: Tensor, slot_K: Tensor) -> Tensor:
        """Return logits (B, K, V), float32, of these slots; the mask token's is the lowest finite value."""
        index_S = torch.arange(ids_BS.shape[1], dtype=torch.int32, device=ids_BS.device)
        segments_BS = (index_S >= pads_B[:, None]).to(torch.int32)
        out = self.module(
            input_ids=ids_BS,
            position_ids=(index_S - pads_B[:, None]).clamp(min=0),
            attention_mask=attention_input(segments_BS, module=self.module, causal=False),
            use_cache=False,
            logits_to_keep=slot_K.long(),
        )
        logits_BKV: Tensor = out.logits.to(torch.float32)
        index_V = torch.arange(logits_BKV.shape[-1], dtype=torch.int32, device=ids_BS.device)
        return torch.where(index_V == self.mask_id, torch.finfo(torch.float32).min, logits_BKV)

    def chosen(self, logits_BKV: Tensor, key_B: Tensor) -> Tensor:
        """Return the likeliest tokens, or drawn ones, (B, K) int32."""
        if not self.choice.do_sample:
            return logits_BKV.argmax(-1).to(torch.int32)
        uniform_BK = uniform(token_words(key_B, length=logits_BKV.shape[1], site=CHOSEN))
        found, _ = drawn_of(*candidates(logits_BKV.flatten(0, 1), choice=self.choice), uniform_BK.flatten())
        return found.view(uniform_BK.shape)

    def sureness(self, logits_BKV: Tensor, chosen_BK: Tensor, key_B: Tensor) -> Tensor:
        """Return the probability of the chosen tokens, or, with random remasking, uniform numbers, (B, K) below 1."""
        if self.settings.remasking == "random":
            return uniform(token_words(key_B, length=chosen_BK.shape[1], site=KEPT))
        own_BK = logits_BKV.gather(-1, chosen_BK[..., None].long())[..., 0]
        return torch.exp(own_BK - torch.logsumexp(logits_BKV, -1))


def ranks(values_BK: Tensor) -> Tensor:
    """Return the number of larger values in the row, equal ones on the left included, (B, K) int32."""
    index_K = torch.arange(values_BK.shape[1], dtype=torch.int32, device=values_BK.device)
    is_tie_BKK = (values_BK[:, None, :] == values_BK[:, :, None]) & (index_K < index_K[:, None])
    return ((values_BK[:, None, :] > values_BK[:, :, None]) | is_tie_BKK).sum(-1, dtype=torch.int32)
