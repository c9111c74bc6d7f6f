"""Schema of the group `task`: what the command does, and the settings of each task.

Settings for choosing tokens (task=generate, task=serve) have the names of transformers' GenerationConfig.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from omegaconf import MISSING

from tpu_experiments.config.data_schema import FORMATS
from tpu_experiments.config.errors import suggest
from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.places import place


@dataclass
class TaskConfig:
    """The task that the command runs, with its settings."""

    name: str = MISSING
    """Name of the task; a module of tpu_experiments/tasks."""


# ---- plan ---------------------------------------------------------------------------------------------------


@dataclass
class SearchConfig:
    """Search space of `explore: search`: every combination of the axes with the configured global batch."""

    axes: dict[str, list[Any]] = field(default_factory=dict)
    """Values to try for each key or group of the command line; an empty list leaves the key as configured. Left out are
    combinations that the checks refuse, `sharding` if hw.parallel shards nothing, and all values but one of
    `model.remat` and `model.stack_group` if model.stack folds nothing. Of combinations that differ in the micro-batch
    alone, none larger than one that does not fit is compiled. A run on its own answers has the axes of `rollout.*`,
    compared by answers per second, and the others with `programs: train`."""
    prune_above: float = number(default=1.5, above=0)
    """Multiple of a chip's memory above which a combination, as estimated by formulas, is not compiled. The default
    leaves room for their error of up to 45 %."""
    table: str | None = place("local", default=None)
    """YAML file to which the fastest settings for each `model.stack` are written as lines of conf/tuned.yaml; null
    writes none."""


@dataclass
class DecodeConfig:
    """Answers that a plan counts, as task=generate writes them and rollouts are written."""

    rows: int | None = number(default=None, at_least=1)
    """Answers that are written at once, over all chips; null plans none."""
    prompt_tokens: int = number(default=512, at_least=1, at_most=2**24)
    """Tokens of every prompt, padding included (one of `task.buckets` of task=generate). Prompt and answer should add
    up to a multiple of 128."""
    max_new_tokens: int = number(default=512, at_least=2, at_most=2**24)
    """Tokens of every answer."""
    tokens_per_call: int = number(default=8, at_least=1)
    """Tokens that one call of the program writes."""
    top_k: int = number(default=0, at_least=0)
    """Likeliest tokens to sample from; 0 is all of them. The compiler estimates no time for the search of others."""


@dataclass
class PlanTaskConfig(TaskConfig):
    """Settings of task=plan."""

    method: str = choice("auto", "compiled", "analytic", default="auto")
    """`compiled`: by the TPU's own compiler. `analytic`: by formulas, on any machine. `auto`: the compiler if libtpu is
    installed, otherwise formulas."""
    programs: str = choice("all", "train", default="all")
    """`all` also compiles the programs of evaluation and sampling; `train` only counts them."""
    explore: str = choice("none", "ladder", "search", default="none")
    """`ladder` finds the largest micro-batch that fits. `search` tries the combinations of `search.axes` and writes the
    fastest that fits to best.yaml beside the plan, for task=train with +plan=FILE."""
    pack: int = number(default=1, at_least=1)
    """Adapters of the config's rank that a step trains, as the points of a sweep do with `sweeping.pack`; tokens, hours
    and dollars are those of all of them."""
    compare: list[str] = field(default_factory=list)
    """Further machines (names of conf/hw) that the same run is planned for."""
    compiled_folder: str | None = place("folder", default=None)
    """Cache folder of compilation results; null is `<output_dir>/plans/compiled`. All points of a sweep share the
    command's folder, so that none compiles again what another plan has compiled."""
    libtpu: str | None = place("local", default=None)
    """Folder of another virtual environment, whose libtpu compiles the programs that are lowered in this one, for
    example .venv-torchtpu; null is this environment's. Estimates of two versions of libtpu are not comparable."""
    reward_seconds: float = number(default=0.0, at_least=0)
    """Seconds of an iteration in which its answers are rewarded, where the model writes its own rows: the records of a
    run have them as perf/reward_seconds."""
    orders: int = number(default=1, at_least=1)
    """Orders of the slice's chips for which the training step is compiled. Above 1, the plan names the collectives that
    the compiler makes otherwise in another order than the usual one: sums are then rounded otherwise there. Each takes
    as long as the step's own compilation."""
    workers: int | None = number(default=None, at_least=1)
    """Parallel compilations; null derives it from the free memory (6 GiB each) and the cores."""
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    search: SearchConfig = field(default_factory=SearchConfig)


