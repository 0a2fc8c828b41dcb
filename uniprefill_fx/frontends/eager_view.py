"""What eager code gets from a compact cache layer: a view of all tokens seen that knows which rows it does not hold.

Compiled, attention that reads a compact layer is replaced by one that reads its rows and their positions. Code that
runs eagerly (past Dynamo's recompile limit, under `torch.compiler.set_stance`, in a model that is not compiled) reads
a `CompactView` instead: the layer's rows at their original indices, with holes where tokens were dropped, and beside
each element whether it is `held`. Operators that are understood carry that along:

    moves (transpose, expand, reshape, ...)   done to `held` as well
    element by element, projections           held where all that an element is computed from is held
    softmax                                   over what is held; holes get weight 0
    weights @ values, SDPA                    over what is held: an ordinary tensor again

so attention is that over the stored rows, with the model's own mask, window, soft-capping and sinks, whoever spells it
out. Any other operator raises `CompactCacheError`: nothing computes with a hole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from uniprefill_fx.errors import CompactCacheError
from uniprefill_fx.passes.operator_internals import as_plain_tensors
from uniprefill_fx.runtime.warn_once import warn_once
from uniprefill_fx.torch_internals import recompile_limit


class CompactView(Tensor):
    """A tensor some of whose elements are missing, because their tokens were dropped.

    Attributes:
        held: bool, of the same shape: which elements are there. The others are finite numbers without a meaning.
        weights: what attention gives each token: 0 where nothing is held, so that products with values are exact.
        dropped_after: (batch, tokens seen) int64, of a cache layer that later layers read too: the decoder layer behind
            which each token was dropped. What a reader holds is then decided when it reads.
        reader: the decoder layer that this was computed in from such a view; None: from none.
    """

    held: Tensor
    weights: bool
    dropped_after: Tensor | None
    reader: int | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        from uniprefill_fx.frontends.eager_rules import RULES

        with as_plain_tensors():
            rule = RULES.get(func)
            args, kwargs, reader = _read_by_layer(rule, args, kwargs or {})
            if rule is None and any(isinstance(x, CompactView) and not x.weights for x in flat((args, kwargs))):
                raise not_understood(getattr(func, "__name__", str(func)))
            if rule is None:  # nothing is missing from weights: what is not held got none
                return func(*plain(args), **plain(kwargs))
            result = rule(func, *args, **kwargs)
            for view in flat(result):
                if isinstance(view, CompactView):
                    view.reader = reader
            return result


def compact_view(stored: Tensor, positions: Tensor, seen: int, dropped_after: Tensor | None = None) -> Tensor:
    """The rows of a layer, (batch, heads, rows, dim), as a `CompactView` of (batch, heads, seen, dim).

    positions: (batch, rows) int64, -1 for rows that are padding. dropped_after: (batch, seen) int64, where later
    layers read this one too.
    """
    request = torch.arange(positions.shape[0], device=positions.device)[:, None]
    places = positions.masked_fill(positions < 0, seen)  # padding goes into a row that is cut off again
    view = stored.new_zeros(*stored.shape[:-2], seen + 1, stored.shape[-1])
    view.transpose(1, 2)[request, places] = stored.transpose(1, 2)
    held = torch.zeros(positions.shape[0], seen + 1, dtype=torch.bool, device=stored.device)
    held[request, places] = True
    view = view[..., :seen, :]
    whole = view_of(view, held[:, None, :seen, None].expand(view.shape))
    whole.dropped_after = dropped_after
    return whole


def _read_by_layer(rule: Any, args: Any, kwargs: Any) -> tuple[Any, Any, int | None]:
    """The same arguments, with views of shared cache layers as the layer sees them whose attention runs now, and which.

    Raises:
        CompactCacheError: that layer is not known, or a view was computed in another one.
    """
    from uniprefill_fx.frontends.eager_rules import metadata

    views = [x for x in flat((args, kwargs)) if isinstance(x, CompactView)]
    if rule is metadata or all(x.dropped_after is None and x.reader is None for x in views):
        return args, kwargs, None
    layer = _running_layer()
    if layer is None or any(x.reader not in (None, layer) for x in views):
        raise not_understood("a layer that reads the keys of an earlier one in a way of its own")

    def seen(x: Any) -> Any:
        if not isinstance(x, CompactView) or x.dropped_after is None:
            return x
        return view_of(x.as_subclass(Tensor), x.held & (x.dropped_after >= layer)[:, None, :, None])

    return _mapped(args, seen), _mapped(kwargs, seen), layer


def _running_layer() -> int | None:
    """The number of the decoder layer whose attention is further up the stack: that of the module that runs there."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_locals.get("self")
        number = getattr(module, "layer_idx", None) if isinstance(module, nn.Module) else None
        if isinstance(number, int):
            return number
        frame = frame.f_back
    return None


def warn_of_eager_reads() -> None:
    """Once a process: a compact cache is read by eager code, which is right and slow."""
    warn_once(
        "eager reads",
        "a compact KV cache is read by code that runs eagerly. Its answers are right, but slow. If the "
        f"model is compiled, Dynamo reached its limit of {recompile_limit()} graphs for one function; raise "
        "torch._dynamo.config.recompile_limit (TORCH_LOGS=recompiles tells what each graph is for).",
        stacklevel=3,
    )


def not_understood(what: str) -> CompactCacheError:
    return CompactCacheError(
        f"a compact KV cache is read by eager code, and {what} is not known to work without the tokens that uniprefill "
        "dropped. Where the model is compiled, raise torch._dynamo.config.recompile_limit; else run the model that is "
        "compiled with backend='uniprefill' on this cache, or start again with an empty one."
    )


def view_of(data: Tensor, held: Tensor, weights: bool = False) -> CompactView:
    view: Any = data.as_subclass(CompactView)
    view.held, view.weights, view.dropped_after, view.reader = held, weights, None, None
    return view


def flat(item: Any) -> Iterable[Any]:
    if isinstance(item, tuple | list):
        for part in item:
            yield from flat(part)
    elif isinstance(item, dict):
        yield from flat(list(item.values()))
    else:
        yield item


def _mapped(item: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(item, tuple | list):
        return type(item)([_mapped(part, change) for part in item])
    if isinstance(item, dict):
        return {key: _mapped(part, change) for key, part in item.items()}
    return change(item)


def plain(item: Any) -> Any:
    """The same arguments, with ordinary tensors in place of views."""
    return _mapped(item, lambda x: x.as_subclass(Tensor) if isinstance(x, CompactView) else x)


def held_of(item: Any) -> Any:
    """The same arguments, with what is held in place of tensors."""

    def change(x: Any) -> Any:
        if isinstance(x, CompactView):
            return x.held
        return torch.ones_like(x, dtype=torch.bool) if isinstance(x, Tensor) else x

    return _mapped(item, change)


def all_weights(*items: Any) -> bool:
    return all(x.weights for x in flat(items) if isinstance(x, CompactView))
