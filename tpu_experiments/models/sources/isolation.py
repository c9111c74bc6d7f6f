"""Check that a model attends as its objective says and keeps documents apart, on a small copy of its config.

A recurrent layer carries its state from one document to the next, an encoder lets a token attend to later ones, and
ALiBi counts positions over a whole row: none of that shows in a loss. The copy has the model's own classes, kinds of
layers and options, but few and narrow layers, so that the check takes a fraction of a second on the host.
"""

import copy
import hashlib
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

from tpu_experiments.config.errors import ConfigError, one_line
from tpu_experiments.config.folders import cache_folder
from tpu_experiments.config.masking import LABEL
from tpu_experiments.config.task_schema import ChoiceConfig
from tpu_experiments.models.huggingface import CLASSIFIER, DELTA_NETS, LONGFORMER, XLSTM, HuggingFaceModel
from tpu_experiments.models.parts import attention, experts
from tpu_experiments.models.passes import forward, generation
from tpu_experiments.models.passes.forward import UNFIT
from tpu_experiments.models.passes.generation import Decoder, without_kernel
from tpu_experiments.runtime.ops import python_loop, unconstrained

log = logging.getLogger(__name__)
LENGTHS = (9, 7)
"""Tokens of the two documents: longer than the copy's window, and of different lengths."""
PADDING = 4
WIDTH = 64
"""Width of a head; xLSTM rounds up to multiples of it."""
HEADS = ("num_attention_heads", "num_heads")
WIDTHS = ("hidden_size", "embedding_dim", "pooler_hidden_size")
DEPTHS = ("num_hidden_layers", "num_blocks")
AT_MOST = {
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "local_attention": 4,
    "attention_window": 4,
    "attention_chunk_size": 4,
    "floor_scale": 4,
    "log_scaling_n_floor": 4,
    "index_topk": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
}
"""Sizes of the copy. Windows, and lengths from which a model computes something else, are below `LENGTHS`."""
SHARED = "num_kv_shared_layers"
ROTATED = "no_rope_layers"
"""SmolLM 3's and Llama 4's list of layers: 1 where one has RoPE, 0 where it has none."""
MOST_PARAMETERS = 500_000_000
"""Upper bound for a copy (2 GB): two layers of a model of 7 billion parameters with its widths have 404 million."""
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FEWEST_LAYERS = 2
TOLERANCE = 1e-3
"""Relative to the largest logit. Sums in another order move logits by 1e-6 of it, a leak by 0.01 to 1 (xLSTM 0.4)."""


def require_isolation(source: HuggingFaceModel, *, is_packed: bool) -> None:
    """Refuse a model that does not attend as its objective says, or whose documents change one another in a row.

    A config that has passed is not checked again: an empty file beside the cache of shards records it. Where no copy of
    the config can be computed, packed rows are refused, and a warning is logged for others.

    Args:
        is_packed: rows hold more than one document.

    Raises:
        ConfigError: a token changes the logits of earlier ones or of another document, or the logits are not those that
            transformers computes for the document alone; or rows hold several, and none of this can be checked.
    """
    name, kind = f"model={source.model.name}", source.config.model_type
    passed = _record_of(source, use=f"packed={is_packed}")
    if passed.exists():
        return
    try:
        check_isolation(source, is_packed=is_packed)
    except Unchecked as error:
        if is_packed:
            raise unchecked_refusal(source, error) from error
        log.warning("%s: the attention of %s was not checked, since transformers computes no small copy (%s)",
                    name, kind, error)  # fmt: skip
        return
    record(passed)


def unchecked_refusal(source: HuggingFaceModel, error: "Unchecked") -> ConfigError:
    """Return the refusal of packed rows of a model of which transformers computes no copy."""
    return ConfigError(
        f"model={source.model.name}; whether a document changes the logits of the next one in its row cannot be "
        f"checked for transformers' {source.config.model_type}, which computes no small copy of its config ({error}); "
        "set prepare.packing=pad, so that a row holds one document."
    )


def check_isolation(source: HuggingFaceModel, *, is_packed: bool) -> dict[str, float]:
    """Return the `differences` of a copy of a model's config, whatever has passed before; nothing is recorded.

    Raises:
        Unchecked: transformers computes no copy.
        ConfigError: they are not what the objective needs.
    """
    module, reference = _copies(source)
    with _refused_as_misfit(source):
        moved = differences(module, reference, source=source, is_packed=is_packed)
    _require_unmoved(moved, source=source)
    return moved


