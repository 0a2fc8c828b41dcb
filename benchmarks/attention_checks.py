"""Is what `attention_times.py` measures right? The kernel, and the op that calls it, against the float32 twin."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import triton
from kernel_checks import poisoned_memory
from torch import Tensor

import uniprefill_fx.lowering.cuda  # noqa: F401  registers what the op runs on CUDA
from uniprefill_fx.kernels.position_attention.kernel import position_attention
from uniprefill_fx.kernels.position_attention.naive import position_attention_reference
from uniprefill_fx.specs import AttentionSpec

BLOCK = 64
ALLOWED = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-5}
Attention = dict[str, Any]  # arguments of `position_attention`

# what differs from: 4/2 heads, bf16, a stream of 1,500 rows that were 2,300 tokens
EVERYTHING = {"window": 300, "chunk": 700, "softcap": 20.0, "sinks": True, "bias": True, "padding": True}
CASES: dict[str, dict[str, Any]] = {
    "head 64, window": {"dim": 64, "window": 128},
    "head 80, window": {"dim": 80, "window": 200},
    "head 96, window": {"dim": 96, "window": 200},
    "head 128, window": {"dim": 128, "window": 1024},
    "head 192/128": {"dim": 192, "v_dim": 128},
    "head 256, window": {"dim": 256, "window": 1024},
    "head 256, softcap, float16": {"dim": 256, "softcap": 30.0, "dtype": torch.float16},
    "float32, head 64": {"dim": 64, "window": 300, "dtype": torch.float32},
    "float32, head 128": {"dim": 128, "chunk": 500, "dtype": torch.float32},
    "float32, head 256": {"dim": 256, "dtype": torch.float32},
    "sinks": {"dim": 64, "window": 128, "sinks": True},
    "alibi": {"dim": 128, "bias": True},
    "alibi, by row": {"dim": 128, "bias": True, "positions": False},
    "padding, batch": {"dim": 64, "padding": True, "batch": 3},
    "by row, chunk": {"dim": 128, "chunk": 512, "positions": False},
    "prompts in a row": {"dim": 128, "sequence_ids": True, "batch": 2},
    "chunks that begin later": {"dim": 128, "chunk": 400, "chunk_start": (300, 0), "batch": 2},
    "requests, causal": {"dim": 128, "lengths": (700, 0, 1, 129, 670), "positions": False},
    "requests, window": {"dim": 128, "lengths": (700, 0, 1, 129, 670), "window": 300},
    "requests, everything": {"dim": 96, "lengths": (700, 130, 670), **EVERYTHING},
    "one query": {"dim": 256, "queries": 1, "window": 1024},
    "five queries": {"dim": 128, "queries": 5, "sinks": True},
    "second chunk": {"dim": 128, "queries": 600},
    "256 requests": {"dim": 64, "lengths": tuple(range(256)), "window": 100},
}
TINY = {"tiny": {"dim": 16, "rows": 70, "window": 20}, "tiny, requests": {"dim": 16, "lengths": (20, 0, 9)}}


def compact_positions(rows: int, keep: float, device: torch.device) -> Tensor:
    """Slots of `rows` rows, whole blocks of a prompt of which a fraction `keep` stayed."""
    blocks = -(-rows // BLOCK)
    chosen = torch.randperm(max(blocks, int(blocks / keep)), device=device)[:blocks].sort().values
    return (chosen[:, None] * BLOCK + torch.arange(BLOCK, device=device)).flatten()[:rows]


def arguments(
    device: torch.device,
    dim: int,
    v_dim: int | None = None,
    rows: int = 1500,
    lengths: Sequence[int] = (),
    queries: int | None = None,
    positions: bool = True,
    heads: tuple[int, int] = (4, 2),
    batch: int = 1,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    bias: bool = False,
    padding: bool = False,
    sequence_ids: bool = False,
    chunk_start: tuple[int, ...] = (),
    dtype: torch.dtype = torch.bfloat16,
    keep: float = 0.65,
) -> Attention:
    """Random operands, in memory as projections leave them: (batch, tokens, heads, dim).

    `lengths`: of each request of a batch that is padded on the left.
    """
    torch.manual_seed(0)
    rows, batch = max(lengths, default=rows), len(lengths) or batch
    queries, place, places = queries or rows, None, rows
    if positions:
        own = [compact_positions(n, keep, device) for n in lengths or (rows,)]
        place = torch.stack([torch.nn.functional.pad(s, (rows - len(s), 0), value=-1) for s in own])
        places = int(place.max()) + 1

    def operand(count: int, heads: int, dim: int, spread: float) -> Tensor:
        x = torch.empty(batch, count, heads, dim, device=device, dtype=dtype)
        return x.normal_(0.0, spread).transpose(1, 2)

    mask = None
    if padding:
        mask = torch.rand(batch, places, device=device) > 0.2
        mask[:, :40] = False
    return {
        "q": operand(queries, heads[0], dim, 2.5),
        "k": operand(rows, heads[1], dim, 1.0),
        "v": operand(rows, heads[1], v_dim or dim, 1.0),
        "q_positions": place if place is None or queries == rows else place[:, rows - queries :],
        "k_positions": place,
        "token_bounds": torch.tensor([[rows - n, rows] for n in lengths], device=device) if lengths else None,
        "spec": AttentionSpec(
            window=window,
            chunk=chunk,
            softcap=softcap,
            key_mask=mask,
            sinks=torch.randn(heads[0], device=device).to(dtype) if sinks else None,
            bias=-torch.rand(1, heads[0], 1, places, device=device) * 5 if bias else None,
            sequence_ids=(torch.rand(batch, places, device=device) < 0.003).cumsum(1) if sequence_ids else None,
            chunk_start=torch.tensor(chunk_start, device=device) if chunk_start else None,
        ),
    }


def difference(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def check(name: str, options: dict[str, Any], device: torch.device) -> list[tuple[str, float, float]]:
    """[(what, relative error, allowed)] of one case: the kernel, and the op, which may choose SDPA."""
    given = arguments(device, **options)
    want, allowed = position_attention_reference(**given), ALLOWED[given["q"].dtype]
    with poisoned_memory():
        got, again = position_attention(**given), position_attention(**given)
    error = difference(got, want) if got.equal(again) else float("inf")
    token_bounds = given["token_bounds"]  # the op has them on the host
    operands = [given[name] for name in ("q", "k", "v", "q_positions", "k_positions")]
    operands.append(None if token_bounds is None else token_bounds.cpu())
    by_op = torch.ops.uniprefill.attention(*operands, *given["spec"].arguments())
    return [(f"attention, {name}", error, allowed), (f"the op, {name}", difference(by_op, want), allowed)]


def check_large_offsets(device: torch.device) -> tuple[str, float, float]:
    """Heads that lie more than 2^31 elements apart."""
    rows, dim = 1000, 64
    given = arguments(device, dim, rows=rows, window=300, heads=(2, 2))
    for name in "qkv":
        memory = torch.empty((1 << 31) + (1 << 20), dtype=torch.bfloat16, device=device)
        given[name] = memory.as_strided((1, 2, rows, dim), (0, (1 << 31) + 16, dim, 1)).copy_(given[name])
    got = position_attention(**given)
    return (
        "attention, beyond 2^31 elements",
        difference(got, position_attention_reference(**given)),
        ALLOWED[torch.bfloat16],
    )


def check_compilations(device: torch.device) -> tuple[str, float, float]:
    """How often the kernel is compiled, or loaded, for ten lengths: once, so that a new length costs nothing."""
    found: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **info: found.append(info["repr"])
    try:
        for rows in (17, 20, 128, 333, 1000, 1024, 1500, 2049, 4096, 5003):
            position_attention(**arguments(device, 32, rows=rows, window=77, sinks=True))
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    return "compilations for ten lengths", len(found), 1


def in_processes(calls: Sequence[Any]) -> list[Any]:
    """What each (function, arguments) returns, of several processes: most of their time is compilation."""
    with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [future.result() for future in [pool.submit(function, *args) for function, args in calls]]


def check_all(device: torch.device, also: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Every check with its error; SystemExit after the last, when one failed. On the CPU, tiny ones.

    `also`: (function, arguments) that leave machine code in Triton's cache meanwhile, and return nothing.
    """
    if device.type == "cpu":
        found = [result for name, options in TINY.items() for result in check(name, options, device)]
    else:
        calls = [(check, (name, options, device)) for name, options in CASES.items()]
        found = [result for results in in_processes([*calls, *also]) if results for result in results]
        found += [check_large_offsets(device), check_compilations(device)]
    failed = list(_failures(found))
    print(f"{len(found)} checks against the float32 twin, {len(failed)} failed", flush=True)
    if failed:
        raise SystemExit("\n".join(failed))
    return [{"check": what, "error": error, "allowed": allowed} for what, error, allowed in found]


def _failures(found: Sequence[tuple[str, float, float]]) -> Iterator[str]:
    for what, error, allowed in found:
        if not error <= allowed:  # not a number counts too
            yield f"{what}: error {error:.3g}, allowed {allowed:.3g}"
