"""`launch/watchdog.sh check` with the real curl, asking a server in place of the metadata host and the TPU API."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from launch.tpu_vm.gcloud import DELETER
from launch.tpu_vm.rights import look_ahead, verdict_of
from launch.tpu_vm.settings import Settings
from launch.tpu_vm.world import Completed
from tests.launch.fake_cloud import MEMBER, FakeCloud, SimulatedClock
from tests.launch.launcher import Launcher

WATCHDOG = Path(__file__).parents[2] / "launch" / "watchdog.sh"
TOKEN = "ya29.secretsecret"
ACCOUNT = "vm@p.iam.gserviceaccount.com"
METADATA = {
    "attributes/tpuexp-project": "p",
    "attributes/tpuexp-zone": "z-a",
    "attributes/tpuexp-resource": "ro1-0a1b2c",
    "service-accounts/default/email": ACCOUNT,
    "service-accounts/default/token": json.dumps({"access_token": TOKEN, "expires_in": 3599}),
}
DENIED = "Permission 'tpu.nodes.delete' denied on 'projects/p/locations/z-a/queuedResources/x' (or it may not exist)."


class Google:
    """Answers deletions with the given codes, the last one for ever; `asked` has what was asked."""

    def __init__(self, codes: list[int]) -> None:
        self.codes, self.asked = codes, []
        self.metadata = dict(METADATA)
        google = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                key = self.path.removeprefix("/computeMetadata/v1/instance/")
                is_known = key in google.metadata and self.headers["Metadata-Flavor"] == "Google"
                self.answer(200 if is_known else 404, google.metadata.get(key, ""))

            def do_DELETE(self) -> None:
                google.asked.append((self.path, self.headers["Authorization"]))
                code = google.codes.pop(0) if len(google.codes) > 1 else google.codes[0]
                error = {"code": code, "message": DENIED if code == 403 else "said so", "status": "X"}
                self.answer(code, json.dumps({"error": error}, indent=2))

            def answer(self, code: int, text: str) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def google() -> Iterator[Google]:
    server = Google([404])
    yield server
    server.server.shutdown()
    server.server.server_close()


def check(google: Google, folder: Path, *, api: str = "") -> str:
    """What it prints, with a sleep that does not and a curl that writes its words down."""
    (folder / "bin").mkdir()
    curl = shutil.which("curl")
    assert curl is not None, "the tests need curl, as the VM does"
    fakes = {"sleep": f"echo $1 >>{folder}/slept", "curl": f'echo "$*" >>{folder}/words; exec {curl} "$@"'}
    for name, body in fakes.items():
        file = folder / "bin" / name
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)
    env = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "TPUEXP_METADATA": google.address}
    env["TPUEXP_API"] = api or google.address
    done = subprocess.run(
        ["bash", str(WATCHDOG), "check"], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert TOKEN not in (folder / "words").read_text() + done.stdout + done.stderr
    return done.stdout


def test_a_resource_that_is_not_there_is_the_answer_of_one_who_may(google: Google, tmp_path: Path) -> None:
    verdict = verdict_of(check(google, tmp_path))
    assert (verdict.kind, verdict.account) == ("granted", ACCOUNT)
    path = "/v2/projects/p/locations/z-a/queuedResources/ro1-0a1b2c-none?force=true"
    assert google.asked == [(path, f"Bearer {TOKEN}")]


def test_the_right_is_asked_for_as_long_as_a_new_role_takes(google: Google, tmp_path: Path) -> None:
    google.codes = [403, 403, 503, 404]
    assert verdict_of(check(google, tmp_path)).kind == "granted"
    assert (tmp_path / "slept").read_text() == "10\n10\n10\n"


def test_the_missing_right_is_named(google: Google, tmp_path: Path) -> None:
    google.codes = [403]
    verdict = verdict_of(check(google, tmp_path))
    assert (verdict.kind, verdict.account, verdict.said) == ("refused", ACCOUNT, DENIED)
    assert len(google.asked) == 6
    create = "gcloud iam roles create tpuexpDeleter --project=p --permissions=tpu.nodes.delete; "
    grant = "gcloud projects add-iam-policy-binding p --member=serviceAccount:vm@p.iam.gserviceaccount.com"
    assert f"{create}{grant} --role=projects/p/roles/tpuexpDeleter --condition=None" in verdict.sentence("p")


def test_a_vm_without_an_account_may_not(google: Google, tmp_path: Path) -> None:
    google.codes = [401]
    for key in ("service-accounts/default/email", "service-accounts/default/token"):
        del google.metadata[key]
    verdict = verdict_of(check(google, tmp_path))
    assert (verdict.kind, verdict.account) == ("refused", "none")
    assert "give service_account=" in verdict.sentence("p")


def test_an_api_out_of_reach_is_no_yes(google: Google, tmp_path: Path) -> None:
    verdict = verdict_of(check(google, tmp_path, api="http://127.0.0.1:9"))
    assert (verdict.kind, verdict.code) == ("unanswered", "000")
    assert "Private Google Access" in verdict.sentence("p")


def test_the_worst_word_of_several_workers_holds() -> None:
    lines = ["tpuexp-watchdog=granted account=a code=404 x", "tpuexp-watchdog=absent"]
    assert verdict_of("\n".join(lines)).kind == "absent"
    assert verdict_of("\n".join([*lines, "tpuexp-watchdog=refused account=a code=403 no"])).kind == "refused"


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(FakeCloud(SimulatedClock(), work=900.0), tmp_path)


@pytest.mark.parametrize("command", ["train", "up"])
@pytest.mark.parametrize("said", ["refused account=vm@p code=403 Permission denied.", "absent"])
def test_a_machine_that_cannot_delete_itself_is_given_back(launcher: Launcher, command: str, said: str) -> None:
    launcher.cloud.watchdog = said
    code = launcher.train() if command == "train" else launcher("up", "hw=v6e8", "name=ro1", "zones=z-a")
    assert code == 1
    assert not launcher.cloud.machines
    (machine,) = launcher.cloud.all_machines
    assert not machine.is_set_up
    assert launcher.record().outcome == "refused"
    what = "add-iam-policy-binding p --member=serviceAccount:vm@p " if "403" in said else "does not run"
    assert what in launcher.record().reason
    assert launcher.cloud.billed_seconds < 120


def test_a_machine_that_gets_no_answer_is_asked_again_and_then_given_back(launcher: Launcher) -> None:
    launcher.cloud.watchdog = "unanswered account=vm@p code=000 "
    assert launcher.train() == 1
    assert launcher.record().outcome == "failed"
    assert sum("Private Google Access" in line for line in launcher.said) == 2
    assert not launcher.cloud.machines


@pytest.mark.parametrize("said", ["refused account=vm@p code=403 no", "absent", "unanswered account=vm@p code=000 "])
def test_who_says_so_goes_on_with_a_warning(launcher: Launcher, said: str) -> None:
    launcher.cloud.watchdog = said
    assert launcher.train("watchdog=warn") == 0
    assert any(line.startswith("warning: ") and "watchdog" in line for line in launcher.said)


def test_the_policy_is_read_before_anything_is_rented(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher.train("service_account=other@p.iam") == 2
    refusal = capsys.readouterr().err
    assert "gives other@p.iam no role" in refusal
    assert "--member=serviceAccount:other@p.iam --role=projects/p/roles/tpuexpDeleter" in refusal
    assert "watchdog=warn" in refusal
    assert not launcher.cloud.all_machines
    assert launcher.train("service_account=other@p.iam", "watchdog=warn") == 0
    assert any(line.startswith("warning: ") and "no role" in line for line in launcher.said)


def test_a_role_under_a_condition_or_of_another_name_is_no_right(launcher: Launcher) -> None:
    weak: list[dict[str, object]] = [{"role": "roles/tpu.viewer", "members": [MEMBER]}]
    weak += [{"role": "roles/tpu.admin", "members": [MEMBER], "condition": {"expression": "false"}}]
    launcher.cloud.policy = json.dumps({"bindings": weak})
    assert launcher.train() == 2
    assert not launcher.cloud.all_machines


@pytest.mark.parametrize(
    ("permissions", "is_enough"),
    [
        ('{"includedPermissions": ["tpu.nodes.delete"]}', True),
        ('{"includedPermissions": ["tpu.nodes.get"]}', False),
        ("{}", False),
        ("", False),
    ],
)
def test_a_role_of_ones_own_is_asked_for_what_it_permits(permissions: str, is_enough: bool) -> None:
    member = "serviceAccount:sa@p.iam"
    policy = {
        "bindings": [{"role": f"projects/p/roles/{DELETER}", "members": [member]}, {"role": "x", "members": [member]}]
    }
    asked: list[list[str]] = []

    def run(words: list[str], *, stdin: str = "", timeout: float = 120.0) -> Completed:
        asked.append(words)
        if "get-iam-policy" in words:
            return Completed(0, json.dumps(policy))
        return Completed(0, permissions) if permissions else Completed(1, err="PERMISSION_DENIED")

    settings = Settings(name="r", service_account="sa@p.iam")
    assert (look_ahead(run, settings, "p") == "") == is_enough
    assert [words[1:5] for words in asked[1:]] == [["iam", "roles", "describe", DELETER]]


def test_a_policy_that_may_not_be_read_is_no_proof(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    launcher.cloud.policy = None
    assert launcher.train() == 2
    assert "not known" in capsys.readouterr().err
    assert not launcher.cloud.all_machines
    assert launcher.train("watchdog=warn") == 0


def test_a_machine_that_could_not_delete_itself_is_bounded_by_the_launcher_alone(launcher: Launcher) -> None:
    """Without its watchdog the fake VM lives on after its limit, as a real one does."""
    launcher.cloud.watchdog = "refused account=vm@p code=403 no"
    launcher.cloud.work = 1e9
    assert launcher.train("watchdog=warn", "max_hours=2") == 1
    assert launcher.cloud.billed_seconds < 2 * 3600
    assert not launcher.cloud.machines
