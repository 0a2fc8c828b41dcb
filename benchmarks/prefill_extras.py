"""What `prefill.py` measures beside the times at each length: exact limits, kernels, decode, stock torch.compile."""

from __future__ import annotations

import time
from typing import Any

import torch
from prefill_bench import DENSE, STOCK, UNI, Bench
from prefill_tools import GIB, median
from torch import Tensor

WARM_DECODE_STEPS = 3
TRACE_SECONDS = 25.0  # a guess of Dynamo's time for one graph, before it is known


def exact_limit(bench: Bench, result: dict[str, Any]) -> None:
    """(a) at the row counts of one result."""
    wanted = sorted({n // bench.args.batch for n in result["rows"]} - {result["tokens"]})
    seconds = sum(3.3 * bench.guess(DENSE, n) for n in wanted)
    if not bench.progress.allows(f"exact limit at {result['tokens']:,}", seconds):
        return
    exact = []
    for tokens in wanted:
        ids = bench.ids(tokens)
        bench.checked(DENSE, ids)
        times = [bench.clock.time(lambda ids=ids: bench.prefill(DENSE, ids)) for _ in range(2)]
        exact.append((tokens, median(times)["ms"]))
    result["exact"] = exact
    bench.check_compilations()
    bench.save()
    bench.progress.say(
        f"exact limit at {result['tokens']:,}: {result['limit_exact_ms']:.1f} ms; interpolated {result['limit_ms']:.1f}"
    )


def profile(bench: Bench, tokens: int) -> None:
    """Which kernels ran, by time."""
    if not bench.progress.allows(f"profile at {tokens:,}", 10 + 2 * bench.guess(DENSE, tokens)):
        return
    ids = bench.ids(tokens)
    bench.report["profile"] = {"tokens": tokens}
    for kind in (DENSE, UNI):
        kernels = bench.clock.kernels(lambda kind=kind: bench.prefill(kind, ids))
        total = sum(k["ms"] for k in kernels)
        bench.report["profile"][kind] = {"total_ms": total, "kernels": kernels[:40]}
        bench.progress.say(f"{kind} at {tokens:,} tokens: {len(kernels)} kernels, {total:.1f} ms together")
        for k in kernels[:12]:
            print(f"    {k['ms']:9.2f} ms {k['calls']:5} calls  {k['kernel']}")
    bench.save()


def decode(bench: Bench, tokens: int | None) -> None:
    """Greedy steps after a compact and after a dense prefill. The caches grow by `cat`, as DynamicCache does."""
    longest = max((r["tokens"] for r in bench.results if DENSE in r), default=32_768)
    compiling = bench.report["compile"]["inner_backend_s"]["dense"] + TRACE_SECONDS
    choices = [n for n in (longest, 32_768) if n <= longest] if tokens is None else [tokens]
    for choice in dict.fromkeys(choices):
        if bench.progress.allows(f"decode at {choice:,}", compiling + 2 * bench.guess(DENSE, choice) + 5):
            break
    else:
        return
    ids = bench.ids(choice)
    found = bench.report["decode"] = {"tokens": choice, "steps": bench.args.decode_steps}
    for kind in (UNI, DENSE):
        found[kind] = _decode(bench, kind, ids)
        bench.save()
    found["dense_over_uniprefill"] = found[DENSE]["ms_per_token"] / found[UNI]["ms_per_token"]
    bench.progress.say(f"decode at {choice:,}: {found['dense_over_uniprefill']:.3f}x")


def _decode(bench: Bench, kind: str, ids: Tensor) -> dict[str, Any]:
    steps, graphs = bench.args.decode_steps, len(bench.watch.found)
    out, _ = bench.checked(kind, ids)
    cache, next_id = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
    del out
    prefilled = _size(cache)

    def run(count: int) -> None:
        nonlocal next_id
        for _ in range(count):
            logits = bench.model(next_id, past_key_values=cache).logits
            next_id = logits[:, -1].argmax(-1, keepdim=True)

    first = bench.clock.time(lambda: run(1))
    run(WARM_DECODE_STEPS - 1)
    timing = bench.clock.time(lambda: run(steps))
    rows, gib = _size(cache)
    graphs = len(bench.watch.found) - graphs
    grown = rows - prefilled[0]
    growing = sum(layer.keys is not None and not layer.is_sliding for layer in cache.layers if hasattr(layer, "keys"))
    if grown != growing * (steps + WARM_DECODE_STEPS):  # windows that are full hold what they held
        bench.progress.warn(f"the cache grew by {grown} rows in {steps + WARM_DECODE_STEPS} steps")
    bench.progress.say(
        f"decode after {kind}: {timing.ms / steps:.2f} ms a token ({timing.host_ms / steps:.2f} ms of the host); "
        f"cache {prefilled[1]:.2f} GiB, {grown} rows added; first step "
        f"{first.wall_ms / 1e3:.1f} s, {graphs} graphs compiled; peak {timing.peak / GIB:.1f} GiB"
    )
    return {
        "ms_per_token": timing.ms / steps,
        "host_ms_per_token": timing.host_ms / steps,
        "cache_rows_before": prefilled[0],
        "cache_rows_after": rows,
        "cache_gib_before": prefilled[1],
        "cache_gib_after": gib,
        "first_step_s": first.wall_ms / 1e3,
        "graphs_compiled": graphs,
        "peak_gib": timing.peak / GIB,
    }


def stock(bench: Bench, lengths: list[int]) -> None:
    """(b) at the lengths whose mask fits."""
    compiled = torch.compile(bench.model.forward, dynamic=None if len(lengths) == 1 else True)
    seconds = bench.report["compile"]["inner_backend_s"]["dense"] + TRACE_SECONDS
    if bench.clock.cuda:
        torch.cuda.empty_cache()
    for tokens in lengths:
        mask = 8 * tokens**2  # bytes: bool, a bf16 copy, and as much again in between
        free = torch.cuda.mem_get_info()[0] if bench.clock.cuda else 1 << 40
        if mask + tokens * (1 << 19) > free:
            bench.progress.skip(f"stock at {tokens:,}", f"{free / GIB:.0f} GiB free, {mask / GIB:.0f} for the mask")
            continue
        if not bench.progress.allows(f"stock at {tokens:,}", seconds):
            continue
        ids, began = bench.ids(tokens), time.perf_counter()
        compiled(ids, logits_to_keep=1, use_cache=True)
        bench.clock.synchronize()
        first = time.perf_counter() - began
        warm = bench.clock.time(lambda ids=ids: compiled(ids, logits_to_keep=1, use_cache=True))
        repeats = max(1, min(bench.repeats(2e-3 * warm.ms), int(bench.progress.left() / warm.ms * 1e3)))
        times = [
            bench.clock.time(lambda ids=ids: compiled(ids, logits_to_keep=1, use_cache=True)) for _ in range(repeats)
        ]
        bench.result(tokens)[STOCK] = {**median(times), "first_call_s": first, "dynamic": len(lengths) > 1}
        bench.save()
        seconds = 12 * warm.ms * 1e-3  # the next length is longer, and compiled already
        bench.progress.say(f"stock at {tokens:,}: {[round(t.ms, 2) for t in times]} ms; first call {first:.1f} s")


def _size(cache: Any) -> tuple[int, float]:
    """Rows of all layers, and GiB of keys and values."""
    layers = [layer for layer in cache.layers if hasattr(layer, "keys")]  # not those of linear attention alone
    tensors = [t for layer in layers for t in (layer.keys, layer.values)]
    return sum(layer.keys.shape[-2] for layer in layers), sum(t.nbytes for t in tensors) / GIB
