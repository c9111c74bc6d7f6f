"""Schema of the groups `model`, `data`, `lora` and `sharding`, and constants that their values name."""

import fnmatch
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from omegaconf import MISSING

from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.places import place

ALL_LINEAR = "all-linear"
"""Target that names every Linear of every layer, as in PEFT."""


def is_target(name: str, target: str) -> bool:
    """Return whether `target` matches the Linear `name`.

    A target is `all-linear` (every Linear inside a layer), the last part of a name, or a glob over the full name.
    """
    *path, leaf = name.split(".")
    if target == ALL_LINEAR:
        return any(part.isdigit() for part in path)
    return leaf == target or fnmatch.fnmatchcase(name, target)


FORMATS = (
    "auto",
    "text",
    "messages",
    "alternating",
    "question_answer",
    "instruction",
    "prompt_completion",
    "llama2",
    "human_assistant",
)

ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
SAVABLE = ("attention", *ATTENTION_PROJECTIONS, *MLP_PROJECTIONS)
"""Values of a layer that `model.saved` can name for the forward pass to save."""
SAVED: dict[str, tuple[str, ...]] = {
    "offload": (),
    "layer_inputs": (),
    "save_attention": ("attention",),
    "save_dots": SAVABLE,
}
"""Values that each `model.remat` saves besides the layer's input. `attention` is the input of o_proj, and what an
attention kernel saves for its own backward pass."""
QUESTION_ROWS = 32
"""Questions (`DataSourceConfig.questions`) answered in one batch; every device generates the answers to all of them."""
AXES = ("data", "fsdp", "tensor")
"""Mesh axes that `sharding.rules` can name; the first one connects the most distant devices."""
ROWS = ("data", "fsdp")
"""Mesh axes that the rows of a batch are split over."""

# ---- model --------------------------------------------------------------------------------------------------


@dataclass
class ModelConfig:
    """A transformers decoder: where its weights come from and how it is computed."""

    _target_: str = "tpu_experiments.models.huggingface.HuggingFaceModel"
    """Swap point: class that builds the module without weights and yields the weights one by one
    (models/huggingface.py)."""
    name: str = MISSING
    """Name of the model; the file name in conf/model."""
    path: str = place("model")
    """Hub id, or local folder of a Hugging Face checkpoint (single or sharded safetensors)."""
    revision: str | None = None
    """Hub revision (commit or tag); null is the newest."""
    tokenizer_path: str | None = place("model", default=None)
    """Folder or Hub id of the tokenizer; null is `path`."""
    remote_code: str = choice("refuse", "ignore", "run", default="refuse")
    """Treatment of a checkpoint or tokenizer that contains Python code (`auto_map`). `refuse` stops. `ignore` uses
    transformers' own class for the model type. `run` executes the code with your permissions, as transformers'
    trust_remote_code does."""
    chat_template_path: str | None = place("local", default=None)
    """Jinja file used instead of the tokenizer's own chat template."""
    chat_format: str = choice("tokenizer", "chatml", "instruction_response", "llama2", "plain", default="tokenizer")
    """`tokenizer`: its own chat template, or `chat_template_path`. The others are templates shipped here, for base
    models that have none."""
    init: str = choice("pretrained", "random", default="pretrained")
    """`pretrained`: weights of `path`. `random`: transformers' own initialisation, seeded by `seed`."""
    size: str = choice("full", "tiny", default="full")
    """`tiny`: `arch` overridden by `tiny_arch`, with random weights; the same architecture, seconds on a CPU."""
    dtype: str = choice("bfloat16", "float32", default="bfloat16")
    """Data type of the frozen base and of the arithmetic; adapters and optimizer state are always float32."""
    attention: str = choice("sdpa", "eager", "flash", default="sdpa")
    """`sdpa`, `eager`: transformers' implementations, with a precomputed 4-D mask, so that nothing is read on the host.
    `flash`: the TPU kernel, which does not store the score matrix; on other devices the same as `sdpa`."""
    stack: str = choice("scanned", "unrolled", default="scanned")
    """`scanned`: on torch_xla, equal layers are folded into a loop, so that only one layer is compiled. `unrolled`:
    every layer is compiled, and all activations are saved for the backward pass, as in plain torch."""
    stack_group: int = number(default=1, at_least=1)
    """Periods of equal layers per iteration of the `scanned` loop (a period is one layer; six for Gemma 3). More make
    the program longer. At most half of all periods are used; remaining layers are compiled on their own."""
    remat: str = choice("none", "offload", "layer_inputs", "save_attention", "save_dots", default="layer_inputs")
    """Activations that scanned layers save for the backward pass, which recomputes the others. `none`: no
    recomputation, everything is saved. `layer_inputs`: each layer's input. `offload`: the same, in the TPU host's
    memory. `save_attention`: also the input of o_proj. `save_dots`: also the output of every projection."""
    saved: list[str] = field(default_factory=list)
    """Further activations to save, by name: `attention` or projections (`q_proj`, `up_proj`, ...)."""
    lr: float = number(default=2e-4, above=0)
    """Peak learning rate suited to adapters on this model; full fine-tuning of pretrained weights uses a tenth of it.
    `optim.lr` and a stage's `lr` take precedence."""
    row_tokens: int = number(default=2048, at_least=8, at_most=2**24)
    """Longest row, in tokens, that `trainer.seq_len=auto` chooses for this model."""
    step_tokens: int = number(default=65536, at_least=8, at_most=2**40)
    """Tokens per optimizer step suited to adapters on this model; `trainer.global_batch_rows` takes precedence."""
    arch: dict[str, Any] = field(default_factory=dict)
    """Hugging Face config values; used for `init: random` and to plan without the checkpoint."""
    tiny_arch: dict[str, Any] = field(default_factory=dict)
    """Values that override `arch` for `size: tiny`."""


