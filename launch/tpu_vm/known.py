"""Load settings, and the launches recorded on this machine."""

from pathlib import Path

from launch.tpu_vm import launching
from launch.tpu_vm.driver import Driver
from launch.tpu_vm.errors import LaunchError
from launch.tpu_vm.launching import World
from launch.tpu_vm.settings import Settings, parse, read_env_file
from launch.tpu_vm.slices import hw_of
from launch.tpu_vm.state import Record


def settings_of(words: list[str]) -> tuple[Settings, dict[str, str]]:
    """Parse settings from the command line and the .env file; return them with the file's content.

    Raises:
        LaunchError: `env_file=` names a file that does not exist, or a setting is refused.
    """
    named = [word.split("=", 1)[1] for word in words if word.startswith("env_file=")]
    file = Path(named[-1] if named else Settings().env_file)
    if named and not file.is_file():
        raise LaunchError(f"env_file={file}; there is no such file.")
    content = read_env_file(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return parse(words, env_file=content, hw_of=hw_of), content


def require_name(settings: Settings) -> None:
    if not settings.name:
        raise LaunchError("name=; it is missing; it stands for the machine in the commands that follow.")


def known_record(world: World, settings: Settings) -> Record:
    """Return the record of the launch named by `name=`.

    Raises:
        LaunchError: no such launch is recorded here.
    """
    require_name(settings)
    record = world.store(launching.folder_of(settings), settings.name).load()
    if record is None:
        raise LaunchError(f"name={settings.name}; no launch of that name is known in {launching.folder_of(settings)}.")
    return record


def known_driver(world: World, words: list[str]) -> Driver:
    """Return the driver of a recorded launch."""
    settings, _ = settings_of(words)
    record = known_record(world, settings)
    settings, env_file = settings_of([*record.words, *words])
    secrets = launching.secrets_of(world, settings, env_file)
    return launching.driver_of(world, record, settings, secrets=secrets)
