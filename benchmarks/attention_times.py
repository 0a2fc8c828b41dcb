"""Times of attention with windows, chunks, sinks or several requests on a GPU, after a check against float32.

    python benchmarks/attention_times.py --out benchmarks/results            # everything
    python benchmarks/attention_times.py --out /tmp/results --sweep --only "window 128"   # other tiles, at one length
    python benchmarks/attention_times.py --out /tmp/results --dry-run        # tiny, on the CPU, in Triton's interpreter

(With PYTHONPATH=. where the package is not installed.)

The stream is compact: its rows are blocks of 64 tokens of a prompt of which 65% stayed, unless a setting says
otherwise; several requests are padded on the left. Compared are the kernel; the op's plain torch body; for several
requests a launch of the kernel for each; FlexAttention with a block mask by position; SDPA with an explicit mask where
that
fits; `varlen_attn` where it can express the mask. Times are device times, medians, each after
the L2 cache was emptied; the plain torch body waits for the device, so it is timed as it runs. The limit is the
arithmetic of the visible (query, key) pairs or the bytes of q, k, v and the result at an H200's rates, whichever takes
longer.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
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
from attention_checks import arguments, check_all, difference, in_processes
from attention_rivals import RIVALS, visible_range
from clock import Clock, limit_ms, where_and_when

from uniprefill_fx.kernels.position_attention.kernel import position_attention
from uniprefill_fx.kernels.tiles import Tiles

LENGTHS = (4096, 32_768, 131_072)
FOUR = (16_384, 12_001, 15_013, 9_999)
SWEEP_ROWS = 32_768
Settings = dict[str, tuple[dict[str, Any], tuple[int, ...]]]
# name: arguments of `attention_checks.arguments`, and the numbers of rows
SETTINGS: Settings = {
    "Gemma-3-12B, window 1024": ({"heads": (16, 8), "dim": 256, "window": 1024}, LENGTHS),
    "the same, nothing dropped": ({"heads": (16, 8), "dim": 256, "window": 1024, "positions": False}, (32_768,)),
    "the same, one query": ({"heads": (16, 8), "dim": 256, "window": 1024, "queries": 1}, (32_768,)),
    "gpt-oss, window 128, sinks": ({"heads": (64, 8), "dim": 64, "window": 128, "sinks": True}, LENGTHS),
    "gpt-oss, full, sinks": ({"heads": (64, 8), "dim": 64, "sinks": True}, (4096, 32_768)),
    "Llama-4, chunk 8192": ({"heads": (40, 8), "dim": 128, "chunk": 8192}, LENGTHS),
    "four requests, causal": ({"heads": (32, 8), "dim": 128, "lengths": FOUR, "positions": False}, (sum(FOUR),)),
    "four requests, window 1024": ({"heads": (16, 8), "dim": 256, "lengths": FOUR, "window": 1024}, (sum(FOUR),)),
    "one request, causal": ({"heads": (32, 8), "dim": 128}, (32_768,)),
    "second chunk of 2,048, causal": ({"heads": (32, 8), "dim": 128, "queries": 2048}, (32_768,)),
}
TINY_SETTINGS: Settings = {
    "tiny, window, sinks": ({"heads": (2, 1), "dim": 16, "window": 20, "sinks": True}, (70,)),
    "tiny, requests": ({"heads": (2, 1), "dim": 16, "lengths": (40, 29), "positions": False}, (69,)),
}
# (keys, rows, warps) of the sweep by head dim, and stages; a window is also tried with heads that share tiles
SHAPES = {
    64: [(64, 128, 8), (128, 128, 8), (32, 128, 8), (64, 64, 4), (32, 64, 4)],
    128: [(128, 128, 8), (64, 128, 8), (64, 64, 4)],
    256: [(64, 128, 8), (64, 64, 4), (32, 128, 8), (32, 64, 4)],
}
STAGES = (1, 2, 3)
MIN_QUERIES = 8


def compile_tiles(options: dict[str, Any], tiles: Tiles, device: torch.device) -> None:
    """Leave the machine code in Triton's cache; tiles that do not fit are skipped here and when timed."""
    rows = {} if "lengths" in options else {"rows": 4096}
    try:
        position_attention(**arguments(device, **options, **rows), tiles=tiles)
    except triton.runtime.errors.OutOfResources:
        return


