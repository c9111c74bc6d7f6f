"""Schema of the settings of task=generate; how a token is chosen has the names of transformers' GenerationConfig."""

from dataclasses import dataclass, field

from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.places import place
from tpu_experiments.config.planning import TaskConfig


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
