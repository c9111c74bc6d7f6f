"""Schema of the groups `model`, `data`, `lora` and `sharding`: what is trained, and on what."""

import fnmatch
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from omegaconf import MISSING

from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.places import place

ALL_LINEAR = "all-linear"
"""Every Linear of every layer; PEFT has the same word."""


def is_target(name: str, target: str) -> bool:
    """Say whether `target` names the Linear `name`: by the last part of its name, by a glob, or as one of a layer."""
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
"""Values of a layer that the forward pass can be told to save."""
SAVED: dict[str, tuple[str, ...]] = {
    "offload": (),
    "layer_inputs": (),
    "save_attention": ("attention",),
    "save_dots": SAVABLE,
}
"""Those that each `model.remat` saves beside the layer's input. `attention`: what goes into o_proj, and what a kernel
saves for its own backward pass."""
QUESTION_ROWS = 32
"""Questions (`DataSourceConfig.questions`) asked at once; every device writes the answers to all of them."""
AXES = ("data", "fsdp", "tensor")
"""The mesh axes of `sharding.rules`, that of the most distant devices first."""
ROWS = ("data", "fsdp")
"""Those that the rows of a batch are split over."""


@dataclass
class ModelConfig:
    """A transformers decoder: the source of its weights and how it computes."""

    _target_: str = "tpu_experiments.models.huggingface.HuggingFaceModel"
    """Swap point: class that gives the empty module and its weights one by one (models/huggingface.py)."""
    name: str = MISSING
    """Name of the model; the file name in conf/model."""
    path: str = place("model")
    """Hub id, or a local Hugging Face checkpoint folder (single or sharded safetensors)."""
    revision: str | None = None
    """Hub revision (commit or tag); null is the newest."""
    tokenizer_path: str | None = place("model", default=None)
    """Folder or Hub id of the tokenizer; null is `path`."""
    remote_code: str = choice("refuse", "ignore", "run", default="refuse")
    """What happens with a checkpoint or tokenizer that brings Python code of its own (`auto_map`): it is refused; or
    its code is ignored and transformers' own class of its type is taken; or its code is run, with your rights, which
    transformers calls trust_remote_code."""
    chat_template_path: str | None = place("local", default=None)
    """Jinja file used instead of the tokenizer's own chat template."""
    chat_format: str = choice("tokenizer", "chatml", "instruction_response", "llama2", "plain", default="tokenizer")
    """`tokenizer`: its own chat template, or `chat_template_path`. The others are templates shipped here, for base
    models that have none."""
    init: str = choice("pretrained", "random", default="pretrained")
    """`pretrained`: weights of `path`. `random`: drawn from `seed` with transformers' own initialisation."""
    size: str = choice("full", "tiny", default="full")
    """`tiny`: `arch` with `tiny_arch` laid over it and random weights; same architecture, seconds on a CPU."""
    dtype: str = choice("bfloat16", "float32", default="bfloat16")
    """Data type of the frozen base and of the arithmetic; adapters and optimizer state are always float32."""
    attention: str = choice("sdpa", "eager", "flash", default="sdpa")
    """`sdpa`, `eager`: transformers' own, with a ready 4-D mask, so nothing is read on the host. `flash`: the TPU's
    kernel, which keeps no matrix of scores; on other devices the same as `sdpa`."""
    stack: str = choice("scanned", "unrolled", default="scanned")
    """`scanned`: on torch_xla, equal layers are folded into one that a loop runs, so that one layer is compiled.
    `unrolled`: every layer is compiled, and everything is saved for the backward pass, as in plain torch."""
    stack_group: int = number(default=1, at_least=1)
    """Periods of equal layers in one iteration of that loop (a period is one layer, of Gemma 3 six). More are a longer
    program; at most half of them are taken, and layers left over are compiled on their own."""
    remat: str = choice("none", "offload", "layer_inputs", "save_attention", "save_dots", default="layer_inputs")
    """What scanned layers save for the backward pass, which computes the rest again: `none` everything, `layer_inputs`
    the input of each layer, `offload` the same in the memory of the TPU's host, `save_attention` also what goes into
    o_proj, `save_dots` also every projection's result."""
    saved: list[str] = field(default_factory=list)
    """Saved beside that, by name: `attention` or projections (`q_proj`, `up_proj`, ...)."""
    lr: float = number(default=2e-4, above=0)
    """Peak learning rate that suits adapters on this model; a run that trains all of its pretrained weights takes a
    tenth. `optim.lr` and a stage's `lr` win over it."""
    row_tokens: int = number(default=2048, at_least=8, at_most=2**24)
    """Longest row that `trainer.seq_len=auto` makes for this model."""
    step_tokens: int = number(default=65536, at_least=8, at_most=2**40)
    """Tokens of an optimizer step that suit adapters on this model; `trainer.global_batch_rows` wins over it."""
    arch: dict[str, Any] = field(default_factory=dict)
    """Hugging Face config values; used for `init: random` and to plan without the checkpoint."""
    tiny_arch: dict[str, Any] = field(default_factory=dict)
    """Values laid over `arch` for `size: tiny`."""


