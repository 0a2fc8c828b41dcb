"""The Dynamo backend `uniprefill`: options -> config -> `pipeline` -> what Dynamo calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from uniprefill_fx.config import OptionError, PrefillConfig
from uniprefill_fx.frontends import gating
from uniprefill_fx.lowering.devices import runs_kernels
from uniprefill_fx.pipeline import Compilation, compile_graph
from uniprefill_fx.runtime.lost_generate import warn_of_lost_generate

__all__ = ["Compilation", "compile_graph", "uniprefill"]


def uniprefill(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Compile a graph that Dynamo traced; `torch.compile(model, backend="uniprefill", options={...})` calls this.

    Raises:
        OptionError: unknown option or bad value.
        StrictError: with `strict=True`, when something would have stayed dense.
    """
    if kwargs.get("mode") is not None:
        hint = (
            "Pass options={'inner_options': {'max_autotune': True}}, say: names of the inner backend's own, of which "
            "torch._inductor.list_mode_options() has those that a mode stands for."
        )
        raise OptionError("mode", kwargs["mode"], "no mode", hint)
    config = PrefillConfig.from_options(kwargs.get("options") or {})
    return compile_graph(gm, example_inputs, config)


setattr(uniprefill, gating.OURS, True)

if runs_kernels():
    importlib.import_module("uniprefill_fx.lowering.cuda")
warn_of_lost_generate()
