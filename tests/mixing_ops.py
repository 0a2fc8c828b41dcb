"""Operations inside of a layer: those that mix tokens, and those that compute each token's row from that row alone.

Each is a function (x, t) of a residual stream x whose axis t holds the tokens; the last other axis holds the channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Op = Callable[[Tensor, int], Tensor]


# -- operators that the package has never heard of -------------------------------------------------------------------


@torch.library.custom_op("rowwise_test::average", mutates_args=())
def average(x: Tensor, dim: int) -> Tensor:
    """Each row is the mean of all tokens."""
    return x.mean(dim, keepdim=True).expand_as(x).clone()


@average.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("rowwise_test::far_apart", mutates_args=())
def far_apart(x: Tensor, dim: int) -> Tensor:
    """Mixes rows that are 100 apart, and leaves others alone."""
    return x + torch.roll(x, 100, dim) if x.shape[dim] > 100 else x.clone()


@far_apart.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("rowwise_test::scale", mutates_args=())
def scale(x: Tensor, factor: float) -> Tensor:
    return x * factor


@scale.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("rowwise_test::scale_into", mutates_args=("out",))
def scale_into(x: Tensor, out: Tensor, factors: list[float], other: Tensor | None = None) -> None:
    """Writes row by row into its argument, and returns nothing."""
    out.copy_(x * factors[0] if other is None else x * factors[0] + other)


@torch.library.custom_op("rowwise_test::mean_into", mutates_args=("out",))
def mean_into(x: Tensor, out: Tensor, dim: int) -> None:
    out.copy_(x.mean(dim, keepdim=True).expand_as(x))


@torch.library.custom_op("rowwise_test::fused_add_norm", mutates_args=("x", "residual"))
def fused_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """As vLLM's fused_add_rms_norm: the sum goes to `residual`, its norm over the last axis to `x`."""
    residual.add_(x)
    x.copy_(F.rms_norm(residual, (x.shape[-1],), weight))


@torch.library.custom_op("rowwise_test::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


@noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


# -- helpers ---------------------------------------------------------------------------------------------------------


def channels(x: Tensor, t: int) -> int:
    """The axis of channels."""
    return x.ndim - 1 if t != x.ndim - 1 else x.ndim - 2


def tokens_last(f: Callable[[Tensor], Tensor]) -> Op:
    """`f` over (batch, channels, tokens)."""

    def op(x: Tensor, t: int) -> Tensor:
        c = channels(x, t)
        if x.ndim == 2:
            y = x if c == 0 else x.transpose(0, 1)
            y = f(y[None])[0]
            return y if c == 0 else y.transpose(0, 1)
        b = 3 - t - c
        inverse = [(b, c, t).index(d) for d in range(3)]
        return f(x.permute(b, c, t)).permute(inverse)

    return op


def channels_last(f: Callable[[Tensor], Tensor]) -> Op:
    """`f` over (batch, tokens, channels)."""
    return tokens_last(lambda y: f(y.transpose(1, 2)).transpose(1, 2))


def count(x: Tensor, t: int) -> int:
    return x.shape[t]


def reversed_rows(x: Tensor, t: int) -> Tensor:
    return torch.arange(count(x, t) - 1, -1, -1, device=x.device)


def shifted(y: Tensor) -> Tensor:
    return F.pad(y, (1, 0))[..., :-1]


def shifted_by(rows: int, times: int = 1) -> Op:
    """Rows move down, and what has none above it is zero."""

    def op(y: Tensor) -> Tensor:
        for _ in range(times):
            y = F.pad(y, (rows, 0))[..., : y.shape[-1]]
        return y

    return tokens_last(op)


def far_ahead(y: Tensor) -> Tensor:
    """A dilated convolution that sees the row 40 further on."""
    return F.conv1d(y, y.new_ones(y.shape[1], 1, 3), padding=40, dilation=40, groups=y.shape[1]).tanh()


def written_to(x: Tensor, t: int) -> Tensor:
    out = torch.empty_like(x)
    mean_into(x, out, t)
    return out


def scaled_into(x: Tensor, t: int) -> Tensor:
    out = torch.empty_like(x)
    scale_into(x, out, [0.5])
    scale_into(x, out, [0.25], out.clone())
    return out


def out_form(x: Tensor, t: int) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)  # Dynamo breaks the graph at any other
    torch.mul(x, 0.3, out=out)
    return out.sin_()


def fused(y: Tensor) -> Tensor:
    residual, x = y * 0.5, y.tanh()
    fused_add_norm(x, residual, torch.ones(y.shape[-1]))
    return x + residual


