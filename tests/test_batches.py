"""Batches of prompts of unequal lengths, padded on either side: equal to the eager reference of each prompt alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import NAMES, TWO_LAYERS, at_hand, needle_ids
from eager_reference import DropSpec, EagerReference, PrefillResult
from exactness import SHARP, Case, Compiled, assert_differs, assert_near
from tiny import LLAMA, tiny_gemma3, tiny_llama, token_ids
from torch import Tensor
from torch._dynamo.utils import counters

import uniprefill_fx
from uniprefill_fx import LastCall

LENGTHS = (611, 437, 702)  # no multiples of a block, of a chunk of a recurrence, or of a window
CASES = [Case(name, DropSpec(TWO_LAYERS[name], p=(0.9, 0.8), **SHARP), label="batch") for name in NAMES]
CHECKPOINTS = pytest.mark.parametrize("compiled", CASES, indirect=True, ids=str)
HYBRID_FIRST = pytest.mark.parametrize(  # the other checkpoints are slow tests
    "compiled",
    [
        pytest.param(c, id=str(c), marks=() if c.name in at_hand(["needle-qwen3-next"]) else pytest.mark.slow)
        for c in CASES
    ],
    indirect=True,
)


def padded(prompts: list[Tensor], side: str) -> dict[str, Tensor]:
    """A batch as a tokenizer makes it: input_ids and attention_mask, (batch, longest) int64."""
    longest = max(p.shape[1] for p in prompts)
    ids, mask = torch.zeros(len(prompts), longest, dtype=torch.int64), torch.zeros(len(prompts), longest)
    for row, prompt in enumerate(prompts):
        n = prompt.shape[1]
        columns = slice(longest - n, None) if side == "left" else slice(0, n)
        ids[row, columns], mask[row, columns] = prompt[0], 1
    return {"input_ids": ids, "attention_mask": mask.long()}


def positions(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with the position ids that `generate()` would make."""
    return batch | {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def prompts_of(name: str, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    return [needle_ids(n, seed=i) if name in NAMES else token_ids(n, seed=i) for i, n in enumerate(lengths)]


def assert_kept(call: LastCall, wants: list[PrefillResult], batch: dict[str, Tensor]) -> None:
    """The kept sets of every request, and no padding in any; rows are gone."""
    assert call.dropped and call.tokens == int(batch["attention_mask"].sum())
    firsts = batch["attention_mask"].argmax(1)
    for layer in wants[0].kept:
        bounds = call.cu_seqlens[layer]
        for r, want in enumerate(wants):
            own = call.kept_indices[layer][bounds[r] : bounds[r + 1]]
            assert torch.equal(own, want.kept[layer] + firsts[r]), f"kept set of request {r} after layer {layer}"
    assert len(list(call.kept_indices.values())[-1]) < call.tokens


@HYBRID_FIRST
def test_case_01_left_padded_batch_equals_runs_of_one(compiled: Compiled) -> None:
    prompts = prompts_of(compiled.case.name)
    batch = positions(padded(prompts, "left"))
    out, call = compiled.prefill(**batch, logits_to_keep=1)
    wants = [compiled.expected(p) for p in prompts]
    assert_kept(call, wants, batch)
    for r, (prompt, want) in enumerate(zip(prompts, wants, strict=True)):
        assert_near(out.logits[r : r + 1], want.last_logits)
        assert_differs(want.last_logits, compiled.dense(prompt, logits_to_keep=1).logits)


@pytest.mark.slow
@CHECKPOINTS
def test_case_01_right_padded_batch_equals_runs_of_one(compiled: Compiled) -> None:
    prompts = prompts_of(compiled.case.name)
    batch = positions(padded(prompts, "right"))
    out, call = compiled.prefill(**batch)
    wants = [compiled.expected(p) for p in prompts]
    assert_kept(call, wants, batch)
    for r, (prompt, want) in enumerate(zip(prompts, wants, strict=True)):
        assert_near(out.logits[r : r + 1, : prompt.shape[1]], want.logits)


@pytest.mark.slow
@CHECKPOINTS
def test_a_batch_without_padding_and_without_a_mask(compiled: Compiled) -> None:
    prompts = prompts_of(compiled.case.name, (611,) * 3)
    batch = padded(prompts, "left")
    out, call = compiled.prefill(batch["input_ids"], logits_to_keep=1)
    wants = [compiled.expected(p) for p in prompts]
    assert_kept(call, wants, batch)
    assert_near(out.logits, torch.cat([w.last_logits for w in wants]))


@pytest.mark.slow
@CHECKPOINTS
@torch.inference_mode()
def test_generation_continues_for_all_requests(compiled: Compiled) -> None:
    prompts, steps = prompts_of(compiled.case.name), 10
    batch = padded(prompts, "left")
    got = compiled.generate(batch["input_ids"], steps, attention_mask=batch["attention_mask"])
    call = uniprefill_fx.last_call()
    wants = [compiled.expected(p) for p in prompts]
    assert call is not None
    assert_kept(call, wants, batch)
    for r, prompt in enumerate(prompts):
        reference = EagerReference(compiled.stock, compiled.spec)
        tokens, logits = reference.generate(prompt, steps)
        assert torch.equal(got.sequences[r : r + 1, batch["input_ids"].shape[1] :], tokens)
        for ours, theirs in zip(got.logits, logits, strict=True):
            assert_near(ours[r : r + 1], theirs)
        first = int(batch["attention_mask"][r].argmax())
        positions = [getattr(layer, "positions", None) for layer in got.past_key_values.layers]
        stored = [None if own is None else int((own[r] >= first).sum()) for own in positions]
        assert stored == reference.kv_lengths()


@pytest.fixture(scope="module")
def tiny() -> Any:
    return Compiled(Case("tiny", LLAMA), tiny_llama(), tiny_llama())


def test_a_single_prompt_with_padding_drops(tiny: Compiled) -> None:
    prompts = prompts_of("tiny", (90,))
    batch = padded(prompts, "left")
    for side in ("left", "right"):
        pads = torch.zeros(1, 33, dtype=torch.int64)
        parts = {name: (pads, t) if side == "left" else (t, pads) for name, t in batch.items()}
        wide = positions({name: torch.cat(part, 1) for name, part in parts.items()})
        out, call = tiny.prefill(**wide)
        want = tiny.expected(prompts[0])
        assert_kept(call, [want], wide)
        assert_near(out.logits[:, 33:] if side == "left" else out.logits[:, :-33], want.logits)


def test_reordered_and_repeated_requests_decode_on(tiny: Compiled) -> None:
    """What beam search and num_return_sequences do to a cache: rows of requests move, with what they hold."""
    prompts = prompts_of("tiny", (150, 97))
    batch = positions(padded(prompts, "left"))
    out, call = tiny.prefill(**batch, logits_to_keep=1)
    assert call.dropped
    cache, mask = out.past_key_values, batch["attention_mask"]
    order = [1, 0, 1]
    cache.batch_select_indices(torch.tensor([1, 0, 0]))
    cache.reorder_cache(torch.tensor([0, 2, 0]))
    references = []
    for r in order:
        references.append(EagerReference(tiny.stock, tiny.spec))
        references[-1].prefill(prompts[r])
    new, mask = token_ids(3, seed=9).reshape(3, 1), mask[order]
    for step in range(2):
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.int64)], 1)
        with torch.inference_mode():
            place = (mask.sum(1, keepdim=True) - 1).long()
            got = tiny.model(new + step, attention_mask=mask, position_ids=place, past_key_values=cache).logits
        for r, reference in enumerate(references):
            assert_near(got[r : r + 1], reference.step(new[r : r + 1] + step))