# ---- data ---------------------------------------------------------------------------------------------------


@dataclass
class CleanConfig:
    """Cleaning rules for documents, applied in the order of the keys; all are off by default.

    The audit counts the effects of each rule. With `scope: paragraph` (texts only), rules apply to one
    paragraph at a time, and a document is rejected when no paragraph is left; otherwise they apply to the whole text,
    or to every turn of a conversation. Turns are never removed: a turn that breaks a rule rejects its conversation.
    """

    scope: str = choice("document", "paragraph", default="document")
    """Unit that rules apply to; paragraphs are separated by empty lines."""
    unicode: str = choice("keep", "nfc", "nfkc", default="keep")
    """Unicode normalisation form."""
    romanian_letters: str = choice("keep", "comma", default="keep")
    """`comma` replaces s and t with a cedilla by those with a comma below (Unicode 3.0 has both)."""
    whitespace: str = choice("keep", "collapse", default="keep")
    """`collapse` reduces runs of blanks to one blank and runs of empty lines to one, and trims both ends."""
    min_chars: int | None = number(default=None, at_least=1)
    """Minimum length in characters."""
    max_chars: int | None = number(default=None, at_least=1)
    """Maximum length in characters."""
    min_words: int | None = number(default=None, at_least=1)
    """Minimum length in words (runs of non-blanks)."""
    punctuation: str | None = None
    """Characters of which at least one must occur; null requires none."""
    language: str | None = None
    """ISO 639-1 code of the language that is kept; null keeps all. Detected over the whole conversation."""
    language_min_probability: float = number(default=0.9, above=0, at_most=1)
    """Minimum detected probability of `language`."""
    max_paragraphs: int | None = number(default=None, at_least=1)
    """Paragraphs of a document that are kept, from its start; needs `scope: paragraph`."""


