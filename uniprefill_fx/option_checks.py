"""Checks of single options. Each one returns the value to store, immutable and hashable, or raises `OptionError`.

Like `config.py`, which applies them, this needs nothing but the standard library.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard

BACKEND_NAME = "uniprefill"
"""The name this backend is registered under, which can therefore not be its own inner backend."""

Check = Callable[[str, object], Any]
"""Takes the option's name and the value got."""


class OptionError(ValueError):
    """An option that cannot be used. The message names the option, the value got, what is allowed and what to do."""

    def __init__(self, option: str, value: object, allowed: str, hint: str) -> None:
        # All four go to `args`, so that the error survives pickling between processes.
        super().__init__(option, value, allowed, hint)
        self.option, self.value, self.allowed, self.hint = option, value, allowed, hint

    def __str__(self) -> str:
        shown = repr(self.value)
        if len(shown) > 200:
            shown = shown[:200] + "…"
        return f"option {self.option!r}: got {shown}; allowed: {self.allowed}. {self.hint}"


class InnerOptions(Mapping[str, Any]):
    """A read-only copy of the inner backend's options, hashable whatever the values are.

    The hash covers the names only: equal options hash equally, and unequal ones are told apart by `==`.
    The values themselves are not copied, so that an object among them stays equal to itself.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)

    def __getitem__(self, name: str) -> Any:
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __hash__(self) -> int:
        return hash(frozenset(self._options))

    def __repr__(self) -> str:
        return repr(self._options)


ELSEWHERE = {"mode": "inner_options", "options": "inner_options", "backend": "inner_backend", "top_p": "p"}
"""Names that `torch.compile` or other projects have for what an option of ours does."""


def did_you_mean(name: object, known: Sequence[str], otherwise: str) -> str:
    """The hint for a name that may be misspelt: the same one in lower case, a close one, or `otherwise`."""
    if isinstance(name, str) and name.lower() in known:
        return f"Did you mean {name.lower()!r}?"
    close = difflib.get_close_matches(name, known, n=1) if isinstance(name, str) else []
    return f"Did you mean {close[0]!r}?" if close else otherwise


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_integer(value: object) -> TypeGuard[int]:
    """True for integers of any library, but not for bool, which Python counts among them."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_fraction(value: object) -> TypeGuard[float]:
    """True for a real number in (0, 1]. NaN fails the comparison."""
    return isinstance(value, Real) and not isinstance(value, bool) and bool(0 < value <= 1)  # type: ignore[operator]


MOST = 2**31 - 1
"""The largest integer of an option: more than any prompt has tokens, and sums of two fit into an int64 of the ops."""


def integer(minimum: int, hint: str) -> Check:
    """An integer from `minimum` to `MOST`."""

    def check(option: str, value: object) -> int:
        if not _is_integer(value) or value < minimum:
            raise OptionError(option, value, f"an integer of at least {minimum}", hint)
        if value > MOST:
            raise OptionError(option, value, f"an integer of at most {MOST}", "No prompt is longer.")
        return int(value)

    return check


def fractions(hint: str) -> Check:
    """A number in (0, 1], or a list of them with one for each drop layer."""

    def check(option: str, value: object) -> float | tuple[float, ...]:
        if _is_fraction(value):
            return float(value)
        if _is_sequence(value) and value and all(map(_is_fraction, value)):
            return tuple(map(float, value))
        raise OptionError(option, value, "a number in (0, 1], or a list with one for each drop layer", hint)

    return check


def optional(check: Check) -> Check:
    """None, or what `check` allows."""
    return lambda option, value: None if value is None else check(option, value)


def or_auto(check: Check) -> Check:
    """ "auto", or what `check` allows."""

    def checked(option: str, value: object) -> Any:
        if isinstance(value, str) and value == "auto":
            return value
        try:
            return check(option, value)
        except OptionError as error:
            raise OptionError(option, value, f"{error.allowed}, or 'auto'", error.hint) from None

    return checked


def choice(*names: str) -> Check:
    """One of a few strings."""

    def check(option: str, value: object) -> str:
        if not isinstance(value, str) or value not in names:
            allowed = ", ".join(map(repr, names))
            raise OptionError(option, value, allowed, did_you_mean(value, names, "Pass one of these strings."))
        return value

    return check


def boolean(option: str, value: object) -> bool:
    """True or False, and not a number or a string that could be read as one."""
    if not isinstance(value, bool):
        raise OptionError(option, value, "True or False", "Pass a bool, not a number or a string.")
    return value


def drop_layers(option: str, value: object) -> str | tuple[int, ...]:
    """ "auto", "all", or different decoder layer indices in any order."""
    names = ("auto", "all", "none")
    if isinstance(value, str) and value in names:
        return value
    allowed = "'auto', 'all', 'none', or a non-empty list of different decoder layer indices, counted from 0"
    if not _is_sequence(value):
        raise OptionError(option, value, allowed, did_you_mean(value, names, "Pass a list, even for one layer."))
    if not value:
        raise OptionError(option, value, allowed, "To drop nowhere, pass 'none', or use uniprefill_fx.disabled().")
    if not all(_is_integer(layer) and layer >= 0 for layer in value):
        raise OptionError(option, value, allowed, "Each index is an integer of at least 0.")
    if len(set(value)) != len(value):
        raise OptionError(option, value, allowed, "Name each layer once.")
    return tuple(map(int, value))


def sparse_layers(option: str, value: object) -> str | tuple[int, ...]:
    """ "auto", "all", or different decoder layer indices in any order."""
    found = drop_layers(option, value)
    if found == "none":
        raise OptionError(
            option, value, "'auto', 'all', or a list of layers", "attention='dense' computes every block."
        )
    return found


def alphas(option: str, value: object) -> float | tuple[float, ...]:
    """A number in [0, 1), or a list of them with one for each block-sparse layer."""

    def fits(x: object) -> bool:
        return isinstance(x, Real) and not isinstance(x, bool) and bool(0 <= x < 1)  # type: ignore[operator]

    if fits(value):
        return float(value)  # type: ignore[arg-type]
    if _is_sequence(value) and value and all(map(fits, value)):
        return tuple(map(float, value))
    allowed = "a number in [0, 1), or a list with one for each block-sparse layer"
    raise OptionError(option, value, allowed, "0 keeps every block; larger numbers keep fewer.")


def one_of(*numbers: int) -> Check:
    """One of a few integers."""

    def check(option: str, value: object) -> int:
        if not _is_integer(value) or value not in numbers:
            allowed = " or ".join(map(str, numbers))
            raise OptionError(option, value, allowed, "The kernels have these sizes.")
        return int(value)

    return check


def inner_backend(option: str, value: object) -> str | Callable[..., Any]:
    """A backend's name, which torch looks up when it compiles, or a callable."""
    allowed = "the name of a registered torch.compile backend ('inductor', 'aot_eager', 'eager', …), or a callable"
    if isinstance(value, str) and value == BACKEND_NAME:
        raise OptionError(option, value, allowed, "This backend cannot be its own inner backend.")
    if callable(value) or (isinstance(value, str) and value):
        return value
    raise OptionError(option, value, allowed, "torch.compiler.list_backends() lists the names.")


def inner_options(option: str, value: object) -> InnerOptions:
    """A dict with string keys."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise OptionError(option, value, "None or a dict with string keys", "It becomes the inner backend's options=.")
    return InnerOptions(value)
