"""The backend that compiles what our passes leave: looked up once, called as torch.compile would call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from uniprefill_fx.config import OptionError, PrefillConfig

InnerBackend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def inner_backend(config: PrefillConfig) -> InnerBackend:
    """The inner backend of a config, with `inner_options` bound.

    Raises:
        OptionError: no backend of that name is registered.
    """
    chosen = config.inner_backend
    if isinstance(chosen, str):
        try:
            chosen = torch._dynamo.lookup_backend(chosen)
        except torch._dynamo.exc.InvalidBackend:
            names = ", ".join(torch._dynamo.list_backends())
            raise OptionError(
                "inner_backend", config.inner_backend, f"{names}, or a callable", "Register the backend first."
            ) from None
    if config.inner_options is None:
        return chosen
    options = dict(config.inner_options)
    if config.inner_backend == "inductor":
        compiler = chosen
        return lambda gm, inputs: compiler(gm, inputs, config_patches=options)
    with_options = chosen
    return lambda gm, inputs: with_options(gm, inputs, options=options)
