"""Errors that a user can put right: one message on stderr and exit code 2, without a traceback."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NoReturn

from typer.core import TyperGroup
from typer.exceptions import TyperException

from attnbalance.cli.json_output import WANTED, print_json, wants_json
from attnbalance.errors import AttnBalanceError, shortened


class Commands(TyperGroup):
    """Commands whose errors, where a user can put them right, become one message and exit code 2."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command; refuse bytes that are not UTF-8, which no result could hold."""
        ctx.meta[WANTED] = wants_json(args)
        for argument in args:
            try:
                argument.encode()
            except UnicodeEncodeError:
                _fail(ctx, f"arguments must be UTF-8 text, got {argument!r}")
        with _usage_errors(ctx) if args else nullcontext():  # without any, the help is the message
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> object:
        """Run the command that was named."""
        try:
            with _usage_errors(ctx):
                return super().invoke(ctx)
        except AttnBalanceError as error:
            _fail(ctx, self._with_flags(ctx, str(error)))
        except KeyboardInterrupt as interrupt:
            left = f"; {interrupt}" if str(interrupt) else ""
            _fail(ctx, f"interrupted{left}; run the same command again to go on")
        except Exception as error:
            message = _trouble(error)
            if message is None:
                raise
            _fail(ctx, message)

    def _with_flags(self, ctx: Any, message: str) -> str:
        """A library message with its arguments, such as `skip_bad=True`, written as options of the command."""
        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        parameters = command.params if command else ()
        flags = {parameter.name: parameter.opts[0] for parameter in parameters if parameter.opts[0].startswith("--")}

        def as_flag(argument: re.Match[str]) -> str:
            name, value = argument.groups()
            if name not in flags:
                return argument.group()
            return f"`{flags[name]}`" if value in (None, "True") else f"`{flags[name]} {value.strip(chr(34))}`"

        return re.sub(r"`(\w+)(?:=([^`]*))?`", as_flag, message)


@contextmanager
def _usage_errors(ctx: Any) -> Iterator[None]:
    """Cuts values in what typer says of an option, as everywhere (see `shortened`); prints it as JSON if wanted."""
    try:
        yield
    except TyperException as error:
        if isinstance(message := getattr(error, "message", None), str):
            error.message = shortened(message)  # pyright: ignore[reportAttributeAccessIssue]
        if ctx.meta[WANTED]:
            print_json({"error": error.format_message()}, ctx.invoked_subcommand)
        raise


def _trouble(error: BaseException) -> str | None:
    """The message for a full disk, whichever library raised it, or for another file error; None for other errors."""
    if getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error):
        return f"the disk is full ({error}); free some space and run the same command again to go on"
    return f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else None


def show_warning(message: Warning | str, category: type[Warning], *_: object) -> None:
    """Print a warning for the user as one line; leave out what libraries tell their developers."""
    if not issubclass(category, FutureWarning | DeprecationWarning | PendingDeprecationWarning):
        print(f"warning: {shortened(str(message))}", file=sys.stderr)


def _fail(ctx: Any, message: str) -> NoReturn:
    print(f"error: {shortened(message)}", file=sys.stderr)
    if ctx.meta[WANTED]:
        with suppress(OSError):  # standard output may be what failed
            print_json({"error": shortened(message)}, ctx.invoked_subcommand)
    sys.exit(2)
