"""The model that lm-evaluation-harness asks: it looks answers up and notes what it is asked.

Imports lm-evaluation-harness, which is an extra. How a request becomes tokens follows its `hf` backend
(lm_eval/models/huggingface.py, 0.4.13): special tokens as the tokenizer adds them, the prefix token before an empty
context, contexts that lose their start where they are too long, rolling windows with one token of context.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.tasks.evaluate.looked_up import MOST_NEW, Answers

WITHOUT_DRAWS = {"top_p", "top_k"}
"""Settings of draws, which the likeliest text has none of."""


class Respondent(TemplateLM):
    """Look requests up among the answers; one that is missing is noted with an empty answer.

    Args:
        limit: most tokens of a row.
    """

    def __init__(self, answers: Answers, *, tokenizer: PreTrainedTokenizerBase, limit: int) -> None:
        super().__init__()
        self.answers, self.tokenizer, self.limit = answers, tokenizer, limit

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    @property
    def max_length(self) -> int:
        """Tokens before the last one that is scored: a row has one more."""
        return self.limit - 1

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        how = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return [int(each) for each in self.tokenizer.encode(string, **how)]

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        return [self._score(context, behind) for _, context, behind in requests]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        found = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            found.append(sum(self._score(*make_disjoint_window(window))[0] for window in windows))
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        return [self._text(request) for request in requests]

    def _score(self, context: Sequence[int], behind: Sequence[int]) -> tuple[float, bool]:
        kept = [*context, *behind][-self.limit :]
        self.answers.num_cut += len(kept) < len(context) + len(behind)
        if not behind or len(behind) >= len(kept):
            raise ConfigError(
                f"task.seq_len={self.limit}; a continuation of {len(behind)} tokens and its context of "
                f"{len(context)} cannot be scored in a row of so many; raise it."
            )
        key = (tuple(kept[: -len(behind)]), tuple(behind))
        return self.answers.score(key)

    def _text(self, request: Instance) -> str:
        text, given = request.args
        how = dict(given)
        until = how.pop("until", None) or []
        until = [until] if isinstance(until, str) else list(until)
        num_new = int(how.pop("max_gen_toks", how.pop("max_new_tokens", MOST_NEW)))
        if how.pop("do_sample", False) or (how.pop("temperature", 0.0) or 0.0) > 0:
            raise ConfigError(
                f"task.harness; {request.task_name} draws its answers (do_sample, temperature), and here an answer is "
                "the likeliest text; leave the task out."
            )
        unknown = sorted(how.keys() - WITHOUT_DRAWS)
        if unknown:
            raise ConfigError(
                f"task.harness; {request.task_name} asks for {', '.join(unknown)} in writing, which is not done here; "
                "leave the task out."
            )
        room = self.limit - num_new
        if room < 1:
            raise ConfigError(
                f"task.seq_len={self.limit}; {request.task_name} writes up to {num_new} tokens, which leaves no room "
                "for a prompt; raise it."
            )
        end = self.tokenizer.decode(self.eot_token_id)
        ids = self.tok_encode(text)
        self.answers.num_cut += len(ids) > room
        return self.answers.text((tuple(ids[-room:]), num_new, (*until, end)))
