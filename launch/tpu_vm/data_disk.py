"""Upload prepared shards to a bucket, or copy them to a disk shared by a slice's VMs (load_data).

The disk is mounted read-only by every VM. It is filled by a small VM in the same zone, which is always deleted
afterwards; the disk is kept, and is billed by size until it is deleted.
"""

from collections.abc import Callable
from dataclasses import replace

from launch.tpu_vm import gcloud, launches
from launch.tpu_vm.cloud import Cloud, CloudError
from launch.tpu_vm.errors import LaunchError
from launch.tpu_vm.gcloud import Target
from launch.tpu_vm.settings import settings_of
from launch.tpu_vm.slices import load_slice
from launch.tpu_vm.world import World


def to_bucket(cloud: Cloud, *, source: str, bucket: str) -> None:
    """Upload the shards of a local folder to a bucket, skipping what is already there."""
    cloud.call(gcloud.bucket_fill(source, bucket), timeout=24 * 3600.0)


def to_disk(cloud: Cloud, target: Target, *, disk_type: str, say: Callable[[str], None]) -> None:
    """Copy the shards of a bucket to the disk, with a VM that is always deleted afterwards.

    Raises:
        CloudError: the disk could not be filled, or its VM could not be deleted.
    """
    vm = f"{target.settings.data_disk}-loader"
    _unless_there(cloud, gcloud.create_disk(target, disk_type))
    try:
        say(f"filling {target.settings.data_disk} from {target.settings.source} with the VM {vm}")
        _unless_there(cloud, gcloud.create_loader(target, vm))
        cloud.call(gcloud.fill_disk(target, vm), timeout=12 * 3600.0)
    finally:
        cloud.call(gcloud.delete_loader(target, vm), timeout=600.0)
        say(f"{vm} is deleted; the disk {target.settings.data_disk} stays")
    if disk_type == "hyperdisk-ml":
        cloud.call(gcloud.share_disk(target))


def _unless_there(cloud: Cloud, words: list[str]) -> None:
    try:
        cloud.call(words, timeout=600.0)
    except CloudError as error:
        if error.kind != "exists":
            raise


def load_data(world: World, words: list[str], overrides: list[str]) -> int:
    """Copy prepared shards to a bucket or to a disk.

    Raises:
        LaunchError: the settings name neither, or lack a part.
    """
    settings, _ = settings_of(words)
    if not settings.source or not (settings.bucket or settings.data_disk):
        raise LaunchError(
            "load_data; give source=FOLDER bucket=gs://..., or source=gs://... data_disk=NAME zones=ZONE hw=."
        )
    cloud = Cloud(world.run, sleep=world.clock.sleep)
    if settings.bucket:
        to_bucket(cloud, source=settings.source, bucket=settings.bucket)
        world.say(f"the run reads it with prepare.folder={settings.bucket}")
        return 0
    if not settings.source.startswith("gs://") or len(settings.zones) != 1 or not settings.hw:
        raise LaunchError(
            "load_data data_disk=; a disk is filled from source=gs://..., in one zones=ZONE, for one hw=."
        )
    settings = replace(settings, name=settings.name or settings.data_disk)
    target = Target(settings, launches.project_of(world, settings), settings.zones[0], "-")
    disk_type = load_slice(settings.hw).disk_type
    world.confirm(f"make the disk {settings.data_disk}, {settings.data_disk_gb} GB of {disk_type}; it costs?", settings)
    to_disk(cloud, target, disk_type=disk_type, say=world.say)
    world.say(f"attach it with data_disk={settings.data_disk}; the run reads prepare.folder={settings.data_mount}")
    return 0
