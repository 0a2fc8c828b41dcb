"""The operators whose rows are known: from the kinds of their arguments to the kind of what they return.

Each rule says for PyTorch's own operators when a token's row of the result comes from that token's rows alone. A rule
answers None where it cannot say; `rowwise_regions` then runs the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from uniprefill_fx.passes.analyze.rowwise_kinds import Kind, Kinds, Rows, Same, State, is_tensor
from uniprefill_fx.passes.analyze.rowwise_layout import KindOf, LayoutRules
from uniprefill_fx.passes.analyze.rowwise_ops import (
    ALONG,
    AXES,
    ELEMENTS,
    FILLS,
    PIECES,
    POINTWISE,
    PRODUCTS,
    SUMS_OVER_RANKS,
    argument,
    complete,
    dimensions,
    fill_values,
    holds_tensor,
    is_inactive,
    is_random,
    known_name,
)
from uniprefill_fx.passes.node_utils import expression, meta


class Rules(LayoutRules):
    """The rules, for one graph."""

    def result(self, node: fx.Node, kind_of: KindOf) -> Kinds | None:
        """The kind of what a node returns, whose arguments are all understood; None where no rule can say."""
        name = known_name(node)
        operands = [n for n in node.all_input_nodes if is_tensor(n) or isinstance(meta(n), tuple | list)]
        kinds = [kind_of(n) for n in operands]
        value = meta(node)
        if name == "getitem" and operands and isinstance(meta(operands[0]), tuple | list):
            found = kind_of(operands[0])
            return found[node.args[1]] if isinstance(found, tuple) and isinstance(node.args[1], int) else found
        if not holds_tensor(value) and name != "setitem":
            return Same() if name in ("size", "dim", "numel", "getitem", "sym_size") or not operands else None
        if name in FILLS and not any(self._counts(v) for v in fill_values(node, name)):
            return Same()
        if all(isinstance(k, Same) for k in kinds):
            # One number repeated for each token stays that only where tokens are not counted or added up.
            plain = not any(self._has_rows(meta(n)) for n in operands) and not self._has_rows(value)
            plain |= bool(operands) and name in POINTWISE | ELEMENTS | AXES | {"expand", "expand_as", "T", "mT"}
            plain |= name == "getitem" and len(operands) == 1 and self._every_token(node)
            return self._each(value, lambda v: Same()) if name and plain and not is_random(node) else None
        if all(isinstance(k, Same | State) for k in kinds):
            return self._each(value, lambda v: State()) if name and not self._has_rows(value) else None
        if any(not isinstance(k, Same | Rows) for k in kinds):
            return None
        if name in POINTWISE | SUMS_OVER_RANKS or (name in ("max", "min") and len(operands) == 2) or name == "dropout":
            return None if name == "dropout" and not is_inactive(node) else self._pointwise(node, operands, kind_of)
        for names, rule in self._table():
            if name in names:
                return rule(node, name, kind_of)
        return None

    def _table(self) -> Sequence[tuple[Any, Callable[[fx.Node, str, KindOf], Kinds | None]]]:
        return (
            (ALONG, self._along),
            (ELEMENTS, self._elements),
            (AXES, self._moved),
            (("T", "mT"), self._moved),
            (("expand", "expand_as"), self._expanded),
            (("repeat",), self._repeated),
            (("repeat_interleave",), self._interleaved),
            (PIECES, self._pieces),
            (("cat", "concat", "stack"), self._joined),
            (PRODUCTS, self._product),
            (("linear",), self._linear),
            (("layer_norm", "rms_norm"), self._norm),
            (("getitem",), self._indexed),
            (("select", "narrow"), self._selected),
            (("embedding",), self._embedded),
            (("gather", "scatter"), self._gathered),
            (("one_hot",), self._left),
            (("all_gather_into_tensor",), self._grown),
            (("view_as_real", "view_as_complex", "real", "imag", "conj"), self._left),
        )

    def _counts(self, value: Any) -> bool:
        return (
            isinstance(value, fx.Node)
            and isinstance(meta(value), torch.SymInt)
            and self.axes.tokens in expression(meta(value)).free_symbols
        )

    def _has_rows(self, value: Any) -> bool:
        if isinstance(value, tuple | list):
            return any(self._has_rows(v) for v in value)
        return bool(self.axes.dims(value))

    def _pointwise(self, node: fx.Node, operands: list[fx.Node], kind_of: KindOf) -> Kind | None:
        value, found = meta(node), set()
        if not isinstance(value, torch.Tensor):
            return None
        for operand in operands:
            kind = kind_of(operand)
            if isinstance(kind, Rows):
                found.add((meta(operand).ndim - kind.dim, kind.outer, kind.inner))
        if len(found) != 1:
            return None
        ((right, outer, inner),) = found
        return self._rows(value, value.ndim - right, Rows(0, outer, inner))

    def _along(self, node: fx.Node, name: str, kind_of: KindOf) -> Kinds | None:
        source = argument(node, 0, "input", "self", "x")
        kind = kind_of(source) if is_tensor(source) else None
        if not isinstance(kind, Rows) or len([n for n in node.all_input_nodes if is_tensor(n)]) != 1:
            return None
        before = meta(source)
        along = {d % before.ndim for d in dimensions(node, name, before.ndim)}
        if kind.dim in along or any(self.axes.of_prompts(before, d) for d in along):
            return None
        gone = sum(d < kind.dim for d in along)

        def after(value: Any) -> Kind | None:
            return self._rows(value, kind.dim if value.ndim == before.ndim else kind.dim - gone, kind)

        return complete(self._each(meta(node), after))  # type: ignore[arg-type]

    def _product(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        left, right = (argument(node, i, *keys) for i, keys in enumerate((("input", "self"), ("other", "mat2"))))
        if not is_tensor(left) or not is_tensor(right) or min(meta(left).ndim, meta(right).ndim) < 2:
            return None
        value, kinds = meta(node), (kind_of(left), kind_of(right))
        places = [meta(n).ndim - k.dim for n, k in zip((left, right), kinds, strict=True) if isinstance(k, Rows)]
        rows = [k for k in kinds if isinstance(k, Rows)]
        if any((r.outer, r.inner) != (rows[0].outer, rows[0].inner) for r in rows) or len(set(places)) != 1:
            return None
        summed = (isinstance(kinds[0], Rows) and places[0] == 1) or (isinstance(kinds[1], Rows) and places[0] == 2)
        constant = [n for n, k in zip((left, right), kinds, strict=True) if isinstance(k, Same)]
        summed |= self.axes.of_prompts(meta(left), -1)
        if summed or (len(rows) == 2 and places[0] < 3) or any(self.axes.dims(meta(n)) for n in constant):
            return None
        return self._rows(value, value.ndim - places[0], rows[0])

    def _linear(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source, *weights = (n for n in node.all_input_nodes if is_tensor(n))
        kind = kind_of(source)
        given = node.args[0] if node.args else node.kwargs.get("input")
        if source is not given or not isinstance(kind, Rows) or any(not isinstance(kind_of(w), Same) for w in weights):
            return None
        return self._rows(meta(node), kind.dim, kind) if not self._apart(meta(source), -1, kind) else None

    def _norm(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source, shape = argument(node, 0, "input"), argument(node, 1, "normalized_shape")
        others = [n for n in node.all_input_nodes if is_tensor(n) and n is not source]
        kind = kind_of(source)
        if not isinstance(kind, Rows) or not isinstance(shape, tuple | list):
            return None
        if any(not isinstance(kind_of(n), Same) or self.axes.dims(meta(n)) for n in others):
            return None
        over = range(meta(source).ndim - len(shape), meta(source).ndim)
        if any(self._apart(meta(source), d, kind) for d in over):
            return None
        return self._rows(meta(node), kind.dim, kind)

    def _grown(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        """Ranks' tensors, one behind the other along the first axis."""
        source = argument(node, 0, "input")
        kind = kind_of(source)
        if not isinstance(kind, Rows) or self._apart(meta(source), 0, kind):
            return None
        return self._rows(meta(node), kind.dim, kind)

    def _embedded(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        operands = [n for n in node.all_input_nodes if is_tensor(n)]
        kinds = [kind_of(n) for n in operands]
        rows = [k for k in kinds if isinstance(k, Rows)]
        index = next(n for n in operands if isinstance(kind_of(n), Rows))
        floating = meta(index).is_floating_point()
        if (
            len(operands) != 2
            or len(rows) != 1
            or floating
            or any(self.axes.dims(meta(n)) for n in operands if n is not index)
        ):
            return None
        return self._rows(meta(node), rows[0].dim, rows[0])

    def _gathered(self, node: fx.Node, name: str, kind_of: KindOf) -> Kind | None:
        source, dim = argument(node, 0, "input", "self"), argument(node, 1, "dim")
        operands = [n for n in node.all_input_nodes if is_tensor(n)]
        kinds = {kind_of(n) for n in operands}
        # Rows beside one another, and an index into another axis; a buffer that is the same for all tokens fits them.
        rows = [k for k in kinds if isinstance(k, Rows)]
        if (
            len(rows) != 1
            or not isinstance(dim, int)
            or any(self.axes.dims(meta(n)) != (rows[0].dim,) for n in operands)
        ):
            return None
        if self._apart(meta(source), dim, rows[0]):
            return None
        return self._rows(meta(node), rows[0].dim, rows[0])