def planning_problems(task: TaskConfig) -> list[str]:
    """Return incompatible settings of task=plan."""
    if not isinstance(task, PlanTaskConfig):
        return []
    problems = []
    if task.libtpu is not None and task.search.table is not None:
        problems.append(
            f"task.libtpu={task.libtpu} with task.search.table={task.search.table}; the table holds settings for the "
            "compiler that the runs use; leave one of the two out."
        )
    if task.orders > 1 and (task.explore != "none" or task.method == "analytic"):
        what = f"task.explore={task.explore}" if task.explore != "none" else "task.method=analytic"
        problems.append(
            f"task.orders={task.orders} with {what}; the step of one config is compiled for several orders of the "
            "chips; leave one of the two out."
        )
    if task.decode.rows is not None and (task.programs == "train" or task.method == "analytic" or task.pack > 1):
        what = f"task.pack={task.pack}" if task.pack > 1 else f"task.method={task.method}"
        what = "task.programs=train" if task.programs == "train" else what
        problems.append(
            f"task.decode.rows={task.decode.rows} with {what}; the programs that write answers are compiled beside all "
            "those of one run; leave one of the two out."
        )
    return problems


# ---- prepare ------------------------------------------------------------------------------------------------


@dataclass
class PrepareTaskConfig(TaskConfig):
    """Settings of task=prepare."""

    teacher: str | None = place("folder", default=None)
    """Teacher of `objective=distillation`, whose predictions of the prepared rows are written to
    `data.<name>.teacher`: folder of a run, whose newest weights are taken; `model`, the command's own `model=` as it is
    loaded; or a .jsonl file of vLLM's prompt_logprobs. null writes none."""
    teacher_requests: str | None = place("file", default=None)
    """JSONL file to which the token ids of every document of the rows are written, each once, as `prompt_token_ids`,
    for vLLM to answer; null writes none."""

    @property
    def predicts(self) -> bool:
        """Whether a model predicts, on the devices."""
        return self.teacher is not None and not self.teacher.endswith(".jsonl")


# ---- pack ---------------------------------------------------------------------------------------------------


@dataclass
class PackTaskConfig(TaskConfig):
    """Settings of task=pack, which a sweep starts (`sweeping.pack`)."""

    points: str | None = place("local", default=None)
    """Folder with points.json, the command lines of the runs; what becomes of each is written there too."""


# ---- doctor -------------------------------------------------------------------------------------------------

CHECKS = (
    "settings",
    "versions",
    "variables",
    "flags",
    "runtime_version",
    "lock_file",
    "memlock",
    "hugepages",
    "devices",
    "chip_memory",
    "host_memory",
    "disk",
    "compile_cache",
    "output_dir",
    "run",
    "model",
    "data",
    "cloud",
)
"""Names of the checks of task=doctor, in the order of its report."""


@dataclass
class DoctorTaskConfig(TaskConfig):
    """Settings of task=doctor."""

    checks: list[str] = field(default_factory=list)
    """Names of the checks to run; empty runs all."""
    json: str | None = place("file", default=None)
    """JSON file, local or gs://, to which the report is also written; null writes none."""
    timeout_seconds: float = number(default=20.0, above=0)
    """Timeout in seconds of requests to storage, the Hub and gcloud, which run in parallel."""
    device_timeout_seconds: float = number(default=120.0, above=0)
    """Timeout in seconds of the child process that initialises the devices, counts them and adds two numbers."""


def doctoring_problems(task: TaskConfig) -> list[str]:
    """Return invalid settings of task=doctor; none for another task."""
    if not isinstance(task, DoctorTaskConfig):
        return []
    problems = [
        f"task.checks has {name!r}; there is no such check. {suggest(name, CHECKS)}"
        for name in task.checks
        if name not in CHECKS
    ]
    if task.json is not None and not task.json.endswith(".json"):
        problems.append(f"task.json={task.json}; it does not end in .json; name it so.")
    return problems


# ---- certify ------------------------------------------------------------------------------------------------

CERTIFIED = (
    "isolation",
    "logits",
    "weights",
    "adapter",
    "folded",
    "export",
    "generation",
    "step",
    "tokenizer",
    "chat",
    "tools",
    "reasoning",
)
"""Names of the checks of task=certify, in the order of its page."""


@dataclass
class CertifyTaskConfig(TaskConfig):
    """Settings of task=certify."""

    checks: list[str] = field(default_factory=list)
    """Names of the checks to make; empty makes all."""
    machines: list[str] = field(default_factory=list)
    """Machines of conf/hw for which the step is planned, beside that of `hw=`."""
    method: str = choice("auto", "compiled", "analytic", default="auto")
    """How the step is planned, as `task.method` of task=plan: `compiled` by the TPU's own compiler, `analytic` by
    formulas, `auto` by the compiler if libtpu is installed."""
    compile_minutes: float = number(default=10.0, above=0)
    """Minutes after which the compilation of one machine's step is ended, and formulas plan it; the page says so."""


def certifying_problems(task: TaskConfig) -> list[str]:
    """Return invalid settings of task=certify; none for another task."""
    if not isinstance(task, CertifyTaskConfig):
        return []
    return [
        f"task.checks has {name!r}; there is no such check. {suggest(name, CERTIFIED)}"
        for name in task.checks
        if name not in CERTIFIED
    ]


