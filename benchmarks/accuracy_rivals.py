"""Other ways to choose rows, for comparison in `accuracy.py` only: they run where the backend's selection would.

Each rival keeps as many rows as the backend kept on the same prompt at the same layer, and, like it, the first
`sink_tokens` and the last `last_n` rows, as long as these are fewer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from uniprefill_fx.kernels.block_scores.naive import block_scores_reference
from uniprefill_fx.pipeline import Compilation
from uniprefill_fx.runtime.prefill import Prefill

RIVALS = ("sinks+last", "random", "mean")
"""The first rows and the last (as StreamingLLM keeps them); random blocks; the blocks whose mean key fits the mean
query best, which is what an estimate without softmax can see."""


@dataclass
class Chooser:
    """What the next prefills select with.

    Attributes:
        kind: "own" (the backend's selection), "fp8" (its scores from e4m3 products), or one of `RIVALS`.
        p: for "fp8", as `override()` would not come here. keep: by drop, counted from 0, the rows that a rival keeps.
        generator: of the random rival.
    """

    kind: str = "own"
    p: float | None = None
    keep: list[int] = field(default_factory=list)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def take_over(self, done: Compilation) -> None:
        """An observer of `compile_graph`: lets this object decide in every selection of a prefill."""
        if isinstance(done.run, Prefill):
            ordinals = iter(range(len(done.plan.drops)))
            done.run.steps = [
                (piece, _Selection(piece.gm, next(ordinals), self) if piece.selection else run)
                for piece, run in done.run.steps
            ]


class _Selection(fx.Interpreter):
    """A selection piece of the rewritten graph, with its score or its select replaced."""

    def __init__(self, gm: fx.GraphModule, ordinal: int, chooser: Chooser) -> None:
        super().__init__(gm)
        self.gm, self.ordinal, self.chooser = gm, ordinal, chooser
        self.scored: dict[str, Any] = {}

    def __call__(self, *args: Any) -> Any:
        return self.gm(*args) if self.chooser.kind == "own" else self.run(*args)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = target.name() if isinstance(target, torch._ops.OpOverload) else ""
        named = {a.name: v for a, v in zip(target._schema.arguments, args, strict=False)} if name else {}
        if name == "uniprefill::score":
            self.scored = named
            if self.chooser.kind == "fp8" and named["q"].is_cuda:
                return super().call_function(target, (), named | {"score_dtype": torch.float8_e4m3fn})
            if self.chooser.kind == "fp8":  # without the kernel the op does not round
                scale = named["q"].shape[-1] ** -0.5 if named["scale"] is None else named["scale"]
                rest = scale, named["last_n"], named["block_size"], named["softcap"]
                return block_scores_reference(named["q"], named["k"], named["token_bounds"], *rest, dtype="fp8")
        if name == "uniprefill::select" and self.chooser.kind in RIVALS:
            return self._rival(named)
        if name == "uniprefill::select" and self.chooser.p is not None:
            return super().call_function(target, (), named | {"p": self.chooser.p, "keep_ratio": None})
        return super().call_function(target, args, kwargs)

    def _rival(self, select: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """(1, kept) int64 rows of the one request, ascending, and its new span."""
        q, k, block_size = self.scored["q"], self.scored["k"], self.scored["block_size"]
        tokens, chooser = k.shape[2], self.chooser
        at = torch.arange(tokens, device=k.device)
        blocks = -(-tokens // block_size)
        if chooser.kind == "sinks+last":
            wanted = at.double()
        elif chooser.kind == "random":
            wanted = torch.randperm(blocks, generator=chooser.generator).to(k.device)[at // block_size].double()
        else:
            wanted = mean_scores(q, k, self.scored["last_n"], block_size)[at // block_size]
        wanted[at < select["sink_tokens"]] = torch.inf
        wanted[tokens - select["last_n"] :] = torch.inf
        rows = torch.sort(wanted, descending=True, stable=True).indices[: chooser.keep[self.ordinal]].sort().values
        return rows[None], torch.tensor([[0, len(rows)]])


def mean_scores(q: Tensor, k: Tensor, last_n: int, block_size: int) -> Tensor:
    """(blocks,) float64: mean key of a block times mean of the last queries, summed over heads.

    q: (1, heads, tokens, head_dim); k: (1, kv_heads, tokens, head_dim).
    """
    tokens = k.shape[2]
    blocks = -(-tokens // block_size)
    block = torch.arange(tokens, device=k.device) // block_size
    sums = torch.zeros(k.shape[1], blocks, k.shape[3], dtype=torch.float64, device=k.device)
    means = sums.index_add(1, block, k[0].double()) / torch.bincount(block, minlength=blocks)[:, None]
    query = q[0, :, -last_n:].double().mean(1).view(k.shape[1], -1, k.shape[3]).sum(1)
    return torch.einsum("hbd,hd->b", means, query)
