"""Exceptions that end a command, with its exit code."""

REFUSED, FAILED, STOPPED = 2, 1, 75


class UnreachableError(Exception):
    """ssh or the bucket could not be reached; the machine may be gone, or busy."""


class RemoteError(Exception):
    """A command ran on the VM and failed."""


class LaunchError(Exception):
    """Error with one sentence for the user and an exit code.

    2: refused with nothing done; 1: failed; 75: stopped on request.
    """

    def __init__(self, sentence: str, *, code: int = REFUSED) -> None:
        super().__init__(sentence)
        self.code = code