# ---- evaluate -----------------------------------------------------------------------------------------------


@dataclass
class EvaluateTaskConfig(TaskConfig):
    """Settings of task=evaluate."""

    split: str = choice("test", "evaluation", default="test")
    """Held-out split to evaluate; `evaluation` is the one that evaluations during training use."""
    run: str | None = place("folder", default=None)
    """Folder of the run whose adapter or model is evaluated, with its own model, LoRA, data and row length; null is the
    run of this command, `<output_dir>/<name>`."""
    adapter: str | None = place("folder", default=None)
    """Folder of an adapter in PEFT's layout to evaluate instead of the run's; `none` evaluates the base model alone.
    Neither needs a run."""
    data: str = choice("run", "selected", default="run")
    """Data to evaluate a run on: `run` its own, `selected` that of `data=`, which the run may have trained on."""
    max_documents: int | None = number(default=1000, at_least=1)
    """Largest number of documents per source, drawn by `seed`; null takes all."""
    seq_len: int | None = number(default=None, at_least=8, at_most=2**24)
    """Tokens per row, which is the longest context of a token; null takes the longest of the run's stages."""
    by: str | None = None
    """Field of the rows, such as `sample_type`, by whose values the results are also broken down; sources without the
    field are left out of that. The sources are read once more to find the values."""
    documents: str | None = place("file", default=None)
    """JSONL file to which the held-out documents are written as text for other programs: `source`, and `text` or, for
    conversations, `prompt` (up to the last answer) and `reference` (that answer)."""
    resamples: int = number(default=1000, at_least=100)
    """Bootstrap resamples of the documents for the confidence intervals."""
    confidence: float = number(default=0.95, above=0, below=1)
    """Level of the confidence intervals."""
    generate: int = number(default=0, at_least=0)
    """Conversations of each chat source whose last answer the model generates, for comparison with the reference
    (ROUGE, exact match); 0 generates none."""
    max_new_tokens: int = number(default=64, at_least=1, at_most=2**24)
    """Largest number of tokens generated per answer; the rest of a longer reference counts as missed."""
    pseudo_perplexity_documents: int = number(default=0, at_least=0)
    """Documents of each source whose pseudo-perplexity is computed (Salazar et al., arXiv 1910.14659), for runs of
    objective=mlm; 0 computes none. Every token is masked once, alone: a document of L tokens is read L times."""
    harness: list[str] = field(default_factory=list)
    """Tasks and groups of lm-evaluation-harness that are evaluated, instead of the held-out documents."""
    harness_tasks: str | None = place("local", default=None)
    """Folder of task files of your own, in the harness's YAML; Python that they name is executed."""
    harness_shots: int | None = number(default=None, at_least=0)
    """Examples in a prompt; null takes each task's own number."""
    harness_limit: int | None = number(default=None, at_least=1)
    """First documents of each task that are asked; null asks all."""
    harness_chat: bool = False
    """Whether the tokenizer's chat template is applied to the prompts."""


OF_BOTH = ("name", "run", "adapter", "seq_len", "resamples", "confidence")
"""Settings of task=evaluate that held-out documents and `task.harness` read."""


def evaluating_problems(task: TaskConfig) -> list[str]:
    """Return settings of task=evaluate that nothing reads; none for another task."""
    if not isinstance(task, EvaluateTaskConfig):
        return []
    default = EvaluateTaskConfig(name=task.name)
    given = [name for name in vars(task) if getattr(task, name) != getattr(default, name) and name not in OF_BOTH]
    others = [name for name in given if name.startswith("harness") != bool(task.harness)]
    if task.harness:
        why = f"with task.harness=[{','.join(task.harness)}], which is evaluated instead of the held-out documents"
    else:
        why = "without task.harness, whose tasks it is for"
    return [f"task.{name}={getattr(task, name)} {why}; leave it out." for name in others]


# ---- generate -----------------------------------------------------------------------------------------------


@dataclass
class ChoiceConfig:
    """Choice of the next token; steps are applied in the order of the keys, as in transformers."""

    repetition_penalty: float = number(default=1.0, above=0)
    """Divisor of positive logits, and factor of negative ones, of tokens that occurred (arXiv 1909.05858); 1 is off."""
    no_repeat_ngram_size: int = number(default=0, at_least=0)
    """Length in tokens of n-grams that may not occur twice in prompt and answer together; 0 is off."""
    do_sample: bool = False
    """Whether tokens are sampled; otherwise the likeliest one is taken, and the three keys below have no effect."""
    temperature: float = number(default=1.0, above=0)
    """Divisor of the logits."""
    top_k: int = number(default=50, at_least=0)
    """Number of likeliest tokens to sample from; 0 is all of them."""
    top_p: float = number(default=1.0, above=0, at_most=1)
    """Total probability of the likeliest tokens to sample from (arXiv 1904.09751); 1 is all of them."""


