"""Build every gcloud command line as a list of words; nothing here runs one.

`--accelerator-type` is used and never `--type`, which accepts no v5e or v6e outside alpha. Only ssh through IAP
(`network=internal`) needs the alpha track.
"""

import shlex
from dataclasses import dataclass

from launch.tpu_vm.settings import Settings
from launch.tpu_vm.slices import Slice

LABEL = "tpu-experiments"
CHECKOUT = "tpu_experiments"
"""Folder of the code in the VM's home directory."""
TUNNELS = 8
"""Workers addressed at a time through IAP."""
CLOUD_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
LOADER_TYPE = "c3-standard-4"  # supports both Hyperdisk ML and balanced disks


@dataclass(frozen=True)
class Target:
    """Destination of commands: project, zone, and the id shared by the queued resource and its node."""

    settings: Settings
    project: str
    zone: str
    resource: str

    @property
    def place(self) -> list[str]:
        """Return the flags that every command takes."""
        account = [f"--account={self.settings.account}"] if self.settings.account else []
        return [f"--project={self.project}", f"--zone={self.zone}", *account]


def create(target: Target, slice_: Slice, *, watchdog: str, watchdog_seconds: float, valid_seconds: float) -> list[str]:
    """Request a queued resource with one node.

    Args:
        watchdog: file of the VM's start-up script.
        watchdog_seconds: time after which the VM deletes itself, at least 60.
        valid_seconds: time in the queue after which the request fails by itself, at least 600.
    """
    settings = target.settings
    metadata = {
        "tpuexp-project": target.project,
        "tpuexp-zone": target.zone,
        "tpuexp-resource": target.resource,
        "tpuexp-seconds": f"{max(60, watchdog_seconds):.0f}",
        "tpuexp-idle-seconds": f"{settings.idle_minutes * 60:.0f}",
    }
    words = ["gcloud", "compute", "tpus", "queued-resources", "create", target.resource, f"--node-id={target.resource}"]
    words += [*target.place, f"--accelerator-type={slice_.accelerator_type}"]
    words += [f"--runtime-version={settings.runtime_version or slice_.runtime_version}"]
    words += ["--spot"] if settings.spot else []
    words += [f"--valid-until-duration={max(600, valid_seconds):.0f}s"]
    words += [f"--labels={LABEL}={settings.name}", f"--scopes={CLOUD_SCOPE}"]
    words += [f"--service-account={settings.service_account}"] if settings.service_account else []
    words += ["--internal-ips"] if settings.network == "internal" else []
    if settings.data_disk:
        words += [
            f"--data-disk=source=projects/{target.project}/zones/{target.zone}/disks/{settings.data_disk},mode=read-only"
        ]
    words += ["--metadata=" + ",".join(f"{key}={value}" for key, value in metadata.items())]
    return [*words, f"--metadata-from-file=startup-script={watchdog}", "--async", "--quiet", "--format=json"]


def describe(target: Target) -> list[str]:
    """Describe the queued resource."""
    return [
        "gcloud",
        "compute",
        "tpus",
        "queued-resources",
        "describe",
        target.resource,
        *target.place,
        "--format=json",
    ]


def describe_node(target: Target) -> list[str]:
    """Describe the node of the queued resource."""
    return ["gcloud", "compute", "tpus", "tpu-vm", "describe", target.resource, *target.place, "--format=json"]


def delete(target: Target) -> list[str]:
    """Delete the queued resource with its node."""
    words = ["gcloud", "compute", "tpus", "queued-resources", "delete", target.resource, *target.place]
    return [*words, "--force", "--quiet", "--async"]


def delete_node(target: Target) -> list[str]:
    """Delete a node that no queued resource created."""
    return ["gcloud", "compute", "tpus", "tpu-vm", "delete", target.resource, *target.place, "--quiet", "--async"]


def listing(target: Target, kind: str) -> list[str]:
    """List all `queued-resources` or all `tpu-vm` of a zone; the zone `-` is every zone."""
    return ["gcloud", "compute", "tpus", kind, "list", *target.place, "--format=json"]


