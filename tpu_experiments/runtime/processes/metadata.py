"""The metadata server of Google's machines, which torch_xla and libtpu ask what TPU this is, without a time-out.

torch_xla 2.9.0 (_internal/tpu.py) asks for `tpu-env` when it is imported where the PCI bus has a chip (its version
decides flags), again for each process of hw.parallel=spawn and for the rank of a host, and for
`worker-network-endpoints` where there are several hosts; libtpu asks when it starts. With TPU_SKIP_MDS_QUERY all of
them read variables instead. A container without its host's network reaches no metadata server.
"""

import os
import re
import threading
import urllib.error
import urllib.request

from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.runtime.processes.chips import num_pci_chips

HOST = "metadata.google.internal"
TPU_ENV = f"http://{HOST}/computeMetadata/v1/instance/attributes/tpu-env"
HOST_NETWORK = "a container needs its host's network: `docker run --network=host`, on Kubernetes hostNetwork: true"
SECONDS = 5.0
"""A VM's metadata server answers in milliseconds."""
TYPE = re.compile(r"^(?:v|tpu)(\d)([A-Za-z]?){7}-(\d+)$")
"""Accelerator types that torch_xla 2.9.0 reads (_internal/tpu.py, version)."""
CHIP_BOUNDS = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}
"""Chips of a host by their number, as libtpu lays them out."""


def metadata_problem(hw: HwConfig, *, is_planned: bool = False, seconds: float = SECONDS) -> tuple[str, str] | None:
    """Return what torch_xla would find wrong with this machine's metadata, and what to do; None if nothing.

    It takes at most `seconds`, name look-up included. Where there is a chip, importing torch_xla asks for hw=cpu too.
    """
    if (hw.device != "tpu" or is_planned) and not (hw.runtime == "xla" and num_pci_chips()):
        return None
    given = {**os.environ, **hw.env}
    if given.get("TPU_SKIP_MDS_QUERY"):
        missing = [names[-1] for names in _needed(hw) if not any(given.get(name) for name in names)]
        if missing:
            return f"TPU_SKIP_MDS_QUERY is exported without {' and '.join(missing)}, which it needs", _exports(hw)
        return _type_problem(given["TPU_ACCELERATOR_TYPE"], of="TPU_ACCELERATOR_TYPE", hw=hw)
    answer = _answer(seconds)
    if isinstance(answer, str):
        line = next((line for line in answer.splitlines() if line.startswith("ACCELERATOR_TYPE")), "")
        return _type_problem(line.partition(":")[2].strip(" '\"") or None, of=f"tpu-env of {HOST}", hw=hw)
    if isinstance(answer, urllib.error.HTTPError):
        seen = f"{HOST} has no tpu-env (HTTP {answer.code}), and torch_xla and libtpu ask it which TPU this is"
        return seen, f"outside a TPU VM {_exports(hw)}"
    proxy = urllib.request.getproxies().get("http")
    if proxy is not None and not urllib.request.proxy_bypass(HOST):
        seen = f"{HOST} is asked through a proxy (http_proxy), which does not give it ({_reason(answer)})"
        return seen, f"`export NO_PROXY={HOST}`"
    seen = f"{HOST} does not answer ({_reason(answer)}), and torch_xla waits until it says which TPU this is"
    return seen, f"{HOST_NETWORK}; without a metadata server {_exports(hw)}"


def _needed(hw: HwConfig) -> list[tuple[str, ...]]:
    """Return the variables that torch_xla reads in place of metadata, each with the name that it prefers."""
    needed: list[tuple[str, ...]] = [("TPU_ACCELERATOR_TYPE",)]
    if hw.device == "tpu" and (hw.parallel == "spawn" or hw.num_hosts > 1):
        needed += [("CLOUD_TPU_TASK_ID", "TPU_WORKER_ID")]
    if hw.device == "tpu" and hw.num_hosts > 1:
        needed += [("TPU_WORKER_HOSTNAMES",)]
    if hw.device == "tpu" and hw.parallel == "spawn":
        needed += [("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS")]
        needed += [("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS")]
    return needed


def _type_problem(found: str | None, *, of: str, hw: HwConfig) -> tuple[str, str] | None:
    if found is not None and TYPE.match(found):
        return None
    if found is None:
        return f"{of} does not say which TPU this is, and torch_xla and libtpu ask", _exports(hw)
    return f"{of} has {found[:60]!r}, which torch_xla cannot read as a type and a number, as in v6e-8", _exports(hw)


def _exports(hw: HwConfig) -> str:
    """Return the variables that take the metadata server's place, for a sentence."""
    chips = hw.num_devices // hw.num_hosts
    kind = hw.rent.accelerator_type if hw.rent is not None else f"{(hw.topology or 'v6e:').partition(':')[0]}-{chips}"
    bounds = CHIP_BOUNDS.get(chips, "2,2,1")
    values = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": kind.replace("v5e-", "v5litepod-"),
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_HOST_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_HOST_BOUNDS": bounds,
    }
    machine = "" if hw.device == "tpu" and hw.num_hosts == 1 else ", with the values of this machine"
    return f"`export {' '.join(f'{name}={value}' for name, value in values.items())}`{machine}"


def _answer(seconds: float) -> str | Exception:
    """Return the answer's text or the error; it is asked in a thread, since a name look-up takes no time-out."""
    found: list[str | Exception] = []

    def ask() -> None:
        request = urllib.request.Request(TPU_ENV, headers={"Metadata-Flavor": "Google"})
        try:
            with urllib.request.build_opener().open(request, timeout=seconds) as answer:
                found.append(answer.read().decode(errors="replace"))
        except urllib.error.HTTPError as error:
            error.close()
            found.append(error)
        except Exception as error:  # besides OSError a malformed answer raises types of http.client
            found.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return found[0] if found else TimeoutError()


def _reason(error: Exception) -> str:
    """Return why there was no answer, in a few words."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    return str(getattr(cause, "strerror", None) or cause)[:100] or type(cause).__name__
