"""Schema of the configuration: the name, type, unit and meaning of every group but model, data and task.

YAML in conf/ owns the values. `register` puts the schemas into Hydra's ConfigStore. This package never imports torch.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.model_schema import DataSourceConfig, LoraConfig, ModelConfig, ShardingConfig
from tpu_experiments.config.places import place
from tpu_experiments.config.start import StartConfig
from tpu_experiments.config.task_schema import (
    DoctorTaskConfig,
    EvaluateTaskConfig,
    GenerateTaskConfig,
    PlanTaskConfig,
    ReportTaskConfig,
    ResumeCheckTaskConfig,
    TaskConfig,
)


@dataclass
class GuardConfig:
    """Reaction to steps whose loss or gradient is not finite, and to losses that jump.

    The update of a step that is not finite is left out on the device, whatever is chosen here; what follows is decided
    when values are read, every `trainer.log_every_steps`.
    """

    action: str = choice("skip", "stop", default="skip")
    """`skip` logs the step with its rows and goes on; `stop` ends the run."""
    max_skipped: int = number(default=3, at_least=0)
    """Steps in a row that may be left out. When more were, and the last one read is among them, the run rolls back to
    the last checkpoint from before and passes over the batches of these steps."""
    max_rollbacks: int = number(default=2, at_least=0)
    """Times a run may roll back; then it stops."""
    before_steps: int = number(default=1, at_least=0)
    """Steps before the first bad one whose batches are passed over as well: the last update that was applied may have
    brought the parameters there (PaLM, arXiv 2204.02311, passes over batches before a spike and during it)."""
    spike_factor: float | None = number(default=3.0, above=1)
    """A loss above this multiple of the median of the last `spike_window` ones of its stage is a spike; null looks for
    none."""
    spike_window: int = number(default=50, at_least=3)
    """Losses that the median is of; there is no spike before there are so many."""
    spike_action: str = choice("warn", "rollback", default="warn")
    """`warn` logs the step with its rows; `rollback` also rolls back to before it and passes over its batch."""


@dataclass
class CanaryConfig:
    """Comparison of the first gradients on several devices with a float32 host reference, before step 1.

    The training program itself runs once on a few short rows, and what it leaves in the optimizer's state is compared
    with what the same step leaves there in plain torch on one CPU device; then everything is put back.
    """

    when: str = choice("auto", "always", "never", default="auto")
    """`auto`: on TPUs, with several devices, and where the reference fits into the host's free memory."""
    max_tokens: int = number(default=512, at_least=8)
    """Tokens of the reference, shared out over the devices."""


@dataclass
class CheckpointConfig:
    """Checkpoints of the run folder."""

    every_steps: int | None = number(default=None, at_least=0)
    """Steps between two checkpoints; null makes about 20, in at least 50 and at most 500 steps. With this and
    `every_minutes` 0 there is one at the end of each stage only."""
    every_minutes: float = number(default=0.0, at_least=0)
    """Minutes of the wall clock after which the next step is followed by a checkpoint (with several processes the next
    step that logs), counted from the checkpoint before; 0 goes by steps alone."""
    keep_last: int = number(default=2, at_least=1)
    """Newest checkpoints kept; older ones are removed after a newer one is complete."""
    keep_every: int = number(default=0, at_least=0)
    """A checkpoint whose step is a multiple of this is never removed; 0 keeps none for its step."""
    keep_best: int = number(default=0, at_least=0)
    """Checkpoints kept for the lowest held-out loss beside the newest; above 0 every evaluation is followed by a
    checkpoint. 0 keeps none for its loss."""
    grace_seconds: float = number(default=20.0, above=0)
    """Seconds after a request to stop in which remote storage is tried (a spot machine of Google Cloud has 30, and the
    end itself takes some): the checkpoint goes to this machine's disk first, and to `output_dir` in the time left."""
    background: bool = True
    """Whether a checkpoint by steps or minutes is written by another thread while training goes on, from a copy in the
    host's memory. The first of a process, and those that end a stage or a run, are waited for."""
    max_copy_gib: float = number(default=4.0, at_least=0)
    """Largest state (parameters and optimizer) that is copied into the host's memory as a whole, so that it can be
    written in the background. A larger one is saved in front of the loop, file by file, and read tensor by tensor on a
    resume: the host then holds a few times `max_shard_gib`, or the largest tensor, where that is more."""
    max_shard_gib: float = number(default=2.0, above=0)
    """Largest file of tensors, of checkpoints and of an exported model, as transformers' `max_shard_size`: a group that
    is larger has several, `parameters-00001-of-00005.safetensors`. One tensor is never divided."""
    prove: bool = True
    """Whether a checkpoint is read back and looked at before it counts: files and tensors as written, parameters
    changed by training, an adapter that does something; and, for the first of a process, the last of a stage and the
    export, held-out rows answered as the live model answers them, bit for bit."""


