"""Small decoders in plain PyTorch, each written as people write them; no library of models is involved.

Between them they cover: fused attention and attention spelled out, with every common way to write a causal mask;
fused and separate projections; pre- and post-norm; learned, sinusoidal, rotary and alibi positions; grouped keys;
parallel blocks; streams laid out (B, N, d), (N, B, d) and (T, d).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, DEPTH, LONGEST = 64, 32, 4, 3, 1024
HEAD = WIDTH // HEADS


def mlp(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Decoder(nn.Module):
    """Embedding, layers, final norm, head: what all of them share. Subclasses say what a layer is."""

    layer: type[nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(self.layer() for _ in range(DEPTH))
        self.norm: nn.Module = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def head(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))

    def entries(self) -> list[nn.Module]:
        """The modules that the residual stream enters: one at each layer, and a last one behind them."""
        return [*self.layers, self.norm]

    def tail(self, x: Tensor) -> Tensor:
        """Logits of the stream that enters the last of `entries()`."""
        return self.head(x)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (B, N) to logits (B, N, vocabulary)."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# Learned positions, one projection split in three, fused attention, tied head.


class GptLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = mlp()

    def attend(self, x: Tensor) -> Tensor:
        b, n, d = x.size()
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        q, k, v = (t.view(b, n, HEADS, d // HEADS).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, n, d))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(Decoder):
    layer = GptLayer

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, [-1]] if last else x)


# Not causal: the same with every token in sight.


class EncoderLayer(GptLayer):
    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=-1))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Encoder(Gpt):
    layer = EncoderLayer


# Rotary positions (halves) that each layer makes for itself, grouped keys by `enable_gqa`, RMS norms, gated MLP.


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class GroupedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, 2 * HEAD, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.before, self.after = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.frequencies: Tensor
        self.register_buffer("frequencies", 100.0 ** -(torch.arange(0, HEAD, 2) / HEAD), persistent=False)

    def attend(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        angles = torch.outer(torch.arange(n, device=x.device), self.frequencies).repeat(1, 2)
        q = rotate_halves(self.q(x).view(b, n, -1, HEAD).transpose(1, 2), angles.cos(), angles.sin())
        k = rotate_halves(self.k(x).view(b, n, -1, HEAD).transpose(1, 2), angles.cos(), angles.sin())
        v = self.v(x).view(b, n, -1, HEAD).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(b, n, -1))

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attend(self.before(x))
        normed = self.after(h)
        return h + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Grouped(Decoder):
    layer = GroupedLayer


# Rotary positions by complex numbers from a table, keys repeated, an additive mask of minus infinity, in float.


class ComplexLayer(GroupedLayer):
    def attend(self, x: Tensor, turns: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        b, n, _ = x.shape

        def turned(t: Tensor) -> Tensor:
            pairs = torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turns.view(1, n, 1, HEAD // 2)).flatten(3).type_as(t)

        q, k = turned(self.q(x).view(b, n, HEADS, HEAD)), turned(self.k(x).view(b, n, 2, HEAD))
        k, v = (t.repeat_interleave(2, dim=2) for t in (k, self.v(x).view(b, n, 2, HEAD)))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(HEAD)
        scores = F.softmax((scores + mask).float(), dim=-1).type_as(q)
        return self.o(torch.matmul(scores, v).transpose(1, 2).contiguous().view(b, n, -1))

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        h = x + self.attend(self.before(x), turns, mask)
        normed = self.after(h)
        return h + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Complex(Decoder):
    layer = ComplexLayer

    def __init__(self) -> None:
        super().__init__()
        frequencies = 100.0 ** -(torch.arange(0, HEAD, 2) / HEAD)
        angles = torch.outer(torch.arange(LONGEST), frequencies)
        self.turns: Tensor
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        x = self.embed(ids)
        mask = torch.triu(torch.full((n, n), float("-inf"), device=ids.device), diagonal=1)
        for layer in self.layers:
            x = layer(x, self.turns[:n], mask)
        return self.head(x)


# Post-norm, sinusoidal positions from a buffer, one projection in chunks, a boolean triangle that fills with -inf.


class PostNormLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm_1, self.norm_2, self.mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), mlp()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.mT * HEAD**-0.5
        hidden = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        weights = self.dropout(scores.masked_fill(hidden, float("-inf")).softmax(dim=-1))
        x = self.norm_1(x + self.dropout(self.o((weights @ v).transpose(1, 2).flatten(2))))
        return self.norm_2(x + self.mlp(x))


class PostNorm(Decoder):
    layer = PostNormLayer

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()
        angles = torch.arange(LONGEST)[:, None] * 100.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH)
        self.waves: Tensor
        self.register_buffer("waves", torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[None])

    def entries(self) -> list[nn.Module]:  # the stream is what is summed up, before the norm
        return [self.layers[0], *(layer.get_submodule("norm_2") for layer in self.layers)]

    def tail(self, x: Tensor) -> Tensor:
        return self.out(self.layers[-1].get_submodule("norm_2")(x))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * math.sqrt(WIDTH) + self.waves[:, : ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# A lower triangle kept as a buffer of each layer and sliced by length; queries, keys and values by unbind.


class TriangleLayer(GptLayer):
    def __init__(self) -> None:
        super().__init__()
        self.triangle: Tensor
        self.register_buffer("triangle", torch.tril(torch.ones(LONGEST, LONGEST)).view(1, 1, LONGEST, LONGEST))

    def attend(self, x: Tensor) -> Tensor:
        b, n, d = x.size()
        q, k, v = self.c_attn(x).reshape(b, n, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.triangle[:, :, :n, :n] == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, n, d))


class CausalBuffer(Gpt):
    layer = TriangleLayer


# (N, B, d): batch and heads are one axis for `bmm`, the triangle comes from `where`.


class SequenceFirstLayer(GptLayer):
    def attend(self, x: Tensor) -> Tensor:
        n, b, d = x.shape
        q, k, v = self.c_attn(x).view(n, b * HEADS, 3 * HEAD).transpose(0, 1).split(HEAD, dim=-1)
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(HEAD)
        at = torch.arange(n, device=x.device)
        scores = torch.where(at[None, :] <= at[:, None], scores, torch.finfo(scores.dtype).min)
        y = torch.bmm(scores.softmax(-1), v)
        return self.c_proj(y.transpose(0, 1).contiguous().view(n, b, d))


class SequenceFirst(Gpt):
    layer = SequenceFirstLayer

    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        """(B, N) to (N, B, vocabulary)."""
        x = self.embed(ids.t()) + self.places(torch.arange(ids.size(1), device=ids.device))[:, None]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# A mask that is added before the scale, with a bound under what it hides.


class BoundedLayer(GptLayer):
    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=-1))
        low, at = torch.finfo(x.dtype).min, torch.arange(x.shape[1], device=x.device)
        mask = torch.zeros(x.shape[1], x.shape[1], device=x.device).masked_fill(at[None, :] > at[:, None], low)
        scores = torch.max(q @ k.transpose(-2, -1) + mask, torch.tensor(low, device=x.device)) / math.sqrt(HEAD)
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Bounded(Gpt):
    layer = BoundedLayer


# (T, d): one sequence without a batch axis, from ids (T,); attention over (heads, T, dim).


class PackedLayer(GptLayer):
    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).view(-1, 3, HEADS, HEAD).permute(1, 2, 0, 3)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1))


class Packed(Gpt):
    layer = PackedLayer

    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        x = self.embed(ids) + self.places.weight[: len(ids)]
        for layer in self.layers:
            x = layer(x)
        return self.head(x[-1] if last else x)


# Alibi: a slope for each head times the distance, with the causal mask, as one additive mask.


class AlibiLayer(GptLayer):
    def attend(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (t.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=-1))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        x = x + self.attend(self.ln_1(x), bias)
        return x + self.mlp(self.ln_2(x))


class Alibi(Decoder):
    layer = AlibiLayer

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        at = torch.arange(ids.shape[1], device=ids.device)
        slopes = 2.0 ** (-torch.arange(1, HEADS + 1, device=ids.device))
        distance = at[None, :] - at[:, None]
        bias = slopes[:, None, None] * distance[None]
        bias = bias.masked_fill(distance > 0, float("-inf"))
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(x)


# Attention and MLP side by side, rotary positions by pairs, a mask from arange that is handed down.


class ParallelLayer(GptLayer):
    def attend(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:  # type: ignore[override]
        def turned(t: Tensor) -> Tensor:
            even, odd = t[..., ::2], t[..., 1::2]
            cos, sin = turns
            return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)

        q, k, v = (t.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for t in self.c_attn(x).split(WIDTH, -1))
        y = F.scaled_dot_product_attention(turned(q), turned(k), v, attn_mask=mask, scale=0.25)
        return self.c_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:  # type: ignore[override]
        normed = self.ln_1(x)
        return self.attend(normed, turns, mask) + self.mlp(normed) + x


class Parallel(Decoder):
    layer = ParallelLayer

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        at = torch.arange(ids.shape[1], device=ids.device)
        mask = (at.unsqueeze(0) <= at.unsqueeze(1)).view(1, 1, len(at), len(at))
        angles = at[:, None] * 100.0 ** -(torch.arange(0, HEAD, 2, device=ids.device) / HEAD)
        for layer in self.layers:
            x = layer(x, (angles.cos(), angles.sin()), mask)
        return self.head(x)


# A residual stream that each layer scales and shifts, channel by channel.


class ScaledResidualLayer(GptLayer):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(1 + 0.2 * torch.randn(WIDTH) for _ in range(4))
        self.shifts = nn.ParameterList(0.2 * torch.randn(WIDTH) for _ in range(4))

    def scaled(self, x: Tensor, which: int) -> Tensor:
        return (x + self.shifts[which]) * self.scales[which]

    def forward(self, x: Tensor) -> Tensor:
        x = self.scaled(self.attend(self.ln_1(x)), 0) + self.scaled(x, 1)
        return self.scaled(self.mlp(self.ln_2(x)), 2) + self.scaled(x, 3)


class ScaledResidual(Gpt):
    layer = ScaledResidualLayer


# Residual sums in one operation with their scales: x + f(x) * scale, and 0.7 x + 0.3 f(x).


class FusedSumsLayer(GptLayer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + 0.2 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.addcmul(x, self.attend(self.ln_1(x)), self.scale)
        return torch.lerp(x, self.mlp(self.ln_2(x)), 0.3)


class FusedSums(Gpt):
    layer = FusedSumsLayer


# Products written as einsum, over (B, N, heads, dim); the mask is multiplied in as a large negative number.


class EinsumLayer(GptLayer):
    def attend(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q, k, v = (t.unflatten(-1, (HEADS, HEAD)) for t in self.c_attn(x).chunk(3, dim=-1))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * HEAD**-0.5
        hidden = 1.0 - torch.tril(torch.ones(n, n, device=x.device))
        weights = torch.softmax(scores + hidden * -1e9, dim=-1)
        return self.c_proj(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))


class Einsum(Gpt):
    layer = EinsumLayer


# torch's own layers under a causal mask; torch's own attention, sequence first, as it is by default.


class TorchLayers(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True, norm_first=True) for _ in range(DEPTH)
        )

    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        n = ids.size(1)
        x = self.embed(ids) + self.places(torch.arange(n, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(n, device=ids.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


class TorchAttentionLayer(GptLayer):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:  # type: ignore[override]
        y = self.ln_1(x)
        x = x + self.attention(y, y, y, attn_mask=hidden)[0]
        return x + self.mlp(self.ln_2(x))


class TorchAttention(Gpt):
    layer = TorchAttentionLayer

    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        n = ids.size(1)
        x = (self.embed(ids) + self.places(torch.arange(n, device=ids.device))).transpose(0, 1)
        hidden = ~torch.tril(torch.ones(n, n, dtype=torch.bool, device=ids.device))
        for layer in self.layers:
            x = layer(x, hidden)
        return self.head(x)


DECODERS: dict[str, type[Any]] = {
    c.__name__.lower(): c
    for c in (
        Gpt,
        Grouped,
        Complex,
        PostNorm,
        CausalBuffer,
        SequenceFirst,
        Bounded,
        Packed,
        Alibi,
        Parallel,
        ScaledResidual,
        FusedSums,
        Einsum,
        TorchLayers,
        TorchAttention,
    )
}


def build(name: str | type[Any]) -> Any:
    """A decoder with random weights, sharp enough that attention prefers some tokens to others."""
    torch.manual_seed(0)
    model = (DECODERS[name] if isinstance(name, str) else name)()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
    return model.eval()


def ids_for(name: str, length: int) -> Tensor:
    """(1, length) int64, or (length,) for the packed decoder."""
    ids = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length))
    return ids if name == "packed" else ids[None]
