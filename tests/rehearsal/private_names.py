"""Private names of torch_xla in the product: those that ran through the TPU's client in a rehearsal, and the others."""

import importlib.util
from pathlib import Path
from types import ModuleType


def _watcher() -> ModuleType:
    spec = importlib.util.spec_from_file_location("watcher", Path(__file__).parent / "site" / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def used() -> dict[str, list[str]]:
    """Return the private names in the product's files, with the files."""
    found: dict[str, list[str]] = _watcher().private_names()
    return found


RAN = frozenset(
    {"_check_tensor_need_materialization", "_get_base_seed_as_tensor", "_get_graph_hash", "_get_tensors_handle"}
    | {"_get_local_shard_replica_and_indices", "_get_local_shards", "_get_tensors_xla_device_data_node"}
    | {"_get_xla_sharding_spec", "_get_xla_sharding_specs", "_get_xla_tensors_hlo", "_replace_xla_tensor"}
    | {"_run_cached_graph", "_set_buffer_donation", "_xla_counter_value", "_xla_dot_general", "_xla_get_cpu_tensors"}
    | {"_xla_get_rng_seed", "_xla_get_tensor_id", "_xla_mark_sharding", "_xla_user_computation", "_xla_warm_up_cache"}
)
"""Called in a rehearsal; test_rehearsal.py::test_private_names_run_through_the_client holds them."""
DID_NOT_RUN = {
    "OpSharding": "a class, made in every rehearsal of several chips; the calls above take it",
    "_set_ir_debug": "called behind an unexpected compilation, which ends the run; no device takes part",
    "_xla_all_reduce_inplace": "the plan's alone, which traces on the CPU device for spawn",
    "_xla_runtime_is_initialized": "asked only where libtpu's flags change behind the import; no device takes part",
    "lowering.LoweringContext": "the plan's alone, which traces on the CPU device",
    "profiler.TraceMe": "a class of the profiler, which the CPU plugin lacks",
}
"""With the reason."""
