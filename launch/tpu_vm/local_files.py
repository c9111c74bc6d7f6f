"""What the launcher writes on this machine besides its state; a dry run writes nothing."""

import shutil
import tarfile
import zlib
from pathlib import Path

from launch.tpu_vm import code_sync
from launch.tpu_vm.errors import RemoteError


class LocalFiles:
    """For real."""

    def archive(self, file: Path) -> str:
        """The working tree as one file; what it is in words."""
        return code_sync.archive(file)

    def make_dirs(self, folder: Path) -> None:
        """The folder and its parents."""
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, file: Path, text: str) -> None:
        """A log."""
        self.make_dirs(file.parent)
        file.write_text(text, encoding="utf-8")

    def deploy_key(self, folder: Path) -> tuple[str, str]:
        """The private and the public key; made where there is none."""
        file, public = code_sync.deploy_key(folder)
        return file.read_text(encoding="utf-8"), public

    def names(self, folder: Path) -> list[str]:
        """What is in a folder."""
        return sorted(path.name for path in folder.iterdir())

    def unpack(self, file: Path, into: Path) -> list[str]:
        """The results in a tar file, which is then deleted; their names.

        Raises:
            RemoteError: it is damaged, or holds what no results hold.
        """
        self.make_dirs(into)
        try:
            names = _unpacked(file, into)
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise RemoteError(f"the results came damaged: {error}") from error
        file.unlink()
        return names


def _unpacked(file: Path, into: Path) -> list[str]:
    """Write regular files below `into`, and nothing else: tarfile's own filter is not in Python 3.11.0 to 3.11.3."""
    root, names = into.resolve(), set()
    with tarfile.open(file) as tar:
        for member in tar:
            place = (root / member.name).resolve()
            if not place.is_relative_to(root) or not (member.isfile() or member.isdir()):
                raise tarfile.TarError(f"{member.name} is no file of a run")
            names.add(member.name.split("/")[0])
            content = tar.extractfile(member)
            if content is not None:
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("wb") as written:
                    shutil.copyfileobj(content, written)
    return sorted(names)


class NoFiles(LocalFiles):
    """For --dry-run."""

    def archive(self, file: Path) -> str:
        """Nothing is packed."""
        return "the files of this working tree"

    def make_dirs(self, folder: Path) -> None:
        """Nothing is made."""

    def write(self, file: Path, text: str) -> None:
        """Nothing is written."""

    def deploy_key(self, folder: Path) -> tuple[str, str]:
        """None is made."""
        return "(the private key)\n", "ssh-ed25519 (made when it is no dry run)"

    def names(self, folder: Path) -> list[str]:
        """Nothing came."""
        return []

    def unpack(self, file: Path, into: Path) -> list[str]:
        """Nothing came."""
        return []
