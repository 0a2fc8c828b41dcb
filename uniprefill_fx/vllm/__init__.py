"""Tokens are dropped inside vLLM: a compile backend, and what it needs of an engine. See docs/serving.md.

Importing this imports no vllm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uniprefill_fx.vllm.options import ServingError, engine_args
    from uniprefill_fx.vllm.steps import Step, last_step, watched

_HOME = {
    "engine_args": "options",
    "ServingError": "options",
    "Step": "steps",
    "last_step": "steps",
    "watched": "steps",
}
__all__ = ["ServingError", "Step", "backend", "engine_args", "last_step", "watched"]


def __getattr__(name: str) -> Any:
    if name == "backend":
        # vLLM looks the backend up by its path while it builds a model, and tells its configuration then only
        return importlib.import_module(f"{__name__}.compilation").backend_of_engine()
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
