"""Executes the tutorials, then compares their stored outputs with the fresh ones, or stores the fresh ones.

    python tests/run_tutorials.py [NAME ...]           execute and compare
    python tests/run_tutorials.py --write [NAME ...]   execute and store

NAME is how a notebook's file name begins, such as 02; without one, all are meant. A cell that raises stops the run.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

TUTORIALS = Path(__file__).parents[1] / "tutorials"
REAL = ("08", "09")
"""Notebooks whose stored outputs come from a real model. CI runs them on small models and does not compare them."""
PORTABLE = {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
"""The kernels' arithmetic: one thread, and no instructions that only some x86 processors have.

Training amplifies rounding: with AVX-512 tutorial 02's difference in attention in layer 1 is 0.08, without it 0.29."""
MOST_BYTES = 100_000
"""The most that one stored output may take; an image above it loses colours, anything else is not stored."""
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")
P_VALUE = re.compile(r"\bp = [-+.\de]+")
TIMING = re.compile(r"^.*'train_runtime'.*\n?", re.MULTILINE)
"""What a transformers Trainer prints at its end."""
WARNING = re.compile(r"^\S*attnbalance/\S+:\d+: \w*Warning: ")


@dataclass(frozen=True)
class Tolerance:
    """How far a fresh output may be from the stored one.

    Attributes:
        absolute: How far a number may be off, as a share: 0.1 allows 10 in a line of percentages or points.
        relative: How far it may be off in proportion to the larger of the two, where that is more.
        reworded: The share of a notebook's lines that may have other words, such as another generated answer.
    """

    absolute: float
    relative: float
    reworded: float


EXACT = Tolerance(absolute=0.0, relative=1e-3, reworded=0.0)
"""For closed forms and short training in float64, whose rounding stays far below what is printed."""
TRAINED = Tolerance(absolute=0.5, relative=0.5, reworded=1 / 3)
"""For models that the notebook trains in float32.

Where rounding is the same, so are all numbers, and `main` prints that none moved. With AVX-512 against without, numbers
of 01 to 05 moved by up to 0.33, or by up to 32% where that is more, and up to 22% of a notebook's lines changed words.
The tolerance is half as much again. It finds what is wrong by much, not what is wrong by little."""
TOLERANCES = {"06": EXACT, "07": EXACT}


@dataclass(frozen=True)
class Compared:
    """One cell's stored text beside its fresh text.

    Attributes:
        cell: The cell's index.
        stored: The stored text.
        fresh: The fresh text.
        pairs: Number as stored, number as it came, and the stored line, for lines with the same words.
        reworded: Number of lines without a line of the same words on the other side.
        lines: Number of lines of the longer text.
    """

    cell: int
    stored: str
    fresh: str
    pairs: Sequence[tuple[str, str, str]]
    reworded: int
    lines: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the notebooks that are named; exit with what differs from the stored outputs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="how a notebook's file name begins, such as 02")
    parser.add_argument("--write", action="store_true", help="store the fresh outputs in the notebooks")
    given = parser.parse_args(arguments)
    os.environ.update(PORTABLE, TUTORIAL_SMALL="1")
    different = []
    for path in named(given.names, given.write):
        began = time.monotonic()
        notebook = nbformat.read(path, as_version=4)
        fresh, moved = executed(notebook), ""
        if given.write:
            nbformat.write(fresh, path)
        elif not path.name.startswith(REAL):
            cells = compared(notebook, fresh)
            pairs = [(a, b) for cell in cells for a, b, _ in cell.pairs]
            moved = f", {sum(a != b for a, b in pairs)} of {len(pairs)} numbers moved"
            different += [f"{path.name}, {text}" for text in differences(cells, tolerance_of(path.name))]
        print(f"{path.name}: {time.monotonic() - began:.0f} s{moved}", flush=True)
    if different:
        sys.exit("\n\n".join([*different, "If the change is meant, store the new outputs: see CONTRIBUTING.md."]))


def named(names: Sequence[str], write: bool) -> list[Path]:
    """The notebooks whose names begin with one of `names`, or all; outputs of a real model are never written."""
    paths = sorted(TUTORIALS.glob("*.ipynb"))
    unknown = [name for name in names if not any(path.name.startswith(name) for path in paths)]
    real = [name for name in names if write and name.startswith(REAL)]
    if unknown or real:
        sys.exit(f"no notebook is named {unknown[0]}" if unknown else f"{real[0]} stores outputs of a real model")
    kept = [path for path in paths if not (write and path.name.startswith(REAL))]
    return [path for path in kept if path.name.startswith(tuple(names))] if names else kept


def executed(notebook: NotebookNode) -> NotebookNode:
    """The notebook with the outputs of a fresh kernel in an empty folder, as they are stored."""
    fresh = nbformat.from_dict(notebook)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(fresh, timeout=900, kernel_name="python3", resources=resources, record_timing=False).execute()
    return as_stored(fresh)


def as_stored(notebook: NotebookNode) -> NotebookNode:
    """The notebook without what differs from machine to machine or needs a live kernel.

    Timings, progress bars, paths, widgets, scripts and large outputs other than images are removed. Of warnings, only
    those of this package stay.
    """
    notebook = nbformat.from_dict(notebook)
    kernel = notebook.metadata["kernelspec"]
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = merged([kept for output in merged(cell.outputs) if (kept := output_as_stored(output))])
    return notebook


