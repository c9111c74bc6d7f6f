"""The TPU compiler's out-of-memory messages (libtpu 0.0.21, as it gave them) and what their buffers are called."""

import pytest

from tests.planning.hlo_programs import text
from tpu_experiments.planning.oom import Buffer, classify, is_out_of_memory, read_out_of_memory

GIB, MIB = 2**30, 2**20
MISTRAL = {"vocab_size": 32768, "seq_len": 2048, "rows": 6, "hidden": 4096, "intermediate": 14336, "heads": 32}
ONE_ALLOCATION = (  # jax, v6e: a product of (2097152, 1, 260) and (36,)
    "RESOURCE_EXHAUSTED: Allocation (size=39862665216) would exceed memory (size=33822867456) :: #allocation5 [shape = "
    "'bf16[2097152,36,260]{0,2,1:T(8,128)(2,1)}', space=hbm, size = 0xffffffffffffffff, tag = 'output of fusion@{}'] "
    ":: <no-hlo-instruction>"
)


def test_temporaries_of_one_chip() -> None:
    """Two unrolled layers of Mistral 7B, 8 x 4096, attention as plain matrix products, v6e:1x1."""
    report = read_out_of_memory(text("out_of_memory_one_chip.txt"))
    assert (report.memory_space, report.used_gib, report.limit_gib) == ("hbm", pytest.approx(35.64), 31.25)
    assert len(report.buffers) == 20
    assert report.buffers[0] == Buffer(
        bytes=16 * GIB,
        shape=(256, 4096, 4096),
        dtype="f32",
        kind="temporary",
    )
    assert [b.bytes for b in report.buffers] == sorted((b.bytes for b in report.buffers), reverse=True)


def test_the_buffers_of_one_chip_in_words() -> None:
    report = read_out_of_memory(text("out_of_memory_one_chip.txt"))
    words = [classify(buffer, **MISTRAL | {"rows": 8, "seq_len": 4096}) for buffer in report.buffers]
    assert words[0] == words[1] == "attention scores (rows x heads x seq_len^2 = 8 x 32 x 4096^2)"
    assert words[2] == "MLP activations (trainer.micro_batch_rows x trainer.seq_len = 8 x 4096 x 14336)"
    assert words[5].startswith("queries, keys or values (")
    assert words[7] == "layer inputs or outputs (trainer.micro_batch_rows x trainer.seq_len = 8 x 4096 x 4096)"
    assert words[14] == "rotary angles (4096 x 128)"
    assert words[19] == "LoRA branch (trainer.micro_batch_rows x trainer.seq_len = 8 x 4096 x lora.r 16)"


def test_temporaries_per_chip_of_a_sharded_program() -> None:
    report = read_out_of_memory(text("out_of_memory_sharded.txt"))
    assert (report.used_gib, report.limit_gib) == (pytest.approx(94.87), 15.75)
    assert report.buffers[0].shape == (256, 4096, 4096)


def test_arguments_count_beside_temporaries() -> None:
    report = read_out_of_memory(text("out_of_memory_with_arguments.txt"))
    assert (report.used_gib, report.arguments_gib) == (40.0, 20.0)
    assert read_out_of_memory(text("out_of_memory_sharded.txt")).arguments_gib == 0.0
    assert [buffer.bytes for buffer in report.buffers] == [20 * GIB]


def test_arguments_alone_can_be_too_many() -> None:
    report = read_out_of_memory(text("out_of_memory_arguments_alone.txt"))
    assert (report.used_gib, report.limit_gib, report.buffers) == (40.0, 31.25, ())


def test_one_buffer_larger_than_the_memory_has_its_own_message() -> None:
    report = read_out_of_memory(ONE_ALLOCATION)
    assert (report.used_gib, report.limit_gib) == (39862665216 / GIB, 31.5)
    (buffer,) = report.buffers
    assert (str(buffer), buffer.kind) == ("bf16[2097152,36,260]", "temporary")


