"""The record of a prefill: nothing is computed until somebody reads it, and nothing of it can be changed."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from eager_reference import DropSpec, EagerReference
from exactness import options_of
from test_batches import assert_kept, padded
from tiny import tiny_llama, token_ids
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import uniprefill_fx
from uniprefill_fx import LastCall
from uniprefill_fx.runtime import prefill
from uniprefill_fx.runtime.last_call import DroppedCall, Drops, record, watched


class Counting(TorchDispatchMode):
    """Counts the operations on tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def drops() -> Drops:
    """Two prompts of 5 and 3 tokens in 6 columns, padded on the left; layers 1 and 3 of five drop."""
    bounds = torch.tensor([[1, 6], [3, 6]])
    first = torch.tensor([[1, 2, 4, 5], [-1, -1, 3, 5]]), torch.tensor([[0, 4], [2, 4]])
    second = torch.tensor([[0, 2, 3], [-1, -1, 3]]), torch.tensor([[0, 3], [2, 3]])
    return Drops((1, 3), 5, bounds, (first, second))


def recorded(reason: Any = None) -> DroppedCall:
    return DroppedCall(drops(), reason, {"p": 0.5}, 6)


def test_what_is_read_is_what_ran() -> None:
    call = recorded()
    assert call.dropped and call.reason is None and call.changed == {"p": 0.5} and call.columns == 6
    assert call.tokens == 8 and call.token_bounds == ((1, 6), (3, 6))
    assert call.num_tokens == (8, 8, 6, 6, 4) and call.compute_fraction == 32 / 40
    assert {layer: kept.tolist() for layer, kept in call.kept_indices.items()} == {
        1: [1, 2, 4, 5, 3, 5],
        3: [1, 4, 5, 5],  # rows 0, 2 and 3 of the first prompt's four; row 3, the last one, of the second's two
    }
    assert call.cu_seqlens == {1: (0, 4, 6), 3: (0, 3, 4)}
    assert str(call) == repr(call) and "after layer 3: kept 3, 1" in str(call)


def test_to_record_takes_no_operation_and_to_read_takes_some() -> None:
    ran = drops()
    with Counting() as counting:
        call = DroppedCall(ran, None, {}, 6)
        record(call)
        assert call.changed == {} and call.columns == 6 and call.reason is None
        assert counting.count == 0
        kept = call.kept_indices
        assert counting.count > 0
        before = counting.count
        assert call.kept_indices is kept and counting.count == before


def test_a_prefill_takes_no_operation_to_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded batch and two drops; what is read afterwards is the reference's."""
    torch._dynamo.reset()
    counts: list[int] = []

    def counted(*args: Any) -> DroppedCall:
        with Counting() as counting:
            call = DroppedCall(*args)
            record(call)
        counts.append(counting.count)
        return call

    monkeypatch.setattr(prefill, "DroppedCall", counted)
    spec = DropSpec((0, 1), p=0.8, block_size=16, last_n=16, sink_tokens=16)
    prompts = [token_ids(300), token_ids(251, seed=1)]
    batch = padded(prompts, "left")
    model = tiny_llama()
    model.compile(backend="uniprefill", options=options_of(spec))
    with torch.inference_mode():
        _, call = uniprefill_fx.watched(lambda: model(**batch, logits_to_keep=1))
    assert counts == [0] and call is not None
    assert_kept(call, [EagerReference(tiny_llama(), spec).prefill(p) for p in prompts], batch)
    assert call.kept_indices[1].is_inference() or not call.kept_indices[1].requires_grad  # read outside of the mode


def test_a_call_equals_itself_alone() -> None:
    one, other = recorded(), recorded()
    assert one == one and one != other and len({one, other}) == 2
    assert LastCall(False, None, None) != LastCall(False, None, None)


@pytest.mark.parametrize("call", [recorded(), LastCall(False, None, 5)], ids=["dropped", "dense"])
def test_nothing_can_be_changed(call: LastCall) -> None:
    for name in ("dropped", "tokens", "kept_indices", "anything"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(call, name, 1)
    for mapping in (call.kept_indices, call.cu_seqlens, call.changed):
        with pytest.raises(TypeError):
            mapping[1] = None  # type: ignore[index]


def test_the_options_of_a_call_are_not_those_of_a_later_one() -> None:
    changed: dict[str, Any] = {"p": 0.5}
    call = DroppedCall(drops(), None, changed, 6)
    changed["p"] = 0.1
    assert call.changed == {"p": 0.5}


def test_only_the_last_call_is_held() -> None:
    ran = drops()
    held: weakref.ref[Tensor] = weakref.ref(ran.kept[0][0])
    record(DroppedCall(ran, None, {}, 6))
    del ran
    gc.collect()
    assert held() is not None
    record(LastCall(False, None, None))
    gc.collect()
    assert held() is None


def test_everything_kept_for_a_reason_is_no_drop() -> None:
    bounds = torch.tensor([[0, 4]])
    all_of_it = Drops((0,), 1, bounds, ((torch.arange(4)[None], bounds),))
    reason: Any = "scores"
    assert not DroppedCall(all_of_it, reason, {}, 4).dropped
    assert DroppedCall(all_of_it, None, {}, 4).dropped and recorded(reason).dropped


def test_watched_tells_whose_prefill_it_was() -> None:
    record(recorded())
    assert watched(lambda: 7) == (7, None)
    mine = recorded()
    out, call = watched(lambda: record(mine))
    assert out is None and call is mine
