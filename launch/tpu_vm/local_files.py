"""Write the launcher's local files besides its state; a dry run writes none."""

import shutil
import tarfile
import zlib
from pathlib import Path

from launch.tpu_vm import code_sync
from launch.tpu_vm.errors import RemoteError


class LocalFiles:
    """Access to the file system."""

    def archive(self, file: Path) -> str:
        """Pack the working tree into one file; return a description with count and size."""
        return code_sync.archive(file)

    def make_dirs(self, folder: Path) -> None:
        """Create the folder and its parents."""
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, file: Path, text: str) -> None:
        """Write a text file and create its folder."""
        self.make_dirs(file.parent)
        file.write_text(text, encoding="utf-8")

    def deploy_key(self, folder: Path) -> tuple[str, str]:
        """Return the private and the public key, created if missing."""
        file, public = code_sync.deploy_key(folder)
        return file.read_text(encoding="utf-8"), public

    def names(self, folder: Path) -> list[str]:
        """Return the sorted names in a folder."""
        return sorted(path.name for path in folder.iterdir())

    def unpack(self, file: Path, into: Path) -> list[str]:
        """Unpack the results from a tar file, delete it, and return their names.

        Raises:
            RemoteError: the file is damaged, or has entries outside `into` or of a special type.
        """
        self.make_dirs(into)
        try:
            names = _unpacked(file, into)
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise RemoteError(f"the results came damaged: {error}") from error
        file.unlink()
        return names


def _unpacked(file: Path, into: Path) -> list[str]:
    """Write only regular files below `into`; tarfile's own filter is missing in Python 3.11.0 to 3.11.3."""
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
    """File access of --dry-run, which writes nothing."""

    def archive(self, file: Path) -> str:
        """Return a description without packing."""
        return "the files of this working tree"

    def make_dirs(self, folder: Path) -> None:
        """Create nothing."""

    def write(self, file: Path, text: str) -> None:
        """Write nothing."""

    def deploy_key(self, folder: Path) -> tuple[str, str]:
        """Return placeholders for both keys."""
        return "(the private key)\n", "ssh-ed25519 (made when it is no dry run)"

    def names(self, folder: Path) -> list[str]:
        """Return no names."""
        return []

    def unpack(self, file: Path, into: Path) -> list[str]:
        """Return no names."""
        return []
