"""What one attention computes apart from its operands: `AttentionSpec`, the one list of terms that all layers share;
how block-sparse attention chooses, how a drop selects; and the limits of the kernels, which passes and kernels share.

In a graph the tensors of a spec are `fx.Node`s, at run time they are tensors. The op `uniprefill::attention` takes the
fields one by one, in the order in which they are written here; `SCHEMA` and `arguments()` are made from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

MAX_HEAD_DIM = 256
"""Widest head that the kernels take."""

TILE_ROWS = 128
"""(query position, head of the group) pairs that share one choice of blocks: FlashPrefill V2's packed tile. A group of
block-sparse attention is no larger."""


@dataclass(frozen=True)
class AttentionSpec:
    """Causal attention by position: the query at position a sees the key at position b when b <= a
    and the terms below let it.

    Attributes:
        scale: factor on the logits, a number or a node; None: head_dim ** -0.5.
        window: a query sees itself and the `window` - 1 positions before it; None: all before it.
        chunk: a query sees only its own chunk of this many positions, counted from `chunk_start`; None: all.
        softcap: logits become softcap * tanh(logits / softcap), before bias and mask.
        key_mask: (1 or batch, positions) bool, False where a token is padding.
        sinks: `heads` elements: one more logit a head that takes part in the softmax and has no value.
        bias: (..., heads, 1, positions), added to the logits by head and key position (alibi).
        sequence_ids: (1 or batch, positions), equal for the tokens of one prompt where several are packed in a row.
        chunk_start: (1 or batch,) int64, the position at which the chunks of a request begin; None: 0.
    """

    scale: Any = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    key_mask: Any = None
    sinks: Any = None
    bias: Any = None
    sequence_ids: Any = None
    chunk_start: Any = None

    SCHEMA: ClassVar[str] = (
        "float? scale, int? window, int? chunk, float? softcap, Tensor? key_mask, Tensor? sinks, Tensor? bias, "
        "Tensor? sequence_ids, Tensor? chunk_start"
    )

    def arguments(self) -> tuple[Any, ...]:
        """The fields, as the op takes them."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def map(self, change: Callable[[Any], Any]) -> AttentionSpec:
        """The spec with every term that is there changed: numbers are handed over too."""
        terms = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(term) for name, term in terms.items() if term is not None})

    @property
    def full(self) -> bool:
        """Whether a query sees all tokens before it, padding and other prompts apart."""
        return self.window is None and self.chunk is None

    @property
    def masked(self) -> bool:
        """Whether a query does not see all tokens before it."""
        return not self.full or self.key_mask is not None or self.sequence_ids is not None

    @property
    def plain(self) -> bool:
        """Whether the logits are those that SDPA computes."""
        return self.softcap is None and self.sinks is None and self.bias is None

    def of_request(self, request: int, heads: int) -> AttentionSpec:
        """The terms of one request of a batch, at run time."""

        def own(term: Tensor | None) -> Tensor | None:
            return term if term is None or term.shape[0] == 1 else term[request : request + 1]

        bias = None if self.bias is None else bias_of_request(self.bias, heads, request)
        return replace(
            self,
            key_mask=own(self.key_mask),
            sequence_ids=own(self.sequence_ids),
            chunk_start=own(self.chunk_start),
            bias=bias,
        )


def bias_of_request(bias: Tensor, heads: int, request: int) -> Tensor:
    """The (1, heads, 1, positions) part of a bias (..., heads, 1, positions) of one request, or of all."""
    by_request = bias.reshape(-1, heads, 1, bias.shape[-1])
    return by_request[request : request + 1] if by_request.shape[0] > 1 else by_request


@dataclass(frozen=True)
class SparseSpec:
    """How block-sparse attention chooses and computes blocks of keys (`kernels.block_sparse_attention`).

    Attributes:
        alpha: a block is computed where its energy is at least this fraction of the tile's highest; 0: every block.
        block_size: tokens a block. sink_blocks, window_blocks: how many first blocks, and blocks up to a query's own,
            are computed in any case. last_tokens: the last queries, which see every block.
        correction: whether a block that is left out takes part as one key. fp8: whether products are of e4m3 numbers.
        min_tokens: with fewer rows every block is computed.
    """

    alpha: float
    block_size: int
    sink_blocks: int
    window_blocks: int
    last_tokens: int
    correction: bool
    fp8: bool
    min_tokens: int

    def every_block(self, rows: int) -> bool:
        """Whether attention over so many rows leaves out nothing, and need not choose."""
        return rows < self.min_tokens or self.alpha == 0.0

    def choice(self) -> dict[str, Any]:
        """The arguments of the kernels that say which blocks are computed."""
        names = ("alpha", "block_size", "sink_blocks", "window_blocks", "last_tokens")
        return {name: getattr(self, name) for name in names}

    def numbers(self) -> list[float]:
        """The fields as one row of the tensor that hands them to the op."""
        return [float(getattr(self, field.name)) for field in fields(self)]

    @classmethod
    def of_numbers(cls, row: Sequence[float]) -> SparseSpec:
        """What `numbers` was made from."""
        alpha, block_size, sink, window, last, correction, fp8, least = row
        return cls(alpha, int(block_size), int(sink), int(window), int(last), bool(correction), bool(fp8), int(least))


@dataclass(frozen=True)
class DropSpec:
    """How one drop selects tokens, resolved by the plan; what `override()` may change at a call.

    Attributes:
        last_n: how many of the last tokens score the others, and always stay. sink_tokens: how many of the first stay.
        block_size: tokens a block; with "auto" each call brings its own.
        score_dtype: of softmax and sums; float8_e4m3fn: of the operands of q·kᵀ.
        p: share of the attention mass that the kept blocks hold, or None. keep_ratio: share of the blocks, or None.
    """

    last_n: int
    sink_tokens: int
    block_size: int
    score_dtype: torch.dtype
    p: float | None
    keep_ratio: float | None
