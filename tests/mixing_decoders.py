"""Decoders whose layers hold the operations of `mixing_ops`, over streams laid out in four ways."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from mixing_ops import Op
from plain_decoders import HEADS, LONGEST, VOCABULARY, WIDTH, mlp
from torch import Tensor, nn

LAYOUTS = ("bnd", "nbd", "nd", "bdn")


class MixingLayer(nn.Module):
    """Attention, then x + f(x) for each of its operations, then an MLP; the stream is laid out as `layout` says."""

    def __init__(self, layout: str, ops: Sequence[Op]) -> None:
        super().__init__()
        self.layout, self.ops, self.tokens = layout, tuple(ops), layout.index("n")
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), mlp()

    def rows(self, x: Tensor) -> Tensor:
        """The stream as (..., tokens, channels), or (tokens, batch, channels)."""
        return x.transpose(1, 2) if self.layout == "bdn" else x

    def attend(self, x: Tensor) -> Tensor:
        qkv = self.c_attn(x)
        if self.layout == "nbd":
            qkv = qkv.transpose(0, 1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(-2, -3) for t in qkv.chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2)
        return self.c_proj(y.transpose(0, 1) if self.layout == "nbd" else y)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.rows(self.attend(self.ln_1(self.rows(x))))
        for op in self.ops:
            x = x + op(x, self.tokens)
        return x + self.rows(self.mlp(self.ln_2(self.rows(x))))


class MixingDecoder(nn.Module):
    """Token ids (1, N) to logits (1, N, vocabulary), (N, 1, vocabulary) or (N, vocabulary)."""

    def __init__(self, layout: str, ops: Sequence[Sequence[Op]]) -> None:
        super().__init__()
        self.layout = layout
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(MixingLayer(layout, of_layer) for of_layer in ops)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.turn = nn.Identity()  # what the stream enters behind the layers

    def entries(self) -> list[nn.Module]:
        return [*self.layers, self.turn]

    def tail(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x.transpose(1, 2) if self.layout == "bdn" else x))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = {"bnd": x, "nbd": x.transpose(0, 1), "nd": x[0], "bdn": x.transpose(1, 2)}[self.layout]
        for layer in self.layers:
            x = layer(x)
        return self.tail(self.turn(x))


def build(layout: str, ops: Sequence[Sequence[Op]], seed: int = 0) -> MixingDecoder:
    """Random weights, sharp enough that attention prefers some tokens to others."""
    torch.manual_seed(seed)
    model = MixingDecoder(layout, ops)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
    return model.eval()