@dataclass
class WeightsConfig:
    """Choice of the trained weights that a task reads."""

    run: str | None = place("folder", default=None)
    """Folder of a run, local or gs://, whose model, tokenizer, chat format and trained weights are used; null uses the
    model of `model=`."""
    weights: str = choice("auto", "export", "checkpoint", "base", default="auto")
    """Weights of that run: its `export`, its newest `checkpoint`, the `base` that it started from, or `auto`, which is
    the export if there is one and otherwise the newest checkpoint."""
    adapter: str | None = place("folder", default=None)
    """Folder of a PEFT LoRA adapter, local or gs://, used instead of `weights`."""
    base: str | None = place("model", default=None)
    """Folder or Hub id of the base model, if it is no longer where the run found it."""


@dataclass
class AnswerTaskConfig(ChoiceConfig, WeightsConfig, TaskConfig):
    """Settings of tasks that answer prompts: the weights, their data type, and the lengths that are compiled."""

    weights: str = choice("auto", "export", "checkpoint", "base", "merged", "gguf", default="auto")
    """Weights of that run: its `export`, its newest `checkpoint`, the `base` that it started from, or `auto`, which is
    the export if there is one and otherwise the newest checkpoint. What task=export wrote there: `merged` as a model of
    its own, with its tokenizer, and `gguf` by llama.cpp."""
    gguf: str | None = place("local", default=None)
    """GGUF file that llama.cpp answers with, instead of the one in the run's `export/gguf` whose weights lose least."""
    dtype: str | None = field(default=None, metadata={"allowed": ("bfloat16", "float16", "float32")})
    """Data type of weights and arithmetic; null is the model's. `float16` is for GPUs without
    bfloat16, such as a T4."""
    system: str | None = None
    """System text for prompts that have none of their own; chat format only."""
    max_new_tokens: int = number(default=128, at_least=1, at_most=2**24)
    """Largest number of tokens generated per answer."""
    buckets: list[int] = field(default_factory=list)
    """Lengths in tokens that prompts are padded to. Each prompt takes the smallest one that holds it, and two programs
    are compiled for each length used."""
    tokens_per_call: int = number(default=8, at_least=1)
    """Tokens that one call of a program generates before the host checks whether all rows have ended."""

    @property
    def is_llama_cpp(self) -> bool:
        """Whether llama.cpp answers, from a GGUF file."""
        return self.weights == "gguf" or self.gguf is not None


@dataclass
class DenoisingConfig:
    """How models of masked diffusion write: blocks of masked tokens, each filled in fixed steps (arXiv 2502.09992)."""

    block: int = number(default=32, at_least=1, at_most=2**16)
    """Tokens of a block. Blocks are filled from left to right, and a block's tokens in any order."""
    steps: int = number(default=32, at_least=1, at_most=2**16)
    """Forward passes for a block, at most as many as it has tokens; fewer fill several tokens at once."""
    remasking: str = choice("low_confidence", "random", default="low_confidence")
    """Which of a step's predictions stay masked: those that the model is least sure of, or random ones."""


@dataclass
class GenerateTaskConfig(AnswerTaskConfig):
    """Settings of task=generate."""

    prompt: str | None = None
    """One prompt. Without it and `prompts_file`, prompts are read from the terminal until `exit` or `quit`."""
    input: str | None = None
    """Input of the instruction in `prompt`, joined to it as in `instruction` data."""
    prompts_file: str | None = place("file", default=None)
    """.txt file with one prompt per line, or .jsonl file of objects with `prompt`, `messages`, or `instruction` and
    `input`."""
    output: str | None = place("file", default=None)
    """JSONL file to write, local or gs://, with the fields prompt, text, num_tokens and finished."""
    format: str = choice("auto", "chat", "text", default="auto")
    """`chat`: a prompt is a user turn in the chat format. `text`: a prompt is continued as plain text. `auto`: `chat`
    if the run trained on conversations or, without a run, if the tokenizer has a chat template."""
    keep_turns: bool = True
    """Whether prompts typed at the terminal are turns of one conversation, in the chat format; otherwise each is
    answered by itself."""
    num_return_sequences: int = number(default=1, at_least=1)
    """Answers sampled for each prompt."""
    batch_rows: int = number(default=8, at_least=1)
    """Largest number of prompts of a file that are answered in one batch."""
    denoising: DenoisingConfig = field(default_factory=DenoisingConfig)


@dataclass
class ServeTaskConfig(AnswerTaskConfig):
    """Settings of task=serve; the keys for choosing tokens are of every answer, `temperature` unless a request has one.

    A temperature of 0 takes the likeliest token.
    """

    host: str = "127.0.0.1"
    """Address to listen on. Where other machines reach it, requests need a token: that of the environment variable
    TPU_EXPERIMENTS_SERVE_TOKEN, or else one that is made and printed with the address."""
    port: int = number(default=7860, at_least=0, at_most=65535)
    """Port to listen on; 0 takes a free one."""
    max_seconds: float = number(default=600.0, above=0, at_most=10**6)
    """Longest time from a request to the end of its answers, waiting included; then it is refused."""
    base_beside: bool = True
    """Whether the weights before training answer beside the trained ones. An adapter shares the base's memory; a whole
    model takes as much again."""


