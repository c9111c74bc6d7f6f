"""Schema of the whole configuration: every group's name, type, unit and meaning; YAML owns the values.

`register` puts the schemas into Hydra's ConfigStore. This package never imports torch.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from tpu_experiments.config.checkpointing import CheckpointConfig
from tpu_experiments.config.doctoring import DoctorTaskConfig
from tpu_experiments.config.evaluating import EvaluateTaskConfig
from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.generating import GenerateTaskConfig
from tpu_experiments.config.guarding import CanaryConfig, GuardConfig
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.places import place
from tpu_experiments.config.planning import PlanTaskConfig, TaskConfig
from tpu_experiments.config.preparing import LoaderConfig, PrepareConfig
from tpu_experiments.config.reporting import ReportTaskConfig
from tpu_experiments.config.resuming import ResumeCheckTaskConfig
from tpu_experiments.config.sources import (
    DataSourceConfig,
    LoraConfig,
    ModelConfig,
    ShardingConfig,
)
from tpu_experiments.config.stages import CurriculumConfig, ScheduleConfig
from tpu_experiments.config.start import StartConfig
from tpu_experiments.config.sweeping import SweepingConfig


@dataclass
class OptimConfig:
    """Settings common to all optimizers."""

    _target_: str = MISSING
    """Swap point: class with `init(params)` and `update(params, grads, state, lr)`."""
    lr: float | None = number(default=None, above=0)
    """Peak learning rate; null takes `model.lr`."""
    weight_decay: float = number(default=0.0, at_least=0)
    """Decoupled weight decay per unit of learning rate, on matrices only."""
    clip_norm: float | None = number(default=1.0, above=0)
    """Largest global gradient norm, applied after the reduction over devices; null does not clip."""


@dataclass
class AdamWConfig(OptimConfig):
    """AdamW (arXiv 1711.05101), moments in float32."""

    _target_: str = "tpu_experiments.optim.adamw.AdamW"
    beta1: float = number(default=0.9, at_least=0, below=1)
    """Decay of the first moment."""
    beta2: float = number(default=0.95, at_least=0, below=1)
    """Decay of the second moment."""
    eps: float = number(default=1e-8, above=0)
    """Added to the root of the second moment."""


@dataclass
class AdafactorConfig(OptimConfig):
    """Adafactor (arXiv 1804.04235) with an external learning rate and no first moment."""

    _target_: str = "tpu_experiments.optim.adafactor.Adafactor"
    beta2_decay: float = number(default=-0.8, below=0)
    """Second moments decay with 1 - step^beta2_decay."""
    eps1: float = number(default=1e-30, above=0)
    """Added to squared gradients."""
    eps2: float = number(default=1e-3, above=0)
    """Smallest root mean square of a parameter in the relative step size."""
    clip_threshold: float = number(default=1.0, above=0)
    """Largest root mean square of an update."""


@dataclass
class ProfileConfig:
    """Profile of some steps, for TensorBoard's profiler (xprof)."""

    start_step: int | None = number(default=None, at_least=1)
    """First step that is profiled, counted from 1 over the whole run; null profiles none. Step 1 compiles."""
    num_steps: int = number(default=3, at_least=1)
    """Steps that are profiled; fewer where the stage ends before."""


@dataclass
class TrainerConfig:
    """Settings of the training loop."""

    _target_: str = "tpu_experiments.training.trainer.Trainer"
    """Swap point: a subclass of Trainer."""
    seq_len: Any = number(default="auto", at_least=8, at_most=2**24, word="auto")  # noqa: RUF009 (OmegaConf 2.3 merges no int | str)
    """Tokens per row. `auto` holds 95 % of the documents: that percentile of the prepared data, up to a multiple of
    128, at most `model.row_tokens`; a run that goes on keeps the length it began with."""
    global_batch_rows: int | None = number(default=None, at_least=1, at_most=2**24)
    """Rows per optimizer step over all devices; null makes steps of `model.step_tokens`, or of fewer where an epoch
    would have less than 40 of them. A run that goes on keeps the number it began with."""
    micro_batch_rows: int | None = number(default=None, at_least=1, at_most=2**24)
    """Rows per device that pass through the model at once; null takes as many of a device's rows as make 8,192 tokens
    or fewer. What is left of the global batch is accumulated inside the step."""
    loss_chunk_tokens: int | None = number(default=2048, at_least=1)
    """Tokens of a device whose logits exist at once, the same positions of each of its rows: the loss holds this x
    vocabulary numbers. null makes all logits of a micro-batch at once, as a model does whose head is more than a matrix
    product."""
    log_every_steps: int | None = number(default=None, at_least=1)
    """Steps between two log records; only then is a value read from the device. null makes about 20 records, at least
    one in 100 steps."""
    norms_every_steps: int = number(default=50, at_least=0)
    """Steps between two records of the gradient's and the update's norm for each kind of module, written with the next
    log record; 0 computes none."""
    eval_every_steps: int | None = number(default=None, at_least=0)
    """Steps between two evaluations; null makes about ten, at least one in 1,000 steps and, where questions are asked,
    at most one in 50; 0 evaluates before the first and after the last step only."""
    max_eval_rows: int = number(default=256, at_least=1)
    """Held-out rows that are evaluated at most, over all sources."""
    max_stage_steps: int | None = number(default=None, at_least=1)
    """Ends every stage after this many steps at most, for trials; null runs each to its end."""
    plan_check: str = choice("refuse", "warn", "off", default="refuse")
    """What happens before the start when a plan of the same programs, or what formulas state exactly, says that the run
    does not fit into the chips of `hw`: it is refused, it is logged, or nobody looks."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Steps that are profiled into `<run>/profile`."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """Steps that are not finite, and losses that jump."""
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    """First gradients on several devices against a reference on the host."""
    trace_every_steps: int | None = number(default=None, at_least=1)
    """Mean number of calls from one trace of a program to the next (xla runtime); calls between them replay its
    recorded graph. 1 traces every call and waits for nothing. null chooses: 1 where the trainer, optimizer, model or a
    plugin is not of this project and for folded layers on a TPU, 200 for unrolled layers and on the CPU device."""
    on_recompile: str = choice("error", "warn", default="error")
    """When a program is compiled that the run was not known to need (xla runtime): `error` saves a checkpoint and stops
    with what changed, `warn` says it once and goes on."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of a trainer of your own."""