@dataclass
class CleanConfig:
    """Rules for the text of a document, in the order of the keys; each is off by default and counted in the audit.

    With `scope: paragraph` (texts only) the rules see one paragraph at a time, and a document is refused when none is
    left; otherwise they see the whole text, or every turn of a conversation. A turn is never removed: a rule that a
    turn breaks refuses its conversation.
    """

    scope: str = choice("document", "paragraph", default="document")
    """What a rule looks at; a paragraph is what an empty line ends."""
    unicode: str = choice("keep", "nfc", "nfkc", default="keep")
    """Unicode normalisation form."""
    romanian_letters: str = choice("keep", "comma", default="keep")
    """`comma` writes s and t with a comma below where they have a cedilla (Unicode 3.0 has both)."""
    whitespace: str = choice("keep", "collapse", default="keep")
    """`collapse` makes runs of blanks one blank and runs of empty lines one, and trims the ends."""
    min_chars: int | None = number(default=None, at_least=1)
    """Fewest characters kept."""
    max_chars: int | None = number(default=None, at_least=1)
    """Most characters kept."""
    min_words: int | None = number(default=None, at_least=1)
    """Fewest words (runs of non-blanks) kept."""
    punctuation: str | None = None
    """At least one of these characters must occur; null asks for none."""
    language: str | None = None
    """ISO 639-1 code that the text must be in; null takes every language. Checked over the whole conversation."""
    language_min_probability: float = number(default=0.9, above=0, at_most=1)
    """Smallest probability of `language`."""
    max_paragraphs: int | None = number(default=None, at_least=1)
    """Paragraphs kept of a document, from its start; needs `scope: paragraph`."""


