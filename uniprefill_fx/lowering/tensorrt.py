"""torch-tensorrt as the inner backend: imported when it is asked for, and never allowed to fail in silence."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from uniprefill_fx.config import OptionError

NAMES = ("torch_tensorrt", "tensorrt")  # as the library registers itself
PACKAGE = "torch_tensorrt"


def tensorrt(name: str, options: Mapping[str, Any], lookup: Callable[[str], Any]) -> Callable[..., Any]:
    """The backend of torch-tensorrt, with its options bound.

    An engine that cannot be built raises, where the library would return the graph as it was, with a line in the log:
    a user would take PyTorch's times for TensorRT's. `pass_through_build_failures=False` among the options brings that
    back.

    Args:
        name: one of `NAMES`. options: the user's `inner_options`. lookup: finds a registered backend by its name.

    Raises:
        OptionError: the library is not installed, or it cannot be imported.
    """
    compiler = lookup(name)
    if compiler is None:
        try:
            importlib.import_module(PACKAGE)  # registers its backends
        except (ImportError, OSError) as error:  # the latter where libraries of TensorRT are missing
            fitting = ".".join(torch.__version__.split(".")[:2])
            hint = f'Install the version for this torch: pip install "torch-tensorrt=={fitting}.*". ({error})'
            raise OptionError("inner_backend", name, "a backend that is installed", hint) from error
        compiler = lookup(name)
    if compiler is None:
        raise OptionError(
            "inner_backend", name, "a backend that is installed", f"{PACKAGE} registers none of that name."
        )
    return functools.partial(compiler, options={"pass_through_build_failures": True} | dict(options))
