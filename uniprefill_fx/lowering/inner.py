"""The backend that compiles what our passes leave: looked up once, called as torch.compile would call it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from uniprefill_fx.config import OptionError, PrefillConfig
from uniprefill_fx.lowering import tensorrt
from uniprefill_fx.lowering.cache_tag import tagged
from uniprefill_fx.lowering.compiler_internals import backend_of
from uniprefill_fx.lowering.metadata import complete_values
from uniprefill_fx.option_checks import BACKEND_NAME, did_you_mean

PLAIN = ("aot_eager", "eager")
"""Backends that compile nothing; torch does not list them, as it has them for debugging."""

InnerBackend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def inner_backend(config: PrefillConfig) -> InnerBackend:
    """The inner backend of a config, with `inner_options` bound. Beside TensorRT, which is for prompts, it is Inductor.

    Raises:
        OptionError: no backend of that name is registered.
    """
    if config.inner_backend in tensorrt.NAMES:
        inductor: InnerBackend = checked_inner_backend("inductor")
        return inductor
    compiler: InnerBackend = checked_inner_backend(config.inner_backend)
    if config.inner_options is not None:
        # Inductor calls its options config_patches; torch.compile hands `options` to every other backend.
        keyword = "config_patches" if config.inner_backend == "inductor" else "options"
        compiler = functools.partial(compiler, **{keyword: dict(config.inner_options)})
    return compiler


def tensorrt_of(config: PrefillConfig) -> tensorrt.TensorRT | None:
    """torch-tensorrt with its options, where it is the inner backend.

    Raises:
        OptionError: it is not installed, or has no such option.
    """
    name = config.inner_backend
    return tensorrt.tensorrt(name, config.inner_options) if isinstance(name, str) and name in tensorrt.NAMES else None


def checked_inner_backend(
    chosen: str | Callable[..., Any], options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend of that name, or the callable itself; for TensorRT, what builds its engines.

    Raises:
        OptionError: no backend of that name is registered; torch-tensorrt is not installed, or has no such option.
    """
    if isinstance(chosen, str) and chosen in tensorrt.NAMES:
        return tensorrt.tensorrt(chosen, options).build
    found = backend_of(chosen) if isinstance(chosen, str) else chosen
    if found is None:
        names = sorted({*torch.compiler.list_backends(), *PLAIN, *tensorrt.NAMES} - {BACKEND_NAME})
        hint = did_you_mean(chosen, names, "Register the backend first.")
        raise OptionError("inner_backend", chosen, f"{', '.join(names)}, or a callable", hint)
    return found


def compile_whole(inner: InnerBackend, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph of Dynamo that our passes have changed in place, while Dynamo waits for it."""
    complete_values(gm)
    with tagged():
        return inner(gm, example_inputs)
