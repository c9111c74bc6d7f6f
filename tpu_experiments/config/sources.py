"""Schema of the groups `model`, `data`, `lora` and `sharding`: what is trained, and on what."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from tpu_experiments.config.fields import choice, number


@dataclass
class ModelConfig:
    """A decoder of transformers: where its weights come from and how it computes."""

    _target_: str = "tpu_experiments.models.huggingface.HuggingFaceModel"
    """Swap point: class that gives the empty module and its weights one by one (models/huggingface.py)."""
    name: str = MISSING
    """Name of the model; the file name in conf/model."""
    path: str = MISSING
    """Hub id, or a local Hugging Face checkpoint folder (single or sharded safetensors)."""
    revision: str | None = None
    """Hub revision (commit or tag); null is the newest."""
    tokenizer_path: str | None = None
    """Folder or Hub id of the tokenizer; null is `path`."""
    chat_template_path: str | None = None
    """Jinja file used instead of the tokenizer's own chat template."""
    init: str = choice("pretrained", "random", default="pretrained")
    """`pretrained`: weights of `path`. `random`: drawn from `seed` with transformers' own initialisation."""
    size: str = choice("full", "tiny", default="full")
    """`tiny`: `arch` with `tiny_arch` laid over it and random weights; same architecture, seconds on a CPU."""
    dtype: str = choice("bfloat16", "float32", default="bfloat16")
    """Data type of the frozen base and of the arithmetic; adapters and optimizer state are always float32."""
    attention: str = choice("sdpa", "eager", default="sdpa")
    """Attention implementation of transformers; both get a ready 4-D mask, so nothing is read on the host."""
    lr: float = number(default=2e-4, above=0)
    """Peak learning rate that suits adapters on this model; `optim.lr` and a stage's `lr` win over it."""
    arch: dict[str, Any] = field(default_factory=dict)
    """Hugging Face config values; used for `init: random` and to plan without the checkpoint."""
    tiny_arch: dict[str, Any] = field(default_factory=dict)
    """Values laid over `arch` for `size: tiny`."""


@dataclass
class DataSourceConfig:
    """One named source of documents."""

    _target_: str = "tpu_experiments.data.sources.read_documents"
    """Swap point: callable that takes a `SourceSpec` and yields `Document`s."""
    path: str = MISSING
    """Local file or folder (.jsonl, .json, .parquet), or a Hub id."""
    hub_config: str | None = None
    """Configuration name on the Hub, for example `20231101.ro`."""
    hub_split: str = "train"
    """Split on the Hub."""
    revision: str | None = None
    """Hub revision; null is the newest."""
    sample_path: str | None = None
    """Shipped sample in the same schema, read when `data_size: sample`."""
    kind: str = choice("text", "chat")
    """`text`: every token is learnt. `chat`: only assistant turns are."""
    format: str = choice("text", "messages", "alternating", "question_answer")
    """How a row becomes a document. `text`: field `text`. `messages`: list of role and content.
    `alternating`: field `data`, a list of strings, user first. `question_answer`: question, answer, reasoning,
    topic, difficulty, case_citation as the prompt and response of the UK-law recipe."""
    max_documents: int | None = number(default=None, at_least=1)
    """Read at most this many documents, in file order; null reads all."""
    eval_fraction: float = number(default=0.1, at_least=0, below=1)
    """Share of documents held out for evaluation, chosen by a hash of the document."""


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
    """Linear modules that get an adapter, by the last part of their name or by a glob over the full name."""
    init: str = choice("b_zero", "a_zero", "pissa", default="b_zero")
    """`b_zero`: A Kaiming-uniform, B zero. `a_zero`: A zero, B normal. `pissa`: principal singular directions
    of W, which is reduced by them (arXiv 2404.02948)."""
    scaling: str = choice("alpha_over_r", "alpha_over_sqrt_r", default="alpha_over_r")
    """Scale of the adapter; `alpha_over_sqrt_r` is rsLoRA (arXiv 2312.03732)."""


@dataclass
class ShardingConfig:
    """Which dimension of which parameter is split over the devices in `hw.parallel: spmd`."""

    name: str = MISSING
    """Name of the table; the file name in conf/sharding."""
    rules: dict[str, list[str | None]] = field(default_factory=dict)
    """Glob over parameter names to one entry per dimension: `fsdp` or null. First match wins; a glob that
    matches nothing stops the run."""
    max_replicated_elements: int = number(default=16777216, at_least=0)
    """A parameter larger than this that no rule splits stops the run (16 Mi elements are 32 MiB in bf16);
    0 switches the check off."""
