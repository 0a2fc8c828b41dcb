"""What vLLM tells attention of a step (lengths, places in the cache), for layers whose caches lack tokens.

Between two drops lies a segment of layers. Each has an attention backend of its own, a subclass of vLLM's, so that the
runner builds metadata for it with a builder of its own: sequences are shorter there by what was dropped, and new keys
go into the slots behind those that are left. After a selection, `replan` builds the metadata of the next segment anew,
for the rows that stay. Nothing of vLLM is changed, but which backend class a layer names.

A layer that keeps a state and no keys is told the same in every segment, but in a step that drops: such layers have one
backend, whatever their segment, and the runner builds for them once for each group of caches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from uniprefill_fx.vllm.steps import Steps, current

LOST_FIELDS = ("_num_computed_tokens_cache", "_num_computed_tokens_cpu", "_token_to_req_indices_cache", "positions")
"""Fields of `CommonAttentionMetadata` that are derived of others, or None at will."""


@dataclass
class Build:
    """How the metadata of a layer was built in this step."""

    builder: Any
    common: Any
    kwargs: dict[str, Any]


builds: dict[str, Build] = {}  # by layer


class SegmentBuilder:
    """Before vLLM's own builder: `segment` is how many drops lie before its layers; of states, 0."""

    segment = 0
    supports_update_block_table = False  # its slots are not the runner's

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, *args, **kwargs)  # type: ignore[call-arg]
        self.layer_names = layer_names  # which not every builder keeps: not vLLM 0.24's of linear attention

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        steps, common = current(), common_attn_metadata
        if steps is None:
            return super().build(common_prefix_len, common, *args, **kwargs)  # type: ignore[misc]
        for name in self.layer_names:
            builds[name] = Build(self, common, dict(kwargs))
        places = shifted(self, common, steps) if _by_slots(self) else None
        whole = places is not None and not any(places.lost[self.segment - 1])
        # A graph is captured of steps with one token a request only; what it reads are each segment's own buffers.
        shares = whole and common.max_query_len > 1 and not args and not kwargs
        if shares and (found := _made_by_its_like(self, common)) is not None:
            return found
        made = super().build(  # type: ignore[misc]
            common_prefix_len if places is None else 0,
            common if places is None else places.common_of(self.segment),
            *args,
            **kwargs,
        )
        if shares:
            _made.append((self, common, made))
        return made

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def replan(self, build: Build, steps: Steps, segment: int, ends: Sequence[int]) -> Any:
        """The metadata for kept rows, whose requests end at `ends` (from 0 on)."""
        common = packed(self, build.common, steps, segment, ends)
        return super().build(0, common, **build.kwargs)  # type: ignore[misc]


_made: list[tuple[Any, Any, Any]] = []  # builder, `common`, metadata; of segments that lack nothing, of one `common`


def _made_by_its_like(builder: Any, common: Any) -> Any:
    """The metadata that another segment's builder made of the same `common`, if this one would make the same."""
    if _made and _made[0][1] is not common:
        _made.clear()
    return next((made for other, _, made in _made if _alike(builder, other)), None)


def _alike(one: Any, other: Any) -> bool:
    """Whether two builders are of one class of vLLM's, and nothing that they know of their layers differs."""
    own, others = vars(one), vars(other)
    if type(one).__bases__ != type(other).__bases__:
        return False
    for name in own.keys() | others.keys():
        a, b = own.get(name, _absent), others.get(name, _absent)
        if a is b or name in _NOT_COMPARED:
            continue
        if isinstance(a, Tensor) and isinstance(b, Tensor):  # scratch
            if a.shape != b.shape or a.dtype != b.dtype:
                return False
        elif type(a) is not type(b) or (a == b) is not True:
            return False
    return True


_absent, _NOT_COMPARED = object(), frozenset({"layer_names", "_uniprefill_shifted"})


