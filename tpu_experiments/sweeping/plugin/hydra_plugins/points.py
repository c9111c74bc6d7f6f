"""Register the launcher: Hydra finds and instantiates launchers of this namespace only."""

from tpu_experiments.sweeping import launcher


class PointLauncher(launcher.PointLauncher):
    """Hydra launcher that runs every point of a sweep as a process of its own."""
