"""Hydra instantiates launchers of this namespace only, and finds them by looking into it."""

from tpu_experiments.sweeping import launcher


class PointLauncher(launcher.PointLauncher):
    """Every point of a sweep as a process of its own."""
