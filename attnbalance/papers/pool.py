"""Processes that run cells in parallel on one machine, and share its cores and GPUs."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from attnbalance.errors import DataError
from attnbalance.files.processes import processes


def check_workers(workers: int) -> None:
    """Raise `DataError` for workers of processes that `accelerate launch` started, which train each cell together."""
    if workers > 1 and (count := processes().num_processes) > 1:
        raise DataError(f"`workers` must be 1 for {count} processes that train each cell together, got {workers}")


def usual_workers() -> int:
    """One worker per GPU; without GPUs one per CPU core, at most four. One in processes of `accelerate launch`."""
    import torch

    if processes().num_processes > 1:
        return 1
    return torch.cuda.device_count() or min(4, os.cpu_count() or 1)


@contextmanager
def started_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes that share the cores and GPUs; an error or interrupt ends them at once."""
    context, others = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    numbers = context.SimpleQueue()
    for number in range(workers):
        numbers.put(number)
    pool = ProcessPoolExecutor(workers, context, _settle, (numbers, workers))
    try:
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _settle(numbers: Any, workers: int) -> None:
    """Give a new process its share of the cores and a GPU, and end it when its parent ends."""
    import torch

    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    number = numbers.get()
    if count := torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number % count]  # Trainer would take all it sees


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
