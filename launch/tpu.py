"""From a laptop to a TPU and back: `python launch/tpu.py --help`. Imports neither torch nor Hydra."""

import sys
from pathlib import Path

# The package is found from the repository's root, wherever the command is given from.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.tpu_vm.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