def ssh(target: Target, command: str, *, worker: str = "all") -> list[str]:
    """Run `command` on one worker, or on all of them at once."""
    words = [*_tpu_vm(target), "ssh", target.resource, *target.place, f"--worker={worker}"]
    words += _tunnel(target, worker=worker)
    return [*words, "--quiet", "--strict-host-key-checking=no", f"--command={command}"]


def shell(target: Target, *, worker: str) -> list[str]:
    """Open a login shell on a worker, with the VM's `ports` on this machine's localhost."""
    words = [*_tpu_vm(target), "ssh", target.resource, *target.place, f"--worker={worker}"]
    words += _tunnel(target, worker=worker)
    forwards = [word for port in target.settings.ports for word in ("-L", _forward(port))]
    return [*words, "--", *forwards] if forwards else words


def _forward(port: str) -> str:
    """Return ssh's -L for `6006`, or for `16006:6006`, where the first is this machine's."""
    here, _, there = port.partition(":")
    return f"localhost:{here}:localhost:{there or here}"


def copy_to(target: Target, local: str, remote: str) -> list[str]:
    """Copy a file to all workers."""
    words = [*_tpu_vm(target), "scp", local, f"{target.resource}:{remote}", *target.place, "--worker=all"]
    words += _tunnel(target, worker="all")
    return [*words, "--quiet", "--strict-host-key-checking=no"]


def copy_from(target: Target, remote: str, local: str) -> list[str]:
    """Copy a file or folder from worker 0 to this machine."""
    words = [*_tpu_vm(target), "scp", "--recurse", f"{target.resource}:{remote}", local, *target.place, "--worker=0"]
    words += _tunnel(target, worker="0")
    return [*words, "--quiet", "--strict-host-key-checking=no"]


def _tpu_vm(target: Target) -> list[str]:
    """Return the gcloud command group; only its alpha track supports IAP."""
    track = ["alpha"] if target.settings.network == "internal" else []
    return ["gcloud", *track, "compute", "tpus", "tpu-vm"]


def _tunnel(target: Target, *, worker: str) -> list[str]:
    """Return the IAP flags, with workers in batches: sshd refuses more than ten simultaneous handshakes."""
    if target.settings.network != "internal":
        return []
    return ["--tunnel-through-iap", *([f"--batch-size={TUNNELS}"] if worker == "all" else [])]


def bucket_copy(source: str, local: str) -> list[str]:
    """Copy a file or folder of a bucket to a local folder."""
    return ["gcloud", "storage", "cp", "--recursive", source, local]


def bucket_look(address: str) -> list[str]:
    """List an object, which fails if it does not exist."""
    return ["gcloud", "storage", "ls", address]


def bucket_part(source: str, local: str, *, kept: str) -> list[str]:
    """Copy the objects of a bucket folder whose relative names match `kept` to an existing local folder.

    `--exclude` is matched from the first character on; a leading ^ would set gcloud's list separator.
    """
    return ["gcloud", "storage", "rsync", "--recursive", f"--exclude=(?!({kept})$)", source, local]


def bucket_read(address: str) -> list[str]:
    """Print the text of an object."""
    return ["gcloud", "storage", "cat", address]


def bucket_fill(source: str, bucket: str) -> list[str]:
    """Upload a local folder to a bucket, skipping what is already there."""
    return ["gcloud", "storage", "rsync", "--recursive", source, bucket]


def project() -> list[str]:
    """Print gcloud's default project."""
    return ["gcloud", "config", "get-value", "project", "--quiet"]


def project_number(project_id: str, settings: Settings) -> list[str]:
    """Print the number of a project, which names its default Compute Engine account."""
    account = [f"--account={settings.account}"] if settings.account else []
    return ["gcloud", "projects", "describe", project_id, *account, "--format=value(projectNumber)", "--quiet"]


def policy(project_id: str, settings: Settings) -> list[str]:
    """Print the IAM policy of a project."""
    account = [f"--account={settings.account}"] if settings.account else []
    return ["gcloud", "projects", "get-iam-policy", project_id, *account, "--format=json", "--quiet"]


DELETER = "tpuexpDeleter"
"""Role of a project that holds tpu.nodes.delete and nothing else; roles/tpu.admin would let the VM create TPUs too."""
PERMISSION = "tpu.nodes.delete"


