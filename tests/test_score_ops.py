"""The ops `score` and `select`: which implementation runs, what the plain torch bodies compute, and what waits."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_worker import Run

import uniprefill_fx.ops  # noqa: F401  registers torch.ops.uniprefill

ops = torch.ops.uniprefill
BOUNDS = torch.tensor([[0, 90], [25, 90], [90, 90], [57, 90]])
LAST_N, BLOCK = 10, 16


def arguments(dtype: torch.dtype = torch.float32, **terms: Any) -> dict[str, Any]:
    """Of `score`, for a left-padded batch of 4 prompts, one of them empty; padding holds NaN."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4, heads, 90, 32, generator=generator, dtype=dtype) * 2 for heads in (4, 2))
    for x in (q, k):
        for row, (start, _) in zip(x, BOUNDS.tolist(), strict=True):
            row[:, :start] = torch.nan
    names = "positions", "scale", "softcap", "sinks", "bias"
    sizes = {"last_n": LAST_N, "block_size": BLOCK, "score_dtype": torch.float32}
    return {"q": q, "k": k, "token_bounds": BOUNDS, **dict.fromkeys(names), **sizes, **terms}


def exact(q: Tensor, k: Tensor, bias: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    """All heads and queries at once, in float64. bias: (4, positions), positions: (4, columns)."""
    out = torch.zeros(4, 6, dtype=torch.float64)
    for r, (start, end) in enumerate(BOUNDS.tolist()):
        keys = k[r, :, start:end].double().repeat_interleave(2, 0)
        logits = torch.einsum("hnd,hkd->hnk", q[r, :, start:end].double(), keys) / 32**0.5
        if bias is not None and positions is not None:
            logits += torch.stack([own[positions[r, start:end]] for own in bias])[:, None]
        future = torch.ones(end - start, end - start).triu(1).bool()
        mass = logits.masked_fill(future, -torch.inf).softmax(-1)[:, -LAST_N:].sum((0, 1))
        for block, part in enumerate(mass.split(BLOCK) if len(mass) else ()):
            out[r, block] = part.sum()
    return out


@pytest.mark.parametrize("score_dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_score_of_a_padded_batch(score_dtype: torch.dtype, tolerance: float) -> None:
    given = arguments(torch.float64, score_dtype=score_dtype)
    got = ops.score(**given)
    assert got.dtype == score_dtype
    torch.testing.assert_close(got.double(), exact(given["q"], given["k"]), rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("shared", [False, True], ids=["bias by request", "one bias"])
def test_bias_is_read_by_position(shared: bool) -> None:
    """Behind a drop positions have holes and differ by request; -1 in padding."""
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(1 if shared else 4, 4, 1, 300, generator=generator, dtype=torch.float64)
    positions = torch.full((4, 90), -1)
    for row, (start, end) in zip(positions, BOUNDS.tolist(), strict=True):
        row[start:end] = torch.randperm(300, generator=generator)[: end - start].sort().values
    given = arguments(torch.float64, bias=bias, positions=positions, score_dtype=torch.float64)
    want = torch.stack([exact(given["q"], given["k"], bias[0 if shared else r, :, 0], positions)[r] for r in range(4)])
    torch.testing.assert_close(ops.score(**given), want, rtol=1e-12, atol=1e-13)


def test_fakes_have_the_shapes_of_the_results() -> None:
    given = arguments()
    torch.library.opcheck(ops.score.default, (), given, test_utils=("test_schema", "test_faketensor"))
    scores = ops.score(**given)
    kept, bounds = ops.select(scores, BOUNDS, BOUNDS, BLOCK, 4, 4, 0.5, None)
    assert scores.shape == (4, 6) and kept.shape == (4, int(bounds.max())) and kept.dtype == torch.int64


def implementation(name: str, op: str, **given: Any) -> tuple[str, Tensor]:
    """Which of the two runs on CUDA, and its result (in the worker)."""
    from uniprefill_fx.lowering import cuda

    ran: list[str] = []

    def noting(function: str, body: Any) -> Any:
        def noted(*args: Any) -> Any:
            ran.append(function)
            return body(*args)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for module, function in ((cuda, name), (getattr(cuda, op), f"{op}_reference")):
            patch.setattr(module, function, noting(function, getattr(module, function)))
        result = getattr(cuda, f"_{op}")(**given)
    return ran[0], result


WIDE = torch.zeros(4, 1, 90, 160)
SCORED: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({}, "block_scores"),
    "float32 with 8 bits asked for": ({"score_dtype": torch.float8_e4m3fn}, "block_scores"),
    "float64 scores": ({"score_dtype": torch.float64}, "score_reference"),
    "float64 operands": (arguments(torch.float64), "score_reference"),
    "alibi": ({"bias": torch.zeros(4, 1, 90)}, "score_reference"),
    "block size": ({"block_size": 8}, "score_reference"),
    "no tiles": ({"q": WIDE, "k": WIDE, "block_size": 128}, "score_reference"),
    "negative scale": ({"scale": -1.0}, "score_reference"),
}


@pytest.mark.parametrize("terms, wanted", SCORED.values(), ids=SCORED.keys())
def test_what_scores_on_cuda(run: Run, terms: dict[str, Any], wanted: str) -> None:
    given = arguments() | terms
    ran, got = run(implementation, "block_scores", "score", **given)
    assert ran == wanted
    torch.testing.assert_close(got, ops.score(**given), rtol=1e-5 * run.slack, atol=1e-6)


@pytest.mark.parametrize("dtype, wanted", [(torch.float32, "select_blocks"), (torch.float64, "select_reference")])
def test_what_selects_on_cuda(run: Run, dtype: torch.dtype, wanted: str) -> None:
    prompts = torch.stack((BOUNDS[:, 0] - 300, BOUNDS[:, 1]), 1)
    scores = torch.rand(4, 6, generator=torch.Generator().manual_seed(3), dtype=dtype)
    for choice in ({"p": 0.6, "keep_ratio": None}, {"p": None, "keep_ratio": 0.1}):
        sizes = {"block_size": BLOCK, "last_n": 3, "sink_tokens": 5}
        given = {"scores": scores, "token_bounds": BOUNDS, "prompt_bounds": prompts, **sizes, **choice}
        ran, got = run(implementation, "select_blocks", "select", **given)
        assert ran == wanted
        for a, b in zip(got, ops.select(**given), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@contextlib.contextmanager
def counted_waits() -> Iterator[list[str]]:
    """Where the host reads a tensor: by line. The interpreter's own reads, which stand for the device, apart."""
    waits: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
            method = getattr(Tensor, name)

            def reads(self: Tensor, *args: Any, name: str = name, method: Any = method) -> Any:
                stack = [frame.filename for frame in traceback.extract_stack()[:-1]]
                if not any("/triton/" in file for file in stack):
                    waits.append(name)
                return method(self, *args)

            patch.setattr(Tensor, name, reads)
        yield waits


def waits_of_a_drop(**given: Any) -> tuple[list[str], list[str], Tensor]:
    """What waits in score and in select, and what stays (in the worker)."""
    from uniprefill_fx.lowering import cuda

    with counted_waits() as scoring:
        scores = cuda._score(**given)
    with counted_waits() as selecting:
        _, kept_bounds = cuda._select(scores, BOUNDS, BOUNDS, BLOCK, 4, 4, 0.5, None)
    with counted_waits() as reference:
        cuda._select(scores.double(), BOUNDS, BOUNDS, BLOCK, 4, 4, 0.5, None)
    assert reference  # the counting counts
    return scoring, selecting, kept_bounds


def test_a_drop_of_four_prompts_waits_once() -> None:
    """On the CPU even a read of the host's own numbers counts."""
    from triton_worker import interpreter

    with interpreter() as run:
        scoring, selecting, kept_bounds = run(waits_of_a_drop, **arguments())
    assert scoring == [] and selecting == ["tolist"]
    assert len(set((kept_bounds[:, 1] - kept_bounds[:, 0]).tolist())) > 1


@pytest.mark.gpu
def test_a_drop_of_four_prompts_waits_once_on_a_card() -> None:
    given = arguments()
    for name in ("q", "k"):
        given[name] = given[name].cuda().bfloat16()
    select = BOUNDS, BOUNDS, BLOCK, 4, 4, 0.5, None
    ops.select(ops.score(**given), *select)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        scores = ops.score(**given)
        torch.cuda.set_sync_debug_mode("warn")
        with pytest.warns(UserWarning, match="synchroniz") as waits:
            ops.select(scores, *select)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1
