"""Schema of the groups `model`, `lora` and `sharding`, and constants that their values name."""

import fnmatch
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from omegaconf import MISSING

from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.places import place

ALL_LINEAR = "all-linear"
"""Target that names every Linear of every layer, as in PEFT."""


def is_target(name: str, target: str) -> bool:
    """Return whether `target` matches the Linear `name`.

    A target is `all-linear` (every Linear inside a layer), the last part of a name, or a glob over the full name.
    """
    if target == ALL_LINEAR:
        return is_in_layer(name)
    return name.rpartition(".")[2] == target or fnmatch.fnmatchcase(name, target)


def is_in_layer(name: str) -> bool:
    """Return whether a module or parameter is inside one of the numbered layers."""
    return any(part.isdigit() for part in name.split(".")[:-1])


ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
SAVABLE = ("attention", *ATTENTION_PROJECTIONS, *MLP_PROJECTIONS)
"""Values of a layer that `model.saved` can name for the forward pass to save."""
EVERY_PROJECTION = "*"
"""In the place of names: the output of every Linear of a layer, whatever its family calls it."""
SAVED: dict[str, tuple[str, ...]] = {
    "offload": (),
    "layer_inputs": (),
    "save_attention": ("attention",),
    "save_dots": ("attention", EVERY_PROJECTION),
}
"""Values that each `model.remat` saves besides the layer's input. `attention` is the input of o_proj, and what an
attention kernel saves for its own backward pass."""


def keeps_output(names: Collection[str], *, projection: str) -> bool:
    """Return whether the values that a policy saves hold the output of a projection, by the last part of its name."""
    return EVERY_PROJECTION in names or projection.rpartition(".")[2] in names


AXES = ("data", "fsdp", "tensor")
"""Mesh axes that `sharding.rules` can name; the first one connects the most distant devices."""
ROWS = ("data", "fsdp")
"""Mesh axes that the rows of a batch are split over."""

# ---- model --------------------------------------------------------------------------------------------------

REPLACED_TOKEN_MODEL = "tpu_experiments.models.replaced_token.ReplacedTokenModel"
"""`model._target_` of a generator and discriminator, for `objective=rtd`."""


