"""What the card of a form says of the run that it is of."""

from typing import Any

from tpu_experiments.config.identity import values_of_run
from tpu_experiments.config.model_schema import has_patterns, ranks_of
from tpu_experiments.export.card import Card, is_hub_id
from tpu_experiments.models.huggingface import HEADS
from tpu_experiments.objectives.base import objective_class
from tpu_experiments.runtime.stacked import is_adapter_part, is_of_linear
from tpu_experiments.storage import paths
from tpu_experiments.tasks.export.forms import Written
from tpu_experiments.tasks.export.subject import Subject
from tpu_experiments.training.card import PIPELINES


def card_of(form: str, subject: Subject, written: Written) -> Card:
    """Return the card; what the run does not know is left out."""
    model, lora = subject.origin.config.model, subject.origin.lora
    run = _values_of_run(subject)
    sources = list(run["data"].values()) if run.get("data_size") == "full" else []
    languages = {source.clean.language for source in sources}
    is_real = model.size == "full" and model.init != "random"
    # A checkpoint of PiSSA is written as B A - B0 A0, of twice its rank.
    parts = 2 if form == "peft" and subject.origin.reduced_with_seed is not None else 1
    kind = objective_class(subject.origin.config)
    use, meaning = kind.lines_of_use(subject.origin.config)
    return Card(
        form=form,
        name=str(run.get("name", subject.origin.config.name)),
        base=subject.base_path,
        is_on_hub=is_real and is_hub_id(subject.base_path),
        revision=model.revision,
        held=model.base,
        double_quant=model.base_double_quant,
        dtype=str(subject.source.dtype if form == "peft" else subject.dtype).removeprefix("torch."),
        runs_code=model.remote_code == "run",
        rank=parts * max(ranks_of(lora), default=0),
        vocab_size=model.vocab_size,
        unfit=_unfit_for_vllm(subject),
        is_dora=lora.dora,
        datasets=[source.path for source in sources if is_hub_id(source.path)],
        # Where one source is not limited to a language, those of the others are not all.
        languages=sorted(name for name in languages if name) if None not in languages else [],
        notes=written.notes,
        auto=HEADS[kind.head].auto.__name__,
        pipeline=PIPELINES[kind.head],
        labels={str(number): label for number, label in (subject.labels or {}).items()},
        use=use,
        meaning=meaning,
    )


def _unfit_for_vllm(subject: Subject) -> str:
    """Return why vLLM does not compute with the adapter as PEFT does; nothing where it does."""
    lora = subject.origin.lora
    if lora.dora:
        return "vLLM has no DoRA"
    if has_patterns(lora):
        return "vLLM scales all adapters by one alpha and rank, and here are several"
    if lora.target_parameters:
        return "vLLM reads adapters of experts in another layout"
    if not all(map(is_adapter_part, subject.origin.trained)):
        return "vLLM loads no modules that were trained whole"
    if not all(map(is_of_linear, subject.origin.trained)) or subject.origin.config.model.vocab_size is not None:
        return "vLLM loads adapters of Linears alone, and here is one of the embedding, or rows of it"
    return ""


def _values_of_run(subject: Subject) -> dict[str, Any]:
    """Return name and data of the run; of an adapter without a run, nothing."""
    if subject.task.run is None:
        return {}
    place = paths.join(subject.task.run, "config.yaml")
    keys = ("name", "data", "data_size")
    return values_of_run(subject.config, text=paths.read_text(place), place=place, keys=keys)