@dataclass
class DuplicatesConfig:
    """Handling of documents that occurred before anywhere in their source; the first one is kept."""

    exact: str = choice("drop", "folded", "keep", default="drop")
    """`drop`: the same text (and roles), letter for letter, once `clean` has done its work. `folded`: the same words,
    letters case-folded and runs of blanks made one. `keep`: none is left out."""
    near: float | None = number(default=None, above=0, at_most=1)
    """Jaccard similarity of word 5-grams from which a document counts as a copy, estimated by MinHash (Broder 1997);
    null does not look."""
    near_copies: str = choice("drop", "keep", default="drop")
    """What happens to such a copy. `keep`: it stays, in the split of the document that it is a copy of, and so do all
    others of the two groups that `split_by` makes."""

    def settings(self) -> dict[str, Any]:
        """The rules as what is prepared by them is known by: a key that came later is left out at its default."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("near_copies", "drop")}


FIRST_TURN, DOCUMENT = "first_turn", "document"
"""Values of `split_by` that are no field of the rows."""
OWN_KEYS = {"evaluation": ("eval_path", "eval_split"), "test": ("test_path", "test_split")}
"""Keys of a source that name a whole split: files, or a split of the Hub."""


@dataclass
class DataSourceConfig:
    """One named source of documents."""

    _target_: str = "tpu_experiments.data.reading.sources.read_documents"
    """Swap point: callable that takes a `SourceSpec` and yields `Document`s."""
    path: str = place("input")
    """File, folder, glob, gs:// address of one of these, or a Hub id. Files are .jsonl, .ndjson, .json, .parquet, .csv,
    .tsv or .txt, each also as .gz, .bz2, .xz or .zst; one without a suffix is JSON or parquet if it begins so."""
    hub_config: str | None = None
    """Configuration name on the Hub, for example `20231101.ro`."""
    hub_split: str = "train"
    """Split on the Hub."""
    eval_path: str | None = place("input", default=None)
    """Files of the evaluation split, as `path` names them, in the same format. Then all of `path` is trained on, and
    without test files of your own there is no test split; `eval_fraction` and `test_fraction` do nothing."""
    test_path: str | None = place("input", default=None)
    """Files of the test split. Without evaluation files of your own, `eval_fraction` of `path` is the evaluation."""
    eval_split: str | None = None
    """Split on the Hub that is the evaluation split, in place of `eval_path`."""
    test_split: str | None = None
    """Split on the Hub that is the test split, in place of `test_path`."""
    named_splits: str = choice("take", "ignore", default="take")
    """Of a `path` with several files: `take` takes those that are named train, validation (or valid, val, dev, eval)
    and test, or lie in folders of these names, as those splits; `ignore` takes all alike."""
    held_out_copies: str = choice("find", "drop", default="find")
    """Documents of `path` that evaluation or test files of your own have too. `find`: they are trained on, and the
    audit has an error. `drop`: they are left out of train (with `duplicates.near`, near copies too) and reported."""
    revision: str | None = None
    """Hub revision; null is the newest."""
    sample_path: str | None = place("input", default=None)
    """Shipped sample in the same schema, read when `data_size: sample`."""
    kind: str = choice("text", "chat")
    """`text`: every token is learnt. `chat`: only assistant turns are."""
    format: str = choice(*FORMATS, default="auto")
    """How a row becomes a document; `auto` recognises it from the first row. `text`: field `text`. `messages`: list of
    role and content, or of from and value. `alternating`: field `data`, a list of strings, user first.
    `question_answer`: question, answer, reasoning, topic, difficulty, case_citation as the prompt and response of the
    UK-law recipe. `instruction`: instruction, input, output. `prompt_completion`: prompt and completion, each a string
    or a list of turns. `llama2`: field `text` with [INST] marks. `human_assistant`: field `text` with ### Human and
    ### Assistant marks."""
    fields: dict[str, str] = field(default_factory=dict)
    """Where the file calls a field of the format something else: `{text: body}`."""
    quoting: str = choice("auto", "minimal", "none", default="auto")
    """Quotation marks in .csv and .tsv. `minimal`: they may surround a field, which may then hold separators and line
    ends. `none`: plain characters, a line is a record. `auto`: of the two, each file's own, the one with which more of
    its first lines have as many fields as the file has columns."""
    keep: dict[str, list[Any]] = field(default_factory=dict)
    """Fields of the rows, by the names that the file has, to their values: only rows with one of these values in every
    such field are read; the others are counted and reported. `{sample_type: [irac, statute]}`."""
    on_bad_row: str = choice("stop", "skip", default="stop")
    """What happens at a row that cannot be read or is not of the format: the run stops, or the row is reported."""
    max_documents: int | None = number(default=None, at_least=1)
    """Read at most this many rows, in file order; null reads all. Evaluation and test files of your own are read
    whole."""
    eval_fraction: float = number(default=0.1, at_least=0, below=1)
    """Share of documents held out for evaluation during training, chosen by a hash of what `split_by` says."""
    test_fraction: float = number(default=0.1, at_least=0, below=1)
    """Share of documents set aside for task=evaluate, never seen in training."""
    split_by: str = FIRST_TURN
    """What documents have in common that stay in one split. `first_turn`: the first user turn of a conversation, so
    that no held-out question is trained on with another answer; a text is by itself. `document`: nothing. Else a field
    of the rows, such as `message_tree_id`."""
    prompt: str | None = None
    """What a model is asked that is trained on this, where `sample.prompt` says nothing else; null asks in English."""
    epochs: float = number(default=3.0, above=0)
    """Passes over the rows in a stage that says nothing of its length: one to three for fine-tuning, fewer the more
    there is."""
    weight: float | None = number(default=None, above=0)
    """Share of the tokens, without padding, that a stage of several sources draws from this one, relative to the
    weights of the others; all of a stage's sources have one, or none. An epoch then has as many rows as the sources
    have together, in which a source with few rows comes up several times and one with many in part. null draws every
    row once."""
    p95_tokens: int | None = number(default=None, at_least=1)
    """Tokens that 95 % of the documents do not exceed, where known; `trainer.seq_len=auto` counts with them until the
    data is prepared. null counts with rows of `model.row_tokens`."""
    total_tokens: int | None = number(default=None, at_least=1)
    """Tokens of all documents, where known; the size of a step goes by them until the data is prepared. null counts
    with more than enough for steps of `model.step_tokens`."""
    clean: CleanConfig = field(default_factory=CleanConfig)
    duplicates: DuplicatesConfig = field(default_factory=DuplicatesConfig)
    questions: dict[str, str] = field(default_factory=dict, metadata={"place": "file"})
    """Name of a set to a .jsonl file of held-out conversations in the format `messages`, whose last turn is the answer
    that is expected. They are asked before training, at every evaluation and after it, always for the likeliest tokens
    and in rows of `sample.window` tokens; the first sentence counts. The file is not trained on."""


