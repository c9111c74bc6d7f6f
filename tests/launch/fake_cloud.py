"""A Cloud TPU API, its machines and a bucket, in memory and on a simulated clock, behind gcloud's command lines.

Failure texts are those that gcloud prints for the real API (reference: field reports and the API's documentation).
Money runs while a node is READY, as Google bills it, whatever the launcher believes. A machine deletes itself only as
launch/watchdog.sh does: where its account may, after its limit, or unused and with no result that is nowhere else.
"""

import io
import json
import re
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from launch.tpu_vm.world import Completed

STOCKOUT = (
    "There is no more capacity in the zone {zone}; you can try in another zone where Cloud TPU Nodes are offered "
    "(see https://cloud.google.com/tpu/docs/regions) [EID: 0x1]"
)
QUOTA = "Quota limit 'TPUV6EPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone {zone}."
TYPE_DENIED = (
    "PERMISSION_DENIED: Cloud TPU received a bad request. User does not have permission to submit requests for "
    'accelerator type "v6e-8" in location "{zone}" [EID: 0x2]'
)
NOT_FOUND = "ERROR: (gcloud.compute.tpus.{what}) NOT_FOUND: Resource '{name}' was not found"
OFFLINE = "ERROR: gcloud crashed (TransportError): HTTPSConnectionPool(oauth2.googleapis.com): Connection refused"
LOGGED_OUT = "ERROR: (gcloud) There was a problem refreshing auth tokens: Reauthentication failed. gcloud auth login"
UNAVAILABLE = "ERROR: (gcloud.compute.tpus.x) UNAVAILABLE: The service is currently unavailable."
PROVISIONING = "ERROR: (gcloud) FAILED_PRECONDITION: DeleteQueuedResource is not supported when state is PROVISIONING"
MEMBER = "serviceAccount:123-compute@developer.gserviceaccount.com"
POLICY = json.dumps({"bindings": [{"role": "roles/editor", "members": [MEMBER]}]})
SSH_LOST = "ssh: connect to host 10.0.0.2 port 22: Connection timed out\nERROR: (gcloud.compute.tpus.tpu-vm.ssh) 255"


NEVER = float("inf")


class SimulatedClock:
    """Seconds that pass by waiting and by calling."""

    def __init__(self) -> None:
        self.time = 1_000_000.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@dataclass
class Fate:
    """What becomes of one request for a machine."""

    queued: float = 60.0
    provisioning: float = 120.0
    failure: str = ""
    """FAILED with this message instead of a machine."""
    lives: float | None = None
    """Seconds from READY to the reclaim."""
    silent: bool = False
    """sshd never answers."""
    dies: float = NEVER
    """Seconds from READY to a crash that the API does not show: the node stays READY, sshd and the run are gone."""


@dataclass
class Machine:
    name: str
    zone: str
    asked_at: float
    fate: Fate
    metadata: dict[str, str]
    words: list[str]
    may_delete_itself: bool = True
    run_id: str = ""
    started_at: float = 0.0
    run_words: str = ""
    done_before: float = 0.0
    ended: int | None = None
    stop_asked: bool = False
    secrets: list[str] = field(default_factory=list)
    is_set_up: bool = False
    work: float = NEVER
    ended_at: float = 0.0
    heard_at: float = 0.0
    """Last word of the launcher."""
    is_fetched: bool = False

    @property
    def ready_at(self) -> float:
        return self.asked_at + self.fate.queued + self.fate.provisioning

    @property
    def lost_at(self) -> float:
        """The reclaim."""
        return NEVER if self.fate.lives is None else self.ready_at + self.fate.lives

    @property
    def dead_at(self) -> float:
        """The reclaim or the crash: from then on nothing on the machine runs."""
        return min(self.lost_at, self.ready_at + self.fate.dies)

    @property
    def is_only_copy(self) -> bool:
        """Whether its results are on its disk alone."""
        is_result = self.ended in (None, 0)
        return bool(self.run_id) and is_result and "output_dir=gs://" not in self.run_words and not self.is_fetched

    @property
    def deletes_itself_at(self) -> float:
        if not self.may_delete_itself:
            return NEVER
        limit = self.ready_at + float(self.metadata["tpuexp-seconds"])
        run_end = self.ended_at or (self.started_at + max(0.0, self.work - self.done_before) if self.run_id else 0.0)
        unused = max(self.ready_at, self.heard_at, run_end) + float(self.metadata["tpuexp-idle-seconds"])
        found = limit if self.is_only_copy else min(limit, unused)
        return found if found < self.dead_at else NEVER

    def state(self, now: float) -> str:
        if self.fate.failure and now >= self.asked_at + self.fate.queued:
            return "FAILED"
        if now < self.asked_at + self.fate.queued:
            return "WAITING_FOR_RESOURCES"
        if now < self.ready_at:
            return "PROVISIONING"
        return "ACTIVE" if now < self.lost_at else "SUSPENDED"