@torch.inference_mode()
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_request_taken_out_of_a_batch_decodes_on(tiny: Compiled) -> None:
    """It kept fewer rows than the other, and without a mask nothing tells its padding."""
    prompts = prompts_of("tiny", (150, 150))
    out, call = tiny.prefill(torch.cat(prompts), logits_to_keep=1)
    cache, bounds = out.past_key_values, torch.tensor(call.cu_seqlens[1])
    fewer, more = (int(r) for r in bounds.diff().argsort())
    assert bounds.diff()[fewer] < bounds.diff()[more]
    cache.batch_select_indices(torch.tensor([fewer]))
    reference, new = EagerReference(tiny.stock, tiny.spec), token_ids(1, seed=9)
    reference.prefill(prompts[fewer])
    assert_near(tiny.model(new, past_key_values=cache).logits, reference.step(new))


@torch.inference_mode()
def test_several_tokens_after_a_batch(tiny: Compiled) -> None:
    """A second turn: more than one query a request, over keys whose places differ by request."""
    prompts = prompts_of("tiny", (150, 97))
    batch = positions(padded(prompts, "left"))
    out, _ = tiny.prefill(**batch, logits_to_keep=1)
    more = torch.cat([token_ids(7, seed=r) for r in range(2)])
    mask = torch.cat([batch["attention_mask"], torch.ones_like(more)], 1)
    place = mask.cumsum(1)[:, -7:] - 1
    got = tiny.model(more, attention_mask=mask, position_ids=place, past_key_values=out.past_key_values).logits
    for r, prompt in enumerate(prompts):
        reference = EagerReference(tiny.stock, tiny.spec)
        reference.prefill(prompt)
        assert_near(got[r : r + 1], reference.step(more[r : r + 1]))