def hashed_shares(source: DataSourceConfig, *, own: Collection[str]) -> tuple[float, float]:
    """Shares of `path` that a hash puts into evaluation and test, where the splits of `own` have files of their own."""
    evaluation = 0.0 if "evaluation" in own else source.eval_fraction
    return evaluation, 0.0 if own else source.test_fraction


def own_splits(source: DataSourceConfig) -> frozenset[str]:
    """The splits for which a key names files or a split of the Hub; names of files may add others."""
    return frozenset(split for split, keys in OWN_KEYS.items() if any(getattr(source, key) for key in keys))


@dataclass
class LoraConfig:
    """Low-rank adapters, W x + scale * B A x (arXiv 2106.09685)."""

    r: int = number(at_least=0)
    """Rank; 0 trains every weight instead."""
    alpha: float = number(default=16.0, above=0)
    """Numerator of the scale."""
    dropout: float = number(default=0.0, at_least=0, below=1)
    """Probability of dropping an input of A during training."""
    targets: list[str] = field(default_factory=list)
    """Linear modules that get an adapter, by the last part of their name or by a glob over the full name; `all-linear`
    is every one of every layer."""
    init: str = choice("b_zero", "a_zero", "pissa", default="b_zero")
    """`b_zero`: A Kaiming-uniform, B zero. `a_zero`: A zero, B normal. `pissa`: principal singular directions
    of W, which is reduced by them (arXiv 2404.02948)."""
    scaling: str = choice("alpha_over_r", "alpha_over_sqrt_r", default="alpha_over_r")
    """Scale of the adapter; `alpha_over_sqrt_r` is rsLoRA (arXiv 2312.03732)."""


@dataclass
class MeshConfig:
    """Devices along each axis; the sizes come to hw.num_devices, and one of them may be -1: what the others leave."""

    data: int = number(default=1, at_least=-1)
    """Groups that each hold everything: rows are split over them, and gradients summed."""
    fsdp: int = number(default=-1, at_least=-1)
    """Devices that share weights: rows are split over them, and a layer's weights are fetched when it is computed."""
    tensor: int = number(default=1, at_least=-1)
    """Devices that share a layer's arithmetic: they work on the same rows, each with its heads and features."""


@dataclass
class ShardingConfig:
    """Mapping of parameter dimensions to mesh axes in `hw.parallel: spmd`."""

    name: str = MISSING
    """Name of the table; the file name in conf/sharding."""
    rules: dict[str, list[Any]] = field(default_factory=dict)
    """Glob over parameter names to one entry per dimension: an axis of the mesh, a list of axes, or null. First match
    wins; a glob that matches nothing stops the run, but for adapters of projections that have none."""
    max_replicated_elements: int = number(default=16777216, at_least=0)
    """A parameter larger than this that no rule splits stops the run (16 Mi elements are 32 MiB in bf16);
    0 switches the check off."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
