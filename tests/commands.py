"""Run a command of attnbalance in this process, or any script in two."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from typer.testing import CliRunner

from attnbalance.cli import app


def run_command(*arguments: object) -> tuple[int, str]:
    """Exit code and everything printed; any other exception is raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def run_in_two_processes(*arguments: object, environment: Mapping[str, str] | None = None) -> None:
    """Run a script, or with "-m" a module, in two processes on CPU; raises `SubprocessError` if one fails or hangs.

    `environment` comes on top of this process's variables.
    """
    here = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")  # no name to look up
    launch = (sys.executable, "-m", "torch.distributed.run", *here, "--nproc-per-node=2")
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    settings = os.environ | dict(environment or {})
    settings |= {"GLOO_SOCKET_IFNAME": loopback, "CUDA_VISIBLE_DEVICES": ""}  # FSDP takes a GPU it sees
    subprocess.run([*launch, *map(str, arguments)], env=settings, check=True, timeout=600)
