"""Rent a TPU, train on it and fetch the results: `python launch/tpu.py --help`.

Imports neither torch nor Hydra.
"""

import sys
from pathlib import Path

# Import the package from the repository's root, whatever the working directory.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.tpu_vm.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
