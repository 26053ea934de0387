"""How time and memory of `attnbalance curve` grow with the number of prompts.

Claim: time is in proportion to the number of prompts. Each size runs in a process of its own, on one thread, on made-up
facts ("In what country is Town 17?"): the whole command with its report, one model, without answers. Memory is the
process's peak; its growth is per prompt, between the two largest sizes: below 20,000 prompts what grows is mostly the
tokenizer's cache, which is bounded. The last line extrapolates to a million prompts.

    python benchmarks/many_prompts.py MODEL [--sizes 2000 20000 100000]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from attnbalance.files.outputs import provenance

GROWN = 1_000_000


def measure(model: str, prompts: int) -> dict[str, float]:
    """Seconds and peak memory in MB of one comparison in this process."""
    import torch

    from attnbalance import Fact, FactSet, MeasureSettings, ModelSpec, compare

    torch.set_num_threads(1)
    facts = FactSet(tuple(Fact(f"Town {i}", "country", (f"Land {i % 50}",), float(i)) for i in range(prompts)))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        compare([ModelSpec("model", model)], facts, MeasureSettings(device="cpu"), Path(folder) / "out")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB
    return {"prompts": prompts, "seconds": time.perf_counter() - start, "peak MB": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2000, 20_000, 100_000])
    parser.add_argument("--here", action="store_true", help="measure one size in this process, and print it as JSON")
    given = parser.parse_args()
    if len(given.sizes) < 2 and not given.here:
        parser.error("--sizes needs two or more, to see how time and memory grow")
    if given.here:
        print(json.dumps(measure(given.model, given.sizes[0])))
        return
    print(json.dumps(provenance()))
    rows = []
    for size in sorted(given.sizes):
        command = [sys.executable, __file__, given.model, "--sizes", str(size), "--here"]
        child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(child.stdout.splitlines()[-1]))
        print("{prompts:>9,} prompts: {seconds:8.1f} s, peak {peak MB:7.0f} MB".format(**rows[-1]), flush=True)
    first, last = rows[-2:]
    more = last["prompts"] - first["prompts"]
    seconds, memory = ((last[name] - first[name]) / more for name in ("seconds", "peak MB"))
    grown = last["peak MB"] + memory * (GROWN - last["prompts"])
    print(f"per prompt beyond {first['prompts']:,}: {1000 * seconds:.2f} ms, {1024 * memory:.2f} KB")
    print(f"extrapolated to {GROWN:,}: {GROWN * seconds / 60:.0f} min, peak {grown / 1024:.1f} GB")


if __name__ == "__main__":
    main()
