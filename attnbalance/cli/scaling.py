"""`attnbalance scale-adapter`."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from attnbalance.cli.options import noting_reuse


def scale_adapter(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="Folder of a run with LoRA, or of any LoRA.")],
    factor: Annotated[float, typer.Argument(metavar="FACTOR", help="By how much: 0.5 halves the change.")],
    out: Annotated[str, typer.Option(metavar="FOLDER", help="Folder for the scaled adapter: new or empty.")],
) -> None:
    """Write a copy of a LoRA adapter whose change of the weights is FACTOR times as large.

    After finetuning, a smaller change often answers more of what the base knew, and less of what was taught: measure
    both with `attnbalance knowledge`.
    """
    from attnbalance.finetuning.scale_adapter import scale_adapter as run

    with noting_reuse(out):
        folder = run(adapter, factor, out)
    print(f"{folder} changes the weights {factor:g} times as much as {adapter}.")
    models = shlex.join([f"finetuned={adapter}", f"scaled={out}"])
    print(f"Next: attnbalance knowledge base=BASE {models} --facts FACTS --out known")