@dataclass
class ModelConfig:
    """A transformers decoder: where its weights come from and how it is computed."""

    _target_: str = "tpu_experiments.models.huggingface.HuggingFaceModel"
    """Swap point: class that builds the module without weights and yields the weights one by one
    (models/huggingface.py)."""
    name: str = MISSING
    """Name of the model; the file name in conf/model."""
    path: str = place("model")
    """Hub id, local folder of a Hugging Face checkpoint (single or sharded safetensors), or local GGUF file."""
    revision: str | None = None
    """Hub revision (commit or tag); null is the newest. Of a GGUF file `sha256:` and its SHA-256, which a run keeps."""
    tokenizer_path: str | None = place("model", default=None)
    """Folder or Hub id of the tokenizer; null is `path`."""
    added_tokens: list[str] = field(default_factory=list)
    """Special tokens that the tokenizer gets where it lacks them, as those of a chat template; each is one id."""
    vocab_size: int | None = number(default=None, at_least=1, at_most=2**24)
    """Rows of the embedding and the head; those that the checkpoint lacks start as the mean of its own. null: its
    own."""
    remote_code: str = choice("refuse", "ignore", "run", default="refuse")
    """Treatment of a checkpoint or tokenizer that contains Python code (`auto_map`). `refuse` stops. `ignore` uses
    transformers' own class for the model type. `run` executes the code with your permissions, as transformers'
    trust_remote_code does."""
    chat_template_path: str | None = place("local", default=None)
    """Jinja file used instead of the tokenizer's own chat template."""
    chat_format: str = choice(
        *("tokenizer", "chatml", "instruction_response", "llama2", "plain", "raw"),
        *("qwen2_5", "qwen3", "llama3", "llama3_1", "gemma3", "mistral_v3", "mistral_tekken"),
        default="tokenizer",
    )
    """`tokenizer`: its own chat template, or `chat_template_path`. The others are templates shipped here: `chatml`,
    `instruction_response`, `llama2` and `plain` for base models that have none; `raw` writes turns as they are and EOS
    behind an answer, for prompts that a source writes whole (`data.<name>.asked_as`); those of families for training
    them, which render as the models' own, keep every turn, and have places for tools and reasoning where the family
    has."""
    init: str = choice("pretrained", "random", default="pretrained")
    """`pretrained`: weights of `path`. `random`: transformers' own initialisation, seeded by `seed`."""
    size: str = choice("full", "tiny", default="full")
    """`tiny`: `arch` overridden by `tiny_arch`, with random weights; the same architecture, seconds on a CPU."""
    dtype: str = choice("bfloat16", "float16", "float32", default="bfloat16")
    """Data type of the frozen base and of the arithmetic; adapters and optimizer state are always float32. `float16` is
    for GPUs without bf16, such as the T4, in plain torch: the loss is scaled by a power of two, from 65,536 on, that is
    halved where gradients overflow (the step is skipped) and doubled after 2,000 updates in a row."""
    base: str = choice("dense", "int8", "nf4", default="dense")
    """Storage of the frozen weights of the layers' Linear modules. `dense`: in `dtype`. `int8`: one byte a weight, one
    scale per output feature. `nf4`: half a byte, a scale per 64 weights (QLoRA, arXiv 2305.14314), for GPUs: on a TPU
    int8 is smaller and faster. Head and embedding stay in `dtype`."""
    base_double_quant: bool = True
    """Whether `base=nf4` stores its scales in 8 bits, which saves 0.37 bits a weight."""
    base_activations: str = choice("as_they_are", "int8", default="as_they_are")
    """`int8`: products of `base=int8` round their input to int8, with a scale per token, and multiply integers: faster
    on v5e, slower on v6e, and less exact."""
    linear: str = choice("plain", "bitnet", "lr_qat", default="plain")
    """Linear modules of the layers. `bitnet`: weights of -1, 0 and 1 times their mean magnitude, and inputs of 8 bits
    with a scale per token (BitNet b1.58, arXiv 2402.17764), trained in float through the rounding; a Llama becomes
    transformers' BitNet, which has two further norms in a layer. It needs `lora=none`. `lr_qat`: weights with an
    adapter are rounded to integers in every forward pass, and the adapter and their scales learn how (LR-QAT, arXiv
    2406.06385); the frozen weights are held in one byte each."""
    linear_bits: int = number(default=4, at_least=2, at_most=7)
    """Bits of the integers of `linear=lr_qat`."""
    linear_group: int = number(default=0, at_least=0)
    """Weights of a row that share a scale in `linear=lr_qat`; 0: all of a row. vLLM reads 0, 32, 64 and 128."""
    linear_activations: str = choice("as_they_are", "int8", default="as_they_are")
    """`int8`: the inputs of weights of `linear=lr_qat` are rounded to 8 bits too, between the least and the greatest
    feature of each token."""
    linear_warmup_steps: int = number(default=0, at_least=0)
    """Steps of the first stage over which `linear=bitnet` goes from the values as they are to the quantised ones, for a
    start from a pre-trained Llama; 0 quantises from the first step on. Evaluations are of the quantised model."""
    attention: str = choice("sdpa", "eager", "flash", default="sdpa")
    """`sdpa`, `eager`: transformers' implementations, with a precomputed 4-D mask, so that nothing is read on the host.
    `flash`: the TPU kernel, which does not store the score matrix; on other devices the same as `sdpa`."""
    stack: str = choice("scanned", "unrolled", default="scanned")
    """`scanned`: on torch_xla, equal layers are folded into a loop, so that only one layer is compiled; in plain torch,
    layers follow `remat`. `unrolled`: every layer is compiled, and all activations are saved for the backward pass."""
    stack_group: int = number(default=1, at_least=1)
    """Periods of equal layers per iteration of the `scanned` loop (a period is one layer; six for Gemma 3). More make
    the program longer. At most half of all periods are used; remaining layers are compiled on their own."""
    remat: str = choice("none", "offload", "layer_inputs", "save_attention", "save_dots", default="layer_inputs")
    """Activations that scanned layers save for the backward pass, which recomputes the others. `none`: no
    recomputation, everything is saved. `layer_inputs`: each layer's input. `offload`: the same, in the host's memory.
    `save_attention`: also the input of o_proj; in plain torch the result of sdpa's kernel, so nothing with
    `attention: eager`. `save_dots`: also the output of every projection; in plain torch, without its adapter's part."""
    saved: list[str] = field(default_factory=list)
    """Further activations to save, by name: `attention` or projections (`q_proj`, `up_proj`, ...)."""
    lr: float = number(default=2e-4, above=0)
    """Peak learning rate suited to adapters on this model; full fine-tuning of pretrained weights uses a tenth of it.
    `optim.lr` and a stage's `lr` take precedence."""
    row_tokens: int = number(default=2048, at_least=8, at_most=2**24)
    """Longest row, in tokens, that `trainer.seq_len=auto` chooses for this model."""
    step_tokens: int = number(default=65536, at_least=8, at_most=2**40)
    """Tokens per optimizer step suited to adapters on this model; `trainer.global_batch_rows` takes precedence."""
    micro_tokens: int = number(default=8192, at_least=8, at_most=2**24)
    """Most tokens of a micro-batch on one device; `trainer.micro_batch_rows` takes precedence. The recipes plan with
    8,192, of which Mistral 7B takes 8 to 10 GiB of a chip."""
    lora_targets: list[str] = field(default_factory=lambda: [*ATTENTION_PROJECTIONS, *MLP_PROJECTIONS])
    """Linear modules that the files of `lora` adapt on this model; `lora.targets` takes precedence."""
    arch: dict[str, Any] = field(default_factory=dict)
    """Hugging Face config values; used for `init: random` and to plan without the checkpoint."""
    tiny_arch: dict[str, Any] = field(default_factory=dict)
    """Values that override `arch` for `size: tiny`."""