def answering_problems(task: AnswerTaskConfig) -> list[str]:
    """Return incompatible settings of task=generate and task=serve."""
    problems = []
    if task.gguf is not None and task.weights not in ("auto", "gguf"):
        problems.append(f"task.weights={task.weights} with task.gguf=; each says what to write with; leave one out.")
    elif task.run is None and task.weights != "auto" and task.gguf is None:
        problems.append(f"task.weights={task.weights} without task.run=; name the folder of a run.")
    if task.adapter is not None and (task.weights != "auto" or task.gguf is not None):
        other = f"task.weights={task.weights}" if task.gguf is None else "task.gguf="
        problems.append(f"{other} with task.adapter=; each says what to write with; leave one out.")
    if task.is_llama_cpp and task.no_repeat_ngram_size:
        problems.append(
            f"task.no_repeat_ngram_size={task.no_repeat_ngram_size} with a GGUF file; llama.cpp cannot forbid repeated "
            "n-grams; leave it out, or use task.weights=merged."
        )
    if task.is_llama_cpp and task.dtype is not None:
        problems.append(
            f"task.dtype={task.dtype} with a GGUF file; the file has its data type; leave it out, or name another file "
            "with task.gguf=."
        )
    if not task.buckets or min(task.buckets) < 1:
        problems.append(f"task.buckets={task.buckets}; prompts are padded to one of them; write [128] or more.")
    return problems


def serving_problems(task: ServeTaskConfig) -> list[str]:
    """Return incompatible settings of task=serve."""
    problems = answering_problems(task)
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        problems.append(
            "task=serve; fastapi or uvicorn is not installed; install the extra: pip install 'tpu_experiments[serve]'."
        )
    if not task.do_sample:
        problems.append(
            "task.do_sample=false with task=serve; each request has a temperature, and 0 takes the likeliest token; "
            "leave it out."
        )
    return problems


def generating_problems(task: GenerateTaskConfig) -> list[str]:
    """Return incompatible settings of task=generate."""
    problems = []
    if task.prompt is not None and task.prompts_file is not None:
        problems.append("task.prompt= and task.prompts_file=; one of them is answered; leave the other out.")
    if task.prompt is not None and not task.prompt.strip():
        problems.append("task.prompt=; it is empty; write something to answer.")
    if task.prompts_file is not None and not task.prompts_file.endswith((".txt", ".jsonl")):
        problems.append(f"task.prompts_file={task.prompts_file}; it is neither .txt nor .jsonl; name it so.")
    if task.output is not None and task.prompt is None and task.prompts_file is None:
        problems.append(f"task.output={task.output} without task.prompt= or task.prompts_file=; add one of them.")
    if task.num_return_sequences > 1 and not task.do_sample:
        problems.append(
            f"task.num_return_sequences={task.num_return_sequences} with task.do_sample=false; the likeliest tokens "
            "are one answer; set task.do_sample=true."
        )
    if task.denoising.steps > task.denoising.block:
        problems.append(
            f"task.denoising.steps={task.denoising.steps} with task.denoising.block={task.denoising.block}; every step "
            "fills at least one token of a block; use fewer steps, or a longer block."
        )
    return problems + answering_problems(task)


# ---- export -------------------------------------------------------------------------------------------------

FORMS = ("peft", "merged", "gguf", "int8", "nf4", "bitnet", "lr_qat")
"""Forms that task=export writes."""
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0")
"""Data types of the weights in a GGUF file, by llama.cpp's names."""


@dataclass
class ParityConfig:
    """Extent of the comparison of an export with the model that was trained."""

    documents: int = number(default=8, at_least=1)
    """Held-out documents that both are evaluated on, drawn by `seed`."""
    tokens: int = number(default=512, at_least=8, at_most=2**24)
    """Tokens of each document that are evaluated."""
    lines: int = number(default=200, at_least=1)
    """Lines of held-out text that both tokenizers must split into the same tokens."""
    prompts: int = number(default=3, at_least=0)
    """Documents of which both continue the first half, greedily."""
    max_new_tokens: int = number(default=32, at_least=1, at_most=2**24)
    """Tokens of each continuation."""
    max_perplexity_ratio: float | None = number(default=None, above=1)
    """Perplexity of the export over that of the model above which the export counts as worse; null takes the form's own
    limit (tpu_experiments/tasks/export/parity.py)."""


