"""Compile a piece of a graph with the inner backend when it first runs, for any length of its token axes.

Each compilation has a shape environment of its own, in which every size that the passes know to be symbolic is a
symbol with the size at hand as its hint. The guards that the inner backend adds are checked at each call; a call that
fails them compiles once more.

As in the graphs that Dynamo makes, every symbol is an input of what is compiled, before the piece's own: torch's
on-disk caches keep the guards about such inputs, and lose all others.
"""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from uniprefill_fx.lowering.cache_tag import tagged
from uniprefill_fx.lowering.compiler_internals import (
    Mode,
    compiling,
    dynamic_input,
    dynamic_size,
    fixed_input,
    is_wrapper,
    mark_as_dynamo,
    one_compilation,
)
from uniprefill_fx.lowering.guards import Test, guards
from uniprefill_fx.lowering.inner import InnerBackend
from uniprefill_fx.lowering.metadata import renew_values
from uniprefill_fx.lowering.structure import structure
from uniprefill_fx.passes.dataflow import written_nodes
from uniprefill_fx.passes.node_utils import copy_module, expression, meta
from uniprefill_fx.passes.rewrite.split import Piece
from uniprefill_fx.torch_internals import fake_mode, is_static_input

log = logging.getLogger(__name__)
MAX_VARIANTS = 8


@dataclass(frozen=True)
class Variant:
    """One compilation: the callable, what reads its symbols off the inputs, and the test that it is made for them."""

    run: Callable[..., Any]
    sizes: Callable[[Sequence[Any]], list[int]]
    holds: Test


class LazyPiece(ABC):
    """A graph module that compiles itself when called, once more where no compilation fits what it is called with.

    Threads may call it at the same time: one compiles, the others wait for it.
    """

    def __init__(self, gm: fx.GraphModule, name: str) -> None:
        self.gm, self.name = gm, name
        self.variants: list[Variant] = []
        self.seconds = 0.0
        self.full = False  # whether MAX_VARIANTS are compiled, and another one was wanted

    @abstractmethod
    def _compile(self, args: Sequence[Any]) -> Variant:
        """A compilation that fits these arguments."""

    def __call__(self, *args: Any) -> Any:
        variant = self._variant(args)
        if variant is None:
            with one_compilation():
                variant = self._variant(args)  # another thread may have been faster
                if variant is None and len(self.variants) < MAX_VARIANTS:
                    log.info("%s: compiling", self.name)
                    began = time.perf_counter()
                    variant = self._compile(args)
                    self.variants.append(variant)
                    self.seconds += time.perf_counter() - began
                    sizes = variant.sizes(args)
                    log.info("%s: compiled for sizes %s in %.1f s", self.name, sizes, time.perf_counter() - began)
        if variant is None:
            if not self.full:
                self.full = True
                log.warning(
                    "%s: compiled %d times, runs other inputs without the inner backend", self.name, MAX_VARIANTS
                )
            return self.gm(*args)
        return variant.run(*variant.sizes(args), *args)

    def _variant(self, args: Sequence[Any]) -> Variant | None:
        return next((variant for variant in self.variants if variant.holds(args)), None)


