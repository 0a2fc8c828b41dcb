"""Times of the scoring and selection kernels on a GPU, after a check against float64.

    python benchmarks/kernel_times.py --out benchmarks/results            # everything
    python benchmarks/kernel_times.py --out /tmp/results --quick --sweep  # fewer checks and repeats; also other tiles
    python benchmarks/kernel_times.py --out /tmp/results --dry-run        # tiny, on the CPU, in Triton's interpreter

(With PYTHONPATH=. where the package is not installed.)

Times are device times: medians over replays of a CUDA graph, each after the L2 cache was emptied; at 8,192 tokens and
below the cache stays warm, as it is behind the projections that made q and k. Plain torch scoring waits for the device,
so it is timed as it runs. `batch_ms` is score and select of a padded batch, prompts of the named length and of three
quarters, half and a quarter of it; `apart_ms` of the same prompts one by one.

The file isn't called kernels.py: a script's folder comes first in sys.path, and transformers looks for a `kernels`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

import torch
import triton
from clock import Clock, where_and_when
from kernel_checks import check_all, left_padded
from torch import Tensor

from uniprefill_fx.kernels.block_scores.kernel import block_scores
from uniprefill_fx.kernels.block_scores.naive import block_scores_reference
from uniprefill_fx.kernels.select_blocks.kernel import mark_blocks, queue_selection
from uniprefill_fx.kernels.tiles import Tiles

BLOCK_SIZE, LAST_N, SINKS, P = 64, 128, 128, 0.99
WARM_TOKENS = 8192
SHAPES = {"32/8 heads of 128": (32, 8, 128), "16/2 heads of 256": (16, 2, 256)}
TINY_SHAPES = {"2/1 heads of 16": (2, 1, 16)}
SWEEP = [
    Tiles(64, 64, 4, 2),
    Tiles(64, 128, 8, 2),
    Tiles(128, 64, 4, 1),
    Tiles(128, 64, 4, 2),
    Tiles(128, 64, 4, 2, registers=128),
    Tiles(128, 64, 8, 1),
    Tiles(128, 64, 8, 2),
    Tiles(128, 128, 8, 2),
    Tiles(128, 128, 8, 2, registers=128),
    Tiles(256, 64, 8, 2),
    Tiles(256, 64, 8, 2, registers=128),
    Tiles(256, 64, 8, 3),
]


def inputs(tokens: int, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """bf16 q and k whose attention is peaked: each block of keys has a log-normal share of the mass."""
    torch.manual_seed(tokens)
    direction = torch.nn.functional.normalize(torch.randn(head_dim, device=device), dim=0) * head_dim**0.25
    gain = (torch.randn(tokens // BLOCK_SIZE + 1, device=device) * 2).repeat_interleave(BLOCK_SIZE)[:tokens]
    q = torch.randn(tokens, heads, head_dim, dtype=torch.bfloat16, device=device) + direction.bfloat16()
    k = torch.randn(tokens, kv_heads, head_dim, dtype=torch.bfloat16, device=device)
    k += (gain[:, None] * direction).bfloat16()[:, None]
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None]


def measure(
    clock: Clock, tokens: int, shape: tuple[int, int, int], device: torch.device, sweep: bool
) -> dict[str, Any]:
    q, k = inputs(tokens, *shape, device)
    bounds, prompts = left_padded((tokens,), device), torch.tensor([tokens], device=device)
    scale, cold = shape[2] ** -0.5, tokens > WARM_TOKENS

    def score(**options: Any) -> Tensor:
        return block_scores(q, k, bounds, scale, LAST_N, BLOCK_SIZE, **options)

    def select(scores: Tensor) -> tuple[Tensor, Tensor]:
        return queue_selection(scores, bounds, prompts, BLOCK_SIZE, LAST_N, SINKS, P, False)

    def kept(scores: Tensor, p: float) -> Tensor:
        return mark_blocks(scores, bounds, prompts, BLOCK_SIZE, 0, 0, p, False)[1][0]

    q4, k4 = (x.transpose(1, 2).repeat(4, 1, 1, 1).transpose(1, 2) for x in (q, k))
    bounds4 = left_padded(tuple(tokens * quarters // 4 for quarters in (4, 3, 2, 1)), device)

    def several(step: int) -> None:
        """`step` prompts in a launch."""
        for r in range(0, 4, step):
            own, lengths = bounds4[r : r + step], prompts.expand(step).contiguous()
            mass = block_scores(q4[r : r + step], k4[r : r + step], own, scale, LAST_N, BLOCK_SIZE)
            queue_selection(mass, own, lengths, BLOCK_SIZE, LAST_N, SINKS, P, False)

    scores, scores8 = score(), score(dtype="fp8")
    result: dict[str, Any] = {
        "tokens": tokens,
        "score_torch_ms": clock.running_ms(lambda: block_scores_reference(q, k, bounds, scale, LAST_N, BLOCK_SIZE)),
        "score_ms": clock.device_ms(score, cold),
        "score_again_ms": clock.device_ms(score, cold),  # a difference within this spread is noise
        "score_fp8_ms": clock.device_ms(lambda: score(dtype="fp8"), cold),
        "select_ms": clock.device_ms(lambda: select(scores), cold),
        "score_select_ms": clock.device_ms(lambda: select(score()), cold),
        "score_select_fp8_ms": clock.device_ms(lambda: select(score(dtype="fp8")), cold),
        "batch_ms": clock.device_ms(lambda: several(4), cold),
        "apart_ms": clock.device_ms(lambda: several(1), cold),
        "kernels_us": clock.launches(lambda: select(score())),
        "kernels_fp8_us": clock.launches(lambda: select(score(dtype="fp8"))),
        "kept_blocks": {str(p): kept(scores, p).float().mean().item() for p in (0.9, 0.99)},
        "fp8_blocks_that_differ": {
            str(p): (kept(scores, p) != kept(scores8, p)).float().mean().item() for p in (0.9, 0.99)
        },
        "fp8_score_error": ((scores8 - scores).norm() / scores.norm()).item(),
    }
    if sweep:
        result["sweep"] = [
            {"tiles": dataclasses.asdict(tiles), "dtype": dtype, "ms": tiles_ms(clock, score, tiles, dtype, cold)}
            for dtype in ("input", "fp8")
            for tiles in SWEEP
        ]
    return result


def tiles_ms(clock: Clock, score: Callable[..., Tensor], tiles: Tiles, dtype: str, cold: bool) -> float | None:
    """None when the tiles do not fit."""
    try:
        return clock.device_ms(lambda: score(tiles=tiles, dtype=dtype), cold)
    except triton.runtime.errors.OutOfResources:
        return None


def table(results: list[dict[str, Any]]) -> str:
    columns = ["score_torch_ms", "score_ms", "score_fp8_ms", "select_ms", "score_select_ms", "score_select_fp8_ms"]
    columns += ["batch_ms", "apart_ms"]
    lines = ["| shape | tokens | " + " | ".join(columns) + " | launches | fp8 differs |", "|---" * 12 + "|"]
    for r in results:
        times = " | ".join(f"{r[c]:.3f}" for c in columns)
        differs = max(r["fp8_blocks_that_differ"].values())
        lines.append(f"| {r['shape']} | {r['tokens']:,} | {times} | {len(r['kernels_us'])} | {differs:.2%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for kernel_times.json")
    parser.add_argument(
        "--quick", action="store_true", help="fewer checks, 30 repeats rather than 100, no 32,768 tokens"
    )
    parser.add_argument("--sweep", action="store_true", help="other tiles as well, at the largest length")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, to see that it runs")
    args = parser.parse_args()
    device = torch.device("cpu" if args.dry_run else "cuda")
    lengths = [96, 200] if args.dry_run else [4096, 131_072] if args.quick else [4096, 32_768, 131_072]
    began, clock = time.perf_counter(), Clock(device, 30 if args.quick else 100)
    checks, results = check_all(device, tiny=args.dry_run, quick=args.quick), []
    for name, shape in (TINY_SHAPES if args.dry_run else SHAPES).items():
        for tokens in lengths:
            result = measure(clock, tokens, shape, device, args.sweep and tokens == lengths[-1])
            results.append({"shape": name, **result})
            print(f"{time.perf_counter() - began:6.1f} s: {name}, {tokens:,} tokens", flush=True)
    for result in results:
        for entry in result.get("sweep", []):
            print(result["shape"], entry["dtype"], entry["tiles"], entry["ms"])
    args.out.mkdir(parents=True, exist_ok=True)
    report = {
        **where_and_when(device),
        "options": {"block_size": BLOCK_SIZE, "last_n": LAST_N, "sink_tokens": SINKS, "p": P},
        "checks": checks,
        "results": results,
    }
    (args.out / "kernel_times.json").write_text(json.dumps(report, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
