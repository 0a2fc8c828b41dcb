"""Times and errors of block-sparse attention on a GPU, on structured inputs, beside dense attention.

    python benchmarks/block_sparse.py --out benchmarks/results                 # checks, times, errors
    python benchmarks/block_sparse.py --out /tmp/results --sweep               # other tiles, at one length
    python benchmarks/block_sparse.py --out /tmp/results --dry-run             # tiny, on the CPU, interpreted

The shape is Llama-3.1-8B's: 32 query heads, 8 kv heads of 128, one request, bfloat16. Times are device times (CUDA
graphs), medians, each after the L2 cache was emptied. Selection is everything before attention: means, energies and
lists, and in eight bits the conversion of keys and values. Density is the computed part of the blocks that causality
allows. The error is the relative L2 distance to float32 attention on 256 sampled rows of all heads.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

import torch
import triton
from block_sparse_checks import check_all, in_processes
from clock import Clock, where_and_when
from structured_inputs import structured_inputs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from uniprefill_fx.kernels.block_sparse_attention.api import block_sparse_attention, select_blocks_of_keys
from uniprefill_fx.kernels.block_sparse_attention.block_energies import block_energies
from uniprefill_fx.kernels.block_sparse_attention.block_means import block_means
from uniprefill_fx.kernels.block_sparse_attention.kernel import attend_key_blocks
from uniprefill_fx.kernels.block_sparse_attention.quantise_blocks import quantise_blocks
from uniprefill_fx.kernels.block_sparse_attention.tiles import AttentionTiles, EnergyTiles

LENGTHS = (4096, 32_768, 131_072)
SAMPLED_ROWS = 256
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16, corrected": {},
    "bf16, not corrected": {"correction": False},
    "fp8, corrected": {"dtype": "fp8"},
    "fp8, not corrected": {"dtype": "fp8", "correction": False},
}
# the same tokens are sinks and window
SIZES: dict[int, dict[str, Any]] = {
    128: {"block_size": 128, "sink_blocks": 2, "window_blocks": 4},
    64: {"block_size": 64, "sink_blocks": 4, "window_blocks": 8},
}
LAST_TOKENS, ALPHA, PARTS = 256, 0.1, 2
SWEEP_LENGTH = 32_768
SWEEP = {
    False: [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (64, 128, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3)],
    True: [(128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 8, 4), (64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 3)],
}  # by fp8: rows, keys, warps, stages
ENERGY_SWEEP = [(128, 64, 4, 1), (128, 64, 4, 2), (128, 64, 8, 1), (128, 128, 8, 2), (64, 64, 4, 1), (128, 128, 4, 1)]


class Stages:
    """The calls that make up one attention, with what each needs already there."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, size: int, fp8: bool) -> None:
        self.q, self.k, self.v, self.size, self.fp8 = q, k, v, SIZES[size], fp8
        self.scale = q.shape[3] ** -0.5
        self.selection = self.select()
        self.largest = self.selection.largest
        self.quantised = self.quantise() if fp8 else None

    def select(self, energy_tiles: EnergyTiles | None = None) -> Any:
        dtype = "fp8" if self.fp8 else "input"
        options = {**self.size, "alpha": ALPHA, "last_tokens": LAST_TOKENS, "dtype": dtype, "tiles": energy_tiles, "parts": PARTS}
        return select_blocks_of_keys(self.q, self.k, self.v, None, self.scale, None, **options)

    def means(self) -> Any:
        return block_means(self.k, self.v, None, self.size["block_size"], PARTS, self.largest)

    def energies(self, tiles: EnergyTiles | None = None) -> Tensor:
        args = (self.q, self.selection.part_means, None, self.k.shape[2], self.scale, self.size["block_size"], None)
        return block_energies(*args, tiles)

    def quantise(self) -> Any:
        _, k_means, v_means, _, largest = self.selection
        assert largest is not None
        return quantise_blocks(self.k, self.v, k_means, v_means, None, self.size["block_size"], largest)

    def attend(self, tiles: AttentionTiles, correction: bool = True) -> Tensor:
        blocks, k_means, v_means, _, _ = self.selection
        return attend_key_blocks(
            self.q, self.k, self.v, k_means, v_means, blocks, None, self.scale, self.size["block_size"],
            self.size["window_blocks"], correction, None, None, self.quantised, tiles,
        )  # fmt: skip


def exact_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """(heads, rows, v_dim) float32 attention of some rows."""
    group, found = q.shape[1] // k.shape[1], []
    hidden = torch.arange(k.shape[2], device=q.device) > rows[:, None]
    for head in range(k.shape[1]):
        own = q[0, head * group : (head + 1) * group, rows].float()
        logits = (own @ k[0, head].float().T) * q.shape[3] ** -0.5
        found.append(logits.masked_fill_(hidden, -torch.inf).softmax(-1) @ v[0, head].float())
    return torch.cat(found)


