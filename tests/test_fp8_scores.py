"""`score_dtype="float8_e4m3"`: which devices take it, that it reaches the kernel, and what it does to the kept sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eager_reference import DropSpec
from exactness import options_of
from tiny import tiny_llama, token_ids
from torch import Tensor
from triton_worker import Run

import uniprefill_fx
from uniprefill_fx import OptionError
from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.lowering import devices
from uniprefill_fx.ops.score import score_reference

BLOCK, TOKENS, LAST_N = 16, 512, 8
FP8, FP32 = torch.float8_e4m3fn, torch.float32


def peaked() -> tuple[Tensor, Tensor]:
    """q (1, 4, tokens, 64), k (1, 2, tokens, 64) in bf16: each block of keys has a log-normal share of the mass."""
    torch.manual_seed(0)
    direction = torch.nn.functional.normalize(torch.randn(64), dim=0) * 64**0.25
    gain = (torch.randn(TOKENS // BLOCK) * 2).repeat_interleave(BLOCK)
    q = torch.randn(1, 4, TOKENS, 64) + direction
    k = torch.randn(1, 2, TOKENS, 64) + gain[:, None] * direction
    return q.bfloat16(), k.bfloat16()


def scores_on_cuda(q: Tensor, k: Tensor, dtype: torch.dtype, **terms: Any) -> Tensor:
    """What the op runs there (in the worker, which interprets the kernel)."""
    from uniprefill_fx.lowering import cuda

    names = "positions", "scale", "softcap", "sinks", "bias"
    arguments = dict.fromkeys(names) | {"last_n": LAST_N, "block_size": BLOCK, "score_dtype": dtype} | terms
    return cuda._score(q, k, token_bounds=torch.tensor([[0, TOKENS]]), **arguments)


def kept_blocks(scores: Tensor, p: float) -> Tensor:
    ordered, order = scores[0].double().sort(descending=True)
    return torch.zeros(TOKENS // BLOCK).index_fill(0, order[ordered.cumsum(0) - ordered < p * ordered.sum()], 1) == 1


def test_kept_sets_stay_near_those_of_wider_types(run: Run) -> None:
    q, k = peaked()
    eight, full = run(scores_on_cuda, q, k, FP8), run(scores_on_cuda, q, k, FP32)
    whole = torch.tensor([[0, TOKENS]])
    exact = score_reference(q.double(), k.double(), None, whole, None, None, None, None, LAST_N, BLOCK, torch.float64)
    assert eight.dtype == full.dtype == torch.float32
    assert 1e-4 < ((eight - exact).norm() / exact.norm()).item() < 0.03  # it was rounded, and not more than that
    assert ((full - exact).norm() / exact.norm()).item() < 1e-5
    for p in (0.8, 0.95):
        kept = kept_blocks(exact, p)
        assert 0.05 < kept.double().mean() < 0.9
        assert torch.equal(kept_blocks(full, p), kept)
        assert int((kept_blocks(eight, p) != kept).sum()) <= 1  # of 32


@pytest.mark.parametrize("terms", [{"bias": torch.zeros(4, 1, TOKENS)}, {"block_size": 8}], ids=["alibi", "block_size"])
def test_what_the_kernel_does_not_cover_is_scored_in_float32(run: Run, terms: dict[str, Any]) -> None:
    q, k = peaked()
    eight, full = (run(scores_on_cuda, q, k, dtype, **terms) for dtype in (FP8, FP32))
    assert eight.dtype == torch.float32 and torch.equal(eight, full)


@pytest.mark.parametrize("capability, can", [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_the_gpu_must_multiply_eight_bits(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], can: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config, device = PrefillConfig(score_dtype="float8_e4m3"), torch.device("cuda", 0)
    if can:
        devices.check_dtypes(config, device)
    else:
        with pytest.raises(OptionError, match=r"for a model on cuda:0.*capability 8\.9"):
            devices.check_dtypes(config, device)


def test_the_option_reaches_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, whose plain torch body rounds nothing: the same rows stay."""
    monkeypatch.setattr(devices, "multiplies_fp8", lambda device: True)
    spec = DropSpec((1,), p=0.8, block_size=16, last_n=16, sink_tokens=16)
    reports = []
    for dtype in ("float8_e4m3", "float32"):
        torch._dynamo.reset()
        options = options_of(spec) | {"score_dtype": dtype}
        reports.append(uniprefill_fx.explain(tiny_llama(), token_ids(300), **options))
    eight, full = reports
    assert eight.after is not None and eight.call is not None and full.call is not None
    (node,) = [n for n in eight.after.graph.nodes if n.target is torch.ops.uniprefill.score.default]
    assert FP8 in node.args and node.meta["val"].dtype == torch.float32
    assert eight.call.dropped and torch.equal(eight.call.kept_indices[1], full.call.kept_indices[1])
