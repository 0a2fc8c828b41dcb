"""Caches and ways of generating beside the plain greedy one: exact on a compact cache, or dense with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import LLAMA_FIRST, compiled, graphs
from eager_reference import EagerReference
from exactness import Compiled, assert_differs, assert_dropped, assert_near
from tiny import tiny_llama, token_ids
from torch import Tensor
from transformers.cache_utils import Cache, QuantizedLayer

import uniprefill_fx
from uniprefill_fx.frontends.cache import CompactLayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Int8Layer(QuantizedLayer):
    """transformers' quantised cache with a quantiser of a few lines; its own need packages that are seldom there."""

    def __init__(self) -> None:
        super().__init__(nbits=8, axis_key=0, axis_value=0, q_group_size=64, residual_length=16)

    def _quantize(self, tensor: Tensor, axis: int) -> Any:
        scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, quantized: Any) -> Tensor:
        rounded, scale = quantized
        return rounded.float() * scale


def test_what_eager_code_leaves_has_the_strides_of_its_sizes() -> None:
    """Strides are guarded: those of a single request would else be those of the rows that are gone."""
    layer = CompactLayer()
    layer.update(torch.randn(2, 1, 9, 4), torch.randn(2, 1, 9, 4))
    assert layer.positions is not None
    layer.positions[0] = torch.tensor([-1, -1, 0, 1, 2, 3, 5, 7, 8])  # it kept fewer than the other one
    layer.batch_select_indices(torch.tensor([0]))
    assert layer.positions.tolist() == [[0, 1, 2, 3, 5, 7, 8]]
    for _ in range(2):
        for tensor in (layer.keys, layer.values, layer.positions, layer.timeline):
            assert tensor is not None and tensor.stride() == torch.empty(tensor.shape).stride()
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        layer.crop(-2)
    assert layer.positions.tolist() == [[0, 1, 2, 3]] and layer.get_seq_length() == 5


