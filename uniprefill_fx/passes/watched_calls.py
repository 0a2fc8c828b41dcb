"""Calls that no schema describes, run on tensors without data: what they write, and whose storage they return."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from uniprefill_fx.passes.node_utils import leaves_of, meta
from uniprefill_fx.passes.operator_internals import schema_of, storage_of, watching

log = logging.getLogger(__name__)


def _storages(value: Any) -> Iterator[int]:
    if isinstance(value, torch.Tensor):
        yield storage_of(value)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _storages(item)


_watches: dict[Any, tuple[tuple[int, ...], tuple[int, ...]] | None] = {}


def watched(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Which leaves of its arguments a call writes, and which it returns the storage of; None if it cannot be run."""
    try:
        args, kwargs = (fx.node.map_arg(part, _stand_in) for part in (node.args, node.kwargs))
    except Exception as error:  # a size that no number is known of
        log.info("`%s` cannot be watched: %s", node.target, error)
        return None
    leaves = list(leaves_of((args, kwargs)))
    key = (node.op, node.target, tuple(_kind(leaf) for leaf in leaves))
    if key not in _watches:
        _watches[key] = _watch(node, args, kwargs, leaves)
    return _watches[key]


def _watch(node: fx.Node, args: Any, kwargs: Any, leaves: list[Any]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    written: set[int] = set()

    def see(overload: Any, args: Any, kwargs: dict[str, Any]) -> None:
        schemas = schema_of(overload).arguments
        given = [*zip(schemas, args, strict=False), *((s, kwargs[s.name]) for s in schemas if s.name in kwargs)]
        for schema, value in given:
            if schema.alias_info is not None and schema.alias_info.is_write:
                written.update(_storages(value))

    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad(), watching(see):
            warnings.simplefilter("ignore")
            if node.op == "call_method":
                out = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                assert callable(node.target)
                out = node.target(*args, **kwargs)
    except Exception as error:
        log.info("`%s` cannot be watched: %s", node.target, error)
        return None
    results = set(_storages(out if isinstance(out, torch.Tensor | tuple | list) else ()))
    of_leaf = [set(_storages(leaf)) for leaf in leaves]
    writes = tuple(i for i, own in enumerate(of_leaf) if own & written)
    return writes, tuple(i for i, own in enumerate(of_leaf) if own & results)


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, tuple(leaf.shape), leaf.stride()
    return type(leaf), leaf if isinstance(leaf, int | float | str | bool | torch.dtype | torch.device) else repr(leaf)


def _stand_in(node: fx.Node) -> Any:
    return fx.node.map_aggregate(meta(node), _stand_in_value)


def _stand_in_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = [_number(s) for s in value.shape]
        return torch.empty_strided(sizes, [_number(s) for s in value.stride()], dtype=value.dtype, device="meta")
    return _number(value) if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value


def _number(size: Any) -> Any:
    """The number that tracing had for a size."""
    if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
        hint = size.node.hint
        if hint is None:
            raise ValueError(f"no number is known of {size}")
        return hint
    return size
