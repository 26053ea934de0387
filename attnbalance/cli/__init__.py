"""The command line: parses, calls the library, prints; one message and exit code 2 for errors that a user can fix."""

from __future__ import annotations

import os
import warnings
from typing import Annotated

import typer

from attnbalance.cli.exits import Commands, show_warning
from attnbalance.cli.finetuning import finetune
from attnbalance.cli.instructing import context_critical, instruct
from attnbalance.cli.json_output import OPTION, Command
from attnbalance.cli.listing import facts, families, tasks
from attnbalance.cli.measuring import context, curve, explain, knowledge, salience, trajectory
from attnbalance.cli.running import demo, reproduce, study
from attnbalance.cli.scaling import scale_adapter
from attnbalance.data.sources.load_facts import source_names

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure where finetuning takes a language model's attention off a question's subject, and what that costs.",
    epilog=f"Start with `attnbalance demo`. SOURCE is {source_names()}.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("attnbalance"))
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    json: Annotated[
        bool,
        typer.Option(OPTION, help="Print one JSON object about the results, for scripts; all else goes to stderr."),
    ] = False,
) -> None:
    """Options before the command."""


GROUPS = {
    "Start": (demo, facts, families),
    "Measure": (knowledge, curve, trajectory, context, salience, explain, tasks),
    "Finetune and compare": (finetune, instruct, context_critical, scale_adapter, study, reproduce),
}
"""The commands, as `attnbalance --help` groups them."""

app.callback()(options)
for group, commands in GROUPS.items():
    for command in commands:
        app.command(rich_help_panel=group, cls=Command)(command)


def main() -> None:
    """Run the command line.

    Threads that wait for each other give up their core soon (libgomp reads the setting when torch is imported). On a
    busy machine, small models then train several times faster; on an idle one, as fast as before.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    warnings.showwarning = show_warning
    app()
