"""Check that the VM may delete itself: in the project's policy before renting, on the VM afterwards.

Without this permission the watchdog cannot end the machine. It is tpu.nodes.delete, for queued resources too
(docs.cloud.google.com/iam/docs/roles-permissions/tpu).
"""

import json
import re
import shlex
from dataclasses import dataclass
from typing import Literal

from launch.tpu_vm import gcloud
from launch.tpu_vm.errors import in_one_line
from launch.tpu_vm.settings import Settings
from launch.tpu_vm.world import Run

SUFFICIENT = ("roles/tpu.admin", "roles/tpu.editor", "roles/editor", "roles/owner")
INSTALLED = "systemctl is-active --quiet tpuexp-watchdog"
# The start-up script may still be running when sshd answers.
ASK = (
    f"for i in $(seq 45); do {INSTALLED} && break; sleep 2; done; "
    f"if {INSTALLED}; then bash ${{TPUEXP_HOME:-/var/lib/tpu_experiments}}/watchdog.sh check; "
    "else echo tpuexp-watchdog=absent; fi"
)
ASK_SECONDS = 400.0
LINE = re.compile(r"^tpuexp-watchdog=(\w+)(?: account=(\S+) code=(\S+) ?(.*))?$", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """Whether the VM may delete itself, as its watchdog found by asking the API."""

    kind: Literal["granted", "unanswered", "absent", "refused"]
    account: str = ""
    """Service account of the VM; `none` where it has none."""
    code: str = ""
    """HTTP status of the answer; 000 where there was none."""
    said: str = ""
    """Message of the API."""

    def sentence(self, project: str) -> str:
        """Return what is missing and how to fix it."""
        if self.kind == "absent":
            what = "the VM's watchdog does not run; `journalctl -u google-startup-scripts` there says why"
        elif self.kind == "unanswered":
            what = (
                f"the VM's watchdog gets no answer from tpu.googleapis.com (HTTP {self.code} {self.said}".rstrip()
                + "); with network=internal its subnet needs Private Google Access"
            )
        elif self.account == "none":
            what = "the VM has no service account, so it cannot delete itself; give service_account="
        else:
            said = self.said.rstrip(".")
            what = f"{self.account} may not delete the VM it runs on ({said}); {how_to_grant(project, self.account)}"
        return f"{what}; watchdog=warn continues without it"


def how_to_grant(project: str, account: str) -> str:
    """Return the commands that let an account delete TPUs, and nothing more."""
    return f"{shlex.join(gcloud.create_role(project))}; {shlex.join(gcloud.grant(project, account))}"


ORDER = ("granted", "unanswered", "absent", "refused")


def verdict_of(text: str) -> Verdict:
    """Return the worst of the workers' verdicts.

    Raises:
        ValueError: no verdict was printed.
    """
    found = [Verdict(*(part or "" for part in match.groups())) for match in LINE.finditer(text)]  # type: ignore[arg-type]
    if not found:
        raise ValueError(in_one_line(text) or "no word of the watchdog")
    return max(found, key=lambda verdict: ORDER.index(verdict.kind))


def look_ahead(run: Run, settings: Settings, project: str) -> str:
    """Return what is missing where the project's policy does not show the permission, else an empty string.

    Roles of the project's own are asked for their permissions. What folders, organisations and groups grant is not in
    the policy that this user can read.
    """
    account = settings.service_account
    if not account:  # Compute Engine's default account, named after the project's number
        done = run(gcloud.project_number(project, settings))
        account = f"{done.out.strip()}-compute@developer.gserviceaccount.com"
        if done.code:
            return _not_checked(done.err)
    done = run(gcloud.policy(project, settings))
    if done.code:
        return _not_checked(done.err)
    try:
        roles = _roles(json.loads(done.out), f"serviceAccount:{account}")
    except ValueError as error:
        return _not_checked(f"gcloud's answer: {error}")
    if roles & set(SUFFICIENT) or any(_is_sufficient(run, settings, name) for name in sorted(roles - set(SUFFICIENT))):
        return ""
    return (
        f"the policy of {project} gives {account} no role to delete the VM it runs on: {how_to_grant(project, account)}"
    )


def _is_sufficient(run: Run, settings: Settings, name: str) -> bool:
    """Return whether a role of a project's or an organisation's own, as `projects/ID/roles/NAME`, may delete TPUs."""
    if not re.fullmatch(r"(projects|organizations)/[^/]+/roles/[^/]+", name):
        return False
    done = run(gcloud.role(name, settings))
    try:
        return done.code == 0 and gcloud.PERMISSION in json.loads(done.out)["includedPermissions"]
    except (ValueError, KeyError, TypeError):
        return False


def _roles(policy: dict[str, list[dict[str, object]]], member: str) -> set[str]:
    """Return the unconditional roles of a member."""
    bindings = (binding for binding in policy.get("bindings", []) if not binding.get("condition"))
    return {str(binding["role"]) for binding in bindings if member in list(binding.get("members", []))}  # type: ignore[call-overload]


def _not_checked(error: str) -> str:
    why = in_one_line(error, limit=120)
    return f"it is not known whether the VM may delete itself, since the project's policy was not read ({why})"