def merged(outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    """Outputs in which text that was printed in several pieces is one piece."""
    joined: list[NotebookNode] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            joined.append(nbformat.from_dict(output))
    return joined


def output_as_stored(output: NotebookNode) -> NotebookNode | None:
    """The output as it is stored; None for one that is not."""
    if output.output_type == "stream":
        text = TIMING.sub("", output.text) if output.name == "stdout" else own_warnings(output.text)
        output.text = without_paths(text)
        return output if text.strip() else None
    if "application/vnd.jupyter.widget-view+json" in output.data:
        return None
    kept = {kind: data for kind, raw in output.data.items() if (data := data_as_stored(kind, raw))}
    output.data = nbformat.from_dict(kept)
    return output if kept else None


def data_as_stored(kind: str, data: str) -> str | None:
    """A figure or a returned value as it is stored; None for one that needs scripts, is large, or names an address."""
    if kind == "image/png":
        return small_png(data)
    if len(data) > MOST_BYTES or "<script" in data or " at 0x" in data:
        return None
    return without_paths(data)


def without_paths(text: str) -> str:
    """The text with files of this package named from its folder on, and every temporary folder named alike."""
    text = re.sub(r"(?<![\w/])/[^\s'\"]*/(?=attnbalance/)", "", text)
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/tmp\w+", "/tmp/folder", text)


def own_warnings(text: str) -> str:
    """Of what was written to stderr, the warnings of this package, without the source line below each."""
    return "".join(line for line in text.splitlines(keepends=True) if WARNING.match(line))


def small_png(encoded: str) -> str:
    """The PNG, in base64; with a palette of 256 colours if it is too large, and an error if it still is."""
    if len(base64.b64decode(encoded)) <= MOST_BYTES:
        return encoded
    picture = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")
    buffer = io.BytesIO()
    picture.quantize(256, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    if len(buffer.getvalue()) > MOST_BYTES:
        raise ValueError(f"a stored figure must have at most {MOST_BYTES} bytes, got {len(buffer.getvalue())}")
    return base64.b64encode(buffer.getvalue()).decode()


def tolerance_of(name: str) -> Tolerance:
    """The tolerance of a notebook, by the beginning of its file name."""
    return next((tolerance for begin, tolerance in TOLERANCES.items() if name.startswith(begin)), TRAINED)


def compared(stored: NotebookNode, fresh: NotebookNode) -> list[Compared]:
    """Each cell's texts: lines are paired by their words, in order, and so are the numbers of two paired lines."""
    cells = []
    for index, (before, after) in enumerate(zip(stored.cells, fresh.cells, strict=True)):
        old, new = ([line for line in text_of(cell).splitlines() if line.strip()] for cell in (before, after))
        matcher = SequenceMatcher(None, [words(line) for line in old], [words(line) for line in new], autojunk=False)
        lines = [(old[i + k], new[j + k]) for i, j, size in matcher.get_matching_blocks() for k in range(size)]
        pairs = [(a, b, line) for line, other in lines for a, b in zip(numbers(line), numbers(other), strict=True)]
        longer = max(len(old), len(new))
        cells.append(Compared(index, "\n".join(old), "\n".join(new), pairs, longer - len(lines), longer))
    return cells


def differences(cells: Sequence[Compared], tolerance: Tolerance) -> Iterator[str]:
    """What disagrees: cells with a number beyond the tolerance; all reworded cells, if too many lines are reworded."""
    too_many = sum(cell.reworded for cell in cells) > tolerance.reworded * sum(cell.lines for cell in cells)
    for cell in cells:
        reasons = [f"{a} was stored, {b} came" for a, b, line in cell.pairs if not is_near(a, b, line, tolerance)]
        if cell.reworded and too_many:
            reasons.append(f"{cell.reworded} of {cell.lines} lines have other words")
        if reasons:
            why = "; ".join(reasons)
            yield f"cell {cell.cell}: {why}\n--- stored\n{cell.stored}\n--- fresh\n{cell.fresh}"


def text_of(cell: NotebookNode) -> str:
    """What a cell printed and returned as text; not warnings, and not what stands for a figure."""
    parts = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream" and output.name == "stdout":
            parts.append(output.text)
        elif "data" in output and output.data.keys() == {"text/plain"}:
            parts.append(output.data["text/plain"])
    return "\n".join(parts)


def words(line: str) -> str:
    """A line without its numbers and without the width of its gaps."""
    return " ".join(NUMBER.sub("#", P_VALUE.sub("p", line)).split())


def numbers(line: str) -> list[str]:
    """The numbers of a line, without p-values, which differ by orders of magnitude where little else does."""
    return NUMBER.findall(P_VALUE.sub("p", line))


def is_near(stored: str, fresh: str, line: str, tolerance: Tolerance) -> bool:
    """Whether two numbers of a line agree."""
    a, b = (float(number.replace(",", "")) for number in (stored, fresh))
    scale = 100 if "%" in line or "points" in line else 1
    allowed = max(scale * tolerance.absolute, tolerance.relative * max(abs(a), abs(b)), last_digit(stored))
    return abs(a - b) <= allowed * (1 + 1e-9)


def last_digit(number: str) -> float:
    """One unit of the last digit of a number as it is written, within which rounding may differ."""
    mantissa, _, exponent = number.partition("e")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


if __name__ == "__main__":
    main()
