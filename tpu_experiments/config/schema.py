"""Schema of the configuration: name, type, unit and meaning of every key of a run.

Models, adapters and sharding (model_schema.py), data (data_schema.py), objectives (objectives/), hw, start and task
have modules of their own. Values are set in conf/*.yaml; `register` puts the schemas into Hydra's ConfigStore. This
package never imports torch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from tpu_experiments.config.data_schema import DataSourceConfig, LoaderConfig, PrepareConfig
from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.model_schema import LoraConfig, ModelConfig, ShardingConfig
from tpu_experiments.config.objectives import OBJECTIVES
from tpu_experiments.config.objectives.base import ObjectiveConfig, OwnObjectiveConfig
from tpu_experiments.config.places import place
from tpu_experiments.config.rollout_schema import RolloutConfig
from tpu_experiments.config.start import StartConfig
from tpu_experiments.config.task_schema import (
    CertifyTaskConfig,
    ConvertTaskConfig,
    DoctorTaskConfig,
    EvaluateTaskConfig,
    ExportTaskConfig,
    GenerateTaskConfig,
    PackTaskConfig,
    PlanTaskConfig,
    PrepareTaskConfig,
    QuantizeTaskConfig,
    ReportTaskConfig,
    ResumeCheckTaskConfig,
    ServeTaskConfig,
    TaskConfig,
    TokenizerTaskConfig,
)

# ---- guard and canary ---------------------------------------------------------------------------------------


@dataclass
class GuardConfig:
    """Reaction to steps with a NaN or infinite loss or gradient, and to loss spikes.

    The device never applies the update of a step that is not finite, whatever is set here. The guard decides what
    follows when values are read, every `trainer.log_every_steps`. Gradients that overflow because of the loss scale of
    `model.dtype=float16` are logged and counted as skipped, and nothing else follows from them.
    """

    action: str = choice("skip", "stop", default="skip")
    """Reaction to a step that is not finite: `skip` logs it with its rows and continues; `stop` ends the run."""
    max_skipped: int = number(default=3, at_least=0)
    """Consecutive steps without an update that are tolerated. If there are more, up to the last step read, the run
    rolls back to the last checkpoint before them and skips their batches."""
    max_rollbacks: int = number(default=2, at_least=0)
    """Largest number of rollbacks of a run; where another one would be due, the run stops."""
    before_steps: int = number(default=1, at_least=0)
    """Steps before the first bad one whose batches are skipped as well, since the last applied update may have caused
    the problem (PaLM, arXiv 2204.02311, skips batches before and during a spike)."""
    spike_factor: float | None = number(default=3.0, above=1)
    """Multiple of the median of the stage's last `spike_window` losses above which a loss is a spike; null detects
    none."""
    spike_window: int = number(default=50, at_least=3)
    """Losses in the median; no spike is detected before there are that many."""
    spike_action: str = choice("warn", "rollback", default="warn")
    """`warn` logs a spike's step with its rows; `rollback` also rolls back to before it and skips its batch."""


@dataclass
class CanaryConfig:
    """Comparison of the loaded model with transformers', and of the devices with the host, before the first step.

    Loaded model: logits of a checkpoint as it is loaded here and by transformers, on the host. Held-out losses: the
    evaluation program itself runs on a few short rows, on one device or several, in every life of a run. First
    gradients: on several devices the training program itself runs once, on as few, and the resulting optimizer state is
    compared; then parameters and state are restored.
    """

    when: str = choice("auto", "always", "never", default="auto")
    """`auto`: the loaded model of every checkpoint; losses and gradients on TPUs, if the host's model fits into its
    free memory. `always`: on devices of any kind. `never`: none of them."""
    max_tokens: int = number(default=512, at_least=8)
    """Tokens of the host's step, divided among the devices, and of its held-out rows. The first row is longer where the
    model's sliding window asks for it."""


# ---- checkpoints --------------------------------------------------------------------------------------------


