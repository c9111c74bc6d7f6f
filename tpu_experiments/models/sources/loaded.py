"""Check that the model as it is loaded here computes what transformers computes from the same files.

Names, conversions, tied weights and buffers are read by code of this project. A tensor that is read wrongly, or not at
all, raises no error: the run only learns from a worse start. So before training the checkpoint is loaded twice on the
host, in float32, by this code and by transformers' from_pretrained, and both compute logits of a short row. Of a large
model these are the first layers, as many as have every kind of layer, and all else.
"""

import copy
import hashlib
import logging
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from tpu_experiments.config.errors import ConfigError, one_line
from tpu_experiments.config.folders import cache_folder
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.models import huggingface
from tpu_experiments.models.adapters import lora as adapters
from tpu_experiments.models.huggingface import CLASSIFIER, OWN_HEAD, HuggingFaceModel, decoder_config, silent
from tpu_experiments.models.parts import attention, experts
from tpu_experiments.models.passes import forward
from tpu_experiments.models.passes.forward import UNFIT
from tpu_experiments.models.sources import buffers, build, conversion, isolation
from tpu_experiments.models.sources.build import build_model
from tpu_experiments.models.sources.isolation import packed_row, record
from tpu_experiments.models.stack.fold import decoder_layers
from tpu_experiments.runtime.kernels.attention import without_attention_kernel

log = logging.getLogger(__name__)
LENGTHS = (13, 10)
"""Tokens of the two documents of the row; the second is left out where rows hold one document."""
TOLERANCE = 1e-4
"""Relative to the largest logit; sums in another order move logits by 1e-6 of it (tests/benchmarks/RESULTS.md)."""
BYTES = 2**30
"""Float32 weights up to which a model is loaded whole."""
MOST_BYTES = 8 * 2**30
"""Float32 weights above which fewer layers than there are kinds of are loaded."""
ADVICE = "report it with the model's name; or start all the same with trainer.canary.when=never"


@dataclass(frozen=True)
class Part:
    """The part of a model that is compared."""

    layers: int
    of: int
    nbytes: int
    """Of its weights in float32."""

    @property
    def is_whole(self) -> bool:
        """Whether it has every layer."""
        return self.layers == self.of

    def __str__(self) -> str:
        return f"all {self.of} layers" if self.is_whole else f"the first {self.layers} of {self.of} layers"


def require_loaded(source: HuggingFaceModel, *, lora: LoraConfig, is_packed: bool) -> None:
    """Refuse a checkpoint from which this code loads another model than transformers.

    Files that have passed are not compared again: an empty file beside the cache of shards records it.

    Args:
        is_packed: whether rows hold more than one document.

    Raises:
        ConfigError: the logits differ, or transformers cannot load the model.
    """
    reason = _skip_reason(source)
    if reason:
        log.info("check of the loaded model against transformers: skipped (%s)", reason)
        return
    passed = _record_of(source, lora=lora, is_packed=is_packed)
    if passed.exists():
        return
    done = check_loaded(source, lora=lora, is_packed=is_packed)
    if done.reason:
        log.warning("check of the loaded model against transformers: skipped (%s)", done.reason)
        return
    log.info("check of the loaded model against transformers: %s", done)
    record(passed)


def check_loaded(source: HuggingFaceModel, *, lora: LoraConfig, is_packed: bool) -> "Comparison":
    """Compare a loaded checkpoint with transformers, whatever has passed before; nothing is recorded.

    Returns:
        What was compared, or the reason why nothing was.

    Raises:
        ConfigError: as of `require_loaded`.
    """
    skipped = _skip_reason(source)
    if skipped:
        return Comparison(Part(0, 0, 0), reason=skipped)
    text = f"model.path={source.model.path}"
    done = _compared(source, lora=lora, is_packed=is_packed)
    if done.reason and done.is_fault:
        raise ConfigError(f"{text}; transformers {transformers.__version__} {done.reason}; {ADVICE}.")
    if not done.reason and not done.apart <= TOLERANCE:
        raise ConfigError(
            f"{text}; as it is loaded here it computes other logits than transformers {transformers.__version__} does "
            f"from the same files: {done}; {ADVICE}."
        )
    return done


def fault_of_written(source: HuggingFaceModel, folder: str) -> str | None:
    """Return what is wrong with a model that was written, as transformers reads it from its folder; None if nothing.

    Its config and its class are compared with those of the model that wrote it, over the tensors of its files.
    """
    written = copy.copy(source)
    written.folder, written.random = Path(folder), False
    written.model = replace(source.model, path=folder, vocab_size=None)
    written.whole_config = written.config
    reason = _skip_reason(written) or ("its linear layers compute otherwise" if source.model.linear != "plain" else "")
    if reason:
        log.info("check of %s by transformers: skipped (%s)", folder, reason)
        return None
    done = _compared(written, lora=LoraConfig(r=0), is_packed=False)
    if done.reason:
        if not done.is_fault:
            log.warning("check of %s by transformers: skipped (%s)", folder, done.reason)
            return None
        return f"{folder}, read back by transformers {transformers.__version__}: it {done.reason}"
    if not done.apart <= TOLERANCE:
        return f"{folder}, read back by transformers {transformers.__version__}, computes other logits: {done}"
    log.info("check of %s by transformers: %s", folder, done)
    return None


