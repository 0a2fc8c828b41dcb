"""What operators do to a `CompactView`: each rule takes the function that was called, and its arguments."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from uniprefill_fx.frontends.eager_view import (
    CompactView,
    all_weights,
    flat,
    held_of,
    not_understood,
    plain,
    view_of,
)


def metadata(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*plain(args), **plain(kwargs))


def move(func: Any, *args: Any, **kwargs: Any) -> Any:
    data = func(*plain(args), **plain(kwargs))
    # `held` may be an expanded tensor where the data has memory of its own, which `view` would refuse
    moved = Tensor.reshape if func is Tensor.view else func
    held, weights = moved(*held_of(args), **held_of(kwargs)), all_weights(args, kwargs)
    if isinstance(data, tuple | list):
        return tuple(view_of(d, h, weights) for d, h in zip(data, held, strict=True))
    return view_of(data, held, weights)


def take(func: Any, source: Any, index: Any) -> Any:
    """Slices, and new axes. Rows that are picked by tensors are something else."""
    if any(isinstance(x, Tensor) for x in flat(index)):
        raise not_understood("indexing by tensors")
    return move(func, source, index)


def laid_out(func: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    """The same numbers in another dtype or memory."""
    data = func(plain(source), *plain(args), **plain(kwargs))
    if not isinstance(source, CompactView):
        return data
    return view_of(data, source.held.to(data.device), source.weights)


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    if "out" in kwargs or kwargs.get("inplace"):
        raise not_understood("writing into a tensor that is there")
    data = func(*plain(args), **plain(kwargs))
    held = [x.held for x in flat((args, kwargs)) if isinstance(x, CompactView)]
    return view_of(data, functools.reduce(operator.and_, held).expand(data.shape))


def scaled(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Operators that make 0 of 0, so that weights stay weights."""
    result = _elementwise(func, *args, **kwargs)
    views = [x for x in flat((args, kwargs)) if isinstance(x, CompactView)]
    result.weights = len(views) == 1 and views[0].weights
    return result


def _empty(func: Any, source: Any, *size: Any, **kwargs: Any) -> Any:
    """Memory to write into."""
    data = func(plain(source), *size, **kwargs)
    return view_of(data, torch.ones(data.shape, dtype=torch.bool, device=data.device))


def _copy_into(func: Any, target: Any, source: Any) -> Any:
    """Only into what `_empty` made, and slices of it: elsewhere `held` may be an expanded tensor."""
    repeated = isinstance(target, CompactView) and any(s == 0 for s in target.held.stride())
    if not isinstance(target, CompactView) or repeated:
        raise not_understood("writing into a tensor that is there")
    func(plain(target), plain(source))
    target.held.copy_(held_of(source))
    return target


def _set(func: Any, target: Any, index: Any, source: Any) -> None:
    if not isinstance(target, CompactView):
        raise not_understood("writing into a tensor that is there")
    _copy_into(Tensor.copy_, take(Tensor.__getitem__, target, index), source)