@dataclass
class CheckpointConfig:
    """When checkpoints are written, which are kept, and how they are verified."""

    every_steps: int | None = number(default=None, at_least=0)
    """Steps between two checkpoints; null derives it from the length of the run (about 20 checkpoints, 50 to 500 steps
    apart). With this and `every_minutes` 0, checkpoints are written only at the end of each stage."""
    every_minutes: float = number(default=0.0, at_least=0)
    """Minutes since the last checkpoint after which the next step (with several processes the next step that logs) is
    followed by another; 0 disables the clock."""
    keep_last: int = number(default=2, at_least=1)
    """Newest checkpoints kept; older ones are removed after a newer one is complete."""
    keep_every: int = number(default=0, at_least=0)
    """Checkpoints whose step is a multiple of this are never removed; 0 keeps none for its step."""
    keep_best: int = number(default=0, at_least=0)
    """Checkpoints with the lowest held-out loss that are kept besides the newest; above 0 every evaluation is followed
    by a checkpoint. 0 keeps none for its loss."""
    grace_seconds: float = number(default=20.0, above=0)
    """Seconds after a request to stop within which remote storage is tried. The checkpoint is written to the local disk
    first, then uploaded to `output_dir` in the remaining time. A spot VM of Google Cloud has 30 s, of which shutting
    down takes some."""
    background: bool = True
    """Whether checkpoints due by steps or minutes are written by a background thread from a copy in host memory, while
    training continues. The first of a process and those that end a stage or the run always block training."""
    max_copy_gib: float = number(default=4.0, at_least=0)
    """Largest state (parameters and optimizer), in GiB, that is copied to host memory as a whole, which background
    saves need. A larger state blocks training, is saved file by file, and is read tensor by tensor on a resume; the
    host then holds a few times `max_shard_gib`, or the largest tensor if that is more."""
    max_shard_gib: float = number(default=2.0, above=0)
    """Largest file of tensors, in GiB, in checkpoints and exported models, like transformers' `max_shard_size`. A
    larger group has several files, `parameters-00001-of-00005.safetensors`; a tensor is never split."""
    prove: bool = True
    """Whether a checkpoint is read back and verified before it counts: files and tensors equal what was written,
    training changed the parameters, and an adapter has an effect. For the first checkpoint of a process, the last of a
    stage and the export, held-out rows must also have the live model's loss, bit for bit."""


# ---- sweeps -------------------------------------------------------------------------------------------------


@dataclass
class SweepingConfig:
    """Settings that control how the points of a sweep are run."""

    engine: str = choice("local", "ray", "sky", default="local")
    """`local`: processes of this machine. `ray`: each point is a task of the Ray cluster at RAY_ADDRESS. `sky`: each is
    a managed job of SkyPilot, on a machine that it rents. Plans are always made on this machine."""
    points_at_once: int = number(default=1, at_least=1)
    """Points that run in parallel. `local`: on a TPU each point has one chip to itself, so `hw` must be a machine of
    one chip (`hw=v5e1`); on the CPU they share the cores. `ray`: each takes the chips of `hw` on one node, or one CPU.
    `sky`: the largest number of machines rented at a time."""
    pack: str = "off"
    """`off` starts a process for each point. A number trains up to as many points in one process and one program, which
    loads the base and compiles once; each point has the folder and the losses that it would have alone. `auto` takes as
    many as fit the chips, at most eight. Together are points that differ in rank, alpha, scaling, dropout and start of
    the adapter, `optim`, `schedule` and `seed` alone; what separates others is said. Engine `local`."""
    max_usd: float | None = number(default=None, above=0)
    """Dollars at which the sweep is stopped, as by Ctrl-C: the cost of this command's points from their starts on,
    waiting for a node or machine included, at the price on demand. With `sky` each machine ends its run by itself too,
    at the hours that the rest pays for. Null sets no limit."""
    prune: str = choice("none", "median", default="none")
    """`median` stops a point whose best held-out loss so far is worse than the median of the other points' losses at
    the same step, as Optuna's MedianPruner does. It needs `trainer.eval_every_steps` and the jsonl logger."""
    prune_after_points: int = number(default=3, at_least=1)
    """Other points that must have been evaluated at a step before a point can be stopped there."""
    prune_after_steps: int = number(default=0, at_least=0)
    """Optimizer steps up to which no point is stopped, this one included."""