def _require_unmoved(moved: Mapping[str, float], *, source: HuggingFaceModel) -> None:
    """Require the `differences` of a model to be what its objective needs.

    Raises:
        ConfigError: one is not.
    """
    name, kind = f"model={source.model.name}", source.config.model_type
    if not all(math.isfinite(share) for share in moved.values()):
        raise ConfigError(
            f"{name}; with the masks of training the logits of transformers' {kind} are NaN or infinite; take another "
            "model, or set model.attention=eager."
        )
    if source.causal and moved["past"] > TOLERANCE:
        raise ConfigError(
            f"{name}; in transformers' {kind} a token changes the logits of those before it, by {moved['past']:.2g} of "
            "the largest: it is no causal decoder, and would learn to copy what it is asked for; take one that is."
        )
    if not source.causal and moved["past"] <= TOLERANCE:
        raise ConfigError(
            f"{name}; in transformers' {kind} no token changes the logits of those before it, and the objective needs "
            "attention on both sides; take an encoder, or set model.attention=eager."
        )
    if moved["alone"] > TOLERANCE:
        raise ConfigError(
            f"{name}; with the masks of training the logits of transformers' {kind} are not those that it computes for "
            f"a document alone: {moved['alone']:.2g} of the largest apart; what was trained would not be what is "
            f"loaded; take {'a causal decoder' if source.causal else 'an encoder'}, or set model.attention=eager."
        )
    if moved["other"] > TOLERANCE:
        raise ConfigError(
            f"{name}; in transformers' {kind} a document changes the logits of the next one in its row, by "
            f"{moved['other']:.2g} of the largest; set prepare.packing=pad, so that a row holds one document."
        )
    if moved.get("head", 0.0) > TOLERANCE:
        raise ConfigError(
            f"{name}; the head of transformers' {kind} does more to its logits than a matrix and a bias, so that they "
            f"cannot be computed for masked tokens alone ({moved['head']:.2g} of the largest apart); take another "
            "model."
        )


class Unchecked(Exception):
    """Raised where transformers itself computes no copy of a model's config."""


def _copies(source: HuggingFaceModel) -> tuple[nn.Module, nn.Module]:
    """Return a copy as training calls it, and with the same random weights as transformers calls it.

    It is small; where transformers cannot compute that, it has the model's widths.

    Raises:
        Unchecked: transformers computes neither.
        ConfigError: it cannot be built as training calls it.
    """
    for copied in (small_copy, shallow_copy):
        try:
            config = copied(source.config)
            require_small(config, source)
            reference = _module(config, source, is_plain=True)
            _require_finite(reference)
        except UNFIT as error:
            reason = one_line(error)
            continue
        with _refused_as_misfit(source):
            module = _module(config, source, is_plain=False)
            module.load_state_dict(reference.state_dict(), assign=True)  # one copy in memory
        return module, reference
    raise Unchecked(reason)


@contextmanager
def _refused_as_misfit(source: HuggingFaceModel) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except UNFIT as error:
        raise source.misfit(error) from error


def require_left_padding(source: HuggingFaceModel) -> None:
    """Refuse a model that cannot answer prompts with padding in front of them, as those of unequal length have.

    Raises:
        ConfigError: it counts positions from a row's first slot, or padding reaches the prompt.
    """
    passed = _record_of(source, use="padding in front")
    if passed.exists():
        return
    with suppress(Unchecked):  # the answers' first program says what it cannot compute
        check_left_padding(source)
        record(passed)


