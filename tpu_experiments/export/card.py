"""The page beside an export: README.md with the Hub's metadata, lines that load it, and how it compares.

A card is made of plain values alone. The Hub's metadata: huggingface.co/docs/hub/model-cards.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from tpu_experiments.config.escaping import as_code, fenced, for_markdown
from tpu_experiments.config.redaction import redacted_text
from tpu_experiments.data.reading.locations import DATA_SUFFIXES, suffixes_of
from tpu_experiments.storage import paths

CARD = "README.md"
MARKER = "export.json"
"""File that is written last beside a form: the form is then complete."""
NF4_CONFIG = (
    'nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant={double}, '
    'bnb_4bit_compute_dtype="{dtype}")'
)
"""The base as it was while the adapter was trained; over weights that are not quantised the adapter works as well."""
LIBRARY = {"peft": "peft", "gguf": "gguf"}
"""Library that reads a form, by the Hub's names; transformers for the others."""
RELATION = {"peft": "adapter", "merged": "finetune"}
"""`base_model_relation` of a form; `quantized` for the others. (The Hub's `merge` is of several models.)"""
TAGS = {"peft": "lora"}
"""Tag of a form; its own name for the others."""
WHAT = {
    "merged": "with its weights in {dtype}",
    "int8": "with its layers' weights in int8, one scale per output feature (W8A16), in compressed-tensors' layout",
    "nf4": "with its layers' weights in NF4 with double quantisation, in bitsandbytes' layout",
    "bitnet": "with the ternary weights of its layers in 2 bits, in the layout of transformers' BitLinear",
    "lr_qat": "with its layers' weights as integers that were trained as such (LR-QAT), in compressed-tensors' layout",
    "gguf": "as GGUF files for llama.cpp and what is built on it",
    "rtn": "with its layers' weights as integers of a few bits, in compressed-tensors' layout",
    "gptq": "with its layers' weights as integers of a few bits, by GPTQ, in compressed-tensors' layout",
    "vptq": "with its layers' weights as vectors of codebooks, in a layout of tpu_experiments",
}
CAUSAL = "AutoModelForCausalLM"
"""transformers' class of models that write text."""
QUANTISED = {
    "int8": "compressed-tensors",
    "nf4": "bitsandbytes",
    "rtn": "compressed-tensors",
    "gptq": "compressed-tensors",
    "vptq": "tpu_experiments",
    "bitnet": "accelerate",
    "lr_qat": "compressed-tensors",
}
"""Package that a quantised form needs."""


@dataclass(frozen=True)
class Card:
    """What the page of a form says, besides the comparison."""

    form: str
    name: str
    """Name of the run, or of the command that exported an adapter."""
    base: str
    """The base model as an adapter names it: a folder, or a Hub id."""
    is_on_hub: bool = False
    """Whether `base` is a Hub id of the model that was trained, rather than of one that it is a tiny stand-in for."""
    revision: str | None = None
    held: str = "dense"
    """How the base's weights were held in training: `dense`, `int8` or `nf4`."""
    double_quant: bool = True
    dtype: str = "bfloat16"
    """Data type of the weights that are not quantised."""
    runs_code: bool = False
    """Whether the model brings Python code of its own, which loading runs."""
    rank: int = 0
    """Rank of the adapter in the files; 0 where the model has none."""
    is_dora: bool = False
    vocab_size: int | None = None
    """Rows of the embedding, where the base has fewer."""
    unfit: str = ""
    """Why vLLM does not compute with the adapter as PEFT does; empty where it does."""
    datasets: list[str] = field(default_factory=list)
    """Hub ids of the data."""
    languages: list[str] = field(default_factory=list)
    """ISO 639-1 codes."""
    licence: str | None = None
    notes: list[str] = field(default_factory=list)
    """Whole sentences on what is particular of these files."""
    auto: str = CAUSAL
    """transformers' class that loads the model."""
    pipeline: str = "text-generation"
    """The Hub's name of what the model does."""
    labels: dict[str, str] = field(default_factory=dict)
    """Names of the outputs of a model that scores texts, by number."""
    use: list[str] = field(default_factory=list)
    """Lines of code below those that load the model."""
    meaning: str = ""
    """Paragraph behind them."""


def page(card: Card, *, place: str, comparison: str, files: Sequence[str] = (), subfolder: str | None = None) -> str:
    """Return README.md.

    Args:
        place: folder of the files, or the repository on the Hub, as the lines of code name it.
        comparison: Markdown, with headings of the first level.
        files: names of the files, of which those in GGUF are named.
        subfolder: folder of the files in a repository that holds several forms.
    """
    parts = [
        f"---\n{_metadata(card)}\n---\n\n# {for_markdown(card.name)}: {card.form}",
        _introduction(card),
        *card.notes,
        "## Use",
        *([f"Copy {as_code(place)} to a local folder first, and name that."] if paths.is_remote(place) else []),
        _usage(card, place=place, files=files, subfolder=subfolder),
        comparison.replace("# ", "## ", 1).rstrip(),
    ]
    return redacted_text("\n\n".join(parts) + "\n")


