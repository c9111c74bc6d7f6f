"""Commands on a host that looks as if it had TPU chips: on the PCI bus and as device nodes of a mount namespace."""

import functools
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

V5E, V6E = "0x0063", "0x006f"
"""PCI device ids of Google's chips."""
NAMESPACE = r"""
set -e
mount --make-rprivate /
mount -t tmpfs none /sys/bus/pci/devices
new=$(mktemp -d)
mount -t tmpfs none "$new"
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty "$new"
ln -s /proc/self/fd "$new/fd"; ln -s fd/0 "$new/stdin"; ln -s fd/1 "$new/stdout"; ln -s fd/2 "$new/stderr"
mkdir "$new/shm" "$new/pts" "$new/vfio"
mount --bind /dev/shm "$new/shm"
[ ! -d /dev/pts ] || mount --rbind /dev/pts "$new/pts"
[ ! -e /dev/ptmx ] || cp -a /dev/ptmx "$new"
for number in $(seq 0 $(($1 - 1))); do
    chip=/sys/bus/pci/devices/0000:00:$(printf %02x "$number").0
    mkdir "$chip"; echo 0x1ae0 >"$chip/vendor"; echo "$2" >"$chip/device"
    : >"$new/vfio/$number"
done
mount --move "$new" /dev
rmdir "$new"
shift 2
while [ "$1" != -- ]; do mount --bind "$1" "$2"; shift 2; done
shift
exec "$@"
"""
"""Shell script: number of chips, their PCI device id, pairs of a file and where it is bound, `--`, a command."""


def on_host(
    words: Sequence[str],
    *,
    num_chips: int = 1,
    device: str = V6E,
    files: Mapping[str, Path] | None = None,
    has_network: bool = True,
) -> list[str]:
    """Return the command that runs `words` on such a host.

    Args:
        files: by the path that each takes the place of.
        has_network: whether it has this machine's network; otherwise it has a loopback that is down.
    """
    bound = [word for path, file in (files or {}).items() for word in (str(file), path)]
    kinds = ["--mount"] if has_network else ["--mount", "--net"]
    return ["unshare", *kinds, "sh", "-c", NAMESPACE, "sh", str(num_chips), device, *bound, "--", *words]


@functools.cache
def problem() -> str | None:
    """Return why this user cannot make such hosts; None where he can."""
    if shutil.which("unshare") is None:
        return "there is no command unshare"
    done = subprocess.run(on_host(["true"], has_network=False), capture_output=True, text=True)
    return f"no mount namespace of one's own: {done.stderr.strip()[-200:]}" if done.returncode else None
