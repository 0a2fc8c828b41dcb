"""Run operations on small random tensors, and see whether taking rows before equals taking rows after.

`op(x[rows]) == op(x)[rows]` for several sets of rows is what running behind a drop means. Each operation is run once on
all tokens, once for each set of them, and once with other values in the rows that a set leaves out. Axes of tokens are
short and those of other things as long as they were traced; large weights are windows of a small buffer. Products sum
over the first elements of a long axis only: which rows they relate is the same.
"""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from uniprefill_fx.passes.analyze.rowwise_calls import LARGE, any_tensor, call, cards, same
from uniprefill_fx.passes.analyze.rowwise_kinds import Axes, Kind, Kinds, Rows, Same
from uniprefill_fx.passes.node_utils import expression, meta
from uniprefill_fx.passes.operator_internals import without_modes

log = logging.getLogger(__name__)

BATCH = 3  # prompts, where their number is a symbol


class ProbeError(Exception):
    """An operation could not be run."""


class Runs:
    """One small prompt, or batch of prompts, in several versions: all rows, some of them, and other values beside them.

    Args:
        tokens: how many rows there are.
        numbers: what the other symbols of sizes stand for.
        precise: whether floats are float64, whatever they were traced as.
    """

    def __init__(self, axes: Axes, tokens: int, numbers: Mapping[sympy.Symbol, int], precise: bool) -> None:
        self.axes, self.tokens, self.precise = axes, tokens, precise
        self.batch = batch = axes.batch
        self.numbers = {**numbers, **({batch: BATCH} if isinstance(batch, sympy.Symbol) else {})}
        self.generator = torch.Generator().manual_seed(tokens)
        requests = 1 if batch == 1 else BATCH
        self.kept = [self._draw(requests, k) for k in (tokens // 2, tokens - 2, 1)]
        self.kept += [torch.arange(k).expand(requests, -1) for k in (tokens // 2, tokens - 1)]  # prefixes
        self.values: list[dict[fx.Node, Any]] = [{} for _ in range(len(self.kept) + 2)]

    def _draw(self, requests: int, kept: int) -> torch.Tensor:
        """Rows that are kept, ascending, for each request; the last one is."""
        drawn = [torch.randperm(self.tokens - 1, generator=self.generator)[: kept - 1] for _ in range(requests)]
        return torch.stack([torch.cat((d, torch.tensor([self.tokens - 1]))).sort().values for d in drawn])

    @property
    def versions(self) -> range:
        """0: all rows. 1: all rows, with other values where the first set has none. From 2 on: the rows of each set."""
        return range(len(self.values))

    def rows_in(self, version: int) -> int:
        return self.tokens if version < 2 else self.kept[version - 2].shape[1]

    # -- making values -----------------------------------------------------------------------------------------------

    def make(self, node: fx.Node, kind: Kind) -> None:
        """Random values for a node of this kind, the same rows in every version."""
        value = meta(node)
        if not isinstance(kind, Rows):
            made = self._random(node, 0, one_row=True)
            for version in self.versions:
                shape = self.shape(value, version)
                self.values[version][node] = made if made.shape == shape else made.expand(shape).clone()
            return
        first, other = self._random(node, 0), self._random(node, 0)
        if other.is_floating_point():
            other = other * 100
        self.values[0][node] = first
        self.gather(node, kind)
        self.values[1][node] = self._mixed_in(first, other, kind, value)

    def gather(self, node: fx.Node, kind: Rows) -> None:
        """Give a node the rows, in every version, of what it has where all rows are."""
        whole = self.values[1][node] = self.values[0][node]
        for version in self.versions[2:]:
            self.values[version][node] = self.take(whole, kind, meta(node), version)

    def _random(self, node: fx.Node, version: int, one_row: bool = False) -> torch.Tensor:
        value = meta(node)
        dims = self.axes.dims(value) if one_row else ()
        shape = tuple(1 if d in dims else size for d, size in enumerate(self.shape(value, version)))
        dtype, numel = self._dtype(value), math.prod(shape)
        if dtype == torch.bool:
            drawn = torch.rand(shape, generator=self.generator) < 0.5
        elif not dtype.is_floating_point and not dtype.is_complex:
            drawn = torch.randint(0, 2, shape, generator=self.generator, dtype=torch.int64)
        elif numel > LARGE and not self.axes.dims(value):
            strides = (1009, 97, 1, *[1] * len(shape))[-len(shape) :] if len(shape) <= 3 else (1,) * len(shape)
            extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            drawn = torch.randn(extent, generator=self.generator).to(dtype).as_strided(shape, strides)
        else:
            drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(value.device, dtype)

    def _dtype(self, value: torch.Tensor) -> torch.dtype:
        wide = self.precise and value.dtype in (torch.float32, torch.bfloat16, torch.float16)
        return torch.float64 if wide else value.dtype

    def number(self, size: Any, version: int) -> Any:
        """A size in one version."""
        if isinstance(size, torch.SymFloat | torch.SymBool):
            raise ProbeError(f"it depends on the number {size}")
        size = size if isinstance(size, sympy.Expr) else expression(size)
        found = size.subs({**self.numbers, self.axes.tokens: self.rows_in(version)})
        if found.free_symbols:
            raise ProbeError(f"the size {found} is not known")
        return int(found)

    def shape(self, value: torch.Tensor, version: int) -> tuple[int, ...]:
        return tuple(self.number(size, version) for size in value.shape)

    # -- taking rows -------------------------------------------------------------------------------------------------

    def _apart(self, tensor: torch.Tensor, kind: Rows, value: torch.Tensor) -> tuple[torch.Tensor, int, int | None]:
        """A value of all tokens with its axis of tokens by itself; that axis, and the axis of prompts.

        What prompts share (rotary tables) is repeated for each, as a gather of kept rows does.
        """
        outer, inner = ([self.number(f, 0) for f in part] for part in (kind.outer, kind.inner))
        parts = tensor.reshape(*tensor.shape[: kind.dim], *outer, self.tokens, *inner, *tensor.shape[kind.dim + 1 :])
        dim = kind.dim + len(outer)
        if self.batch == 1:
            return parts, dim, None
        sizes = [expression(s) for s in value.shape]
        apart = [*sizes[: kind.dim], *kind.outer, self.axes.count, *kind.inner, *sizes[kind.dim + 1 :]]
        found = [d for d, size in enumerate(apart) if size == self.batch]
        beside = 1 if dim == 0 else 0
        if not found and len(apart) > 1 and apart[beside] == 1:
            parts = parts.expand([BATCH if d == beside else -1 for d in range(parts.ndim)])
            return parts, dim, beside
        if len(found) != 1:
            raise ProbeError(f"a value of shape {tuple(value.shape)} has no axis of prompts")
        return parts, dim, found[0]

    def take(self, tensor: torch.Tensor, kind: Rows, value: torch.Tensor, version: int) -> torch.Tensor:
        """The rows of one version, of a value of all tokens."""
        parts, dim, requests = self._apart(tensor, kind, value)
        kept = self.kept[version - 2].to(tensor.device)
        sizes = [kept.shape[1] if d == dim else size for d, size in enumerate(parts.shape)]
        taken = parts.gather(dim, self._spread(kept, parts.ndim, dim, requests).expand(sizes))
        shape = list(tensor.shape)
        shape[kind.dim] = tensor.shape[kind.dim] // self.tokens * kept.shape[1]
        if taken.numel() != tensor.numel() // self.tokens * kept.shape[1]:
            assert requests is not None and requests != kind.dim
            shape[requests] = BATCH
        return taken.reshape(shape)

    def _spread(self, table: torch.Tensor, ndim: int, dim: int, requests: int | None) -> torch.Tensor:
        """(requests, rows), along the axes that these are in a value taken apart."""
        if requests is None:
            return table[0].reshape([-1 if d == dim else 1 for d in range(ndim)])
        table = table if requests < dim else table.T
        places = sorted((requests, dim))
        return table.reshape([table.shape[places.index(d)] if d in places else 1 for d in range(ndim)])

    def _mixed_in(self, first: torch.Tensor, other: torch.Tensor, kind: Rows, value: torch.Tensor) -> torch.Tensor:
        """`first`, with `other` in the rows that the first set leaves out."""
        parts, dim, requests = self._apart(first, kind, value)
        if parts.numel() != first.numel():
            return first  # shared by prompts that keep different rows
        kept = torch.zeros(len(self.kept[0]), self.tokens, dtype=torch.bool).scatter_(1, self.kept[0], True)
        where = self._spread(kept.to(first.device), parts.ndim, dim, requests)
        return torch.where(where, parts, other.reshape(parts.shape)).reshape(first.shape)

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self, node: fx.Node) -> None:
        """Execute one node in every version; its arguments have values."""
        for version in self.versions:
            values = self.values[version]
            value = functools.partial(self._value, version=version)
            args, kwargs = (fx.node.map_arg(part, value) for part in (node.args, node.kwargs))
            try:
                with (
                    warnings.catch_warnings(),
                    without_modes(),
                    torch.inference_mode(False),
                    torch.no_grad(),
                    torch.random.fork_rng(devices=cards(args)),
                ):
                    warnings.simplefilter("ignore")
                    values[node] = call(node, args, kwargs)
            except Exception as error:
                log.info("`%s` could not be run on random rows", node.target, exc_info=error)
                raise ProbeError(f"it could not be run on random rows: {str(error).splitlines()[0]}") from error

    def _value(self, node: fx.Node, version: int) -> Any:
        if node in self.values[version]:
            return self.values[version][node]
        value = meta(node)
        if isinstance(value, torch.Tensor) or (isinstance(value, tuple | list) and any_tensor(value)):
            raise ProbeError(f"`{node.name}` has no value")
        if isinstance(value, torch.SymInt):
            return self.number(value, version)
        if isinstance(value, torch.Size):
            return torch.Size(self.number(v, version) for v in value)
        if isinstance(value, tuple | list):
            return type(value)(self.number(v, version) if isinstance(v, torch.SymInt) else v for v in value)
        return value

    # -- reading -----------------------------------------------------------------------------------------------------

    def kind(self, node: fx.Node, causal: bool = False) -> Kinds | None:
        """What the values of a node show it to be; None where rows of several tokens meet in it."""
        value = meta(node)
        results: list[Any] = [self.values[version].get(node) for version in self.versions]
        if isinstance(value, tuple | list):
            if any(not isinstance(r, tuple | list) or len(r) != len(value) for r in results):
                raise ProbeError(f"it returns {len(value)} values for a whole prompt, and others for a short one")
            return tuple(self._kind(v, [r[i] for r in results], causal) for i, v in enumerate(value))
        return self._kind(value, results, causal)

    def _kind(self, value: Any, results: Sequence[Any], causal: bool) -> Kind | None:
        if not isinstance(value, torch.Tensor):
            return Same()
        if any(not isinstance(r, torch.Tensor) for r in results):
            return None
        dims = self.axes.dims(value)
        for version, result in enumerate(results):
            self._check_shape(result, self.shape(value, version), version, dims)
        if not dims:
            return Same() if all(same(r, results[0]) for r in results) else None
        if len(dims) > 1:
            return None
        if all(
            same(r, r.narrow(dims[0], 0, 1).expand_as(r))
            and same(r.narrow(dims[0], 0, 1), results[0].narrow(dims[0], 0, 1))
            for r in results
        ):
            return Same()
        return next((k for k in self._candidates(value, dims[0]) if self._fits(k, value, results, causal)), None)

    def _check_shape(self, result: torch.Tensor, want: tuple[int, ...], version: int, dims: Sequence[int]) -> None:
        """A slice of a fixed number of rows is cut short where there are fewer, and one up to a row may be empty."""
        shared = 1 if self.batch == 1 else BATCH  # rows that prompts share are taken for each of them
        fits = len(want) == result.ndim and all(g in (w, w * shared) for g, w in zip(result.shape, want, strict=True))
        if not fits or any(result.shape[d] == 0 for d in dims):
            raise ProbeError(f"of {self.rows_in(version)} rows it makes a shape of {tuple(result.shape)}, not {want}")

    def _candidates(self, value: torch.Tensor, dim: int) -> list[Rows]:
        ratio = self.axes.rows_a_token(value, dim)
        if ratio is None:
            return []
        if ratio == 1:
            return [Rows(dim)]
        rest = ratio / self.batch
        apart = [((ratio,), ()), ((), (ratio,))]
        if self.batch != 1 and not rest.free_symbols & {self.batch}:
            apart = [((self.batch,), ()), ((), (self.batch,))] if rest == 1 else []
            apart += [((self.batch,), (rest,)), ((self.batch, rest), ()), ((rest, self.batch), ())] if rest != 1 else []
        return [Rows(dim, outer, inner) for outer, inner in apart]

    def _fits(self, kind: Rows, value: torch.Tensor, results: Sequence[torch.Tensor], causal: bool) -> bool:
        try:
            for version in self.versions[2:]:
                if causal and version < len(self.values) - 2:
                    continue  # a set with holes: only prefixes tell whether a row sees earlier ones alone
                if not same(results[version], self.take(results[0], kind, value, version)):
                    return False
            return causal or same(self.take(results[1], kind, value, 2), self.take(results[0], kind, value, 2))
        except (ProbeError, RuntimeError):
            return False