def create_role(project_id: str) -> list[str]:
    """Create the role to delete TPUs; shown to the user, since the launcher itself creates and grants no role."""
    return ["gcloud", "iam", "roles", "create", DELETER, f"--project={project_id}", f"--permissions={PERMISSION}"]


def grant(project_id: str, service_account: str) -> list[str]:
    """Grant that role; shown to the user."""
    words = ["gcloud", "projects", "add-iam-policy-binding", project_id, f"--member=serviceAccount:{service_account}"]
    return [*words, f"--role=projects/{project_id}/roles/{DELETER}", "--condition=None"]


def role(name: str, settings: Settings) -> list[str]:
    """Print the permissions of a project's or an organisation's own role, `projects/ID/roles/NAME`."""
    account = [f"--account={settings.account}"] if settings.account else []
    kind, owner, _, last = name.split("/")
    where = f"--{kind.removesuffix('s')}={owner}"
    return ["gcloud", "iam", "roles", "describe", last, where, *account, "--format=json", "--quiet"]


def create_disk(target: Target, disk_type: str) -> list[str]:
    """Create an empty disk."""
    settings = target.settings
    words = ["gcloud", "compute", "disks", "create", settings.data_disk, *target.place, f"--type={disk_type}"]
    return [*words, f"--size={settings.data_disk_gb}GB", f"--labels={LABEL}={settings.name}", "--quiet"]


def create_loader(target: Target, vm: str) -> list[str]:
    """Create a VM with the disk attached for writing; it deletes itself after 12 h at the latest."""
    words = ["gcloud", "compute", "instances", "create", vm, *target.place, f"--machine-type={LOADER_TYPE}"]
    words += [f"--labels={LABEL}={target.settings.name}", f"--scopes={CLOUD_SCOPE}", "--image-family=debian-12"]
    words += ["--image-project=debian-cloud", "--max-run-duration=12h", "--instance-termination-action=DELETE"]
    words += [f"--disk=name={target.settings.data_disk},device-name=data,mode=rw,boot=no,auto-delete=no"]
    return [*words, "--quiet"]


def fill_disk(target: Target, vm: str) -> list[str]:
    """Format the disk if it is empty, mount it, and copy the bucket onto it."""
    device, bucket = "/dev/disk/by-id/google-data", shlex.quote(target.settings.source)
    command = (
        f"set -e; sudo blkid {device} >/dev/null || sudo mkfs.ext4 -q -m 0 {device}; sudo mkdir -p /mnt/data; "
        f"mountpoint -q /mnt/data || sudo mount -o discard,defaults {device} /mnt/data; "
        f"sudo chmod 777 /mnt/data; gcloud storage rsync --recursive {bucket} /mnt/data; sync; sudo umount /mnt/data"
    )
    words = ["gcloud", "compute", "ssh", vm, *target.place, "--quiet", "--strict-host-key-checking=no"]
    return [*words, f"--command={command}"]


def delete_loader(target: Target, vm: str) -> list[str]:
    """Delete the VM and keep the disk."""
    return ["gcloud", "compute", "instances", "delete", vm, *target.place, "--keep-disks=data", "--quiet"]


def share_disk(target: Target) -> list[str]:
    """Switch a Hyperdisk ML to READ_ONLY_MANY, so that many VMs can attach it."""
    words = ["gcloud", "compute", "disks", "update", target.settings.data_disk, *target.place]
    return [*words, "--access-mode=READ_ONLY_MANY", "--quiet"]


def list_loaders(target: Target) -> list[str]:
    """List the VMs that load_data created."""
    return _labelled(target, "instances")


def list_disks(target: Target) -> list[str]:
    """List the disks that load_data created."""
    return _labelled(target, "disks")


def _labelled(target: Target, kind: str) -> list[str]:
    account = [f"--account={target.settings.account}"] if target.settings.account else []
    place = [f"--project={target.project}", *([f"--zones={target.zone}"] if target.zone != "-" else []), *account]
    return ["gcloud", "compute", kind, "list", *place, f"--filter=labels.{LABEL}:*", "--format=json"]
