"""Settings of checkpoints: when they are written, which are kept, how they are proven. All may change on a resume."""

from dataclasses import dataclass

from tpu_experiments.config.fields import number


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
