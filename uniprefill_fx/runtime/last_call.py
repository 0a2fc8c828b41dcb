"""The record of the last prefill: what ran, and what was kept."""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import torch
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


def _nothing() -> Mapping[Any, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, eq=False)
class LastCall:
    """What the last prefill on this thread did.

    It holds the tensors that the prefill selected with, and nothing else of it: what is derived from them is computed
    when an attribute is first read, so that a prefill whose record nobody reads does no work and waits for nothing.

    Attributes:
        dropped: whether the drop layers selected tokens. A high `p` may have kept all of them: `compute_fraction` is 1
            then.
        reason: why nothing was selected (or, where it was, why a drop kept all), or None.
        tokens: prompt length, of all requests of a batch together, without padding where tokens were dropped; None
            when the graph that ran does not know it.
        num_tokens: by decoder layer, how many tokens entered it (all its keys).
        kept_indices: by drop layer, (kept,) int64: the original positions of the tokens that stayed after it; the
            columns of the input, packed request by request.
        cu_seqlens: by drop layer, where each request begins in `kept_indices`, and where the last one ends.
        changed: options that `override()` changed for this call, or that "auto" chose.
        columns: length of the input, padding included; None with `tokens`.
        token_bounds: by request, the first column of its tokens and the one past its last. A dense call does not look
            at padding: they are all columns there.
        density: by decoder layer with block-sparse attention, the computed part of the blocks of keys that causality
            allows; 1.0 where every block was computed.
        block_scores: by drop layer, (batch, blocks): the attention mass that the last queries gave to each block of the
            tokens that entered it. A prompt's blocks are counted from its first token that is left.
    """

    dropped: bool
    reason: Refusal | None
    tokens: int | None
    num_tokens: tuple[int, ...] = ()
    kept_indices: Mapping[int, Tensor] = field(default_factory=_nothing)
    cu_seqlens: Mapping[int, tuple[int, ...]] = field(default_factory=_nothing)
    changed: Mapping[str, Any] = field(default_factory=_nothing)
    columns: int | None = None
    token_bounds: tuple[tuple[int, int], ...] = ()
    density: Mapping[int, float] = field(default_factory=_nothing)
    block_scores: Mapping[int, Tensor] = field(default_factory=_nothing)

    @property
    def compute_fraction(self) -> float:
        """The kept fraction, averaged over decoder layers."""
        return sum(self.num_tokens) / (len(self.num_tokens) * self.tokens) if self.num_tokens and self.tokens else 1.0

    rows = _renamed("rows", "num_tokens")
    kept = _renamed("kept", "kept_indices")
    spans = _renamed("spans", "token_bounds")
    work = _renamed("work", "compute_fraction")

    def __str__(self) -> str:
        if not self.dropped and not self.density:
            return f"dense ({self.reason})" if self.reason else "dense"
        done = "dropped" if self.dropped else "nothing dropped"
        lines = [f"{done}: {self.tokens} tokens, compute {self.compute_fraction:.2f} of dense"]
        for layer, bounds in self.cu_seqlens.items():
            counts = [str(end - start) for start, end in itertools.pairwise(bounds)]
            lines.append(f"  after layer {layer}: kept {', '.join(counts)}")
        if self.density:
            each = ", ".join(f"{layer}: {share:.2f}" for layer, share in self.density.items())
            lines.append(f"  blocks of keys computed, by layer: {each}")
        lines += [f"  {self.reason}"] if self.reason else []
        return "\n".join(lines)

    __repr__ = __str__