@torch.no_grad()
def test_steps_behind_a_prompt_of_one_token_share_a_graph() -> None:
    """The first step reads one row, which torch takes for a number; all later ones read rows of any number."""
    model, ids, cache = compiled(), token_ids(5), None
    for at in range(5):
        out = model.model(ids[:, at : at + 1].clone(), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        assert_near(out.logits, model.dense(ids[:, : at + 1], logits_to_keep=1).logits)
    assert graphs() == 3


def test_a_quantised_cache_stays_dense() -> None:
    model, ids = compiled(), token_ids(300)
    caches = [Cache(layers=[Int8Layer() for _ in range(2)]) for _ in range(2)]
    out, done = model.prefill(ids, logits_to_keep=1, past_key_values=caches[0])
    assert not done.dropped and done.reason is not None and "cache" in done.reason.hint, str(done)
    assert_near(out.logits, model.dense(ids, logits_to_keep=1, past_key_values=caches[1]).logits)
    for seed in range(3):
        more = token_ids(1, seed)
        with torch.inference_mode():
            ours, theirs = (m(more, past_key_values=c) for m, c in zip((model.model, model.stock), caches, strict=True))
        assert_near(ours.logits, theirs.logits)


def take_back(reference: EagerReference, count: int) -> None:
    """Forget the last tokens of a request."""
    reference._seen -= count
    for store in reference._stores:
        assert store is not None
        store.keys, store.values = store.keys[:, :, :-count], store.values[:, :, :-count]
        store.positions, store.labels = store.positions[:-count], store.labels[:-count]


def test_tokens_drafted_behind_the_prompt() -> None:
    """Prompt lookup hands the prompt over with its first drafts: they score with it, and may be taken back."""
    model, ids = compiled(), token_ids(303)
    want = model.expected(ids)
    out, done = model.prefill(ids, logits_to_keep=4)
    assert_dropped(done)
    assert_near(out.logits, want.logits[:, -4:])
    cache = out.past_key_values
    cache.crop(-2)
    take_back(model.reference, 2)
    for count in (1, 4, 1):
        more = token_ids(count, seed=count)
        with torch.inference_mode():
            assert_near(model.model(more, past_key_values=cache).logits, model.reference.step(more))


@pytest.mark.parametrize("how", ["prompt lookup", pytest.param("assistant", marks=pytest.mark.slow)])
def test_assisted_decoding(how: str) -> None:
    """With nothing dropped it gives the stock model's tokens; and it runs on a compact cache."""
    model, ids = compiled(), token_ids(60).repeat(1, 5)
    call: dict[str, Any] = {"prompt_lookup_num_tokens": 3} if how != "assistant" else {"assistant_model": tiny_llama(1)}
    with uniprefill_fx.override(p=1.0):
        got = model.generate(ids, 6, **call)
    done = uniprefill_fx.last_call()
    assert done is not None and done.dropped
    want = model.stock.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(got.sequences, want)
    got = model.generate(ids, 6, **call)
    done = uniprefill_fx.last_call()
    assert done is not None and got.sequences.shape == (1, 306)
    assert_dropped(done)


def rescored(model: Compiled, ids: Tensor, sequence: Tensor) -> Tensor:
    """(steps, vocabulary): the reference's logits before each generated token of one sequence."""
    logits = [model.reference.prefill(ids).last_logits[:, -1]]
    for token in sequence[ids.shape[1] : -1]:
        logits.append(model.reference.step(token.view(1, 1))[:, -1])
    return torch.cat(logits)


def assert_same_for_each_request(requests: int) -> None:
    """Copies of one prompt keep the same rows."""
    done = uniprefill_fx.last_call()
    assert done is not None
    assert_dropped(done)
    for layer, kept in done.kept_indices.items():
        rows = kept.view(requests, -1)
        assert torch.equal(rows, rows[:1].expand_as(rows)), f"kept set after layer {layer}"


@pytest.mark.parametrize("name", LLAMA_FIRST)
def test_beams_carry_their_own_rows(name: str) -> None:
    """The score of each returned beam is that of its tokens: a cache reordered wrongly would sum others."""
    model, ids = compiled(name), token_ids(300)
    got = model.generate(ids, 6, num_beams=3, num_return_sequences=3, output_scores=True, length_penalty=0.0)
    assert_same_for_each_request(3)
    assert len({tuple(sequence.tolist()) for sequence in got.sequences}) == 3
    for sequence, score in zip(got.sequences, got.sequences_scores, strict=True):
        likely = rescored(model, ids, sequence).log_softmax(-1)
        want = likely.gather(1, sequence[300:, None]).sum()
        assert_near(score, want, 1e-3)
    dense = model.dense(ids, logits_to_keep=1).logits[:, -1]
    assert_differs(got.logits[0][:1], dense)


@pytest.mark.parametrize("name", LLAMA_FIRST)
def test_several_samples_of_one_prompt(name: str) -> None:
    model, ids = compiled(name), token_ids(300)
    torch.manual_seed(0)
    with torch.inference_mode():
        got = model.model.generate(
            ids,
            max_new_tokens=5,
            do_sample=True,
            num_return_sequences=3,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    assert_same_for_each_request(3)
    assert len({tuple(sequence.tolist()) for sequence in got.sequences}) == 3
    for row, sequence in enumerate(got.sequences):
        ours = torch.stack([step[row] for step in got.logits])
        assert_near(ours, rescored(model, ids, sequence))


@pytest.mark.parametrize("name", LLAMA_FIRST)
def test_a_prompt_that_is_prefilled_once_and_continued_many_times(name: str) -> None:
    model, ids = compiled(name), token_ids(300)
    out, done = model.prefill(ids, logits_to_keep=1)
    assert_dropped(done)
    cache = out.past_key_values
    cache.batch_repeat_interleave(2)
    endings = torch.cat([token_ids(3, seed) for seed in (1, 2)])
    with torch.inference_mode():
        got = model.model(endings, past_key_values=cache).logits
        swapped = torch.cat([token_ids(1, seed) for seed in (3, 4)])
        cache.reorder_cache(torch.tensor([1, 0]))
        later = model.model(swapped, past_key_values=cache).logits
    for row in range(2):
        model.reference.prefill(ids)
        assert_near(got[row : row + 1], model.reference.step(endings[row : row + 1]))
        assert_near(later[1 - row : 2 - row], model.reference.step(swapped[1 - row : 2 - row]))
