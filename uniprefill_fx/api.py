"""`uniprefill_fx.compile`: the backend with the published options of the model at hand."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from uniprefill_fx.config import PrefillConfig, preset_for

LOST_GENERATE = (
    "uniprefill: torch.compile(model).generate(...) never calls the compiled forward, because generate is bound to the "
    "model inside. Use model.compile(backend='uniprefill'), or uniprefill_fx.compile(model), and then model.generate()."
)

LOST_INSIDE = (
    "uniprefill: generate() of a peft wrapper calls the model inside, which wrapper.compile() leaves as it is. Use "
    "uniprefill_fx.compile(model), or compile model.get_base_model() as well."
)


def options_for(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options a model was published with, overridden by the user's own; checked.

    Raises:
        OptionError: an unknown option or a bad value.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    preset = preset_for(getattr(text, "model_type", ""), getattr(text, "num_hidden_layers", -1))
    if "drop_layers" in options:  # a preset's p belongs to its layers
        preset = {}
    merged = {**preset, **options}
    PrefillConfig.from_options(merged)
    return merged


def compile(model: Any, *, fullgraph: bool = False, dynamic: bool | None = None, **options: Any) -> Any:
    """Compile a decoder in place, so that calls of it and `model.generate()` drop tokens; returns the model.

    Args:
        model: an `nn.Module` (compiled in place, as by `nn.Module.compile`; a peft wrapper together with the model
            inside) or a function (a compiled one is returned).
        fullgraph, dynamic: as for `torch.compile`.
        options: see `PrefillConfig`; they override the preset of the model's type and depth.

    Raises:
        OptionError: an unknown option or a bad value.
    """
    if isinstance(model, torch._dynamo.OptimizedModule):
        warnings.warn(LOST_GENERATE, stacklevel=2)
        compile(model._orig_mod, fullgraph=fullgraph, dynamic=dynamic, **options)
        return model
    chosen = options_for(model, options)
    if isinstance(model, nn.Module):
        inside: Any = getattr(model, "get_base_model", None)  # peft: `generate` of the wrapper is the inner model's
        for module in (inside(), model) if callable(inside) else (model,):
            module.compile(backend="uniprefill", fullgraph=fullgraph, dynamic=dynamic, options=chosen)
        return model
    return torch.compile(model, backend="uniprefill", fullgraph=fullgraph, dynamic=dynamic, options=chosen)


def warn_of_lost_generate() -> None:
    """Warn when a `torch.compile(model)` call that is under way wraps a model which generates.

    torch tells a backend nothing about the model, and `generate` of the wrapper never reaches the backend; this runs
    when torch loads the backend, so it looks for the call on the stack.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code is not torch.compile.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    model = frame.f_locals.get("model") if frame is not None else None
    if isinstance(model, nn.Module) and callable(getattr(model, "generate", None)):
        warnings.warn(LOST_GENERATE, stacklevel=2)
    owner = getattr(model, "__self__", None)  # `nn.Module.compile` hands a bound method over
    inside: Any = getattr(owner, "get_base_model", None)
    if isinstance(owner, nn.Module) and callable(inside) and inside()._compiled_call_impl is None:
        warnings.warn(LOST_INSIDE, stacklevel=2)
