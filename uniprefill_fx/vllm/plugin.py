"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes before it builds an engine.

Nothing of vLLM changes for an engine that does not ask for us.
"""

from __future__ import annotations

import functools
import os
from typing import Any


def register() -> None:
    """Have every configuration that names our backend or options checked as soon as it exists."""
    from vllm.config import VllmConfig

    from uniprefill_fx.vllm.options import asked_for, check

    original = VllmConfig.__post_init__
    if hasattr(original, "_uniprefill"):
        return

    @functools.wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if asked_for(self):
            check(self)
            os.environ["VLLM_USE_AOT_COMPILE"] = "0"  # which would store a graph without asking a backend

    checked._uniprefill = True  # type: ignore[attr-defined]
    VllmConfig.__post_init__ = checked
