"""Reduced precision: autocast hands our ops what it hands the attention that they replace."""

from __future__ import annotations

import pytest
import torch
from checkpoints import fresh, needle_ids, stock

import uniprefill_fx


@pytest.mark.parametrize("p", [pytest.param(1.0, marks=pytest.mark.slow), 0.8])
@torch.inference_mode()
def test_autocast(p: float) -> None:
    """With p = 1 the compiled model is the stock one up to bf16 rounding; with less, rows are dropped."""
    torch._dynamo.reset()
    model, ids = fresh("needle-llama"), needle_ids(600)
    options = {"min_tokens": 0, "inner_backend": "aot_eager", "p": p, "block_size": 16, "last_n": 32, "sink_tokens": 24}
    model.compile(backend="uniprefill", options=options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, dense = (m(ids, logits_to_keep=1).logits for m in (model, stock("needle-llama")))
    call = uniprefill_fx.last_call()
    assert call is not None and call.dropped and got.dtype == dense.dtype == torch.bfloat16
    scale = float(dense.float().abs().max())
    error = float((got - dense).float().abs().max()) / scale
    if p == 1.0:
        assert error < 2**-6
    else:
        assert len(call.kept_indices[3]) < 600 and error > 0
