"""Several runs of one process that train their adapters in one program, each as it would alone.

Every run is a whole `Trainer` with its own data, parameters, optimizer state, checkpoints and logs, in a thread of its
own. Threads never run at once: one has the turn until it ends or waits for its next step, in the order of their
numbers, so that a pack does the same in every start. Once all that are left wait, one program computes a step of each
(packed.py). Those that have ended keep their places in it, with rows of padding, and nothing of theirs changes.
What is not a training step (evaluations, samples, checkpoints) is done run by run, by programs that a number on the
device tells which adapter to use, so that they are compiled once.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.mesh import num_shards
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.loggers.runlog import start_thread_log, stop_thread_log
from tpu_experiments.models.adapters.lora import ParameterReport, drawn_adapters, fingerprints, scale_of
from tpu_experiments.models.adapters.packed import Chosen, joined_rows, packed, rows_of_each, split_over
from tpu_experiments.models.parts.dropout import NOISE, THRESHOLDS, threshold_of
from tpu_experiments.models.sources.build import BuiltModel, build_model
from tpu_experiments.optim.base import State
from tpu_experiments.optim.ema import held_of
from tpu_experiments.optim.loss_scale import scale_of as loss_scale_of
from tpu_experiments.runtime.base import OnOutput, Program, Runtime, Signature, signature_of
from tpu_experiments.runtime.ops import Tensors
from tpu_experiments.runtime.stacked import is_adapter_part, is_of_linear
from tpu_experiments.storage.process import boot_seconds
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.training.alone import Alone
from tpu_experiments.training.lives import Shares
from tpu_experiments.training.step import (
    ACTIVE,
    StepOutput,
    TrainStep,
    commit,
    mean_loss,
    row_tensors,
    summed_gradients,
)

if TYPE_CHECKING:  # the trainer calls this module
    from tpu_experiments.training.trainer import Trainer

log = logging.getLogger(__name__)
Batch = Mapping[str, Tensor]


# ---- the step -----------------------------------------------------------------------------------------------


class PackedStep:
    """The steps of several adapters: one forward and backward pass, then each one's own update."""

    def __init__(self, module: nn.Module, steps: Sequence[TrainStep], *, num_shards: int = 1) -> None:
        """Take the steps of the runs alone.

        Args:
            module: that of all adapters, with a scale of 1.
            num_shards: devices that the rows are split over.
        """
        self.module, self.steps, self.num_shards = module, steps, num_shards

    def __call__(
        self,
        parameters: Sequence[Mapping[str, Tensor]],
        states: Sequence[State],
        batches: Sequence[Batch],
        *,
        scales: Tensor,
        thresholds: Tensor,
    ) -> list[tuple[dict[str, Tensor], State, StepOutput]]:
        """Return what `TrainStep` returns for each.

        Args:
            scales: of every adapter's B A, float32 (K,).
            thresholds: of its dropout (`threshold_of`), int32 (K,); used where batches have random words.
        """
        totals = [step.counted(batch) for step, batch in zip(self.steps, batches, strict=True)]
        loss_scales = [loss_scale_of(state) for state in states]
        divisors = [t if s is None else t / s for t, s in zip(totals, loss_scales, strict=True)]
        grads, kept = self.gradients(parameters, batches, divisors, scales=scales, thresholds=thresholds)
        own = zip(self.steps, parameters, states, batches, grads, kept, totals, strict=True)
        return [
            step.updated(mine, state, batch, grads=found, kept=rows, total=total)
            for step, mine, state, batch, found, rows, total in own
        ]

    def gradients(
        self,
        parameters: Sequence[Mapping[str, Tensor]],
        batches: Sequence[Batch],
        divisors: Sequence[Tensor],
        *,
        scales: Tensor,
        thresholds: Tensor,
    ) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Return each adapter's gradients, in the order of its parameters, and what is kept of its rows (A, R, ...)."""
        num, names = len(batches), list(parameters[0])
        own = [dict(batch) for batch in batches]
        if NOISE in own[0]:
            for k, batch in enumerate(own):
                batch[THRESHOLDS] = thresholds[k].expand(batch[NOISE].shape)
        keys = row_tensors(own[0])

        def loss_of(leaves: Sequence[Tensor], tensors: Tensors, others: Tensors) -> tuple[Tensor, Tensor]:
            scales, *divisors = others
            each = [dict(zip(names, leaves[k * len(names) :], strict=False)) for k in range(num)]
            rows = dict(zip(keys, tensors, strict=True))
            sums, kept = self.steps[0].losses(self.module, packed(each, scales), rows)
            parts = rows_of_each(sums, num=num, num_shards=self.num_shards)
            losses = [mean_loss(part, divisor) for part, divisor in zip(parts, divisors, strict=True)]
            of_each = parts if kept is sums else rows_of_each(kept, num=num, num_shards=self.num_shards)
            return torch.stack(losses).sum(), torch.stack(of_each, dim=1)

        xs = tuple(joined_rows([batch[key] for batch in own], num_shards=self.num_shards) for key in keys)
        values = tuple(tensor for each in parameters for tensor in each.values())
        with split_over(self.num_shards):
            grads, kept_ARK = summed_gradients(loss_of, values, xs, (scales, *divisors), loop=self.steps[0].loop)
        by_adapter = [grads[k * len(names) : (k + 1) * len(names)] for k in range(num)]
        return by_adapter, [kept_ARK[:, :, k] for k in range(num)]


