"""What follows a prompt, dense and dropped, and how far apart the two are: for the report of `explain(answer=...)`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uniprefill_fx.frontends.cache_argument import returned_cache
from uniprefill_fx.runtime.prefill import disabled


@dataclass(frozen=True)
class Answers:
    """The likeliest tokens after the prompt, one by one.

    Attributes:
        dense, dropped: token ids. kl: KL divergence in nats of the first token's distribution from the dense one.
    """

    dense: tuple[int, ...]
    dropped: tuple[int, ...]
    kl: float

    def __str__(self) -> str:
        pairs = zip(self.dropped, self.dense, strict=True)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        agree = "all" if same == len(self.dense) else f"the first {same}"
        return f"answer: {agree} of {len(self.dense)} tokens as dense; KL of the next token {self.kl:.2g}"


def answers(run: Callable[..., Any], ids: Tensor, kwargs: Mapping[str, Any], tokens: int) -> Answers:
    """Greedy continuations of one prompt, (1, tokens) int64, by a compiled forward.

    Steps go on from the cache that the prompt's call returned; a model that returns none gives one token.
    """
    dropped, first = _follow(run, ids, kwargs, tokens)
    with disabled():
        dense, want = _follow(run, ids, kwargs, tokens)
    return Answers(dense, dropped, float((want.exp() * (want - first)).sum()))


def _follow(
    run: Callable[..., Any], ids: Tensor, kwargs: Mapping[str, Any], tokens: int
) -> tuple[tuple[int, ...], Tensor]:
    """Token ids, and the first one's log-probabilities, (vocabulary,) float64."""
    out, found = run(ids, **kwargs), []
    first = _logits(out).double().log_softmax(-1)
    mask = kwargs.get("attention_mask")
    rest = {name: value for name, value in kwargs.items() if name not in ("attention_mask", "position_ids")}
    while True:
        found.append(int(_logits(out).argmax()))
        cache = returned_cache(out)
        if len(found) == tokens or not cache:
            return tuple(found), first
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(1, 1)], 1)
            rest["attention_mask"] = mask
        out = run(ids.new_tensor([[found[-1]]]), **rest | cache)


def _logits(out: Any) -> Tensor:
    """(vocabulary,) of the last position."""
    logits: Tensor = out if isinstance(out, Tensor) else out[0]
    return logits[0, -1]