def check_left_padding(source: HuggingFaceModel) -> None:
    """Check what `require_left_padding` requires, whatever has passed before; nothing is recorded.

    Raises:
        Unchecked: transformers computes no copy.
        ConfigError: padding in front of a prompt changes its logits.
    """
    module, reference = _copies(source)
    ids = _random_ids(LENGTHS[0])
    padding = torch.zeros(PADDING, dtype=torch.int64)
    row = {
        "ids": torch.cat([padding, ids])[None],
        "positions": torch.cat([padding, torch.arange(len(ids))])[None],
        "segments": torch.cat([padding, torch.ones_like(ids)])[None],
    }
    moved = 0.0
    with torch.no_grad(), _refused_as_misfit(source):
        expected = _alone(reference, ids, is_opened=False)
        for attention in (nullcontext, without_kernel):  # of the prompt, and of the tokens behind it
            with attention(module):
                found = forward.logits_of(module, dict(module.named_parameters()), row)[0, PADDING:]
            share = float((found - expected).abs().max() / expected.abs().max())
            moved = max(moved, share if math.isfinite(share) else math.inf)
    if moved > TOLERANCE:
        raise ConfigError(
            f"model={source.model.name} with model.attention={source.model.attention}; transformers' "
            f"{source.config.model_type} computes other logits for a prompt with padding in front of it "
            f"({moved:.2g} of the largest apart), which prompts of unequal length need; use model.attention=eager, or "
            "transformers' generate."
        )


def decodes_with_cache(source: HuggingFaceModel) -> bool:
    """Return whether text written with a cache (passes/generation.py) is what passes over whole rows would write.

    It is not of layers whose state is not known there, nor where positions are counted from a row's first slot. The
    answer is recorded, as that of `require_isolation`.
    """
    yes, no = (_record_of(source, use=f"{answer} a cache") for answer in ("with", "without"))
    if not (yes.exists() or no.exists()):
        try:
            require_left_padding(source)
            found = _writes_alike(_copies(source)[0])
        except (Unchecked, *UNFIT):
            found = False
        record(yes if found else no)
        return found
    return yes.exists()


class _Here:
    """What a decoder asks of a runtime, in plain torch; the run's own may compile, or is not there yet."""

    folding, loop, constrain = None, staticmethod(python_loop), staticmethod(unconstrained)

    def put(self, batch: Mapping[str, Tensor], *, rows_dim: int) -> dict[str, Tensor]:
        return dict(batch)

    def program(self, function: Any, **_: Any) -> Any:
        return function


def _writes_alike(module: nn.Module) -> bool:
    """Return whether the decoder's tokens behind two prompts, one with padding before it, are the likeliest."""
    how: dict[str, Any] = {"num_rows": 2, "max_new_tokens": 6, "tokens_per_call": 1, "seed": 0, "is_alone": False}
    decoder = Decoder(module, runtime=_Here(), choice=ChoiceConfig(), **how)  # type: ignore[arg-type]
    ids = _random_ids(LENGTHS[0])
    prompts = [ids.tolist(), ids[PADDING:].tolist()]
    found = decoder.complete(prompts, draws=(0, 0), bucket=LENGTHS[0])
    apart = []
    for prompt, new, log_probs in zip(prompts, found.ids_BN, found.log_probs_BN, strict=True):
        row = torch.tensor(prompt + new.tolist())
        with torch.no_grad():
            logits = _packed(module, row, lengths=(len(row),), causal=True)[len(prompt) - 1 : -1]
        likeliest = torch.log_softmax(logits, -1).amax(-1)
        apart.append((torch.from_numpy(log_probs) - likeliest).abs().max())
    return bool(torch.stack(apart).max() <= TOLERANCE)


def record(passed: Path) -> None:
    """Make the empty file that says that a check has passed."""
    with suppress(OSError):  # where the home folder is not writable, the check is made each time
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


def _record_of(source: HuggingFaceModel, *, use: str) -> Path:
    """Return the empty file that records that a config has passed, with this version of the code."""
    digest = hashlib.sha256(f"{transformers.__version__} {source.runs_code} {use}".encode())
    digest.update(f"{source.head} {source.causal}".encode())
    digest.update(f"{source.model.attention} {source.config.to_json_string(use_diff=False)}".encode())
    delta = {name: ["chunks", "gated_delta", "delta_net"] for name in DELTA_NETS}
    by_type = {XLSTM: ["chunks", "mlstm", "xlstm"], LONGFORMER: ["longformer"], **delta}
    families = by_type.get(source.config.model_type, [])
    own = ["classification", *families] if source.head == CLASSIFIER else families
    files = [Path(__file__), *(Path(str(module.__file__)) for module in (forward, generation, attention, experts))]
    for file in (*files, *(Path(__file__).parents[1] / "families" / f"{name}.py" for name in own)):
        digest.update(file.read_bytes())
    return Path(cache_folder("isolation"), digest.hexdigest()[:32])


