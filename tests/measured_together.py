"""A command in one of several processes: `measured_together.py NOTES ARGUMENTS`, noting the parts that it measures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from attnbalance.cli import app
from attnbalance.comparison import measure


def main(notes: str, *arguments: str) -> None:
    """Run the command; each part that this process saves is a line in the file NOTES.RANK."""
    save = measure.save_measured

    def save_and_note(measured: measure.Measured, folder: Path, key: str) -> None:
        save(measured, folder, key)
        with Path(f"{notes}.{os.environ['RANK']}").open("a") as file:
            file.write(f"{folder.parent.name}/{folder.name}\n")

    measure.save_measured = save_and_note
    sys.argv = ["attnbalance", *arguments]
    app()


if __name__ == "__main__":
    main(*sys.argv[1:])