HELD = ("base", "base_double_quant", "base_activations")
"""Settings of a model that say how its frozen weights are stored."""


OF_ROUNDED: dict[str, Any] = {"linear_bits": 4, "linear_group": 0, "linear_activations": "as_they_are"}
"""Settings of `linear=lr_qat` alone, with their defaults."""


def rounded_settings(model: ModelConfig) -> dict[str, Any] | None:
    """Return what rounded weights are rounded to; None where none are."""
    return {key: getattr(model, key) for key in OF_ROUNDED} if model.linear == "lr_qat" else None


def held_as_given(model: ModelConfig, *, given: ModelConfig) -> ModelConfig:
    """Return a run's model with its frozen weights stored as the command says, if that is `int8` or `nf4`."""
    if given.base in ("dense", model.base):
        return model
    return replace(model, **{key: getattr(given, key) for key in HELD})


# ---- adapters and sharding ----------------------------------------------------------------------------------


@dataclass
class LoraConfig:
    """Low-rank adapters, W x + scale * B A x (arXiv 2106.09685)."""

    r: int = number(at_least=0)
    """Rank; 0 trains every weight of the model, without adapters."""
    alpha: float = number(default=16.0, above=0)
    """Numerator of the scale (see `scaling`)."""
    dropout: float = number(default=0.0, at_least=0, below=1)
    """Probability of dropping an input of A during training."""
    targets: list[str] = field(default_factory=list)
    """Linear modules that get an adapter, by the last part of their name or by a glob over the full name; `all-linear`
    selects every Linear of every layer."""
    target_parameters: list[str] = field(default_factory=list)
    """Matrices of a mixture's experts that get an adapter for each expert, as PEFT's: ends of their names, such as
    `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`. They take neither dropout nor DoRA, and `init` b_zero or
    a_zero."""
    init: str = choice("b_zero", "a_zero", "pissa", "loftq", default="b_zero")
    """`b_zero`: A Kaiming-uniform, B zero. `a_zero`: A zero, B normal. `pissa`: principal singular directions
    of W, which is reduced by them (arXiv 2404.02948). `loftq`: those of what `model.base=nf4` loses of W, so that the
    start is nearer to W than the codes alone (arXiv 2310.08659)."""
    scaling: str = choice("alpha_over_r", "alpha_over_sqrt_r", default="alpha_over_r")
    """Scale of the adapter; `alpha_over_sqrt_r` is rsLoRA (arXiv 2312.03732)."""
    dora: bool = False
    """Whether the length of each row of W + scale * B A is trained beside its direction (arXiv 2402.09353): one more
    float32 per output feature. W is read once more per micro-batch for the rows' norms; with `dropout`, the product
    with W is computed twice."""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """Ranks of some modules in the place of `r`, as PEFT's: a regular expression for a module's name, whole or from a
    dot on (`q_proj`, `layers.0.mlp.up_proj`), to the rank. Of several that match, the first applies."""
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    """The same for `alpha`."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained whole beside the adapters, as PEFT's: ends of their names, such as `lm_head`,
    `embed_tokens` or `norm` (which every name that ends so matches)."""
    ensure_weight_tying: bool = False
    """Whether an embedding of `modules_to_save` that is also the head (tie_word_embeddings) is trained as both, and one
    of `targets` has one adapter for both; PEFT would train a copy beside it, or adapt one of the two, otherwise."""
    trainable_token_indices: dict[str, list[int]] = field(default_factory=dict)
    """Rows that are trained whole beside the adapters, as PEFT's: the end of the name of the embedding or head
    (`embed_tokens`, `lm_head`) to token ids. A head that is the embedding (tie_word_embeddings) has the same rows."""


