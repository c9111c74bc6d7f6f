"""Schema of the data: its sources, how their documents are cleaned, prepared and loaded."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.places import place

FORMATS_OF_KIND = {
    "text": ("auto", "text"),
    "chat": (
        "auto",
        "messages",
        "alternating",
        "question_answer",
        "instruction",
        "prompt_completion",
        "llama2",
        "human_assistant",
    ),
    "preference": ("auto", "explicit_prompt", "implicit_prompt", "unpaired"),
}
"""Values of `format` that each `kind` allows (data/reading/formats.py reads them)."""
FORMATS = tuple(dict.fromkeys(name for formats in FORMATS_OF_KIND.values() for name in formats))
ASKED = {"asked_as": ("{instruction}", "{input}"), "asked_alone_as": ("{instruction}",)}
"""Keys of a source that say how an instruction is asked, with the places that they must have."""
FIRST_TURN, DOCUMENT = "first_turn", "document"
"""Values of `split_by` that are not fields of the rows."""
OWN_KEYS = {"evaluation": ("eval_path", "eval_split"), "test": ("test_path", "test_split")}
"""Keys of a source that name the data of a whole split: files, or a split on the Hub."""
QUESTION_ROWS = 32
"""Questions (`DataSourceConfig.questions`) answered in one batch; every device generates the answers to all of them."""

# ---- sources ------------------------------------------------------------------------------------------------


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
    kind: str = choice("text", "chat", "preference")
    """`text`: the loss covers every token. `chat`: the loss covers assistant turns only. `preference`: pairs of
    a chosen and a rejected answer, of which the loss covers the last assistant turn; only an objective that compares
    answers reads them."""
    format: str = choice(*FORMATS, default="auto")
    """How a row becomes a document; `auto` recognises it from the first row. `text`: field `text`. `messages`: list of
    role and content, or of from and value. `alternating`: field `data`, a list of strings, user first.
    `question_answer`: question and answer as they are written, or, where a row has two of the columns reasoning, topic,
    difficulty and case_citation, as the prompt and response of the UK-law recipe. `instruction`: instruction, input,
    output. `prompt_completion`: prompt and completion, each a string or a list of turns. `llama2`: field `text` with
    [INST] marks. `human_assistant`: field `text` with ### Human and ### Assistant marks. `explicit_prompt`: a prompt
    and the answers chosen and rejected. `implicit_prompt`: chosen and rejected, two conversations that begin alike.
    `unpaired`: a prompt, one answer and a label, true where it is good (objective=kto)."""
    fields: dict[str, str] = field(default_factory=dict)
    """Names of the format's fields in the file, where they differ: `{text: body}`. Beside those of its format a
    conversation may have `system`, `history`, `tools` and `reasoning`. An empty name leaves a field of the file unread:
    `{images: ''}`."""
    asked_as: str | None = None
    """How an instruction with an input is asked (`format: instruction`): a text in which `{instruction}` and `{input}`
    stand for the two, as in Alpaca's prompt. null is the instruction, an empty line and the input."""
    asked_alone_as: str | None = None
    """How an instruction without an input is asked: a text with `{instruction}`. null is the instruction."""
    label_field: str | None = None
    """Field of the rows, by its name in the file, that holds the label of a text: a string, an integer, true or false.
    Only `objective=classify` reads it."""
    teacher: str | None = place("folder", default=None)
    """Folder of a teacher's stored predictions of the source's tokens, which `objective=distillation` learns from;
    task=prepare with `task.teacher` writes it."""
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
    rewritten_answers: str = choice("split", "context", default="split")
    """Handling of answers that the chat template renders otherwise once turns follow, as Qwen3's own drops the
    reasoning of earlier turns. `split`: each is learnt as it is generated, in a document that ends with it. `context`:
    they are read and not learnt. With a template that keeps every turn (`model.chat_format`) there are none."""
    max_documents: int | None = number(default=None, at_least=1)
    """Largest number of rows read, in file order; null reads all. Separate evaluation and test files are always read
    whole."""
    eval_fraction: float = number(default=0.1, at_least=0, below=1)
    """Share of documents held out for evaluation during training, chosen by a hash of the value of `split_by`."""
    test_fraction: float = number(default=0.1, at_least=0, below=1)
    """Share of documents held out for task=evaluate, never seen in training; chosen in the same way."""
    split_by: str = FIRST_TURN
    """Property whose equal values keep documents in the same split. `first_turn`: the first user turn of a
    conversation, so that no held-out question is trained on with another answer, or the whole prompt of a pair; each
    text is independent. `document`:
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
    prepared, and then takes rows that hold 95 % of texts and 99 % of conversations. null assumes rows of
    `model.row_tokens`."""
    total_tokens: int | None = number(default=None, at_least=1)
    """Tokens of all documents, if known; the step size is derived from it until the data is prepared. null assumes
    enough data for steps of `model.step_tokens`."""
    total_documents: int | None = number(default=None, at_least=1)
    """Documents of `path`, if known; a plan derives the length of a pass over prompts from it until the data is
    prepared."""
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


