"""Whether a command that is killed again and again ends with the numbers of an unbroken one, and repeats nothing.

Claim: a command with `--out` (`demo`, `curve`, `trajectory`) is killed with SIGKILL at random moments and started again
each time, from the beginning where it had finished. It writes the same numbers, byte for byte, as one that is left
alone. Each part of a measurement that was saved before a kill is the same file afterwards. Prints when it was killed,
what was saved then, and what differs.

    python benchmarks/killed.py [--kills 10] [--seed 0] [--unbroken FOLDER] COMMAND [options without --out ...]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from attnbalance.files.outputs import MARKER, provenance
from attnbalance.files.work import work_of

NUMBERS = (".json", ".jsonl", ".parquet", ".safetensors")
STARTING = 5.0
"""Seconds in which nothing has begun yet: Python, torch and transformers are being imported."""


def run(command: list[str], out: Path) -> float:
    """Run a command to its end; returns the seconds that it took."""
    start = time.monotonic()
    whole = [sys.executable, "-m", "attnbalance.cli", *command, "--out", str(out)]
    subprocess.run(whole, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - start


def kill(command: list[str], out: Path, moment: float) -> bool:
    """Kill a command after some seconds; False if it had ended by then."""
    whole = [sys.executable, "-m", "attnbalance.cli", *command, "--out", str(out)]
    process = subprocess.Popen(whole, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(moment)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True
    return False


def parts(out: Path) -> dict[str, tuple[int, int]]:
    """The saved parts of a measurement in unfinished work, each with its tensors' inode and time."""
    work = work_of(out)
    files = {path: path.stat() for path in work.rglob("part-*/tensors.safetensors")}
    return {str(path.parent.relative_to(work)): (about.st_ino, about.st_mtime_ns) for path, about in files.items()}


def numbers(folder: Path) -> dict[str, bytes]:
    """What a finished folder holds, but for how it was made."""
    files = [path for path in folder.rglob("*") if path.suffix in NUMBERS and path.name != MARKER]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--unbroken", type=Path, help="a finished folder of the same command, to compare with")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    print(json.dumps(provenance()))
    struck, finished, repeated, differing, drawn = 0, 0, 0, list[str](), random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, broken = given.unbroken or Path(folder) / "unbroken", Path(folder) / "broken"
        took = 240.0 if given.unbroken else run(given.command, whole)
        expected = numbers(whole)
        while struck < given.kills or broken.exists() or work_of(broken).exists():
            before, moment = parts(broken), drawn.uniform(STARTING, max(STARTING, took))
            if struck < given.kills and kill(given.command, broken, moment):
                struck += 1
                print(f"killed after {moment:.1f} s, with {len(parts(broken))} parts saved", flush=True)
            else:
                run(given.command, broken)
                came = numbers(broken)
                finished += 1
                differing += [name for name in {**expected, **came} if expected.get(name) != came.get(name)]
                print(f"finished; {len(differing)} of {len(expected)} files of numbers differ", flush=True)
                shutil.rmtree(broken)
            after = parts(broken)
            repeated += sum(after.get(name, about) != about for name, about in before.items())
    print(f"{struck} kills; {finished} times finished, {differing=}; {repeated} parts measured again")
    return bool(differing or repeated)


if __name__ == "__main__":
    sys.exit(main())
