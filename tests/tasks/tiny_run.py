"""A run's folder as training and task=export leave it: random adapters over the tiny model, and the merged form."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import ExportTaskConfig
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.export.peft import write_adapter
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.sources.build import describe
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.tasks.export.forms import WRITERS
from tpu_experiments.tasks.export.subject import subject_of

BASE, TOKENIZER = "tpu_experiments/samples/tiny_base", "tpu_experiments/samples/tokenizer"
Make = Callable[..., Config]


def write_run(folder: Path, make_config: Make, *overrides: str) -> Path:
    """Write config.yaml, result.json and adapter/ of a run whose adapters are strong enough to change greedy text."""
    config = make_config("data=sample_chat", "lora=all_linear_r8", *overrides)
    RunFolder(str(folder.parent), folder.name).create(config)
    (folder / "result.json").write_text('{"status": "finished"}')
    source = HuggingFaceModel(config.model, seed=0)
    module, _ = describe(source, lora=config.lora)
    random = torch.Generator().manual_seed(3)
    parts = {name: p for name, p in module.named_parameters() if "lora_" in name}
    write_adapter(
        str(folder / "adapter"),
        parameters={name: torch.randn(p.shape, generator=random) * 0.08 for name, p in parts.items()},
        initial={},
        lora=LoraConfig(r=8, alpha=config.lora.alpha, targets=config.lora.targets),
        base_path=BASE,
        revision=None,
        tokenizer=load_tokenizer(TOKENIZER, revision=None, chat_template_path=None),
    )
    return folder


def write_form(run: Path, make_config: Make, form: str = "merged") -> Path:
    """Write a form of the run as task=export does, without comparing it."""
    task = ExportTaskConfig(name="export", run=str(run), forms=[form])
    subject = subject_of(replace(make_config("task=export", f"task.run={run}"), task=task), task)
    folder = run / "export" / form
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    WRITERS[form](str(folder), subject)
    (folder / "export.json").write_text("{}")
    return folder
