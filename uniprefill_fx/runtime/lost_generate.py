"""Warnings for `torch.compile(model)` where it never reaches `model.generate()`."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from uniprefill_fx.torch_internals import is_compiled_in_place, model_being_wrapped

LOST_GENERATE = (
    "uniprefill: torch.compile(model).generate(...) never calls the compiled forward, because generate is bound to the "
    "model inside. Use model.compile(backend='uniprefill'), or uniprefill_fx.compile(model), and then model.generate()."
)

LOST_INSIDE = (
    "uniprefill: generate() of a peft wrapper calls the model inside, which wrapper.compile() leaves as it is. Use "
    "uniprefill_fx.compile(model), or compile model.get_base_model() as well."
)


def warn_of_lost_generate() -> None:
    """Warn when a `torch.compile(model)` call that is under way wraps a model which generates.

    torch tells a backend nothing about the model, and `generate` of the wrapper never reaches the backend; this runs
    when torch loads the backend, so it looks for the call on the stack.
    """
    model = model_being_wrapped()
    if isinstance(model, nn.Module) and callable(getattr(model, "generate", None)):
        warnings.warn(LOST_GENERATE, stacklevel=2)
    owner = getattr(model, "__self__", None)  # `nn.Module.compile` hands a bound method over
    inside: Any = getattr(owner, "get_base_model", None)
    if isinstance(owner, nn.Module) and callable(inside) and not is_compiled_in_place(inside()):
        warnings.warn(LOST_INSIDE, stacklevel=2)
