"""A library that the package does not know: its front end is this file, and no pass is changed for it.

Rows hold all heads, one prompt after the other: (tokens, heads * head_dim). Attention returns nothing and writes its
last argument, and an operator beside it stores keys and values, by position, in tensors that no value of the graph
refers to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import uniprefill_fx
from uniprefill_fx.passes.analyze import attention_nodes
from uniprefill_fx.passes.attention_node import AttentionNode, Layout
from uniprefill_fx.specs import AttentionSpec

HEADS, KV_HEADS, DIM, WIDTH, LAYERS, TOKENS = 4, 2, 16, 48, 4, 300
OPTIONS: dict[str, Any] = {
    "drop_layers": [1, 2],
    "p": [0.6, 0.5],
    "block_size": 16,
    "last_n": 24,
    "sink_tokens": 8,
    "min_tokens": 0,
}
STORED: dict[int, list[Tensor]] = {}
lib = torch.library.Library("packed_library", "FRAGMENT")
lib.define("attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer) -> ()")
lib.define("store(Tensor k, Tensor v, Tensor positions, int layer) -> ()")


@torch.library.impl(lib, "attend", "CompositeExplicitAutograd")
def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
    heads = [x.unflatten(1, (-1, DIM)).transpose(0, 1) for x in (q, k, v)]
    q, k, v = (x[None] for x in heads)
    done = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out.copy_(done[0].transpose(0, 1).flatten(1))


@torch.library.impl(lib, "store", "CompositeExplicitAutograd")
def store(k: Tensor, v: Tensor, positions: Tensor, layer: int) -> None:
    STORED[layer] = [x.clone() for x in (k, v, positions)]


for name in ("attend", "store"):
    torch.library.register_fake(f"packed_library::{name}", lambda *args: None, lib=lib)
torch.fx.node.has_side_effect(torch.ops.packed_library.store.default)


def reader(node: fx.Node) -> AttentionNode | None:
    """The whole front end."""
    if node.target not in (torch.ops.packed_library.attend, torch.ops.packed_library.attend.default):
        return None
    args: Any = node.args
    q, k, v, out, layer = args
    stores = tuple(n for n in k.users if "packed_library.store" in str(n.target))
    return AttentionNode(
        node, q, k, v, AttentionSpec(), layer, f"layers.{layer}", layout=Layout(0, None, None), heads=(HEADS, KV_HEADS),
        written_output=out, cache_writes=stores, interior=frozenset({node}),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def front_end() -> Iterator[None]:
    with attention_nodes.reading_with(reader):
        yield
    torch._dynamo.reset()


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(HEADS * DIM, WIDTH) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 64)

    def rows(self, layer: int, x: Tensor, positions: Tensor) -> list[Tensor]:
        q, k, v = self.qkv[layer](F.layer_norm(x, (WIDTH,))).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
        angle = positions[:, None] / 50.0
        return [torch.cat([y * angle.cos() * 3, y[:, :0]], 1) for y in (q, k)] + [v]

    def finish(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out[layer](attended)
        return x + self.up[layer](F.gelu(F.layer_norm(x, (WIDTH,))))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in range(LAYERS):
            q, k, v = self.rows(layer, x, positions)
            attended = torch.empty_like(q)
            torch.ops.packed_library.store(k, v, positions, layer)
            torch.ops.packed_library.attend(q, k, v, attended, layer)
            x = self.finish(layer, x, attended)
        return self.head(F.layer_norm(x, (WIDTH,))[-1:])


def reference(model: Decoder, ids: Tensor, kept: Mapping[int, Tensor]) -> tuple[Tensor, dict[int, list[Tensor]]]:
    """Eager, on the rows that are kept after each layer; independent of the package."""
    x, positions, stored = model.embed(ids), torch.arange(len(ids)), {}
    for layer in range(LAYERS):
        q, k, v = model.rows(layer, x, positions)
        stored[layer] = [k, v, positions]
        attended = torch.empty_like(q)
        attend(q, k, v, attended, layer)
        if layer in kept:
            rows = torch.isin(positions, kept[layer])
            x, attended, positions = x[rows], attended[rows], positions[rows]
        x = model.finish(layer, x, attended)
    return model.head(F.layer_norm(x, (WIDTH,))[-1:]), stored


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_an_unknown_library_drops_exactly(inner: str) -> None:
    model, ids, positions = Decoder().eval(), torch.randint(64, (TOKENS,)), torch.arange(TOKENS)
    compiled = torch.compile(model, backend="uniprefill", options=OPTIONS | {"inner_backend": inner, "strict": True})
    with torch.inference_mode():
        got = compiled(ids, positions)
        call = uniprefill_fx.last_call()
        assert call is not None and call.dropped and call.num_tokens[-1] < call.num_tokens[2] < TOKENS
        stored = dict(STORED)
        want, want_stored = reference(model, ids, call.kept_indices)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert stored.keys() == want_stored.keys()
    for layer, tensors in want_stored.items():
        for mine, own in zip(stored[layer], tensors, strict=True):
            torch.testing.assert_close(mine, own, rtol=1e-5, atol=1e-5)


class Mean(Decoder):
    """Its last layer takes a mean over the tokens of what attention wrote."""

    def finish(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        return super().finish(layer, x, attended - attended.mean(0) if layer == LAYERS - 1 else attended)


def test_rows_in_a_written_buffer_are_rows() -> None:
    """The buffer is made of zeros, whose mean is the same for any tokens; what was written into it is not."""
    model, ids, positions = Mean().eval(), torch.randint(64, (TOKENS,)), torch.arange(TOKENS)
    compiled = torch.compile(model, backend="uniprefill", options=OPTIONS | {"inner_backend": "eager"})
    with torch.inference_mode():
        torch.testing.assert_close(compiled(ids, positions), model(ids, positions), rtol=1e-5, atol=1e-5)
    call = uniprefill_fx.last_call()
    assert call is not None and not call.dropped and "mean" in str(call.reason)


def test_the_kept_sets_are_those_of_the_scores() -> None:
    """The blocks that stay after the first drop hold p of the softmax of its last queries, which fp64 says too."""
    model, ids, positions = Decoder().eval(), torch.randint(64, (TOKENS,)), torch.arange(TOKENS)
    compiled = torch.compile(model, backend="uniprefill", options=OPTIONS | {"inner_backend": "eager"})
    with torch.inference_mode():
        compiled(ids, positions)
        call = uniprefill_fx.last_call()
        x = model.finish(0, model.embed(ids), _attended(model, model.embed(ids), positions, 0))
        q, k, _ = model.rows(1, x, positions)
    q, k = (y.unflatten(1, (-1, DIM)).double() for y in (q, k))
    logits = torch.einsum("nhd,mhd->hnm", q[-24:], k.repeat_interleave(HEADS // KV_HEADS, 1)) * DIM**-0.5
    logits = logits.masked_fill(torch.ones(24, TOKENS).triu(TOKENS - 23).bool(), -torch.inf)
    mass = F.pad(logits.softmax(-1).sum((0, 1)), (0, -TOKENS % 16)).view(-1, 16).sum(1)
    order = mass.argsort(descending=True)
    chosen = order[mass[order].cumsum(0) - mass[order] < 0.6 * mass.sum()]
    want = torch.isin(positions // 16, chosen) | (positions < 8) | (positions >= TOKENS - 24)
    assert call is not None and torch.equal(call.kept_indices[1], positions[want])


def _attended(model: Decoder, x: Tensor, positions: Tensor, layer: int) -> Tensor:
    q, k, v = model.rows(layer, x, positions)
    out = torch.empty_like(q)
    attend(q, k, v, out, layer)
    return out