@torch.inference_mode()
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_cache_cut_inside_its_prompts_decodes_on(tiny: Compiled) -> None:
    """Requests hold different numbers of rows behind the cut, and lose all of them."""
    prompts, cut = prompts_of("tiny", (150, 97)), 110
    batch = positions(padded(prompts, "left"))
    out, _ = tiny.prefill(**batch, logits_to_keep=1)
    cache = out.past_key_values
    cache.crop(cut - 150)
    more = torch.cat([token_ids(3, seed=r) for r in range(2)])
    mask = torch.cat([batch["attention_mask"][:, :cut], torch.ones_like(more)], 1)
    place = mask.cumsum(1)[:, -3:] - 1
    got = tiny.model(more, attention_mask=mask, position_ids=place, past_key_values=cache).logits
    lost = []  # rows of the last layer
    for r, prompt in enumerate(prompts):
        reference, own = EagerReference(tiny.stock, tiny.spec), cut - int((batch["attention_mask"][r] == 0).sum())
        reference.prefill(prompt)
        reference._seen = own
        for store in reference._stores:
            assert store is not None
            at = store.positions < own
            gone = int((~at).sum())
            store.keys, store.values = store.keys[:, :, at], store.values[:, :, at]
            store.positions, store.labels = store.positions[at], store.labels[at]
        lost.append(gone)
        assert_near(got[r : r + 1], reference.step(more[r : r + 1]))
    assert lost[0] != lost[1]  # otherwise one cut of columns does


def test_compilations_do_not_grow_with_batches_and_lengths() -> None:
    compiled = Compiled(Case("tiny", LLAMA), tiny_llama(), tiny_llama())
    counters.clear()
    for lengths in ((90, 70), (120, 60, 80), (77, 200), (150, 149, 148, 147, 51), (33, 65)):
        batch = positions(padded(prompts_of("tiny", lengths), "left"))
        _, call = compiled.prefill(**batch, logits_to_keep=1)
        assert call.dropped, call
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("lengths", [(1, 120), (32, 120), (33, 120), (16, 17, 15, 31)], ids=str)
def test_case_05_short_requests_beside_long_ones(tiny: Compiled, lengths: tuple[int, ...]) -> None:
    """One token; exactly the rows that always stay, and one more: at least one row is kept of each."""
    prompts = prompts_of("tiny", lengths)
    batch = positions(padded(prompts, "left"))
    out, call = tiny.prefill(**batch, logits_to_keep=1)
    assert call.dropped
    for r, prompt in enumerate(prompts):
        assert_near(out.logits[r : r + 1], tiny.reference.prefill(prompt).last_logits)


