"""PyTorch's own operators by what they do to rows: the tables behind `rowwise_rules` and `rowwise_regions`."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from uniprefill_fx.passes.operator_internals import OpOverload, OpOverloadPacket, collective_of
from uniprefill_fx.passes.schemas import overloads

POINTWISE = frozenset(
    "add sub mul div true_divide floor_divide floordiv truediv multiply subtract divide mod remainder fmod pow rsub "
    "neg negative pos abs absolute exp exp2 expm1 log log2 log1p log10 sqrt rsqrt square reciprocal sin cos tan tanh "
    "sinh cosh asin acos atan atan2 arctan arctan2 sigmoid silu gelu relu relu6 leaky_relu elu selu celu mish softplus "
    "hardtanh hardswish hardsigmoid logsigmoid erf erfc erfinv clamp clamp_min clamp_max clip maximum minimum where "
    "masked_fill eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_xor "
    "bitwise_not and_ or_ xor invert isnan isinf isfinite nan_to_num floor ceil round trunc frac sign sgn lerp addcmul "
    "addcdiv to float half bfloat16 double long int bool type type_as clone contiguous detach positive copy xlogy "
    "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor".split()
)
CREATIONS = frozenset(
    "zeros ones empty full new_zeros new_ones new_empty new_full zeros_like ones_like empty_like full_like".split()
)
FILLS = CREATIONS | {"zero", "fill"}
# name -> the place of the dimensions among its arguments, and those it takes where none are given (None: all)
ALONG: dict[str, tuple[int, int | None]] = {
    **{n: (1, None) for n in "sum mean prod amax amin max min argmax argmin all any std var logsumexp median".split()},
    **{n: (1, None) for n in "nansum nanmean count_nonzero softmax log_softmax cumsum cumprod cummax cummin".split()},
    **{n: (1, -1) for n in "sort argsort glu".split()},
    **{n: (2, -1) for n in "topk kthvalue".split()},
    **{n: (2, None) for n in "norm linalg_vector_norm vector_norm".split()},
    **{"normalize": (2, 1), "logcumsumexp": (1, None), "softmin": (1, None), "flip": (1, None), "unbind": (1, 0)},
}
ELEMENTS = frozenset("view reshape flatten unflatten unsqueeze squeeze view_as reshape_as ravel".split())
AXES = frozenset("transpose permute t swapaxes swapdims movedim moveaxis".split())
PIECES = frozenset("chunk split split_with_sizes tensor_split".split())
PRODUCTS = frozenset("matmul bmm mm imatmul".split())
GROUPED = frozenset("_grouped_mm grouped_mm grouped_mm_fallback".split())
LOOKUPS = frozenset(
    "getitem index_select gather take_along_dim embedding scatter scatter_add index_add index_copy index_put setitem "
    "scatter_reduce".split()
)
COUNTS = frozenset("histc bincount one_hot arange repeat_interleave searchsorted bucketize sum any all".split())
# What ranks exchange, by the names of operators. A probe never runs one: it would wait for the other ranks.
SUMS_OVER_RANKS = frozenset({"all_reduce", "wait_tensor"})
COLLECTIVES = SUMS_OVER_RANKS | {"all_gather_into_tensor"}
# What takes part in sending tokens to experts and back: only a chain of these may be run as a whole.
GROUPS = frozenset(
    "sort argsort topk expand expand_as repeat cat stack chunk split linear softmax cumsum unbind".split()
) | (POINTWISE | FILLS | ELEMENTS | AXES | PRODUCTS | GROUPED | LOOKUPS | COUNTS)
# What a causal convolution is made of.
CONVOLVES = (
    POINTWISE | ELEMENTS | AXES | frozenset("pad cat getitem narrow chunk split conv1d conv2d conv_depthwise".split())
)


def known_name(node: fx.Node) -> str:
    """The name of an operator of PyTorch's own, without the underscore of an in-place form; "" for any other."""
    target: Any = node.target
    if node.op == "call_method":
        name = str(target)
    elif isinstance(target, OpOverload | OpOverloadPacket):
        library, name = str(target).split(".")[:2]
        if (library, name) == ("transformers", "grouped_mm_fallback"):  # torch's grouped_mm, where that has no kernel
            return name
        if collective_of(target) in COLLECTIVES:
            return name
        if library != "aten":
            return ""
    elif node.op == "call_function":
        module = (getattr(target, "__module__", None) or "").split(".")[0]
        if module not in ("torch", "_operator", "builtins") and not isinstance(target, types.MethodDescriptorType):
            return ""
        name = getattr(target, "__name__", "")
        if module == "_operator":
            return name
    else:
        return ""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def dimensions(node: fx.Node, name: str, ndim: int) -> Sequence[int]:
    """The dimensions that an operation of `ALONG` runs along; all of them where none is given, or no number."""
    place, default = ALONG[name]
    given = [node.kwargs[key] for key in ("dim", "dims", "axis") if key in node.kwargs] or list(node.args[place:])
    if not given:
        return range(ndim) if default is None else [default]
    if isinstance(given[0], bool) or given[0] is None:
        return range(ndim)
    items = given if name == "flip" else given[:1]
    numbers = [n for item in items for n in (item if isinstance(item, tuple | list) else (item,))]
    return numbers if all(isinstance(n, int) for n in numbers) and numbers else range(ndim)


def first_of(node: fx.Node) -> Any:
    """The first argument."""
    return node.args[0] if node.args else None


def argument(node: fx.Node, place: int, *names: str) -> Any:
    if len(node.args) > place:
        return node.args[place]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)


def complete(kinds: Any) -> Any:
    """The kinds, if there is one of each."""
    return None if kinds is None or (isinstance(kinds, tuple) and None in kinds) else kinds


def fill_values(node: fx.Node, name: str) -> list[Any]:
    places = {"full": 1, "new_full": 2, "full_like": 1, "fill": 1}
    return [argument(node, places[name], "fill_value", "value")] if name in places else []


def last_few(item: Any) -> bool:
    return isinstance(item, list | tuple) and bool(item) and all(isinstance(i, int) and i < 0 for i in item)


def is_inactive(node: fx.Node) -> bool:
    """Whether a dropout does nothing."""
    return argument(node, 2, "training", "train") is False or argument(node, 1, "p") in (0, 0.0)


def is_empty(value: Any) -> bool:
    return any(isinstance(s, int) and s == 0 for s in value.shape)


def holds_tensor(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(holds_tensor(v) for v in value)
    return isinstance(value, torch.Tensor)


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws random numbers."""
    return any(torch.Tag.nondeterministic_seeded in o.tags for o in overloads(node))
