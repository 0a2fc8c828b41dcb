"""Times of attention with windows, chunks, sinks or several requests on a GPU, after a check against float32.

    python benchmarks/attention_times.py --out benchmarks/results            # everything
    python benchmarks/attention_times.py --out /tmp/results --sweep          # also other tiles, at one length
    python benchmarks/attention_times.py --out /tmp/results --dry-run        # tiny, on the CPU, in Triton's interpreter

(With PYTHONPATH=. where the package is not installed.)

The stream is compact: its rows are blocks of 64 tokens of a prompt of which 65% stayed, unless a setting says
otherwise; several requests are padded on the left. Compared are the kernel; the op's plain torch body; for several
requests a launch of the kernel for each; FlexAttention with a block mask by slot; SDPA with an explicit mask where that
fits; `varlen_attn` where it can express the mask. Times are device times, medians, each after
the L2 cache was emptied; the plain torch body waits for the device, so it is timed as it runs. The limit is the
arithmetic of the visible (query, key) pairs or the bytes of q, k, v and the result at an H200's rates, whichever takes
longer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

import torch
import triton
from attention_checks import arguments, check_all, difference
from attention_rivals import RIVALS, visible_range
from clock import Clock, limit_ms, where_and_when

from uniprefill_fx.kernels.slot_attention import slot_attention
from uniprefill_fx.kernels.tiles import Tiles

LENGTHS = (4096, 32_768, 131_072)
FOUR = (16_384, 12_001, 15_013, 9_999)
SWEEP_ROWS = 32_768
# name: arguments of `attention_checks.arguments`, and the numbers of rows
SETTINGS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "Gemma-3-12B, window 1024": ({"heads": (16, 8), "dim": 256, "window": 1024}, LENGTHS),
    "the same, nothing dropped": ({"heads": (16, 8), "dim": 256, "window": 1024, "slots": False}, (32_768,)),
    "the same, one query": ({"heads": (16, 8), "dim": 256, "window": 1024, "queries": 1}, (32_768,)),
    "gpt-oss, window 128, sinks": ({"heads": (64, 8), "dim": 64, "window": 128, "sinks": True}, LENGTHS),
    "gpt-oss, full, sinks": ({"heads": (64, 8), "dim": 64, "sinks": True}, (4096, 32_768)),
    "Llama-4, chunk 8192": ({"heads": (40, 8), "dim": 128, "chunk": 8192}, LENGTHS),
    "four requests, causal": ({"heads": (32, 8), "dim": 128, "lengths": FOUR, "slots": False}, (sum(FOUR),)),
    "four requests, window 1024": ({"heads": (16, 8), "dim": 256, "lengths": FOUR, "window": 1024}, (sum(FOUR),)),
    "one request, causal": ({"heads": (32, 8), "dim": 128}, (32_768,)),
    "second chunk of 2,048, causal": ({"heads": (32, 8), "dim": 128, "queries": 2048}, (32_768,)),
}
TINY_SETTINGS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "tiny, window, sinks": ({"heads": (2, 1), "dim": 16, "window": 20, "sinks": True}, (70,)),
    "tiny, requests": ({"heads": (2, 1), "dim": 16, "lengths": (40, 29), "slots": False}, (69,)),
}
TILES: dict[int, list[Tiles]] = {
    64: [Tiles(k, r, w, s) for k, r, w in ((64, 128, 8), (128, 128, 8), (32, 128, 8), (64, 64, 4)) for s in (2, 3)],
    128: [Tiles(k, r, w, s) for k, r, w in ((128, 128, 8), (64, 128, 8), (64, 64, 4)) for s in (2, 3)],
    256: [Tiles(64, 128, 8, 1), Tiles(64, 128, 8, 2), Tiles(64, 64, 4, 2)]
    + [Tiles(32, r, w, s) for r, w in ((128, 8), (64, 4)) for s in (2, 3, 4)],
}


def compile_tiles(options: dict[str, Any], tiles: Tiles, device: torch.device) -> None:
    """Leave the machine code in Triton's cache; tiles that do not fit are skipped here and when timed."""
    rows = {} if "lengths" in options else {"rows": 4096}
    try:
        slot_attention(**arguments(device, **options, **rows), tiles=tiles)
    except triton.runtime.errors.OutOfResources:
        return


