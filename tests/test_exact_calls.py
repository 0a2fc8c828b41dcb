"""Other ways of calling a model: exact as the reference, or dense as the stock model. Tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from eager_reference import DropSpec, EagerReference
from exactness import Case, Compiled, assert_differs, assert_dropped, assert_near, assert_same_rows, kv_lengths
from tiny import LLAMA, tiny_gemma3, tiny_llama, token_ids
from torch import Tensor
from transformers import DynamicCache

import uniprefill_fx

GEMMA = DropSpec((1, 3), p=(0.9, 0.8), block_size=8, last_n=16, sink_tokens=8)
BUILD: dict[str, tuple[Callable[..., Any], DropSpec]] = {"llama": (tiny_llama, LLAMA), "gemma3": (tiny_gemma3, GEMMA)}


@pytest.fixture(scope="module", params=["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def tiny(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    build, spec = BUILD[request.param]
    yield Compiled(Case(request.param, spec), build(), build())
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _room_for_compilations() -> None:
    """Each test calls in another way: together they would pass Dynamo's limit of compilations."""
    torch._dynamo.reset()


def check_last(tiny: Compiled, length: int = 300, **call: Any) -> None:
    """A call whose last logits must be the reference's."""
    ids = token_ids(length)
    want = tiny.expected(ids)
    call = call or {"input_ids": ids}
    before = uniprefill_fx.last_call()
    with torch.inference_mode():
        out = tiny.model(**call, logits_to_keep=1)
    done = uniprefill_fx.last_call()
    assert done is not None and done is not before
    assert_same_rows(done, want, length)
    assert_dropped(done)
    assert_near(out.logits, want.last_logits)
    assert_differs(out.logits, tiny.dense(ids, logits_to_keep=1).logits)
    if out.past_key_values is not None:
        lengths = [None if at is None else len(at) for at in want.kv_positions]
        held = kv_lengths(out.past_key_values)
        assert all(h is not None and w is not None and h <= w for h, w in zip(held, lengths, strict=True))


@pytest.mark.parametrize("keep", [5, 16], ids=str)
def test_logits_of_some_last_positions(tiny: Compiled, keep: int) -> None:
    ids = token_ids(300)
    want = tiny.expected(ids)
    out, call = tiny.prefill(ids, logits_to_keep=keep)
    assert_same_rows(call, want, 300)
    assert_near(out.logits, want.logits[:, -keep:])


def test_logits_of_more_last_positions_than_always_stay(tiny: Compiled) -> None:
    """last_n is 16: of more positions some would show frozen states, as drafts that are verified with the prompt."""
    ids = token_ids(300)
    for keep in (16, 17, 40):
        out, call = tiny.prefill(ids, logits_to_keep=keep)
        assert call.dropped == (keep <= 16), str(call)
    assert call.reason is not None and "more of the last rows are asked for" in call.reason.seen
    assert_near(out.logits, tiny.dense(ids, logits_to_keep=40).logits)


@pytest.mark.filterwarnings("ignore:uniprefill")
def test_logits_of_chosen_positions(tiny: Compiled) -> None:
    ids, at = token_ids(300), torch.tensor([3, 150, 299])
    want = tiny.expected(ids)
    out, call = tiny.prefill(ids, logits_to_keep=at)
    dense = tiny.dense(ids, logits_to_keep=at).logits
    assert_near(out.logits, want.logits[:, at] if call.dropped else dense)


def test_embeddings_in_place_of_tokens(tiny: Compiled) -> None:
    with torch.no_grad():
        check_last(tiny, inputs_embeds=tiny.stock.model.embed_tokens(token_ids(300)))


def test_embeddings_as_many_as_their_size_are_exact_or_dense(tiny: Compiled) -> None:
    """64 tokens of 64 numbers: which axis counts tokens cannot be told from sizes."""
    ids = token_ids(64)
    with torch.inference_mode():
        embeds = tiny.stock.model.embed_tokens(ids)
        got = tiny.model(inputs_embeds=embeds.clone(), logits_to_keep=1).logits
    call = uniprefill_fx.last_call()
    assert call is not None
    want = tiny.expected(ids).last_logits if call.dropped else tiny.dense(ids, logits_to_keep=1).logits
    assert_near(got, want)
    check_last(tiny, 300, inputs_embeds=tiny.stock.model.embed_tokens(token_ids(300)).detach())


