"""Ordinary mixes of calls in one process: each answers as in a process of its own, with few graphs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from cases import BUILD, graphs
from exactness import options_of
from tiny import tiny_llama, token_ids
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache

import uniprefill_fx

Call = Callable[[Any], Tensor]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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


# In the order of the calls above. Where a line says "torch", stock torch.compile needs a graph there as well.
GRAPHS = (
    "a prompt",
    "a step",
    "prompts of a batch",  # torch: a batch of 1 is no symbol; beams, returns and padding share what follows
    "steps of a batch",
    "a prompt whose last k rows are read",  # torch: its linear layers ask whether k is 1
    "drafts",  # torch: one token or several; prompt lookup and assisted decoding share it
    "a prompt of one token",  # guidance; torch: sizes of 1, and no position_ids
    "a step over one row",  # torch: the same
    "steps without position_ids",  # those of guidance
    "a prompt without a cache",
    "a second turn",  # drafts of which the last row alone is read: k is 1
    "a chunk: no mask, no position_ids",
    "a later chunk",
    "all logits, the model makes its cache",
)
MOST = {"uniprefill_fx.compile": len(GRAPHS), "model.compile": len(GRAPHS) + 1}  # strides of ids that guidance cut out
WAYS = list(MOST)
OWN_LIMITS = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # since torch 2.13


def model_of(way: str = "model.compile", name: str = "llama") -> Any:
    build, spec = BUILD[name]
    model = build()
    if way == "model.compile":
        model.compile(backend="uniprefill", options=options_of(spec))
        return model
    return uniprefill_fx.compile(model, **options_of(spec))


def in_a_fresh_process(call: Call) -> Tensor:
    torch._dynamo.reset()
    try:
        return call(model_of())
    finally:
        torch._dynamo.reset()


@cache
def answers(order: str) -> list[tuple[Tensor, Tensor]]:
    """What each call says in a process of its own, and what the stock model says to it."""
    build = BUILD["llama"][0]
    both = [(in_a_fresh_process(call), call(build())) for call in ORDERS[order]]
    assert any(not torch.equal(dropped, stock) for dropped, stock in both)
    return both


@cache
def everyday_answers() -> list[Tensor]:
    return [in_a_fresh_process(call) for call in EVERYDAY.values()]


def check(model: Any, order: str, dense: Sequence[bool] = ()) -> None:
    """One call after the other: that of a fresh process where the prompt dropped, else the stock model's.

    dense: by call, that it is to be the stock model's.
    """
    for i, (call, (dropped, stock)) in enumerate(zip(ORDERS[order], answers(order), strict=True)):
        before = uniprefill_fx.last_call()
        tokens, after = call(model), uniprefill_fx.last_call()
        eager = after is None or after is before
        assert eager or (after is not None and after.dropped)
        assert not dense or dense[i] == eager
        assert torch.equal(tokens, stock if eager else dropped), f"call {i}, eager={eager}"


@pytest.fixture
def _compiled_only() -> Iterator[None]:
    """No step reads its cache eagerly."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="uniprefill: a compact KV cache is read by code that runs eagerly")
        yield


LIMITS = [(order, limit) for order in ORDERS for limit in (1, 2, 3)]


@pytest.mark.slow
@pytest.mark.usefixtures("_compiled_only")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_orders_of_calls(way: str, order: str) -> None:
    answers(order)
    check(model_of(way), order, [False] * len(ORDERS[order]))


@pytest.mark.slow
@pytest.mark.parametrize(("order", "limit"), LIMITS)
def test_orders_with_few_graphs(order: str, limit: int) -> None:
    """A prompt that finds no graph is the stock model's; one that does drops, and its steps go on from there."""
    answers(order)
    with torch._dynamo.config.patch(recompile_limit=limit):
        check(model_of(), order)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile"])
def test_stances(order: str, stance: str) -> None:
    """Cold, nothing is compiled; warm, `eager_on_recompile` uses the graphs that are there."""
    answers(order)
    model, calls = model_of(), len(ORDERS[order])
    with torch.compiler.set_stance(stance):
        check(model, order, [True] * calls)
    check(model, order, [False] * calls)
    with torch.compiler.set_stance(stance):
        check(model, order, [stance == "force_eager"] * calls)
    check(model, order, [False] * calls)


@pytest.mark.slow
@pytest.mark.usefixtures("_compiled_only")
@pytest.mark.parametrize("way", WAYS)
def test_everyday_calls_share_graphs(way: str) -> None:
    """With `uniprefill_fx.compile` they fit Dynamo's limit; stock torch.compile makes 16 graphs of them."""
    want = everyday_answers()
    counters.clear()
    model = model_of(way)
    limit = torch._dynamo.config.recompile_limit if way == "uniprefill_fx.compile" and OWN_LIMITS else 64
    with torch._dynamo.config.patch(recompile_limit=limit):
        for (name, call), tokens in zip(EVERYDAY.items(), want, strict=True):
            assert torch.equal(call(model), tokens), name
    assert graphs() <= MOST[way]
