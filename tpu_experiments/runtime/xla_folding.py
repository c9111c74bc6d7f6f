"""The `Folding` on torch_xla, built the same way for a run and for its memory plan."""

from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.mesh import Mesh
from tpu_experiments.runtime.layout import Folding, as_it_lies
from tpu_experiments.runtime.sharding import ShardingTable
from tpu_experiments.runtime.xla_host import host_memory_for
from tpu_experiments.runtime.xla_layout import lay_over
from tpu_experiments.runtime.xla_loop import loop_for


def folding_on(device: str, *, hw: HwConfig, mesh: Mesh, table: ShardingTable) -> Folding:
    """Return the folding of programs for `device`; only `spmd` shards them over the mesh.

    Args:
        device: type of device, such as `tpu`, in either case.
    """
    if hw.parallel == "spmd":
        loop, lay = loop_for(device, mesh=mesh), lay_over(mesh)
    else:
        loop, lay = loop_for(device, mesh=Mesh()), as_it_lies
    return Folding(loop, lay, table.axes, host_memory_for(device))