def _by_slots(builder: Any) -> bool:
    """Whether a layer keeps a key for each token, and not a state for each request."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    return isinstance(builder.kv_cache_spec, AttentionSpec)


def _lost(steps: Steps, common: Any, segments: Sequence[int]) -> list[list[int]]:
    """By segment and request of a step, how many tokens the caches lack; of padded requests none."""
    steps.ordered()
    names = steps.step.order if steps.step is not None else []
    return [(steps.lost(names, segment) + [0] * common.num_reqs)[: common.num_reqs] for segment in segments]


class Shifted:
    """Lengths and slots of all segments in the steps that drop nothing, computed at once.

    The tensors are rows of buffers that stay where they are: a captured CUDA graph reads them there.
    """

    def __init__(self, builder: Any, common: Any, segments: int) -> None:
        config = builder.vllm_config
        graphs = config.compilation_config.max_cudagraph_capture_size or 0
        requests = max(config.scheduler_config.max_num_seqs, graphs, common.num_reqs)
        tokens = max(config.scheduler_config.max_num_batched_tokens, graphs, len(common.slot_mapping))
        self.block_size = builder.kv_cache_spec.block_size
        self.seq_lens = common.seq_lens.new_zeros(segments, requests)
        self.slots = common.slot_mapping.new_zeros(segments, tokens)
        self.common: Any = None
        self.lost: list[list[int]] = []
        self.less = self.seq_lens[:, :0]
        self.changes: list[dict[str, Any]] = []

    def common_of(self, segment: int) -> Any:
        """`common` for a segment: sequences as long as its caches are, and slots to match."""
        requests, tokens = self.common.num_reqs, len(self.common.slot_mapping)
        changes = {"seq_lens": self.seq_lens[segment - 1, :requests], "slot_mapping": self.slots[segment - 1, :tokens]}
        return self.common.replace(**changes, **(self.changes[segment - 1] if self.changes else {}))

    def compute(self, common: Any, steps: Steps) -> None:
        """Take up the next step."""
        self.common, self.changes = common, []
        segments, requests, slots = len(self.seq_lens), common.num_reqs, common.slot_mapping
        lost = _lost(steps, common, range(1, segments + 1))
        if lost != self.lost:
            less = torch.tensor(lost, dtype=self.seq_lens.dtype)
            self.lost, self.less = lost, less.to(slots.device, non_blocking=True)
        seq_lens = self.seq_lens[:, :requests]
        torch.sub(common.seq_lens, self.less, out=seq_lens)
        self.slots[:, : len(slots)] = slots
        rows = int(common.query_start_loc_cpu[requests])
        if any(map(any, lost)):
            starts = common.query_start_loc[: requests + 1]
            one = common.max_query_len == 1  # then the first `rows` requests have a token each
            self.slots[:, :rows] = slots_of(common, self.block_size, starts, seq_lens, rows, one)
            self.changes = _changes(common, lost)


_latest: list[Shifted] = []


def shifted(builder: Any, common: Any, steps: Steps) -> Shifted:
    """Lengths and slots for the segment of a builder, in a step that drops nothing.

    A runner hands one `common` to the builders of a group of caches in turn, in the same order at each step: the first
    of them computes for all, in buffers of its own.
    """
    if not _latest or _latest[0].common is not common:
        held = vars(builder)
        if "_uniprefill_shifted" not in held:
            held["_uniprefill_shifted"] = Shifted(builder, common, steps.drops)
        _latest[:] = [held["_uniprefill_shifted"]]
        _latest[0].compute(common, steps)
    return _latest[0]


def packed(builder: Any, common: Any, steps: Steps, segment: int, ends: Sequence[int]) -> Any:
    """`common` for the kept rows of a step in which tokens were dropped."""
    (lost,) = _lost(steps, common, [segment])
    device = common.seq_lens.device
    padded = [*ends, *[ends[-1]] * (common.num_reqs - len(ends))]
    starts_cpu = torch.tensor([0, *padded], dtype=common.query_start_loc_cpu.dtype)
    starts = starts_cpu.to(device, non_blocking=True)
    seq_lens = common.seq_lens
    if any(lost):
        seq_lens = seq_lens - torch.tensor(lost, dtype=seq_lens.dtype).to(device, non_blocking=True)
    slots = common.slot_mapping[: ends[-1]]
    if _by_slots(builder):
        slots = slots_of(common, builder.kv_cache_spec.block_size, starts, seq_lens, ends[-1]).to(slots.dtype)
    return common.replace(
        **_changes(common, [lost])[0],
        query_start_loc=starts,
        query_start_loc_cpu=starts_cpu,
        seq_lens=seq_lens,
        slot_mapping=slots,
        num_actual_tokens=ends[-1],
        max_query_len=max(b - a for a, b in zip([0, *ends], ends, strict=False)),
    )


def _changes(common: Any, lost: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """By segment, further fields that follow from shorter sequences; fields differ between versions of vLLM."""
    known = {f.name for f in fields(common)}
    changes: list[dict[str, Any]] = [{name: None for name in LOST_FIELDS if name in known} for _ in lost]
    for name in ("_seq_lens_cpu", "seq_lens_cpu_upper_bound"):
        held = getattr(common, name, None) if name in known else None
        if held is not None:
            shorter = held - torch.tensor(lost, dtype=held.dtype)
            longest = shorter.amax(1).tolist()
            for i, own in enumerate(changes):
                own[name] = shorter[i]
                if name == "seq_lens_cpu_upper_bound" and any(lost[i]):
                    own["max_seq_len"] = max(1, longest[i])
    return changes


def slots_of(
    common: Any, block_size: int, starts: Tensor, seq_lens: Tensor, rows: int, one_each: bool = False
) -> Tensor:
    """(..., rows) int64: where in the paged cache the rows of a step go, which are the last of their sequences.

    starts: (requests + 1,) first row of each request. seq_lens: (..., requests). one_each: the first `rows` requests
    have a row each.
    """
    row = torch.arange(rows, device=starts.device)
    if one_each:
        request, position = row, seq_lens[..., :rows].long() - 1
    else:
        lengths = (starts[1:] - starts[:-1]).long()
        request = torch.repeat_interleave(torch.arange(len(lengths), device=starts.device), lengths, output_size=rows)
        position = (seq_lens.long() - lengths - starts[:-1].long())[..., request] + row
    table: Tensor = common.block_table_tensor
    return table[request, position // block_size].long() * block_size + position % block_size


_classes: dict[tuple[type, int], type] = {}


def backend_of_segment(base: type, segment: int) -> type:
    """A subclass of an attention backend whose builder is a `SegmentBuilder`, for layers behind so many drops."""
    if (base, segment) not in _classes:
        own: Callable[[], type] = base.get_builder_cls  # type: ignore[attr-defined]
        builder = type(
            f"Segment{segment}{own().__name__}", (SegmentBuilder, own()), {"segment": segment, "__module__": __name__}
        )
        name = f"Segment{segment}{base.__name__}"
        made = type(
            name,
            (base,),
            {"get_builder_cls": staticmethod(lambda: builder), "__module__": __name__, "__qualname__": name},
        )
        setattr(sys.modules[__name__], name, made)  # vLLM groups layers by this path
        _classes[base, segment] = made
    return _classes[base, segment]


def keeps_state(layer: Any) -> bool:
    """Whether a layer keeps a state for each request, and no keys."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    return isinstance(layer, MambaBase)


def install(layers: Mapping[str, Any], segment_of: Mapping[str, int]) -> None:
    """Give layers, by name, the backends of their segments; before the runner asks for them."""
    for name, segment in segment_of.items():
        layer = layers[name]
        made = backend_of_segment(layer.get_attn_backend(), 0 if keeps_state(layer) else segment)
        if hasattr(layer, "attn_backend"):
            layer.attn_backend = made
        else:
            layer.get_attn_backend = lambda made=made: made