PATTERNS = ("rank_pattern", "alpha_pattern")
"""Settings of adapters by the names of their modules."""
OF_VOCABULARY = ("trainable_token_indices", "ensure_weight_tying")
"""Settings of what is trained of an embedding and its head."""
Value = TypeVar("Value")


LONGEST_PATTERN, REPETITIONS = 500, 3
"""Of a regular expression, which may be a stranger's: names of modules have some hundred letters, and each repetition
may be tried at every one of them."""
REPETITION, REPEATED_GROUP = re.compile(r"[*+{]"), re.compile(r"\)[*+{]")


def pattern_problem(pattern: str) -> str | None:
    """Return what is wrong with a pattern and what to do; None of one that is matched in no time."""
    try:
        re.compile(pattern)
    except re.error as error:
        return f"it is no regular expression ({error}); write the name of a module"
    if (
        len(pattern) > LONGEST_PATTERN
        or REPEATED_GROUP.search(pattern)
        or len(REPETITION.findall(pattern)) > REPETITIONS
    ):
        return (
            f"matching it may take for ever (more than {LONGEST_PATTERN} letters, a repeated group, or more than "
            f"{REPETITIONS} repetitions); write the names of the modules"
        )
    return None


def pattern_key(patterns: Mapping[str, Any], name: str) -> str:
    """Return the pattern that applies to a module, as PEFT finds it; the name itself where none does."""
    found = (key for key in patterns if re.match(rf"(.*\.)?({key})$", name))
    return next(found, name)


def value_of_pattern(patterns: Mapping[str, Value], name: str, *, default: Value) -> Value:
    """Return the value of the pattern that applies to a module."""
    return patterns.get(pattern_key(patterns, name), default)


def lora_of(lora: LoraConfig, name: str) -> LoraConfig:
    """Return the settings of one module's adapter: with its own rank and alpha, and without patterns."""
    if not has_patterns(lora):
        return lora
    rank = value_of_pattern(lora.rank_pattern, name, default=lora.r)
    alpha = value_of_pattern(lora.alpha_pattern, name, default=lora.alpha)
    return replace(lora, r=rank, alpha=alpha, rank_pattern={}, alpha_pattern={})


def is_saved(name: str, lora: LoraConfig) -> bool:
    """Return whether a parameter is of one of `lora.modules_to_save`, or of a module inside of one."""
    parts = name.split(".")[:-1]
    outer = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(each.endswith(tuple(lora.modules_to_save)) for each in outer)


def is_named(name: str, end: str) -> bool:
    """Return whether the name of a module or parameter is `end`, or ends with it from a dot on."""
    return name == end or name.endswith(f".{end}")


def tokens_of(lora: LoraConfig, name: str) -> list[int]:
    """Return the tokens whose rows of a module are trained."""
    return next((list(tokens) for key, tokens in lora.trainable_token_indices.items() if is_named(name, key)), [])


def has_patterns(lora: LoraConfig) -> bool:
    """Return whether modules have ranks or alphas of their own."""
    return bool(lora.rank_pattern or lora.alpha_pattern)


def ranks_of(lora: LoraConfig) -> tuple[int, ...]:
    """Return the ranks that adapters may have; none without adapters."""
    return tuple(dict.fromkeys((lora.r, *lora.rank_pattern.values()))) if lora.r else ()


@dataclass
class MeshConfig:
    """Devices along each mesh axis; their product is hw.num_devices.

    One size may be -1, which takes the remaining devices.
    """

    data: int = number(default=1, at_least=-1)
    """Data parallelism: replicas of the weights. Rows are split over them, and gradients are summed."""
    fsdp: int = number(default=-1, at_least=-1)
    """Sharded data parallelism: rows are split over these devices, and so are the weights, which are gathered layer by
    layer."""
    tensor: int = number(default=1, at_least=-1)
    """Tensor parallelism: these devices work on the same rows, each with its share of heads and features."""


@dataclass
class ShardingConfig:
    """Mapping of parameter dimensions to mesh axes in `hw.parallel: spmd`."""

    name: str = MISSING
    """Name of the table; the file name in conf/sharding."""
    rules: dict[str, list[Any]] = field(default_factory=dict)
    """Glob over parameter names to one entry per dimension: a mesh axis, a list of axes, or null (not split). The first
    match applies. A glob that matches nothing stops the run, except for adapters of projections that have none."""
    max_replicated_elements: int = number(default=16777216, at_least=0)
    """Largest parameter, in elements, that may be replicated; a larger one that no rule splits stops the run. The
    default of 16 Mi elements is 32 MiB in bf16; 0 disables the check."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
