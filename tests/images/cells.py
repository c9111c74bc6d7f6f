"""Run a notebook's code cells by the Jupyter of this Python and print what each gave, as one line of JSON.

    PYTHON tests/images/cells.py NOTEBOOK

Needs what an image has: nbclient, nbformat, ipykernel and the standard library.
"""

import json
import sys

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


def main(path: str) -> None:
    notebook = nbformat.read(path, as_version=4)
    try:
        NotebookClient(notebook, timeout=1800).execute()
    except CellExecutionError as error:
        print(error, file=sys.stderr)
    ran = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.get("execution_count")]
    texts = ["".join(output.get("text", "") for output in cell.outputs) for cell in ran]
    tracebacks = [[line for output in cell.outputs for line in output.get("traceback", [])] for cell in ran]
    print(json.dumps([{"text": t, "traceback": b} for t, b in zip(texts, tracebacks, strict=True)]))


if __name__ == "__main__":
    main(sys.argv[1])