@dataclass
class PrepareConfig:
    """Preparation of documents as shuffled rows of one length; done once, on a CPU machine."""

    folder: str | None = place("folder", default=None)
    """Where prepared data lies, local or gs://; null is `<output_dir>/prepared`. Its folders are named by a hash of all
    that went in, so several runs and machines share it."""
    engine: str = choice("local", "ray", default="local")
    """`local`: processes of this machine. `ray`: the files of a source are tasks of a Ray cluster (RAY_ADDRESS)."""
    workers: int | None = number(default=None, at_least=1)
    """Processes; null takes one per usable core, and none for less than a few MB."""
    packing: str = choice("best_fit", "pad", "none", default="best_fit")
    """`best_fit`: several documents share a row (arXiv 2404.10830). `pad`: one document a row, padded to its end.
    `none`: one document a row, a batch padded to a multiple of `loader.pad_multiple`; eager runtime only, since every
    length would be another program on XLA."""
    long_documents: str = choice("split", "truncate", "drop", default="split")
    """A document longer than a row is split into several (conversations between turns where that is possible), cut
    (conversations after their last whole answer), or left out. With `packing` pad or none, `split` is not possible."""
    window_tokens: int = number(default=4 * 2**20, at_least=1)
    """Tokens that are packed together and written as one shard; a worker needs some 60 bytes of memory for each."""
    documents: str = choice("keep", "discard", default="discard")
    """`keep` also writes the cleaned documents as parquet (id, source, text or messages)."""
    on_finding: str = choice("stop", "warn", default="stop")
    """What task=train does where the audit has an error, such as held-out documents that another source trains on: stop
    before the first step, or say so and go on."""
    written_epochs: int = number(default=0, at_least=0)
    """Epochs whose rows are also written in shuffled order, for reading from a disk or bucket from start to end."""
    shuffle_passes: int = number(default=2, at_least=1)
    """Times a written epoch is shuffled: two give a uniform permutation (data/store/shuffle.py), one a rough one."""
    shuffle_block_rows: int = number(default=8192, at_least=1)
    """Rows that are in memory and shuffled together in one pass."""


@dataclass
class LoaderConfig:
    """Loading of rows from disk into batches on the device."""

    order: str = choice("permutation", "written", default="permutation")
    """`permutation`: rows are read in a random order that (seed, stage, epoch) decide. `written`: the shuffled epochs
    that `prepare.written_epochs` wrote are read from start to end."""
    loader_prefetch_size: int = number(default=16, at_least=1)
    """Host batches assembled ahead."""
    device_prefetch_size: int = number(default=8, at_least=1)
    """Batches sent to the device ahead, and as many that each transfer thread holds; xla runtime only."""
    host_to_device_transfer_threads: int = number(default=1, at_least=1)
    """Threads that send batches, each with queues of its own of the two sizes above; xla runtime only."""
    read_ahead_mib: int = number(default=64, at_least=1)
    """MiB fetched ahead from a remote folder."""
    cache_gib: float = number(default=20.0, above=0)
    """Largest local copy of a remote folder, in GiB; the oldest part goes first."""
    pad_multiple: int = number(default=64, at_least=1)
    """Batches of `prepare.packing=none` are padded to a multiple of this many tokens."""


@dataclass
class SweepingConfig:
    """Settings that control how the points of a sweep are run."""

    points_at_once: int = number(default=1, at_least=1)
    """Points that run side by side on this host. On a TPU each has one chip to itself, so `hw` is a machine of one chip
    (`hw=v5e1`); on the CPU they share the cores."""
    prune: str = choice("none", "median", default="none")
    """`median` stops a point whose best held-out loss so far is worse than the median of the other points' losses at
    the same step, as Optuna's MedianPruner does. It needs `trainer.eval_every_steps` and the jsonl logger."""
    prune_after_points: int = number(default=3, at_least=1)
    """Other points that must have been evaluated at a step before a point can be stopped there."""
    prune_after_steps: int = number(default=0, at_least=0)
    """Optimizer steps before and at which no point is stopped."""