def difference(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION] if q.is_cuda else [SDPBackend.MATH]):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def measure(clock: Clock, tokens: int, device: torch.device) -> Iterator[dict[str, Any]]:
    heads, kv_heads = (32, 8) if device.type == "cuda" else (4, 1)
    q, k, v = structured_inputs(tokens, heads, kv_heads, device=device)
    rows = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))[:SAMPLED_ROWS].to(device)
    want = exact_rows(q, k, v, rows)
    yield {
        "tokens": tokens,
        "variant": "dense, cuDNN",
        "ms": clock.device_ms(lambda: dense(q, k, v), cold=True),
        "error": difference(dense(q, k, v)[0][:, rows], want),
    }
    for size, (variant, options) in itertools.product(SIZES, VARIANTS.items()):
        options = {**options, **SIZES[size], "alpha": ALPHA, "last_tokens": LAST_TOKENS}

        def run(options: dict[str, Any] = options) -> tuple[Tensor, Tensor]:
            return block_sparse_attention(q, k, v, **options)

        out, totals = run()
        computed, causal = totals.tolist()
        stages = Stages(q, k, v, size, options.get("dtype") == "fp8")
        result = {
            "tokens": tokens,
            "variant": variant,
            "block_size": size,
            "density": computed / causal,
            "error": difference(out[0][:, rows], want),
            "ms": clock.device_ms(run, cold=True),
            "selection_ms": clock.device_ms(stages.select, cold=True),
            "means_ms": clock.device_ms(stages.means, cold=True),
            "energies_ms": clock.device_ms(stages.energies, cold=True),
        }
        if stages.fp8:
            result["conversion_ms"] = clock.device_ms(stages.quantise, cold=True)
        yield result


def compile_tiles(tiles: AttentionTiles | EnergyTiles, size: int, fp8: bool, device: torch.device) -> None:
    """Leave the machine code in Triton's cache; tiles that do not fit are skipped here and when timed."""
    q, k, v = structured_inputs(2048, device=device)
    try:
        if isinstance(tiles, EnergyTiles):
            Stages(q, k, v, size, fp8).energies(tiles)
        else:
            Stages(q, k, v, size, fp8).attend(tiles)
    except triton.runtime.errors.OutOfResources:
        return


def sweep(clock: Clock, device: torch.device, tokens: int) -> list[dict[str, Any]]:
    """Times of tiles, and how their results differ from the first's; without those that do not fit."""
    choices: list[tuple[AttentionTiles | EnergyTiles, int, bool]] = [
        *((AttentionTiles(*tiles), size, fp8) for fp8, size in itertools.product(SWEEP, SIZES) for tiles in SWEEP[fp8]),
        *((EnergyTiles(*tiles), size, False) for size, tiles in itertools.product(SIZES, ENERGY_SWEEP)),
    ]  # fmt: skip
    in_processes([(compile_tiles, (*choice, device)) for choice in choices])
    found = []
    q, k, v = structured_inputs(tokens, device=device)
    for (size, fp8), group in itertools.groupby(choices, lambda choice: choice[1:]):
        stages = Stages(q, k, v, size, fp8)
        first = None
        for tiles, _, _ in group:
            run = stages.energies if isinstance(tiles, EnergyTiles) else stages.attend
            try:
                got = run(tiles)  # type: ignore[operator]
            except triton.runtime.errors.OutOfResources:
                continue
            got = got.nan_to_num(neginf=0.0)
            first = got if first is None or first.shape != got.shape else first
            entry = {"block_size": size, "fp8": fp8, "tiles": dataclasses.asdict(tiles), "energies": got.ndim == 4}
            entry["energies"] = isinstance(tiles, EnergyTiles)
            entry["ms"] = clock.device_ms(lambda: run(tiles), cold=True)  # type: ignore[operator]  # noqa: B023
            entry["difference"] = None if isinstance(tiles, EnergyTiles) else difference(got, first)
            found.append(entry)
    return found


def table(results: list[dict[str, Any]]) -> str:
    columns = ["density", "ms", "selection_ms", "means_ms", "energies_ms", "conversion_ms", "error"]
    lines = ["| tokens | block | case | " + " | ".join(columns) + " |", "|---" * (len(columns) + 3) + "|"]
    for r in results:
        cells = " | ".join(f"{r[c]:.4f}" if c in r else "" for c in columns)
        lines.append(f"| {r['tokens']:,} | {r.get('block_size', '')} | {r['variant']} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for block_sparse.json")
    parser.add_argument("--lengths", type=int, nargs="*", help=f"tokens; usually {LENGTHS}")
    parser.add_argument("--sweep", action="store_true", help=f"times of other tiles at {SWEEP_LENGTH:,} tokens too")
    parser.add_argument("--no-checks", action="store_true", help="times alone")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, to see that it runs")
    args = parser.parse_args()
    device = torch.device("cpu" if args.dry_run else "cuda")
    began, clock = time.perf_counter(), Clock(device, repeats=15, seconds=0.2)
    torch.set_grad_enabled(False)
    checks = [] if args.no_checks else check_all(device)
    print(f"{time.perf_counter() - began:6.1f} s: checked", flush=True)
    results: list[dict[str, Any]] = []
    for tokens in args.lengths if args.lengths is not None else (300,) if args.dry_run else LENGTHS:
        results += measure(clock, tokens, device)
        print(f"{time.perf_counter() - began:6.1f} s: {tokens:,} tokens", flush=True)
    found = sweep(clock, device, SWEEP_LENGTH) if args.sweep else []
    for entry in sorted(found, key=lambda e: (e["energies"], e["fp8"], e["block_size"], -e["ms"])):
        kind = "energies" if entry["energies"] else "fp8" if entry["fp8"] else "bf16"
        print(kind, entry["block_size"], *entry["tiles"].values(), f"{entry['ms']:.3f} ms", entry["difference"])
    args.out.mkdir(parents=True, exist_ok=True)
    report = {**where_and_when(device), "checks": checks, "results": results, "sweep": found}
    (args.out / "block_sparse.json").write_text(json.dumps(report, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