@dataclass
class DuplicatesConfig:
    """Removal of duplicate documents within a source; the first occurrence is kept."""

    exact: str = choice("drop", "folded", "keep", default="drop")
    """`drop`: remove documents whose text (and roles) after `clean` is identical. `folded`: compare case-folded text
    with runs of blanks reduced to one. `keep`: remove none."""
    near: float | None = number(default=None, above=0, at_most=1)
    """Jaccard similarity of word 5-grams from which a document counts as a near copy, estimated by MinHash (Broder
    1997); null does not search for near copies."""
    near_copies: str = choice("drop", "keep", default="drop")
    """Handling of near copies. `drop` removes them. `keep` keeps them in the split of the document that they copy,
    together with all other documents of the two groups defined by `split_by`."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that identify prepared data.

        A key added in a later version is left out at its default, so that older prepared data stays valid.
        """
        return {name: value for name, value in asdict(self).items() if (name, value) != ("near_copies", "drop")}


FIRST_TURN, DOCUMENT = "first_turn", "document"
"""Values of `split_by` that are not fields of the rows."""
OWN_KEYS = {"evaluation": ("eval_path", "eval_split"), "test": ("test_path", "test_split")}
"""Keys of a source that name the data of a whole split: files, or a split on the Hub."""


@dataclass
class DataSourceConfig:
    """One named source of documents."""

    _target_: str = "tpu_experiments.data.reading.sources.read_documents"
    """Swap point: callable that takes a `SourceSpec` and yields `Document`s."""
    path: str = place("input")
    """File, folder or glob, local or gs://, or a Hub id. Files are .jsonl, .ndjson, .json, .parquet, .csv, .tsv or
    .txt, each also compressed as .gz, .bz2, .xz or .zst; a file without a suffix is recognised as JSON or parquet by
    its first bytes."""
    hub_config: str | None = None
    """Configuration name on the Hub, for example `20231101.ro`."""
    hub_split: str = "train"
    """Split on the Hub."""
    eval_path: str | None = place("input", default=None)
    """Files of the evaluation split, given like `path` and in the same format. All of `path` is then trained on, there
    is no test split without `test_path` or `test_split`, and `eval_fraction` and `test_fraction` have no effect."""
    test_path: str | None = place("input", default=None)
    """Files of the test split. Without `eval_path` or `eval_split`, `eval_fraction` of `path` is still held out for
    evaluation."""
    eval_split: str | None = None
    """Split on the Hub used for evaluation, instead of `eval_path`."""
    test_split: str | None = None
    """Split on the Hub used as the test split, instead of `test_path`."""
    named_splits: str = choice("take", "ignore", default="take")
    """For a `path` with several files: `take` uses files (or files in folders) named train, validation (or valid, val,
    dev, eval) and test as those splits; `ignore` treats all files alike."""
    held_out_copies: str = choice("find", "drop", default="find")
    """Handling of documents of `path` that also occur in evaluation or test data given by the keys above. `find`: they
    are trained on, and the audit reports an error. `drop`: they (with `duplicates.near`, near copies too) are removed
    from the training split and reported."""
    revision: str | None = None
    """Hub revision; null is the newest."""
    sample_path: str | None = place("input", default=None)
    """Shipped sample in the same schema, read when `data_size: sample`."""
    kind: str = choice("text", "chat")
    """`text`: the loss covers every token. `chat`: the loss covers assistant turns only."""
    format: str = choice(*FORMATS, default="auto")
    """How a row becomes a document; `auto` recognises it from the first row. `text`: field `text`. `messages`: list of
    role and content, or of from and value. `alternating`: field `data`, a list of strings, user first.
    `question_answer`: question, answer, reasoning, topic, difficulty, case_citation as the prompt and response of the
    UK-law recipe. `instruction`: instruction, input, output. `prompt_completion`: prompt and completion, each a string
    or a list of turns. `llama2`: field `text` with [INST] marks. `human_assistant`: field `text` with ### Human and
    ### Assistant marks."""
    fields: dict[str, str] = field(default_factory=dict)
    """Names of the format's fields in the file, where they differ: `{text: body}`."""
    quoting: str = choice("auto", "minimal", "none", default="auto")
    """Quotation marks in .csv and .tsv. `minimal`: they may enclose a field, which may then contain separators and line
    ends. `none`: they are plain characters, and each line is a record. `auto`: for each file, the one with which more
    of its first lines have as many fields as the file has columns."""
    keep: dict[str, list[Any]] = field(default_factory=dict)
    """Row filter: fields, by their names in the file, to allowed values, as in `{sample_type: [irac, statute]}`. Only
    rows that have an allowed value in every such field are read; the others are counted and reported."""
    on_bad_row: str = choice("stop", "skip", default="stop")
    """Handling of a row that cannot be read or does not have the format: `stop` the run, or `skip` and report the
    row."""
    max_documents: int | None = number(default=None, at_least=1)
    """Largest number of rows read, in file order; null reads all. Separate evaluation and test files are always read
    whole."""
    eval_fraction: float = number(default=0.1, at_least=0, below=1)
    """Share of documents held out for evaluation during training, chosen by a hash of the value of `split_by`."""
    test_fraction: float = number(default=0.1, at_least=0, below=1)
    """Share of documents held out for task=evaluate, never seen in training; chosen in the same way."""
    split_by: str = FIRST_TURN
    """Property whose equal values keep documents in the same split. `first_turn`: the first user turn of a
    conversation, so that no held-out question is trained on with another answer; each text is independent. `document`:
    every document is independent. Otherwise a field of the rows, such as `message_tree_id`."""
    prompt: str | None = None
    """Sample prompt for models trained on this source, unless `sample.prompt` is set; null asks in English."""
    epochs: float = number(default=3.0, above=0)
    """Passes over the rows in a stage without a length of its own: one to three for fine-tuning, fewer for larger
    data."""
    weight: float | None = number(default=None, above=0)
    """Share of the tokens, without padding, that a stage of several sources draws from this one, relative to the
    others' weights; either all sources of a stage have a weight or none. An epoch then has as many rows as all sources
    together: small sources are repeated, and large ones are used in part. null draws every row once."""
    p95_tokens: int | None = number(default=None, at_least=1)
    """95th percentile of the document lengths in tokens, if known; `trainer.seq_len=auto` uses it until the data is
    prepared. null assumes rows of `model.row_tokens`."""
    total_tokens: int | None = number(default=None, at_least=1)
    """Tokens of all documents, if known; the step size is derived from it until the data is prepared. null assumes
    enough data for steps of `model.step_tokens`."""
    clean: CleanConfig = field(default_factory=CleanConfig)
    duplicates: DuplicatesConfig = field(default_factory=DuplicatesConfig)
    questions: dict[str, str] = field(default_factory=dict, metadata={"place": "file"})
    """Question sets by name: .jsonl files of held-out conversations in the format `messages`, whose last turn is the
    expected answer. They are asked before training, at every evaluation and after training, with greedy decoding in
    rows of `sample.window` tokens; an answer is right if its first sentence is the expected one. The files are not
    trained on."""


def hashed_shares(source: DataSourceConfig, *, own: Collection[str]) -> tuple[float, float]:
    """Return the shares of `path` that hashing assigns to evaluation and test.

    `own` are the splits that have data of their own.
    """
    evaluation = 0.0 if "evaluation" in own else source.eval_fraction
    return evaluation, 0.0 if own else source.test_fraction


def own_splits(source: DataSourceConfig) -> frozenset[str]:
    """Return the splits whose data a key of the source names; `named_splits` may add others."""
    return frozenset(split for split, keys in OWN_KEYS.items() if any(getattr(source, key) for key in keys))


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
    init: str = choice("b_zero", "a_zero", "pissa", default="b_zero")
    """`b_zero`: A Kaiming-uniform, B zero. `a_zero`: A zero, B normal. `pissa`: principal singular directions
    of W, which is reduced by them (arXiv 2404.02948)."""
    scaling: str = choice("alpha_over_r", "alpha_over_sqrt_r", default="alpha_over_r")
    """Scale of the adapter; `alpha_over_sqrt_r` is rsLoRA (arXiv 2312.03732)."""


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