def index_page(cards: Sequence[Card], *, comparisons: Sequence[str]) -> str:
    """Return README.md of a repository that holds several forms, each in a folder of its name."""
    first = cards[0]
    parts = [f"---\n{_metadata(first, forms=[card.form for card in cards])}\n---\n\n# {for_markdown(first.name)}"]
    for card, comparison in zip(cards, comparisons, strict=True):
        parts += [f"## [{card.form}]({card.form})", _introduction(card), *card.notes]
        parts.append(comparison.replace("# ", "### ", 1).rstrip())
    return redacted_text("\n\n".join(parts) + "\n")


def is_hub_id(path: str) -> bool:
    """Return whether a path is `organisation/name`, rather than a file, a folder or a URL."""
    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return path.count("/") == 1 and suffixes_of(path)[0] not in DATA_SUFFIXES and not paths.exists(path)


def whole_code(place: str, *, dtype: str | None, options: str = "", auto: str = "AutoModelForCausalLM") -> list[str]:
    """Return the lines that load a whole model.

    Args:
        dtype: data type to load it in; None takes that of its files.
        options: further arguments, each with a comma before it.
        auto: transformers' class that loads it.
    """
    chosen = f', dtype="{dtype}"' if dtype else ""
    return [
        f"from transformers import {auto}, AutoTokenizer",
        f"model = {auto}.from_pretrained({_literal(place)}{chosen}{options})",
        f"tokenizer = AutoTokenizer.from_pretrained({_literal(place)}{options})",
    ]


def part_code(place: str, *, dtype: str) -> list[str]:
    """Return the lines that load a model without a head."""
    return [
        "from transformers import AutoModel, AutoTokenizer",
        f'model = AutoModel.from_pretrained({_literal(place)}, dtype="{dtype}")',
        f"tokenizer = AutoTokenizer.from_pretrained({_literal(place)})",
    ]


def adapter_code(
    place: str,
    *,
    base: str,
    dtype: str,
    held: str,
    double_quant: bool,
    of_base: str = "",
    of_adapter: str = "",
    trust: str = "",
    auto: str = "AutoModelForCausalLM",
    vocab_size: int | None = None,
) -> list[str]:
    """Return the lines that load an adapter over its base, of NF4 as it was held in training.

    Args:
        held: how the base was held in training: `dense`, `int8` or `nf4`.
        of_base: further arguments for the base, each with a comma before it; `of_adapter` likewise.
        trust: the argument that has the model's own code run, likewise.
        auto: class of the base.
        vocab_size: rows of its embedding that it was trained with; None: the base's own.
    """
    is_nf4 = held == "nf4"
    return [
        "from peft import PeftModel",
        f"from transformers import {auto}, AutoTokenizer{', BitsAndBytesConfig' if is_nf4 else ''}",
        *([NF4_CONFIG.format(double=double_quant, dtype=dtype)] if is_nf4 else []),
        f'base = {auto}.from_pretrained({_literal(base)}, dtype="{dtype}"'
        f"{', quantization_config=nf4' if is_nf4 else ''}{of_base}{trust})",
        *([] if vocab_size is None else [f"base.resize_token_embeddings({vocab_size})"]),
        f"model = PeftModel.from_pretrained(base, {_literal(place)}{of_adapter})",
        f"tokenizer = AutoTokenizer.from_pretrained({_literal(place)}{of_adapter}{trust})",
    ]


def _literal(text: str) -> str:
    """Return text as a string of Python."""
    return json.dumps(text, ensure_ascii=False)


def _metadata(card: Card, *, forms: Sequence[str] = ()) -> str:
    """Return the front matter; what the run does not know is left out."""
    among = forms or [card.form]
    is_one = len(among) == 1
    data = ModelCardData(
        base_model=card.base if card.is_on_hub else None,
        base_model_relation=RELATION.get(card.form, "quantized") if card.is_on_hub and is_one else None,
        library_name=LIBRARY.get(card.form, "transformers") if is_one else None,
        pipeline_tag=card.pipeline,
        tags=["tpu_experiments", *(TAGS.get(form, form) for form in among)],
        language=card.languages or None,
        license=card.licence,
        datasets=card.datasets or None,
    )
    return str(data.to_yaml())


