"""Peak memory of a function, for benchmarks."""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Callable
from pathlib import Path

MIB = 2**20


def peak_mib(run: Callable[[], object]) -> float:
    """The peak memory of a function in a process of its own, above what that had when the function began (Linux).

    It runs twice; what only its first run takes, such as pages of libraries, is not counted.
    """
    ours, theirs = multiprocessing.Pipe()

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

    def measure() -> None:
        run()
        ctypes.CDLL(None).malloc_trim(0)  # so that freed memory is not used again uncounted
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
        before = status("VmRSS")
        run()
        theirs.send(status("VmHWM") - before)

    process = multiprocessing.get_context("fork").Process(target=measure)
    process.start()
    theirs.close()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"measuring memory failed with exit code {process.exitcode}")
    return ours.recv() / MIB
