"""torch-tensorrt: its options, and the call that makes TensorRT engines of an exported piece.

Nothing else in the package knows the library. It is imported when it is asked for. A build that fails raises: the
library's backend for torch.compile would log a line and return the graph, and a user would take PyTorch's times for
TensorRT's.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from uniprefill_fx.config import OptionError
from uniprefill_fx.option_checks import did_you_mean, integer

log = logging.getLogger(__name__)
NAMES = ("torch_tensorrt", "tensorrt")  # as the library registers itself with torch.compile
PACKAGE = "torch_tensorrt"
OWN = ("min_tokens", "opt_tokens", "max_tokens")
NOT_OPTIONS = {
    **dict.fromkeys(("exported_program", "inputs", "arg_inputs", "kwarg_inputs"), "The pieces of the graph say it."),
    "pass_through_build_failures": "A build that fails always raises.",
}


class EngineError(RuntimeError):
    """torch-tensorrt could not make engines of a piece. The cause is its own error."""


@dataclass(frozen=True)
class TokenRange:
    """The sizes that a token axis of an engine may have: rows of a prompt, or what is kept of it.

    Attributes:
        lowest, highest: bounds, both included. best: the size that engines are tuned for; None: the size of the call
            that builds them.
    """

    lowest: int = 2
    best: int | None = None
    highest: int = 32_768


@dataclass(frozen=True)
class TensorRT:
    """The library with a user's options: `inner_options` of `inner_backend="torch_tensorrt"`.

    Attributes:
        library: the module. tokens: the sizes of token axes. settings: what its `dynamo.compile` is called with.
    """

    library: Any
    tokens: TokenRange
    settings: Mapping[str, Any]

    def build(
        self,
        name: str,
        exported: ExportedProgram,
        shapes: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]],
        like: Sequence[torch.Tensor],
    ) -> Callable[..., Any]:
        """Engines for the operators of a program that TensorRT has, PyTorch for the others.

        Args:
            name: of the piece, for messages. exported: weights are its own, not inputs.
            shapes: by input, the least, the best and the largest shape. like: a tensor of each input's dtype.

        Raises:
            EngineError: the library raised.
        """
        of_input = self.library.Input
        inputs = [
            of_input(shape=least, dtype=x.dtype)
            if least == largest
            else of_input(min_shape=least, opt_shape=best, max_shape=largest, dtype=x.dtype)
            for (least, best, largest), x in zip(shapes, like, strict=True)
        ]
        _say_dimensions(exported)
        settings = dict(self.settings)
        if "device" not in settings and like and like[0].is_cuda:
            settings["device"] = like[0].device
        try:
            run: Callable[..., Any] = self.library.dynamo.compile(exported, arg_inputs=inputs, **settings)
        except Exception as error:
            raise EngineError(
                f"{name}: torch-tensorrt could not build its engines: {error}. Name operators that it must leave to "
                "PyTorch in inner_options={'torch_executed_ops': {...}}, or use another inner_backend"
            ) from error
        return run


def tensorrt(name: str, options: Mapping[str, Any] | None) -> TensorRT:
    """The library, imported, with checked options.

    Raises:
        OptionError: it is not installed or cannot be imported; an option that it does not have, or a bad bound.
    """
    given = dict(options or {})
    tokens = _token_range({key: given.pop(key) for key in OWN if key in given})
    try:
        library: Any = importlib.import_module(PACKAGE)
    except (ImportError, OSError) as error:  # the latter where libraries of TensorRT are missing
        fitting = ".".join(torch.__version__.split(".")[:2])
        hint = f'Install the version for this torch: pip install "torch-tensorrt=={fitting}.*". ({error})'
        raise OptionError("inner_backend", name, "a backend that is installed", hint) from error
    known = inspect.signature(library.dynamo.compile).parameters
    names = [*OWN, *(n for n, p in known.items() if p.kind is not p.VAR_KEYWORD and n not in NOT_OPTIONS)]
    for key in given:
        if key not in names:
            hint = NOT_OPTIONS.get(key) or did_you_mean(key, names, "Remove it.")
            raise OptionError(f"inner_options[{key!r}]", given[key], "the names " + ", ".join(names), hint)
    return TensorRT(library, tokens, given)


def _say_dimensions(exported: ExportedProgram) -> None:
    """Write the dimension of each sort into a program: torch leaves a default out, and the library (2.11) reads it."""
    for node in exported.graph.find_nodes(op="call_function", target=torch.ops.aten.sort.default):
        if len(node.args) == 1:
            node.args = (node.args[0], node.args[0].meta["val"].ndim - 1)
    exported.graph_module.recompile()


def _token_range(given: Mapping[str, Any]) -> TokenRange:
    def checked(key: str, default: int | None, least: int) -> Any:
        return integer(least, "It bounds the rows of every piece.")(f"inner_options[{key!r}]", given.get(key, default))

    lowest = checked("min_tokens", TokenRange.lowest, 2)
    highest = checked("max_tokens", max(TokenRange.highest, lowest), lowest)
    best = None if given.get("opt_tokens") is None else checked("opt_tokens", None, lowest)
    if best is not None and best > highest:
        hint = "Raise max_tokens, or lower opt_tokens."
        raise OptionError("inner_options['opt_tokens']", best, f"at most max_tokens, {highest}", hint)
    return TokenRange(lowest, best, highest)
