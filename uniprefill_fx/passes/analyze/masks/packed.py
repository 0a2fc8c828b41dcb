"""Masks of prompts that may be packed in one row: comparing their positions is comparing their indices.

transformers 5.24 and newer compare the positions that a call gives where earlier ones compared indices:

    run = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    visible = positions[key] <= positions[query] and run[key] == run[query]

The number of a run grows wherever a position is not one more than the position before it. Between two tokens of the
same run each position is one more than the last, so both positions are the token's index plus one constant of the run.
Where a comparison stands beside `run[key] == run[query]`, and that constant cancels out of it, it compares indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from torch import fx

from uniprefill_fx.passes.analyze.masks.reader import AXES, BATCH, KEY, QUERY, MaskReader
from uniprefill_fx.passes.node_utils import meta, name_of, shape

ROW, INDEX = AXES[:2]  # those of positions (batch, tokens)
WIDE = (torch.int32, torch.int64)  # narrower ones begin again at 0 in the middle of a prompt


def sequence_ids(term: Any) -> str | None:
    """The name of the data f in `f(batch, query) == f(batch, key)`; None for other terms."""
    if not isinstance(term, sympy.Eq) or not all(isinstance(s, AppliedUndef) for s in term.args):
        return None
    left, right = term.args
    batch = {side.args[0] for side in term.args}
    ends = {side.args[1:] for side in term.args}
    same = left.func == right.func and batch in ({BATCH}, {sympy.Integer(0)}) and ends == {(QUERY,), (KEY,)}
    return str(left.func.__name__) if same else None


def by_index(terms: Sequence[Any], reader: MaskReader) -> list[Any]:
    """Conditions that apply together, with comparisons of positions written as comparisons of indices where proven."""
    names = [name for name in map(sequence_ids, terms) if name is not None]
    positions = _counted(reader.data[names[0]], reader) if len(names) == 1 else None
    if positions is None:
        return list(terms)
    first = sympy.Dummy("first", integer=True)  # the constant of the run
    places = {positions.xreplace({INDEX: axis}): axis + first for axis in (QUERY, KEY)}
    return [_placed(term, places, first) for term in terms]


def _placed(term: Any, places: dict[Any, Any], first: sympy.Dummy) -> Any:
    """A comparison with indices for positions; as it was if it has none, or if it depends on where the run begins."""
    if not isinstance(term, sympy.core.relational.Relational) or not any(term.has(place) for place in places):
        return term
    difference = sympy.expand((term.lhs - term.rhs).xreplace(places))
    return term if difference.has(first) else term.func(difference, sympy.Integer(0))


def _counted(runs: fx.Node, reader: MaskReader) -> Any:
    """The positions whose runs a node numbers, as the reader's expression of (batch, tokens); None for other nodes."""
    dims = (*runs.args[1:], *runs.kwargs.values())
    if name_of(runs) != "cumsum" or dims not in ((-1,), (1,)) or not isinstance(runs.args[0], fx.Node):
        return None
    jumps = reader.node(runs.args[0])
    if not isinstance(jumps, sympy.Ne) or jumps.rhs != 1 or not isinstance(jumps.lhs, AppliedUndef):
        return None
    diff = reader.data[jumps.lhs.func.__name__]
    source, before = diff.args[0] if len(diff.args) == 1 else None, diff.kwargs.get("prepend")
    if name_of(diff) != "diff" or diff.kwargs.keys() != {"prepend", "dim"} or diff.kwargs["dim"] not in (-1, 1):
        return None
    if not isinstance(source, fx.Node) or not isinstance(before, fx.Node) or (shape(before) or ())[1:] != (1,):
        return None
    positions = reader.node(source)
    if not isinstance(positions, AppliedUndef) or positions.args not in ((ROW, INDEX), (sympy.Integer(0), INDEX)):
        return None
    if reader.node(before) != positions.xreplace({INDEX: sympy.Integer(0)}) - 1:
        return None
    data = reader.data[positions.func.__name__]
    if meta(data).dtype not in WIDE or meta(source).dtype not in WIDE:
        return None
    return None if any(reader.writers(node) for node in (runs, diff, data)) else positions
