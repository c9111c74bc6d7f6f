"""A continuation of a prompt on the device: one program of one shape, no read before the end.

Every token is a full forward pass over a fixed window, without a cache: enough for a sample of some dozen tokens.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.schema import SampleConfig
from tpu_experiments.models.forward import logits_of
from tpu_experiments.runtime.base import Runtime


class Sampler:
    """Writes text with the current parameters."""

    def __init__(
        self,
        module: nn.Module,
        *,
        runtime: Runtime,
        parameters: Mapping[str, Tensor],
        tokenizer: PreTrainedTokenizerBase,
        settings: SampleConfig,
        seed: int,
    ) -> None:
        self.module, self.runtime, self.parameters = module, runtime, parameters
        self.tokenizer, self.window, self.temperature = tokenizer, settings.window, settings.temperature
        self.seed = seed
        self.program = runtime.program(self.next_token, name="sample", held=lambda: parameters)

    def run(self, prompt_ids: list[int], *, max_new_tokens: int) -> str:
        """Continue `prompt_ids` (its last `window - max_new_tokens` tokens) up to the end of sequence."""
        prompt = prompt_ids[-(self.window - max_new_tokens) :]
        ids = torch.zeros(1, self.window, dtype=torch.int32)
        ids[0, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        last = torch.tensor([len(prompt) - 1], dtype=torch.int32)
        batch = self.runtime.put({"ids": ids, "last": last}, rows_dim=-1)
        self.module.eval()
        self.runtime.seed(self.seed)
        for _ in range(max_new_tokens):
            batch = self.program(batch)
        self.module.train()
        written = batch["ids"].cpu()[0, len(prompt) : len(prompt) + max_new_tokens].tolist()
        return str(self.tokenizer.decode(_until_end(written, self.tokenizer), skip_special_tokens=True)).strip()

    def next_token(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The program: `ids` (1, window) with the token after `last` (1,) written, and `last` moved on."""
        ids, last = batch["ids"], batch["last"]
        index_T = torch.arange(self.window, device=ids.device, dtype=torch.int32)
        rows = {"ids": ids, "positions": index_T[None], "segments": (index_T <= last).to(torch.int32)[None]}
        with torch.no_grad():
            logits = logits_of(self.module, self.parameters, rows)
        token = self._choose(logits.index_select(1, last.long())).to(torch.int32)
        return {"ids": torch.where(index_T == last + 1, token, ids), "last": last + 1}

    def _choose(self, logits_B1V: Tensor) -> Tensor:
        """Token ids (B, 1): the likeliest, or a draw by the Gumbel-max trick (argmax of logits plus Gumbel noise)."""
        if self.temperature == 0:
            return logits_B1V.argmax(-1)
        uniform = torch.rand(logits_B1V.shape, device=logits_B1V.device, dtype=torch.float32)
        gumbel = -torch.log(-torch.log(uniform.clamp(1e-9, 1 - 1e-7)))
        return (logits_B1V.float() / self.temperature + gumbel).argmax(-1)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, *, kind: str) -> list[int]:
    """Token ids of the prompt: through the chat template for `chat`, as plain text for `text`."""
    if kind == "chat":
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return start + list(tokenizer(prompt, add_special_tokens=False)["input_ids"])


def _until_end(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids before the first special token that ends a turn or the text."""
    ends = {tokenizer.eos_token_id, *tokenizer.all_special_ids}
    for index, token in enumerate(ids):
        if token in ends:
            return ids[:index]
    return ids
