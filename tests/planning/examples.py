"""Model sizes and a complete plan that the tests of this folder share."""

from dataclasses import replace

from tests.config.composing import composed
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.metrics.flops import Recomputed, flops_of_token
from tpu_experiments.planning.compare import datasheet_comparison
from tpu_experiments.planning.hlo.text import Kernel, Transfer
from tpu_experiments.planning.money import RunLength, StageLength, cost_of
from tpu_experiments.planning.plan import ChipMemory, LargeBuffer, Plan, Program, Rung, Shortage, Tried
from tpu_experiments.planning.timing import Calibration, StepWork, step_time

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Mistral 7B with a vocabulary of 32,768.
MISTRAL = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
LORA = LoraConfig(r=16, targets=list(TARGETS))
CALIBRATION = Calibration(1.1, "a <measurement> & another", 0.08)
FLOPS = flops_of_token(MISTRAL, seq_len=2048, lora=LORA, recomputed=Recomputed())
WORK = StepWork(
    cycles=2.14e9,
    dot_flops=3.0e14,
    model_flops=FLOPS.model * 8192,
    tokens=8192,
    kernels=(Kernel("flash_attention", 64, 2.7e11, 2.7e8),),
    transfers=(Transfer("all-gather", 450, 2.9e10, 400, 8), Transfer("all-reduce", 2, 1.7e8, 0, 8)),
)

PROGRAMS = (
    Program("train", ("text", "chat"), "1 x 4 x 2048", 111.0, 8.6, 1.25),
    Program("eval", (), "8 x 2048", 30.5, 4.1, 0.4),
)
TRIED = (
    Tried(("trainer.micro_batch_rows=4", "sharding=fsdp"), "fits", 8.6, 1.25),
    Tried((), "fits", 8.6, 1.25),
    Tried(("trainer.micro_batch_rows=64", "sharding=fsdp"), "pruned", 99.0, reason="formulas put it there"),
)


def example_run(step_seconds: float) -> RunLength:
    """Two stages of 32 x 2048 tokens a step."""
    stages = (
        StageLength("text", 1000, step_seconds, 1000 * 32 * 2048, 2.0),
        StageLength("chat", 500, step_seconds, 500 * 32 * 2048, 1.0),
    )
    return RunLength(stages, 120.0, 60.0, 240.0, 300.0, ("weights are read at 0.25 GiB/s",))


def example_plan() -> Plan:
    """Mistral 7B LoRA on v6e-8 with everything filled in; the figures are made up but of the right size."""
    hw = composed("hw=v6e8").hw
    assert hw.chip is not None
    time = step_time(WORK, chip=hw.chip, topology=hw.topology, calibration=CALIBRATION)
    run = example_run(time.total_s)
    t4 = composed("hw=t4x2").hw
    return Plan(
        name="mistral7b_wiki_ro_v6e8",
        job="0123456789abcdef",
        programs_key="fedcba9876543210",
        model="mistral7b",
        data=("wiki_ro", "ultrachat_ro"),
        hw=hw,
        sharding="fsdp",
        global_batch=32,
        micro_batch=4,
        seq_len=2048,
        fits=True,
        memory=ChipMemory(2.2, 6.4, 0.0, 31.25, {"base weights": 1.7, "adapters": 0.2, "activations": 5.0}),
        flops=FLOPS,
        calibration=CALIBRATION,
        programs=PROGRAMS,
        work=WORK,
        cycles_by_class={
            "matmul": 1_500_000_000,
            "elementwise": 500_000_000,
            "gather_scatter": 140_000_000,
            "other": 0,
        },
        time=time,
        run=run,
        cost=cost_of(run, price=hw.price, num_devices=8, calibration=CALIBRATION),
        ladder=(Rung(4, 8.6, True), Rung(16, 33.0, False, 27.8)),
        search=TRIED,
        comparisons=(datasheet_comparison(t4, flops=FLOPS, tokens_per_step=32 * 2048, run=run, fits=None),),
        versions={"libtpu": "0.0.21", "torch_xla": "2.9.0"},
        flags=("--xla_tpu_enable_deduplicated_calls=true", "--xla_tpu_enable_flash_attention=false"),
        notes=("the chat stage needs less",),
    )


def plan_that_does_not_fit() -> Plan:
    """The same without a step time: the compiler refused it."""
    shortage = Shortage(
        "Ran out of memory in memory space hbm. Used 36.22G of 31.25G hbm",
        36.22,
        31.25,
        (LargeBuffer(2**31, "bf16[32,2048,2048]", "attention scores"),),
        ("trainer.micro_batch_rows=1",),
    )
    memory = ChipMemory(13.97, 22.25, 0.0, 31.25)
    plan = replace(example_plan(), fits=False, memory=memory, shortage=shortage, time=None, work=None)
    return replace(plan, run=None, cost=None, comparisons=(), cycles_by_class={}, programs=())
