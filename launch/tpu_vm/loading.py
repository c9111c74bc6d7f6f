"""Upload prepared shards to a bucket, or copy them to a disk shared by a slice's VMs (load_data).

The disk is mounted read-only by every VM. It is filled by a small VM in the same zone, which is always deleted
afterwards; the disk is kept, and is billed by size until it is deleted.
"""

import shlex
from collections.abc import Callable
from dataclasses import replace

from launch.tpu_vm import commands, launching
from launch.tpu_vm.cloud import Cloud, CloudError
from launch.tpu_vm.commands import LABEL, Target
from launch.tpu_vm.errors import LaunchError
from launch.tpu_vm.known import settings_of
from launch.tpu_vm.launching import World
from launch.tpu_vm.slices import load_slice

VM_TYPE = "c3-standard-4"  # supports both Hyperdisk ML and balanced disks
SCOPES = "https://www.googleapis.com/auth/cloud-platform"


def create_disk(target: Target, disk_type: str) -> list[str]:
    """Create an empty disk."""
    settings = target.settings
    words = ["gcloud", "compute", "disks", "create", settings.data_disk, *target.place, f"--type={disk_type}"]
    return [*words, f"--size={settings.data_disk_gb}GB", f"--labels={LABEL}={settings.name}", "--quiet"]


def create_vm(target: Target, vm: str) -> list[str]:
    """Create a VM with the disk attached for writing; it deletes itself after 12 h at the latest."""
    words = ["gcloud", "compute", "instances", "create", vm, *target.place, f"--machine-type={VM_TYPE}"]
    words += [f"--labels={LABEL}={target.settings.name}", f"--scopes={SCOPES}", "--image-family=debian-12"]
    words += ["--image-project=debian-cloud", "--max-run-duration=12h", "--instance-termination-action=DELETE"]
    words += [f"--disk=name={target.settings.data_disk},device-name=data,mode=rw,boot=no,auto-delete=no"]
    return [*words, "--quiet"]


def fill(target: Target, vm: str) -> list[str]:
    """Format the disk if it is empty, mount it, and copy the bucket onto it."""
    device, bucket = "/dev/disk/by-id/google-data", shlex.quote(target.settings.source)
    command = (
        f"set -e; sudo blkid {device} >/dev/null || sudo mkfs.ext4 -q -m 0 {device}; sudo mkdir -p /mnt/data; "
        f"mountpoint -q /mnt/data || sudo mount -o discard,defaults {device} /mnt/data; "
        f"sudo chmod 777 /mnt/data; gcloud storage rsync --recursive {bucket} /mnt/data; sync; sudo umount /mnt/data"
    )
    words = ["gcloud", "compute", "ssh", vm, *target.place, "--quiet", "--strict-host-key-checking=no"]
    return [*words, f"--command={command}"]


def delete_vm(target: Target, vm: str) -> list[str]:
    """Delete the VM and keep the disk."""
    return ["gcloud", "compute", "instances", "delete", vm, *target.place, "--keep-disks=data", "--quiet"]


def share_disk(target: Target) -> list[str]:
    """Switch a Hyperdisk ML to READ_ONLY_MANY, so that many VMs can attach it."""
    words = ["gcloud", "compute", "disks", "update", target.settings.data_disk, *target.place]
    return [*words, "--access-mode=READ_ONLY_MANY", "--quiet"]


def list_vms(target: Target) -> list[str]:
    """List the VMs that load_data created."""
    return _listing(target, "instances")


def list_disks(target: Target) -> list[str]:
    """List the disks that load_data created."""
    return _listing(target, "disks")


def _listing(target: Target, kind: str) -> list[str]:
    account = [f"--account={target.settings.account}"] if target.settings.account else []
    place = [f"--project={target.project}", f"--zones={target.zone}", *account]
    return ["gcloud", "compute", kind, "list", *place, f"--filter=labels.{LABEL}:*", "--format=json"]


def to_bucket(cloud: Cloud, *, source: str, bucket: str) -> None:
    """Upload the shards of a local folder to a bucket, skipping what is already there."""
    cloud.call(commands.bucket_fill(source, bucket), timeout=24 * 3600.0)


def to_disk(cloud: Cloud, target: Target, *, disk_type: str, say: Callable[[str], None]) -> None:
    """Copy the shards of a bucket to the disk, with a VM that is always deleted afterwards.

    Raises:
        CloudError: the disk could not be filled, or its VM could not be deleted.
    """
    vm = f"{target.settings.data_disk}-loader"
    _unless_there(cloud, create_disk(target, disk_type))
    try:
        say(f"filling {target.settings.data_disk} from {target.settings.source} with the VM {vm}")
        _unless_there(cloud, create_vm(target, vm))
        cloud.call(fill(target, vm), timeout=12 * 3600.0)
    finally:
        cloud.call(delete_vm(target, vm), timeout=600.0)
        say(f"{vm} is deleted; the disk {target.settings.data_disk} stays")
    if disk_type == "hyperdisk-ml":
        cloud.call(share_disk(target))


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
    target = Target(settings, launching.project_of(world, settings), settings.zones[0], "-")
    disk_type = load_slice(settings.hw).disk_type
    world.confirm(f"make the disk {settings.data_disk}, {settings.data_disk_gb} GB of {disk_type}; it costs?", settings)
    to_disk(cloud, target, disk_type=disk_type, say=world.say)
    world.say(f"attach it with data_disk={settings.data_disk}; the run reads prepare.folder={settings.data_mount}")
    return 0