def test_temporaries_alone_have_a_message_of_their_own() -> None:
    """libtpu 0.0.42.1, of a plan for v7x."""
    message = "JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
    message += "temporaries (21.11M) exceeds available HBM (6.00M)."
    assert is_out_of_memory(message)
    report = read_out_of_memory(message)
    assert (report.memory_space, report.arguments_gib, report.buffers, report.message) == ("hbm", 0.0, (), message)
    assert (1024 * report.used_gib, 1024 * report.limit_gib) == (pytest.approx(21.11), 6.0)


def test_arguments_and_small_units_are_read() -> None:
    """The wording of older reports (sokrypton/ColabFold issue 62); an argument as XLA calls it."""
    head = "Ran out of memory in memory space vmem. Used 20.50M of 16.00M vmem. Exceeded vmem capacity by 4.50M.\n\n"
    first = '  1. Size: 64.00M\n     Operator: op_type="x" op_name="jit(f)/y"\n'
    first += "     Shape: f32[1024,245,64]{1,2,0:T(8,128)}\n"
    first += "     Unpadded size: 61.25M\n     Extra memory due to padding: 2.75M (1.0x expansion)\n"
    first += "     Allocation type: HLO temp\n     ==========================\n\n"
    second = "  2. Size: 512B\n     Shape: pred[]\n     Allocation type: Argument\n"
    report = read_out_of_memory(head + first + second)
    assert (report.memory_space, report.used_gib * 1024) == ("vmem", 20.5)
    assert [(b.bytes, b.kind) for b in report.buffers] == [
        (64 * MIB, "temporary"),
        (512, "argument"),
    ]
    assert report.buffers[1].shape == ()


@pytest.mark.parametrize("message", ["", "INTERNAL: Mosaic failed to compile TPU kernel", "out of memory"])
def test_another_error_is_not_taken_for_it(message: str) -> None:
    with pytest.raises(ValueError, match="not the TPU compiler's out-of-memory report"):
        read_out_of_memory(message)


@pytest.mark.parametrize(
    ("shape", "dtype", "kind", "expected"),
    [
        ((6, 2048, 32768), "f32", "temporary", "logits (trainer.micro_batch_rows x trainer.seq_len = 6 x 2048"),
        ((12288, 32768), "bf16", "temporary", "logits ("),
        ((6, 32, 2048, 2048), "bf16", "temporary", "attention scores ("),
        ((192, 2048, 2048), "f32", "temporary", "attention scores ("),
        ((12288, 14336), "bf16", "temporary", "MLP activations ("),
        ((32, 6, 2048, 4096), "bf16", "temporary", "saved layer inputs (layers x"),
        ((6, 2048, 4096), "bf16", "temporary", "layer inputs or outputs ("),
        ((6, 32, 2048, 128), "bf16", "temporary", "queries, keys or values ("),
        ((6, 8, 2048, 128), "bf16", "temporary", "queries, keys or values ("),
        ((32, 14336, 4096), "bf16", "argument", "base weights (bf16[32,14336,4096])"),
        ((32768, 4096), "bf16", "argument", "base weights ("),
        ((14336, 4096), "bf16", "temporary", "base weights ("),
        ((32, 14336, 4096), "f32", "argument", "optimizer state ("),
        ((32, 14336, 4096), "u8", "argument", "optimizer state ("),
        ((32, 16, 4096), "f32", "argument", "adapter, its gradient or its optimizer state ("),
        ((32, 14336, 16), "f32", "output", "adapter, its gradient or its optimizer state ("),
        ((7, 11, 13), "s32", "temporary", "s32[7,11,13]"),
        ((), "f32", "temporary", "f32[]"),
    ],
)
def test_words_of_the_config(shape: tuple[int, ...], dtype: str, kind: str, expected: str) -> None:
    buffer = Buffer(bytes=0, shape=shape, dtype=dtype, kind=kind)
    assert classify(buffer, **MISTRAL).startswith(expected)


def test_one_row_as_long_as_the_model_is_wide() -> None:
    """A weight and an activation of one shape are told apart by whether they are arguments."""
    square = {"bytes": 0, "shape": (4096, 4096), "dtype": "bf16"}
    sizes = MISTRAL | {"rows": 1, "seq_len": 4096}
    assert classify(Buffer(kind="argument", **square), **sizes).startswith("base weights")
    assert classify(Buffer(kind="temporary", **square), **sizes).startswith("layer inputs or outputs")
