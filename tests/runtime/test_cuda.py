"""Plain torch on an NVIDIA GPU computes what it computes on a CPU, and a step does not wait for the host.

`pytest -m cuda`, on a machine with a GPU; skipped elsewhere.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.test_quantised import FORMATS, weight
from tests.training.tiny import ARCHITECTURES, Run, plain_updates, random_batch
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.models.adapters.quantised import Format, frozen_product
from tpu_experiments.models.parts.contracted import into_heads
from tpu_experiments.models.parts.float32_gradients import product
from tpu_experiments.optim.adafactor import Adafactor
from tpu_experiments.optim.adamw8bit import AdamW8bit
from tpu_experiments.optim.base import Optimizer
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.kernels import on_cuda
from tpu_experiments.runtime.kernels.integers import int8_product
from tpu_experiments.runtime.ops import LoopCall
from tpu_experiments.runtime.processes.launch import make_runtime

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
STEPS = 6
GRAPHS = ("hw.cuda_graphs=true", "hw.cuda_graphs=false")
OPTIMIZERS = (
    AdamW8bit(beta1=0.9, beta2=0.95, eps=1e-8),
    Adafactor(beta2_decay=-0.8, eps1=1e-30, eps2=1e-3, clip_threshold=1.0),
)


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Products of float32 without TF32, as on a CPU; torch's default, said here because tests compare by it."""
    assert not torch.backends.cuda.matmul.allow_tf32
    yield
    torch.cuda.synchronize()


@pytest.fixture
def on_gpu(make_config: Callable[..., Config]) -> Callable[..., Run]:
    """A tiny run, on the GPU or with `hw.device=cpu` on the CPU."""

    def made(*words: str, optimizer: Optimizer | None = None) -> Run:
        config = make_config(
            "hw=gpu", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8", "lora.dropout=0.1", *words
        )
        is_scaled = config.model.dtype == "float16"
        updates = partial(plain_updates, optimizer=optimizer, is_scaled=is_scaled)
        return Run(config, make_runtime(config), updates=updates)

    return made


def batches(*, lr: float = 1e-2) -> list[dict[str, Tensor]]:
    return [random_batch(number % 3, lr=lr, dropout=0.1, accumulation=2) for number in range(STEPS)]


# ---- products -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_and_its_gradient_are_those_of_the_host(name: str, dtype: torch.dtype, rows: int) -> None:
    format = FORMATS[name]
    parts = format.quantise(weight(192, 256))
    x, grad = (torch.randn(rows, n, generator=torch.Generator().manual_seed(n)) for n in (256, 192))
    given = x.to("cuda", dtype).requires_grad_()
    out = frozen_product(given, {part: tensor.cuda() for part, tensor in parts.items()}, format=format)
    (of_x,) = torch.autograd.grad(out, given, grad.to("cuda", dtype))
    assert out.dtype == of_x.dtype == dtype
    decoded = format.decode(parts, dtype=torch.float32)
    rounding = 0.02 if format.int8_activations else max(1e-5, 4 * torch.finfo(dtype).eps)
    for ours, exact in ((out, F.linear(x, decoded)), (of_x, grad @ decoded)):
        assert (ours.detach().cpu().float() - exact).norm() <= rounding * exact.norm()


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("shape", [(96, 160), (512, 1024)], ids=str)
def test_nf4_decodes_as_on_the_host(shape: tuple[int, int], double: bool) -> None:
    """Rows of 160 are no whole blocks: they are decoded in plain torch."""
    format = Format("nf4", double_quant=double)
    parts = format.quantise(weight(*shape))
    decoded = format.decode({part: tensor.cuda() for part, tensor in parts.items()}, dtype=torch.float32)
    torch.testing.assert_close(decoded.cpu(), format.decode(parts, dtype=torch.float32), atol=0, rtol=1e-6)


def test_bitsandbytes_is_what_multiplies() -> None:
    """Without it the same numbers come of plain torch, so the other tests would not notice."""
    if not on_cuda.has_bitsandbytes():
        pytest.skip("bitsandbytes is not installed (extra gpu)")
    parts = {part: tensor.cuda() for part, tensor in Format("nf4").quantise(weight(192, 256)).items()}
    with torch.profiler.profile(acc_events=True) as profile:
        frozen_product(torch.randn(1, 256, device="cuda"), parts, format=Format("nf4"))
    assert any("bitsandbytes::gemm_4bit" in event.key for event in profile.key_averages())


