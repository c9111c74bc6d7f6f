"""Schema of the group `task`: what the command does, and the settings of each task.

How a token is chosen (task=generate) has the names of transformers' GenerationConfig."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from tpu_experiments.config.errors import suggest
from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.places import place


@dataclass
class TaskConfig:
    """Selected task, what the command does."""

    name: str = MISSING
    """Name of the task; a module of tpu_experiments/tasks."""


@dataclass
class SearchConfig:
    """Search space of `explore: search`: every combination of the axes under the configured global batch."""

    axes: dict[str, list[Any]] = field(default_factory=dict)
    """Key or group of the command line to the values it takes, none leaves it alone. A combination that the checks
    refuse is left out, and so are `sharding` where hw.parallel splits nothing, and all values but one of `model.remat`
    and `model.stack_group` where model.stack folds nothing. Where combinations differ in the
    micro-batch alone, none above one that is too large is compiled."""
    prune_above: float = number(default=1.5, above=0)
    """Multiple of a chip's memory: what the formulas put above it is not compiled. They are up to 45 % wrong."""
    table: str | None = place("local", default=None)
    """YAML file that takes the fastest settings of each `model.stack` as lines, as conf/tuned.yaml holds them; null
    writes none."""


@dataclass
class PlanTaskConfig(TaskConfig):
    """Settings of task=plan."""

    method: str = choice("auto", "compiled", "analytic", default="auto")
    """`compiled`: by the TPU's own compiler. `analytic`: from formulas, anywhere. `auto`: the compiler where libtpu is
    installed, else formulas."""
    programs: str = choice("all", "train", default="all")
    """`all` compiles the programs of evaluation and sample as well; `train` counts them only."""
    explore: str = choice("none", "ladder", "search", default="none")
    """`ladder` finds the largest micro-batch that fits. `search` tries the combinations of `search.axes` and writes the
    fastest that fits to best.yaml beside the plan, which task=train takes as +plan=FILE."""
    compare: list[str] = field(default_factory=list)
    """Further machines (names of conf/hw) that the same run is planned for in the same call."""
    compiled_folder: str | None = place("folder", default=None)
    """Where compilations are remembered; null is `<output_dir>/plans/compiled`. The points of a sweep get the command's
    own, so that none compiles what another plan has compiled."""
    workers: int | None = number(default=None, at_least=1)
    """Compilations at once; null goes by the free memory, 6 GiB each, and the cores."""
    search: SearchConfig = field(default_factory=SearchConfig)


