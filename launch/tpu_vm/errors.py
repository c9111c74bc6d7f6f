"""Exceptions that end a command with its exit code, and the classes of failures of the Cloud TPU API.

A class says what can be done about a failure. Reference: states and messages of the Cloud TPU API.
"""

import re
from typing import Literal

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


Kind = Literal[
    "absent", "exists", "undeletable", "transient", "zone", "credentials", "structural", "capacity", "unknown"
]
"""`zone`: this zone cannot serve the request (quota, type), another may. `credentials`: gcloud has to log in again."""

# Order matters: rate limits and stock-outs also contain RESOURCE_EXHAUSTED, which by itself means a quota.
_PATTERNS: tuple[tuple[Kind, str], ...] = (
    ("absent", r"NOT_FOUND|was not found|does not exist|HTTPError 404|matched no objects"),
    ("exists", r"ALREADY_EXISTS|already exists"),
    ("undeletable", r"not supported when state is|cannot be deleted|state is PROVISIONING"),
    ("transient", r"RATE_LIMIT_EXCEEDED|per minute|Too Many Requests"),
    ("zone", r"Limit: 0|[Qq]uota|QUOTA_EXCEEDED|IN_USE_ADDRESSES"),
    ("zone", r"(?i)accelerator[ _-]?type.*(location|zone|not (found|available|supported)|unavailable)"),
    ("capacity", r"no more capacity|STOCKOUT|enough resources|out of capacity|code: 8\b|capacity (is )?(un)?available"),
    ("credentials", r"active account|UNAUTHENTICATED|[Rr]eauthentication|gcloud auth login|invalid_grant"),
    ("structural", r"PERMISSION_DENIED|[Bb]illing|not have permission|does not have access|SERVICE_DISABLED"),
    ("structural", r"has not been used in project"),
    ("structural", r"INVALID_ARGUMENT|unrecognized arguments|Invalid choice|required property \[project\]"),
    ("zone", r"RESOURCE_EXHAUSTED"),
    ("transient", r"UNAVAILABLE|DEADLINE_EXCEEDED|INTERNAL|ABORTED|HTTPError 5\d\d|[Tt]imed? ?out|[Cc]onnection|ssh"),
)
# What to do about a structural failure, by its text.
_ADVICE: tuple[tuple[str, str], ...] = (
    (r"IN_USE_ADDRESSES", "the region has no external address left; use network=internal with Cloud NAT"),
    (
        r"Limit: 0|[Qq]uota|RESOURCE_EXHAUSTED",
        "ask for TPU quota of this kind in this zone (console: IAM, Quotas), or use another zones=",
    ),
    (r"(?i)accelerator[ _-]?type", "this type is not offered to your project in this zone; use another zones="),
    (r"[Bb]illing", "switch billing on for the project"),
    (r"SERVICE_DISABLED|has not been used in project", "gcloud services enable tpu.googleapis.com"),
    (r"active account|UNAUTHENTICATED|[Rr]eauthentication|gcloud auth login|invalid_grant", "gcloud auth login"),
    (r"required property \[project\]", "give project=, or gcloud config set project ID"),
    (
        r"PERMISSION_DENIED|permission|access",
        "your account needs roles/tpu.admin, and roles/iam.serviceAccountUser on the VM's service account",
    ),
)


def kind_of(message: str, *, code: int | None = None) -> Kind:
    """Classify a failure by its text, else by `code` of a queued resource's error (8 is a stock-out)."""
    for kind, pattern in _PATTERNS:
        if re.search(pattern, message):
            return kind
    return "capacity" if code == 8 else "unknown"


def advice_for(message: str) -> str:
    """Return what the user can do about a structural failure."""
    return next((advice for pattern, advice in _ADVICE if re.search(pattern, message)), "mend what it names")


def in_one_line(message: str, *, limit: int = 300) -> str:
    """Return an error in one line of at most `limit` characters, without gcloud's prefix."""
    text = " ".join(message.split())
    text = re.sub(r"^ERROR: \([\w.\- ]+\) ", "", text)
    return text if len(text) <= limit else text[:limit] + " ..."