@pytest.mark.parametrize("contracted", [0, 1])
def test_integers_of_any_number_of_rows_are_multiplied_exactly(contracted: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for rows in (*range(1, 40), 257):
        x = torch.randint(-127, 128, (rows, 64), generator=generator, dtype=torch.int8)
        matrix = torch.randint(-127, 128, (96, 64), generator=generator, dtype=torch.int8)
        matrix = matrix if contracted == 1 else matrix.T.contiguous()
        product = int8_product(x.cuda(), matrix.cuda(), contracted)
        assert torch.equal(product.cpu(), int8_product(x, matrix, contracted)), rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_weights_are_summed_in_float32(dtype: torch.dtype) -> None:
    """8,192 tokens, of which bf16 would lose the last: sums of up to 2^13 with a spacing of 64."""
    weight = torch.zeros(3, 5, device="cuda", requires_grad=True)
    x = torch.ones(4, 2048, 5, device="cuda", dtype=dtype)
    grad = torch.ones(4, 2048, 3, device="cuda", dtype=dtype)
    grad[-1, -1] = 0
    of_weight = [
        torch.autograd.grad(multiply(x, weight), weight, grad)[0]
        for multiply in (product, lambda x, weight: into_heads(x, weight, heads=3).flatten(2))
    ]
    for found in of_weight:
        assert found.dtype == torch.float32
        assert found.tolist() == [[8191.0] * 5] * 3


# ---- steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["dense", "int8", "nf4"])
@pytest.mark.parametrize("model", ARCHITECTURES)
def test_losses_and_adapters_are_those_of_the_host(on_gpu: Callable[..., Run], model: str, base: str) -> None:
    """With dropout, accumulated micro-batches and two documents in a row."""
    words = (f"model={model}", f"model.base={base}")
    ours, host = on_gpu(*words), on_gpu(*words, "hw.device=cpu")
    assert ours.losses(batches()) == pytest.approx(host.losses(batches()), abs=1e-4)
    for name, parameter in ours.parameters.items():
        expected = host.parameters[name].detach()
        # Not element by element: Adam divides a gradient near rounding by its own size.
        assert (parameter.detach().cpu() - expected).norm() <= 1e-2 * expected.norm(), name


@pytest.mark.parametrize(
    "words",
    [["model.remat=none"], ["model.remat=offload"], ["model.remat=save_attention"], ["model.remat=save_dots"]],
    ids=str,
)
def test_what_is_recomputed_changes_no_loss(on_gpu: Callable[..., Run], words: list[str]) -> None:
    expected = on_gpu("model.remat=layer_inputs").losses(batches())
    assert on_gpu(*words).losses(batches()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_other_optimizers_are_those_of_the_host(on_gpu: Callable[..., Run], optimizer: Optimizer) -> None:
    losses = [
        on_gpu("model=qwen05b", "lora=none", *words, optimizer=optimizer).losses(batches(lr=1e-3))
        for words in ([], ["hw.device=cpu"])
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


@pytest.mark.parametrize(
    ("dtype", "base"),
    [(dtype, base) for dtype in ("bfloat16", "float16") for base in ("dense", "nf4", "int8")][:-1],
)
def test_half_precision_stays_near_float32(on_gpu: Callable[..., Run], dtype: str, base: str) -> None:
    """int8 in float16 is refused."""
    ours = on_gpu(f"model.base={base}", f"model.dtype={dtype}").losses(batches(lr=1e-3))
    assert ours == pytest.approx(on_gpu(f"model.base={base}").losses(batches(lr=1e-3)), abs=0.05)


@pytest.mark.parametrize("words", [[], ["model.base=nf4"], ["model.base=int8"], ["model.dtype=float16"]], ids=str)
def test_a_step_never_waits_for_the_gpu(on_gpu: Callable[..., Run], words: list[str]) -> None:
    run = on_gpu("model.dtype=bfloat16", *words)
    placed = [run.runtime.put(batch, rows_dim=1) for batch in batches()]
    for batch in placed[:2]:  # the first makes tables and handles, the second a recording
        run.program(batch)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = [run.program(batch) for batch in placed[2:]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(output.loss) for output in outputs)


@pytest.mark.parametrize("words", [[], ["model.base=nf4"], ["lora=none"]], ids=str)
def test_the_same_steps_end_in_the_same_bits(on_gpu: Callable[..., Run], words: list[str]) -> None:
    """What a resumed run depends on: no sum in an order of its own (atomic additions)."""
    words = ["model=qwen05b", "model.dtype=bfloat16", *words]
    runs = [on_gpu(*words) for _ in range(2)]
    losses = [run.losses(batches(lr=1e-3)) for run in runs]
    assert losses[0] == losses[1]
    for name, parameter in runs[0].parameters.items():
        assert torch.equal(parameter, runs[1].parameters[name]), name


# ---- recorded programs ----------------------------------------------------------------------------------------


@pytest.fixture
def runtime(make_config: Callable[..., Config]) -> EagerRuntime:
    """A runtime that records."""
    return EagerRuntime(make_config("hw=gpu").hw)


@pytest.mark.parametrize("accumulation", [1, 2, 5])
@pytest.mark.parametrize(
    "words", [[], ["model.base=nf4"], ["model.remat=layer_inputs"], ["model.remat=save_dots"], ["lora=none"]], ids=str
)
def test_a_recorded_step_is_the_same_bits(on_gpu: Callable[..., Run], words: list[str], accumulation: int) -> None:
    given = [random_batch(number, lr=1e-3, dropout=0.1, accumulation=accumulation) for number in range(STEPS)]
    runs = [on_gpu("model=qwen05b", "model.dtype=bfloat16", *words, graphs) for graphs in GRAPHS]
    losses = [run.losses(given) for run in runs]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == STEPS
    for name, parameter in runs[0].parameters.items():
        assert torch.equal(parameter, runs[1].parameters[name]), name


def test_a_recorded_step_starts_few_operations(on_gpu: Callable[..., Run]) -> None:
    """What the recording is for; a program that never is recorded gives the same numbers."""
    started = []
    for graphs in GRAPHS:
        run = on_gpu("model=qwen05b", graphs)
        given = [run.runtime.put(batch, rows_dim=1) for batch in batches()]
        for batch in given[:2]:
            run.program(batch)
        with torch.profiler.profile(acc_events=True) as profile:
            run.program(given[2])
        started.append(sum(event.count for event in profile.key_averages() if event.key.startswith("aten::")))
    assert started[0] < 100 < 1000 < started[1]


def test_outputs_outlive_the_next_call(runtime: EagerRuntime) -> None:
    program = runtime.program(lambda batch: {"twice": 2 * batch["x"]}, name="doubled")
    outputs = [program({"x": torch.full((3,), float(n), device="cuda")})["twice"] for n in range(5)]
    assert [float(out[0]) for out in outputs] == [0, 2, 4, 6, 8]


def test_tensors_that_are_replaced_are_read_anew(runtime: EagerRuntime) -> None:
    held = {"w": torch.zeros(3, device="cuda")}
    program = runtime.program(lambda batch: held["w"] + batch["x"], name="added", held=lambda: held)
    for number in range(30):
        if number % 3 == 0:
            held["w"] = torch.full((3,), 100.0 * number, device="cuda")
        held["w"] += 1
        out = program({"x": torch.full((3,), float(number), device="cuda")})
        assert out.tolist() == [100 * (number - number % 3) + number % 3 + 1 + number] * 3


def test_shapes_have_recordings_of_their_own(runtime: EagerRuntime) -> None:
    program = runtime.program(lambda batch: batch["x"].sum(), name="sum")
    for number in range(12):
        assert float(program({"x": torch.ones(number % 3 + 1, device="cuda")})) == number % 3 + 1


@pytest.mark.parametrize("reverse", [False, True])
def test_a_recorded_loop_carries_and_stacks(runtime: EagerRuntime, reverse: bool) -> None:
    """Carried values that change places, a y that is the value before, a loop in a loop, and one after it."""

    def body(carry, xs, consts):
        a, b = carry
        (inner,), _ = runtime.loop(
            LoopCall(lambda c, x, _: ((c[0] * x[0],), ()), carry=(xs[0] * 0 + 1,), xs=(consts[0],))
        )
        return (b, a + xs[0] + inner), (a, xs[0])

    def function(batch):
        first = batch["x"] * 2
        (a, b), ys = runtime.loop(
            LoopCall(body, carry=(first[0], first[1]), xs=(first,), consts=(batch["factors"],), reverse=reverse)
        )
        (c,), _ = runtime.loop(LoopCall(lambda carry, x, _: ((carry[0] + x[0],), ()), carry=(a * b,), xs=(ys[0],)))
        return a, b, c, ys

    program = runtime.program(function, name="loops")
    for number in range(4):
        batch = {"x": torch.arange(6.0) + number, "factors": torch.tensor([2.0, 3.0])}
        ours = program({name: tensor.cuda() for name, tensor in batch.items()})
        torch.testing.assert_close(ours, function(batch), check_device=False)


def test_what_cannot_be_recorded_is_refused(runtime: EagerRuntime) -> None:
    program = runtime.program(lambda batch: batch["x"] * float(batch["x"].sum()), name="hasty")
    batch = {"x": torch.ones(3, device="cuda")}
    assert program(batch).tolist() == [3, 3, 3]
    with pytest.raises(ConfigError, match=r"hw.cuda_graphs=true; the program `hasty` cannot be recorded"):
        program(batch)
    assert float(torch.ones(3, device="cuda").sum()) == 3  # the GPU can be used
    assert 0 <= float(torch.rand(1, device="cuda")) < 1


def test_what_draws_from_the_generator_is_not_recorded(runtime: EagerRuntime) -> None:
    program = runtime.program(lambda batch: torch.rand_like(batch["x"]), name="drawn")
    drawn = []
    for _ in range(4):
        runtime.seed(3)
        drawn.append(program({"x": torch.ones(3, device="cuda")}))
    assert all(torch.equal(each, drawn[0]) for each in drawn)