class FakeCloud:
    """`run` stands in for the real one."""

    def __init__(self, clock: SimulatedClock, *, fates: list[Fate] | None = None, work: float = 3600.0, code: int = 0):
        self.clock = clock
        self.fates = fates or []
        self.work = work
        """Seconds of training the run needs in all; a checkpoint every 300 s survives."""
        self.code = code
        self.checkpoint = 0.0
        self.bucket: set[str] = set()
        self.machines: dict[tuple[str, str], Machine] = {}
        self.all_machines: list[Machine] = []
        self.calls: list[list[str]] = []
        self.stdins: list[str] = []
        self.trouble: dict[int, str] = {}
        """By number of the call: refuse, refuse_after, kill, kill_after, interrupt, absent, sleep, sleep_after."""
        self.windows: list[tuple[str, float, float]] = []
        """Kind (offline, logged_out, no_ssh, full_disk), beginning and end on the clock."""
        self.deleted_running: list[str] = []
        """Machines that the launcher deleted while their run was alive and not asked to stop."""
        self.deleted_copies: list[str] = []
        """Machines that were deleted with the only copy of a result, before their limit."""
        self.billed = 0.0
        """Seconds of READY machines that are gone."""
        self.setup_code = 0
        self.watchdog = "granted account=vm@p code=404 Resource was not found"
        self.policy: str | None = POLICY
        """What the user may read of the project's policy; None where that is nothing."""
        self.num_workers = 1

    def run(self, words: list[str], *, stdin: str = "", timeout: float = 120.0) -> Completed:
        self.clock.sleep(2.0)
        self.calls.append(words)
        self.stdins.append(stdin)
        trouble = self.trouble.get(len(self.calls), "")
        if trouble == "kill":
            raise Killed
        if trouble == "sleep":  # the laptop's lid is closed
            self.clock.sleep(30_000.0)
        self.end_by_themselves()
        if self.is_in("offline") or self.is_in("logged_out"):
            return Completed(1, err=OFFLINE if self.is_in("offline") else LOGGED_OUT)
        if self.is_in("no_ssh") and ("ssh" in words or "scp" in words):
            return Completed(255, err=SSH_LOST)
        if trouble == "absent" and "describe" in words and "tpus" in words:
            return Completed(1, err=NOT_FOUND.format(what="x", name=words[5]))
        if trouble == "refuse":
            return Completed(1, err=SSH_LOST if "ssh" in words else UNAVAILABLE)
        done = self.answer([word for word in words if word != "alpha"], stdin)
        if trouble == "kill_after":
            raise Killed
        if trouble == "sleep_after":  # the answer is read when the lid is opened again
            self.clock.sleep(30_000.0)
        if trouble == "interrupt":
            raise KeyboardInterrupt
        return Completed(1, err=UNAVAILABLE) if trouble == "refuse_after" else done

    def is_in(self, kind: str) -> bool:
        return any(kind == name and begin <= self.clock.now() < end for name, begin, end in self.windows)

    def end_by_themselves(self) -> None:
        """Delete the machines whose watchdog has done so by now."""
        now = self.clock.now()
        for machine in [one for one in self.machines.values() if one.deletes_itself_at <= now]:
            self.billed += machine.deletes_itself_at - machine.ready_at
            self.progress(machine, until=machine.deletes_itself_at)
            self.note_copy(machine, at=machine.deletes_itself_at)
            del self.machines[machine.zone, machine.name]

    def note_copy(self, machine: Machine, *, at: float) -> None:
        is_at_limit = at >= machine.ready_at + float(machine.metadata["tpuexp-seconds"]) - 600.0
        has_result = machine.ended == 0 and at < machine.dead_at
        if machine.is_only_copy and has_result and not is_at_limit:
            self.deleted_copies.append(machine.name)

    def answer(self, words: list[str], stdin: str) -> Completed:
        verb = " ".join(words[1:5] if words[1] == "compute" else words[1:3])
        verb = verb.replace("compute tpus ", "")
        if verb.startswith("projects"):
            return self.project(words)
        if verb.startswith("storage"):
            return self.storage(words)
        if "list" in words:
            return Completed(0, json.dumps(self.listing(words)))
        name = words[5].split(":")[0] if "scp" not in words else self.scp_name(words)
        machine = self.machines.get((zone_of(words), name))
        if verb == "queued-resources create":
            return self.create(words, machine)
        if machine is None:
            return Completed(1, err=NOT_FOUND.format(what=verb.replace(" ", "."), name=name))
        if verb == "queued-resources describe":
            return Completed(0, json.dumps(self.described(machine)))
        if verb == "queued-resources delete":
            return self.delete(machine)
        state = machine.state(self.clock.now())
        if verb == "tpu-vm describe":
            return Completed(0, '{"state": "READY"}') if state == "ACTIVE" else Completed(1, err="NOT_FOUND: node")
        if state != "ACTIVE" or machine.fate.silent or self.clock.now() >= machine.dead_at:
            return Completed(255, err=SSH_LOST)
        if "scp" in words:
            return self.copied(machine, words)
        return self.ssh(machine, words, stdin)

    def copied(self, machine: Machine, words: list[str]) -> Completed:
        """The code on its way there, or results on their way here as a tar file."""
        source, target = [word for word in words[words.index("scp") + 1 :] if not word.startswith("-")][:2]
        if not source.startswith(f"{machine.name}:"):
            return Completed(0)
        self.progress(machine)
        with tarfile.open(target, "w:gz") as tar:
            if machine.ended == 0:
                entry = tarfile.TarInfo("result.json")
                entry.size = 2
                tar.addfile(entry, io.BytesIO(b"{}"))
        machine.is_fetched = machine.ended == 0
        return Completed(0)

    def project(self, words: list[str]) -> Completed:
        if "describe" in words:
            return Completed(0, "123\n")
        if self.policy is None:
            return Completed(1, err="ERROR: (gcloud.projects.get-iam-policy) PERMISSION_DENIED: no access")
        return Completed(0, self.policy)

    @staticmethod
    def scp_name(words: list[str]) -> str:
        return next(word.split(":")[0] for word in words[5:] if ":" in word and not word.startswith("-"))

    def create(self, words: list[str], machine: Machine | None) -> Completed:
        if machine is not None:
            return Completed(1, err="ERROR: (gcloud) ALREADY_EXISTS: Resource already exists")
        flags = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
        metadata = dict(pair.split("=", 1) for pair in flags["metadata"].split(","))
        fate = self.fates.pop(0) if self.fates else Fate()
        may = self.watchdog.startswith("granted")
        new = Machine(words[5], zone_of(words), self.clock.now(), fate, metadata, words, may, work=self.work)
        self.machines[new.zone, new.name] = new
        self.all_machines.append(new)
        return Completed(0, "{}")

    def described(self, machine: Machine) -> dict[str, object]:
        state: dict[str, object] = {"state": machine.state(self.clock.now())}
        if state["state"] == "FAILED":
            message = machine.fate.failure.format(zone=machine.zone)
            state["failedData"] = {"error": {"code": 8, "message": message}}
        return {"name": f"projects/p/locations/{machine.zone}/queuedResources/{machine.name}", "state": state}

    def delete(self, machine: Machine) -> Completed:
        state = machine.state(self.clock.now())
        if state == "PROVISIONING":
            return Completed(1, err=PROVISIONING)
        self.bill(machine)
        self.note_copy(machine, at=self.clock.now())
        is_alive = state == "ACTIVE" and self.clock.now() < machine.dead_at
        if is_alive and machine.run_id and machine.ended is None and not machine.stop_asked:
            self.deleted_running.append(machine.name)
        del self.machines[machine.zone, machine.name]
        return Completed(0)

    def bill(self, machine: Machine) -> None:
        if not machine.fate.failure:
            self.billed += max(0.0, min(self.clock.now(), machine.lost_at) - machine.ready_at)
        self.progress(machine)

    @property
    def billed_seconds(self) -> float:
        """Of machines that are gone and of those that are left, up to now."""
        left = (m for m in self.machines.values() if not m.fate.failure)
        return self.billed + sum(max(0.0, min(self.clock.now(), m.lost_at) - m.ready_at) for m in left)

    def listing(self, words: list[str]) -> list[dict[str, object]]:
        zone, rows = zone_of(words), []
        for machine in self.machines.values():
            if zone in (machine.zone, "-") and "queued-resources" in words:
                node = {"acceleratorType": "v6e-8", "labels": {"tpu-experiments": "ro1"}}
                rows.append(self.described(machine) | {"spot": {}, "tpu": {"nodeSpec": [{"node": node}]}})
        return rows

    def storage(self, words: list[str]) -> Completed:
        for machine in self.machines.values():
            self.progress(machine)
        address = next(word for word in words if word.startswith("gs://"))
        if address.endswith(".lease.json"):
            return self.lease(address)
        if address not in self.bucket:
            return Completed(1, err="ERROR: (gcloud.storage.cp) The following URLs matched no objects or files")
        if "cp" in words:
            (Path(words[-1]) / address.rsplit("/", 1)[1]).write_text("{}")
        return Completed(0)

    def lease(self, address: str) -> Completed:
        """What the run that lives has last written, every 20 s; of a dead one, for ever the same."""
        folder = address.removesuffix("/.lease.json")
        runs = [one for one in self.all_machines if one.run_id and folder in self.folder_of(one)]
        if not runs:
            return Completed(1, err="ERROR: (gcloud.storage.cat) The following URLs matched no objects or files")
        machine = runs[-1]
        until = min(self.clock.now(), machine.dead_at, machine.ended_at or NEVER)
        return Completed(0, f"{machine.run_id} {until // 20:.0f}")

    @staticmethod
    def folder_of(machine: Machine) -> str:
        found = dict(word.split("=", 1) for word in machine.run_words.split() if "=" in word)
        return f"{found.get('output_dir')}/{found.get('name')}"

    def progress(self, machine: Machine, *, until: float = NEVER) -> None:
        """The run as far as it has come; what is after its last checkpoint is lost with the machine."""
        if not machine.run_id or machine.ended is not None:
            return
        until = min(until, self.clock.now(), machine.dead_at)
        done = machine.done_before + until - machine.started_at
        if machine.stop_asked or done >= self.work:
            self.checkpoint = min(done, self.work)
            machine.ended = 75 if machine.stop_asked and done < self.work else self.code
            machine.ended_at = min(until, machine.started_at + max(0.0, self.work - machine.done_before))
            folder = self.folder_of(machine)
            if done >= self.work and folder.startswith("gs://") and self.code == 0:
                self.bucket |= {f"{folder}/{part}" for part in ("result.json", "README.md", "adapter")}
        else:
            self.checkpoint = max(self.checkpoint, done // 300 * 300)

    def ssh(self, machine: Machine, words: list[str], stdin: str) -> Completed:
        command = next(word for word in words if word.startswith("--command="))
        count = self.num_workers if "--worker=all" in words else 1
        code = 0
        machine.heard_at = self.clock.now()
        if "watchdog.sh check" in command:
            return Completed(0, f"tpuexp-watchdog={self.watchdog}\n\ntpuexp-code=0\n" * count)
        if "worker.sh look" in command:
            return self.look(machine, count)
        if "keep-secrets" in command:
            machine.secrets.append(stdin)
        elif "startup.sh" in command:
            code, machine.is_set_up = self.setup_code, self.setup_code == 0
            self.clock.sleep(200.0)
        elif match := re.search(r"worker\.sh start (\S+) (.*?) \);", command):
            self.start(machine, match[1], match[2])
        elif "worker.sh stop" in command:
            machine.stop_asked = True
            self.progress(machine)
        return Completed(0, f"\ntpuexp-code={code}\n" * count)

    def start(self, machine: Machine, run_id: str, run_words: str) -> None:
        assert machine.is_set_up
        if machine.run_id == run_id:
            return
        machine.run_id, machine.run_words, machine.ended, machine.stop_asked = run_id, run_words, None, False
        machine.is_fetched, machine.ended_at = False, 0.0
        machine.started_at, machine.done_before = self.clock.now(), self.checkpoint

    def look(self, machine: Machine, count: int) -> Completed:
        self.progress(machine)
        state = "exited" if machine.ended is not None else ("running" if machine.run_id else "none")
        code = "-" if machine.ended is None else str(machine.ended)
        asked = "asked" if machine.stop_asked else "no"
        lines = (
            f"tpuexp worker={worker} run={state} code={code} stop={asked} preempted=FALSE bytes=0 at=1\n"
            for worker in range(count)
        )
        return Completed(0, "".join(lines))


class Killed(BaseException):
    """The launcher is killed: nothing of it runs any more."""


def zone_of(words: list[str]) -> str:
    return next((word.split("=")[1] for word in words if word.startswith(("--zone=", "--zones="))), "-")