# ---- the runs -----------------------------------------------------------------------------------------------


@dataclass
class Request:
    """A step that a run waits for."""

    batch: Batch
    on_output: OnOutput | None
    step: int
    """Steps of the run before it."""
    output: StepOutput | None = None
    error: BaseException | None = None


@dataclass
class Seat(Alone):
    """A run's place in a pack; its trainer calls the methods, in the run's own thread."""

    pack: "Pack"
    name: str
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    trainer: "Trainer | None" = None
    number: int = -1
    """Number among the adapters of the program; -1 where the run ended before it was built."""
    state: str = "ready"
    """`ready`, `built` (it waits until all are), `waiting` (for its step) or `ended`."""
    request: Request | None = None
    code: int = 0
    """Exit code that the run would have had as a process."""

    @property
    def program(self) -> str:
        """Return the sizes of the pack's programs."""
        return f"{len(self.pack.members)} adapters of rank {self.pack.lora.r}"

    @property
    def shares(self) -> Shares:
        """Return the parts of the machine's time that the runs have had."""
        return self.pack.shares

    def open_log(self, folder: RunFolder, *, rank: int) -> Callable[[], None]:
        """Write the run.log of this run's thread, which has the records from before the runs began."""
        return partial(stop_thread_log, start_thread_log(folder, kept=self.pack.kept))

    def watch(self, trainer: "Trainer") -> None:
        """Leave the process to the other runs, where this one is stuck."""

    def build(self, trainer: "Trainer") -> BuiltModel:
        """Return the common model with adapters of this run's own."""
        self.trainer = trainer
        return self.pack.build(trainer)

    def lora(self, trainer: "Trainer") -> LoraConfig:
        """Return the settings of the common module."""
        return self.pack.lora

    def evaluated(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a view of this run's parameters, `own`, whose programs serve all runs."""
        return self.pack.chosen(self, own)

    def step_program(self, trainer: "Trainer") -> Program[StepOutput]:
        """Return the program of this run's step."""

        def program(batch: Batch, *, on_output: OnOutput | None = None) -> StepOutput:
            self.request = Request(batch, on_output, trainer.progress.step)
            self.wait("waiting")
            request, self.request = self.request, None
            if request.error is not None:
                raise request.error
            assert request.output is not None
            return request.output

        return program

    def wait(self, state: str) -> None:
        """Hand the turn on, and return when this run has it again."""
        self.state = state
        if self.pack.is_running:
            self.pack.back.release()
            self.turn.acquire()


class Pack:
    """Runs that train in one program; `run` is called once.

    Args:
        names: of the runs, which name their threads.
        loras: their `lora` settings; they may differ in rank, alpha, scaling, dropout and start.
        look: called before every step, with the seats.
        began: seconds since boot from which on the runs share the machine's time; by default now.
        kept: log records from before the runs began.
    """

    def __init__(
        self,
        runtime: Runtime,
        names: Sequence[str],
        *,
        loras: Sequence[LoraConfig],
        look: Callable[[Sequence[Seat]], None] = lambda seats: None,
        began: float | None = None,
        kept: Sequence[logging.LogRecord] = (),
    ) -> None:
        self.runtime, self.look, self.kept = runtime, look, kept
        self.seats = [Seat(self, name) for name in names]
        self.shares = Shares(len(names), began=boot_seconds() if began is None else began)
        rank = max(lora.r for lora in loras)
        dropout = max(lora.dropout for lora in loras)
        self.lora = replace(loras[0], r=rank, alpha=float(rank), scaling="alpha_over_r", dropout=dropout)
        """Of the common module: the largest rank, a scale of 1, and dropout if any adapter has some."""
        self.is_running = False
        """Whether the runs have threads; a plan builds them without."""
        self.back = threading.Semaphore(0)
        self.base: BuiltModel | None = None
        self.members: list[Seat] = []
        """Runs that were built, in the order of their numbers."""
        self.evaluated: list[Mapping[str, Tensor]] = []
        """Parameters that their evaluations use."""
        self._placed: dict[str, Tensor] = {}
        self._program: Program[dict[str, Tensor]] | None = None
        self._padding: dict[tuple[int, Signature], dict[str, Tensor]] = {}

    def run(self, main: Callable[[Seat], int]) -> list[int]:
        """Run `main` for every seat, each in a thread of its own, and return what they return."""
        threads = [
            threading.Thread(target=self._main, args=(main, seat), name=seat.name, daemon=True) for seat in self.seats
        ]
        self.is_running = True
        for thread in threads:
            thread.start()
        while any(seat.state != "ended" for seat in self.seats):
            for seat in self.seats:
                if seat.state == "ready":
                    seat.turn.release()
                    self.back.acquire()
            self.look(self.seats)
            left = [seat for seat in self.seats if seat.state != "ended"]
            if left and all(seat.state == "built" for seat in left):
                self._program = self.program()
                for seat in left:
                    seat.state = "ready"
            elif left:
                self._step([seat for seat in left if seat.state == "waiting"])
        return [seat.code for seat in self.seats]

    def _main(self, main: Callable[[Seat], int], seat: Seat) -> None:
        seat.turn.acquire()
        try:
            seat.code = main(seat)
        finally:
            seat.state = "ended"
            self.shares.leave()
            self.back.release()

    # ---- called by seats, which have the turn ---------------------------------------------------------------

    def build(self, trainer: "Trainer") -> BuiltModel:
        """Return the common model, loaded for the first run, with the adapters that a run draws.

        Raises:
            ConfigError: the model is none that adapters can share.
        """
        config, runtime = trainer.config, self.runtime
        if self.base is None:

            def place(tensor: Tensor, *, name: str) -> Tensor:
                """Upload the common weights; the module's own adapters are not used."""
                return tensor if is_adapter_part(name) else runtime.place(tensor, name=name)

            self.base = build_model(
                trainer.model_source(),
                lora=self.lora,
                seed=config.seed,
                place=place,
                folding=runtime.folding,
                is_packed=True,
            )
        require_packable(self.base)
        marks: dict[str, str] = {}
        drawn = drawn_adapters(self.base.module, list(self.base.trainable), lora=config.lora, seed=config.seed)
        trainable = {}
        for name, tensor in drawn:
            marks |= fingerprints(name, tensor)
            trainable[name] = runtime.place(tensor, name=name)
        common = self.base.report
        num_base = common.total - common.trainable
        num_own = sum(tensor.numel() for tensor in trainable.values())
        report = ParameterReport(num_own, num_base + num_own, common.adapters)
        return replace(
            self.base, trainable=trainable, report=report, initial={}, fingerprints=marks, order=tuple(trainable)
        )

    def chosen(self, seat: Seat, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the view of a run's parameters, and count the run among the pack's."""
        seat.number = len(self.members)
        self.members.append(seat)
        self.evaluated.append(own)
        number = self.runtime.put({"number": torch.tensor([seat.number], dtype=torch.int32)}, rows_dim=-1)["number"]
        return Chosen(self.evaluated, number=number, scales=lambda: self._placed["scales"], held=self._held)

    @property
    def trainers(self) -> list["Trainer"]:
        """Return the trainers of the runs that were built, by their numbers."""
        return [seat.trainer for seat in self.members if seat.trainer is not None]

    def step(self) -> PackedStep:
        """Return the step of all runs."""
        assert self.base is not None, "every run is built"
        trainers = self.trainers
        shards = num_shards(trainers[0].config) // self.runtime.share[1]
        return PackedStep(self.base.module, [trainer.step for trainer in trainers], num_shards=shards)

    def _held(self) -> dict[str, Tensor]:
        """Return the device's tensors that evaluations read."""
        return {f"{name}@{k}": tensor for k, own in enumerate(self.evaluated) for name, tensor in held_of(own).items()}

    # ---- between turns --------------------------------------------------------------------------------------

    def program(self) -> Program[dict[str, Tensor]]:
        """Return the program of a step of all runs, once every run is built or has ended."""
        trainers = self.trainers
        loras = [trainer.config.lora for trainer in trainers]
        scales = torch.tensor([scale_of(lora) for lora in loras], dtype=torch.float32)
        thresholds = torch.tensor([threshold_of(1 - lora.dropout) for lora in loras], dtype=torch.int32)
        flags = {f"{value:d}@{k}": torch.tensor([float(value)]) for k in range(len(loras)) for value in (True, False)}
        self._placed = self.runtime.put({"scales": scales, "thresholds": thresholds, **flags}, rows_dim=-1)
        step = self.step()

        def in_place(batch: Batch) -> dict[str, Tensor]:
            """Run a step of every adapter; inputs and outputs are named `<name>@<number>`."""
            own = [part_of(batch, k) for k in range(len(trainers))]
            found = step(
                [trainer.parameters for trainer in trainers],
                [trainer.state for trainer in trainers],
                own,
                scales=self._placed["scales"],
                thresholds=self._placed["thresholds"],
            )
            outputs: dict[str, Tensor] = {}
            for k, (trainer, (parameters, state, output)) in enumerate(zip(trainers, found, strict=True)):
                commit(trainer.parameters, trainer.state, new=(parameters, state))
                outputs |= {f"{name}@{k}": t for name, t in vars(output).items() if t is not None}
            return outputs

        def held() -> dict[str, Tensor]:
            tensors = {f"{n}@{k}": t for k, each in enumerate(trainers) for n, t in each.step_tensors().items()}
            return {**tensors, "scales": self._placed["scales"], "thresholds": self._placed["thresholds"]}

        return self.runtime.program(in_place, name="train", held=held)

    def _step(self, waiting: Sequence[Seat]) -> None:
        """Queue a step of the run that is furthest behind and of those with the same shapes, and give them their turn.

        After a kill runs may go on from different steps; in a stage of other shapes the furthest waits.
        """
        first = min(waiting, key=lambda seat: _request(seat).step)
        batches = {seat.number: self._with_noise(_request(seat).batch, number=seat.number) for seat in waiting}
        signature = signature_of(batches[first.number])
        now = [seat for seat in waiting if signature_of(batches[seat.number]) == signature]
        active = {seat.number for seat in now}
        batch: dict[str, Tensor] = {}
        for k in range(len(self.members)):
            own = batches[k] if k in active else self._padding_of(signature, number=k)
            batch |= {f"{name}@{k}": tensor for name, tensor in own.items()}
            batch[f"{ACTIVE}@{k}"] = self._placed[f"{k in active:d}@{k}"]
        due = {seat.number: _request(seat).on_output for seat in now}

        def on_output(outputs: Mapping[str, Tensor]) -> None:
            for k, call in due.items():
                if call is not None:
                    call(_output(outputs, k))

        assert self._program is not None
        try:
            outputs = self._program(batch, on_output=on_output if any(due.values()) else None)
            for seat in now:
                _request(seat).output = _output(outputs, seat.number)
        except BaseException as error:
            for seat in now:
                _request(seat).error = error
        for seat in now:
            seat.state = "ready"

    def _with_noise(self, batch: Batch, *, number: int) -> Batch:
        """Return the batch with random words, where another run's dropout needs them; no own dropout uses them."""
        if NOISE in batch or not self.lora.dropout:
            return batch
        rows = {name: tensor for name, tensor in batch.items() if name in row_tensors(batch)}
        others = {name: tensor for name, tensor in batch.items() if name not in rows}
        words = self._padding_of((("noise", tuple(batch["ids"].shape[:2]), "int32"),), number=number)
        return {**rows, NOISE: words["noise"], **others}

    def _padding_of(self, signature: Signature, *, number: int) -> dict[str, Tensor]:
        """Return zeros of a batch's shapes on the device, of each run's own.

        A tensor that two inputs shared would be one input of the program, which is compiled again where they do not.
        """
        key = (number, signature)
        if key not in self._padding:
            host = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, shape, dtype in signature}
            self._padding[key] = self.runtime.put(host, rows_dim=1)
        return self._padding[key]


def require_packable(base: BuiltModel) -> None:
    """Require a model that trains adapters alone, and has no dropout of its own.

    Raises:
        ConfigError: it trains more, as an objective of the user's own with a head does; or it has dropout of its own,
            of which not all draws are of one row (models/parts/dropout.py), so that no run would be as it is alone.
    """
    others = [name for name in base.trainable if not is_of_linear(name)]
    if others:
        raise ConfigError(
            f"sweeping.pack; {others[0]} is trained beside the adapters of Linears, and a pack trains those alone; use "
            "sweeping.pack=off."
        )
    for name, part in base.module.named_modules():
        drops = {"p": part.p} if isinstance(part, nn.Dropout) else {}
        drops["attention_dropout"] = getattr(part, "attention_dropout", 0.0)
        for key, share in drops.items():
            if isinstance(share, float) and share > 0:
                raise ConfigError(
                    f"sweeping.pack; the model's own dropout ({name}.{key}={share:g}) may draw for all rows of a batch "
                    "together, as inside sdpa attention, so that no point would train as it does alone; set it to 0 in "
                    "the model's config, or use sweeping.pack=off."
                )


def _request(seat: Seat) -> Request:
    assert seat.request is not None, "a waiting run has a request"
    return seat.request


def part_of(tensors: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """Return the inputs or outputs of one adapter, which are named `<name>@<number>`."""
    end = f"@{number}"
    return {name.removesuffix(end): tensor for name, tensor in tensors.items() if name.endswith(end)}


def _output(outputs: Mapping[str, Tensor], number: int) -> StepOutput:
    found = part_of(outputs, number)
    given: dict[str, Any] = {each.name: found.get(each.name) for each in fields(StepOutput)}
    return StepOutput(**given)