def differences(
    module: nn.Module, reference: nn.Module, *, source: HuggingFaceModel, is_packed: bool
) -> dict[str, float]:
    """Return the largest differences of logits, as shares of the largest logit.

    Args:
        module: the copy, as training calls it.
        reference: a copy with the same weights, as transformers calls it; one of a decoder that is to attend on both
            sides gets a mask that hides nothing within a layer's window.

    Returns:
        `past`: earlier tokens, when the last one changes; `alone`: a document with padding behind it, against the same
            document as transformers computes it; `other`: documents in one row, against each alone; `head`, of masked
            language models: logits of chosen tokens, against those of the class.
    """
    first, second = LENGTHS
    ids = _random_ids(first + second)
    if source.head == CLASSIFIER:
        return _classifier_differences(module, reference, ids=ids, source=source, is_packed=is_packed)
    changed = ids.clone()
    changed[first - 1] = ids[first - 1] % (AT_MOST["vocab_size"] - len(IDS)) + len(IDS)
    with torch.no_grad():
        is_opened = source.head == "causal_lm" and not source.causal
        expected = torch.cat([_alone(reference, part, is_opened=is_opened) for part in ids.split(LENGTHS)])
        one = _packed(module, ids[:first], lengths=(first,), causal=source.causal)
        moved = _packed(module, changed[:first], lengths=(first,), causal=source.causal)
        two = _packed(module, ids, lengths=LENGTHS, causal=source.causal) if is_packed else expected
    largest = expected.abs().max()
    pairs = {"past": (one[:-1], moved[:-1]), "alone": (one, expected[:first]), "other": (two, expected)}
    if source.head == "masked_lm":
        with torch.no_grad():
            pairs["head"] = (_by_features(module, ids[:first]), one)
    return {name: float((a - b).abs().max() / largest) for name, (a, b) in pairs.items()}


def _classifier_differences(
    module: nn.Module, reference: nn.Module, *, ids: Tensor, source: HuggingFaceModel, is_packed: bool
) -> dict[str, float]:
    """Return `differences` of a classifier: `past` of hidden states, the others of the logits of each text."""
    first, _ = LENGTHS
    changed = ids[:first].clone()
    changed[-1] = ids[0]
    with torch.no_grad():
        one, moved = (_hidden(module, part, causal=source.causal)[:-1] for part in (ids[:first], changed))
        expected = torch.cat([reference(input_ids=part[None]).logits for part in ids.split(LENGTHS)])
        alone = _of_texts(module, ids[:first], lengths=(first,), causal=source.causal)
        two = _of_texts(module, ids, lengths=LENGTHS, causal=source.causal) if is_packed else expected
    pairs = {"past": (one, moved), "alone": (alone, expected[:1]), "other": (two, expected)}
    scales = {name: (one if name == "past" else expected).abs().max() for name in pairs}
    return {name: float((a - b).abs().max() / scales[name]) for name, (a, b) in pairs.items()}


def _hidden(module: nn.Module, ids: Tensor, *, causal: bool) -> Tensor:
    """Return the hidden states (T, H) of one document under its head."""
    whole: Any = module
    ones = torch.ones(1, len(ids), dtype=torch.int64)
    batch = {"ids": ids[None], "positions": torch.arange(len(ids))[None], "segments": ones}
    with forward.mask_in_layers_alone(module):
        found: Tensor = whole.base_model(**forward.model_inputs(module, batch, causal=causal)).last_hidden_state[0]
    return found


def _of_texts(module: nn.Module, ids: Tensor, *, lengths: tuple[int, ...], causal: bool) -> Tensor:
    """Return the logits (texts, C) of texts in one row with padding behind them, as training computes them."""
    from tpu_experiments.models.families.classification import class_logits, last_scores, texts_of

    if causal:
        batch = packed_row(ids, lengths=lengths)
        return last_scores(module, dict(module.named_parameters()), batch, num=len(lengths))[0, :, None]
    parts = [torch.cat([part, torch.zeros(1, dtype=torch.int64)]) for part in ids.split(lengths)]
    padding = torch.zeros(PADDING, dtype=torch.int64)
    segments = torch.cat([torch.full((len(part),), number) for number, part in enumerate(parts, start=1)] + [padding])
    rows = {
        "ids": torch.cat([*parts, padding])[None],
        "positions": torch.cat([*(torch.arange(len(part)) for part in parts), padding])[None],
        "segments": segments[None],
        "learn": torch.cat([*(part == 0 for part in parts), padding > 0])[None].int(),
        LABEL: torch.zeros_like(segments)[None],
    }
    texts = texts_of(rows)
    parameters = dict(module.named_parameters())
    return class_logits(module, parameters, texts)[0, : len(parts)]


