"""transformers: caches that know their tokens.

This works by `torch.compiler.substitute_in_graph`: Dynamo traces the substitute, eager code never sees it, and the
substitute calls a copy of the original function unless the trace is for this backend.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import masking_utils

from uniprefill_fx.frontends.cache import adopt
from uniprefill_fx.frontends.gating import compiling_for_uniprefill, copy_function

# Every decoder asks one of these for its masks before it writes to its cache.
MASK_FUNCTIONS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")


_adopting: set[str] = set()


def install() -> bool:
    """Teach Dynamo the substitutes that it does not know yet; True if there were any.

    Process-wide, and inert for other backends and eager code. Modeling files are imported one by one, so this is
    called before each compilation.
    """
    new = [name for name in MASK_FUNCTIONS if name not in _adopting]
    for name in new:
        _adopt_caches_in(getattr(masking_utils, name))
        _adopting.add(name)
    return bool(new)


def _adopt_caches_in(function: Any) -> None:
    original = copy_function(function)
    names = list(inspect.signature(function).parameters)

    @torch.compiler.substitute_in_graph(function, skip_signature_check=True)
    def substitute(*args: Any, **kwargs: Any) -> Any:
        if compiling_for_uniprefill():
            given = dict(zip(names, args, strict=False)) | kwargs
            shared = getattr(given.get("config"), "num_kv_shared_layers", None)
            adopt(given.get("past_key_values"), bool(shared))
        return original(*args, **kwargs)
