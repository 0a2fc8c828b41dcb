"""Caches and ways of generating beside the plain greedy one: exact on a compact cache, or dense with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import compiled
from eager_reference import EagerReference
from exactness import assert_dropped, assert_near
from tiny import tiny_llama, token_ids
from torch import Tensor
from transformers.cache_utils import Cache, QuantizedLayer

import uniprefill_fx


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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


@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
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
