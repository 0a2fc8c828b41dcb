"""Token mixers (linear attention, SSM scans) as single ops: `register_mixer`.

A mixer spelled out in torch loops over chunks, so the traced graph would hold for one prompt length only, and the
passes would have to understand every op inside. Registered, a call of it becomes one `uniprefill::mixer` node.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from uniprefill_fx.frontends.gating import compiling_for_uniprefill, copy_function
from uniprefill_fx.ops.mixer import MIXERS, Mixer

Layout = Callable[[dict[str, Any]], Any]


def register_mixer(
    function: Callable[..., Any], shapes: str | Sequence[str] | Layout, attributes: Sequence[str] = ()
) -> None:
    """Make Dynamo put one `uniprefill::mixer` node where `function` is called, for this backend only.

    The function mixes tokens causally along one token axis. Behind a drop it gets the kept rows alone, as neighbours.

    Args:
        function: a function, or a method as `Class.method`, of tensors, numbers, strings, dtypes, None, and tuples,
            lists and dicts of those;
            returns a tensor, or a tuple of tensors and None. It may be disabled for the compiler.
        shapes: the name of the argument whose shape and dtype the result has, or one name for each result; or
            (arguments by name) -> [(shape, dtype) or None] of the results. Sizes may be symbolic: use `tensor.shape`,
            never numbers read from it.
        attributes: of a method: the attributes of `self` that it reads, tensors or constants. It gets nothing else.

    Raises:
        TypeError: `function` is no Python function, `shapes` is none of the above.
        ValueError: `shapes` or `attributes` name what is not there; another function of that name is registered.
    """
    if not inspect.isfunction(function):
        raise TypeError(f"register_mixer: expected a Python function or `Class.method`, got {function!r}")
    name = f"{function.__module__}.{function.__qualname__}"
    if name in MIXERS:
        if MIXERS[name].registered is function:
            return
        raise ValueError(f"register_mixer: another function is registered as {name}")
    owner = _owner(function)
    signature = tuple(inspect.signature(function).parameters)[0 if owner is None else 1 :]
    if owner is None and attributes:
        raise ValueError(f"register_mixer: attributes={tuple(attributes)} are for methods, and {name} is none")
    layout = _layout(name, shapes, signature)
    mixer = Mixer(
        copy_function(function) if owner is None else _on_attributes(function, attributes),
        lambda bound: [s for s in layout(bound) if s is not None],
        (*attributes, *signature),
        function,
    )
    original, names = mixer.function, mixer.signature  # Dynamo cannot look into a `Mixer`
    if owner is None:

        @torch.compiler.substitute_in_graph(function, skip_signature_check=True)
        def substitute(*args: Any, **kwargs: Any) -> Any:
            if not compiling_for_uniprefill():
                return original(*args, **kwargs)
            return _call(name, names, layout, args, kwargs)

    else:

        def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
            values = (*(getattr(self, attribute) for attribute in attributes), *args)
            return _call(name, names, layout, values, kwargs)

        replace_method(owner, function.__name__, traced)
    MIXERS[name] = mixer


def replace_method(owner: type, name: str, traced: Callable[..., Any]) -> None:
    """Have Dynamo trace `traced` in place of a method, for this backend only. Eager code runs the method itself.

    `substitute_in_graph` does this for functions; of methods it takes no notice.
    """
    original = vars(owner)[name]

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and compiling_for_uniprefill():
            return traced(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(owner, name, method)


def _owner(function: types.FunctionType) -> type | None:
    """The class whose method a function is; None for a plain function.

    Raises:
        ValueError: it is written in a class, and not found there.
    """
    *path, name = function.__qualname__.split(".")
    if not path or path[-1] == "<locals>":
        return None
    place: Any = sys.modules.get(function.__module__)
    for part in path:
        place = getattr(place, part, None)
    if not isinstance(place, type) or vars(place).get(name) is not function:
        raise ValueError(f"register_mixer: {function.__qualname__} is no method that {function.__module__} holds")
    return place


def _on_attributes(function: Callable[..., Any], attributes: Sequence[str]) -> Callable[..., Any]:
    """A method as a function of the attributes it reads and of its arguments."""

    def run(*args: Any, **kwargs: Any) -> Any:
        read, rest = args[: len(attributes)], args[len(attributes) :]
        return function(types.SimpleNamespace(**dict(zip(attributes, read, strict=True))), *rest, **kwargs)

    return run


def _layout(name: str, shapes: str | Sequence[str] | Layout, signature: Sequence[str]) -> Layout:
    if callable(shapes):
        return shapes
    names = (shapes,) if isinstance(shapes, str) else tuple(shapes) if isinstance(shapes, list | tuple) else ()
    if not names:
        raise TypeError(f"register_mixer: shapes={shapes!r}; expected argument names, or a function of the arguments")
    missing = [n for n in names if n not in signature]
    if missing:
        raise ValueError(f"register_mixer: {name} has no argument {missing[0]!r}, only {', '.join(signature)}")
    return lambda call: [(tuple(call[n].shape), call[n].dtype) for n in names]


def _call(name: str, signature: Sequence[str], layout: Layout, args: Any, kwargs: dict[str, Any]) -> Any:
    """What Dynamo traces for a call: tensors and numbers are operands of the op, the rest is text in its arguments."""
    operands: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    entries = [_entry(value, operands) for value in (*args, *kwargs.values())]
    structure = _structure(name, tuple(entries), tuple(kwargs.keys()))
    bound = dict(zip(signature, args, strict=False))
    bound.update(kwargs)
    promised = layout(bound)
    if not _is_layout(promised):
        _refuse_layout(name)
    outputs = torch.ops.uniprefill.mixer(name, *operands, structure)
    results: list[Any] = []
    taken = 0
    for item in promised:
        results.append(None if item is None else outputs[taken])
        taken += item is not None
    return results[0] if len(promised) == 1 else tuple(results)


def _entry(value: Any, operands: tuple[list[Any], list[Any], list[Any]], inside: bool = False) -> tuple[str, Any]:
    """(kind, content) of an argument, its tensors and numbers being appended to the operands. Traced by Dynamo.

    Numbers of a tuple, list or dict that are no integers stay what they are: limits, infinite ones among them.
    """
    tensors, sizes, numbers = operands
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return "tensor", len(tensors) - 1
    if isinstance(value, int) and not isinstance(value, bool):
        sizes.append(value)
        return "size", len(sizes) - 1
    if isinstance(value, float) and not inside:
        numbers.append(value)
        return "number", len(numbers) - 1
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return kind, tuple([_entry(item, operands, True) for item in value])
    if isinstance(value, dict):
        return "dict", tuple([(key, _entry(item, operands, True)) for key, item in value.items()])
    return "value", value


def _is_layout(promised: Any) -> bool:
    """Whether it is [(shape, dtype) or None]. Dynamo traces this."""
    if not isinstance(promised, list | tuple):
        return False
    for item in promised:
        if item is None:
            continue
        if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], tuple | list):
            return False
    return len(promised) > 0


@torch.compiler.assume_constant_result
def _refuse_layout(name: str) -> None:
    """Raises while Dynamo traces, as only a function that runs then can: what traced code raises, Dynamo swallows."""
    raise TypeError(
        f"register_mixer: the function of shapes of {name} returned no list of (shape, dtype) or None; expected one "
        "item for each result, as in [(tuple(x.shape), x.dtype)]"
    )


@torch.compiler.assume_constant_result
def _structure(name: str, entries: tuple[tuple[str, Any], ...], names: tuple[str, ...]) -> str:
    """The JSON of a call, see `ops.mixer.unpack`."""
    encoded = [_encoded(name, entry) for entry in entries]
    positional = len(encoded) - len(names)
    return json.dumps({"args": encoded[:positional], "kwargs": dict(zip(names, encoded[positional:], strict=True))})


def _encoded(name: str, entry: tuple[str, Any]) -> Any:
    kind, content = entry
    if kind in ("tuple", "list"):
        return {kind: [_encoded(name, item) for item in content]}
    if kind == "dict":
        return {kind: [[key, _encoded(name, item)] for key, item in content]}
    if kind != "value":
        return {kind: content}
    if isinstance(content, torch.dtype):
        return {"dtype": str(content).removeprefix("torch.")}
    if content is None or isinstance(content, bool | int | float | str):
        return content
    raise TypeError(f"mixer {name}: an argument {content!r}, which is no tensor, number, string, dtype or None")
