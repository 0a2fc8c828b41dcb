"""What must never be approximated runs dense, equal to the stock model, with a reason; and the reports say so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from checkpoints import ROOT
from eager_reference import EagerReference
from exactness import assert_dropped, assert_near, options_of
from tiny import LLAMA, tiny_gemma3, tiny_llama, token_ids

import uniprefill_fx

OPTIONS = options_of(LLAMA)


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@dataclass(frozen=True)
class Dense:
    """A call that must run dense: how the model is built, what is passed, and which reasons fit."""

    categories: tuple[str, ...]
    model: Callable[[], Any] = tiny_llama
    call: Callable[[], dict[str, Any]] = lambda: {"input_ids": token_ids(300), "logits_to_keep": 1}
    gradients: bool = False


def padded_within() -> dict[str, Any]:
    mask = torch.ones(1, 300, dtype=torch.int64)
    mask[:, 20:40] = 0
    return {"input_ids": token_ids(300), "attention_mask": mask, "logits_to_keep": 1}


def with_gradients() -> dict[str, Any]:
    embeds = tiny_llama().model.embed_tokens(token_ids(300)).detach().requires_grad_()
    return {"inputs_embeds": embeds, "logits_to_keep": 1}


CALLS = {
    "parameters need gradients": Dense(("gradients",), gradients=True),
    "embeddings need gradients": Dense(("gradients",), call=with_gradients, gradients=True),
    "labels": Dense(("output-not-restorable",), call=lambda: {"input_ids": token_ids(300), "labels": token_ids(300)}),
    "attentions": Dense(
        ("output-not-restorable", "attention-not-understood", "no-full-attention"),
        lambda: tiny_llama(attention="eager"),
        lambda: {"input_ids": token_ids(300), "logits_to_keep": 1, "output_attentions": True},
    ),
    "llama that is not causal": Dense(
        ("non-causal-attention", "mask-not-understood"), lambda: tiny_llama(is_causal=False)
    ),
    "gemma that is bidirectional": Dense(
        ("non-causal-attention", "mask-not-understood"), lambda: tiny_gemma3(use_bidirectional_attention=True)
    ),
    "padding between the tokens": Dense(("padding",), call=padded_within),
    "one token": Dense(
        ("token-axis-specialised", "below-min-tokens"), call=lambda: {"input_ids": token_ids(1), "logits_to_keep": 1}
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_dense_with_a_reason(what: str) -> None:
    case = CALLS[what]
    model, untouched = case.model(), case.model()
    model.compile(backend="uniprefill", options=OPTIONS)
    before = uniprefill_fx.last_call()
    theirs, ours = case.call(), case.call()
    with torch.set_grad_enabled(case.gradients):
        want, got = untouched(**theirs), model(**ours)
    call = uniprefill_fx.last_call()
    assert call is not None and call is not before and not call.dropped
    assert call.reason is not None and call.reason.category.value in case.categories, str(call)
    assert call.reason.hint and call.reason.seen and str(call).startswith("dense (")
    for name in ("logits", "loss"):
        if want.get(name) is not None:
            assert_near(got[name], want[name])
    for ours, theirs in zip(got.attentions or (), want.attentions or (), strict=True):
        assert_near(ours, theirs)
    if case.gradients:
        for result in (got, want):
            result.logits.sum().backward()
        gradient, expected = (m.model.layers[0].mlp.down_proj.weight.grad for m in (model, untouched))
        torch.testing.assert_close(gradient, expected, atol=1e-3, rtol=1e-3)


STRICT = [
    # those of one category, or of a long compilation, by one call; what is known only at run time does not raise
    pytest.param(
        what, marks=pytest.mark.slow if what in ("embeddings need gradients", "gemma that is bidirectional") else ()
    )
    for what in CALLS
    if what not in ("padding between the tokens", "one token")
]


@pytest.mark.parametrize("what", STRICT)
def test_strict_raises_for_what_stays_dense(what: str) -> None:
    case = CALLS[what]
    model = case.model()
    model.compile(backend="uniprefill", options=OPTIONS | {"strict": True})
    with torch.set_grad_enabled(case.gradients), pytest.raises(Exception, match=r"\[") as raised:
        model(**case.call())
    assert any(f"[{category}]" in str(raised.value) for category in case.categories), str(raised.value)


def test_strict_drops_where_all_is_understood_and_lets_short_prompts_through() -> None:
    model = tiny_llama()
    model.compile(backend="uniprefill", options=OPTIONS | {"strict": True})
    with torch.inference_mode():
        for length in (300, 1):
            got = model(token_ids(length), logits_to_keep=1).logits
            want = EagerReference(tiny_llama(), LLAMA).prefill(token_ids(length)).last_logits
            assert_near(got, want)
    assert model.generate(token_ids(300), max_new_tokens=3, do_sample=False).shape[1] > 300


def test_explain_says_what_was_found_and_done() -> None:
    model, ids = tiny_llama(), token_ids(300)
    report = uniprefill_fx.explain(model, ids, **OPTIONS)
    want = EagerReference(tiny_llama(), LLAMA).prefill(ids)
    assert [drop.attention.layer for drop in report.plan.drops] == [1] and len(report.plan.attention_nodes) == 3
    assert report.refusals == () and report.after is not None and report.before is not report.after
    assert report.call is uniprefill_fx.last_call() and report.call is not None
    assert_dropped(report.call)
    assert torch.equal(report.call.kept_indices[1], want.kept[1])
    assert report.call.num_tokens == (300, 300, len(want.kept[1]))
    assert report.call.compute_fraction == pytest.approx((600 + len(want.kept[1])) / 900)
    text = str(report)
    assert f"kept {len(want.kept[1])}" in text and "p=0.7" in text and "300" in text and "full" in text
    shown = str(report.call)
    assert "dropped" in shown and "300" in shown and f"after layer 1: kept {len(want.kept[1])}" in shown
    assert model._compiled_call_impl is None  # the model is as it was
    assert_near(model(ids).logits, tiny_llama()(ids).logits)


def test_explain_says_what_was_refused() -> None:
    model = tiny_llama(is_causal=False)
    report = uniprefill_fx.explain(model, token_ids(300), **OPTIONS)
    assert report.after is None and report.plan.drops == ()
    assert report.refusals and report.call is not None and not report.call.dropped
    assert "refused: " in str(report) and "ran dense" in str(report)


SCRIPT = """if True:
    import warnings, torch
    from tiny import tiny_llama, token_ids
    torch.set_num_threads(1)
    model, ids, options = tiny_llama(), token_ids(300), {options!r}
    with warnings.catch_warnings(record=True) as caught, torch.inference_mode():
        warnings.simplefilter("always")
        {statement}
    texts = [str(w.message) for w in caught if "uniprefill" in str(w.message)]
    import uniprefill_fx
    print(len(texts), texts, uniprefill_fx.last_call())
"""
WARNED = 'fast = torch.compile(model, backend="uniprefill", options=options); fast(ids, logits_to_keep=1)'
SILENT = 'model.compile(backend="uniprefill", options=options); model(ids, logits_to_keep=1)'
FORWARD = (
    'model.forward = torch.compile(model.forward, backend="uniprefill", options=options); model(ids, logits_to_keep=1)'
)


@pytest.mark.parametrize(
    ("statement", "warned"), [(WARNED, True), (SILENT, False), pytest.param(FORWARD, False, marks=pytest.mark.slow)]
)
def test_nothing_is_imported_first_and_a_wrapper_that_loses_generate_warns(statement: str, warned: bool) -> None:
    """torch finds the backend by its entry point; `torch.compile(model).generate` would never reach it."""
    code = SCRIPT.format(options=OPTIONS, statement=statement)
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT / "tests"
    ).stdout
    assert done.startswith("1" if warned else "0"), done
    assert ("generate" in done) == warned
    assert "dropped: 300 tokens" in done