def test_a_request_without_tokens_disturbs_nobody(tiny: Compiled) -> None:
    prompts = prompts_of("tiny", (150, 97))
    batch = positions(padded([*prompts, torch.zeros(1, 0, dtype=torch.int64)], "left"))
    out, call = tiny.prefill(**batch, logits_to_keep=1)
    assert call.dropped and call.cu_seqlens[1][-1] == call.cu_seqlens[1][-2]
    for r, prompt in enumerate(prompts):
        assert_near(out.logits[r : r + 1], tiny.reference.prefill(prompt).last_logits)
    assert out.logits.isfinite().all()


@pytest.mark.parametrize("options", [{"p": 1.0}, {"selection": "top_k", "p": None, "keep_ratio": 0.4}], ids=str)
def test_other_selections(options: dict[str, Any]) -> None:
    spec = DropSpec((1,), block_size=16, last_n=16, sink_tokens=16, **options)
    compiled = Compiled(Case("tiny", spec), tiny_llama(), tiny_llama())
    prompts = prompts_of("tiny", (150, 97, 201))
    batch = positions(padded(prompts, "left"))
    out, call = compiled.prefill(**batch, logits_to_keep=1)
    assert call.dropped
    for r, prompt in enumerate(prompts):
        want = compiled.reference.prefill(prompt)
        own = call.kept_indices[1][call.cu_seqlens[1][r] : call.cu_seqlens[1][r + 1]]
        assert torch.equal(own, want.kept[1] + batch["attention_mask"][r].argmax())
        assert_near(out.logits[r : r + 1], want.last_logits)


@pytest.mark.parametrize("window", ["position", pytest.param("index", marks=pytest.mark.slow)])
@torch.inference_mode()
def test_sliding_windows_shorter_than_what_always_stays(window: str) -> None:
    """Rows inside a window are told by position; generation runs past the window."""
    spec = DropSpec((1, 3), p=(0.9, 0.8), block_size=8, last_n=16, sink_tokens=8, window=window)
    compiled = Compiled(Case("tiny", spec), tiny_gemma3(32), tiny_gemma3(32))
    prompts, steps = prompts_of("tiny", (150, 97)), 40
    batch = padded(prompts, "left")
    got = compiled.generate(batch["input_ids"], steps, attention_mask=batch["attention_mask"])
    for r, prompt in enumerate(prompts):
        tokens, logits = compiled.reference.generate(prompt, steps)
        assert torch.equal(got.sequences[r : r + 1, 150:], tokens)
        assert all(torch.allclose(a[r : r + 1], b, atol=1e-4) for a, b in zip(got.logits, logits, strict=True))


@torch.inference_mode()
def test_padding_that_is_not_understood_runs_dense(tiny: Compiled) -> None:
    prompts = prompts_of("tiny", (150, 97))
    batch = positions(padded(prompts, "left"))
    batch["attention_mask"][0, 60:70] = 0
    out, call = tiny.prefill(**batch)
    assert not call.dropped and call.reason is not None and call.reason.category.value == "padding"
    assert "between" in call.reason.seen
    assert_near(out.logits[:, -1], tiny.dense(**batch).logits[:, -1])

    right = positions(padded(prompts, "right"))
    out, call = tiny.prefill(**right, logits_to_keep=1)  # the last row of a right-padded prompt is padding
    assert not call.dropped and call.reason is not None and call.reason.category.value == "padding"
    assert_near(out.logits[0], tiny.dense(**right, logits_to_keep=1).logits[0])


@pytest.mark.slow
def test_through_inductor() -> None:
    compiled = Compiled(Case("tiny", LLAMA, {"inner_backend": "inductor"}), tiny_llama(), tiny_llama())
    for lengths in ((300, 170, 211), (90, 400)):
        prompts = prompts_of("tiny", lengths)
        batch = padded(prompts, "left")
        got = compiled.generate(batch["input_ids"], 5, attention_mask=batch["attention_mask"])
        call = uniprefill_fx.last_call()
        assert call is not None
        assert_kept(call, [compiled.expected(p) for p in prompts], batch)
        for r, prompt in enumerate(prompts):
            tokens, logits = compiled.reference.generate(prompt, 5)
            assert torch.equal(got.sequences[r : r + 1, -5:], tokens)
            for ours, theirs in zip(got.logits, logits, strict=True):
                assert_near(ours[r : r + 1], theirs)
