"""Ordinary mixes of calls in one process: each answers as in a process of its own, with few graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from cases import BUILD, graphs
from exactness import options_of
from tiny import tiny_llama, token_ids
from torch import Tensor
from transformers import DynamicCache

import uniprefill_fx

Call = Callable[[Any], Tensor]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_dynamo")]


def generated(model: Any, ids: Tensor, **call: Any) -> Tensor:
    torch.manual_seed(0)
    tokens: Tensor = model.generate(
        ids, **{"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **call}
    )
    return tokens


def by(length: int = 300, requests: int = 1, inference: bool = False, **call: Any) -> Call:
    """A call of `generate` on drawn prompts."""
    ids = torch.cat([token_ids(length, seed=length + r) for r in range(requests)])

    def run(model: Any) -> Tensor:
        with torch.inference_mode(inference):
            return generated(model, ids, **call)

    return run


def assisted(model: Any) -> Tensor:
    return generated(model, token_ids(300), assistant_model=tiny_llama(1))


def lookup(model: Any) -> Tensor:
    return generated(model, token_ids(60).repeat(1, 5), prompt_lookup_num_tokens=3)


@torch.no_grad()
def without_cache(model: Any) -> Tensor:
    return model(token_ids(300), use_cache=False, logits_to_keep=1).logits.argmax(-1)


def second_turn(model: Any) -> Tensor:
    first: Any = generated(model, token_ids(300), return_dict_in_generate=True)
    ids = torch.cat([first.sequences, token_ids(40, seed=3)], 1)
    return generated(model, ids, past_key_values=first.past_key_values)


def padded(model: Any) -> Tensor:
    ids = torch.cat([token_ids(300, seed=1), token_ids(300, seed=2)])
    mask = torch.ones_like(ids)
    ids[1, :57] = mask[1, :57] = 0
    return generated(model, ids, attention_mask=mask)


@torch.no_grad()
def chunks(model: Any) -> Tensor:
    cache = DynamicCache(config=model.config)
    for part in token_ids(300).split(100, 1):
        out = model(part, past_key_values=cache, logits_to_keep=1)
    return out.logits.argmax(-1)


@torch.no_grad()
def all_logits(model: Any) -> Tensor:
    return model(token_ids(300)).logits.argmax(-1)


SAMPLES: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3}
EVERYDAY: dict[str, Call] = {
    "greedy": by(),
    "3 samples": by(**SAMPLES),
    "3 beams": by(320, num_beams=3),
    "4 beams": by(333, num_beams=4),
    "prompt lookup": lookup,
    "assisted": assisted,
    "guidance": by(guidance_scale=1.5),
    "no cache": by(use_cache=False),
    "second turn": second_turn,
    "padded": padded,
    "chunks": chunks,
    "all logits": all_logits,
}
ORDERS: dict[str, Sequence[Call]] = {
    "inference mode": (by(inference=True), by(260, 2, inference=True), without_cache, by(), by()),
    "beams": (by(), by(num_beams=4), by(**SAMPLES), by(num_beams=3), lookup),
    "assisted": (by(num_beams=3), assisted),
}


def model_of(name: str = "llama") -> Any:
    build, spec = BUILD[name]
    model = build()
    model.compile(backend="uniprefill", options=options_of(spec))
    return model


def in_a_fresh_process(calls: Sequence[Call]) -> Iterator[Tensor]:
    for call in calls:
        torch._dynamo.reset()
        yield call(model_of())


@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_calls(order: str) -> None:
    calls = ORDERS[order]
    want = list(in_a_fresh_process(calls))
    torch._dynamo.reset()
    model = model_of()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="uniprefill: a compact KV cache is read by code that runs eagerly")
        for call, tokens in zip(calls, want, strict=True):
            assert torch.equal(call(model), tokens)


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_orders_with_few_graphs(order: str, limit: int) -> None:
    """A prefill that finds no graph is the stock model's; one that does drops, and its steps go on from there."""
    calls, build = ORDERS[order], BUILD["llama"][0]
    fresh, stock = list(in_a_fresh_process(calls)), [call(build()) for call in calls]
    torch._dynamo.reset()
    model = model_of()
    with torch._dynamo.config.patch(recompile_limit=limit):
        for call, dropped, dense in zip(calls, fresh, stock, strict=True):
            tokens = call(model)
            assert torch.equal(tokens, dropped) or torch.equal(tokens, dense)


def test_everyday_calls_share_graphs() -> None:
    model = model_of()
    with torch._dynamo.config.patch(recompile_limit=64):
        for call in EVERYDAY.values():
            call(model)
    assert graphs() <= MOST, graphs()
    assert uniprefill_fx.last_call() is not None


MOST = 17