def experts(y: Tensor, sorting: bool) -> Tensor:
    """Two of four experts a token: rows are sorted by expert, scaled, and put back."""
    b, n, d = y.shape
    flat = y.reshape(-1, d)
    weights, chosen = flat[:, :4].softmax(-1).topk(2, dim=-1)
    scales = torch.linspace(0.5, 2, 4 * d, device=y.device).view(4, d)
    if not sorting:
        return (flat[:, None] * scales[chosen] * weights[..., None]).sum(1).view(b, n, d)
    order = torch.argsort(chosen.reshape(-1))
    rows = flat[order // 2] * scales[chosen.reshape(-1)[order]]
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=y.device)
    return (rows[back].view(-1, 2, d) * weights[..., None]).sum(1).view(b, n, d)


def first_come(y: Tensor) -> Tensor:
    """Experts with room for five rows: what comes later is dropped, so that earlier tokens matter to later ones."""
    b, n, d = y.shape
    flat = y.reshape(-1, d)
    chosen = flat[:, :4].argmax(-1)
    order = torch.argsort(chosen, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=y.device)
    return (flat * (place < 5)[:, None]).view(b, n, d)


def counts(y: Tensor) -> Tensor:
    """For each token, how many are of its group; of d groups, so that a group has few."""
    group = y.argmax(-1)
    return F.one_hot(group, y.shape[-1]).sum(1).gather(1, group)[..., None]


def into_channels(y: Tensor) -> Tensor:
    out = torch.zeros_like(y)
    out[..., ::2] = y[..., 1::2]
    out[..., 1] += y[..., 0]
    return out


