"""Type checks of the arguments of public functions: a wrong one is refused by name, before any work."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, ParamSpec, TypeVar

from attnbalance.errors import ArgumentError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Kind = type | tuple[type, ...] | list[type]


def expects(**kinds: Kind) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Makes a function raise `ArgumentError` for an argument that is not an instance of its kind.

    A kind is a type, a tuple of types of which any will do, or a list of one type: a collection of its instances.

    >>> @expects(count=int)
    ... def double(count):
    ...     return 2 * count
    >>> double("3")
    Traceback (most recent call last):
    attnbalance.errors.ArgumentError: double: count must be int, got '3' (str)
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            given = signature.bind(*args, **kwargs).arguments
            for name, kind in kinds.items():
                if name in given and not fits(given[name], kind):
                    got = f"{given[name]!r:.100} ({type(given[name]).__name__})"
                    raise ArgumentError(f"{function.__name__}: {name} must be {words_of(kind)}, got {got}")
            return function(*args, **kwargs)

        return checked

    return decorate


def fits(value: Any, kind: Kind) -> bool:
    """Whether a value is of a kind (see `expects`)."""
    if not isinstance(kind, list):
        return isinstance(value, kind)
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return False
    return not isinstance(value, Sized) or all(isinstance(item, kind[0]) for item in value)


def words_of(kind: Kind) -> str:
    """A kind (see `expects`) in words."""
    if isinstance(kind, list):
        return f"a collection of {kind[0].__name__}"
    return " or ".join(
        option.__name__.replace("NoneType", "None") for option in (kind if isinstance(kind, tuple) else [kind])
    )