def swept() -> list[tuple[str, dict[str, Any], Tiles]]:
    """(setting, its arguments, tiles) of each time of the sweep: settings of many queries, at one length."""
    return [
        (name, options, tiles)
        for name, (options, rows) in SETTINGS.items()
        for tiles in TILES[options["dim"]]
        if options.get("queries") is None and (SWEEP_ROWS in rows or "lengths" in options)
    ]


def measure(clock: Clock, options: dict[str, Any], rows: int, device: torch.device) -> dict[str, Any]:
    given = arguments(device, **options, **({} if "lengths" in options else {"rows": rows}))
    q, k, v = (given[name] for name in "qkv")
    low, high = visible_range(given)
    pairs = (high - low).double().sum().item()
    moved = sum(x.numel() * x.element_size() for x in (q, k, v)) + q.numel() // q.shape[3] * v.shape[3] * 2
    got = slot_attention(**given)
    result: dict[str, Any] = {
        "rows": rows,
        "visible_pairs": pairs,
        "limit_ms": limit_ms(2 * q.shape[1] * pairs * (q.shape[3] + v.shape[3]), moved),
        "kernel_ms": clock.device_ms(lambda: slot_attention(**given), cold=True),
        "kernel_running_ms": clock.running_ms(lambda: slot_attention(**given)),
    }
    for name, make in RIVALS.items():
        try:
            run = make(given)
            if run is None:
                continue
            result[f"{name}_difference"] = difference(run(), got)
            timed = clock.running_ms if name == "present" else lambda f: clock.device_ms(f, cold=True)
            result[f"{name}_ms"] = timed(run)
        except Exception as error:  # a rival that fails is a finding, not the end of the run
            result[f"{name}_error"] = f"{type(error).__name__}: {error}"[:300]
            print(f"  {name}: {result[f'{name}_error']}", flush=True)
    return result


def sweep(clock: Clock, device: torch.device) -> list[dict[str, Any]]:
    """Times of other tiles; None for tiles that do not fit."""
    found, given, at = [], {}, None
    for name, options, tiles in swept():
        if name != at:
            given, at = arguments(device, **options, **({} if "lengths" in options else {"rows": SWEEP_ROWS})), name
        try:
            ms = clock.device_ms(lambda: slot_attention(**given, tiles=tiles), cold=True)  # noqa: B023
        except triton.runtime.errors.OutOfResources:
            ms = None
        found.append({"setting": name, "tiles": dataclasses.asdict(tiles), "ms": ms})
    return found


def table(results: list[dict[str, Any]]) -> str:
    columns = ["limit_ms", "kernel_ms", *(f"{name}_ms" for name in RIVALS)]
    lines = ["| setting | rows | " + " | ".join(columns) + " | limit / kernel |", "|---" * (len(columns) + 3) + "|"]
    for r in results:
        times = " | ".join(f"{r[c]:.3f}" if c in r else "" for c in columns)
        lines.append(f"| {r['setting']} | {r['rows']:,} | {times} | {r['limit_ms'] / r['kernel_ms']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for attention_times.json")
    parser.add_argument("--sweep", action="store_true", help=f"other tiles as well, at {SWEEP_ROWS:,} rows")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, to see that it runs")
    args = parser.parse_args()
    device = torch.device("cpu" if args.dry_run else "cuda")
    began, clock = time.perf_counter(), Clock(device, repeats=30, seconds=0.5)
    also = [(compile_tiles, (options, tiles, device)) for _, options, tiles in swept()] if args.sweep else []
    checks, results = check_all(device, args.dry_run, also), []
    print(f"{time.perf_counter() - began:6.1f} s: checked", flush=True)
    torch.set_grad_enabled(False)
    for name, (options, lengths) in (TINY_SETTINGS if args.dry_run else SETTINGS).items():
        for rows in lengths:
            results.append({"setting": name, **measure(clock, options, rows, device)})
            print(f"{time.perf_counter() - began:6.1f} s: {name}, {rows:,} rows", flush=True)
    found = sweep(clock, device) if args.sweep and not args.dry_run else []
    for entry in found:
        print(entry["setting"], *entry["tiles"].values(), entry["ms"])
    args.out.mkdir(parents=True, exist_ok=True)
    report = {
        **where_and_when(device),
        "checks": checks,
        "results": results,
        "sweep": found,
    }
    (args.out / "attention_times.json").write_text(json.dumps(report, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