@dataclass
class SampleConfig:
    """Text generated before, during and after training."""

    prompt: str | None = None
    """Prompt; rendered with the chat template when a chat source is selected. null takes `data.<name>.prompt` of the
    first chat source, else of the first source, so that it is in the language of the data."""
    prompts: list[str] = field(default_factory=list)
    """Further prompts, answered beside it as rows of one batch."""
    at: str = choice("ends", "evaluations", default="evaluations")
    """`ends` of the training only, or at every evaluation as well."""
    max_new_tokens: int = number(default=48, at_least=0, at_most=2**24)
    """Tokens written; 0 writes no sample."""
    temperature: float = number(default=0.7, at_least=0)
    """Divides the logits before a token is drawn, seeded by `seed`; 0 takes the likeliest token."""
    window: int = number(default=128, at_least=16, at_most=2**24)
    """Tokens of prompt and answer together; one compiled program of this length."""

    @property
    def all_prompts(self) -> list[str]:
        """Return `prompt` and the further prompts."""
        assert self.prompt is not None, "to_config gives it"
        return [self.prompt, *self.prompts]


@dataclass
class LoggerConfig:
    """One metric logger and its options."""

    _target_: str = MISSING
    """Swap point: a class with `scalars`, `text`, `finish` (logging/base.py)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that class."""


@dataclass
class Config:
    """Configuration of one run."""

    name: str | None = None
    """Name of the run and of its folder; null derives it from model, data and hw."""
    seed: int = number(default=0, at_least=0)
    """Seed of data order, initialisation and dropout."""
    output_dir: str = place("folder", default="outputs")
    """Folder that holds the run folders."""
    data_size: str = choice("full", "sample", default="full")
    """`sample` reads every source's shipped sample instead of its path."""
    tuned: str = choice("auto", "off", "settled", default="auto")
    """`auto`: settings that change only speed and memory (layers folded or not, remat, sharding, rows at once) come
    from conf/tuned.yaml, where it has a plan of this model on this machine with rows as long and a rank as high, and
    where the command does not set one of them to something else. `off`: they stay as configured. A run's own
    config.yaml says `settled`."""
    plugins: list[str] = field(default_factory=list)
    """Import prefixes, beside tpu_experiments, that `_target_` may name."""
    task: TaskConfig = MISSING
    model: ModelConfig = MISSING
    data: dict[str, DataSourceConfig] = field(default_factory=dict)
    hw: HwConfig = MISSING
    curriculum: CurriculumConfig = MISSING
    lora: LoraConfig = MISSING
    optim: OptimConfig = MISSING
    schedule: ScheduleConfig = MISSING
    sharding: ShardingConfig = MISSING
    trainer: TrainerConfig = MISSING
    start: StartConfig = field(default_factory=StartConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    sweeping: SweepingConfig = field(default_factory=SweepingConfig)
    logger: dict[str, LoggerConfig] = field(default_factory=dict)

    @property
    def questions(self) -> dict[str, tuple[str, str]]:
        """Return key and file of every question set by its name, in the order of the sources."""
        return {
            each: (f"data.{name}.questions.{each}", path)
            for name, source in self.data.items()
            for each, path in source.questions.items()
        }


GROUPS: dict[str, dict[str, type]] = {
    "task": {
        "base_plan": PlanTaskConfig,
        "base_resume_check": ResumeCheckTaskConfig,
        "base_generate": GenerateTaskConfig,
        "base_report": ReportTaskConfig,
        "base_doctor": DoctorTaskConfig,
        "base_evaluate": EvaluateTaskConfig,
        "base": TaskConfig,
    },
    "model": {"base": ModelConfig},
    "hw": {"base": HwConfig},
    "curriculum": {"base": CurriculumConfig},
    "lora": {"base": LoraConfig},
    "optim": {"base_adamw": AdamWConfig, "base_adafactor": AdafactorConfig, "base": OptimConfig},
    "schedule": {"base": ScheduleConfig},
    "sharding": {"base": ShardingConfig},
    "trainer": {"base": TrainerConfig},
}


def register() -> None:
    """Put every schema into Hydra's ConfigStore, so that a YAML file can extend it by `defaults: [base, _self_]`."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config, provider="tpu_experiments")
    launcher = {"_target_": "hydra_plugins.points.PointLauncher"}
    store.store(group="hydra/launcher", name="points", node=launcher, provider="tpu_experiments")
    for group, schemas in GROUPS.items():
        for name, node in schemas.items():
            store.store(group=group, name=name, node=node, provider="tpu_experiments")