class CompiledPiece(LazyPiece):
    """A piece by an inner backend that is called as Dynamo calls it; all token-axis lengths share a compilation.

    Placeholders carry fakes in `meta`; a size that is symbolic there is dynamic, every other one is fixed.
    """

    def __init__(self, gm: fx.GraphModule, inner: InnerBackend, name: str) -> None:
        super().__init__(gm, name)
        self.inner = inner
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.static = [is_static_input(node) for node in placeholders]
        self.writes = any(written_nodes(node) for node in gm.graph.nodes)
        # By input: what is known of each dynamic size, by dimension; dimension None for an input that is a size.
        self.dynamic = [dynamic_sizes(node) for node in placeholders]

    def share(self, gm: fx.GraphModule) -> None:
        """Stand for another graph of the same `structure` too: sizes are the same only if they are so in both."""
        for own, node in zip(self.dynamic, gm.graph.find_nodes(op="placeholder"), strict=True):
            for d, size in dynamic_sizes(node).items():
                own[d] = (own[d], size)

    def _compile(self, args: Sequence[Any]) -> Variant:
        mode = fake_mode()
        fakes = [self._fake(i, arg, mode) for i, arg in enumerate(args)]
        self._unify(fakes)
        gm = copy_module(self.gm)
        renew_values(gm, mode, fakes)
        symbols, sizes = _bindings(fakes)
        _prepend(gm, symbols)
        mark_as_dynamo(gm)
        with compiling(mode), tagged():
            run = self.inner(gm, [*symbols, *fakes])
        return Variant(run, sizes, guards(mode, fakes, args, self.static, self.writes))

    def _fake(self, i: int, arg: Any, mode: Mode) -> Any:
        if isinstance(arg, torch.Tensor):
            if self.static[i] or is_wrapper(arg):  # of a quantised weight too every size is fixed
                return fixed_input(mode, arg, i)
            return dynamic_input(mode, arg, i, [d for d in self.dynamic[i] if d is not None])
        return dynamic_size(mode, arg, i) if type(arg) is int else arg

    def _unify(self, fakes: Sequence[Any]) -> None:
        """Sizes that the passes know to be the same become one symbol, where the inputs bear it out."""
        first: dict[Hashable, Any] = {}
        for fake, dynamic in zip(fakes, self.dynamic, strict=True):
            for d, size in dynamic.items():
                new = fake if d is None else fake.shape[d]
                if isinstance(new, torch.SymInt):
                    bool(first.setdefault(size, new) == new)


def compile_pieces(pieces: Sequence[Piece], inner: InnerBackend) -> list[Callable[..., Any]]:
    """What runs each piece. Those of one structure, such as the layers between drops, share a compilation."""
    found: dict[Any, CompiledPiece] = {}
    names = itertools.count()
    runs: list[Callable[..., Any]] = []
    for piece in pieces:
        if piece.selection:
            runs.append(piece.gm)
            continue
        key, name = structure(piece.gm), f"piece {next(names)}"
        if key in found:
            log.debug("%s is %s once more", name, found[key].name)
            found[key].share(piece.gm)
        else:
            found[key] = CompiledPiece(piece.gm, inner, name)
        runs.append(found[key])
    return runs


def dynamic_sizes(node: fx.Node) -> dict[int | None, Hashable]:
    """The expressions of the symbolic sizes of an input."""
    value = meta(node)
    sizes = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
    return {d: expression(size) for d, size in sizes if isinstance(size, torch.SymInt)}


def _bindings(fakes: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[int]]]:
    """The symbols of some fakes that no integer input is, and what reads their values off the inputs.

    A symbol may stand for a stride or a storage offset only: a view of a wider tensor.
    """
    symbols: dict[sympy.Symbol, Any] = {}
    read: list[tuple[int, str, int]] = []
    integers = {expression(fake) for fake in fakes if isinstance(fake, torch.SymInt)}
    for i, fake in enumerate(fakes):
        if not isinstance(fake, torch.Tensor) or is_wrapper(fake):
            continue
        parts: dict[tuple[str, int], Any] = {("size", d): s for d, s in enumerate(fake.shape)}
        parts |= {("stride", d): s for d, s in enumerate(fake.stride())}
        parts["storage_offset", 0] = fake.storage_offset()
        for (kind, d), part in parts.items():
            found = expression(part)
            if found.is_Symbol and found not in integers and found not in symbols:
                symbols[found] = part
                read.append((i, kind, d))

    def values(args: Sequence[Any]) -> list[int]:
        return [
            args[i].shape[d] if kind == "size" else args[i].stride(d) if kind == "stride" else args[i].storage_offset()
            for i, kind, d in read
        ]

    return list(symbols.values()), values


def _prepend(gm: fx.GraphModule, symbols: Sequence[Any]) -> None:
    """Make symbols the first inputs of a graph."""
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        for i, symbol in enumerate(symbols):
            node = gm.graph.placeholder(f"size_{i}", type_expr=torch.SymInt)
            node.meta["example_value"] = symbol
    gm.recompile()
