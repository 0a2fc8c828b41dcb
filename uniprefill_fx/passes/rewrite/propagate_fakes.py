"""Fill in the meta of a rewritten graph: a fake value for each node, in a shape environment of its own.

Dynamo's environment is left alone: kept lengths are no inputs of the traced frame, so guards about them must not reach
Dynamo. Here the prompt length and each kept length are backed symbols.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.passes.node_utils import expression, is_op, meta


def fresh_symbol(shape_env: ShapeEnv, name: str, hint: int) -> torch.SymInt:
    """A new backed SymInt with `hint` as the number it is traced with: a size of at least 2, or any integer."""
    source = ConstantSource(name)
    create = shape_env.create_symbol if hint > 1 else shape_env.create_unspecified_symbol
    symbol = create(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    size = shape_env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(size, torch.SymInt)
    return size


# The number of prompts is traced as one that no other size is likely to have: what fits it by chance is found out.
BATCH_HINT = 1021


def propagate(gm: fx.GraphModule, batch: sympy.Expr) -> None:
    """Set `meta["val"]` (and `example_value`) of every node of a rewritten graph. `batch`: 1, or a symbol.

    Raises:
        RefusalError: the graph holds for one prompt length, or one kept length, only.
    """
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    _Propagator(gm, mode, shape_env, batch).run_all()


class _Propagator(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode, shape_env: ShapeEnv, batch: sympy.Expr) -> None:
        super().__init__(gm)
        self.graph_module = gm
        self.mode, self.shape_env, self.batch = mode, shape_env, batch
        self.sizes: dict[sympy.Symbol, torch.SymInt] = {}

    def run_all(self) -> None:
        inputs = [self._input(node) for node in self.graph_module.graph.nodes if node.op == "placeholder"]
        lengths = dict(self.sizes)
        # As Dynamo traces: without these, composite ops are taken apart in C++, where some read sizes as numbers.
        with torch.inference_mode(False), torch.no_grad(), enable_python_dispatcher(), self.mode:
            self.run(*inputs)
        for symbol, size in lengths.items():
            if not expression(size).free_symbols:
                raise refuse(
                    Category.TOKEN_AXIS,
                    f"the rewritten graph holds for one size {symbol} only",
                    "an operation in the model needs a fixed number of tokens, or of prompts",
                )

    def _input(self, node: fx.Node) -> Any:
        value = meta(node)
        if isinstance(value, torch.Tensor):
            size = [self._size(s) for s in value.shape]
            stride = [self._size(s) for s in value.stride()]
            with torch.inference_mode(False), self.mode:
                return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
        if isinstance(value, torch.SymInt):
            return self._size(value)
        return value

    def _size(self, size: Any) -> Any:
        found = expression(size)
        if not found.free_symbols:
            return int(found)
        for symbol in found.free_symbols:
            if symbol not in self.sizes:
                hint = BATCH_HINT if symbol == self.batch else _hint(size, symbol)
                self.sizes[symbol] = fresh_symbol(self.shape_env, str(symbol), hint)
        if isinstance(found, sympy.Symbol):
            return self.sizes[found]
        return sympy.lambdify(list(self.sizes), found)(*self.sizes.values())

    def run_node(self, n: fx.Node) -> Any:
        value = self._select(n) if is_op(n, "select") else super().run_node(n)
        n.meta["val"] = n.meta["example_value"] = value
        return value

    def _select(self, n: fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
        """`select` with a backed kept length: half of the rows as a hint, so that it equals no other length."""
        scores, token_bounds = (self.env[a] for a in n.args[:2] if isinstance(a, fx.Node))
        ordinal = n.meta["uniprefill_drop"]
        name = f"kept{ordinal}"
        kept = fresh_symbol(self.shape_env, name, 1031 - 2 * ordinal)
        self.sizes[sympy.Symbol(name)] = kept
        return scores.new_empty(token_bounds.shape[0], kept, dtype=torch.int64), torch.empty_like(token_bounds)


def _hint(size: Any, symbol: sympy.Symbol) -> int:
    hints = size.node.shape_env.backed_var_to_val if hasattr(size.node.shape_env, "backed_var_to_val") else None
    hints = size.node.shape_env.var_to_val if hints is None else hints
    return int(hints[symbol])