@dataclass
class WrittenFormsConfig(WeightsConfig, TaskConfig):
    """Settings of the tasks that write a model in forms that others read."""

    folder: str | None = place("folder", default=None)
    """Folder of the forms, local or gs://; null is `export/` in the run's folder, and `<output_dir>/exports/<name>` for
    an adapter or a model."""
    dtype: str | None = field(default=None, metadata={"allowed": ("bfloat16", "float32")})
    """Data type of the weights in `merged` and of those that quantised forms leave as they are; null is the model's."""
    max_shard_gib: float = number(default=2.0, above=0)
    """Largest file of weights; that much memory is used while one is written."""
    parity: ParityConfig = field(default_factory=ParityConfig)
    push: str | None = None
    """Repository on the Hub (`owner/name`) to upload the forms to; null uploads nothing."""
    push_dry_run: bool = True
    """Whether `push` only lists what would be uploaded."""
    push_private: bool = True
    """Whether a repository that `push` creates is private; one that is there stays as it is."""


@dataclass
class ExportTaskConfig(WrittenFormsConfig):
    """Settings of task=export."""

    forms: list[str] = field(default_factory=list)
    """Forms to write; empty writes `peft` and `merged`, of a model without adapters `merged` alone, of rounded weights
    `lr_qat`. `peft` is the adapter, `merged` the whole model for transformers, vLLM, TGI and MaxText, `gguf` for
    llama.cpp and Ollama, `int8` compressed-tensors' W8A16, `nf4` bitsandbytes', `bitnet` the packed ternary weights of
    `model.linear=bitnet`, `lr_qat` the packed integers of `model.linear=lr_qat` in compressed-tensors' layout."""
    gguf_types: list[str] = field(default_factory=lambda: ["f16", "q8_0"])
    """Data types of the GGUF files, one file each: f32, f16, bf16 or q8_0."""


@dataclass
class QuantizeTaskConfig(WrittenFormsConfig):
    """Settings of task=quantize."""

    method: str = choice("rtn", "gptq", "vptq", default="gptq")
    """`rtn` rounds every weight to the nearest integer; `gptq` lets later columns make good the error of earlier ones
    (arXiv 2210.17323); `vptq` stores vectors of a codebook (arXiv 2409.17066)."""
    bits: int = number(default=4, at_least=2, at_most=8)
    """Bits of an integer (`rtn`, `gptq`). vLLM reads 4 and 8."""
    group: int = number(default=128, at_least=8)
    """Weights of a row that share a scale (`rtn`, `gptq`). vLLM reads 32, 64 and 128."""
    vector: int = number(default=4, at_least=2, at_most=16)
    """Weights of a column that are one vector (`vptq`)."""
    codebook: int = number(default=256, at_least=2, at_most=65536)
    """Vectors of the codebook (`vptq`): log2 of it over `vector` bits a weight."""
    residual: int = number(default=0, at_least=0, at_most=65536)
    """Vectors of a second codebook, of what the first one leaves (`vptq`); 0: there is none."""
    outliers: float = number(default=0.0, at_least=0, below=1)
    """Part of the columns, those with the largest inputs, that has a codebook of half the length (`vptq`)."""
    outlier_codebook: int = number(default=256, at_least=2, at_most=65536)
    """Vectors of that codebook (`vptq`)."""
    rows: int = number(default=128, at_least=1)
    """Training rows whose activations the layers are fitted to (`gptq`, `vptq`)."""
    row_tokens: int | None = number(default=None, at_least=8)
    """Tokens of these rows that are used, from the first on; null: all."""


def exporting_problems(task: TaskConfig) -> list[str]:
    """Return invalid settings of task=export and task=quantize; none for another task."""
    if not isinstance(task, WrittenFormsConfig):
        return []
    problems = (
        []
        if not isinstance(task, ExportTaskConfig)
        else [
            f"{key} has {name!r}; there is no such {what}. {suggest(name, known)}"
            for key, what, names, known in (
                ("task.forms", "form", task.forms, FORMS),
                ("task.gguf_types", "data type", task.gguf_types, GGUF_TYPES),
            )
            for name in names
            if name not in known
        ]
    )
    if isinstance(task, ExportTaskConfig) and "gguf" in task.forms and not task.gguf_types:
        problems.append("task.gguf_types=[] with the form gguf; name f16, q8_0 or another.")
    if isinstance(task, QuantizeTaskConfig):
        problems += _quantising_problems(task)
    if task.weights == "base" and isinstance(task, ExportTaskConfig):
        problems.append("task.weights=base; an export is of what was trained; leave it out.")
    if task.push is not None and task.push.count("/") != 1:
        problems.append(f"task.push={task.push}; it is no repository of the Hub; write owner/name.")
    return problems


