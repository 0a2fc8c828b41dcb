"""What it costs to gather the kept rows of hidden state and attention output, and to restore the dropped ones.

    python benchmarks/gather_times.py --out benchmarks/results       # a GPU
    python benchmarks/gather_times.py --out /tmp/results --dry-run   # tiny, on the CPU, in Triton's interpreter

(With PYTHONPATH=. where the package is not installed.)

Three questions, each with several ways to do it:

- copy: both tensors to compact ones. The limit is each kept row read and written once.
- step: the gather with what follows it in a decoder layer (output projection, residual add, RMS norm). What gathering
  costs is the difference from the same step on rows that are compact already: a compiler that sees the gather can read
  the residual's kept rows in the add, and a kernel apart can't.
- restore: kept rows over frozen states, with the norm that follows.

Times are device times, medians, each after the L2 cache was emptied.
"""

from __future__ import annotations

import argparse
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
import torch.nn.functional as F
import triton
import triton.language as tl
from attention_checks import compact_positions
from clock import MEMORY_RATE, Clock, where_and_when
from torch import Tensor

import uniprefill_fx.ops  # noqa: F401  registers torch.ops.uniprefill

HIDDEN, HEADS, KEEP = 4096, 32, 0.65
ops = torch.ops.uniprefill
torch.library.custom_op("gather_times::opaque", lambda x, rows, dim: x.index_select(dim, rows), mutates_args=(),
                        schema="(Tensor x, Tensor rows, int dim) -> Tensor").register_fake(
    lambda x, rows, dim: x.new_empty(*x.shape[:dim], rows.shape[0], *x.shape[dim + 1 :])
)  # fmt: skip
opaque = torch.ops.gather_times.opaque


@triton.jit
def _gather_kernel(a, b, out_a, out_b, rows, WIDTH: tl.constexpr):
    """One kept row of two tensors a program."""
    at = tl.program_id(0).to(tl.int64)
    row, column = tl.load(rows + at), tl.arange(0, WIDTH)
    x, y = tl.load(a + row * WIDTH + column), tl.load(b + row * WIDTH + column)
    tl.store(out_a + at * WIDTH + column, x)
    tl.store(out_b + at * WIDTH + column, y)


@triton.jit
def _restore_kernel(frozen, x, place, out, WIDTH: tl.constexpr):
    """One row of the whole stream a program: from `x` at `place`, or the frozen one where that is negative."""
    at, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    kept = tl.load(place + at)
    source = frozen + at * WIDTH
    if kept >= 0:
        source = x + kept * WIDTH
    tl.store(out + at * WIDTH + column, tl.load(source + column))


