"""Index and addresses of the workers of a TPU slice."""

from torch_xla._internal import tpu


def workers() -> tuple[int, list[str]]:
    """Return the index of this worker and the addresses of all workers by index.

    They are from the VM's metadata, or on GKE from TPU_WORKER_ID and TPU_WORKER_HOSTNAMES. No device is initialised.
    """
    return tpu.worker_id(), tpu.get_worker_ips()
