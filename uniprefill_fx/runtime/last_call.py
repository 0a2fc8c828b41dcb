"""The record of the last prefill: what ran, and what was kept."""

from __future__ import annotations

import itertools
import logging
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from uniprefill_fx.errors import Refusal

log = logging.getLogger(__name__)
_state = threading.local()
R = TypeVar("R")


def _renamed(old: str, new: str) -> property:
    """A name that goes with the next version."""

    def read(self: LastCall) -> Any:
        warnings.warn(f"LastCall.{old} is called {new} now", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(read, doc=f"Deprecated: `{new}`.")


@dataclass(frozen=True)
class LastCall:
    """What the last prefill on this thread did.

    Attributes:
        dropped: whether the drop layers selected tokens. A high `p` may have kept all of them: `compute_fraction` is 1
        then.
            reason: why nothing was selected (or, where it was, why a drop kept all), or None.
        tokens: prompt length, of all requests of a batch together, without padding where tokens were dropped; None
            when the graph that ran does not know it.
        num_tokens: by decoder layer, how many tokens entered it (all its keys).
        kept_indices: by drop layer, (kept,) int64: the original positions of the tokens that stayed after it; the
        columns of
            the input, packed request by request.
        cu_seqlens: by drop layer, where each request begins in `kept_indices`, and where the last one ends.
        changed: options that `override()` changed for this call, or that "auto" chose.
        columns: length of the input, padding included; None with `tokens`. token_bounds: by request, the first column
        of its
            tokens and the one past its last. A dense call does not look at padding: they are all columns there.
    """

    dropped: bool
    reason: Refusal | None
    tokens: int | None
    num_tokens: tuple[int, ...] = ()
    kept_indices: dict[int, Tensor] = field(default_factory=dict)
    cu_seqlens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)
    columns: int | None = None
    token_bounds: tuple[tuple[int, int], ...] = ()

    @property
    def compute_fraction(self) -> float:
        """The kept fraction, averaged over decoder layers."""
        return sum(self.num_tokens) / (len(self.num_tokens) * self.tokens) if self.num_tokens and self.tokens else 1.0

    rows = _renamed("rows", "num_tokens")
    kept = _renamed("kept", "kept_indices")
    spans = _renamed("spans", "token_bounds")
    work = _renamed("work", "compute_fraction")

    def __str__(self) -> str:
        if not self.dropped:
            return f"dense ({self.reason})" if self.reason else "dense"
        lines = [f"dropped: {self.tokens} tokens, compute {self.compute_fraction:.2f} of dense"]
        for layer, bounds in self.cu_seqlens.items():
            counts = [str(end - start) for start, end in itertools.pairwise(bounds)]
            lines.append(f"  after layer {layer}: kept {', '.join(counts)}")
        lines += [f"  {self.reason}"] if self.reason else []
        return "\n".join(lines)


def last_call() -> LastCall | None:
    """What the last prefill through this backend did on this thread; None before the first one."""
    return getattr(_state, "last", None)


def watched(run: Callable[[], R]) -> tuple[R, LastCall | None]:
    """What a call returned, and what its last prefill did: None when none of its own reached this backend."""
    before = last_call()
    out = run()
    call = last_call()
    return out, None if call is before else call


def record(call: LastCall) -> None:
    """Remember what a prefill did."""
    _state.last = call
    log.debug("%s", call)
