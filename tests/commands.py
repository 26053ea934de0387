"""Run a command of attnbalance in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from attnbalance.cli import app


def run_command(*arguments: object) -> tuple[int, str]:
    """Exit code and everything printed; any other exception is raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output
