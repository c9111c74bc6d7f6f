"""Make the environment of an image, and run its notebook in it, uploaded alone.

python -m tests.images colab /tmp/images/colab
python -m tests.images colab /tmp/images/colab --notebook
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.images import NAMES, REPOSITORY, environ, make, run_cells


def main() -> int:
    """Return the exit code: 0 where all cells ran."""
    parser = argparse.ArgumentParser(prog="python -m tests.images", description=__doc__)
    parser.add_argument("image", choices=NAMES)
    parser.add_argument("folder", type=Path, help="where the environment is made anew")
    parser.add_argument("--notebook", action="store_true", help="run launch/IMAGE.ipynb of the last commit in it")
    given = parser.parse_args()
    make(given.image, given.folder)
    if not given.notebook:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        notebook = Path(shutil.copy(REPOSITORY / "launch" / f"{given.image}.ipynb", folder))
        env = environ(given.folder, REPOSITORY=REPOSITORY.as_uri(), TPU_EXPERIMENTS_VENV=f"{folder}/venv")
        cells = run_cells(notebook, given.folder, env)
    for cell in cells:
        print(cell["text"], *cell["traceback"], sep="\n")
    return int(any(cell["traceback"] for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
