"""One op for every token mixer that a frontend registers (linear attention, SSM scans, ...).

A mixer is a Python function over tensors whose loops would otherwise be unrolled into the graph, which then holds for
one prompt length only. Its call is stored as: name, tensors, and the call's structure as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Shapes = Sequence[tuple[tuple[Any, ...], torch.dtype]]


@dataclass(frozen=True)
class Mixer:
    """A registered mixer.

    Attributes:
        function: called with the model's own arguments; returns a tensor or a tuple of tensors and None.
        shapes: (bound arguments) -> [(shape, dtype)] of the tensors that it returns, in order.
    """

    function: Callable[..., Any]
    shapes: Callable[[dict[str, Any]], Shapes]
    signature: tuple[str, ...]


MIXERS: dict[str, Mixer] = {}


def unpack(tensors: Sequence[Tensor], structure: str) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a mixer call: an entry {"tensor": i} of the JSON stands for tensors[i]."""

    def value(entry: Any) -> Any:
        return tensors[entry["tensor"]] if isinstance(entry, dict) else entry

    call = json.loads(structure)
    return [value(a) for a in call["args"]], {name: value(a) for name, a in call["kwargs"].items()}


@torch.library.custom_op("uniprefill::mixer", mutates_args=())
def mixer(name: str, tensors: Sequence[Tensor], structure: str) -> list[Tensor]:
    """Call the registered mixer `name`; returns its tensors in order, without the Nones."""
    args, kwargs = unpack(tensors, structure)
    registered = MIXERS[name]
    out = registered.function(*args, **kwargs)
    outputs = [o for o in (out if isinstance(out, tuple | list) else (out,)) if isinstance(o, Tensor)]
    promised = registered.shapes(dict(zip(registered.signature, args, strict=False)) | kwargs)
    inputs = {t.untyped_storage().data_ptr() for t in tensors}
    results = []
    for tensor, (shape, dtype) in zip(outputs, promised, strict=True):
        if tuple(tensor.shape) != tuple(shape):
            raise RuntimeError(
                f"mixer {name}: returned shape {tuple(tensor.shape)}, was registered with {tuple(shape)}"
            )
        tensor = tensor.to(dtype).contiguous()
        # The compiler takes an op's outputs for new storage.
        results.append(tensor.clone() if tensor.untyped_storage().data_ptr() in inputs else tensor)
    return results


@mixer.register_fake
def _(name, tensors, structure):  # type: ignore[no-untyped-def]
    args, kwargs = unpack(tensors, structure)
    registered = MIXERS[name]
    bound = dict(zip(registered.signature, args, strict=False)) | kwargs
    return [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in registered.shapes(bound)]
