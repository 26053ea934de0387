"""Type checks of the arguments of public functions: a wrong one is refused by name, before any work."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from numbers import Integral, Number, Real
from typing import Any, ParamSpec, TypeVar

from attnbalance.errors import ArgumentError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Kind = type | list[type] | list[tuple[type, ...]] | dict[type, "Kind"] | tuple["Kind", ...]


def expects(**kinds: Kind) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Makes a function raise `ArgumentError` for an argument that is not an instance of its kind.

    A kind is a type, a list of one type or of a tuple of types (a collection of their instances), a dict of one type
    and one kind (a mapping), or a tuple of kinds of which any will do. A text is no collection of texts. An iterator is
    one only where the parameter's annotation is an `Iterable`: elsewhere it may be gone through twice. Parameters whose
    annotation is `bool` must be True or False, and are checked first: the text "no" would count as true. True and False
    are no numbers.

    >>> @expects(count=int)
    ... def double(count):
    ...     return 2 * count
    >>> double("3")
    Traceback (most recent call last):
    attnbalance.errors.ArgumentError: double: count must be int, got '3' (str)
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        signature = inspect.signature(function)
        once = {name for name, parameter in signature.parameters.items() if "Iterable" in str(parameter.annotation)}
        flags = [name for name, parameter in signature.parameters.items() if parameter.annotation == "bool"]
        checks = {**dict.fromkeys(flags, bool), **kinds}
        *_, outer, own = ("", *function.__qualname__.split("."))
        called = outer if own == "__init__" else own if outer in ("", "<locals>") else f"{outer}.{own}"

        @functools.wraps(function)
        def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            given = signature.bind(*args, **kwargs).arguments
            for name, kind in checks.items():
                if name in given and not fits(given[name], kind, name in once):
                    got = f"{given[name]!r:.100} ({type(given[name]).__name__})"
                    raise ArgumentError(
                        f"{called}: {name} must be {words_of(kind)}, got {got}{_advice(given[name], kind)}"
                    )
            return function(*args, **kwargs)

        return checked

    return decorate


def fits(value: Any, kind: Kind, once: bool = False) -> bool:
    """Whether a value is of a kind (see `expects`); `once`: it is gone through once, so that it may be an iterator."""
    if isinstance(kind, tuple):
        return any(fits(value, option, once) for option in kind)
    if isinstance(kind, dict):
        ((key_kind, item_kind),) = kind.items()
        return isinstance(value, Mapping) and all(fits(k, key_kind) and fits(v, item_kind) for k, v in value.items())
    if not isinstance(kind, list):
        return _is(value, {int: Integral, float: Real}.get(kind, kind))
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return False
    if isinstance(value, Iterator):
        return once
    kinds = kind[0] if isinstance(kind[0], tuple) else (kind[0],)
    return not isinstance(value, Sized) or all(any(_is(item, each) for each in kinds) for item in value)


def _is(value: Any, kind: type) -> bool:
    """Whether a value is an instance of a type; True and False are no numbers."""
    return isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool and issubclass(kind, Number))


def words_of(kind: Kind) -> str:
    """A kind (see `expects`) in words."""
    if isinstance(kind, tuple):
        return " or ".join(map(words_of, kind))
    if isinstance(kind, dict):
        ((key_kind, item_kind),) = kind.items()
        return f"a mapping from {words_of(key_kind)} to {words_of(item_kind)}"
    if isinstance(kind, list):
        return f"a collection of {words_of(kind[0])}"
    return kind.__name__.replace("NoneType", "None")


def _advice(value: Any, kind: Kind) -> str:
    """What to write for a single item, or an iterator, that was given where a collection is expected."""
    if isinstance(kind, tuple):
        return next(filter(None, (_advice(value, option) for option in kind)), "")
    if isinstance(kind, dict):
        ((_, item_kind),) = kind.items()
        items = value.values() if isinstance(value, Mapping) else ()
        return next(filter(None, (_advice(item, item_kind) for item in items)), "")
    if isinstance(kind, list) and isinstance(value, Iterator):
        return "; make a list of it"
    if isinstance(kind, list) and isinstance(value, kind[0]):
        return f"; write [{value!r:.100}]"
    return ""
