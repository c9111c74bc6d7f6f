"""Settings, and the launches that this machine knows."""

from pathlib import Path

from launch.tpu_vm import launching
from launch.tpu_vm.driver import Driver
from launch.tpu_vm.errors import LaunchError
from launch.tpu_vm.launching import World
from launch.tpu_vm.settings import Settings, parse, read_env_file
from launch.tpu_vm.slices import hw_of
from launch.tpu_vm.state import Record


def settings_of(words: list[str]) -> tuple[Settings, dict[str, str]]:
    """Settings, and the content of the .env file."""
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
    """The launch of `name=`.

    Raises:
        LaunchError: it is not known here.
    """
    require_name(settings)
    record = world.store(launching.folder_of(settings), settings.name).load()
    if record is None:
        raise LaunchError(f"name={settings.name}; no launch of that name is known in {launching.folder_of(settings)}.")
    return record


def known_driver(world: World, words: list[str]) -> Driver:
    """Of a launch that is known."""
    settings, _ = settings_of(words)
    record = known_record(world, settings)
    settings, env_file = settings_of([*record.words, *words])
    secrets = launching.secrets_of(world, settings, env_file)
    return launching.driver_of(world, record, settings, secrets=secrets)
