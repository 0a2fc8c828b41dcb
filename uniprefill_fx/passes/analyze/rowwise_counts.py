"""Numbers of tokens, and what compares them with constants: few rows do not reach the 40 tokens an expert has room for.

A probe of n rows spread over g experts counts n/g for each. How many rows it would take to cross a constant is not
known, so a comparison is taken for understood only where the counts of the probe lie on both sides of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from uniprefill_fx.passes.analyze.rowwise_ops import GROUPED, POINTWISE, PRODUCTS, known_name
from uniprefill_fx.passes.analyze.rowwise_probe import ProbeError
from uniprefill_fx.passes.node_utils import arguments

# Along the tokens, these give numbers of them, or sums over them.
COUNTS_TOKENS = PRODUCTS | frozenset(
    "sum nansum mean nanmean count_nonzero norm linalg_vector_norm vector_norm cumsum softmax histc bincount arange "
    "searchsorted bucketize scatter_add index_add index_put scatter_reduce".split()
)
LOOKS_UP = frozenset("getitem gather index_select take_along_dim repeat_interleave".split())
# Each of these changes a little when a count does, or passes one of two values on.
ARITHMETIC = frozenset(
    "add sub mul div true_divide truediv multiply subtract divide rsub neg negative pos positive clone contiguous copy "
    "detach where masked_fill addcmul addcdiv iadd isub imul itruediv".split()
)
CASTS = frozenset("to float half bfloat16 double long int type type_as".split())
COMPARES = frozenset(
    "eq ne lt le gt ge clamp clamp_min clamp_max clip floor_divide floordiv mod remainder fmod".split()
)
SORTS_INTO = frozenset("searchsorted bucketize one_hot histc bincount".split())  # by numbers that are boundaries


def passed_on(node: fx.Node) -> list[fx.Node]:
    """The operands whose values are in the result: not those that say where to read or write."""
    name = known_name(node)
    if name in GROUPED:
        return []
    if name in LOOKS_UP:
        return [a for a in node.args[:1] if isinstance(a, fx.Node)]
    if name == "setitem":
        return [a for a in (node.args[0], node.args[2]) if isinstance(a, fx.Node)]
    return node.all_input_nodes


def check_counts(node: fx.Node, counted: list[fx.Node], values: dict[fx.Node, Any]) -> None:
    """Check that a probe shows both sides of whatever an operation compares numbers of tokens with.

    Args:
        counted: its operands that are such numbers, or made of them. values: of all rows.

    Raises:
        ProbeError: it does not, or it is not known what the operation does to such a number.
    """
    name = known_name(node)
    if not counted or name not in POINTWISE | SORTS_INTO:
        return
    if name in ARITHMETIC and node.kwargs.get("rounding_mode") is None:
        return
    if name in CASTS and all(_keeps(values[n], values[node]) for n in counted):
        return
    if name not in COMPARES | {"div", "divide"} or len(node.all_input_nodes) > 1:
        raise ProbeError("tokens are counted, and what it makes of a count that is larger is not known")
    constants = [a for a in arguments(node) if isinstance(a, int | float) and not isinstance(a, bool)]
    for constant in constants:
        for value in (values[n] for n in counted):
            if not value.numel() or not bool(value.min() < constant) or not bool(value.max() > constant):
                raise ProbeError(f"tokens are counted and compared with {constant}, which a short prompt may not reach")


def _keeps(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether a cast leaves numbers as they are."""
    if after.is_floating_point():
        return True
    return after.dtype in (torch.int32, torch.int64) and bool((before == after).all())
