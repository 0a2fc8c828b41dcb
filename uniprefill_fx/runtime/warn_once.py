"""Warnings that say something once a process: a serving loop meets the same cause at every call."""

from __future__ import annotations

import warnings

_warned: set[str] = set()


def warn_once(cause: str, message: str, stacklevel: int = 2) -> None:
    """Warn, unless something was said of `cause` before. Python's own filters still apply."""
    if cause not in _warned:
        _warned.add(cause)
        warnings.warn(f"uniprefill: {message}", stacklevel=stacklevel + 1)


def forget_warnings() -> None:
    """Say everything again when it next happens (tests)."""
    _warned.clear()
