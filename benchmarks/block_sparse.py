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
BLOCKS: dict[int, dict[str, Any]] = {  # the same tokens are sinks and window
    128: {"block_size": 128, "sink_blocks": 2, "window_blocks": 4},
    64: {"block_size": 64, "sink_blocks": 4, "window_blocks": 8},
}
# name: what differs from bf16, corrected, blocks of 128 with two parts
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16, corrected": {},
    "bf16, not corrected": {"correction": False},
    "bf16, corrected, one part (as published)": {"parts": 1},
    "bf16, corrected, alpha 0.18": {"alpha": 0.18},
    "bf16, corrected, blocks of 64": BLOCKS[64],
    "fp8, corrected": {"dtype": "fp8"},
    "fp8, not corrected": {"dtype": "fp8", "correction": False},
    "fp8, corrected, one part (as published)": {"dtype": "fp8", "parts": 1},
    "fp8, corrected, alpha 0.18": {"dtype": "fp8", "alpha": 0.18},
}
USUAL: dict[str, Any] = {**BLOCKS[128], "alpha": 0.1, "last_tokens": 256, "parts": 2}
SWEEP_LENGTHS = (32_768, 131_072)
SWEEP: dict[bool, list[tuple[Any, ...]]] = {  # by fp8: rows, keys, warps, stages, registers, descriptors
    False: [(128, 128, 8, 2), (128, 128, 8, 2, None, True), (128, 64, 8, 2, 128, True), (64, 64, 4, 2, None, True)],
    True: [(64, 128, 4, 2), (64, 128, 4, 2, None, True), (128, 64, 8, 2, 128, True), (128, 128, 8, 2, None, True)],
}
ENERGY_SWEEP = [(128, 64, 4, 1), (128, 64, 4, 2), (128, 128, 8, 2)]


class Stages:
    """The calls that make up one attention, with what each needs already there."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
        self.q, self.k, self.v = q, k, v
        self.options = {"dtype": "input", "correction": True, **USUAL, **options}
        self.block_size, self.scale = self.options["block_size"], q.shape[3] ** -0.5
        self.selection = self.select()
        self.quantised = self.quantise() if self.options["dtype"] == "fp8" else None

    def select(self) -> Any:
        options = {name: value for name, value in self.options.items() if name != "correction"}
        return select_blocks_of_keys(self.q, self.k, self.v, None, self.scale, None, **options)

    def means(self) -> Any:
        return block_means(self.k, self.v, None, self.block_size, self.options["parts"], self.selection.largest)

    def energies(self, tiles: EnergyTiles | None = None) -> Tensor:
        part_means, tokens = self.selection.part_means, self.k.shape[2]
        return block_energies(self.q, part_means, None, tokens, self.scale, self.block_size, None, tiles)

    def quantise(self) -> Any:
        _, k_means, v_means, _, largest = self.selection
        return quantise_blocks(self.k, self.v, k_means, v_means, None, self.block_size, largest)

    def attend(self, tiles: AttentionTiles | None = None) -> Tensor:
        blocks, k_means, v_means, _, _ = self.selection
        return attend_key_blocks(
            self.q, self.k, self.v, k_means, v_means, blocks, None, self.scale, self.block_size,
            self.options["window_blocks"], self.options["correction"], None, None, self.quantised, tiles,
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
    for variant, options in VARIANTS.items():
        options = {**USUAL, **options}

        def run(options: dict[str, Any] = options) -> tuple[Tensor, Tensor]:
            return block_sparse_attention(q, k, v, **options)

        out, totals = run()
        computed, causal = totals.tolist()
        stages = Stages(q, k, v, options)
        result = {
            "tokens": tokens,
            "variant": variant,
            "density": computed / causal,
            "error": difference(out[0][:, rows], want),
            "ms": clock.device_ms(run, cold=True),
            "selection_ms": clock.device_ms(stages.select, cold=True),
            "means_ms": clock.device_ms(stages.means, cold=True),
            "energies_ms": clock.device_ms(stages.energies, cold=True),
            "attention_ms": clock.device_ms(stages.attend, cold=True),
        }
        if stages.quantised is not None:
            result["conversion_ms"] = clock.device_ms(stages.quantise, cold=True)
        yield result


def compile_tiles(tiles: AttentionTiles | EnergyTiles | None, options: dict[str, Any], device: torch.device) -> None:
    """Leave the machine code in Triton's cache; tiles that do not fit are skipped here and when timed."""
    stages = Stages(*structured_inputs(2048, device=device), options)
    try:
        if isinstance(tiles, EnergyTiles):
            stages.energies(tiles)
        else:
            stages.attend(tiles)
    except triton.runtime.errors.OutOfResources:
        return


