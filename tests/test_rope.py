"""Rotary frequencies that follow the prompt's length: longrope and dynamic NTK, on both sides of the switch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from arch_builders import LOCAL_EXPERTS, LONG_ROPE, NTK, PLAIN, SIZED, Arch
from arch_reference import StockReference
from eager_reference import DropSpec
from exactness import TIE, assert_differs, assert_near, options_of
from tiny import token_ids
from transformers_version import PLAIN_CAUSAL

import uniprefill_fx
from uniprefill_fx import frontends

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SWITCH = 512
EAGER: dict[str, Any] = {"inner_backend": "eager"}
LAYERS = {"num_hidden_layers": 2}
MSCALES = {"rope_parameters": LONG_ROPE["rope_parameters"] | {"short_mscale": 1.2, "long_mscale": 1.4}}
ARCHS = {
    "longrope": Arch("Phi3", PLAIN | LONG_ROPE | LAYERS, (0,)),
    "dynamic": Arch("Llama", SIZED | NTK | LAYERS, (0,)),
    "scaled": Arch("Phimoe", PLAIN | LONG_ROPE | MSCALES | LOCAL_EXPERTS | {"sliding_window": None} | LAYERS, (0,)),
}
NAMES = ["longrope", "dynamic", pytest.param("scaled", marks=pytest.mark.slow)]


def compiled(arch: Arch, spec: DropSpec) -> Any:
    model = arch.build()
    frontends.install()  # or else the first trace meets a module that was imported since, breaks, and is done again
    model.compile(backend="uniprefill", options=options_of(spec))
    return model


@pytest.mark.parametrize("name", NAMES)
def test_prompts_on_both_sides_of_the_switch(name: str) -> None:
    arch, spec = ARCHS[name], DropSpec((0,), p=0.6, block_size=16, last_n=32, sink_tokens=16)
    model, stock, reference = compiled(arch, spec), arch.build(), StockReference(arch)
    for length in (702, 437):
        ids = token_ids(length)
        want = reference.run(ids, length, spec)
        assert min(want.selections[0].margin, want.selections[0].gap) > TIE
        with torch.inference_mode():
            got = model(ids, logits_to_keep=1).logits[:, -1]
            assert_differs(got, stock(ids).logits[:, -1])
        call = uniprefill_fx.last_call()
        assert call is not None and call.dropped and torch.equal(call.kept_indices[0], want.kept[0])
        # Fewer stay than the switch, and keep the frequencies of the whole prompt.
        assert len(want.kept[0]) < SWITCH
        assert_near(got, want.logits)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("name", NAMES)
def test_generation_across_the_switch(name: str) -> None:
    """Nothing is lost with p=1: steps before and behind the switch are those of the stock model."""
    arch = ARCHS[name]
    spec = DropSpec((0,), p=1.0, block_size=16, last_n=32, sink_tokens=16)
    model, stock, ids = compiled(arch, spec), arch.build(), token_ids(SWITCH - 2)
    given = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    given |= {"output_logits": True, "return_dict_in_generate": True}
    got, want = model.generate(ids, **given), stock.generate(ids, **given)
    assert torch.equal(got.sequences, want.sequences)
    assert_near(torch.cat(got.logits), torch.cat(want.logits))
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_shorter_prompt_keeps_what_a_longer_one_left() -> None:
    """Dynamic NTK: frequencies stay until a prompt is shorter than what the model was trained for; as stock does."""
    rotary, stock = (ARCHS["dynamic"].build().model.rotary_emb for _ in range(2))
    run = torch.compile(lambda x, at: rotary(x, at), backend="uniprefill", fullgraph=True, options=EAGER)
    x = torch.zeros(1)
    for length in (600, 900, 700, 512, 500, 700, 800):
        at = torch.arange(length)[None]
        for got, want in zip(run(x, at), stock(x, at), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert int(rotary.max_seq_len_cached) == int(stock.max_seq_len_cached)
        assert torch.equal(rotary.inv_freq, stock.inv_freq)


@pytest.mark.parametrize("name", ["longrope", "dynamic", "scaled"])
def test_inert_for_other_backends(name: str) -> None:
    rotary = ARCHS[name].build().model.rotary_emb
    frontends.install()
    x, at = torch.zeros(1), torch.arange(600)[None]
    want = rotary(x, at)
    got = torch.compile(rotary, backend="eager")(x, at)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    broken = torch._dynamo.utils.counters["graph_break"]
    assert broken or PLAIN_CAUSAL, "transformers branches on the length"
