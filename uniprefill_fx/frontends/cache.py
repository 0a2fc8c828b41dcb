"""Cache layers for transformers' `DynamicCache` that know which tokens they hold.

transformers sizes one mask from one layer and lays it out by original token index. After tokens are dropped the layers
hold different subsets of the tokens, so each of these layers stores `positions`, the original index of each of its
rows, and hands model code a view of all tokens seen (`uniprefill::logical_view`), which fits the mask. The passes
replace the attention that reads such a view by one that reads the rows and their positions. Eager code gets a view that
knows what it does not hold (`frontends.eager_view`); what another backend compiles gets the view itself: right when
nothing was dropped, an error otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from uniprefill_fx.frontends.eager_view import compact_view, warn_of_eager_reads
from uniprefill_fx.ops.cache import NEVER, holds_all, leave_later
from uniprefill_fx.torch_internals import mark_maybe_dynamic


def _copy(part: Tensor) -> Tensor:
    """In memory of its own, with the strides of its sizes: those of a single request would else be the whole's."""
    return part.clone(memory_format=torch.contiguous_format)


class CompactLayer(DynamicLayer):
    """A full-attention cache layer whose rows are a subset of the tokens seen.

    Attributes:
        keys, values: (batch, kv_heads, rows, head_dim).
        positions: (batch, rows) int64, ascending: the original index of each row, as a column of the prompts as they
            were given, left padding included. -1 marks padding: requests of a batch may keep different numbers of rows.
        timeline: (tokens seen, 0), a tensor without elements. Its length is the number of tokens seen; a size, unlike
            an int attribute, can be symbolic from the first trace.
        shared: whether later layers read the keys of this one. dropped_after: (batch, tokens seen) int64, only then:
            the decoder layer behind which each token was dropped, see `ops.cache`.
    """

    is_sliding = False
    shared = False

    def __init__(self) -> None:
        super().__init__()
        self.positions: Tensor | None = None
        self.timeline: Tensor | None = None
        self.dropped_after: Tensor | None = None

    def _window_rows(self) -> int | None:
        """How many of the latest rows stay after an update; None: all."""
        return None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens; returns those of all tokens seen, by original index."""
        before, new = self.get_seq_length(), key_states.shape[-2]
        # Contiguous, as rows are after every later `cat`: strides are guarded, and decode should be traced once.
        keys, values = key_states.contiguous(), value_states.contiguous()
        positions = torch.arange(before, before + new, device=key_states.device).repeat(key_states.shape[0], 1)
        if self.shared:
            self._note_dropped_after(positions)
        if self.keys is not None and self.values is not None and self.positions is not None:
            keys = torch.cat([self.keys, keys], dim=-2)
            values = torch.cat([self.values, values], dim=-2)
            positions = torch.cat([self.positions, positions], dim=-1)
        else:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.is_initialized = True
            positions = torch.ops.uniprefill.bind_positions(positions, keys, values)
        self.timeline = torch.empty(before + new, 0, device=key_states.device)
        rows = self._window_rows()
        self.keys, self.values, self.positions = keys, values, positions
        if rows is not None:
            self._keep_last(rows)
        if before == 0:
            return keys, values
        expected = before + new if rows is None else min(before, rows) + new
        eager = not torch.compiler.is_compiling()
        if eager and (not holds_all(positions, expected) or leave_later(self.dropped_after)):
            warn_of_eager_reads()
            self._mark_lengths()
            held = (positions, before + new, self.dropped_after)
            return compact_view(keys, *held), compact_view(values, *held)
        view = torch.ops.uniprefill.logical_view
        seen = (positions, before + new, expected, self.dropped_after)
        return view(keys, *seen), view(values, *seen)

    def _note_dropped_after(self, positions: Tensor) -> None:
        if self.dropped_after is None:
            self.dropped_after = torch.ops.uniprefill.dropped_after_layer(positions)
        else:
            self.dropped_after = torch.cat([self.dropped_after, torch.full_like(positions, NEVER)], dim=-1)

    def _keep_last(self, rows: int) -> None:
        assert self.keys is not None and self.values is not None and self.positions is not None
        # Copies, not views: a view would keep all rows alive, and its strides would fix the prompt length in a trace.
        self.keys, self.values = _copy(self.keys[:, :, -rows:]), _copy(self.values[:, :, -rows:])
        self.positions = _copy(self.positions[:, -rows:])

    def get_seq_length(self) -> int:
        """Tokens seen, dropped ones included."""
        return 0 if self.timeline is None else self.timeline.shape[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the keys that `update` returns: all tokens seen, from the first one."""
        return self.get_seq_length() + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the latest tokens: `-n` forgets n of them (a positive number is the length to keep, as upstream)."""
        seen = self.get_seq_length()
        keep = tokens_to_remove if tokens_to_remove > 0 else seen + tokens_to_remove
        if not self.is_initialized or keep >= seen:
            return
        assert self.keys is not None and self.values is not None
        assert self.positions is not None and self.timeline is not None
        own = (self.positions < keep).sum(-1, keepdim=True)  # padding comes first
        rows = int(own.max())
        if rows == int(own.min()):
            # Copies, as rows are after an update: a view brings its base along, which would be one more graph of a step
            self.keys, self.values = _copy(self.keys[:, :, :rows]), _copy(self.values[:, :, :rows])
            self.positions = _copy(self.positions[:, :rows])
        else:  # inside a prompt, requests hold different numbers of rows before the cut: padding takes up the slack
            source = torch.arange(rows, device=own.device) + (own - rows)
            padding, source = source < 0, source.clamp(min=0)
            self.positions = self.positions.gather(1, source).masked_fill(padding, -1)
            request = torch.arange(source.shape[0], device=own.device)[:, None]
            self.keys = self.keys.transpose(1, 2)[request, source].transpose(1, 2).contiguous()
            self.values = self.values.transpose(1, 2)[request, source].transpose(1, 2).contiguous()
        self.timeline = _copy(self.timeline[:keep])
        if self.dropped_after is not None:
            self.dropped_after = _copy(self.dropped_after[:, :keep])
        self._mark_lengths()

    def _mark_lengths(self) -> None:
        """Behind eager code: what it made has other tensors' marks no more, which would be one more graph of a step."""
        if torch.compiler.is_compiling():
            return
        grows = self._window_rows() is None  # else the number of rows stays what it is
        by_axis = ((self.keys, 2), (self.values, 2), (self.positions, 1), (self.timeline, 0), (self.dropped_after, 1))
        for tensor, axis in by_axis:
            if tensor is not None:
                axes = {0, axis} if grows or tensor is self.timeline else {0}
                mark_maybe_dynamic(tensor, [d for d in sorted(axes) if tensor.shape[d] > 1])

    def _per_request(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.positions is not None:
            self.positions = change(self.positions)
        if self.dropped_after is not None:
            self.dropped_after = change(self.dropped_after)
        if self.positions is not None and len(self.positions) == 1:
            # decode takes all rows of a single request for tokens
            assert self.keys is not None and self.values is not None
            padding = int((self.positions < 0).sum())
            self.keys, self.values = _copy(self.keys[:, :, padding:]), _copy(self.values[:, :, padding:])
            self.positions = _copy(self.positions[:, padding:])
        self._mark_lengths()

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._per_request(lambda positions: positions.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._per_request(lambda positions: positions[indices])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._per_request(lambda positions: positions.index_select(0, beam_idx.to(positions.device)))

    def offload(self) -> None:
        super().offload()
        if self.positions is not None:
            self.positions = self.positions.to("cpu", non_blocking=True)
        if self.dropped_after is not None:
            self.dropped_after = self.dropped_after.to("cpu", non_blocking=True)

    def prefetch(self) -> None:
        super().prefetch()
        if self.positions is not None:
            self.positions = self.positions.to(self.device, non_blocking=True)
        if self.dropped_after is not None:
            self.dropped_after = self.dropped_after.to(self.device, non_blocking=True)

    def reset(self) -> None:
        """Forget everything (the buffers grow again; there is nothing static to keep)."""
        self.keys = self.values = self.positions = self.timeline = self.dropped_after = None
        self.is_initialized = False


class CompactSlidingLayer(CompactLayer):
    """The same for a sliding window W: it keeps the last W - 1 rows; the window itself is applied by position.

    W - 1 rows by index hold every row inside the window by position, as positions ascend.
    """

    is_sliding = True

    def __init__(self, sliding_window: int, record_past: bool = False) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.record_past = record_past

    def activate_past_recording(self) -> None:
        """Keep all rows until the next `crop`, so that drafted tokens can be taken back."""
        self.record_past = True

    def _window_rows(self) -> int | None:
        return None if self.record_past else self.sliding_window - 1

    def get_max_length(self) -> int:
        return self.sliding_window

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0 and not self.record_past and self.get_seq_length() >= self.sliding_window:
            raise RuntimeError("call `activate_past_recording` before `crop`: the rows to go back to were not kept")
        super().crop(tokens_to_remove)
        if self.is_initialized:
            self._keep_last(self.sliding_window - 1)


class CompactHybridLayer(CompactLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[override, misc]
    """The same for layers that hold keys and values beside the states of an SSM or linear attention."""

    def __init__(self, number_of_states: int = 1) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self, number_of_states)
        self.positions = self.timeline = self.dropped_after = None

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        CompactLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        CompactLayer.crop(self, tokens_to_remove)


# Newer versions (5.24) have such a layer where a decoder layer keeps nothing; it always says that it is initialized.
NO_LAYER = getattr(cache_utils, "DummyLayer", None)


def holds_keys(cache: Any) -> bool:
    """Whether something was written to a cache of transformers'. Traced by Dynamo.

    Layers that hold states only have no such flag, and do not count.
    """
    layers = getattr(cache, "layers", ())
    return any(getattr(layer, "is_initialized", False) and type(layer) is not NO_LAYER for layer in layers)


ADOPTED: set[type] = {DynamicCache}  # and those of its subclasses that keep keys and values as it does


def adopt(cache: Any, shares: bool) -> None:
    """Give a still empty `DynamicCache` positioned layers; leave every other cache alone. Traced by Dynamo.

    `shares`: the model's later layers read the keys of the last layer of each kind in the cache.
    """
    if type(cache) not in ADOPTED or cache.offloading:
        return
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = CompactLayer
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and not layer.is_initialized:
            cache.layers[index] = CompactLayer()
        elif type(layer) is LinearAttentionAndFullAttentionLayer and not layer.is_initialized:
            cache.layers[index] = CompactHybridLayer(layer.number_of_states)
        elif type(layer) is DynamicSlidingWindowLayer and not layer.is_initialized:
            cache.layers[index] = CompactSlidingLayer(layer.sliding_window, layer.record_past)
    for kind in (CompactLayer, CompactSlidingLayer):
        of_kind = [layer for layer in cache.layers if type(layer) is kind]
        if shares and of_kind and not of_kind[-1].is_initialized:
            of_kind[-1].shared = True