def _quantising_problems(task: QuantizeTaskConfig) -> list[str]:
    plain = QuantizeTaskConfig(name=task.name)
    of_grid, of_vectors = ("bits", "group"), ("vector", "codebook", "residual", "outliers", "outlier_codebook")
    unused = of_grid if task.method == "vptq" else of_vectors
    unused = (*unused, "rows", "row_tokens") if task.method == "rtn" else unused
    return [
        f"task.{key}={getattr(task, key)} with task.method={task.method}, which has no such setting; leave it out."
        for key in unused
        if getattr(task, key) != getattr(plain, key)
    ]


# ---- tokenizer ----------------------------------------------------------------------------------------------

KINDS = ("bbpe", "spm_bpe", "unigram", "wordpiece", "deberta_v3")
"""Kinds of tokenizer that task=tokenizer trains."""
SPECIAL_TOKENS: dict[str, dict[str, str]] = {
    "bbpe": {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"},
    "spm_bpe": {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "unigram": {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "wordpiece": {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    },
    "deberta_v3": {
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "unk_token": "[UNK]",
        "mask_token": "[MASK]",
    },
}
"""Special tokens of each kind by transformers' name, in the order of their ids."""
NUM_BYTES = 256
BYTE_KINDS = ("bbpe", "spm_bpe", "unigram")
"""Kinds whose vocabulary has all bytes, so that no text has an unknown part."""
OF_CONVERSATIONS = ("<|im_start|>", "<|im_end|>")
"""Further special tokens of the kinds for decoders: the marks of model.chat_format=chatml."""


@dataclass
class TokenizerTaskConfig(TaskConfig):
    """Settings of task=tokenizer."""

    kind: str = choice(*KINDS, default="bbpe")
    """`bbpe`: BPE of bytes, as GPT-2 and Llama 3. `spm_bpe`: SentencePiece's BPE with bytes for rare characters, as
    Llama 2 and Mistral. `unigram`: SentencePiece's unigram model, with bytes too. `wordpiece`: BERT's, cased.
    `deberta_v3`: unigram with the special tokens and the normalisation of transformers' DebertaV2Tokenizer."""
    vocab_size: int = number(default=32000, at_least=1, at_most=2**24)
    """Entries of the vocabulary, with special and reserved tokens and bytes, before it is rounded up."""
    pad_vocab_to_multiple_of: int = number(default=128, at_least=1)
    """The vocabulary is rounded up to a multiple of this, filled with reserved tokens, so that the embedding's rows
    divide among devices and tiles of a TPU."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """Strings of special tokens by transformers' name (`bos_token`, `mask_token`), where they differ from the kind's;
    not for `deberta_v3`."""
    additional_special_tokens: list[str] | None = None
    """Further special tokens; null takes `<|im_start|>` and `<|im_end|>` for bbpe, spm_bpe and unigram, none for the
    others."""
    reserved_tokens: int = number(default=0, at_least=0)
    """Special tokens `<|reserved_0|>`, ... without a use yet, within `vocab_size`."""
    min_frequency: int = number(default=2, at_least=0)
    """Occurrences of a pair from which it is merged; no effect on unigram and deberta_v3."""
    max_token_length: int | None = number(default=None, at_least=1)
    """Largest length of a token in characters, of bbpe in bytes; null is 16 as in SentencePiece, and unlimited for bbpe
    and wordpiece, whose trainer has no limit."""
    character_coverage: float = number(default=0.9995, above=0, at_most=1)
    """Share of the characters, the most frequent first, whose kinds are in the vocabulary (SentencePiece's default);
    the others are unknown, or bytes. No effect on bbpe."""
    normalization: str = choice("none", "nfc", "nfkc", default="none")
    """Unicode form that texts are brought to before they are split; `none` lets every text round trip. deberta_v3 has
    NFC of its own."""
    digits: str = choice("any", "three", "single", default="three")
    """Largest number of digits in a token: any, three (as Llama 3) or one (as Llama 2 and Qwen 2)."""
    max_bytes: int | None = number(default=2**30, at_least=1)
    """UTF-8 bytes of the training documents that are used, drawn by a hash of content and `seed`; null uses all."""
    held_out_bytes: int | None = number(default=2**23, at_least=1)
    """UTF-8 bytes of held-out documents that are measured, drawn in the same way; null measures all."""
    compare_with: str | None = place("model", default=None)
    """Folder or Hub id of a tokenizer that is measured on the same text."""
    folder: str | None = place("folder", default=None)
    """Folder to write, local or gs://; null is `<output_dir>/tokenizers/<name>`."""

    @property
    def specials(self) -> dict[str, str]:
        """Return the special tokens that have a name, in the order of their ids."""
        return SPECIAL_TOKENS[self.kind] | self.special_tokens

    @property
    def additional(self) -> list[str]:
        """Return the further special tokens."""
        if self.additional_special_tokens is not None:
            return self.additional_special_tokens
        return list(OF_CONVERSATIONS) if self.kind in BYTE_KINDS else []

    @property
    def num_pieces(self) -> int:
        """Return the entries that are trained: what special and reserved tokens and bytes leave."""
        taken = len(self.specials) + len(self.additional) + self.reserved_tokens
        return self.vocab_size - taken - (NUM_BYTES if self.kind in BYTE_KINDS else 0)

    @property
    def total_size(self) -> int:
        """Return the entries of the vocabulary after rounding up."""
        multiple = self.pad_vocab_to_multiple_of
        return -(-self.vocab_size // multiple) * multiple


def tokenizer_problems(task: TaskConfig) -> list[str]:
    """Return invalid settings of task=tokenizer; none for another task."""
    if not isinstance(task, TokenizerTaskConfig) or task.kind not in KINDS:
        return []
    problems = []
    names = SPECIAL_TOKENS[task.kind]
    known = sorted({name for of_kind in SPECIAL_TOKENS.values() for name in of_kind})
    for name in task.special_tokens:
        if name not in known:
            problems.append(f"task.special_tokens has {name!r}; there is no such special token. {suggest(name, known)}")
    if task.kind == "deberta_v3" and any(names.get(n) != token for n, token in task.special_tokens.items()):
        problems.append(
            f"task.special_tokens={task.special_tokens} with task.kind=deberta_v3; its tokens are {', '.join(names)} "
            "as in DebertaV2Tokenizer; leave it out."
        )
    if task.kind == "deberta_v3" and task.normalization != "none":
        problems.append(
            f"task.normalization={task.normalization} with task.kind=deberta_v3; DebertaV2Tokenizer normalises to NFC "
            "whatever is set; leave it out."
        )
    if task.max_token_length is not None and task.kind == "wordpiece":
        problems.append(
            f"task.max_token_length={task.max_token_length} with task.kind=wordpiece; its trainer has no limit; leave "
            "it out."
        )
    tokens = [*task.specials.values(), *task.additional]
    if "" in tokens or len(set(tokens)) < len(tokens):
        problems.append(f"task.special_tokens; of {tokens} one is empty or there twice; name each once.")
    if any(token.startswith("<|reserved_") for token in tokens):
        problems.append(
            "task.additional_special_tokens; <|reserved_0|> and so on are task.reserved_tokens=; rename it."
        )
    if task.num_pieces < 1:
        needed = task.vocab_size - task.num_pieces + 1
        problems.append(
            f"task.vocab_size={task.vocab_size}; special tokens ({len(tokens)}), task.reserved_tokens="
            f"{task.reserved_tokens} and {NUM_BYTES if task.kind in BYTE_KINDS else 0} bytes leave nothing to train; "
            f"set {needed} or, to be of use, some thousands."
        )
    return problems


# ---- convert ------------------------------------------------------------------------------------------------


@dataclass
class ConvertTaskConfig(TaskConfig):
    """Settings of task=convert."""

    config: str | None = None
    """Another program's config: a YAML file of axolotl or LLaMA-Factory, a script with a command, or a command itself,
    such as `trl sft --config sft.yaml`."""
    folder: str = place("local", default="outputs/converted")
    """Folder that the experiment is written to, for `--config-dir`."""
    leave: list[str] = field(default_factory=list)
    """Keys of the other config that are left out, `datasets.key` of every entry of a list; the other program's default
    applies. Without them a config whose keys have no equal here is refused."""
    devices: int = number(default=1, at_least=1)
    """Devices of the other program's run, by which its rows of a step are multiplied."""
    format: str | None = field(default=None, metadata={"allowed": tuple(name for name in FORMATS if name != "auto")})
    """Format of the rows (`data.<name>.format`) where the other config does not say it, as TRL's commands."""
    dataset_info: str | None = place("local", default=None)
    """LLaMA-Factory's dataset_info.json; null is the one in `dataset_dir`."""


# ---- report and resume_check --------------------------------------------------------------------------------


@dataclass
class ReportTaskConfig(TaskConfig):
    """Settings of task=report."""

    runs: list[str] = field(default_factory=list, metadata={"place": "folder"})
    """Run folders, folders of runs such as a sweep's, or patterns of either (`outputs/tiny_*`), local or URLs; empty
    takes every run in `output_dir`."""
    baseline: str | None = None
    """Name of the run that the others are compared with; null takes the first."""
    watch: bool = False
    """Whether the page is served at 127.0.0.1, and shows runs as they go on, until Ctrl-C; no file is written."""
    port: int = number(default=6006, at_least=0, at_most=65535)
    """Port of that page; 0 takes a free one. 6006 is TensorBoard's, which `python launch/tpu.py ssh` forwards."""
    seconds: float = number(default=10.0, at_least=1)
    """Seconds after which a browser asks for the page again, and it is built again."""


@dataclass
class ResumeCheckTaskConfig(TaskConfig):
    """Settings of task=resume_check."""

    steps: int = number(at_least=4)
    """Largest number of optimizer steps of every stage, like `trainer.max_stage_steps`; stages that are shorter, or
    made shorter by `trainer.max_stage_steps`, keep their length."""