def test_positions_that_are_given(tiny: Compiled) -> None:
    check_last(tiny, input_ids=token_ids(300), position_ids=torch.arange(300)[None])


def test_a_mask_of_ones(tiny: Compiled) -> None:
    check_last(tiny, input_ids=token_ids(300), attention_mask=torch.ones(1, 300, dtype=torch.int64))


def test_a_cache_that_the_user_made(tiny: Compiled) -> None:
    check_last(tiny, input_ids=token_ids(300), past_key_values=DynamicCache(config=tiny.stock.config))
    check_last(tiny, input_ids=token_ids(300), past_key_values=DynamicCache())


@pytest.mark.parametrize("first", [None, 0, 40], ids=str)
def test_a_call_without_cache(tiny: Compiled, first: int | None) -> None:
    """Rotary positions are relative, so an offset changes nothing."""
    positions = None if first is None else torch.arange(first, first + 300)[None]
    check_last(tiny, input_ids=token_ids(300), use_cache=False, position_ids=positions)


@pytest.mark.parametrize("second", [0, pytest.param(150, marks=pytest.mark.slow)], ids=["restart", "gap"])
def test_packed_prompts_are_dense(tiny: Compiled, second: int) -> None:
    """Positions that are not consecutive are several prompts to transformers, without a cache; not with one."""
    ids = token_ids(300)
    positions = torch.cat([torch.arange(100), torch.arange(second, second + 200)])[None]
    dense = tiny.dense(ids, logits_to_keep=1, use_cache=False, position_ids=positions).logits
    assert_differs(dense, tiny.dense(ids, logits_to_keep=1, position_ids=positions).logits)
    out, call = tiny.prefill(ids, logits_to_keep=1, use_cache=False, position_ids=positions)
    assert not call.dropped and call.reason is not None and call.reason.category.value == "packed-prompts"
    assert call.tokens == 300  # by the compilation that drops other prompts
    assert_near(out.logits, dense)
    check_last(tiny, input_ids=ids, use_cache=False, position_ids=torch.arange(300)[None])


def test_a_tuple_in_place_of_an_output(tiny: Compiled) -> None:
    ids = token_ids(300)
    out, call = tiny.prefill(ids, logits_to_keep=1, return_dict=False)
    assert_dropped(call)
    assert_near(out[0], tiny.expected(ids).last_logits)


def test_no_grad_in_place_of_inference_mode(tiny: Compiled) -> None:
    ids = token_ids(300)
    with torch.no_grad():
        got = tiny.model(ids, logits_to_keep=1).logits
    call = uniprefill_fx.last_call()
    assert call is not None
    assert_dropped(call)
    assert_near(got, tiny.expected(ids).last_logits)


# generate() where the prompt runs dense


def check_dense_generate(tiny: Compiled, ids: Tensor, **call: Any) -> None:
    with uniprefill_fx.disabled():
        got = tiny.generate(ids, 8, **call)
    done = uniprefill_fx.last_call()
    assert done is not None and not done.dropped and done.reason is not None
    want = tiny.stock.generate(
        ids,
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        **call,
    )
    assert torch.equal(got.sequences, want.sequences)
    for ours, theirs in zip(got.logits or (), want.logits or (), strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize(
    "pads", [(33, 0), *(pytest.param(p, marks=pytest.mark.slow) for p in [(20,), (0, 65), (10, 30, 0)])], ids=str
)
def test_dense_batches_generate_as_the_stock_model(tiny: Compiled, pads: tuple[int, ...]) -> None:
    ids = torch.cat([token_ids(100, seed=row) for row in range(len(pads))])
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    check_dense_generate(tiny, ids, attention_mask=mask)


def test_dense_beams(tiny: Compiled) -> None:
    check_dense_generate(tiny, token_ids(100), num_beams=3)


def test_the_cache_of_an_eager_prompt_continues(tiny: Compiled) -> None:
    dense = EagerReference(tiny.stock, None)
    dense.prefill(token_ids(100))
    cache = tiny.dense(token_ids(100)).past_key_values
    for count in (1, 4, 1):
        more = token_ids(count, seed=count)
        with torch.inference_mode():
            assert_near(tiny.model(more, past_key_values=cache).logits, dense.step(more))
