"""A compilation of a model that leaves the user's own alone: for `explain()` and `calibrate()`."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from uniprefill_fx.config import OptionError, PrefillConfig
from uniprefill_fx.errors import StrictError
from uniprefill_fx.frontends import gating
from uniprefill_fx.pipeline import Compilation, compile_graph
from uniprefill_fx.torch_internals import backend_error, uncompiled


def isolated(
    model: Any, config: PrefillConfig, observer: Callable[[Compilation], None] | None = None
) -> Callable[..., Any]:
    """The model's forward, compiled by this backend for this caller only.

    The model stays as it is, compiled or not. `observer` sees each compilation as it is made. Calls raise `OptionError`
    for options that do not fit the model, and `StrictError` where `strict` asks for it.
    """

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_graph(gm, inputs, config, observer)

    setattr(backend, gating.OURS, True)
    forward = uncompiled(getattr(model, "forward", model))

    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    # A code object of its own: Dynamo keeps compilations by code object, and those of the user must not be crowded out.
    once = types.FunctionType(run.__code__.replace(), run.__globals__, "isolated", None, run.__closure__)
    compiled = torch.compile(once, backend=backend)

    def call(*args: Any, **kwargs: Any) -> Any:
        with unwrapped():
            return compiled(*args, **kwargs)

    return call


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Errors about options reach the user as they are, and not inside torch's report of a failed backend."""
    try:
        yield
    except Exception as error:
        inner = backend_error(error)
        if isinstance(inner, OptionError | StrictError):
            raise inner from None
        raise


def checked_prompt(model: Any, prompt: Any) -> Any:
    """A model's first argument, as it is.

    Raises:
        TypeError, ValueError: text, lists, a tokenizer's whole output, or ids without a batch for a transformers model.
    """
    if isinstance(prompt, str):
        raise TypeError("a prompt is text: wanted token ids, tokenizer(text, return_tensors='pt').input_ids")
    if isinstance(prompt, Mapping):
        raise TypeError(f"a prompt is a {type(prompt).__name__}: wanted its 'input_ids', and call={{...}} for the rest")
    if isinstance(prompt, list | tuple):
        raise TypeError(f"a prompt is a {type(prompt).__name__}: wanted a tensor of token ids, torch.tensor([ids])")
    of_transformers = hasattr(model, "get_input_embeddings")
    if isinstance(prompt, torch.Tensor) and prompt.dim() == 1 and of_transformers:
        raise ValueError(f"a prompt is {tuple(prompt.shape)}: wanted (1, tokens), prompt[None]")
    return prompt


def takes(model: Any, parameter: str) -> bool:
    """Whether the model's forward has a parameter of this name."""
    forward = uncompiled(getattr(model, "forward", model))
    return parameter in inspect.signature(forward).parameters