@dataclass(frozen=True)
class Comparison:
    """Outcome of a comparison."""

    part: Part
    apart: float = math.nan
    """Largest difference of logits, as a share of the largest logit."""
    seconds: float = 0.0
    reason: str = ""
    """Why nothing was compared."""
    is_fault: bool = False
    """Whether that is a fault of the model."""

    def __str__(self) -> str:
        return (
            f"with {self.part} they are {self.apart:.2g} of the largest apart, and rounding explains {TOLERANCE:g} "
            f"({self.seconds:.1f} s)"
        )


def _compared(source: HuggingFaceModel, *, lora: LoraConfig, is_packed: bool) -> Comparison:
    """Compare as much of a model as the host's memory holds.

    Raises:
        ConfigError: the model of training cannot compute.
    """
    part, began = part_of(source), time.monotonic()
    needed, free = 5 * part.nbytes // 4, psutil.virtual_memory().available
    if needed > free:
        memory = f"{needed / 2**30:.1f} GiB of host memory, {free / 2**30:.1f} GiB are free"
        return Comparison(part, reason=f"{part} need {memory}")
    try:
        apart = difference(source, part, lora=lora, is_packed=is_packed)
    except ConfigError:
        raise
    except (*UNFIT, OSError) as error:
        return Comparison(part, reason=f"cannot compute with {part} ({one_line(error)})", is_fault=part.is_whole)
    return Comparison(part, apart, time.monotonic() - began)


def _skip_reason(source: HuggingFaceModel) -> str:
    """Return why there is nothing to compare; empty where there is."""
    if source.random or source.folder is None:
        return "random weights"
    if source.head == OWN_HEAD:
        return "transformers has no such class"
    if source.model.linear == "bitnet" or source.packing is not None:
        return "transformers computes with other weights than are read"
    return ""


def _record_of(source: HuggingFaceModel, *, lora: LoraConfig, is_packed: bool) -> Path:
    """Return the empty file that records that these files have passed, with this version of the code."""
    assert source.folder is not None
    digest = hashlib.sha256(f"{transformers.__version__} {torch.__version__} {is_packed} {lora.r > 0}".encode())
    digest.update(f"{source.head} {source.causal} {source.runs_code} {source.model.attention}".encode())
    for file in sorted(source.folder.iterdir()):
        if file.suffix in (".safetensors", ".json", ".py"):
            status = file.stat()
            digest.update(f"{file} {status.st_size} {status.st_mtime_ns}".encode())
    own = (attention, buffers, build, conversion, experts, forward, huggingface, isolation, adapters)
    for path in (__file__, *(str(module.__file__) for module in own)):
        digest.update(Path(path).read_bytes())
    return Path(cache_folder("loaded"), digest.hexdigest()[:32])


def part_of(source: HuggingFaceModel) -> Part:
    """Return how much of a model is compared: all of a small one, and every kind of layer of a large one."""
    whole = _on_meta(source, source.whole_config)
    total = _nbytes(whole)
    count = int(getattr(source.config, "num_hidden_layers", 0) or 0)
    _, layers = decoder_layers(_on_meta(source, source.config))
    if total <= BYTES or count < 2 or len(layers) != count:
        return Part(max(count, 1), max(count, 1), total)
    sizes, rest = [_nbytes(layer) for layer in layers], total - _nbytes(layers)
    kinds = [_kind(layer, config=source.config, index=index) for index, layer in enumerate(layers)]
    wanted = max(2, *(kinds.index(kind) + 1 for kind in kinds))
    while wanted < count and rest + sum(sizes[: wanted + 1]) <= BYTES:
        wanted += 1
    while wanted > 1 and rest + sum(sizes[:wanted]) > MOST_BYTES:
        wanted -= 1
    return Part(wanted, count, rest + sum(sizes[:wanted]))


