"""Transfer the code to the VM: an archive of this working tree, or a sparse clone made on the VM."""

import io
import os
import re
import shlex
import subprocess
import tarfile
from pathlib import Path

from launch.tpu_vm.errors import LaunchError
from launch.tpu_vm.gcloud import CHECKOUT
from launch.tpu_vm.settings import Settings

ROOT = Path(__file__).parents[2]
MAX_MB = 100
PRIVATE = (".env", "deploy_key")
"""Suffixes of files that never leave this machine, whether git ignores them or not."""
KEY_FILE = "~/.ssh/tpu_experiments_deploy"


def working_tree(root: Path = ROOT) -> list[str]:
    """Return the tracked and the untracked, not ignored files, with their uncommitted changes.

    Raises:
        LaunchError: `root` is no git checkout, or its files exceed 100 MB.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False)
    if listing.returncode:
        raise LaunchError(f"code=archive; {root} is no git checkout; run from one, or use code=clone repo=.")
    names = sorted({name for name in listing.stdout.split("\0") if name})
    names = [name for name in names if (root / name).is_file() and not name.endswith(PRIVATE)]
    sizes = {name: (root / name).stat().st_size for name in names}
    if sum(sizes.values()) > MAX_MB * 10**6:
        largest = ", ".join(sorted(sizes, key=lambda name: -sizes[name])[:3])
        raise LaunchError(
            f"code=archive; {sum(sizes.values()) / 1e6:.0f} MB, above {MAX_MB}; ignore {largest} in .gitignore."
        )
    return names


def archive(file: Path, root: Path = ROOT) -> str:
    """Write the working tree and its commit (`.commit`) as a tar.gz; return a description of it."""
    names = working_tree(root)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as tar:
        for name in names:
            tar.add(root / name, arcname=name, recursive=False)
        commit = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, check=False).stdout
        entry = tarfile.TarInfo(".commit")
        entry.size = len(commit)
        tar.addfile(entry, io.BytesIO(commit))
    return f"{len(names)} files, {file.stat().st_size / 1e6:.1f} MB"


def unpack_command(name: str) -> str:
    """Return the VM's command that replaces the code and keeps its environment and outputs."""
    keep = " ".join(f"! -name {shlex.quote(kept)}" for kept in (".venv", ".venv.lock", "outputs"))
    return (
        f"set -e; mkdir -p ~/{CHECKOUT}; cd ~/{CHECKOUT}; "
        f"find . -mindepth 1 -maxdepth 1 {keep} -exec rm -rf {{}} +; tar -xzf ~/{shlex.quote(name)}"
    )


def clone_command(settings: Settings) -> str:
    """Return the VM's command that makes or updates a sparse, blobless clone of one commit."""
    ssh = f"ssh -i {KEY_FILE} -o IdentitiesOnly=yes -o StrictHostKeyChecking=accept-new"
    private = f"export GIT_SSH_COMMAND={shlex.quote(ssh)}; " if is_private(settings) else ""
    repo, ref = shlex.quote(settings.repo), shlex.quote(settings.ref)
    folders = " ".join(shlex.quote(folder) for folder in settings.folders)
    return (
        f"set -e; {private}if [ ! -d ~/{CHECKOUT}/.git ]; then rm -rf ~/{CHECKOUT}; "
        f"git clone --quiet --depth=1 --filter=blob:none --sparse --branch {ref} {repo} ~/{CHECKOUT}; fi; "
        f"cd ~/{CHECKOUT}; git sparse-checkout set --cone {folders}; "
        f"git fetch --quiet --depth=1 origin {ref}; git checkout --quiet --force FETCH_HEAD"
    )


def is_private(settings: Settings) -> bool:
    """Return whether the repository is cloned over ssh with a deploy key."""
    return not settings.repo.startswith("https://")


def keep_key_command() -> str:
    """Return the VM's command that stores the deploy key, read from stdin, with mode 0600."""
    return f"umask 077; mkdir -p ~/.ssh; cat >{KEY_FILE}"


def key_folder(state: Path, settings: Settings) -> Path:
    """Return the key folder of a repository; a git host accepts a deploy key for one repository only."""
    return state / "keys" / re.sub(r"[^A-Za-z0-9]+", "-", settings.repo)


def deploy_key(folder: Path) -> tuple[Path, str]:
    """Return the private key's file (mode 0600) and the public key (ed25519), created if missing.

    Raises:
        LaunchError: ssh-keygen failed.
    """
    file = folder / "deploy_key"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "tpu_experiments deploy key", "-f", str(file)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise LaunchError(f"repo=; ssh-keygen made no key: {done.stderr.strip()}")
    return file, file.with_suffix(".pub").read_text(encoding="utf-8").strip()
