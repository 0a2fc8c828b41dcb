"""What a prompt may be: reduced precision, positions of its own, ties, no tokens at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from arch_builders import ARCHS, SIZED
from arch_reference import StockReference
from cases import LLAMA_SPEC, compiled
from eager_reference import EagerReference
from exactness import Case, Compiled, assert_differs, assert_dropped, assert_near, options_of
from tiny import tiny_llama, token_ids
from transformers import DynamicCache

import uniprefill_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    """The rows that the reference keeps in the same precision, and its logits up to roundings of that precision."""
    model = Compiled(Case("llama", LLAMA_SPEC), tiny_llama(2).to(dtype), tiny_llama(2).to(dtype))
    ids = token_ids(300)
    want = model.reference.prefill(ids)
    assert min(want.margins.values()) > 1e-3  # far from a tie: rounding moves no block
    out, done = model.prefill(ids, logits_to_keep=1)
    assert_dropped(done)
    assert torch.equal(done.kept_indices[0], want.kept[0])
    rounding = 8 * torch.finfo(dtype).eps * float(want.last_logits.abs().max())
    assert out.logits.dtype == dtype
    assert_near(out.logits, want.last_logits, rounding)
    assert float((out.logits - model.dense(ids, logits_to_keep=1).logits).abs().max()) > 2 * rounding


def test_positions_from_elsewhere_are_relative() -> None:
    """Rotary positions 1000, 1001, ... of a whole prompt: masks and positions count from its own first token."""
    model, ids = compiled(), token_ids(300)
    want = model.expected(ids)
    out, done = model.prefill(ids, position_ids=torch.arange(1000, 1300)[None], logits_to_keep=1)
    assert torch.equal(done.kept_indices[0], want.kept[0]) and done.tokens == 300
    assert_near(out.logits, want.last_logits)
    assert_differs(out.logits, model.dense(ids, logits_to_keep=1).logits)


def test_positions_with_holes() -> None:
    """Kept rows take their own positions along, whatever they are."""
    arch = replace(ARCHS["llama"], config=SIZED | {"num_hidden_layers": 2})
    model, reference, ids = arch.build(), StockReference(arch), token_ids(300)
    positions = 3 * torch.arange(300)[None] + 5
    # A cache, as without one such positions mean packed prompts.
    want = reference.run(ids, 300, LLAMA_SPEC, position_ids=positions, use_cache=True, past_key_values=DynamicCache())
    model.compile(backend="uniprefill", options=options_of(LLAMA_SPEC))
    with torch.inference_mode():
        out = model(ids, position_ids=positions, logits_to_keep=1)
    done = uniprefill_fx.last_call()
    assert done is not None
    assert_dropped(done)
    assert torch.equal(done.kept_indices[0], want.kept[0])
    assert_near(out.logits[:, -1], want.logits)
    assert_differs(want.logits, reference.run(ids, 300, LLAMA_SPEC).logits)


def without_preference() -> Any:
    """Queries of zero: attention is the same for all keys, and so are the scores of all whole blocks."""
    model = tiny_llama(2)
    model.model.layers[0].self_attn.q_proj.weight.data.zero_()
    return model


@pytest.mark.parametrize("score_dtype", ["float32", "float64"])
def test_ties_go_to_the_earlier_blocks(score_dtype: str) -> None:
    spec = replace(LLAMA_SPEC, p=0.5)
    model = Compiled(Case("llama", spec, {"score_dtype": score_dtype}), without_preference(), without_preference())
    ids = token_ids(320)
    out, done = model.prefill(ids, logits_to_keep=1)
    # 16 queries see 305 to 320 keys: the last block has less. 10 of the other 19 hold half of the mass, and the last
    # 16 rows are forced.
    assert done.kept_indices[0].tolist() == [*range(160), *range(304, 320)]
    assert_near(out.logits, EagerReference(model.stock, spec).prefill(ids).last_logits)


def spoiled_batch(model: Compiled, prompts: int = 2) -> dict[str, Any]:
    """Embeddings of two prompts; the first has a NaN among its last tokens."""
    with torch.no_grad():
        embeds = model.stock.model.embed_tokens(torch.cat([token_ids(300, seed) for seed in (0, 1)]))
    embeds[0, 290, 0] = torch.nan
    return {"input_ids": None, "inputs_embeds": embeds[:prompts]}


@pytest.mark.parametrize("amount", [{"p": 0.7}, {"keep_ratio": 0.3}], ids=str)
def test_scores_that_are_no_numbers_keep_everything_and_warn_once(amount: dict[str, float]) -> None:
    model = compiled()
    embedded = spoiled_batch(model, prompts=1)
    with uniprefill_fx.override(**amount), pytest.warns(UserWarning, match="scores-not-finite") as warned:
        for _ in range(2):
            out, done = model.prefill(**embedded, logits_to_keep=1)
            assert not done.dropped and done.tokens == 300 and len(done.kept_indices[0]) == 300
            assert done.reason is not None and (done.reason.category.value, done.reason.layer) == (
                "scores-not-finite",
                0,
            )
    assert len([w for w in warned if "scores-not-finite" in str(w.message)]) == 1
    want = model.dense(**embedded, logits_to_keep=1).logits
    torch.testing.assert_close(out.logits, want, atol=1e-4, rtol=0, equal_nan=True)
    out, done = model.prefill(token_ids(300), logits_to_keep=1)  # and the next prompt is as ever
    assert_dropped(done)


@pytest.mark.filterwarnings("ignore:uniprefill")
def test_scores_that_are_no_numbers_spoil_their_own_prompt_only() -> None:
    model = compiled()
    want = model.expected(token_ids(300, 1))
    out, done = model.prefill(**spoiled_batch(model), logits_to_keep=1)
    assert done.dropped and done.reason is not None and done.reason.category.value == "scores-not-finite"
    assert done.cu_seqlens[0] == (0, 300, 300 + len(want.kept[0]))
    assert torch.equal(done.kept_indices[0][300:], want.kept[0])
    assert_near(out.logits[1:], want.last_logits)
    assert "scores-not-finite" in str(done)


def test_a_prompt_without_tokens_is_the_models_own_error() -> None:
    """And the model answers as before afterwards."""
    model, empty = compiled(), torch.empty(1, 0, dtype=torch.int64)
    ids = token_ids(300)
    want = model.expected(ids)
    for first in (True, False):
        with torch.inference_mode(), pytest.raises(RuntimeError):
            model.stock(empty)
        with torch.inference_mode(), pytest.raises(RuntimeError):
            model.model(empty)
        if first:
            out, done = model.prefill(ids, logits_to_keep=1)
            assert_dropped(done)
            assert_near(out.logits, want.last_logits)
