"""generate(), steps, drafted tokens, later turns and rollback on a compact cache, against the eager reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkpoints import NAMES, TWO_LAYERS, needle_ids
from eager_reference import DropSpec, EagerReference
from exactness import SHARP, Case, Compiled, assert_differs, assert_dropped, assert_near, kv_lengths
from tiny import tiny_gemma3, token_ids
from torch import Tensor
from torch._dynamo.utils import counters

import uniprefill_fx

CASES = [Case(name, DropSpec(TWO_LAYERS[name], p=(0.9, 0.8), **SHARP), label="sharp") for name in NAMES]
WINDOW, PROMPT, STEPS = 32, 150, 70
CHECKPOINTS = pytest.mark.parametrize("compiled", CASES, indirect=True, ids=str)
HYBRIDS_FIRST = pytest.mark.parametrize(
    "compiled",
    [pytest.param(c, id=str(c), marks=pytest.mark.slow if "llama" in c.name else ()) for c in CASES],
    indirect=True,
)


@pytest.fixture(scope="module", params=["position", pytest.param("index", marks=pytest.mark.slow)])
def tiny(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    spec = DropSpec((1, 3), p=(0.9, 0.8), block_size=8, last_n=16, sink_tokens=8, window=request.param)
    yield Compiled(Case("tiny-gemma3", spec, label=request.param), tiny_gemma3(WINDOW), tiny_gemma3(WINDOW))
    torch._dynamo.reset()


def check_generate(compiled: Compiled, ids: Tensor, steps: int, **call: Any) -> None:
    """Tokens equal, logits of every step within the tolerance, KV lengths as planned, and dropping showed."""
    tokens, logits = compiled.reference.generate(ids, steps)
    got = compiled.generate(ids, steps, **call)
    done = uniprefill_fx.last_call()
    assert done is not None and done.tokens == ids.shape[1]
    assert_dropped(done)
    assert torch.equal(got.sequences[:, ids.shape[1] :], tokens)
    assert len(got.logits) == steps
    for ours, theirs in zip(got.logits, logits, strict=True):
        assert_near(ours, theirs)
    assert kv_lengths(got.past_key_values) == compiled.reference.kv_lengths()
    assert_differs(got.logits[0], compiled.dense(ids, logits_to_keep=1).logits[:, -1])


@HYBRIDS_FIRST
def test_generate(compiled: Compiled) -> None:
    check_generate(compiled, needle_ids(1111), 6)


@pytest.mark.slow
@CHECKPOINTS
def test_generate_with_a_mask_of_ones(compiled: Compiled) -> None:
    ids = needle_ids(1111)
    check_generate(compiled, ids, 12, attention_mask=torch.ones_like(ids))


@torch.inference_mode()
def begin(compiled: Compiled, ids: Tensor, record_past: bool = False) -> Any:
    """The cache of a prompt that dropped, in our model and in the reference."""
    torch._dynamo.reset()  # see `test_one_model_serves_every_kind_of_call` for how many compilations calls cost
    compiled.reference.prefill(ids)
    out, call = compiled.prefill(ids, logits_to_keep=1)
    assert_dropped(call)
    if record_past:  # as assisted decoding does, before it drafts
        out.past_key_values.activate_past_recording()
    return out.past_key_values


@torch.inference_mode()
def step(compiled: Compiled, cache: Any, ids: Tensor) -> None:
    """Append tokens to both; equal logits, nothing selected, every row stored."""
    call, before = uniprefill_fx.last_call(), kv_lengths(cache)
    got = compiled.model(ids, past_key_values=cache).logits
    assert_near(got, compiled.reference.step(ids))
    assert uniprefill_fx.last_call() is call
    for layer, (was, now) in enumerate(zip(before, kv_lengths(cache), strict=True)):
        if compiled.reference.kinds[layer] == "full_attention":
            assert was is not None and now == was + ids.shape[1]


def test_drafted_tokens_a_second_turn_and_decoding_after_it(tiny: Compiled) -> None:
    _turns(tiny, token_ids(PROMPT), [token_ids(n, seed=n) for n in (1, 5, 1, 60, 1, 1, 3)])


@pytest.mark.slow
@CHECKPOINTS
def test_turns_of_a_checkpoint(compiled: Compiled) -> None:
    """A step, five drafted tokens, a turn of 200, and decoding on."""
    _turns(compiled, needle_ids(700), [needle_ids(n, seed=4) for n in (1, 5, 200, 1, 1)])


def _turns(compiled: Compiled, prompt: Tensor, turns: list[Tensor]) -> None:
    cache = begin(compiled, prompt)
    for ids in turns:
        step(compiled, cache, ids)
    assert kv_lengths(cache) == compiled.reference.kv_lengths()


@pytest.mark.parametrize("mask", [pytest.param(False, marks=pytest.mark.slow), True], ids=["no mask", "ones"])
def test_generate_past_the_window_twice(tiny: Compiled, mask: bool) -> None:
    """More than two windows of steps: every prompt token has left the window of the sliding layers by then."""
    assert STEPS > 2 * WINDOW
    ids = token_ids(PROMPT)
    check_generate(tiny, ids, STEPS, **({"attention_mask": torch.ones_like(ids)} if mask else {}))


def check_rollback(compiled: Compiled, prompt: Tensor, draft: Tensor, taken_back: int, after: list[Tensor]) -> None:
    cache = begin(compiled, prompt, record_past=True)
    step(compiled, cache, draft)
    cache.crop(-taken_back)
    assert cache.get_seq_length() == prompt.shape[1] + draft.shape[1] - taken_back
    shorter = EagerReference(compiled.stock, compiled.spec)  # a request that never saw the drafted tokens
    shorter.prefill(prompt)
    shorter.step(draft[:, :-taken_back])
    full = [i for i, kind in enumerate(shorter.kinds) if kind == "full_attention"]
    assert [kv_lengths(cache)[i] for i in full] == [shorter.kv_lengths()[i] for i in full]
    with torch.inference_mode():
        for ids in after:
            assert_near(compiled.model(ids, past_key_values=cache).logits, shorter.step(ids))
            cache.crop(0)  # what assisted decoding does when all drafts were right
    assert kv_lengths(cache) == shorter.kv_lengths()


def test_drafted_tokens_that_are_taken_back(tiny: Compiled) -> None:
    check_rollback(tiny, token_ids(PROMPT), token_ids(5, 1), 3, [token_ids(n, seed=n) for n in (1, 4, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("compiled", CASES[:2], indirect=True, ids=str)
def test_drafted_tokens_of_a_checkpoint_that_are_taken_back(compiled: Compiled) -> None:
    check_rollback(compiled, needle_ids(700), needle_ids(5, 4), 3, [needle_ids(n, seed=5) for n in (1, 4)])


def test_one_model_serves_every_kind_of_call(tiny: Compiled) -> None:
    """Ten kinds of calls stay within Dynamo's 8 compilations: past them it would run eager, on a compact cache."""
    torch._dynamo.reset()
    counters.clear()
    for length in (PROMPT, 333):
        check_generate(tiny, token_ids(length), 4)
        check_generate(tiny, token_ids(length), 4, attention_mask=torch.ones(1, length, dtype=torch.int64))
    with torch.inference_mode():
        tiny.reference.prefill(token_ids(PROMPT))
        cache = tiny.model(token_ids(PROMPT).clone(), logits_to_keep=1).past_key_values
        for count in (1, 5, 60, 1, 1, 2, 1, 200, 1):
            ids = token_ids(count, seed=count)
            assert_near(tiny.model(ids, past_key_values=cache).logits, tiny.reference.step(ids))
    assert counters["stats"]["unique_graphs"] <= 8


def test_a_new_prompt_selects_again(tiny: Compiled) -> None:
    for length in (PROMPT, PROMPT + 37):
        check_generate(tiny, token_ids(length, seed=length), 3)