# ---- preparation and loading --------------------------------------------------------------------------------


@dataclass
class PrepareConfig:
    """Preparation of documents as shuffled rows of one length; done once, on a CPU machine."""

    folder: str | None = place("folder", default=None)
    """Folder of prepared data, local or gs://; null is `<output_dir>/prepared`. Its subfolders are named by a hash of
    all inputs and settings, so several runs and machines can share it."""
    engine: str = choice("local", "ray", default="local")
    """`local`: processes on this machine. `ray`: each file of a source is a task of a Ray cluster (RAY_ADDRESS)."""
    workers: int | None = number(default=None, at_least=1)
    """Worker processes; null starts one per usable core, and none for less than a few MB."""
    packing: str = choice("best_fit", "pad", "none", default="best_fit")
    """`best_fit`: several documents share a row (arXiv 2404.10830). `pad`: one document per row, padded to the row
    length. `none`: one document per row, and each batch is padded to a multiple of `loader.pad_multiple`; eager runtime
    only, since XLA would compile a program for every length."""
    long_documents: str = choice("split", "truncate", "drop", default="split")
    """Handling of documents longer than a row. `split`: into several rows (conversations between turns if possible);
    not with `packing` pad or none. `truncate`: cut off (conversations after their last whole answer). `drop`:
    removed."""
    window_tokens: int = number(default=4 * 2**20, at_least=1)
    """Tokens that are packed together and written as one shard; a worker needs about 60 bytes of memory for each."""
    documents: str = choice("keep", "discard", default="discard")
    """`keep` also writes the cleaned documents as parquet (id, source, text or messages)."""
    on_finding: str = choice("stop", "warn", default="stop")
    """Reaction of task=train to an error in the audit, such as held-out documents that another source trains on: `stop`
    before the first step, or `warn` and continue."""
    written_epochs: int = number(default=0, at_least=0)
    """Epochs whose rows are also written in shuffled order, for sequential reads from a disk or bucket
    (`loader.order=written`)."""
    shuffle_passes: int = number(default=2, at_least=1)
    """Shuffle passes over a written epoch: two produce a uniform permutation (data/store/shuffle.py), one a rough
    one."""
    shuffle_block_rows: int = number(default=8192, at_least=1)
    """Rows held in memory and shuffled together in one pass."""


@dataclass
class LoaderConfig:
    """Loading of rows from disk into batches on the device."""

    order: str = choice("permutation", "written", default="permutation")
    """`permutation`: rows are read in a random order determined by (seed, stage, epoch). `written`: the shuffled epochs
    written by `prepare.written_epochs` are read sequentially."""
    loader_prefetch_size: int = number(default=16, at_least=1)
    """Batches assembled ahead on the host."""
    device_prefetch_size: int = number(default=8, at_least=1)
    """Batches sent to the device ahead, and as many more that each transfer thread holds; xla runtime only."""
    host_to_device_transfer_threads: int = number(default=1, at_least=1)
    """Threads that send batches, each with its own queues of the two sizes above; xla runtime only."""
    read_ahead_mib: int = number(default=64, at_least=1)
    """MiB fetched ahead from a remote folder."""
    cache_gib: float = number(default=20.0, above=0)
    """Largest local copy of a remote folder, in GiB; the oldest part is evicted first."""
    pad_multiple: int = number(default=64, at_least=1)
    """Batches of `prepare.packing=none` are padded to a multiple of this many tokens."""
