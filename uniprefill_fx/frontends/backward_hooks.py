"""Modules with backward hooks, traced where gradients are off.

transformers' tensor parallelism hangs such hooks on norms of single heads. Without gradients they do nothing, but
Dynamo breaks the graph wherever a module has one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from uniprefill_fx.frontends.mixers import replace_method
from uniprefill_fx.passes.operator_internals import backward_hook_methods

_taught: set[str] = set()


def install() -> bool:
    """Have Dynamo find no backward hooks where gradients are off, for this backend only; True if that is new."""
    new = [name for name in backward_hook_methods() if name not in _taught]
    for name in new:
        _teach(name)
        _taught.add(name)
    return bool(new)


def _teach(name: str) -> None:
    original = getattr(nn.Module, name)
    pairs = not name.endswith("_pre_hooks")  # full hooks, and others

    def traced(self: Any) -> Any:
        if torch.is_grad_enabled():
            return original(self)
        return ([], []) if pairs else []

    replace_method(nn.Module, name, traced)
