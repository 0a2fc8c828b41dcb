"""`uniprefill_fx.compile`: the backend with the published options of the model at hand."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import nn

from uniprefill_fx import frontends
from uniprefill_fx.config import PrefillConfig, over_published
from uniprefill_fx.frontends.uniform_calls import compile_uniformly
from uniprefill_fx.lowering.inner import checked_inner_backend
from uniprefill_fx.runtime.copies import note_compiled
from uniprefill_fx.runtime.lost_generate import LOST_GENERATE
from uniprefill_fx.runtime.shown_options import Options, shows_options
from uniprefill_fx.torch_internals import compiled_module


def options_for(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options a model was published with, overridden by the user's own; checked.

    Raises:
        OptionError: an unknown option or a bad value. TypeError: no model.
    """
    if isinstance(model, str):
        raise TypeError(f"{model!r} is a name: wanted a loaded model, AutoModelForCausalLM.from_pretrained({model!r})")
    if not callable(model):
        raise TypeError(f"got {type(model).__name__}: wanted a model (torch.nn.Module) or a function")
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    merged = over_published(getattr(text, "model_type", ""), getattr(text, "num_hidden_layers", -1), options)
    chosen = PrefillConfig.from_options(merged)
    checked_inner_backend(chosen.inner_backend, chosen.inner_options)
    return merged


@shows_options()
def compile(model: Any, *, fullgraph: bool = False, dynamic: bool | None = None, **options: Unpack[Options]) -> Any:
    """Compile a decoder in place, so that calls of it and `model.generate()` drop tokens; returns the model.

    Args:
        model: an `nn.Module` (compiled in place, as by `nn.Module.compile`; a peft wrapper together with the model
            inside) or a function (a compiled one is returned).
        fullgraph: as for `torch.compile`.
        dynamic: as for `torch.compile`.
        options: listed below; they override what was published for the model's type and depth.

    Raises:
        OptionError: an unknown option or a bad value. TypeError: no model, but its name, say.
    """
    inner = compiled_module(model)
    if inner is not None:
        warnings.warn(LOST_GENERATE, stacklevel=2)
        compile(inner, fullgraph=fullgraph, dynamic=dynamic, **options)
        return model
    chosen = options_for(model, options)
    frontends.install()  # for the modules that are imported by now: what is taught later has Dynamo trace again
    if isinstance(model, nn.Module):
        inside: Any = getattr(model, "get_base_model", None)  # peft: `generate` of the wrapper is the inner model's
        for module in (inside(), model) if callable(inside) else (model,):
            compile_uniformly(module, backend="uniprefill", fullgraph=fullgraph, dynamic=dynamic, options=chosen)
            note_compiled(module)
        return model
    return torch.compile(model, backend="uniprefill", fullgraph=fullgraph, dynamic=dynamic, options=chosen)
