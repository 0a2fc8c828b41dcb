"""Is what `block_sparse.py` measures right? The kernels on a card against their plain twin in float32."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor

from uniprefill_fx.kernels.block_sparse_attention.api import block_sparse_attention
from uniprefill_fx.kernels.block_sparse_attention.naive import block_sparse_attention_naive
from uniprefill_fx.kernels.block_sparse_attention.tiles import AttentionTiles, EnergyTiles

BF16 = torch.bfloat16
ALLOWED = {BF16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-5, "fp8": 4e-2}
EVERYTHING: dict[str, Any] = {"softcap": 20.0, "sinks": True}

# what differs from: 8/2 heads of 128, bf16, 1,500 tokens, blocks of 64, alpha 0.3
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "blocks of 128": {"options": {"block_size": 128}},
    "alpha 0": {"options": {"alpha": 0.0}},
    "not corrected": {"options": {"correction": False}},
    "head 64": {"dim": 64},
    "head 80": {"dim": 80},
    "head 96, everything": {"dim": 96, **EVERYTHING},
    "head 192/128": {"dim": 192, "v_dim": 128},
    "head 256": {"dim": 256},
    "head 256, blocks of 128": {"dim": 256, "options": {"block_size": 128}},
    "float16": {"dtype": torch.float16},
    "float32": {"dtype": torch.float32},
    "float32, head 256": {"dtype": torch.float32, "dim": 256},
    "one kv head": {"heads": (8, 1)},
    "groups of 3": {"heads": (6, 2), "dim": 96},
    "no groups": {"heads": (4, 4), "options": {"block_size": 128}},
    "second chunk": {"queries": 700},
    "requests": {"lengths": (700, 0, 1, 129, 1300), **EVERYTHING},
    "other tiles": {"options": {"tiles": AttentionTiles(64, 32, 4, 2), "energy_tiles": EnergyTiles(32, 64, 4, 2)}},
    "other tiles, blocks of 128": {"options": {"tiles": AttentionTiles(32, 128, 4, 1), "block_size": 128}},
    "fp8": {"options": {"dtype": "fp8"}},
    "fp8, blocks of 128": {"options": {"dtype": "fp8", "block_size": 128}},
    "fp8, head 80": {"dim": 80, "options": {"dtype": "fp8"}},
    "fp8, head 256, everything": {"dim": 256, **EVERYTHING, "options": {"dtype": "fp8"}},
    "fp8, requests": {"lengths": (700, 0, 1, 129, 1300), **EVERYTHING, "options": {"dtype": "fp8"}},
    "fp8, second chunk": {"queries": 700, "options": {"dtype": "fp8"}},
}
TINY: dict[str, dict[str, Any]] = {"tiny": {"dim": 16, "tokens": 200, "heads": (4, 1)}}


def arguments(
    device: torch.device,
    dim: int = 128,
    v_dim: int | None = None,
    tokens: int = 1500,
    queries: int | None = None,
    heads: tuple[int, int] = (8, 2),
    lengths: Sequence[int] = (),
    softcap: float | None = None,
    sinks: bool = False,
    dtype: torch.dtype = BF16,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Keys in runs of 50 tokens with something in common, so that blocks differ. `lengths`: padded on the left."""
    torch.manual_seed(0)
    batch = len(lengths) or 1

    def operand(count: int, heads: int, dim: int, spread: float) -> Tensor:
        return torch.randn(batch, count, heads, dim, device=device).mul_(spread).to(dtype).transpose(1, 2)

    common = torch.randn(batch, heads[1], tokens // 50 + 1, dim, device=device).repeat_interleave(50, 2)
    given: dict[str, Any] = {
        "q": operand(queries or tokens, heads[0], dim, 2.0),
        "k": (operand(tokens, heads[1], dim, 1.0) + common[:, :, :tokens]).to(dtype),
        "v": operand(tokens, heads[1], v_dim or dim, 1.0),
        "token_bounds": torch.tensor([[tokens - n, tokens] for n in lengths]) if lengths else None,
        "softcap": softcap,
        "sinks": torch.randn(heads[0], device=device).to(dtype) if sinks else None,
        "alpha": 0.3, "block_size": 64, "window_blocks": 2, "last_tokens": 100, **(options or {}),
    }  # fmt: skip
    for row, length in enumerate(lengths):
        for name in "qkv":
            given[name][row, :, : tokens - length] = torch.nan  # padding is not read
    return given


def guarded(name: str, case: dict[str, Any], device: torch.device) -> list[tuple[str, float, float]]:
    """`check`, of which an exception is a failure too."""
    try:
        return check(name, case, device)
    except Exception as error:
        return [(f"{name}: {type(error).__name__}: {error}"[:300], float("nan"), 0.0)]


def check(name: str, case: dict[str, Any], device: torch.device) -> list[tuple[str, float, float]]:
    """[(what, error, allowed)] of one case; the error is infinite when two runs differ."""
    given = arguments(device, **case)
    allowed = ALLOWED["fp8" if given.get("dtype") == "fp8" else given["q"].dtype]
    (got, counted), (again, _) = block_sparse_attention(**given), block_sparse_attention(**given)
    given = {name: value for name, value in given.items() if name not in ("tiles", "energy_tiles")}
    bounds = given["token_bounds"]
    want, wanted = block_sparse_attention_naive(**given)
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    if bounds is not None and got.isnan().any():
        error = float("nan")
    differ = abs(counted[0].item() - wanted[0].item()) / wanted[0].item()
    return [(name, error if got.equal(again) else float("inf"), allowed), (f"{name}: kept blocks", differ, 2e-3)]


def check_compilations(device: torch.device) -> list[tuple[str, float, float]]:
    """How often kernels are compiled, or loaded, for ten lengths: once each, so that a new length costs nothing."""
    import triton

    found: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **info: found.append(info["repr"])
    try:
        for tokens in (17, 20, 128, 333, 1000, 1024, 1500, 2049, 4096, 5003):
            block_sparse_attention(**arguments(device, 64, tokens=tokens))
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    return [("compilations for ten lengths", len(found), 4)]


def in_processes(calls: Sequence[Any]) -> list[Any]:
    """What each (function, arguments) returns, of several processes: most of their time is compilation."""
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [future.result() for future in [pool.submit(function, *args) for function, args in calls]]


def check_all(device: torch.device) -> list[dict[str, Any]]:
    """Every check with its error; SystemExit after the last, when one failed. On the CPU, a tiny one."""
    if device.type == "cpu":
        results = [check(name, case, device) for name, case in TINY.items()]
    else:
        calls: list[Any] = [(guarded, (name, case, device)) for name, case in CASES.items()]
        results = in_processes([*calls, (check_compilations, (device,))])
    found = [one for several in results for one in several]
    failed = [f"{what}: {error:.3g}, allowed {allowed:.3g}" for what, error, allowed in found if not error <= allowed]
    print(f"{len(found)} checks against the float32 twin, {len(failed)} failed", flush=True)
    if failed:
        raise SystemExit("\n".join(failed))
    return [{"check": what, "error": error, "allowed": allowed} for what, error, allowed in found]