# ---- schedule and curriculum --------------------------------------------------------------------------------


SHAPES = ("constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "wsd")
"""Schedules after the warm-up."""
DECAY_SHAPES = ("linear", "cosine", "1-sqrt")


@dataclass
class ScheduleConfig:
    """Learning rate over the steps of one stage, as a multiple of the peak."""

    name: str = choice(*SHAPES)
    """Shape after the warm-up. `wsd`: constant, then a decay (warmup-stable-decay, arXiv 2404.06395)."""
    warmup_steps: int | None = number(default=None, at_least=0)
    """Steps of linear rise from 0 to the peak; null takes `warmup_ratio`, and without one 3 % of the stage, at most
    1,000 steps."""
    warmup_ratio: float | None = number(default=None, at_least=0, below=1)
    """Share of the stage's steps that rise, rounded up, in the place of `warmup_steps`."""
    floor: float = number(default=0.0, at_least=0, at_most=1)
    """Multiple of the peak at the end of the decay."""
    min_lr: float | None = number(default=None, at_least=0)
    """Learning rate at the end of the decay, in the place of `floor`; at most the peak."""
    decay_fraction: float = number(default=0.2, above=0, at_most=1)
    """Share of the stage's steps that decay; `wsd` only."""
    decay_shape: str = choice(*DECAY_SHAPES, default="linear")
    """Shape of the decay; `wsd` only. `1-sqrt` falls by the root of the decay's progress (arXiv 2405.18392)."""
    cycles: int = number(default=2, at_least=1)
    """Cosines, each from the peak on; `cosine_with_restarts` only."""
    power: float = number(default=1.0, above=0)
    """Exponent of what is left of the decay; `polynomial` only."""
    timescale: int | None = number(default=None, at_least=1)
    """Steps t in peak x sqrt(t / (t + steps after the warm-up)); null takes the warm-up's steps + 1, or 10,000 without
    a warm-up. `inverse_sqrt` only."""


@dataclass
class StageScheduleConfig:
    """Schedule of one stage; null takes the run's own value (`schedule.*`)."""

    name: str | None = choice(*SHAPES, default=None)
    """Shape of the decay."""
    warmup_steps: int | None = number(default=None, at_least=0)
    """Steps of linear rise from 0 to the peak; in the place of the run's `warmup_ratio` too."""
    warmup_ratio: float | None = number(default=None, at_least=0, below=1)
    """Share of the stage's steps that rise; in the place of the run's `warmup_steps` too."""
    floor: float | None = number(default=None, at_least=0, at_most=1)
    """Multiple of the peak at the end of the decay; in the place of the run's `min_lr` too."""
    min_lr: float | None = number(default=None, at_least=0)
    """Learning rate at the end of the decay; in the place of the run's `floor` too."""
    decay_fraction: float | None = number(default=None, above=0, at_most=1)
    """Share of the stage's steps that decay; `wsd` only."""
    decay_shape: str | None = choice(*DECAY_SHAPES, default=None)
    """Shape of the decay; `wsd` only."""
    cycles: int | None = number(default=None, at_least=1)
    """Cosines, each from the peak on; `cosine_with_restarts` only."""
    power: float | None = number(default=None, above=0)
    """Exponent of what is left of the decay; `polynomial` only."""
    timescale: int | None = number(default=None, at_least=1)
    """Steps after which the rate has fallen to 0.71 of the peak; `inverse_sqrt` only."""


@dataclass
class ExitTestConfig:
    """Early stopping of a stage, tested after every evaluation (`trainer.eval_every_steps`).

    The tested loss is the mean of the held-out losses of `sources`, in nats per token.
    """

    eval_loss: float | None = number(default=None, above=0)
    """Loss in nats per token at or below which the stage ends; null does not test it."""
    patience: int | None = number(default=None, at_least=1)
    """Consecutive evaluations without an improvement by more than `min_delta` after which the stage ends; null does not
    test it."""
    min_delta: float = number(default=0.0, at_least=0)
    """Decrease, in nats per token, that counts as an improvement for `patience`, relative to the last improvement. The
    best evaluation is the lowest, however small the difference."""
    sources: list[str] = field(default_factory=list)
    """Held-out sources that are averaged, by name; empty takes the stage's own, without replayed ones."""
    ends_with: str = choice("last", "best", default="last")
    """Parameters and optimizer state at the end of the stage: those of its last step, or of its best evaluation."""


@dataclass
class StageConfig:
    """One stage of the curriculum; null takes the run's own value."""

    kind: str = choice("text", "chat", "any", default="any")
    """Kind of the selected sources that the stage trains on."""
    sources: list[str] = field(default_factory=list)
    """Sources that the stage trains on, by name; empty selects them by `kind`."""
    replay: float = number(default=0.0, at_least=0, below=1)
    """Share of the rows that come from `replay_sources`, exact at every step: floor(n x replay) of the first n rows."""
    replay_sources: list[str] = field(default_factory=list)
    """Sources that are replayed, by name; empty takes those of all earlier stages except this stage's own."""
    learn: str = choice("answers", "all", default="answers")
    """Tokens in the loss. `answers`: assistant turns of conversations, and all tokens of texts. `all`: every token."""
    steps: int | None = number(default=None, at_least=1)
    """Optimizer steps; at most one of `steps`, `tokens`, `tokens_per_parameter` and `epochs` may be set. Without any,
    the number of epochs is the smallest `data.<name>.epochs` of the stage's sources."""
    tokens: int | None = number(default=None, at_least=1)
    """Tokens to train on, with replayed ones and without padding; converted to steps by the mean length of the rows."""
    tokens_per_parameter: float | None = number(default=None, above=0)
    """The same as a multiple of the model's parameters, without adapters: about 20 is what a computing budget is best
    spent on (Chinchilla, arXiv 2203.15556)."""
    epochs: float | None = number(default=None, above=0)
    """Passes over the stage's own rows."""
    seq_len: int | None = number(default=None, at_least=8, at_most=2**24)
    """Tokens per row."""
    shorter: int = number(default=1, at_least=1)
    """Factor by which rows are shorter and batches have more rows, so that a step has the same number of tokens."""
    global_batch_rows: int | None = number(default=None, at_least=1, at_most=2**24)
    """Rows per optimizer step over all devices."""
    lr: float | None = number(default=None, above=0)
    """Peak learning rate."""
    weight_decay: float | None = number(default=None, at_least=0)
    """Weight decay per unit of learning rate, in the place of `optim.weight_decay`; the stages share one program."""
    schedule: StageScheduleConfig = field(default_factory=StageScheduleConfig)
    """Learning-rate schedule over the steps of this stage."""
    optimizer: str = choice("carry", "fresh", default="carry")
    """`carry` keeps the optimizer's moments from the stage before, `fresh` resets them to zero."""
    trainable: list[str] = field(default_factory=list)
    """Shell patterns over the names of trainable parameters, such as `*.layers.1?.*` or `*_proj.lora_B`. Only matching
    parameters and their moments are updated; empty updates all."""
    exit: ExitTestConfig = field(default_factory=ExitTestConfig)
    """Early stopping of the stage."""


@dataclass
class CurriculumConfig:
    """Stages in the order they run, keyed by name."""

    name: str = MISSING
    """Name of the curriculum; the file name in conf/curriculum."""
    stages: dict[str, StageConfig] = field(default_factory=dict)
    """Settings of each stage by name; a stage whose kind no selected source has is left out, and this is logged."""


# ---- optimizer ----------------------------------------------------------------------------------------------


@dataclass
class OptimConfig:
    """Settings common to all optimizers."""

    _target_: str = MISSING
    """Swap point: class with `init` and `update` (tpu_experiments/optim/base.py)."""
    lr: float | None = number(default=None, above=0)
    """Peak learning rate; null takes `model.lr`."""
    weight_decay: float = number(default=0.0, at_least=0)
    """Decoupled weight decay per unit of learning rate, on matrices only, embeddings included (see `no_decay`)."""
    clip_norm: float | None = number(default=1.0, above=0)
    """Global gradient norm above which gradients are scaled down, after the sum over devices; null does not clip."""
    b_lr_ratio: float = number(default=1.0, above=0)
    """Learning rate of every adapter's B over that of A (LoRA+, arXiv 2402.12354); weight decay of B is scaled too."""
    scale_lr_ratio: float = number(default=0.01, above=0)
    """Learning rate of the scales of `model.linear=lr_qat` over that of A (LR-QAT's authors: 1e-5 and 1e-3)."""
    no_decay: list[str] = field(default_factory=list)
    """Shell patterns over the names of trainable parameters, such as `*embed_tokens*`, of which matching matrices have
    no weight decay either. Each must match a parameter, and a kind of module in all layers."""
    ema: float = number(default=0.0, at_least=0, below=1)
    """Decay of a moving average of the parameters, lower in the first steps (optim/ema.py): 0.9999 averages about
    10,000 steps, 0 keeps none. Evaluations, samples and the export are of the average; it takes 4 bytes a parameter."""

    @property
    def is_averaged(self) -> bool:
        """Return whether evaluations, samples and the export are of averages of the parameters."""
        return self.ema > 0 or self._target_ == ScheduleFreeAdamWConfig._target_


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


BLOCK = 256
"""Elements of an 8-bit moment that share one scale."""
MIN_ELEMENTS = 4096
"""Elements of a parameter, of one layer in a stack, below which its moments stay in float32."""


@dataclass
class AdamW8bitConfig(AdamWConfig):
    """AdamW with moments of 8 bits in blocks of 256 (arXiv 2110.02861); below 4,096 elements in float32."""

    _target_: str = "tpu_experiments.optim.adamw8bit.AdamW8bit"


@dataclass
class ScheduleFreeAdamWConfig(OptimConfig):
    """Schedule-free AdamW (arXiv 2405.15682): a constant learning rate after its warm-up, and an average of the steps.

    Evaluations, samples and the export are of the average."""

    _target_: str = "tpu_experiments.optim.schedule_free.ScheduleFreeAdamW"
    beta1: float = number(default=0.9, above=0, below=1)
    """Share of the average in the point that gradients are taken at."""
    beta2: float = number(default=0.999, above=0, below=1)
    """Decay of the second moment."""
    eps: float = number(default=1e-8, above=0)
    """Added to the root of the second moment."""


@dataclass
class MuonConfig(AdamWConfig):
    """Muon for the matrices of layers and adapters; AdamW, of the other settings here, for all other parameters."""

    _target_: str = "tpu_experiments.optim.muon.Muon"
    momentum: float = number(default=0.95, at_least=0, below=1)
    """Decay of the momentum of a matrix, in float32."""
    nesterov: bool = True
    """Whether the step is that of the momentum after the next one."""
    ns_steps: int = number(default=5, at_least=1, at_most=99)
    """Newton-Schulz iterations that make the momentum orthogonal, three matrix products each."""
    ns_dtype: str = choice("bfloat16", "float32", default="bfloat16")
    """Type of these products; bfloat16 is that of torch.optim.Muon."""
    adjust_lr_fn: str = choice("match_rms_adamw", "original", default="match_rms_adamw")
    """Factor of the learning rate of a matrix, as in torch.optim.Muon: 0.2 sqrt(max(rows, columns)), with which a step
    is about as long as AdamW's, so that `lr` is AdamW's; or sqrt(max(1, rows / columns)), the author's."""
    adamw: list[str] = field(default_factory=list)
    """Shell patterns over the names of trainable parameters, such as `*.router.weight`, of which AdamW updates matching
    matrices too. Each must match a parameter, and a kind of module in all layers."""


@dataclass
class OwnOptimConfig(OptimConfig):
    """An optimizer of the user's own."""

    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the class, as arguments of these names."""


@dataclass
class AdafactorConfig(OptimConfig):
    """Adafactor (arXiv 1804.04235) with an external learning rate and no first moment."""

    _target_: str = "tpu_experiments.optim.adafactor.Adafactor"
    beta2_decay: float = number(default=-0.8, below=0)
    """Exponent of the second moments' decay rate, 1 - step^beta2_decay."""
    eps1: float = number(default=1e-30, above=0)
    """Added to squared gradients."""
    eps2: float = number(default=1e-3, above=0)
    """Smallest root mean square of a parameter in the relative step size."""
    clip_threshold: float = number(default=1.0, above=0)
    """Largest root mean square of an update."""


def _two_moments(shape: tuple[int, ...]) -> float:
    return 8.0 * math.prod(shape)


def _in_8_bits(shape: tuple[int, ...]) -> float:
    elements = math.prod(shape)
    return 8.0 * elements if elements < MIN_ELEMENTS else 2.0 * elements + 8 * math.ceil(elements / BLOCK)


def _factored(shape: tuple[int, ...]) -> float:
    return 4.0 * (sum(shape[-2:]) * math.prod(shape[:-2]))


def _one_moment(shape: tuple[int, ...]) -> float:
    return 4.0 * math.prod(shape)


def _momentum(shape: tuple[int, ...]) -> float:
    return _one_moment(shape) if len(shape) > 1 else _two_moments(shape)


STATE_BYTES: dict[str, Callable[[tuple[int, ...]], float]] = {
    AdamWConfig._target_: _two_moments,
    AdamW8bitConfig._target_: _in_8_bits,
    AdafactorConfig._target_: _factored,
    MuonConfig._target_: _momentum,
    ScheduleFreeAdamWConfig._target_: _one_moment,
}
"""Optimizers of this project, by class, and the bytes of the state of one parameter, by its shape, without averages."""
OUTSIDE_BYTES = {MuonConfig._target_: _two_moments}
"""The same of what is neither inside a layer nor of a Linear's adapter, where an optimizer has another state for it."""


# ---- trainer, samples, loggers and callbacks -----------------------------------------------------------------


@dataclass
class ProfileConfig:
    """Profile of some steps, for TensorBoard's profiler (xprof)."""

    start_step: int | None = number(default=None, at_least=1)
    """First step that is profiled, counted from 1 over the whole run; null profiles none. Step 1 includes
    compilation."""
    num_steps: int = number(default=3, at_least=1)
    """Steps that are profiled; fewer if the stage ends earlier."""


@dataclass
class TrainerConfig:
    """Settings of the training loop."""

    _target_: str = "tpu_experiments.training.trainer.Trainer"
    """Swap point: a subclass of Trainer."""
    seq_len: Any = number(default="auto", at_least=8, at_most=2**24, word="auto")  # noqa: RUF009 (OmegaConf 2.3 merges no int | str)
    """Tokens per row. `auto` holds 95 % of the prepared texts and 99 % of the conversations (and 98 % of their tokens,
    since what is beyond a row has lost its question), rounded up to a multiple of 128 (the lanes of a TPU tile), or
    more where packing would leave over 8 % of such rows empty, at most `model.row_tokens`; where the model writes its
    rows itself, there is room for `rollout.max_new_tokens` more. A resumed run keeps its first value."""
    global_batch_rows: int | None = number(default=None, at_least=1, at_most=2**24)
    """Rows per optimizer step over all devices; null makes steps of `model.step_tokens`, or smaller ones if an epoch
    would otherwise have fewer than 40 steps, and of a rollout steps of rollout.prompts x samples / updates. A resumed
    run keeps its first value."""
    micro_batch_rows: int | None = number(default=None, at_least=1, at_most=2**24)
    """Rows per device that pass through the model at once; null takes as many as fit into 8,192 tokens. The rest of the
    global batch is accumulated inside the step."""
    loss_chunk_tokens: int | None = number(default=2048, at_least=1)
    """Tokens per device whose logits exist at once (the same positions of each of its rows), which bounds the logits in
    memory to this x vocabulary numbers. null computes all logits of a micro-batch at once, and so does a model whose
    head is more than a matrix product."""
    log_every_steps: int | None = number(default=None, at_least=1)
    """Steps between two log records; values are read from the device only then. null makes about 20 records, at most
    100 steps apart."""
    norms_every_steps: int = number(default=50, at_least=0)
    """Steps between two records of gradient and update norms by kind of module, written with the next log record; 0
    computes none."""
    eval_every_steps: int | None = number(default=None, at_least=0)
    """Steps between two evaluations; null makes about ten, at most 1,000 steps apart and, if questions are asked, at
    least 50, and fewer where they would cost more than a tenth of the steps' time. 0 evaluates only before the first
    step and after the last step of each stage."""
    max_eval_rows: int = number(default=256, at_least=1)
    """Largest number of held-out rows per evaluation, over all sources."""
    max_stage_steps: int | None = number(default=None, at_least=1)
    """Largest number of steps of every stage, for trials; null runs each stage to its end."""
    plan_check: str = choice("refuse", "warn", "off", default="refuse")
    """Reaction before the start when a plan of the same programs, or an exact formula, shows that the run does not fit
    into the memory of the chips of `hw`: `refuse` to start, `warn`, or `off` for no check."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Steps that are profiled into `<run>/profile`."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """Handling of steps that are not finite, and of loss spikes."""
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    """Comparison of the first gradients on several devices with a host reference."""
    trace_every_steps: int | None = number(default=None, at_least=1)
    """Mean number of calls between two traces of a program (xla runtime); the other calls replay its recorded graph. 1
    traces every call, and no call waits for the reading of values (replaying ones run at most one ahead of it). null
    chooses 1 with a trainer, optimizer, model or plugin from outside this project, and for folded layers on a TPU; 200
    for unrolled layers, on the CPU device, and where the model writes its rows."""
    on_recompile: str = choice("error", "warn", default="error")
    """Reaction to an unexpected compilation (xla runtime): `error` saves a checkpoint and stops, naming what changed;
    `warn` logs it once and continues."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings for a custom trainer (`_target_`)."""


@dataclass
class SampleConfig:
    """Text generated before, during and after training."""

    prompt: str | None = None
    """Prompt; rendered with the chat template when a chat source is selected. null takes `data.<name>.prompt` of the
    first chat source, else of the first source, so that it is in the language of the data."""
    prompts: list[str] = field(default_factory=list)
    """Further prompts, answered in the same batch."""
    at: str = choice("auto", "ends", "evaluations", default="auto")
    """`ends`: before and after training only. `evaluations`: at every evaluation as well. `auto`: at evaluations,
    unless that costs more than a twentieth of the steps' time."""
    max_new_tokens: int = number(default=48, at_least=0, at_most=2**24)
    """Tokens generated per prompt; 0 writes no samples."""
    temperature: float = number(default=0.7, at_least=0)
    """Divisor of the logits before a token is drawn (seeded by `seed`); 0 takes the likeliest token."""
    window: int = number(default=128, at_least=16, at_most=2**24)
    """Tokens of prompt and answer together, the row length of the one compiled sampling program."""

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
class CallbackConfig:
    """One callback and its options."""

    _target_: str = MISSING
    """Swap point: a class with some of the methods of `Callback` (callbacks/base.py)."""
    every: int = number(default=1, at_least=1)
    """Steps between two calls of `on_step_end`: it is called at the steps of the run that this divides."""
    on_error: str = choice("stop", "warn", default="stop")
    """Reaction to an exception of it: `stop` saves a checkpoint and ends the run with exit code 1, `warn` logs it and
    goes on. One in `on_end` is logged in both."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that class."""


# ---- the whole configuration --------------------------------------------------------------------------------


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
    """`auto`: settings that change only speed and memory (folding of layers, remat, sharding, micro-batch rows) are
    taken from conf/tuned.yaml, if it has a plan of this model on this machine with rows at least as long and a rank at
    least as high, and if the command sets none of them to another value. `off`: they stay as configured. `settled`: the
    value in a run's own config.yaml, whose settings are final."""
    plugins: list[str] = field(default_factory=list)
    """Import prefixes, beside tpu_experiments, that `_target_` may name."""
    task: TaskConfig = MISSING
    model: ModelConfig = MISSING
    data: dict[str, DataSourceConfig] = field(default_factory=dict)
    hw: HwConfig = MISSING
    curriculum: CurriculumConfig = MISSING
    lora: LoraConfig = MISSING
    objective: ObjectiveConfig = MISSING
    optim: OptimConfig = MISSING
    schedule: ScheduleConfig = MISSING
    sharding: ShardingConfig = MISSING
    trainer: TrainerConfig = MISSING
    start: StartConfig = field(default_factory=StartConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sweeping: SweepingConfig = field(default_factory=SweepingConfig)
    logger: dict[str, LoggerConfig] = field(default_factory=dict)
    callbacks: dict[str, CallbackConfig] = field(default_factory=dict)

    @property
    def questions(self) -> dict[str, tuple[str, str]]:
        """Return key and file of every question set by its name, in the order of the sources."""
        return {
            each: (f"data.{name}.questions.{each}", path)
            for name, source in self.data.items()
            for each, path in source.questions.items()
            if self.objective.asks_questions
        }


GROUPS: dict[str, dict[str, type]] = {
    "task": {
        "base_pack": PackTaskConfig,
        "base_plan": PlanTaskConfig,
        "base_prepare": PrepareTaskConfig,
        "base_resume_check": ResumeCheckTaskConfig,
        "base_generate": GenerateTaskConfig,
        "base_serve": ServeTaskConfig,
        "base_report": ReportTaskConfig,
        "base_doctor": DoctorTaskConfig,
        "base_certify": CertifyTaskConfig,
        "base_convert": ConvertTaskConfig,
        "base_evaluate": EvaluateTaskConfig,
        "base_export": ExportTaskConfig,
        "base_quantize": QuantizeTaskConfig,
        "base_tokenizer": TokenizerTaskConfig,
        "base": TaskConfig,
    },
    "model": {"base": ModelConfig},
    "hw": {"base": HwConfig},
    "curriculum": {"base": CurriculumConfig},
    "lora": {"base": LoraConfig},
    "objective": {
        **{f"base_{name}": kind for name, kind in OBJECTIVES.items()},
        "base": OwnObjectiveConfig,
    },
    "optim": {
        "base_adamw": AdamWConfig,
        "base_adamw8bit": AdamW8bitConfig,
        "base_adafactor": AdafactorConfig,
        "base_muon": MuonConfig,
        "base_schedule_free_adamw": ScheduleFreeAdamWConfig,
        "base": OwnOptimConfig,
    },
    "rollout": {"base": RolloutConfig},
    "schedule": {"base": ScheduleConfig},
    "sharding": {"base": ShardingConfig},
    "trainer": {"base": TrainerConfig},
}


def register() -> None:
    """Put every schema into Hydra's ConfigStore, where YAML files extend it (`defaults: [base, _self_]`)."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config, provider="tpu_experiments")
    launcher = {"_target_": "hydra_plugins.points.PointLauncher"}
    store.store(group="hydra/launcher", name="points", node=launcher, provider="tpu_experiments")
    for group, schemas in GROUPS.items():
        for name, node in schemas.items():
            store.store(group=group, name=name, node=node, provider="tpu_experiments")
