"""Is what `kernel_times.py` measures right? Small cases against float64, on the device that is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from uniprefill_fx.kernels.block_scores.kernel import block_scores
from uniprefill_fx.kernels.select_blocks.kernel import select_blocks
from uniprefill_fx.kernels.select_blocks.naive import select_blocks_reference

# name: heads, kv_heads, head_dim, lengths, last_n, block_size, dtype
SCORE_CASES: dict[str, tuple[int, int, int, tuple[int, ...], int, int, torch.dtype]] = {
    "32/8 heads of 128": (32, 8, 128, (1500, 700, 40, 0, 300), 128, 64, torch.bfloat16),
    "16/2 heads of 256": (16, 2, 256, (1111,), 128, 64, torch.bfloat16),
    "head 80, blocks of 32": (8, 2, 80, (999, 77), 100, 32, torch.float16),
    "head 96, blocks of 128": (6, 6, 96, (1000, 5), 64, 128, torch.bfloat16),
    "head 64, blocks of 16": (8, 1, 64, (513,), 128, 16, torch.bfloat16),
    "head 256, blocks of 128": (8, 2, 256, (513,), 32, 128, torch.float16),
    "blocks of 48": (4, 2, 128, (400, 300), 24, 48, torch.bfloat16),
    "float32, head 128": (8, 2, 128, (700, 100), 128, 64, torch.float32),
    "float32, head 256": (4, 2, 256, (300,), 128, 64, torch.float32),
    "256 requests": (4, 1, 64, tuple(range(256)), 16, 16, torch.bfloat16),
}
QUICK = "32/8 heads of 128", "16/2 heads of 256", "head 80, blocks of 32", "256 requests"
TINY_SCORE_CASES = {"tiny": (4, 2, 16, (70, 0, 33), 8, 16, torch.bfloat16)}
SELECT_CASES = {"one request": (5000,), "a million tokens": (1 << 20,), "256 requests": tuple(range(256))}
TINY_SELECT_CASES = {"tiny": (100, 7)}


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that whatever a kernel did not write shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def left_padded(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """token_bounds of a batch, on the device."""
    columns = max(lengths)
    return torch.tensor([[columns - n, columns] for n in lengths], dtype=torch.int32).to(device)


def exact_scores(
    q: Tensor, k: Tensor, bounds: list[list[int]], scale: float, last_n: int, block_size: int, softcap: float | None
) -> Tensor:
    scores = torch.zeros(len(bounds), -(-q.shape[2] // block_size), dtype=torch.float64, device=q.device)
    for r, (start, end) in enumerate(bounds):
        n = min(last_n, end - start)
        keys = k[r, :, start:end].double().repeat_interleave(q.shape[1] // k.shape[1], 0)
        logits = q[r, :, end - n : end].double() @ keys.mT * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        hidden = torch.ones(n, end - start, dtype=torch.bool, device=q.device).triu(end - start - n + 1)
        mass = logits.masked_fill(hidden, -torch.inf).softmax(-1).sum((0, 1))
        scores[r].index_add_(0, torch.arange(end - start, device=q.device) // block_size, mass)
    return scores


def check_scores(device: torch.device, tiny: bool, quick: bool) -> Iterator[tuple[str, float, float]]:
    """(what, relative error, allowed)"""
    for name, case in (TINY_SCORE_CASES if tiny else SCORE_CASES).items():
        if quick and name not in QUICK and not tiny:
            continue
        heads, kv_heads, head_dim, lengths, last_n, block_size, dtype = case
        torch.manual_seed(0)
        shape, scale = (len(lengths), max(lengths)), head_dim**-0.5
        # (batch, tokens, heads, head_dim) in memory, as projections leave them
        q = (torch.randn(*shape, heads, head_dim, device=device) * 2.5).to(dtype).transpose(1, 2)
        k = torch.randn(*shape, kv_heads, head_dim, device=device).to(dtype).transpose(1, 2)
        token_bounds = left_padded(lengths, device)
        arguments = q, k, token_bounds, scale, last_n, block_size
        for mode, softcap, options, allowed in (
            ("input", None, {}, 1e-5),
            ("softcap", 20.0, {"softcap": 20.0}, 1e-5),
            ("fp8", None, {"dtype": "fp8"}, 3e-2),
        ):
            want = exact_scores(q, k, token_bounds.tolist(), scale, last_n, block_size, softcap)
            with poisoned_memory():
                got: Tensor = block_scores(*arguments, **options)  # type: ignore[arg-type]
                again: Tensor = block_scores(*arguments, **options)  # type: ignore[arg-type]
            error = ((got - want).norm() / want.norm()).item() if got.equal(again) else float("inf")
            yield f"scores, {name}, {mode}", error, allowed


def check_large_offsets(device: torch.device) -> Iterator[tuple[str, float, float]]:
    """Heads that lie more than 2^31 elements apart, and so do requests."""
    tokens, head_dim, far = 1000, 64, (1 << 31) + 16
    token_bounds, arguments = left_padded((tokens, tokens), device), []
    for _ in range(2):
        memory = torch.empty(2 * far + (1 << 20), dtype=torch.bfloat16, device=device)
        # the second head of the first request would lie on the first of the second, but for the tokens between
        x = memory.as_strided((2, 2, tokens, head_dim), (far + tokens * head_dim, far, head_dim, 1))
        x.copy_(torch.randn(x.shape, device=device))
        arguments.append(x)
    near = [x.contiguous() for x in arguments]
    for dtype in ("input", "fp8"):
        got = block_scores(*arguments, token_bounds, 0.125, 128, 64, dtype=dtype)
        want = block_scores(*near, token_bounds, 0.125, 128, 64, dtype=dtype)
        yield f"scores, offsets beyond 2^31, {dtype}", float((got - want).abs().max()), 0.0


def check_selection(device: torch.device, tiny: bool) -> Iterator[tuple[str, float, float]]:
    """(what, rows that differ, 0)"""
    choices: list[dict[str, Any]] = [{"p": 0.9, "keep_ratio": None}, {"p": None, "keep_ratio": 0.3}]
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "peaked": lambda x: x.log().neg().pow(6),
        "tied": lambda x: (x * 4).ceil() / 10,
        "not finite": lambda x: torch.where(x > 0.99, torch.nan, x),
    }
    for name, lengths in (TINY_SELECT_CASES if tiny else SELECT_CASES).items():
        block_size = 64 if max(lengths) > 1000 else 16
        uniform = torch.rand(len(lengths), -(-max(lengths) // block_size), device=device)
        prompts = 2 * torch.tensor(lengths, device=device)
        for kind, make in kinds.items():
            for choice in choices:
                arguments = make(uniform), left_padded(lengths, device), prompts, block_size, 128, 100
                want = select_blocks_reference(*arguments, **choice)
                with poisoned_memory():
                    got = select_blocks(*arguments, **choice)
                same = all(a.equal(b) for a, b in zip(got, want, strict=True))
                yield f"rows, {name}, {kind}, {choice}", 0.0 if same else float("inf"), 0.0


def check_all(device: torch.device, tiny: bool, quick: bool) -> list[dict[str, Any]]:
    """Every check with its error; SystemExit after the last, when one failed."""
    checks = [*check_scores(device, tiny, quick), *check_selection(device, tiny)]
    if device.type == "cuda":
        checks += check_large_offsets(device)
    failed = [f"{what}: error {error:.3g}, allowed {allowed:.3g}" for what, error, allowed in checks if error > allowed]
    failed += [f"{what}: not a number" for what, error, _ in checks if error != error]
    worst = max(error for what, error, _ in checks if "fp8" not in what)
    print(
        f"{len(checks)} checks against float64, {len(failed)} failed; largest error {worst:.2g} (fp8 apart)", flush=True
    )
    if failed:
        raise SystemExit("\n".join(failed))
    return [{"check": what, "error": error, "allowed": allowed} for what, error, allowed in checks]