def _on_meta(source: HuggingFaceModel, config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return source.built(config, dtype=torch.float32, trust_remote_code=source.runs_code)


def _nbytes(module: nn.Module) -> int:
    return 4 * sum(p.numel() for p in module.parameters())


def _kind(layer: nn.Module, *, config: PretrainedConfig, index: int) -> str:
    """Return a text that is equal for layers that differ only in their weights."""
    lists = [value[index] for value in vars(config).values() if isinstance(value, list) and index < len(value)]
    held = [(name, tuple(p.shape)) for name, p in layer.state_dict().items()]
    return f"{type(layer)} {lists} {held}"


def difference(source: HuggingFaceModel, part: Part, *, lora: LoraConfig, is_packed: bool) -> float:
    """Return the largest difference of the two models' logits, as a share of the largest logit.

    Raises:
        ConfigError: the model of training cannot compute.
    """
    shallow = with_layers(source, part.layers)
    lengths = LENGTHS if is_packed else LENGTHS[:1]
    ids = _random_ids(shallow.config, sum(lengths))
    with torch.no_grad(), without_attention_kernel():
        expected = _by_transformers(shallow, ids, lengths=lengths)
        try:
            found = _by_us(shallow, ids, lengths=lengths, lora=lora)
        except ConfigError:
            raise
        except UNFIT as error:
            raise ConfigError(
                f"model.path={source.model.path} with lora.targets=[{', '.join(lora.targets)}]; transformers computes "
                f"with it, and the model that would be trained does not ({one_line(error)}); try "
                f"lora.targets=[q_proj, v_proj], or {ADVICE}."
            ) from error
    return float((found - expected).abs().max() / expected.abs().max())


def with_layers(source: HuggingFaceModel, layers: int) -> HuggingFaceModel:
    """Return the source of the same checkpoint's first layers, dense and in float32."""
    made = copy.copy(source)
    for name in ("_tensors_by_name", "_on_meta_once", "_tied_on_meta", "_tied", "_prefixes", "new_head", "_resized"):
        vars(made).pop(name, None)
    made.model = replace(source.model, dtype="float32", base="dense", linear="plain", stack="unrolled", vocab_size=None)
    made.dtype = torch.float32
    made.reads_all = False
    is_whole = source.whole_config is source.config
    made.whole_config = copy.deepcopy(source.whole_config)
    made.config = made.whole_config if is_whole else decoder_config(made.whole_config)
    if source.model.vocab_size is not None:
        made.config.vocab_size = source.stored_rows
    made.config._attn_implementation = source.config._attn_implementation
    made.config._experts_implementation = source.config._experts_implementation
    _cut(made.config, layers)
    return made


def _cut(config: PretrainedConfig, layers: int) -> None:
    """Leave the first layers in a config, and what it says of each of them."""
    count = getattr(config, "num_hidden_layers", None)
    if count is None or not layers or layers == count:
        return
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == count:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers


def _random_ids(config: PretrainedConfig, count: int) -> Tensor:
    """Draw token ids (T,) from the whole vocabulary, without padding."""
    ids = torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
    special = getattr(config, "pad_token_id", None)
    return torch.where(ids == special, (ids + 1) % config.vocab_size, ids) if isinstance(special, int) else ids


def _by_transformers(source: HuggingFaceModel, ids: Tensor, *, lengths: tuple[int, ...]) -> Tensor:
    """Return what transformers computes for each document alone, (T, V) or (T, H)."""
    config = AutoConfig.from_pretrained(source.folder, trust_remote_code=source.runs_code)
    own = decoder_config(config)
    _cut(own, getattr(source.config, "num_hidden_layers", 0))
    config._attn_implementation = config._experts_implementation = "eager"
    config.use_cache = own.use_cache = False
    auto = huggingface.HEADS[source.head].auto
    with silent():
        module = auto.from_pretrained(
            source.folder, config=config, dtype=torch.float32, trust_remote_code=source.runs_code
        ).eval()
    hidden: list[Tensor] = []
    if source.head == CLASSIFIER:  # its head may be new; what its class gives to its layers is not (Longformer's)
        module.base_model.register_forward_hook(lambda *call: hidden.append(call[-1].last_hidden_state[0]))
    logits = [module(input_ids=part[None]).logits[0] for part in ids.split(lengths)]
    return torch.cat(hidden or logits)


def _by_us(source: HuggingFaceModel, ids: Tensor, *, lengths: tuple[int, ...], lora: LoraConfig) -> Tensor:
    """Return what the model of training computes for documents in one row with padding behind them."""
    start = replace(lora, init="b_zero", dropout=0.0, trainable_token_indices={})  # whose start are the base's rows
    built = build_model(source, lora=start, seed=0, place=lambda tensor, *, name: tensor)
    module = built.module.eval()
    batch = packed_row(ids, lengths=lengths)
    causal = source.head == "causal_lm" or source.causal
    if source.head != CLASSIFIER:
        return forward.logits_of(module, built.trainable, batch, causal=causal)[0, : len(ids)]
    inputs = forward.model_inputs(module, batch, causal=causal)
    with forward.in_module_dtype(module, built.trainable) as own, forward.mask_in_layers_alone(module):
        base = {f"module.{name}": tensor for name, tensor in own.items()}
        states: Tensor = functional_call(_Base(module), base, kwargs=inputs, tie_weights=True)
    return states[0, : len(ids)]


class _Base(nn.Module):
    """A model up to its head, which holds the whole, so that parameters keep their names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Any) -> Tensor:
        whole: Any = self.module
        states: Tensor = whole.base_model(**inputs).last_hidden_state
        return states
