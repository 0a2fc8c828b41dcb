"""Token mixers (linear attention, SSM scans) as single ops.

A mixer spelled out in torch loops over chunks, so the traced graph would hold for one prompt length only, and the
passes would have to understand every op inside. Registered, a call of it becomes one `uniprefill::mixer` node.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from uniprefill_fx.frontends.gating import compiling_for_uniprefill, copy_function
from uniprefill_fx.ops.mixer import MIXERS, Mixer

log = logging.getLogger(__name__)


@torch._dynamo.assume_constant_result
def _dumps(args: tuple[Any, ...], names: tuple[str, ...], values: tuple[Any, ...]) -> str:
    def entry(value: Any) -> Any:
        return {"tensor": value[1]} if isinstance(value, tuple) else value

    return json.dumps(
        {"args": [entry(a) for a in args], "kwargs": {n: entry(v) for n, v in zip(names, values, strict=True)}}
    )


def register_mixer(function: Callable[..., Any], shapes: Callable[[dict[str, Any]], Any]) -> None:
    """Make Dynamo put one `uniprefill::mixer` node where `function` is called, for this backend only.

    Args:
        function: a module-level function of tensors and constants that mixes tokens causally along one token axis and
            returns a tensor, or a tuple of tensors and None.
        shapes: (arguments by name) -> [(shape, dtype) or None] of what it returns. Sizes may be symbolic: use
            `tensor.shape`, never numbers read from it.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    if name in MIXERS:
        return
    original = copy_function(function)
    signature = tuple(inspect.signature(function).parameters)
    MIXERS[name] = Mixer(original, lambda bound: [s for s in shapes(bound) if s is not None], signature)

    @torch.compiler.substitute_in_graph(function, skip_signature_check=True)
    def substitute(*args: Any, **kwargs: Any) -> Any:
        if not compiling_for_uniprefill():
            return original(*args, **kwargs)
        tensors: list[Any] = []
        entries: list[Any] = []
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                entries.append(("tensor", len(tensors)))
                tensors.append(value)
            else:
                entries.append(value)
        structure = _dumps(tuple(entries[: len(args)]), tuple(kwargs.keys()), tuple(entries[len(args) :]))
        outputs = torch.ops.uniprefill.mixer(name, tensors, structure)
        bound = dict(zip(signature, args, strict=False))
        bound.update(kwargs)
        layout = shapes(bound)
        result: list[Any] = []
        taken = 0
        for item in layout:
            if item is None:
                result.append(None)
            else:
                result.append(outputs[taken])
                taken += 1
        return result[0] if len(layout) == 1 else tuple(result)


def gated_delta_rule(call: dict[str, Any]) -> list[Any]:
    """(batch, tokens, heads, v_dim) in the query's dtype, and the fp32 state (batch, heads, k_dim, v_dim) if wanted."""
    query, value = call["query"], call["value"]
    state = (value.shape[0], value.shape[2], query.shape[-1], value.shape[-1])
    wanted = call.get("output_final_state", False)
    return [(tuple(value.shape), query.dtype), (state, torch.float32) if wanted else None]


# function name -> shapes; every modeling file has its own copy of these functions.
KNOWN: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "torch_recurrent_gated_delta_rule": gated_delta_rule,
}


def install_known() -> None:
    """Register the known mixers of every modeling file that is imported now."""
    for path, module in list(sys.modules.items()):
        if path.startswith("transformers.models.") and ".modeling_" in path:
            for name, shapes in KNOWN.items():
                function = vars(module).get(name)
                if inspect.isfunction(function) and function.__module__ == path:
                    register_mixer(function, shapes)
                    log.debug("mixer %s.%s registered", path, name)


def install_module(path: str) -> None:
    """Register the known mixers of one modeling file by its module path."""
    importlib.import_module(path)
    install_known()
