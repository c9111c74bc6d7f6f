"""Schema of `prepare` and `loader`: how documents become rows on disk, and how rows reach the device."""

from dataclasses import dataclass

from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.places import place


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
