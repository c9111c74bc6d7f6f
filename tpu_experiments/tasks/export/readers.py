"""The trained model by this program, and its exports as independent libraries read them from disk.

All compute on the CPU, in float32 where the memory allows, so that what differs is in the files. Legend: T tokens,
V vocabulary.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as library_log

from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.config.task_schema import ChoiceConfig
from tpu_experiments.models.families.classification import last_scores
from tpu_experiments.models.huggingface import CLASSIFIER, HEADS, HuggingFaceModel
from tpu_experiments.models.passes.forward import logits_of
from tpu_experiments.models.passes.generation import Decoder
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.quantisation.parts import rounds_inputs
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.tasks.generate.origin import Origin


class Reader(Protocol):
    """A language model in memory."""

    name: str
    """The library that read it, with its version."""

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text alone, without any before or after it."""
        ...

    def log_probs(self, ids: Sequence[int]) -> Tensor:
        """Return the log-probabilities (T, V), float32, of the token after each of `ids` (T)."""
        ...

    def greedy(self, ids: Sequence[int], *, num: int) -> list[int]:
        """Return the `num` likeliest tokens one after another, past any end of text."""
        ...


class TrainedModel:
    """The model that was trained, its adapters not merged, as task=evaluate and task=generate compute it.

    Args:
        source: the base, whose data type is that of the arithmetic.
        stored: data type of the run, to which the base's weights are rounded before they are widened.
    """

    name = "tpu_experiments"

    def __init__(
        self,
        source: HuggingFaceModel,
        *,
        origin: Origin,
        stored: torch.dtype,
        runtime: EagerRuntime,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.module = build_frozen(
            source,
            lora=origin.lora,
            trained=origin.trained,
            place=runtime.place,
            reduced_with_seed=origin.reduced_with_seed,
            origin=origin.text,
            rounded_to=stored,
        )
        self.runtime, self.tokenizer = runtime, tokenizer

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return _ids(self.tokenizer, text)

    @torch.no_grad()
    def log_probs(self, ids: Sequence[int]) -> Tensor:
        """Return the log-probabilities (T, V) of the token after each of `ids`."""
        return torch.log_softmax(logits_of(self.module, {}, _row_of(ids))[0].to(torch.float32), -1)

    @torch.no_grad()
    def score(self, ids: Sequence[int]) -> float:
        """Return what a decoder that scores texts gives this one."""
        return float(last_scores(self.module, {}, _row_of(ids), num=1))

    def greedy(self, ids: Sequence[int], *, num: int) -> list[int]:
        """Return the likeliest continuation, by the decoder of task=generate."""
        how: dict[str, Any] = {"num_rows": 1, "max_new_tokens": num, "tokens_per_call": num, "seed": 0}
        decoder = Decoder(self.module, runtime=self.runtime, choice=ChoiceConfig(), **how)
        *_, (written,) = decoder.stream([list(ids)], draws=[0], bucket=len(ids))
        return written


class TransformersModel:
    """A model in a folder as transformers reads it, with the tokenizer beside it.

    Args:
        adapter: folder of an adapter that PEFT puts onto the model; its tokenizer is the one that is read.
        base: how the base of the adapter was held in training; of NF4 bitsandbytes makes the same, and code that it
            brings is run where the run allowed it.
        dtype: of the arithmetic; of a quantised model, of what is not quantised.
        module: transformers' class with the folder's weights, where transformers itself cannot read them.
        labels: names of the outputs of a model that scores texts, by number; None for one that writes text.

    Raises:
        ImportError: PEFT, or the library of a quantised form, is not installed.
    """

    def __init__(
        self,
        folder: str,
        *,
        dtype: torch.dtype,
        adapter: str | None = None,
        revision: str | None = None,
        base: ModelConfig | None = None,
        module: nn.Module | None = None,
        labels: Mapping[int, str] | None = None,
    ) -> None:
        self.name, self.compiling = f"transformers {transformers.__version__}", "default"
        if module is not None:
            self.model: Any = module
            self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            return
        auto, heads = (AutoModelForCausalLM, {}) if labels is None else (HEADS[CLASSIFIER].auto, {"id2label": labels})
        options: dict[str, Any] = {**heads}  # None as `quantization_config` would hide the one in config.json
        trust = base is not None and base.remote_code == "run"
        config = AutoConfig.from_pretrained(folder, revision=revision, trust_remote_code=trust)
        stored = getattr(config, "quantization_config", None) or {}
        if stored.get("quant_method") == "compressed-tensors" and not rounds_inputs(stored):
            # Decoded when it loads, not at the first product; that leaves out the rounding of inputs.
            options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
        if base is not None and base.base == "nf4":
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=base.base_double_quant,
                bnb_4bit_compute_dtype=dtype,
            )
        if stored.get("quant_method") == "bitsandbytes" or "quantization_config" in options:
            options["device_map"] = {"": "cpu"}  # else transformers puts quantised weights on a GPU, if there is one
        with quiet():
            self.model = auto.from_pretrained(
                folder, revision=revision, dtype=dtype, trust_remote_code=trust, **options
            )
            _compute_in(self.model, dtype)
            if adapter is not None:
                import peft

                self.model = peft.PeftModel.from_pretrained(
                    self.model, adapter, torch_device="cpu", trust_remote_code=False
                )
                self.name = f"PEFT {peft.__version__}"
        self.model.eval()
        if stored.get("quant_method") == "bitnet":
            self.compiling = "force_eager"  # its functions are compiled by torch.compile: a C++ compiler and minutes
        self.tokenizer = AutoTokenizer.from_pretrained(adapter or folder, trust_remote_code=False)

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return _ids(self.tokenizer, text)

    @torch.no_grad()
    def log_probs(self, ids: Sequence[int]) -> Tensor:
        """Return the log-probabilities (T, V) of the token after each of `ids`."""
        with torch.compiler.set_stance(self.compiling):
            logits: Tensor = self.model(input_ids=torch.tensor([list(ids)])).logits
        return torch.log_softmax(logits[0].to(torch.float32), -1)

    @torch.no_grad()
    def score(self, ids: Sequence[int]) -> float:
        """Return the only logit of a text, of a model that scores texts."""
        return float(self.model(input_ids=torch.tensor([list(ids)])).logits[0, 0])

    @torch.no_grad()
    def greedy(self, ids: Sequence[int], *, num: int) -> list[int]:
        """Return the likeliest continuation, with transformers' own cache."""
        written: list[int] = []
        given, cache = torch.tensor([list(ids)]), None
        name = "cache_params" if self.model.config.model_type == "xlstm" else "past_key_values"
        for _ in range(num):
            with torch.compiler.set_stance(self.compiling):
                out = self.model(input_ids=given, **{name: cache}, use_cache=True)
            cache, given = getattr(out, name), out.logits[:, -1].argmax(-1, keepdim=True)
            written.append(int(given))
        return written


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out progress bars, and what libraries say to those who call them; errors are raised all the same."""
    had_bars, of_bitsandbytes = library_log.is_progress_bar_enabled(), logging.getLogger("bitsandbytes")
    level = of_bitsandbytes.level
    library_log.disable_progress_bar()
    of_bitsandbytes.setLevel(logging.ERROR)  # it recommends the package `kernels`
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning
            )
            warnings.filterwarnings("ignore", message="You passed `quantization_config`", category=UserWarning)
            yield
    finally:
        of_bitsandbytes.setLevel(level)
        if had_bars:
            library_log.enable_progress_bar()


def _compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Have a model with bitsandbytes' 4-bit weights decode to `dtype` and compute in it; leave any other as it is.

    transformers takes its other weights in the data type of the file, whatever it is asked for. bitsandbytes' own
    product for CPUs with AVX512-BF16 rounds activations and scales to bfloat16, asks the Hub for a kernel, and takes no
    weight whose output features 32 does not divide.
    """
    four_bit: list[Any] = [
        m for m in model.modules() if getattr(getattr(m, "weight", None), "quant_state", None) is not None
    ]
    for module in four_bit:
        module.weight.quant_state.dtype = module.compute_dtype = dtype
        module.compute_type_is_set, module.support_avx512bf16_for_cpu = True, False
    for parameter in model.parameters() if four_bit else ():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _row_of(ids: Sequence[int]) -> dict[str, Tensor]:
    """Return a batch of one row that is one text."""
    ids_1T = torch.tensor([list(ids)], dtype=torch.int32)
    positions = torch.arange(len(ids), dtype=torch.int32)[None]
    return {"ids": ids_1T, "positions": positions, "segments": torch.ones_like(ids_1T)}


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