def _introduction(card: Card) -> str:
    base = as_code(card.base) + (f" at revision {as_code(card.revision)}" if card.revision else "")
    held = {"int8": ", whose layers had their weights in int8", "nf4": ", whose layers had their weights in NF4"}
    trained = f"trained with tpu_experiments over {base}{held.get(card.held, '')}"
    if card.form == "peft":
        kind = "DoRA" if card.is_dora else "LoRA"
        return f"A {kind} adapter of rank {card.rank} in PEFT's layout, {trained}."
    merged = ", the adapter merged into the weights" if card.rank else ""
    kind = "A language model" if card.auto == CAUSAL else "A model that scores texts,"
    return f"{kind} {WHAT[card.form].format(dtype=card.dtype)}, {trained}{merged}."


def _usage(card: Card, *, place: str, files: Sequence[str], subfolder: str | None) -> str:
    within = f', subfolder="{subfolder}"' if subfolder else ""
    trust = ", trust_remote_code=True" if card.runs_code else ""
    local = place if subfolder is None else f"{place.rpartition('/')[2]}/{subfolder}"
    copy = f'--include "{subfolder}/*" --local-dir {shlex.quote(place.rpartition("/")[2])}'
    fetch = [] if subfolder is None else [f"hf download {shlex.quote(place)} {copy}"]
    if card.form == "gguf":
        names = sorted(name for name in files if name.endswith(".gguf")) or ["FILE.gguf"]
        lines = [f"llama-cli -m {shlex.quote(f'{local}/{name}')} -p 'Once upon a time'" for name in names]
        return fenced("\n".join([*fetch, *lines]), language="bash")
    blocks: list[str] = []
    if card.form == "peft":
        revision = f", revision={_literal(card.revision)}" if card.revision else ""
        by_number = {int(number): label for number, label in card.labels.items()}
        code = adapter_code(
            place,
            base=card.base,
            dtype=card.dtype,
            held=card.held,
            double_quant=card.double_quant,
            of_base=(f", id2label={by_number!r}" if by_number else "") + revision,
            auto=card.auto,
            of_adapter=within,
            trust=trust,
            vocab_size=card.vocab_size,
        )
        blocks += [*_code_of(card, code), *_about_base(card)]
        over = (
            f"vllm serve {shlex.quote(card.base)} --enable-lora --max-lora-rank {card.rank} "
            f"--lora-modules {shlex.quote(f'adapter={local}')}"
        )
        if card.auto != CAUSAL:
            pass  # vLLM has adapters of models that write text alone
        elif card.unfit:
            blocks.append(f"{card.unfit}: export the form `merged` for it.")
        else:
            blocks += ["vLLM reads it too (not tried here):", fenced("\n".join([*fetch, over]), language="bash")]
    elif card.form == "vptq":
        code = [
            "from tpu_experiments.export.vector_model import read_vector_model",
            f"model = read_vector_model({_literal(local)})",
        ]
        blocks += [fenced("\n".join(fetch), language="bash")] if fetch else []
        blocks += [fenced("\n".join(code), language="python"), "No other library reads these vectors without CUDA."]
    else:
        package = QUANTISED.get(card.form)
        code = whole_code(place, dtype=None if package else card.dtype, options=within + trust, auto=card.auto)
        blocks += _code_of(card, code)
        if package:
            blocks.append(f"It needs `pip install {package}`.")
        serve = [*fetch, f"vllm serve {shlex.quote(local)}"]
        if card.auto == CAUSAL:
            blocks += ["vLLM reads it too (not tried here):", fenced("\n".join(serve), language="bash")]
    if card.runs_code:
        blocks.append("The model brings Python code, which loading runs with your rights. Read it first.")
    return "\n\n".join(blocks)


def _code_of(card: Card, code: Sequence[str]) -> list[str]:
    """Return the lines that load and use a model, and what its outputs mean."""
    return [fenced("\n".join([*code, *card.use]), language="python"), *([card.meaning] if card.meaning else [])]


def _about_base(card: Card) -> list[str]:
    """Return sentences on the base that an adapter is for."""
    found: list[str] = []
    if "/" in card.base and not card.is_on_hub and not is_hub_id(card.base):
        found.append(
            f"{as_code(card.base)} is a folder of the machine that wrote this: put that of your copy in its place."
        )
    return [*found, *_about_quantised_base(card)]


def _about_quantised_base(card: Card) -> list[str]:
    if card.held == "nf4":
        return [
            "The adapter was trained over this base in NF4, and these lines load it so. Over the base in "
            f"{card.dtype} it works as well, with slightly other results."
        ]
    if card.held == "int8":
        return [
            "The adapter was trained over this base with the weights of its layers in int8, one scale per output "
            f"feature. These lines load the base in {card.dtype}, which differs from that by the rounding to int8; the "
            "table below was made so. The form `merged` holds the weights that were trained over, with the adapter."
        ]
    return []