def sweep(clock: Clock, device: torch.device, tokens: int) -> list[dict[str, Any]]:
    """Times of tiles, and how their results differ from the first's; without those that do not fit."""
    choices: list[tuple[AttentionTiles | EnergyTiles, dict[str, Any]]] = [
        *((AttentionTiles(*t), {"dtype": "fp8" if fp8 else "input"}) for fp8 in SWEEP for t in SWEEP[fp8]),
        *((EnergyTiles(*tiles), {}) for tiles in ENERGY_SWEEP),
    ]
    in_processes([(compile_tiles, (*choice, device)) for choice in choices])
    found = []
    q, k, v = structured_inputs(tokens, device=device)
    for options, group in itertools.groupby(choices, lambda choice: choice[1]):
        stages = Stages(q, k, v, options)
        usual = stages.attend()
        for tiles, _ in group:
            entry = {**options, "tokens": tokens, "tiles": dataclasses.asdict(tiles)}
            try:
                if isinstance(tiles, EnergyTiles):
                    entry["ms"] = clock.device_ms(lambda: stages.energies(tiles), cold=True)  # noqa: B023
                else:
                    entry["difference"] = difference(stages.attend(tiles), usual)
                    entry["ms"] = clock.device_ms(lambda: stages.attend(tiles), cold=True)  # noqa: B023
            except triton.runtime.errors.OutOfResources:
                continue
            found.append(entry)
    return found


def table(results: list[dict[str, Any]]) -> str:
    columns = ["density", "ms", "selection_ms", "means_ms", "energies_ms", "conversion_ms", "attention_ms", "error"]
    lines = ["| tokens | case | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for r in results:
        cells = " | ".join(f"{r[c]:.4f}" if c in r else "" for c in columns)
        lines.append(f"| {r['tokens']:,} | {r['variant']} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for block_sparse.json")
    parser.add_argument("--lengths", type=int, nargs="*", help=f"tokens; usually {LENGTHS}")
    parser.add_argument("--sweep", action="store_true", help="times of other tiles too")
    parser.add_argument("--no-checks", action="store_true", help="times alone")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, to see that it runs")
    args = parser.parse_args()
    device = torch.device("cpu" if args.dry_run else "cuda")
    began, clock = time.perf_counter(), Clock(device, repeats=15, seconds=0.12)
    torch.set_grad_enabled(False)
    checks = [] if args.no_checks else check_all(device)
    print(f"{time.perf_counter() - began:6.1f} s: checked", flush=True)
    if not args.dry_run:
        in_processes([(compile_tiles, (None, options, device)) for options in VARIANTS.values()])
    results: list[dict[str, Any]] = []
    for tokens in args.lengths if args.lengths is not None else (300,) if args.dry_run else LENGTHS:
        results += measure(clock, tokens, device)
        print(f"{time.perf_counter() - began:6.1f} s: {tokens:,} tokens", flush=True)
    found = [entry for tokens in SWEEP_LENGTHS for entry in sweep(clock, device, tokens)] if args.sweep else []
    for entry in found:
        kind = entry.get("dtype", "energies")
        print(entry["tokens"], kind, *entry["tiles"].values(), f"{entry['ms']:.3f} ms", entry.get("difference", ""))
    args.out.mkdir(parents=True, exist_ok=True)
    report = {**where_and_when(device), "checks": checks, "results": results, "sweep": found}
    (args.out / "block_sparse.json").write_text(json.dumps(report, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
