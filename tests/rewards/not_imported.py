"""A module that cannot be imported, for the tests."""

raise RuntimeError("not today")


def reward() -> None:
    """Never reached."""
