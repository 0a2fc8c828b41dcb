"""One op for every token mixer that a frontend registers (linear attention, SSM scans, ...).

A mixer is a Python function over tensors whose loops would otherwise be unrolled into the graph, which then holds for
one prompt length only. Its call is stored as: name, tensors, integers, floats, and the call's structure as JSON.
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
        signature: names of its arguments. registered: what was registered, of which `function` is a form.
    """

    function: Callable[..., Any]
    shapes: Callable[[dict[str, Any]], Shapes]
    signature: tuple[str, ...]
    registered: Callable[..., Any]


MIXERS: dict[str, Mixer] = {}


def unpack(
    tensors: Sequence[Any], sizes: Sequence[Any], numbers: Sequence[Any], structure: str
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a mixer call.

    In the JSON, {"tensor": i} stands for tensors[i], {"size": i} and {"number": i} for elements of the other two,
    {"dtype": name} for a torch.dtype, {"tuple": [...]} or {"list": [...]} for a sequence, and {"dict": [[key, value]]}.
    """
    operands = {"tensor": tensors, "size": sizes, "number": numbers}

    def value(entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        ((kind, content),) = entry.items()
        if kind in operands:
            return operands[kind][content]
        if kind == "dtype":
            return getattr(torch, content)
        if kind == "dict":
            return {key: value(item) for key, item in content}
        items = [value(item) for item in content]
        return tuple(items) if kind == "tuple" else items

    call = json.loads(structure)
    return [value(a) for a in call["args"]], {name: value(a) for name, a in call["kwargs"].items()}


def bind(
    name: str, tensors: Sequence[Any], sizes: Sequence[Any], numbers: Sequence[Any], structure: str
) -> dict[str, Any]:
    """The arguments of a mixer call by name; operands may be stand-ins."""
    args, kwargs = unpack(tensors, sizes, numbers, structure)
    return dict(zip(MIXERS[name].signature, args, strict=False)) | kwargs


@torch.library.custom_op("uniprefill::mixer", mutates_args=())
def mixer(
    name: str, tensors: Sequence[Tensor], sizes: Sequence[int], numbers: Sequence[float], structure: str
) -> list[Tensor]:
    """Call the registered mixer `name`; returns its tensors in order, without the Nones."""
    args, kwargs = unpack(tensors, sizes, numbers, structure)
    registered = MIXERS[name]
    out = registered.function(*args, **kwargs)
    outputs = [o for o in (out if isinstance(out, tuple | list) else (out,)) if isinstance(o, Tensor)]
    promised = registered.shapes(bind(name, tensors, sizes, numbers, structure))
    if [tuple(o.shape) for o in outputs] != [tuple(shape) for shape, _ in promised]:
        raise RuntimeError(
            f"mixer {name}: returned tensors of shapes {[tuple(o.shape) for o in outputs]}, was registered with "
            f"{[tuple(shape) for shape, _ in promised]}"
        )
    inputs = {t.untyped_storage().data_ptr() for t in tensors}
    results = [tensor.to(dtype).contiguous() for tensor, (_, dtype) in zip(outputs, promised, strict=True)]
    # The compiler takes an op's outputs for new storage.
    return [r.clone() if r.untyped_storage().data_ptr() in inputs else r for r in results]


@mixer.register_fake
def _(name, tensors, sizes, numbers, structure):  # type: ignore[no-untyped-def]
    bound = bind(name, tensors, sizes, numbers, structure)
    return [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in MIXERS[name].shapes(bound)]
