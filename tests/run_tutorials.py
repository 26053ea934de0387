"""Executes every tutorial from its first cell to its last; a cell that raises stops the run."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parents[1] / "tutorials"


def main() -> None:
    """Run each notebook in an empty folder, so that none leans on what another left; 08 and 09 on small models."""
    os.environ["TUTORIAL_SMALL"] = "1"
    for path in sorted(TUTORIALS.glob("*.ipynb")):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            notebook = nbformat.read(path, as_version=4)
            NotebookClient(
                notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": folder}}
            ).execute()
        print(f"{path.name}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