def gather(x: Tensor, attn: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors' rows by one launch: x (1, tokens, hidden), attn (1, heads, tokens, dim) laid out by token."""
    width = x.shape[2]
    outs = tuple(x.new_empty(1, len(rows), width) for _ in range(2))
    _gather_kernel[(len(rows),)](x, attn, *outs, rows, WIDTH=width, num_warps=8)
    return outs[0], outs[1]


def places(rows: Tensor, tokens: int) -> Tensor:
    """(tokens,) int64: which kept row a token is; -1 for dropped ones."""
    return rows.new_full((tokens,), -1).scatter(0, rows, torch.arange(len(rows), device=rows.device))


def norm(x: Tensor) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def by_rows(attn: Tensor) -> Tensor:
    return attn.transpose(1, 2).flatten(2)


def after(x: Tensor, attn: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What a decoder layer does with compact rows (1, kept, hidden)."""
    h = x + F.linear(attn, weight)
    return h, norm(h)


def ways(x: Tensor, attn: Tensor, rows: Tensor, weight: Tensor, compiled: Callable[..., Any]) -> dict[str, Any]:
    """{question: {way: function}}; within a question all ways give the same numbers."""
    kept_x, kept_attn = gather(x, attn, rows)
    tokens = x.shape[1]

    def copied(select: Any) -> Callable[[], Any]:
        return lambda: (select(x, rows, 1), by_rows(select(attn, rows, 2)))

    both = compiled(lambda x, attn, rows: (ops.compact(x, rows[None], 1), by_rows(ops.compact(attn, rows[None], 2))))
    visible = compiled(
        lambda x, attn, rows, w: after(ops.compact(x, rows[None], 1), by_rows(ops.compact(attn, rows[None], 2)), w)
    )
    hidden = compiled(lambda x, attn, rows, w: after(opaque(x, rows, 1), by_rows(opaque(attn, rows, 2)), w))
    rest = compiled(after)

    def copied_over(frozen: Tensor, kept: Tensor, rows: Tensor) -> Tensor:
        return frozen.index_copy(1, rows, kept)

    def by_kernel() -> Tensor:
        out = torch.empty_like(x)
        _restore_kernel[(tokens,)](x, kept_x, places(rows, tokens), out, WIDTH=x.shape[2], num_warps=8)
        return out

    def with_norm(function: Callable[..., Tensor]) -> Callable[..., Any]:
        def both(*args: Tensor) -> tuple[Tensor, Tensor]:
            out = function(*args)
            return out, norm(out)

        return both

    restored = compiled(with_norm(lambda frozen, kept, rows: ops.restore(frozen, kept, rows[None], 1)))
    scattered, normed = compiled(with_norm(copied_over)), compiled(with_norm(lambda out: out))
    return {
        "copy": {
            "index_select": copied(lambda t, rows, dim: t.index_select(dim, rows)),
            "index_select by token": lambda: (x.index_select(1, rows), attn.transpose(1, 2).index_select(1, rows)),
            "inductor": lambda: both(x, attn, rows),
            "triton": lambda: gather(x, attn, rows),
        },
        "step": {
            "compact before": lambda: rest(kept_x, kept_attn, weight),
            "opaque ops": lambda: hidden(x, attn, rows, weight),
            "visible to inductor": lambda: visible(x, attn, rows, weight),
            "triton, then inductor": lambda: rest(*gather(x, attn, rows), weight),
        },
        "restore": {
            "index_copy, then norm": lambda: normed(copied_over(x, kept_x, rows)),
            "index_copy, inductor": lambda: scattered(x, kept_x, rows),
            "the op, inductor": lambda: restored(x, kept_x, rows),
            "triton, then norm": lambda: normed(by_kernel()),
        },
    }


def flat(results: Any) -> list[Tensor]:
    return [t.reshape(-1) for t in (results if isinstance(results, tuple) else (results,))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gather_times.json")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 131_072])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, to see that it runs")
    args = parser.parse_args()
    device = torch.device("cpu" if args.dry_run else "cuda")
    hidden, heads, lengths = (64, 4, [200]) if args.dry_run else (HIDDEN, HEADS, args.tokens)
    torch.set_grad_enabled(False)
    began, clock, results = time.perf_counter(), Clock(device, repeats=50, seconds=1.0), []
    for tokens in lengths:
        torch._dynamo.reset()
        torch.manual_seed(0)
        x = torch.randn(1, tokens, hidden, device=device, dtype=torch.bfloat16)
        attn = torch.randn(1, tokens, heads, hidden // heads, device=device, dtype=torch.bfloat16).transpose(1, 2)
        weight = torch.randn(hidden, hidden, device=device, dtype=torch.bfloat16) / hidden**0.5
        rows = compact_positions(int(tokens * KEEP), KEEP, device)
        rows = rows[rows < tokens]
        kept = len(rows) * hidden * 2
        moved = {"copy": 4 * kept, "restore": 2 * tokens * hidden * 2}  # bytes; the step is bound by its product
        for question, found in ways(x, attn, rows, weight, lambda f: torch.compile(f, dynamic=False)).items():
            want = None
            for way, run in found.items():
                got = flat(run())
                want = want or got
                error = max(
                    ((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(got, want, strict=True)
                )
                if not error < 1e-2:
                    raise SystemExit(f"{question}, {way}: differs by {error:.3g}")
                ms = clock.device_ms(run, cold=True)
                limit = moved[question] / MEMORY_RATE * 1e3 if question in moved else None
                results.append({"tokens": tokens, "kept": len(rows), "question": question, "way": way, "ms": ms,
                                "limit_ms": limit, "difference": error, "kernels_us": clock.launches(run)})  # fmt: skip
            print(f"{time.perf_counter() - began:6.1f} s: {tokens:,} tokens, {question}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    report = {
        **where_and_when(device),
        "keep": KEEP,
        "hidden": hidden,
        "results": results,
    }
    (args.out / "gather_times.json").write_text(json.dumps(report, indent=1) + "\n")
    print("| tokens | what | how | ms | limit of its bytes | launches |\n" + "|---" * 6 + "|")
    for r in results:
        limit = "" if r["limit_ms"] is None else f"{r['limit_ms']:.3f}"
        print(f"| {r['tokens']:,} | {r['question']} | {r['way']} | {r['ms']:.3f} | {limit} | {len(r['kernels_us'])} |")


if __name__ == "__main__":
    main()