def swept(settings: Settings) -> list[tuple[str, dict[str, Any], Tiles]]:
    """(setting, its arguments, tiles) of each time of the sweep: settings of many queries, at one length."""
    found = []
    for name, (options, lengths) in settings.items():
        if options.get("queries") is not None or not (SWEEP_ROWS in lengths or "lengths" in options):
            continue
        groups = options["heads"][0] // options["heads"][1]
        for (keys, rows, warps), stages, heads in itertools.product(
            SHAPES[max(options["dim"], 64)], STAGES, (1, 2, 4, 8)
        ):
            if heads == 1 or ("window" in options and groups % heads == 0 and rows // heads >= MIN_QUERIES):
                found.append((name, options, Tiles(keys, rows, warps, stages, heads=heads)))
    return found


def measure(clock: Clock, options: dict[str, Any], rows: int, device: torch.device) -> dict[str, Any]:
    given = arguments(device, **options, **({} if "lengths" in options else {"rows": rows}))
    q, k, v = (given[name] for name in "qkv")
    low, high = visible_range(given)
    pairs = (high - low).double().sum().item()
    moved = sum(x.numel() * x.element_size() for x in (q, k, v)) + q.numel() // q.shape[3] * v.shape[3] * 2
    got = position_attention(**given)
    result: dict[str, Any] = {
        "rows": rows,
        "visible_pairs": pairs,
        "limit_ms": limit_ms(2 * q.shape[1] * pairs * (q.shape[3] + v.shape[3]), moved),
        "kernel_ms": clock.device_ms(lambda: position_attention(**given), cold=True),
        "kernel_running_ms": clock.running_ms(lambda: position_attention(**given)),
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


def sweep(clock: Clock, settings: Settings, device: torch.device) -> list[dict[str, Any]]:
    """Times of the usual tiles (None) and of others, and how their results differ; without those that do not fit."""
    found: list[dict[str, Any]] = []
    for name, choices in itertools.groupby(swept(settings), lambda entry: entry[0]):
        options = settings[name][0]
        given = arguments(device, **options, **({} if "lengths" in options else {"rows": SWEEP_ROWS}))
        usual = position_attention(**given)
        for tiles in (None, *(tiles for _, _, tiles in choices)):
            entry: dict[str, Any] = {"setting": name, "tiles": tiles and dataclasses.asdict(tiles)}
            try:
                entry["difference"] = difference(position_attention(**given, tiles=tiles), usual)
                entry["ms"] = clock.device_ms(lambda: position_attention(**given, tiles=tiles), cold=True)  # noqa: B023
            except triton.runtime.errors.OutOfResources:
                continue
            found.append(entry)
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
    parser.add_argument("--only", default="", metavar="TEXT", help="settings whose names contain it")
    parser.add_argument("--sweep", action="store_true", help=f"other tiles at {SWEEP_ROWS:,} rows, and nothing else")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, to see that it runs")
    args = parser.parse_args()
    device = torch.device("cpu" if args.dry_run else "cuda")
    began, clock = time.perf_counter(), Clock(device, repeats=30, seconds=0.5)
    settings = {n: s for n, s in (TINY_SETTINGS if args.dry_run else SETTINGS).items() if args.only in n}
    torch.set_grad_enabled(False)
    checks: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    if args.sweep:
        in_processes(
            [] if args.dry_run else [(compile_tiles, (options, tiles, device)) for _, options, tiles in swept(settings)]
        )
        print(f"{time.perf_counter() - began:6.1f} s: compiled", flush=True)
        found = sweep(clock, settings, device)
    else:
        checks = check_all(device)
        print(f"{time.perf_counter() - began:6.1f} s: checked", flush=True)
        for name, (options, lengths) in settings.items():
            for rows in lengths:
                results.append({"setting": name, **measure(clock, options, rows, device)})
                print(f"{time.perf_counter() - began:6.1f} s: {name}, {rows:,} rows", flush=True)
    for entry in sorted(found, key=lambda entry: (entry["setting"], -entry["ms"])):
        shape = entry["tiles"].values() if entry["tiles"] else ["usual tiles"]
        print(entry["setting"], *shape, f"{entry['ms']:.3f} ms, differs by {entry['difference']:.1e}")
    args.out.mkdir(parents=True, exist_ok=True)
    report = {
        **where_and_when(device),
        "checks": checks,
        "results": results,
        "sweep": found,
    }
    (args.out / "attention_times.json").write_text(json.dumps(report, indent=1) + "\n")
    if results:
        print(table(results))


if __name__ == "__main__":
    main()