CHECKS = (
    "settings",
    "versions",
    "variables",
    "runtime_version",
    "lock_file",
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
"""In the order of the report."""


@dataclass
class DoctorTaskConfig(TaskConfig):
    """Settings of task=doctor."""

    checks: list[str] = field(default_factory=list)
    """Names of the checks that are made; empty makes all of them."""
    json: str | None = place("file", default=None)
    """JSON file that is written as well, local or gs://."""
    timeout_seconds: float = number(default=20.0, above=0)
    """Longest wait for an answer of storage, the Hub or gcloud; all of them are asked at once."""
    device_timeout_seconds: float = number(default=120.0, above=0)
    """Longest wait for the child process that starts the devices, counts them and adds two numbers."""


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


@dataclass
class EvaluateTaskConfig(TaskConfig):
    """Settings of task=evaluate."""

    split: str = choice("test", "evaluation", default="test")
    """Held-out documents that are evaluated; `evaluation` are those that training looks at."""
    run: str | None = place("folder", default=None)
    """Folder of the run whose adapter or model is evaluated, with its own model, LoRA, data and row length; null is the
    run of this very command, `<output_dir>/<name>`."""
    adapter: str | None = place("folder", default=None)
    """Folder of an adapter in PEFT's layout that is evaluated instead of the run's; `none` evaluates the base model
    alone. Neither needs a run."""
    data: str = choice("run", "selected", default="run")
    """With `run`: its own data, or what `data=` selects, of which nothing is known to be unseen."""
    max_documents: int | None = number(default=1000, at_least=1)
    """Documents of each source at most, drawn by `seed`; null takes all."""
    seq_len: int | None = number(default=None, at_least=8, at_most=2**24)
    """Tokens of a row, so the longest context of a token; null is the longest of the run's stages."""
    by: str | None = None
    """Field of the rows, such as `sample_type`, for whose values the same is said one by one; a source whose rows do
    not have it is left out there. The sources are read once more to find the values."""
    documents: str | None = place("file", default=None)
    """JSONL file that the held-out documents are written to as text, for other programs: `source`, and `text` or, of
    conversations up to their last answer, `prompt` and `reference`."""
    resamples: int = number(default=1000, at_least=100)
    """Times that the documents are drawn anew for the intervals."""
    confidence: float = number(default=0.95, above=0, below=1)
    """Share of the resampled values inside an interval."""
    generate: int = number(default=0, at_least=0)
    """Conversations of each chat source whose last answer the model writes, to be compared with the real one (ROUGE,
    exact match); 0 writes none."""
    max_new_tokens: int = number(default=64, at_least=1, at_most=2**24)
    """Tokens of such an answer at most; what is longer of the real one counts as missed."""


@dataclass
class ChoiceConfig:
    """Choice of the next token; steps are applied in the order of the keys, as in transformers."""

    repetition_penalty: float = number(default=1.0, above=0)
    """Logits of tokens that occurred are divided by it where positive, else multiplied (arXiv 1909.05858); 1 is off."""
    no_repeat_ngram_size: int = number(default=0, at_least=0)
    """No run of this many tokens occurs twice in prompt and answer together; 0 is off."""
    do_sample: bool = False
    """Whether a token is drawn; else the likeliest one is taken, and the three keys below mean nothing."""
    temperature: float = number(default=1.0, above=0)
    """Divides the logits."""
    top_k: int = number(default=50, at_least=0)
    """Draw among so many likeliest tokens; 0 is all of them."""
    top_p: float = number(default=1.0, above=0, at_most=1)
    """Draw among the likeliest tokens that together have this probability (arXiv 1904.09751); 1 is all of them."""


@dataclass
class GenerateTaskConfig(ChoiceConfig, TaskConfig):
    """Settings of task=generate."""

    run: str | None = place("folder", default=None)
    """Folder of a run, local or gs://: its model, tokenizer, chat format and what it trained. null is `model`."""
    weights: str = choice("auto", "export", "checkpoint", "base", default="auto")
    """Of that run: `export` is what it wrote at its end, `checkpoint` the newest one, `auto` the export where there is
    one, `base` what it began with."""
    adapter: str | None = place("folder", default=None)
    """Folder of a PEFT LoRA adapter, local or gs://, instead of what `weights` says."""
    base: str | None = place("model", default=None)
    """Folder or Hub id of the base model, where it is not where the run had it."""
    dtype: str | None = field(default=None, metadata={"allowed": ("bfloat16", "float32")})
    """Data type of weights and arithmetic; null is the model's."""
    prompt: str | None = None
    """One prompt. Without it and `prompts_file`, prompts are read from the terminal until `exit` or `quit`."""
    input: str | None = None
    """What the instruction in `prompt` is about; joined to it as rows of `instruction` data are."""
    system: str | None = None
    """System text before every prompt that has none of its own; conversations only."""
    prompts_file: str | None = place("file", default=None)
    """.txt, a prompt a line, or .jsonl, an object a line with `prompt`, `messages`, or `instruction` and `input`."""
    output: str | None = place("file", default=None)
    """JSONL file that is made, local or gs://: prompt, text, num_tokens, finished."""
    format: str = choice("auto", "chat", "text", default="auto")
    """`chat`: a prompt is a user's turn in the chat format. `text`: it is continued as it is. `auto`: `chat` where the
    run trained on conversations, and without a run where the tokenizer has a chat template."""
    max_new_tokens: int = number(default=128, at_least=1, at_most=2**24)
    """Tokens written at most."""
    num_return_sequences: int = number(default=1, at_least=1)
    """Answers drawn for each prompt."""
    buckets: list[int] = field(default_factory=list)
    """Tokens that prompts are padded to: each takes the smallest that holds it, and two programs are compiled for each
    that is used."""
    batch_rows: int = number(default=8, at_least=1)
    """Prompts of a file that are answered at once, at most."""
    tokens_per_call: int = number(default=8, at_least=1)
    """Tokens that one call of a program writes; then the host looks whether all rows have ended."""


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
    if task.run is None and task.weights != "auto":
        problems.append(f"task.weights={task.weights} without task.run=; name the folder of a run.")
    if task.adapter is not None and task.weights != "auto":
        problems.append(f"task.weights={task.weights} with task.adapter=; each says what to write with; leave one out.")
    if task.num_return_sequences > 1 and not task.do_sample:
        problems.append(
            f"task.num_return_sequences={task.num_return_sequences} with task.do_sample=false; the likeliest tokens "
            "are one answer; set task.do_sample=true."
        )
    if not task.buckets or min(task.buckets) < 1:
        problems.append(f"task.buckets={task.buckets}; prompts are padded to one of them; write [128] or more.")
    return problems


@dataclass
class ReportTaskConfig(TaskConfig):
    """Settings of task=report."""

    runs: list[str] = field(default_factory=list, metadata={"place": "folder"})
    """Run folders, folders of runs such as a sweep's, or patterns of either (`outputs/tiny_*`), local or URLs; empty
    takes every run in `output_dir`."""
    baseline: str | None = None
    """Name of the run that the others are compared with; null takes the first."""


@dataclass
class ResumeCheckTaskConfig(TaskConfig):
    """Settings of task=resume_check."""

    steps: int = number(at_least=4)
    """Optimizer steps that every stage of the curriculum is cut to, as `trainer.max_stage_steps` does; a stage that is
    shorter, or that `trainer.max_stage_steps` ends before, keeps its length."""
