"""The record of the last prefill: what ran, and what was kept."""

from __future__ import annotations

import itertools
import logging
import threading
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from uniprefill_fx.errors import Refusal

log = logging.getLogger(__name__)
_state = threading.local()


@dataclass(frozen=True)
class LastCall:
    """What the last prefill on this thread did.

    Attributes:
        dropped: whether tokens were dropped. reason: why not (or, where some were, why a drop kept all), or None.
        tokens: prompt length, of all requests of a batch together and without padding; None when the graph that ran
            does not know it.
        rows: by decoder layer, the rows that entered it (all its keys).
        kept: by drop layer, (kept,) int64: the original positions of the tokens that stayed after it; the columns of
            the input, packed request by request.
        cu_seqlens: by drop layer, where each request begins in `kept`, and where the last one ends.
        changed: options that `override()` changed for this call, or that "auto" chose.
    """

    dropped: bool
    reason: Refusal | None
    tokens: int | None
    rows: tuple[int, ...] = ()
    kept: dict[int, Tensor] = field(default_factory=dict)
    cu_seqlens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)

    @property
    def work(self) -> float:
        """The kept fraction, averaged over decoder layers."""
        return sum(self.rows) / (len(self.rows) * self.tokens) if self.rows and self.tokens else 1.0

    def __str__(self) -> str:
        if not self.dropped:
            return f"dense ({self.reason})" if self.reason else "dense"
        lines = [f"dropped: {self.tokens} tokens, work {self.work:.2f}"]
        for layer, bounds in self.cu_seqlens.items():
            counts = [str(end - start) for start, end in itertools.pairwise(bounds)]
            lines.append(f"  after layer {layer}: kept {', '.join(counts)}")
        lines += [f"  {self.reason}"] if self.reason else []
        return "\n".join(lines)


def last_call() -> LastCall | None:
    """What the last prefill through this backend did on this thread; None before the first one."""
    return getattr(_state, "last", None)


def record(call: LastCall) -> None:
    """Remember what a prefill did."""
    _state.last = call
    log.debug("%s", call)
