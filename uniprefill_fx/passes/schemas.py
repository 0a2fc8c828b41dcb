"""What a call writes and whose storage its results share, read off the schemas of the operators it may dispatch to.

A Dynamo graph holds overloads (`aten.add_.Tensor`), packets of custom ops, builtins (`torch.add`), methods (`"add_"`),
`operator.iadd` and functions written in Python (`F.normalize`). The first five have schemas, in which `Tensor(a!)`
marks what is written and `Tensor(a)` what a result may be a view of. Operators that are made of others may return an
argument without saying so, and Python functions have no schema: those are run on tensors without data, and watched.
"""

from __future__ import annotations

import functools
import inspect
import logging
import operator
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from uniprefill_fx.passes.distributed import collective_name, conversion
from uniprefill_fx.passes.node_utils import arguments, meta
from uniprefill_fx.passes.operator_internals import (
    OpOverload,
    OpOverloadPacket,
    has_kernel,
    has_registered_effect,
    is_composite,
    moves_between_vmap_levels,
    schema_of,
)
from uniprefill_fx.passes.watched_calls import watched

log = logging.getLogger(__name__)

OPERATORS: dict[Callable[..., Any], str] = {
    getattr(operator, name): aten
    for name, aten in {
        **{n: n for n in "add sub mul matmul floordiv neg pow eq ne lt le gt ge".split()},
        **{"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "pos": "positive", "abs": "abs"},
        **{"and_": "bitwise_and", "or_": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not"},
        **{"lshift": "__lshift__", "rshift": "__rshift__"},
        **{"iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "ifloordiv": "floor_divide_"},
        **{"imod": "remainder_", "ipow": "pow_", "iand": "bitwise_and_", "ior": "bitwise_or_", "ixor": "bitwise_xor_"},
        **{"ilshift": "__ilshift__", "irshift": "__irshift__"},
    }.items()
}
# These write running statistics, which their schemas do not mark, where the named flag is true.
UNMARKED = {
    name: ("training", "train", "use_input_stats")
    for name in "batch_norm native_batch_norm cudnn_batch_norm miopen_batch_norm instance_norm".split()
}
STATISTICS = frozenset({"running_mean", "running_var"})


@dataclass(frozen=True)
class Effects:
    """What a call does to its arguments.

    Attributes:
        writes: the arguments whose storage is written. shares: those that results may share storage with.
        known: False if nothing says so; then every tensor among the arguments is in both.
    """

    writes: tuple[fx.Node, ...] = ()
    shares: tuple[fx.Node, ...] = ()
    known: bool = True


def effects(node: fx.Node) -> Effects:
    """What a node writes and shares. Only arguments that hold tensors are named."""
    if node.op not in ("call_function", "call_method"):
        return Effects()
    # kept with the graph: they name its nodes, and go when it goes
    found: dict[fx.Node, tuple[Any, Any, Any, Effects]] = vars(node.graph).setdefault("_uniprefill_effects", {})
    kept = found.get(node)
    if kept is not None and kept[0] == node.target and kept[1] is node.args and kept[2] is node.kwargs:
        return kept[3]
    done = _effects(node)
    found[node] = (node.target, node.args, node.kwargs, done)
    return done


def _effects(node: fx.Node) -> Effects:
    operands = [a for a in arguments(node) if isinstance(a, fx.Node) and _holds_tensors(meta(a))]
    if not operands or moves_between_vmap_levels(node):
        return Effects()  # the latter enter and leave the levels of vmap, in which masks are made
    base = node.args[0] if node.args else None
    if node.target is operator.setitem and isinstance(base, fx.Node):
        return Effects((base,), (base,))
    if node.target is operator.getitem and isinstance(base, fx.Node):
        copies = isinstance(meta(base), torch.Tensor) and any(
            isinstance(i, list) or (isinstance(i, fx.Node) and isinstance(meta(i), torch.Tensor)) for i in _index(node)
        )
        return Effects((), () if copies else (base,))
    if conversion(node):  # of a DTensor: the same memory, where nothing is exchanged
        return Effects((), tuple(operands))
    if node.target is getattr:
        return Effects((), (base,) if isinstance(base, fx.Node) else ())
    if node.target is operator.imatmul:
        return Effects()  # `x @= y` is `x = x @ y`: there is no matmul_
    found = overloads(node)
    declared = _declared(node, found) if found else None
    if declared is not None:
        return declared
    if found and all(o.namespace == "uniprefill" for o in found):
        return Effects()  # our own composites copy rows
    found_by_running = watched(node)
    if found_by_running is None and found:  # PyTorch's own operators mark what they write
        return Effects(tuple(_unmarked(node)), tuple(operands) if _holds_tensors(meta(node)) else ())
    if found_by_running is None:
        log.info("nothing says what `%s` writes", node.target)
        return Effects(tuple(operands), tuple(operands), known=False)
    leaves = list(arguments(node))
    writes, shares = (tuple(dict.fromkeys(leaves[i] for i in places)) for places in found_by_running)
    return Effects(tuple(dict.fromkeys((*writes, *_unmarked(node)))), shares)


def acts_outside_the_graph(node: fx.Node) -> bool:
    """Whether an operator is called for what no value shows: it returns nothing, or is registered as having effects.

    Dynamo's graphs name packets of custom operators, while effects are registered of overloads. A wait for a collective
    is registered too; all that it does is in the value that it returns.
    """
    if collective_name(node) == "wait_tensor":
        return False
    found = overloads(node)
    return any(has_registered_effect(o) for o in found) or (
        any(not schema_of(o).returns for o in found) and not effects(node).writes
    )


def overloads(node: fx.Node) -> tuple[OpOverload, ...]:
    """The overloads that a node may dispatch to; none for what is no operator of PyTorch's dispatcher."""
    target: Any = node.target
    if node.op == "call_method":
        return _of_packet(str(target))
    if isinstance(target, OpOverload):
        return (target,)
    if isinstance(target, OpOverloadPacket):
        return _dispatched(target)
    if target in OPERATORS:
        return _of_packet(OPERATORS[target])
    builtin = isinstance(target, types.BuiltinFunctionType) and (target.__module__ or "").split(".")[0] == "torch"
    if builtin or isinstance(target, types.MethodDescriptorType):
        return _of_packet(target.__name__)
    return ()


@functools.cache
def _of_packet(name: str) -> tuple[OpOverload, ...]:
    packet = getattr(torch.ops.aten, name, None)
    return _dispatched(packet) if isinstance(packet, OpOverloadPacket) else ()


@functools.cache
def _dispatched(packet: OpOverloadPacket) -> tuple[OpOverload, ...]:
    """The overloads that are operators on tensors: TorchScript has more, for its own lists and strings."""
    found = (getattr(packet, name) for name in packet.overloads())
    return tuple(o for o in found if has_kernel(o))


def _declared(node: fx.Node, found: tuple[OpOverload, ...]) -> Effects | None:
    """What the schemas mark among the arguments that are given; None if they mark nothing."""
    writes: list[fx.Node] = []
    shares: list[fx.Node] = []
    for overload in found:
        for schema, given in given_arguments(node, overload):
            if schema.alias_info is None:
                continue
            nodes = [n for n in (given if isinstance(given, tuple | list) else (given,)) if isinstance(n, fx.Node)]
            nodes = [n for n in nodes if _holds_tensors(meta(n))]
            shares += nodes
            writes += nodes if schema.alias_info.is_write else []
    writes += _unmarked(node)
    if not writes and not shares and any(is_composite(o) for o in found):
        return None
    if not any(schema_of(o).returns for o in found):
        shares = []  # nothing is returned that could share storage
    return Effects(tuple(dict.fromkeys(writes)), tuple(dict.fromkeys(shares)))


def given_arguments(node: fx.Node, overload: OpOverload) -> Iterator[tuple[Any, Any]]:
    """(schema of an argument, what the node passes for it), for all arguments that the node passes."""
    schemas = schema_of(overload).arguments
    positional = [a for a in schemas if not a.kwarg_only]
    yield from zip(positional, node.args, strict=False)
    for schema in schemas:
        if schema.name in node.kwargs:
            yield schema, node.kwargs[schema.name]


def _unmarked(node: fx.Node) -> list[fx.Node]:
    """Running statistics of a norm that trains."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    name = name.split(".")[0]
    if name not in UNMARKED:
        return []
    given: dict[str, Any] = dict(node.kwargs)
    found = overloads(node)
    if found:
        given = {schema.name: value for schema, value in given_arguments(node, found[0])}
    elif callable(node.target):
        given = dict(inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments)
    if any(given.get(flag) is False for flag in UNMARKED[name]) or (
        name == "batch_norm" and not found and "training" not in given
    ):
        return []
    return list(dict.fromkeys(n for key, n in given.items() if key in STATISTICS and isinstance(n, fx.Node)))


def _index(node: fx.Node) -> tuple[Any, ...]:
    index = node.args[1]
    return index if isinstance(index, tuple) else (index,)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(_holds_tensors(item) for item in value)
    return isinstance(value, torch.Tensor)
