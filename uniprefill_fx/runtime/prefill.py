"""What runs when a compiled prefill is called: dense or dropped, chosen call by call."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from uniprefill_fx.config import OptionError
from uniprefill_fx.errors import Category, Refusal, RefusalError, refuse
from uniprefill_fx.lowering.prompts import CompiledPrompt
from uniprefill_fx.passes.analyze.outputs import Exposure
from uniprefill_fx.passes.analyze.plan import Plan
from uniprefill_fx.passes.node_utils import counts_blocks, is_selected, selects_by, shape
from uniprefill_fx.passes.normalize.causal_buffers import MARK, Unchanged
from uniprefill_fx.passes.rewrite.split import Piece
from uniprefill_fx.runtime.agreement import Agreement
from uniprefill_fx.runtime.eager_reader import EagerReader
from uniprefill_fx.runtime.last_call import DroppedCall, Drops, LastCall, record
from uniprefill_fx.runtime.length_marks import LengthMarks
from uniprefill_fx.runtime.overrides import Changed, arguments, changes
from uniprefill_fx.runtime.sparse_options import sparse_options
from uniprefill_fx.runtime.token_bounds import token_bounds_of, whole_token_bounds
from uniprefill_fx.runtime.warn_once import warn_once

_disabled: contextvars.ContextVar[bool] = contextvars.ContextVar("uniprefill_disabled", default=False)


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Prompts inside this context run dense, by the compilations that exist: nothing is compiled again."""
    token = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(token)


