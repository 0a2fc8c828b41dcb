"""Operators of other libraries that are known to work row by row, or along the rows as mixers do: an allow-list.

A library's operator cannot always be run on random rows: it may look up its weights by a name, or expect a workspace.
Its frontend names it here by schema, with the arguments that it only writes. Such an operator takes rows along the
first axis, and what it returns or writes has a row there for each of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from uniprefill_fx.passes.analyze.rowwise_kinds import Axes, Kinds, Mixed, Rows, Same
from uniprefill_fx.passes.node_utils import meta, name_of
from uniprefill_fx.passes.operator_internals import schema_of
from uniprefill_fx.passes.schemas import given_arguments, overloads

_KNOWN: dict[str, frozenset[str]] = {}


def register_row_operator(name: str, outputs: tuple[str, ...] = ()) -> None:
    """Say that the operator `name` ("library::operator") works on rows along the first axis of its tensors.

    Args:
        outputs: its arguments that are written and not read. Registering an operator again replaces what was said.
    """
    _KNOWN[name] = frozenset(outputs)


def is_row_operator(node: fx.Node) -> bool:
    """Whether every overload that a node may dispatch to was registered."""
    found = overloads(node)
    return bool(found) and all(schema_of(overload).name in _KNOWN for overload in found)


def outputs_of(node: fx.Node) -> list[fx.Node]:
    """The arguments of a registered operator that it writes and does not read."""
    return [
        value
        for overload in overloads(node)[:1]
        for schema, value in given_arguments(node, overload)
        if isinstance(value, fx.Node) and schema.name in _KNOWN[schema_of(overload).name]
    ]


def row_operator_kind(node: fx.Node, axes: Axes, kind_of: Callable[[fx.Node], Kinds]) -> Kinds:
    """The kind of what a registered operator returns and writes; `Mixed` where its arguments are not rows."""
    written = outputs_of(node)
    for read in node.all_input_nodes:
        value = meta(read)
        if read in written or not isinstance(value, torch.Tensor):
            continue
        kind = kind_of(read)
        if kind != Rows(0) and (not isinstance(kind, Same) or axes.dims(value)):
            said = kind.what if isinstance(kind, Mixed) else f"{kind}"
            return Mixed(f"`{name_of(node)}` wants rows along the first axis, `{read.name}` is: {said}")
    value = meta(node)
    made = [v for v in (value if isinstance(value, tuple | list) else (value,)) if isinstance(v, torch.Tensor)]
    made += [meta(n) for n in written]
    if any(axes.plain(v) != Rows(0) for v in made):
        return Mixed(f"`{name_of(node)}` makes something other than a row for each token")
    return tuple(Rows(0) for _ in value) if isinstance(value, tuple | list) else Rows(0)
