"""How long each pass takes, for `explain()` and the log."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import time
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_seconds: contextvars.ContextVar[dict[str, float] | None] = contextvars.ContextVar("uniprefill_seconds", default=None)


@contextlib.contextmanager
def collect(seconds: dict[str, float]) -> Iterator[None]:
    """Have passes that run inside add their time to `seconds`, by name, in the order of their first run."""
    token = _seconds.set(seconds)
    try:
        yield
    finally:
        _seconds.reset(token)


def timed(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a pass; passes that call passes count the time twice, so only the innermost ones are decorated."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            seconds = _seconds.get()
            if seconds is None:
                return function(*args, **kwargs)
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began

        return run

    return decorate
