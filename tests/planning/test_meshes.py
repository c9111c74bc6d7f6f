"""What a plan makes of a mesh of several axes: shardings of arguments, bytes per chip, the batch."""

from dataclasses import replace

import pytest

from tests.config.composing import composed
from tests.planning.examples import example_plan
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.mesh import Axes, Mesh, mesh_of
from tpu_experiments.planning.analytic import step_settings
from tpu_experiments.planning.compiled import gib_by_class
from tpu_experiments.planning.plan import named_sharding
from tpu_experiments.planning.report import summary_rows
from tpu_experiments.runtime.lowered import Argument, Lowered

MIB = 2**20


@pytest.mark.parametrize(
    ("axes", "mesh", "text"),
    [
        (("fsdp", None), Mesh(fsdp=8), "{devices=[8,1]<=[8]}"),
        ((None, None), Mesh(fsdp=8), "{replicated}"),
        (("fsdp", None), Mesh(data=8), "{replicated}"),
        ((("data", "fsdp"), None), Mesh(2, 4), "{devices=[8,1]<=[8]}"),
        ((None, "fsdp"), Mesh(2, 4), "{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"),
        ((None, "tensor", "fsdp"), Mesh(1, 2, 2), "{devices=[1,2,2]0,2,1,3}"),
        ((("data", "fsdp"), None), Mesh(2, 2, 2), "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"),
        ((["tensor", "fsdp"],), Mesh(1, 2, 2), "{devices=[4]0,2,1,3}"),
    ],
)
def test_shardings_in_the_words_of_xla(axes: Axes, mesh: Mesh, text: str) -> None:
    assert mesh.sharding_text(axes) == text


def test_a_chip_holds_its_part_of_an_argument() -> None:
    axes: tuple[Axes, ...] = ((None, "fsdp"), ("tensor", "fsdp"), (None, None))
    arguments = tuple(
        Argument(f"w{n}.weight", (MIB, 1024), "bfloat16", split, None) for n, split in enumerate(axes)
    )  # 2 GiB each
    mesh = Mesh(data=2, fsdp=2, tensor=2)
    program = Lowered("train", (1, 8, 4), b"", arguments, (), mesh=mesh, num_replicas=1, trace_seconds=0.0)
    found = {gib_by_class([a], program=program, trained=())["base weights"] for a in arguments}
    assert found == {1.0, 0.5, 2.0}


@pytest.mark.parametrize(
    ("sharding", "shared_by", "shards", "name"),
    [
        ("fsdp", 8, 8, "fsdp"),
        ("hsdp", 4, 8, "hsdp (data=2, fsdp=4)"),
        ("fsdp_tensor", 8, 4, "fsdp_tensor (fsdp=4, tensor=2)"),
    ],
)
def test_formulas_and_batch_know_the_mesh(sharding: str, shared_by: int, shards: int, name: str) -> None:
    config = composed("experiment=mistral7b_ro", f"sharding={sharding}", "task=plan")
    geometry = resolve_stages(config)[0].geometry
    assert step_settings(config, geometry).chips == shared_by
    assert geometry.num_shards == shards
    assert geometry.micro_rows * geometry.accumulation * shards == geometry.global_rows == 64
    assert named_sharding(config, mesh=mesh_of(config.hw, config.sharding)) == name


def test_the_report_says_how_many_chips_share_rows() -> None:
    plan = example_plan()
    rows = dict(summary_rows(replace(plan, sharing_rows=2, micro_batch=plan.micro_batch * 2)))
    assert " per 2 chips x " in rows["batch"]
    assert " x 8 chips / 2, " in rows["batch"]
    assert replace(plan, sharing_rows=2, micro_batch=plan.micro_batch * 2).accumulation == plan.accumulation