class Prefill:
    """A prefill that drops tokens when it pays and may: one dense graph, one chain of pieces.

    Args:
        plan: what the pieces do. after: the rewritten graph. steps: its pieces, with what runs each.
        dense: the whole graph without drops. min_tokens: shorter prompts run `dense`.
        sequence_ids: computes the plan's `sequence_ids` from the inputs. auto_blocks: the block size follows the
        prompt.
        eager_reader: whether decode steps could run eagerly, where Dynamo compiles no more.
        agreement: with the ranks that drop the same tokens; None: this one alone.
    """

    def __init__(
        self,
        plan: Plan,
        after: fx.GraphModule,
        steps: Sequence[tuple[Piece, Callable[..., Any]]],
        dense: CompiledPrompt,
        min_tokens: int,
        sequence_ids: Callable[..., tuple[Tensor, ...]],
        auto_blocks: bool = False,
        eager_reader: EagerReader | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        assert plan.count is not None
        self.agreement = agreement
        self.plan, self.steps, self.dense, self.min_tokens = plan, steps, dense, min_tokens
        self.interpreter: Callable[[fx.GraphModule, dict[str, Any]], Changed] = Changed  # of selections with changes
        self.token_bounds, *self.inputs = (n for n in after.graph.nodes if n.op == "placeholder")
        self.sparse_input = self.inputs.pop(0) if plan.sparse else None
        self.counted = [node for piece, _ in steps for node in piece.outputs if counts_blocks(node)]
        self.output = after.graph.output_node().args[0]
        names = [n.name for n in self.inputs]
        self.count_input = names.index(plan.count.name)
        self.sequence_ids, self.auto_blocks, self.eager_reader = sequence_ids, auto_blocks, eager_reader
        self.masks = [names.index(n.name) for n in plan.unpadded]
        self.causal_buffers = [(names.index(n.name), Unchanged(n.meta[MARK])) for n in plan.causal_buffers]
        self.padding = None if plan.padding is None else names.index(plan.padding.name)
        self.shown = None if plan.shown_input is None else names.index(plan.shown_input.name)
        self.batch = _size_input(dense.gm.graph, plan.batch)
        self.released = released_after(after.graph, steps)
        self.marks = LengthMarks(dense.gm)
        self.grown = (0, 0)  # the length of the last prompt, and how often in a row it was one token longer

    def __call__(self, *args: Any) -> Any:
        try:
            token_bounds = self._agreed(args)
        except RefusalError as error:
            out = self.dense(*args)
            columns, prompts = int(args[self.count_input]), self.batch(args)
            record(
                LastCall(
                    False, error.refusal, prompts * columns, columns=columns, token_bounds=((0, columns),) * prompts
                )
            )
        else:
            self._note_length(int(args[self.count_input]))
            out = self._drop(token_bounds, args)
        return self.marks(out)

    def _agreed(self, args: Sequence[Any]) -> Tensor:
        """Where the tokens of each prompt lie, where all ranks are about to drop, and to drop alike.

        Raises:
            RefusalError: these prompts run dense, on every rank.
        """
        if self.agreement is None:
            return self._token_bounds(args)
        refused: RefusalError | None = None
        token_bounds = torch.empty(0)
        try:
            token_bounds = self._token_bounds(args)
        except RefusalError as error:
            refused = error
        decision = "dense" if refused is not None else "drop"
        changed = changes(int(args[self.count_input]), self.auto_blocks)
        agreed = self.agreement.reached(decision, token_bounds.tolist(), sorted(changed.items()))
        if refused is not None:
            raise refused
        if not agreed:
            raise refuse(
                Category.RANKS,
                "ranks that are about to do different things with this prompt",
                "give every rank the same prompt, model and options, inside the same contexts",
            )
        return token_bounds

    def _token_bounds(self, args: Sequence[Any]) -> Tensor:
        """Where the tokens of each prompt lie.

        Raises:
            RefusalError: these prompts run dense.
        """
        columns = int(args[self.count_input])
        if _disabled.get():
            raise refuse(Category.DISABLED, "uniprefill_fx.disabled() is active", "leave the context to drop again")
        if columns < self.min_tokens:
            raise refuse(
                Category.TOO_SHORT, f"{columns} tokens, min_tokens={self.min_tokens}", "lower min_tokens to drop here"
            )
        if self.eager_reader is not None:
            self.eager_reader.check()
        for index in self.masks:
            if not bool(args[index].bool().all()):
                raise refuse(Category.PADDING, "padding that not every attention masks", "pass prompts without padding")
        for numbers in self.sequence_ids(*args):
            if not bool((numbers == numbers[:, :1]).all()):
                raise refuse(Category.PACKED, "position_ids restart: packed prompts", "pass prompts one by one")
        for index, unchanged in self.causal_buffers:
            if not unchanged(args[index]):
                raise refuse(
                    Category.MASK,
                    "a buffer that was a causal mask when the model was compiled has other values now",
                    "compile the model again if its mask is meant to change",
                )
        if self.padding is None:
            return whole_token_bounds(self.batch(args), columns)
        token_bounds = token_bounds_of(args[self.padding])
        if self.plan.drops and self.plan.exposure is Exposure.NONE and bool((token_bounds[:, 1] < columns).any()):
            raise refuse(
                Category.PADDING,
                "the last rows alone are asked for, and are padding",
                "pad on the left, or ask for all logits (logits_to_keep=0)",
            )
        return token_bounds

    def _drop(self, token_bounds: Tensor, args: Sequence[Any]) -> Any:
        """Run the split graph node by node, releasing values after their last use."""
        if self.plan.exposure is Exposure.ALL:
            warn_once(
                "frozen logits",
                "outputs of all positions were asked for. Positions of dropped tokens come from their "
                "frozen states (full_logits='frozen'); pass logits_to_keep=1, or full_logits='dense' for exact ones.",
                stacklevel=3,
            )
        values: dict[fx.Node, Any] = dict(zip(self.inputs, args, strict=True)) | {self.token_bounds: token_bounds}
        kept: list[tuple[Tensor, Tensor]] = []
        scored: list[Tensor] = []
        changed = changes(int(args[self.count_input]), self.auto_blocks)
        shown = self.plan.shown if self.shown is None else int(args[self.shown])
        if self.plan.exposure is Exposure.NONE and changed.get("last_n", shown) < shown:
            raise OptionError(
                "last_n",
                changed["last_n"],
                f"{shown} or more in this call",
                "So many of the last rows are asked for, and fewer of them would be kept.",
            )
        if self.sparse_input is not None:
            values[self.sparse_input] = sparse_options(self.plan.sparse, changed)
        spoiled: Refusal | None = None
        for (piece, run), released in zip(self.steps, self.released, strict=True):
            operands = [values[n] for n in piece.inputs]
            for node in released:
                del values[node]
            if piece.selection and changed:
                own = arguments(changed, len(kept), len(self.plan.drops), self.plan.depth(len(kept)))
                run = self.interpreter(piece.gm, own).run
            results = run(*operands)
            del operands
            values.update(zip(piece.outputs, results, strict=True))
            if piece.selection:
                scores, kept_indices, kept_bounds = (values[node] for node in _selected(piece))
                if spoiled is None and _spoiled(scores, kept[-1][1] if kept else token_bounds, kept_bounds):
                    spoiled = self._warn_of_scores(len(kept))
                kept.append((kept_indices, kept_bounds))
                scored.append(scores)
        layers = tuple(drop.attention.layer for drop in self.plan.drops)
        blocks = tuple((node.meta["uniprefill_layer"], values[node]) for node in self.counted)
        drops = Drops(layers, self.plan.num_layers, token_bounds, tuple(kept), blocks, tuple(scored))
        record(DroppedCall(drops, spoiled, changed, int(args[self.count_input])))
        return fx.node.map_arg(self.output, values.__getitem__)

    def _warn_of_scores(self, ordinal: int) -> Refusal:
        """The reason why a drop kept all rows of a prompt; the first time with a warning."""
        reason = Refusal(
            Category.SCORES,
            "block scores that are not finite: NaN or infinity in its queries or keys",
            "every token stayed there; look for an overflow (float16?) or broken weights",
            self.plan.drops[ordinal].attention.layer,
        )
        warn_once("scores", str(reason), stacklevel=4)
        return reason

    def _note_length(self, columns: int) -> None:
        """Warn of a generation without a cache: every step of it is a new prompt, one token longer."""
        last, times = self.grown
        self.grown = (columns, times + 1 if columns == last + 1 else 0)
        if self.grown[1] == 3:
            warn_once(
                "no cache",
                "prompt after prompt is one token longer than the one before. Without a cache (use_cache=False, or a "
                "model whose generate() passes none, as MPT's) each step is a new prefill, and selects tokens anew.",
                stacklevel=3,
            )


def _selected(piece: Piece) -> tuple[fx.Node, fx.Node, fx.Node]:
    """The scores of a piece, and the rows and the token_bounds that it selects."""
    (scores,) = (n for n in piece.outputs if selects_by(n))
    parts = {n.args[1]: n for n in piece.outputs if is_selected(n)}
    return scores, parts[0], parts[1]


def _spoiled(scores: Tensor, before: Tensor, after: Tensor) -> bool:
    """Whether a request kept all of its rows because its scores are not finite.

    before, after: (batch, 2) token_bounds on the CPU. The device is waited for only where a request lost nothing.
    """
    whole = (before[:, 1] - before[:, 0]) == (after[:, 1] - after[:, 0])
    return bool(whole.any()) and not bool(torch.isfinite(scores).all())


def _size_input(graph: fx.Graph, size: sympy.Expr) -> Callable[[Sequence[Any]], int]:
    """How to read a size from the arguments of a graph; a number is itself."""
    for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder"):
        for d, own in enumerate(shape(node) or ()):
            if own == size and not size.is_Integer:
                return lambda args, i=i, d=d: int(args[i].shape[d])  # type: ignore[misc]
    number = int(size)
    return lambda args: number


def released_after(graph: fx.Graph, steps: Sequence[tuple[Piece, Callable[..., Any]]]) -> list[list[fx.Node]]:
    """By step: the values that nothing reads after it."""
    last: dict[fx.Node, int] = {}
    for i, (piece, _) in enumerate(steps):
        for node in piece.inputs:
            last[node] = i
    for node in graph.output_node().all_input_nodes:
        last.pop(node, None)
    return [[node for node, at in last.items() if at == i] for i in range(len(steps))]