def _by_features(module: nn.Module, ids: Tensor) -> Tensor:
    """Return logits (T, V) of one document, computed for chosen tokens as the objective does."""
    segments, picks = torch.ones(1, len(ids), dtype=torch.int64), torch.eye(len(ids))[None]
    batch = {"ids": ids[None], "positions": torch.arange(len(ids))[None], "segments": segments}
    features, head, bias = forward.masked_features(module, dict(module.named_parameters()), batch, picks_RKT=picks)
    logits = features[0] @ head.T
    return logits if bias is None else logits + bias


def _random_ids(count: int) -> Tensor:
    """Draw token ids, none of them a special one."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(len(IDS), AT_MOST["vocab_size"], (count,), generator=generator)


def _alone(reference: nn.Module, ids: Tensor, *, is_opened: bool) -> Tensor:
    """Return logits (T, V) of one document as transformers computes them.

    Args:
        is_opened: whether a decoder gets masks that hide nothing but what is outside a layer's window.
    """
    ones = torch.ones(1, len(ids), dtype=torch.int64)
    mask = {"attention_mask": forward.attention_input(ones, module=reference, causal=False)} if is_opened else {}
    logits: Tensor = reference(input_ids=ids[None], use_cache=False, **mask).logits[0]
    return logits


def _packed(module: nn.Module, ids: Tensor, *, lengths: tuple[int, ...], causal: bool) -> Tensor:
    """Return logits (T, V) of documents in one row with padding behind them, by training's forward pass."""
    batch = packed_row(ids, lengths=lengths)
    return forward.logits_of(module, dict(module.named_parameters()), batch, causal=causal)[0, : len(ids)]