@dataclass
class ScheduleConfig:
    """Learning rate over the steps of one stage, as a multiple of the peak."""

    name: str = choice("constant", "linear", "cosine", "wsd")
    """`wsd`: warm-up, constant, then linear decay (arXiv 2404.06395)."""
    warmup_steps: int | None = number(default=None, at_least=0)
    """Steps of linear rise from 0 to the peak; null takes 3 % of the stage, at most 1,000."""
    floor: float = number(default=0.0, at_least=0, at_most=1)
    """Multiple of the peak at the end of the decay."""
    decay_fraction: float = number(default=0.2, above=0, at_most=1)
    """Share of the stage's steps that decay; `wsd` only."""


@dataclass
class StageScheduleConfig:
    """Schedule of one stage; null takes the run's own value (`schedule.*`)."""

    name: str | None = choice("constant", "linear", "cosine", "wsd", default=None)
    """Shape of the decay."""
    warmup_steps: int | None = number(default=None, at_least=0)
    """Steps of linear rise from 0 to the peak."""
    floor: float | None = number(default=None, at_least=0, at_most=1)
    """Multiple of the peak at the end of the decay."""
    decay_fraction: float | None = number(default=None, above=0, at_most=1)
    """Share of the stage's steps that decay; `wsd` only."""


@dataclass
class ExitTestConfig:
    """Test that ends a stage early, after every evaluation (`trainer.eval_every_steps`).

    Its loss is the mean over `sources` of each one's held-out loss, nats per token.
    """

    eval_loss: float | None = number(default=None, above=0)
    """Ends the stage once the loss is at most this."""
    patience: int | None = number(default=None, at_least=1)
    """Ends the stage after this many evaluations in a row that were not lower by `min_delta`."""
    min_delta: float = number(default=0.0, at_least=0)
    """What `patience` asks of a loss: lower by more than this than the last that was, nats per token. The best
    evaluation is the lowest, by however little."""
    sources: list[str] = field(default_factory=list)
    """Held-out sources that are looked at, by name; empty takes the stage's own, without replayed ones."""
    ends_with: str = choice("last", "best", default="last")
    """Parameters and optimizer state that the stage ends with: those of its last step, or of its best evaluation."""


@dataclass
class StageConfig:
    """One stage of the curriculum; null takes the run's own value."""

    kind: str = choice("text", "chat", "any", default="any")
    """Takes every selected source of this kind."""
    sources: list[str] = field(default_factory=list)
    """Takes these sources instead, by name; empty goes by `kind`."""
    replay: float = number(default=0.0, at_least=0, below=1)
    """Share of the rows that come from `replay_sources`, exact at every step: of the first n rows floor(n x replay)."""
    replay_sources: list[str] = field(default_factory=list)
    """Sources that are replayed, by name; empty takes those of all stages before that this one does not have."""
    learn: str = choice("answers", "all", default="answers")
    """Tokens in the loss: of conversations the assistant's turns (of texts everything), or every token."""
    steps: int | None = number(default=None, at_least=1)
    """Optimizer steps; at most one of `steps`, `tokens` and `epochs` is set. With none of them a stage passes over its
    rows as often as its data suits: the smallest `data.<name>.epochs` of its sources."""
    tokens: int | None = number(default=None, at_least=1)
    """Tokens to train on, replayed ones and no padding counted: as many steps as make them with rows of mean length."""
    epochs: float | None = number(default=None, above=0)
    """Passes over the stage's own rows."""
    seq_len: int | None = number(default=None, at_least=8, at_most=2**24)
    """Tokens per row."""
    shorter: int = number(default=1, at_least=1)
    """Rows are this many times shorter, and a batch has as many times more of them: the tokens of a step stay."""
    global_batch_rows: int | None = number(default=None, at_least=1, at_most=2**24)
    """Rows per optimizer step over all devices."""
    lr: float | None = number(default=None, above=0)
    """Peak learning rate."""
    schedule: StageScheduleConfig = field(default_factory=StageScheduleConfig)
    """Schedule of this stage, which begins and ends with it."""
    optimizer: str = choice("carry", "fresh", default="carry")
    """`carry` keeps the moments of the stage before, `fresh` starts them at zero."""
    trainable: list[str] = field(default_factory=list)
    """Shell patterns over names of trainable parameters, `*.layers.1?.*` or `*_proj.lora_B`: these alone are updated
    (their moments too), the others stay; empty updates all."""
    exit: ExitTestConfig = field(default_factory=ExitTestConfig)
    """When the stage ends before its last step."""


@dataclass
class CurriculumConfig:
    """Stages in the order they run, keyed by name."""

    name: str = MISSING
    """Name of the curriculum; the file name in conf/curriculum."""
    stages: dict[str, StageConfig] = field(default_factory=dict)
    """A stage for which no source of its kind is selected is left out, and the log says so."""


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
    """Swap point: a class with `scalars`, `text`, `finish` (loggers/base.py)."""
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
