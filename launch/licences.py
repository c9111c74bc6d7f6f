"""Print the licence of every package of the lock, as installed here: a line each, and a count of each licence.

    bash launch/local.sh python launch/licences.py [launch/requirements-torchtpu.lock]

A licence is the package's own word (License-Expression, the classifiers, or the first line of License). Packages that
this environment lacks (of another extra, platform or Python) are named at the end. Needs the standard library alone.
"""

import re
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path

LOCK = Path(__file__).parent / "requirements.lock"
PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?==([^\s;\\]+)", re.MULTILINE)
LONGEST = 60


def pins(lock: Path) -> dict[str, str]:
    """Return the version of every package of a lock by its name."""
    return dict(PIN.findall(lock.read_text("utf-8")))


def licence_of(name: str) -> str | None:
    """Return what a package says of its licence; None where it is not installed, "unknown" where it says nothing."""
    try:
        about = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
    classifiers = [c.rpartition(" :: ")[2] for c in about.get_all("Classifier") or () if c.startswith("License :: ")]
    own = {key: (about.get_all(key) or [""])[0].strip().split("\n")[0] for key in ("License-Expression", "License")}
    told = own["License-Expression"] or ", ".join(c for c in classifiers if c != "OSI Approved")
    told = told or own["License"] or "unknown"
    return told if len(told) <= LONGEST else f"{told[:LONGEST]}..."


def main(lock: Path) -> None:
    """Print the lines."""
    found = {name: licence_of(name) for name in sorted(pins(lock), key=str.lower)}
    for name, licence in found.items():
        if licence is not None:
            print(f"{name}=={metadata.version(name)}: {licence}")
    missing = [name for name, licence in found.items() if licence is None]
    counts = Counter(licence for licence in found.values() if licence is not None)
    print("\n" + "\n".join(f"{count:4} {licence}" for licence, count in counts.most_common()))
    print(f"{len(missing):4} not installed here: {', '.join(missing) or '-'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else LOCK)
