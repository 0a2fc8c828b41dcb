"""What can go wrong, as types: refusals that keep a graph dense, and errors a user must see."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Category(StrEnum):
    """Stable names for the reasons why an attention op or a graph stays dense."""

    GRADIENTS = "gradients"
    GRAPH_BREAK = "graph-break"
    RANKS = "several-ranks"
    NO_ATTENTION = "no-full-attention"
    ATTENTION = "attention-not-understood"
    NON_CAUSAL = "non-causal-attention"
    MASK = "mask-not-understood"
    INDEXED = "indexed-attention"
    PADDING = "padding"
    PACKED = "packed-prompts"
    PAST = "has-past-keys"
    BATCH = "batch"
    TOKEN_AXIS = "token-axis-specialised"
    RESIDUAL = "residual-stream-not-found"
    SPARSE = "attention-stays-dense"
    OUTPUT = "output-not-restorable"
    FULL_LOGITS = "full-logits"
    TOKEN_OP = "operation-mixes-tokens"
    MUTATION = "mutation-across-cut"
    CACHE = "cache-not-understood"
    SCORES = "scores-not-finite"
    TOO_SHORT = "below-min-tokens"
    RECOMPILE_LIMIT = "recompile-limit"
    DISABLED = "disabled"
    FAILURE = "internal-failure"


@dataclass(frozen=True)
class Refusal:
    """One decision to stay dense: a stable category, what was seen, and what the user can do about it."""

    category: Category
    seen: str
    hint: str
    layer: int | None = None

    def __str__(self) -> str:
        where = "" if self.layer is None else f"layer {self.layer}: "
        return f"{where}[{self.category.value}] {self.seen} ({self.hint})"


class RefusalError(Exception):
    """Raised inside an analysis to stop it; carries the typed reason. Under `strict=True` it reaches the user."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class StrictError(RuntimeError):
    """`strict=True` and the graph, or one of its drop layers, would have stayed dense."""


class RanksError(RuntimeError):
    """A rank that shares the model with others did not come to a prompt that they are about to run."""


class CompactCacheError(RuntimeError):
    """A compact KV cache was read by code that does not know which tokens it holds."""


def refuse(category: Category, seen: str, hint: str, layer: int | None = None) -> RefusalError:
    """Build the exception of one refusal: `raise refuse(...)`."""
    return RefusalError(Refusal(category, seen, hint, layer))
