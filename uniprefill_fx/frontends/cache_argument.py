"""The cache among the arguments and outputs of transformers' models: `past_key_values`, from 5.24 on `cache`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEWER, OLDER = "cache", "past_key_values"


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """The cache among a call's arguments by name, or None. Traced by Dynamo."""
    cache = arguments.get(NEWER)
    return arguments.get(OLDER) if cache is None else cache


def returned_cache(output: Any) -> dict[str, Any]:
    """The cache that a call returned, by the name under which the next call takes it; empty where there is none."""
    for name in (NEWER, OLDER):  # newer versions have both, and warn of the older one
        cache = getattr(output, name, None)
        if cache is not None:
            return {name: cache}
    return {}