def packed_row(ids: Tensor, *, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Return one row (1, T + PADDING) of documents that lie behind one another in `ids` (T)."""
    padding = torch.zeros(PADDING, dtype=torch.int64)
    segments = torch.cat([torch.full((n,), number) for number, n in enumerate(lengths, start=1)] + [padding])
    positions = torch.cat([torch.arange(n) for n in lengths] + [padding])
    return {"ids": torch.cat([ids, padding])[None], "positions": positions[None], "segments": segments[None]}


def require_small(config: PretrainedConfig, source: HuggingFaceModel) -> None:
    """Require a copy to be small.

    Raises:
        ValueError: it has more than `MOST_PARAMETERS`.
    """
    with torch.device("meta"):
        empty = source.built_by_transformers(config, trust_remote_code=source.runs_code)
    count = sum(p.numel() for p in empty.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"the copy has {count:,} parameters")


def _module(config: PretrainedConfig, source: HuggingFaceModel, *, is_plain: bool) -> nn.Module:
    """Build a copy with random weights, as transformers calls it or as training does."""
    own = copy.deepcopy(config)  # a module keeps its config
    own._attn_implementation = "eager" if is_plain else source.config._attn_implementation
    own._experts_implementation = "eager" if is_plain else source.config._experts_implementation
    build = source.built_by_transformers if is_plain else source.built
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = build(own, dtype=torch.float32, trust_remote_code=source.runs_code).eval()
        for parameter in made.parameters():
            _randomise(parameter)
    return made


def _require_finite(reference: nn.Module) -> None:
    """Require transformers to compute finite logits of a copy.

    Raises:
        ValueError: they are not.
    """
    with torch.no_grad():
        logits = reference(input_ids=_random_ids(sum(LENGTHS))[None], use_cache=False).logits
    if not bool(logits.isfinite().all()):
        raise ValueError("its logits are NaN or infinite")


@torch.no_grad()
def _randomise(parameter: nn.Parameter) -> None:
    """Draw weights that move logits: matrices preserve the activations' scale, vectors change a little."""
    if parameter.ndim > 1:
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    else:
        parameter.add_(torch.randn_like(parameter), alpha=0.1)


def small_copy(config: PretrainedConfig, *, keeps_rope: bool = False, periods: int = 1) -> PretrainedConfig:
    """Return a config of the same class with few, narrow layers of every kind that the model has.

    Args:
        keeps_rope: the width of a head, the form of RoPE and the longest row are the model's own.
        periods: how often the first layers that have every kind are there.
    """
    own: Mapping[str, str] = config.attribute_map
    values = config.to_dict()
    heads = next((values[own.get(name, name)] for name in HEADS if isinstance(values.get(own.get(name, name)), int)), 1)
    groups = values.get("num_key_value_heads") or heads
    shared = min(groups, 2)
    kept = shared * min(heads // groups, 2)
    width = _width_of_head(values, own=own, heads=heads) if keeps_rope else WIDTH
    small: dict[str, Any] = {**dict.fromkeys(HEADS, kept), **dict.fromkeys(WIDTHS, width * kept)}
    small |= {"num_key_value_heads": shared, "head_dim": width}
    for name, most in AT_MOST.items():
        value = values.get(own.get(name, name))
        if keeps_rope and name == "max_position_embeddings":
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            small[name] = min(value, most)
        elif isinstance(value, list) and all(isinstance(each, int) for each in value):
            small[name] = [min(each, most) for each in value]
    values = values if keeps_rope else _with_plain_rope(values)
    return _with(small, config=config, values=values, is_wide=False, periods=periods)


def _width_of_head(values: Mapping[str, Any], *, own: Mapping[str, str], heads: int) -> int:
    """Return the width of a model's heads; `WIDTH` where its config does not say it by the usual names."""
    stated, hidden = values.get(own.get("head_dim", "head_dim")), values.get(own.get("hidden_size", "hidden_size"))
    if isinstance(stated, int):
        return stated
    return hidden // heads if isinstance(hidden, int) else WIDTH


def shallow_copy(config: PretrainedConfig) -> PretrainedConfig:
    """Return a config of the same class and widths with few layers and tokens, for classes that tie their widths."""
    small = {name: AT_MOST[name] for name in ("vocab_size", "vocab_size_per_layer_input")}
    return _with(small, config=config, values=config.to_dict(), is_wide=True)


def _with(
    small: Mapping[str, Any], *, config: PretrainedConfig, values: dict[str, Any], is_wide: bool, periods: int = 1
) -> PretrainedConfig:
    """Return a config of few layers with some values replaced, where it has them at all.

    Args:
        is_wide: whether values of single layers are kept; Gemma 4's class derives them from those of the model.
    """
    own: Mapping[str, str] = config.attribute_map
    layers = int(values.get(own.get("num_hidden_layers", "num_hidden_layers")) or FEWEST_LAYERS)
    kinds = values.get(own.get("layer_types", "layer_types"))
    period = min(layers, max(map(_layers_of_every_kind, (kinds, values.get(ROTATED)))))
    fewest = min(layers, periods * period)
    if values.get(SHARED):  # the last layers read keys and values of the last one of their kind before them
        fewest = min(layers, 2 * period)
        small = {**small, SHARED: fewest - period}
    for name, value in {**small, **dict.fromkeys(DEPTHS, fewest), **IDS}.items():
        if values.get(own.get(name, name)) is not None:
            values[own.get(name, name)] = value
    for name, value in values.items():
        if isinstance(value, list) and len(value) == layers:
            values[name] = (value[:period] * max(periods, 2))[:fewest] if isinstance(kinds, list) else value[:fewest]
    own_of_layers = values.pop("per_layer_config", None)
    if own_of_layers is not None and is_wide:
        values["per_layer_config"] = {n: own for n, own in own_of_layers.items() if int(n) < fewest}
    values.pop("quantization_config", None)
    return type(config).from_dict(values)


def _layers_of_every_kind(kinds: Any) -> int:
    if not isinstance(kinds, list):
        return FEWEST_LAYERS
    return max(FEWEST_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds)))


def _with_plain_rope(value: Any) -> Any:
    """Replace every form of rotary embedding by the plain one with a single base.

    The number of factors for longer contexts depends on the width of a head, which the copy changes.
    """
    if not isinstance(value, dict):
        return value
    if "rope_type" in value:
        kept = {name: value[name] for name in ("rope_theta", "partial_rotary_factor") if name in value}
        return {**kept, "rope_type": "default"}
    return {name: _with_plain_rope(each) for name, each in value.items()}
