"""Token mixers (linear attention, SSM scans) as single ops.

A mixer spelled out in torch loops over chunks, so the traced graph would hold for one prompt length only, and the
passes would have to understand every op inside. Registered, a call of it becomes one `uniprefill::mixer` node.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from uniprefill_fx.frontends.gating import compiling_for_uniprefill, copy_function
from uniprefill_fx.ops.mixer import MIXERS, Mixer


@torch._dynamo.assume_constant_result
def _dumps(values: tuple[Any, ...], places: tuple[int, ...], names: tuple[str, ...]) -> str:
    """The JSON of a call: positional values first, then one for each name; place >= 0 stands for that tensor."""
    entries = [v if at < 0 else {"tensor": at} for v, at in zip(values, places, strict=True)]
    positional = len(values) - len(names)
    kwargs = dict(zip(names, entries[positional:], strict=True))
    return json.dumps({"args": entries[:positional], "kwargs": kwargs})


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
        values: list[Any] = []
        places: list[int] = []
        for value in (*args, *kwargs.values()):
            is_tensor = isinstance(value, torch.Tensor)
            values.append(None if is_tensor else value)
            places.append(len(tensors) if is_tensor else -1)
            if is_tensor:
                tensors.append(value)
        structure = _dumps(tuple(values), tuple(places), tuple(kwargs.keys()))
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


def mamba2_scan(call: dict[str, Any]) -> list[Any]:
    """(batch, tokens, heads, head_dim) fp32, and the state (batch, heads, head_dim, state) fp32 if wanted."""
    x, b = call["hidden_states"], call["B"]
    state = (x.shape[0], x.shape[2], x.shape[3], b.shape[-1])
    out = [(tuple(x.shape), torch.float32)]
    return [*out, (state, torch.float32)] if call.get("return_final_states", False) else out


def mamba_scan(call: dict[str, Any]) -> list[Any]:
    """(batch, channels, tokens) in the input's dtype, and the state (batch, channels, state) if wanted."""
    x, a = call["hidden_states"], call["A"]
    out = [(tuple(x.shape), x.dtype)]
    state = (x.shape[0], x.shape[1], a.shape[-1])
    return [*out, (state, torch.float32)] if call.get("return_last_state", False) else out


# function name -> shapes; every modeling file has its own copy of these functions.
KNOWN: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "torch_recurrent_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "recurrent_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
    "mamba_selective_scan": mamba_scan,
}


def install_known() -> int:
    """Register the known mixers of every modeling file that is imported by now; returns how many were new."""
    before = len(MIXERS)
    for path, module in list(sys.modules.items()):
        if path.startswith("transformers.models.") and ".modeling_" in path:
            for name, shapes in KNOWN.items():
                function = vars(module).get(name)
                if inspect.isfunction(function) and function.__module__ == path:
                    register_mixer(function, shapes)
    return len(MIXERS) - before
