"""Arguments for tests of attention by position, and what it is in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uniprefill_fx.specs import AttentionSpec


@dataclass(frozen=True)
class Case:
    """Arguments of one attention.

    `positions` is how many original tokens a request had: its keys are a random choice of them, in order, shared by the
    batch unless there is padding. 0: none are given, and the keys are 0, 1, ... .
    """

    heads: tuple[int, int]
    dims: tuple[int, int]
    keys: int
    queries: int = 0
    """The last ones of the keys; 0: all."""
    token_bounds: tuple[tuple[int, int], ...] = ()
    """The rows of each request that are no padding, in a prompt."""
    pads: tuple[int, ...] = ()
    """How many keys of each request, the first ones, are padding, where the queries are not all of the keys."""
    positions: int = 0
    batch: int = 1
    """Without padding."""
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    padding: bool = False
    sinks: bool = False
    bias: bool = False
    sequence_ids: bool = False
    chunk_start: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    token_first: bool = False
    """In memory (batch, tokens, heads, dim), with other columns behind each head: no two dimensions merge."""

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        torch.manual_seed(seed)
        (heads, kv_heads), (dim, v_dim) = self.heads, self.dims
        keys, queries, places = self.keys, self.queries or self.keys, self.positions or self.keys
        ranges = self.token_bounds or [(pads, keys) for pads in self.pads] or [(0, keys)]
        batch = max(self.batch, len(ranges))
        positions = None
        if self.positions:
            positions = torch.full((len(ranges), keys), -1)
            for own, (start, end) in zip(positions, ranges, strict=True):
                own[start:end] = torch.randperm(places)[: end - start].sort().values
        mask = None
        if self.padding:
            mask = torch.rand(batch, places) > 0.3
            mask[:, :3] = False  # as padding on the left: the first queries see nothing
        return {
            "q": self._operand(batch, heads, queries, dim, 2.5),
            "k": self._operand(batch, kv_heads, keys, dim, 1.0),
            "v": self._operand(batch, kv_heads, keys, v_dim, 1.0),
            # the same tensor where rows are the same, as the passes hand it over
            "q_positions": positions if positions is None or queries == keys else positions[:, keys - queries :],
            "k_positions": positions,
            "token_bounds": torch.tensor(self.token_bounds) if self.token_bounds else None,
            "spec": AttentionSpec(
                window=self.window,
                chunk=self.chunk,
                softcap=self.softcap,
                key_mask=mask,
                sinks=torch.randn(heads, 1, 1).to(self.dtype) if self.sinks else None,
                bias=torch.randn(batch, heads, 1, places) if self.bias else None,
                sequence_ids=(torch.rand(batch, places) < 0.02).cumsum(1) if self.sequence_ids else None,
                chunk_start=torch.tensor(self.chunk_start) if self.chunk_start else None,
            ),
        }

    def _operand(self, batch: int, heads: int, tokens: int, dim: int, spread: float) -> Tensor:
        if not self.token_first:
            return (torch.randn(batch, heads, tokens, dim) * spread).to(self.dtype)
        x = torch.randn(batch, tokens, heads, dim + 8)[..., :dim] * spread
        return x.to(self.dtype).transpose(1, 2)


CASES = {
    "window by position": Case((2, 1), (32, 32), 270, positions=700, window=90),
    "window by row, batch": Case((4, 1), (16, 16), 150, batch=2, window=20, token_first=True),
    "window of one": Case((1, 1), (16, 16), 40, positions=90, window=1),
    "window wider than the prompt": Case((2, 2), (32, 32), 140, positions=150, window=1000),
    "chunk by position": Case((2, 1), (80, 80), 260, positions=400, chunk=128, dtype=torch.float16, token_first=True),
    "chunk by row": Case((2, 1), (16, 16), 200, chunk=48),
    "window in a chunk": Case((2, 1), (16, 16), 200, positions=300, window=30, chunk=64),
    "sinks": Case((6, 2), (64, 64), 200, positions=300, window=50, sinks=True, dtype=torch.bfloat16),
    "sinks and nothing else": Case((2, 1), (16, 16), 130, sinks=True),
    "softcap": Case((2, 1), (256, 256), 150, positions=200, softcap=3.0, dtype=torch.bfloat16),
    "alibi": Case((4, 4), (96, 96), 150, positions=260, bias=True, dtype=torch.float16),
    "alibi by row": Case((4, 2), (16, 16), 70, bias=True, batch=2),
    "padding": Case((2, 1), (16, 16), 150, positions=200, batch=2, padding=True),
    "padding, window": Case((2, 1), (16, 16), 150, batch=2, padding=True, window=40),
    "different dims": Case((2, 1), (192, 128), 140, positions=150, dtype=torch.bfloat16),
    "prompts in a row": Case((2, 1), (16, 16), 200, positions=300, batch=2, sequence_ids=True),
    "prompts in a row, by row": Case((2, 1), (16, 16), 200, queries=140, sequence_ids=True, window=60),
    "chunks that begin later": Case((2, 1), (16, 16), 200, positions=300, batch=2, chunk=48, chunk_start=(7, 100)),
    "chunks that begin later, by row": Case((2, 1), (16, 16), 150, batch=2, chunk=33, chunk_start=(5, 70)),
    "requests": Case((4, 2), (32, 32), 150, token_bounds=((0, 150), (150, 150), (149, 150), (21, 150), (0, 7))),
    "requests, window by position": Case(
        (2, 1), (16, 16), 150, token_bounds=((0, 150), (150, 150), (149, 150), (21, 150)), positions=300, window=60
    ),
    "requests, window by row": Case(
        (2, 1), (16, 16), 300, token_bounds=((267, 300), (0, 300), (0, 0), (2, 90)), window=60
    ),
    "requests, chunk by position": Case(
        (2, 2), (16, 16), 200, token_bounds=((167, 200), (0, 200), (72, 200)), positions=300, chunk=100,
        chunk_start=(0, 9, 50),
    ),
    "requests, everything": Case(
        (4, 2), (48, 40), 129, token_bounds=((0, 129), (127, 129), (59, 129)), positions=200, window=60, chunk=100,
        softcap=5.0, padding=True, sinks=True, bias=True, sequence_ids=True, token_first=True,
    ),
    "requests, terms by row": Case(
        (2, 1), (16, 16), 100, token_bounds=((0, 60), (91, 100), (0, 100)), padding=True, bias=True, chunk=40,
        chunk_start=(0, 91, 0),
    ),
    "padded keys": Case((2, 1), (16, 16), 300, queries=150, positions=400, pads=(40, 0)),
    "padded keys, terms": Case(
        (2, 1), (16, 16), 200, queries=60, positions=400, pads=(40, 145), window=300, padding=True, bias=True,
        sequence_ids=True,
    ),
    "one query": Case((4, 2), (64, 64), 500, queries=1, positions=900, window=100),
    "drafted tokens": Case((4, 2), (64, 64), 500, queries=5, positions=900, sinks=True),
    "second chunk": Case((2, 1), (16, 16), 400, queries=150, positions=900),
    "second chunk by row": Case((2, 1), (16, 16), 400, queries=150, window=100),
    "one token": Case((1, 1), (16, 16), 1),
}  # fmt: skip


def exact(**arguments: Any) -> Tensor:
    """A query at a time, over the list of keys that it sees, in float64."""
    q, k, v = (arguments[name].double() for name in "qkv")
    (batch, heads, queries, dim), tokens = q.shape, k.shape[2]
    q_positions, k_positions, token_bounds = (
        arguments[name] for name in ("q_positions", "k_positions", "token_bounds")
    )
    spec: AttentionSpec = arguments["spec"]
    mask, sinks, bias, softcap = spec.key_mask, spec.sinks, spec.bias, spec.softcap
    out = torch.zeros(batch, heads, queries, v.shape[3], dtype=torch.float64)
    for n, i in itertools.product(range(batch), range(queries)):
        rows = range(tokens) if token_bounds is None else range(*token_bounds[n].tolist())
        if tokens - queries + i not in rows:
            continue
        key_places = range(tokens) if k_positions is None else k_positions[n % len(k_positions)].tolist()
        a, seen = tokens - queries + i if q_positions is None else int(q_positions[n % len(q_positions), i]), []
        for j in rows:
            b = key_places[j]
            hidden = b < 0 or b > a
            hidden = hidden or (spec.window is not None and a - b >= spec.window)
            if spec.chunk is not None:
                start = 0 if spec.chunk_start is None else int(spec.chunk_start[n])
                hidden = hidden or (a - start) // spec.chunk != (b - start) // spec.chunk
            if spec.sequence_ids is not None:
                hidden = hidden or bool(spec.sequence_ids[n, a] != spec.sequence_ids[n, b])
            if not hidden and (mask is None or mask[n, b]):
                seen.append(j)
        for head in range(heads if seen else 0):
            group = head // (heads // k.shape[1])
            logits = k[n, group, seen] @ q[n, head, i] * dim**-0.5
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if bias is not None:
                logits = logits + bias[n, head, 0, [key_places[j] for j in seen]].double()
            weights = logits.exp()
            total = weights.sum() + (0.0 if sinks is None else sinks.flatten()[head].double().exp())
            out[n, head, i] = weights @ v[n, group, seen] / total
    return out
