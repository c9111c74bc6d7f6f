"""Which worker of a TPU slice this machine is."""

from torch_xla._internal import tpu


def workers() -> tuple[int, list[str]]:
    """Number of this worker, and the addresses of all in their order: from the VM's metadata, or on GKE from
    TPU_WORKER_ID and TPU_WORKER_HOSTNAMES; no device is touched."""
    return tpu.worker_id(), tpu.get_worker_ips()
