"""Continuations of some prompts on the device: one program of one shape, no read before the end.

Every token is a full forward pass over a fixed window, without a cache: enough for a sample of some dozen tokens, and
with the very parameters that are trained. models/generation has a cache. Legend: R prompts, T tokens, V vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.schema import SampleConfig
from tpu_experiments.data.tokens.chat import render
from tpu_experiments.models.forward import hidden_of, logits_of
from tpu_experiments.models.head import capped, has_plain_head, soft_cap_of
from tpu_experiments.runtime.base import Runtime


class Sampler:
    """Generate text with the current parameters."""

    def __init__(
        self,
        module: nn.Module,
        *,
        runtime: Runtime,
        parameters: Mapping[str, Tensor],
        tokenizer: PreTrainedTokenizerBase,
        settings: SampleConfig,
        seed: int,
        name: str = "sample",
    ) -> None:
        """Build the program; `name` is its name among those that a run expects."""
        self.module, self.runtime, self.parameters = module, runtime, parameters
        self.tokenizer, self.window, self.temperature = tokenizer, settings.window, settings.temperature
        self.seed = seed
        self.program = runtime.program(self.next_token, name=name, held=lambda: parameters)

    def run(self, prompts: Sequence[list[int]], *, max_new_tokens: int) -> list[str]:
        """Continue every prompt (its last `window - max_new_tokens` tokens) up to the end of sequence."""
        kept = [ids[-(self.window - max_new_tokens) :] for ids in prompts]
        ids_RT = torch.zeros(len(kept), self.window, dtype=torch.int32)
        for row, ids in enumerate(kept):
            ids_RT[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        last_R = torch.tensor([len(ids) - 1 for ids in kept], dtype=torch.int32)
        batch = self.runtime.put({"ids": ids_RT, "last": last_R}, rows_dim=-1)
        self.module.eval()
        self.runtime.seed(self.seed)
        for _ in range(max_new_tokens):
            batch = self.program(batch)
        self.module.train()
        rows = batch["ids"].cpu()
        written = [row[len(ids) : len(ids) + max_new_tokens].tolist() for row, ids in zip(rows, kept, strict=True)]
        return [
            str(self.tokenizer.decode(_until_end(ids, self.tokenizer), skip_special_tokens=True)).strip()
            for ids in written
        ]

    def next_token(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Append one token: `ids` (R, T) gets it after `last` (R,), which is incremented. The program."""
        ids_RT, last_R = batch["ids"], batch["last"]
        index_T = torch.arange(self.window, device=ids_RT.device, dtype=torch.int32)
        segments_RT = (index_T <= last_R[:, None]).to(torch.int32)
        rows = {"ids": ids_RT, "positions": index_T.expand(ids_RT.shape), "segments": segments_RT}
        with torch.no_grad():
            logits_RV = self._logits(rows, last_R)
        token_R1 = self._choose(logits_RV[:, None]).to(torch.int32)
        return {"ids": torch.where(index_T == last_R[:, None] + 1, token_R1, ids_RT), "last": last_R + 1}

    def _logits(self, rows: Mapping[str, Tensor], last_R: Tensor) -> Tensor:
        """Return logits (R, V) after position `last` (R,) of every row.

        Those of other positions are not computed where the head is a plain matrix product.
        """
        index_R = torch.arange(len(last_R), device=last_R.device)
        if not has_plain_head(self.module):
            return logits_of(self.module, self.parameters, rows)[index_R, last_R.long()]
        hidden_RTH, head_VH = hidden_of(self.module, self.parameters, rows)
        hidden_RH = hidden_RTH[index_R, last_R.long()]
        return capped(F.linear(hidden_RH, head_VH.to(hidden_RH.dtype)), soft_cap_of(self.module))

    def _choose(self, logits_R1V: Tensor) -> Tensor:
        """Return token ids (R, 1): the likeliest, or a draw by the Gumbel-max trick.

        The trick takes the argmax of logits plus Gumbel noise.
        """
        if self.temperature == 0:
            return logits_R1V.argmax(-1)
        uniform = torch.rand(logits_R1V.shape, device=logits_R1V.device, dtype=torch.float32)
        gumbel = -torch.log(-torch.log(uniform.clamp(1e-9, 1 - 1e-7)))
        return (logits_R1V.float() / self.temperature + gumbel).argmax(-1)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, *, kind: str) -> list[int]:
    """Return the prompt's token ids: through the chat template for `chat`, as plain text for `text`."""
    if kind == "chat":
        text = render((("user", prompt),), tokenizer=tokenizer, ends_with="generation_prompt")
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return text_ids(tokenizer, prompt)


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of plain text, after the begin-of-sequence token if there is one."""
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return start + list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _until_end(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids before the first special token."""
    ends = {tokenizer.eos_token_id, *tokenizer.all_special_ids}
    for index, token in enumerate(ids):
        if token in ends:
            return ids[:index]
    return ids
