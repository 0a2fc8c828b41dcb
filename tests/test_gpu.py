"""Whole prefills and generation on a CUDA device, against the eager reference on the same device."""

from __future__ import annotations

import copy

import pytest
import torch
from checkpoints import TWO_LAYERS, fresh, needle_ids, stock
from eager_reference import DropSpec
from exactness import SHARP, Case, Compiled, assert_dropped, assert_near, assert_same_rows

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]
DEVICE = "cuda"
TOLERANCE = 1e-3  # the products of float32 are added in another order than the reference's


def compiled_on_device(name: str, inner: str) -> Compiled:
    spec = DropSpec(TWO_LAYERS[name], p=(0.9, 0.8), **SHARP)
    models = (fresh(name), copy.deepcopy(stock(name)))
    return Compiled(Case(name, spec, {"inner_backend": inner}), *(model.to(DEVICE) for model in models))


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_prefill(checkpoint: str, inner: str) -> None:
    compiled = compiled_on_device(checkpoint, inner)
    for tokens in (1111, 300, 2049):
        ids = needle_ids(tokens).to(DEVICE)
        want = compiled.expected(ids)
        out, call = compiled.prefill(ids, logits_to_keep=1)
        assert_same_rows(call, want, tokens)
        assert_dropped(call)
        assert_near(out.logits, want.last_logits, TOLERANCE)


def test_generate(checkpoint: str) -> None:
    compiled = compiled_on_device(checkpoint, "eager")
    ids = needle_ids(1111).to(DEVICE)
    out = compiled.generate(ids, 6)
    tokens, logits = compiled.reference.generate(ids, 6)
    assert torch.equal(out.sequences[0, ids.shape[1] :], tokens.flatten())
    for got, want in zip(out.logits, logits, strict=True):
        assert_near(got.flatten(), want.flatten(), TOLERANCE)


def test_a_left_padded_batch_equals_runs_of_one(checkpoint: str) -> None:
    compiled = compiled_on_device(checkpoint, "eager")
    prompts = [needle_ids(n).to(DEVICE) for n in (900, 1111)]
    ids = torch.cat([torch.nn.functional.pad(p, (1111 - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (1111 - p.shape[1], 0)) for p in prompts])
    out, call = compiled.prefill(ids, attention_mask=mask, logits_to_keep=1)
    assert_dropped(call)
    for row, prompt in enumerate(prompts):
        assert_near(out.logits[row], compiled.expected(prompt).last_logits.flatten(0, -2), TOLERANCE)