MIXING: dict[str, Op] = {
    "normalize": lambda x, t: F.normalize(x, dim=t),
    "vector_norm": lambda x, t: x / torch.linalg.vector_norm(x, dim=t, keepdim=True),
    "einsum": channels_last(lambda y: y @ torch.einsum("bnd,bne->bde", y, y) * 1e-3),
    "fft": lambda x, t: torch.fft.fft(x, dim=t).real * 0.01,
    "group_norm": tokens_last(lambda y: F.group_norm(y, 4)),
    "instance_norm": tokens_last(lambda y: F.instance_norm(y)),
    "batch_norm": tokens_last(lambda y: F.batch_norm(y, None, None, training=True)),
    "sort": lambda x, t: x.sort(dim=t).values,
    "topk": lambda x, t: x.topk(4, dim=t).values.sum(t, keepdim=True) * x,
    "avg_pool1d": tokens_last(lambda y: F.avg_pool1d(y, 3, 1, 1)),
    "pad and slice": tokens_last(shifted),
    "cat and slice": tokens_last(lambda y: torch.cat((torch.zeros_like(y[..., :1]), y), -1)[..., :-1]),
    "pad by 30": shifted_by(30),
    "pad by 20 three times": shifted_by(20, 3),
    "pad and cut": tokens_last(lambda y: F.pad(y, (64, -64))),
    "cat of 64 and slice": tokens_last(
        lambda y: torch.cat((torch.zeros(y.shape[0], y.shape[1], 64), y), -1)[..., :-64]
    ),
    "far ahead": tokens_last(far_ahead),
    "unfold": tokens_last(lambda y: F.pad(y, (2, 0)).unfold(-1, 3, 1).sum(-1)),
    "flip by index": lambda x, t: x.index_select(t, reversed_rows(x, t)),
    "flip by getitem": lambda x, t: x[(slice(None),) * t + (reversed_rows(x, t),)],
    "gather": lambda x, t: x.gather(t, x.argsort(t)),
    "flat softmax": channels_last(lambda y: y.flatten(1).softmax(-1).view_as(y) * 100),
    "custom average": average,
    "custom far apart": far_apart,
    "custom mean into": written_to,
    "cumsum": lambda x, t: x.cumsum(t) * 0.01,
    "roll": lambda x, t: x.roll(1, t),
    "roll by 64": lambda x, t: x.roll(64, t),
    "flip": lambda x, t: x.flip(t),
    "softmax": lambda x, t: x.softmax(t) * 100,
    "mean": lambda x, t: x - x.mean(t, keepdim=True),
    "max": lambda x, t: x.amax(t, keepdim=True) * x,
    "std": lambda x, t: x / x.std(t, keepdim=True),
    "median": lambda x, t: x - x.median(t, keepdim=True).values,
    "logcumsumexp": lambda x, t: x.logcumsumexp(t),
    "linear attention": channels_last(lambda y: y @ (y.mT @ y) * 1e-3),
    "symmetric convolution": tokens_last(
        lambda y: F.conv1d(y, y.new_ones(y.shape[1], 1, 3), padding=1, groups=y.shape[1])
    ),
    "first row": lambda x, t: x - x.narrow(t, 0, 1),
    "last row": lambda x, t: x - x.narrow(t, -1, 1),
    "rank": lambda x, t: x.argsort(t).argsort(t).float() * 0.01,
    "length": lambda x, t: x * count(x, t) * 0.01,
    "row number": lambda x, t: torch.ones_like(x).cumsum(t) * 0.01,
    "noise": lambda x, t: noise(x),
    "capacity": channels_last(first_come),
    "room for 40": channels_last(lambda y: y * (counts(y) < 40)),
    "room for 40, in floats": channels_last(lambda y: y * (counts(y).to(y.dtype) * 0.5 < 20.0)),
    "room for a buffer": channels_last(lambda y: y * (counts(y) < torch.full((1,), 40))),
    "room in steps": channels_last(lambda y: y * (counts(y) / 40).floor()),
    "full or not": channels_last(lambda y: y * (counts(y) / 40).long()),
    "any far out": lambda x, t: torch.where((x > 1e4).any(), x, x.neg()),
    "views share": lambda x, t: torch.ops.aten.slice_scatter(x, x.narrow(t, 0, 7) * 2, t, 1, 8),
    "circular pad": tokens_last(lambda y: F.pad(y, (1, 0), mode="circular")[..., :-1]),
    "difference": tokens_last(lambda y: torch.diff(y, prepend=y[..., :1])),
    "covariance": lambda x, t: x * x.var().sqrt(),
}
ROWWISE: dict[str, Op] = {
    "custom scale": lambda x, t: scale(x, 0.7),
    "custom scale into": scaled_into,
    "out": out_form,
    "fused add norm": channels_last(fused),
    "layer_norm": channels_last(lambda y: F.layer_norm(y, (y.shape[-1],))),
    "rms_norm": channels_last(lambda y: F.rms_norm(y, (y.shape[-1],))),
    "group_norm of rows": channels_last(lambda y: F.group_norm(y.reshape(-1, y.shape[-1]), 4).view_as(y)),
    "normalize": lambda x, t: F.normalize(x, dim=channels(x, t)),
    "softmax": lambda x, t: x.softmax(channels(x, t)),
    "sort": lambda x, t: x.sort(dim=channels(x, t)).values,
    "topk": channels_last(lambda y: y.topk(4, dim=-1).values.sum(-1, keepdim=True) * y),
    "cumsum": lambda x, t: x.cumsum(channels(x, t)) * 0.1,
    "roll": lambda x, t: x.roll(3, channels(x, t)),
    "flip": lambda x, t: x.flip(channels(x, t)),
    "fft": lambda x, t: torch.fft.fft(x, dim=channels(x, t)).real * 0.1,
    "einsum": channels_last(lambda y: torch.einsum("bnd,bne->bnd", y, y) * 0.1),
    "flat linear": channels_last(lambda y: F.linear(y.reshape(-1, y.shape[-1]), torch.eye(y.shape[-1])).view_as(y)),
    "glu": channels_last(lambda y: F.glu(torch.cat((y, y), -1))),
    "swap halves": channels_last(lambda y: torch.cat(y.chunk(2, -1)[::-1], -1)),
    "heads": channels_last(lambda y: y.unflatten(-1, (4, -1)).transpose(1, 2).tanh().transpose(1, 2).flatten(2)),
    "gather": channels_last(lambda y: y.gather(-1, y.argsort(-1))),
    "one_hot": channels_last(lambda y: F.one_hot(y.argmax(-1), y.shape[-1]).to(y.dtype)),
    "experts": channels_last(lambda y: experts(y, False)),
    "sorted experts": channels_last(lambda y: experts(y, True)),
    "in place": lambda x, t: x.clone().mul_(0.5).add_(x).clamp_(-2, 2),
    "into channels": channels_last(into_channels),
    "avg_pool1d": channels_last(lambda y: F.avg_pool1d(y, 3, 1, 1)),
    "interleaved": channels_last(lambda y: y.repeat_interleave(2, -1).unflatten(-1, (-1, 2)).sum(-1)),
    "dropout": lambda x, t: F.dropout(x, 0.5, training=False),
    "where": lambda x, t: torch.where(x > 0, x, x.neg() * 0.1),
    "complex": channels_last(
        lambda y: torch.view_as_real(torch.view_as_complex(y.contiguous().unflatten(-1, (-1, 2))) * 1j).flatten(-2)
    ),
    "norm of channels": lambda x, t: x / (1 + torch.linalg.vector_norm(x, dim=channels(x, t), keepdim=True)),
}
