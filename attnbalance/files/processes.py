"""Processes that `accelerate launch` starts: they share the work on one folder, which the first of them holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attnbalance.errors import AttnBalanceError, DataError, ModelError, OutputError

if TYPE_CHECKING:
    from accelerate import PartialState

Result = TypeVar("Result")

KINDS = (DataError, ModelError, OutputError, AttnBalanceError)
"""Kinds of errors that are made of their message alone."""

LONGEST_WAIT = timedelta(days=7)
"""How long a process waits for another one, whose share may take many times as long; torch's default is minutes."""


def processes() -> PartialState:
    """The processes of this launch; accelerate finds those of a machine without an accelerator only if told of it."""
    import torch
    from accelerate import PartialState

    return PartialState(cpu=not torch.accelerator.is_available(), timeout=LONGEST_WAIT)


def on_main_process_first(action: Callable[[], Result]) -> Result:
    """Returns what `action` returns; the other processes wait until the main one is done with it."""
    with processes().main_process_first():
        return action()


def by_main_process(action: Callable[[], None], shared: bool = True) -> None:
    """The main process does this, and the others wait until it is done; if nothing is shared, each does it."""
    if not shared:
        action()
        return
    on_main_process_first(lambda: action() if processes().is_main_process else None)


def from_main_process(action: Callable[[], Result]) -> Result:
    """What `action` returns in the main process, or the `AttnBalanceError` that it raises, given to all processes.

    The others wait for it. They raise an error of the first kind in `KINDS`, with the same message.
    """
    if processes().num_processes == 1:
        return action()
    from accelerate.utils import broadcast_object_list

    outcome: list[Any] = [None, None]
    raised: AttnBalanceError | None = None
    if processes().is_main_process:
        try:
            outcome[0] = action()
        except AttnBalanceError as error:  # not all kinds can be sent
            raised = error
            outcome[1] = next(i for i, kind in enumerate(KINDS) if isinstance(error, kind)), str(error)
    broadcast_object_list(outcome)
    processes().wait_for_everyone()  # a process that ends at once breaks the others' connections
    if outcome[1]:
        kind, message = outcome[1]
        raise raised or KINDS[kind](message)
    return outcome[0]


@contextmanager
def held_together(hold: Callable[[], AbstractContextManager[Path]], folder: Path) -> Iterator[Path]:
    """The folder, for all processes, while the main one holds it: it comes first and leaves when all are done.

    hold: what the main process holds the folder by, such as `work.working`; it gives the folder.
    folder: the same folder, for the others.
    """
    with ExitStack() as held:
        work = on_main_process_first(lambda: held.enter_context(hold()) if processes().is_main_process else folder)
        yield work
        processes().wait_for_everyone()
        by_main_process(held.close)  # the others do not look at the folder while it is removed
