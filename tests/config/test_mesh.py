"""Sizes of the mesh, the order of its devices, and what is said of sizes that do not go together."""

import numpy as np
import pytest

from tests.config.composing import composed
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.mesh import Mesh, mesh_of, resolved
from tpu_experiments.config.model_schema import AXES, MeshConfig


@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [
        ((1, -1, 1), Mesh(1, 8, 1)),
        ((2, -1, 1), Mesh(2, 4, 1)),
        ((-1, 2, 2), Mesh(2, 2, 2)),
        ((2, 1, 4), Mesh(2, 1, 4)),
    ],
)
def test_one_size_may_be_what_the_others_leave(sizes: tuple[int, int, int], mesh: Mesh) -> None:
    assert resolved(MeshConfig(*sizes), num_devices=8) == mesh
    assert mesh.num_devices == 8


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((3, -1, 1), "data=3, fsdp=-1, tensor=1 and hw.num_devices=8; 3 does not divide 8; choose sizes whose product"),
        (
            (2, 2, 1),
            "data=2, fsdp=2, tensor=1 and hw.num_devices=8; that is 4 devices; choose sizes whose product is 8",
        ),
        ((16, -1, 1), "16 does not divide 8"),
        ((-1, -1, 1), "data=-1, fsdp=-1, tensor=1; a size is 1 or more, and one of them may be -1"),
        ((0, -1, 1), "data=0, fsdp=-1, tensor=1; a size is 1 or more"),
        ((-2, 4, 1), "a size is 1 or more"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused_in_one_sentence(sizes: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(MeshConfig(*sizes), num_devices=8)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_without_spmd_nothing_is_split() -> None:
    sharding = composed("sharding=hsdp").sharding
    assert mesh_of(HwConfig(parallel="inline", num_devices=1), sharding).num_shards == 1
    assert mesh_of(HwConfig(parallel="spawn", num_devices=4), sharding) == Mesh(fsdp=4)


@pytest.mark.parametrize("mesh", [Mesh(1, 8, 1), Mesh(2, 4, 1), Mesh(2, 2, 2), Mesh(2, 1, 4)])
@pytest.mark.parametrize(
    "axes",
    [
        (("data", "fsdp"), None, None),
        (None, "fsdp"),
        ("tensor", "fsdp"),
        ("fsdp", "tensor"),
        (("tensor", "fsdp"), None),
        (None, ("fsdp", "tensor")),
        (None, None),
        ("data",),
    ],
)
def test_devices_of_every_part_are_those_of_the_mesh(
    mesh: Mesh, axes: tuple[str | tuple[str, ...] | None, ...]
) -> None:
    """Against the definition: part (i, j) is held by the devices whose coordinates along its axes count to i and j."""
    split = mesh.split(mesh.named(axes), ndim=len(axes))
    assert split.copies * int(np.prod(split.tiles)) == 8
    by_part = np.array(split.devices).reshape(*split.tiles, split.copies)
    sizes = [mesh.size(name) for name in AXES]
    coordinates = {device: dict(zip(AXES, where, strict=True)) for device, where in enumerate(np.ndindex(*sizes))}
    for part in np.ndindex(*split.tiles):
        for device in by_part[part]:
            for index, axis in zip(part, axes, strict=True):
                names = [axis] if isinstance(axis, str) else list(axis or ())
                place = 0
                for name in names:
                    place = place * mesh.size(name) + coordinates[int(device)][name]
                assert place == index
    assert split.is_whole == (split.copies == 8)


def test_rows_lie_in_the_order_of_the_devices() -> None:
    """So that kernels and stacks, which know of rows and of devices that share them, need not know of the mesh."""
    for mesh in (Mesh(2, 4, 1), Mesh(2, 2, 2)):
        assert mesh.split((("data", "fsdp"),), ndim=3).devices == tuple(range(8))


def test_rows_are_cut_for_those_that_do_not_share_them() -> None:
    with pytest.raises(
        ConfigError, match=r"=6 is not a multiple of 4, the devices of hw.num_devices=8 along .* 4 or 8"
    ):
        composed(
            "hw.parallel=spmd", "hw.num_devices=8", "sharding=fsdp_tensor", "trainer.global_batch_rows=6", "debug=smoke"
        )
