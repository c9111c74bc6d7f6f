"""What answers prompts: the reader of prompts, and the decoder of a model's weights or llama.cpp."""

from torch import nn

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import AnswerTaskConfig, GenerateTaskConfig
from tpu_experiments.export.generation import ends_of
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.denoising import Denoiser
from tpu_experiments.models.passes.generation import Decoder
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.models.sources.isolation import require_left_padding
from tpu_experiments.objectives.base import Computing, model_source, objective_class, objective_of, writes_text
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.tasks.generate.answers import Reader
from tpu_experiments.tasks.generate.llama_cpp import LlamaCpp, gguf_file
from tpu_experiments.tasks.generate.origin import Origin
from tpu_experiments.tasks.generate.prompts import Prompt, ids_of, kind_of
from tpu_experiments.training.batches import load_run_tokenizer


def reader_of(origin: Origin, task: AnswerTaskConfig, *, format: str) -> tuple[Reader, HuggingFaceModel]:
    """Return how prompts are tokenized and answers end, and the source of the model's weights.

    Args:
        format: `task.format`.

    Raises:
        ConfigError: the tokenizer has no chat template, or no bucket leaves room for an answer.
    """
    config = origin.config
    if objective_class(config).denoises:
        require_denoising(origin, task)
    elif not writes_text(config):
        raise ConfigError(
            f"{origin.text} was trained with objective={config.objective.name}; such a model fills masked tokens or "
            "gives a text a label, and writes none; score it with task=evaluate, or load its model/ with transformers."
        )
    tokenizer = load_run_tokenizer(config)
    kind = kind_of(origin, tokenizer, format=format, system=task.system)
    source = model_source(config)
    limit = getattr(source.config, "max_position_embeddings", None)
    vocab_size = int(source.config.vocab_size)

    def ids(prompt: Prompt) -> list[int]:
        return ids_of(prompt, kind=kind, tokenizer=tokenizer, vocab_size=vocab_size)

    ends = ends_of(tokenizer, kind=kind, config=source.config, folder=source.folder)
    at_once = task.tokens_per_call
    if objective_class(config).denoises and isinstance(task, GenerateTaskConfig):
        at_once = task.denoising.block
    return Reader(ids, tokenizer, ends, kind, _buckets(task, limit=limit, tokens_at_once=at_once)), source


def require_denoising(origin: Origin, task: AnswerTaskConfig) -> None:
    """Require the settings of a model of masked diffusion to be those that it can write with.

    Raises:
        ConfigError: another task than task=generate, a GGUF file, or a penalty of earlier tokens.
    """
    what = f"{origin.text} was trained with objective={origin.config.objective.name}"
    if not isinstance(task, GenerateTaskConfig) or task.is_llama_cpp:
        key = "a GGUF file" if task.is_llama_cpp else f"task={task.name}"
        raise ConfigError(f"{what}; {key} is for causal decoders, which write token by token; use task=generate.")
    if task.repetition_penalty != 1 or task.no_repeat_ngram_size:
        raise ConfigError(
            f"{what}, and task.repetition_penalty={task.repetition_penalty:g} "
            f"task.no_repeat_ngram_size={task.no_repeat_ngram_size}; both look at the text before a token, and here "
            "later tokens may be there first; leave them out."
        )


def _buckets(task: AnswerTaskConfig, *, limit: int | None, tokens_at_once: int) -> list[int]:
    """Return the prompt lengths that leave room for the answer.

    Args:
        tokens_at_once: the answer is computed in multiples of this.

    Raises:
        ConfigError: none does.
    """
    more = -(-task.max_new_tokens // tokens_at_once) * tokens_at_once
    fitting = [bucket for bucket in sorted(set(task.buckets)) if limit is None or bucket + more <= limit]
    if not fitting:
        raise ConfigError(
            f"task.buckets={task.buckets} with task.max_new_tokens={task.max_new_tokens}; prompt and answer together "
            f"are longer than the model allows (max_position_embeddings={limit}); use shorter ones."
        )
    return fitting


def decoder_of(
    runtime: Runtime, origin: Origin, source: HuggingFaceModel, *, task: AnswerTaskConfig, num_rows: int, seed: int
) -> Decoder:
    """Load the weights onto the device.

    Args:
        seed: of the command, not of the run: it decides what is sampled.

    Raises:
        ConfigError: they are not of this model, or not whole, or the model does not take padded prompts.
    """
    if isinstance(source, HuggingFaceModel) and source.head == "causal_lm":
        require_left_padding(source)
    module = frozen_of(runtime, origin, source)
    return decoder_over(module, runtime, task=task, num_rows=num_rows, seed=seed)


def denoiser_of(
    runtime: Runtime, origin: Origin, source: HuggingFaceModel, *, task: GenerateTaskConfig, num_rows: int, seed: int
) -> Denoiser:
    """Load the weights of a model of masked diffusion onto the device; arguments and errors as of `decoder_of`."""
    tokenizer = load_run_tokenizer(origin.config)
    return Denoiser(
        frozen_of(runtime, origin, source),
        runtime=runtime,
        choice=task,
        settings=task.denoising,
        mask_id=objective_of(origin.config, Computing(), tokenizer=tokenizer).mask_id,
        num_rows=num_rows,
        max_new_tokens=task.max_new_tokens,
        seed=seed,
    )


def frozen_of(runtime: Runtime, origin: Origin, source: HuggingFaceModel) -> nn.Module:
    """Return the model on the device, its weights frozen."""
    return build_frozen(
        source,
        lora=origin.lora,
        trained=origin.trained,
        place=runtime.place,
        reduced_with_seed=origin.reduced_with_seed,
        origin=origin.text,
    )


def decoder_over(module: nn.Module, runtime: Runtime, *, task: AnswerTaskConfig, num_rows: int, seed: int) -> Decoder:
    """Return the decoder of a module on the device, with the task's settings."""
    return Decoder(
        module,
        runtime=runtime,
        choice=task,
        num_rows=num_rows,
        max_new_tokens=task.max_new_tokens,
        tokens_per_call=task.tokens_per_call,
        seed=seed,
    )


def llama_cpp_of(config: Config, reader: Reader, *, task: AnswerTaskConfig) -> LlamaCpp:
    """Load a GGUF file into llama.cpp.

    Raises:
        ConfigError: there is none, llama.cpp is not installed or refuses it.
    """
    return LlamaCpp(
        gguf_file(task),
        choice=task,
        ends=reader.ends,
        num_slots=reader.buckets[-1] + task.max_new_tokens,
        max_new_tokens=task.max_new_tokens,
        num_threads=config.hw.num_threads,
        seed=config.seed,
    )