def _linear(func: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    if isinstance(weight, CompactView) or isinstance(bias, CompactView) or x.weights:
        raise not_understood("a projection by the cache")
    data = func(plain(x), weight, bias)
    _check_not_over_tokens(x.held, -1)
    return view_of(data, x.held.all(-1, keepdim=True).expand(data.shape))


def _check_not_over_tokens(held: Tensor, axis: int) -> None:
    """Raises CompactCacheError where sums along an axis would mix elements that are held and others."""
    if bool((held.any(axis) & ~held.all(axis)).any()):
        raise not_understood("a sum over tokens")


def _filled(x: Any, value: float) -> Tensor:
    filled: Tensor = plain(x).masked_fill(~x.held, value)
    return filled


def product(func: Any, a: Any, b: Any) -> Any:
    """Queries and keys, in either order: a view of the logits. Weights and values: an ordinary tensor."""
    if isinstance(a, CompactView) and a.weights:
        if not isinstance(b, CompactView) or b.weights:
            raise not_understood("a product of weights and values that are not of one cache layer")
        _check_not_over_tokens(b.held, -1)
        there = b.held.all(-1).unsqueeze(-2)
        if bool((a.held & ~there).any()):
            raise not_understood("a product of weights and values that are not of one cache layer")
        return func(plain(a), _filled(b, 0.0))
    data = func(plain(a), plain(b))
    held = torch.ones((), dtype=torch.bool, device=data.device)
    if isinstance(a, CompactView):
        _check_not_over_tokens(a.held, -1)
        held = held & a.held.all(-1).unsqueeze(-1)
    if isinstance(b, CompactView):
        if b.weights:
            raise not_understood("a product with weights")
        _check_not_over_tokens(b.held, -2)
        held = held & b.held.all(-2).unsqueeze(-2)
    return view_of(data, held.expand(data.shape))


def _added_product(func: Any, bias: Any, batch1: Any, batch2: Any, **factors: Any) -> Any:
    """`beta` bias + `alpha` (q @ k): alibi in Bloom."""
    if isinstance(bias, CompactView):
        raise not_understood("a bias computed from the cache")
    logits = product(torch.bmm, batch1, batch2)
    if not isinstance(logits, CompactView):
        raise not_understood("a bias on values")
    data = func(bias, plain(batch1), plain(batch2), **factors)
    return view_of(data, logits.held)


def _check_last_axis(x: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """That `dim`, the first argument behind the tensor, is the axis of the keys."""
    dim = kwargs.get("dim", args[0] if args else None)
    if not isinstance(x, CompactView) or not isinstance(dim, int) or dim not in (-1, x.dim() - 1):
        raise not_understood("a reduction over another axis than the last")


def softmax(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    _check_last_axis(x, args, kwargs)
    dtype = kwargs.get("dtype") or x.dtype
    # Not minus infinity: a query that sees no key at all would turn into NaN.
    data = func(_filled(x.to(dtype), torch.finfo(dtype).min), *args, **kwargs)
    return view_of(data.masked_fill(~x.held, 0.0), x.held, weights=True)


def largest(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """`max` and `logsumexp` over what is held."""
    _check_last_axis(x, args, kwargs)
    return func(_filled(x, torch.finfo(x.dtype).min), *args, **kwargs)


def sdpa(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if any(isinstance(x, CompactView) for x in (query, attn_mask)):
        raise not_understood("attention whose queries or mask come from the cache")
    if query.dim() != 4:
        raise not_understood(f"attention over {query.dim()}-D operands")
    queries, keys = query.shape[-2], key.shape[-2]
    held = torch.ones((), dtype=torch.bool, device=query.device)
    for operand in (key, value):
        if isinstance(operand, CompactView):
            _check_not_over_tokens(operand.held, -1)
            held = held & operand.held.all(-1)
    held = held.unsqueeze(-2)  # (batch, kv_heads, 1, keys)
    if held.shape[1] not in (1, query.shape[1]):
        held = held.repeat_interleave(query.shape[1] // held.shape[1], 1)
    mask = held.expand(*held.shape[:2], queries, keys)
    if is_causal:
        mask = mask & torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        mask = mask & attn_mask
    elif attn_mask is not None:
        mask = attn_mask.expand(mask.shape).masked_fill(~mask, torch.finfo(attn_mask.dtype).min)
    value = _filled(value, 0.0) if isinstance(value, CompactView) else value
    key = _filled(key, 0.0) if isinstance(key, CompactView) else key
    out: Tensor = func(query, key, value, mask, dropout_p, scale=scale, enable_gqa=enable_gqa)
    return out


def _named(*names: str) -> list[Any]:
    """Every function of torch by these names: methods, operators, functions."""
    owners = (Tensor, torch, F, torch.special)
    return [getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)]


_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad", "is_sparse", "is_nested")
_SIZES = ("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex", "element_size")
_DIMS = ("ndimension", "__len__", "storage_offset", "is_inference", "get_device", "nelement")
_MOVES = ("transpose", "permute", "view", "reshape", "expand", "unsqueeze", "squeeze", "flatten", "unflatten", "narrow")
_PARTS = ("chunk", "split", "unbind", "select", "repeat", "repeat_interleave", "swapaxes", "movedim", "cat", "concat")
_COPIES = ("contiguous", "clone", "detach", "to", "float", "half", "bfloat16", "double", "type_as", "cpu", "cuda")
_ELEMENTS = ("add", "sub", "tanh", "neg", "masked_fill", "where", "clamp", "exp", "softplus", "sigmoid", "pow")
_OPERATORS = ("__add__", "__radd__", "__sub__", "__rsub__", "__neg__", "__pow__", "subtract")
_SCALES = ("mul", "div", "multiply", "divide", "true_divide", "dropout", "__mul__", "__rmul__", "__truediv__")

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {
    **{getattr(Tensor, name).__get__: metadata for name in _PROPERTIES},
    **dict.fromkeys(_named(*_SIZES, *_DIMS), metadata),
    **dict.fromkeys(_named(*_MOVES, *_PARTS), move),
    **{getattr(Tensor, name).__get__: move for name in ("mT", "mH")},
    **dict.fromkeys(_named("__getitem__"), take),
    **dict.fromkeys(_named(*_COPIES), laid_out),
    **dict.fromkeys(_named(*_ELEMENTS, *_OPERATORS), _elementwise),
    **dict.fromkeys(_named(*_SCALES), scaled),
    **dict.fromkeys(_named("new_empty", "new_zeros", "empty_like", "zeros_like"), _empty),
    Tensor.copy_: _copy_into,
    Tensor.__setitem__: _set,
    **dict.fromkeys([F.linear], _linear),
    **dict.fromkeys(_named("matmul", "__matmul__", "bmm"), product),
    **dict.fromkeys(_named("baddbmm"), _added_product),
    **dict.fromkeys(_named("softmax"), softmax),
    **dict.fromkeys(_named("max", "amax", "logsumexp"), largest),
    F.scaled_dot_product_attention: sdpa,
}