@dataclass(frozen=True, eq=False)
class Drops:
    """The selections of one prefill, as they ran.

    Attributes:
        layers: the drop layers, in order, of `num_layers` decoder layers.
        token_bounds: (batch, 2) int64 on the CPU, before any drop.
        kept: by drop, what was selected of the stream before it, and where the tokens of the new one lie: (batch, most)
            int64, (batch, 2) int64 on the CPU.
        blocks: by block-sparse attention, its layer and (2,) int64: blocks computed, and blocks that causality allows.
        scores: by drop, (batch, blocks): what the selection chose by.
    """

    layers: tuple[int, ...]
    num_layers: int
    token_bounds: Tensor
    kept: tuple[tuple[Tensor, Tensor], ...]
    blocks: tuple[tuple[int, Tensor], ...] = ()
    scores: tuple[Tensor, ...] = ()

    def counts(self) -> list[int]:
        """Tokens in the stream: at first, and after each drop."""
        return [sum(end - start for start, end in b.tolist()) for b in (self.token_bounds, *(b for _, b in self.kept))]

    def positions(self) -> list[Tensor]:
        """After each drop, the original columns of what is left, packed request by request: (kept,) int64."""
        found: list[Tensor] = []
        firsts, columns = [start for start, _ in self.token_bounds.tolist()], None
        for indices, bounds in self.kept:
            own = [indices[r, start:end] for r, (start, end) in enumerate(bounds.tolist())]
            if columns is not None:
                own = [c[o - first] for c, o, first in zip(columns, own, firsts, strict=True)]
            columns, firsts = own, [start for start, _ in bounds.tolist()]
            found.append(torch.cat(own))
        return found


class DroppedCall(LastCall):
    """The record of a prefill that selected tokens: each attribute is computed when it is first read, and kept."""

    _drops: Drops

    def __init__(self, drops: Drops, reason: Refusal | None, changed: Mapping[str, Any], columns: int) -> None:
        known = {"_drops": drops, "reason": reason, "changed": MappingProxyType(dict(changed)), "columns": columns}
        self.__dict__.update(known)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")  # a frozen class guards no subclass

    @functools.cached_property
    def _counts(self) -> list[int]:
        return self._drops.counts()

    @property
    def dropped(self) -> bool:
        return bool(self._drops.layers) and (self.reason is None or self._counts[-1] < self._counts[0])

    @property
    def tokens(self) -> int:
        return self._counts[0]

    @functools.cached_property
    def num_tokens(self) -> tuple[int, ...]:
        drops = self._drops
        behind = [bisect.bisect_left(drops.layers, layer) for layer in range(drops.num_layers)]
        return tuple(self._counts[drop] for drop in behind)

    @functools.cached_property
    def kept_indices(self) -> Mapping[int, Tensor]:
        return MappingProxyType(dict(zip(self._drops.layers, self._drops.positions(), strict=True)))

    @functools.cached_property
    def cu_seqlens(self) -> Mapping[int, tuple[int, ...]]:
        ends = {}
        for layer, (_, bounds) in zip(self._drops.layers, self._drops.kept, strict=True):
            ends[layer] = (0, *itertools.accumulate(end - start for start, end in bounds.tolist()))
        return MappingProxyType(ends)

    @functools.cached_property
    def density(self) -> Mapping[int, float]:
        sums: dict[int, Tensor] = {}
        for layer, totals in self._drops.blocks:  # of a layer with several attentions, all of them
            sums[layer] = totals.cpu() + sums.get(layer, 0)
        counts = {layer: totals.tolist() for layer, totals in sums.items()}
        return MappingProxyType(
            {layer: made / allowed if allowed else 1.0 for layer, (made, allowed) in counts.items()}
        )

    @functools.cached_property
    def block_scores(self) -> Mapping[int, Tensor]:
        return MappingProxyType(dict(zip(self._drops.layers, self._drops.scores, strict=False)))

    @functools.cached_property
    def token_bounds(self) -> tuple[tuple[int, int], ...]:
        return tuple((start, end) for start, end in self._drops.token_bounds.tolist())


def last_call() -> LastCall | None:
    """What the last prefill through this backend did on this thread; None before the first one."""
    return getattr(_state, "last", None)


def watched(run: Callable[[], R]) -> tuple[R, LastCall | None]:
    """What a call returned, and what its last prefill on this thread did: None when no prefill of it reached this
    backend, as happens where Dynamo gave up compiling a function and runs it eagerly.

        out, call = uniprefill_fx.watched(lambda: model.generate(ids, max_new_tokens=8))
    """
    before = last_call()
    out = run()
    call = last_call()
    return out, None if call is before else call


def record(call: LastCall) -> None:
    """Remember what a prefill did."""
    _state.last = call
    log.debug("%s", call)
