"""An independent reference for decoders in plain PyTorch: the model itself, which cannot see what was dropped.

It runs eagerly over all tokens. A torch function mode stands in for attention, fused or spelled out: the i-th attention
is that of layer i, unless told otherwise; keys that an earlier drop took away are hidden from it, so that the remaining
rows are exact, and at a drop layer its weights are read and rows selected. Dropped rows end as what they were when they
entered the layer that dropped them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from eager_reference import DropSpec, Selection, fused_logits, select_rows
from torch import Tensor
from torch.overrides import TorchFunctionMode

SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)


@dataclass
class Expected:
    """What a run of the reference gave.

    Attributes:
        logits: as the model returns them, those of dropped tokens from their frozen states.
        kept: by drop layer, the original positions that remain after it. selections: the choices behind them.
        rows: by layer of the decoder, how many rows enter it.
    """

    logits: Tensor
    kept: dict[int, Tensor]
    selections: dict[int, Selection]
    rows: list[int]


class _Attention(TorchFunctionMode):
    """Counts attentions, hides dropped keys, and selects."""

    def __init__(self, tokens: int, spec: DropSpec | None, layers: Sequence[int]) -> None:
        super().__init__()
        self.tokens, self.spec, self.layers = tokens, spec, iter(layers)
        self.alive = torch.arange(tokens)
        self.selections: dict[int, Selection] = {}
        self.kept: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.fused(*args, **(kwargs or {}))
        if func in SOFTMAXES and args[0].shape[-2:] == (self.tokens, self.tokens):
            return self.weights(args[0])
        if func is F.multi_head_attention_forward:  # inside a function of torch, this mode is off
            with patch.multiple(F, scaled_dot_product_attention=self.fused, softmax=lambda x, dim: self.weights(x)):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def fused(self, *args: Any, **kwargs: Any) -> Tensor:
        scores, v = fused_logits(*args, **kwargs)
        return self.weights(scores) @ v

    def weights(self, scores: Tensor) -> Tensor:
        """Softmax of (..., tokens, tokens) logits without the dropped keys; each row sees itself."""
        gone = torch.ones(self.tokens, dtype=torch.bool)
        gone[self.alive] = False
        hidden = gone[None, :] & ~torch.eye(self.tokens, dtype=torch.bool)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        layer = next(self.layers)
        if self.spec is not None and layer in self.spec.drop_layers:
            queries = self.alive[-self.spec.last_n :]
            mass = weights.reshape(-1, self.tokens, self.tokens)[:, queries][:, :, self.alive].double().sum((0, 1))
            selection = select_rows(mass, self.spec, self.spec.amount(layer), self.tokens)
            self.alive = self.alive[selection.rows]
            self.selections[layer], self.kept[layer] = selection, self.alive
        return weights


_running: list[_Attention] = []


def alive() -> Tensor:
    """The positions that no drop has taken so far, in the run that is under way."""
    return _running[-1].alive


@torch.inference_mode()
def reference(model: Any, ids: Tensor, spec: DropSpec | None, layers: Sequence[int] | None = None) -> Expected:
    """Run a decoder of `plain_decoders`; without a spec it is the stock model, attention spelled out.

    `layers` are those that hold attention, where not all do.
    """
    streams: list[Tensor] = []  # what entered each layer, then what left the last one
    hooks = [entry.register_forward_pre_hook(lambda _, args: streams.append(args[0])) for entry in model.entries()]
    attention = _Attention(ids.numel(), spec, layers or range(len(model.layers)))
    _running.append(attention)
    try:
        with attention:
            logits = model(ids)
    finally:
        _running.pop()
        for hook in hooks:
            hook.remove()
    if spec is not None:
        axis = next(d for d, size in enumerate(streams[0].shape) if size == ids.numel())
        last = streams[-1].movedim(axis, 0).clone()
        before = torch.arange(ids.numel())
        for layer, kept in attention.kept.items():
            gone = before[~torch.isin(before, kept)]
            last[gone] = streams[layer].movedim(axis, 0)[gone]
            before = kept
        logits = model.tail(last.movedim(0, axis))
    held = [[len(kept) for at, kept in attention.kept.items() if at < layer] for layer in range(len(model.layers))]
    return Expected(
        logits, attention.kept, attention.selections, [lengths[-1] if lengths else ids.numel() for lengths in held]
    )
