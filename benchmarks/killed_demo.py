"""Whether a demo that is killed again and again ends with the numbers of an unbroken one.

Claim: `attnbalance demo`, killed with SIGKILL at random moments and started again each time, writes the same numbers,
byte for byte, as one that is left alone. Prints when it was killed, what stood in the folder then, and what differs.

    python benchmarks/killed_demo.py [--kills 10] [--seed 0] [--unbroken FOLDER] [demo options ...]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from attnbalance.files.outputs import provenance

NUMBERS = ("prompts.jsonl", "curves.json", "recall.json", "answers.jsonl", "readings.parquet")
WEIGHTS = ("base", "ft-top", "ft-bottom", "ft-whole")


def command(out: Path, options: list[str]) -> list[str]:
    return [sys.executable, "-m", "attnbalance.cli", "demo", "--out", str(out), *options]


def unbroken(out: Path, options: list[str]) -> float:
    start = time.monotonic()
    subprocess.run(command(out, options), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - start


def broken(out: Path, options: list[str], moments: list[float]) -> int:
    """Run until finished, killing after each of these seconds; returns how many kills struck a running demo."""
    struck = 0
    for moment in moments:
        process = subprocess.Popen(command(out, options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            struck += 1
        held = sorted(path.name for path in out.glob("*")) if out.exists() else []
        print(f"killed after {moment:.1f} s; the folder holds {held}", flush=True)
    unbroken(out, options)
    return struck


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--unbroken", type=Path, help="a finished demo with the same options, to compare with")
    given, options = parser.parse_known_args()
    print(json.dumps(provenance()))
    with tempfile.TemporaryDirectory() as folder:
        whole = given.unbroken or Path(folder) / "unbroken"
        took = unbroken(whole, options)
        longest = max(took, 240) / 3  # a folder that is finished already takes no time
        moments = [random.Random(given.seed + i).uniform(5, longest) for i in range(given.kills)]
        struck = broken(Path(folder) / "broken", options, moments)
        files = [*NUMBERS, *(f"{name}/model.safetensors" for name in WEIGHTS)]
        differing = [n for n in files if (whole / n).read_bytes() != (Path(folder) / "broken" / n).read_bytes()]
    print(
        f"{struck} kills; {len(files) - len(differing)} of {len(files)} files are the same, byte for byte; {differing=}"
    )
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
