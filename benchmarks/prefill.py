"""Time to first token of real shapes with random bf16 weights on a GPU: dense, stock, uniprefill, and the limit.

    python benchmarks/prefill.py --out benchmarks/results                # everything that fits 420 s
    python benchmarks/prefill.py --out /tmp/results --layers 8 --stock   # a quarter of the model; without (b)
    python benchmarks/prefill.py --out /tmp/results --exact-limit --decode-tokens-at 0
    python benchmarks/prefill.py --out benchmarks/results --model gemma-3-12b --name prefill_gemma3.json
    python benchmarks/prefill.py --out benchmarks/results --batch 4 --lengths 16384 --name prefill_batch4.json
    python benchmarks/prefill.py --out /tmp/results --dry-run            # tiny, float32, on the CPU: not a result

(With PYTHONPATH=. where the package is not installed.) Writes the JSON after each step; `plot.py` draws it.

Prompts of random tokens, one unless --batch says more: `model(ids, logits_to_keep=1, use_cache=True)` under
`torch.inference_mode()`:

(a) dense: the same compilation as (c) inside `uniprefill_fx.disabled()`: Inductor, no mask, SDPA's own choice.
(b) stock: `torch.compile(model.forward)`, the model's own s x s mask and cache. Static shapes for one length, else
    dynamic ones.
(c) uniprefill: `selection="top_k"` fixes how much is kept at each drop layer; scoring and selection really run.
(d) limit: the embedding and head at the prompt's length, plus the sum over layers of (a)'s time for a layer at the
    rows that enter that layer in (c). (a)'s time for a layer is its time to first token less embedding and head (timed
    apart: embedding of all tokens, norm and head of the last) over the layers. Between measured lengths the time *for a
    token* is interpolated linearly in the length, which is exact for a·n + b·n²; below the shortest one it is taken as
    constant (marked < in the table). --exact-limit measures (a) at the very row counts instead (marked e). A drop
    layer counts with the rows of its attention, though its projection and MLP run on fewer. Layers of different kinds
    count as their average: drops end whole groups of them.

(a) and (c) take turns, so that a change of clocks meets both. Times are CUDA events around a call, medians; host ms is
the wall time until the call returned. Peak memory counts the weights. Syncs are the host's waits for the device in one
call of (c), as `torch.cuda.set_sync_debug_mode` reports them. Everything is compiled once, at the first length above
the hidden size (a length equal to it could be taken for it).
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

if "--dry-run" in sys.argv:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve each other on a busy machine

import torch
from prefill_bench import Bench
from prefill_extras import decode, exact_limit, profile, stock
from prefill_models import DEFAULT_LAYERS, DROPS, TINY_LAYERS, build_config
from prefill_tools import Progress, guarded, table

LENGTHS = [1024, 4096, 16_384, 32_768, 65_536, 131_072]


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What the command line says; `parser` may know options of its own."""
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON")
    parser.add_argument("--name", default="prefill.json", help="its file name (%(default)s)")
    parser.add_argument("--model", choices=sorted(DROPS), default="llama-3.1-8b")
    parser.add_argument("--batch", type=int, default=1, help="prompts at once, of equal lengths")
    parser.add_argument("--lengths", type=int, nargs="+", help=f"prompt lengths (default: {LENGTHS})")
    parser.add_argument("--layers", type=int, help="cut the model")
    parser.add_argument("--stock", type=int, nargs="*", help="lengths of (b); none given: skip it (default: 4096)")
    parser.add_argument("--exact-limit", action="store_true", help="measure (a) at the kept lengths as well")
    parser.add_argument(
        "--exact-limit-from", type=int, default=32_768, metavar="N", help="shortest prompt for that (%(default)s)"
    )
    parser.add_argument("--profile-at", type=int, help="length of the profile, 0: none (default: 32768)")
    parser.add_argument(
        "--decode-tokens-at", type=int, help="prompt of the decode, 0: none (default: the longest, or 32768)"
    )
    parser.add_argument("--decode-steps", type=int, default=32)
    parser.add_argument("--budget", type=float, default=420, help="seconds; what no longer fits is skipped")
    parser.add_argument("--compile-at", type=int, help="length of the first call (default: first above hidden size)")
    parser.add_argument("--inner-backend", default="inductor")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, to see that it runs")
    args = parser.parse_args()
    tiny = args.dry_run
    args.lengths = sorted(args.lengths or ([192, 512, 1024] if tiny else LENGTHS))
    args.layers = args.layers or (TINY_LAYERS if tiny else DEFAULT_LAYERS)[args.model]
    if args.layers not in DROPS[args.model]:
        parser.error(f"--layers {args.layers}: {args.model} is measured with one of {sorted(DROPS[args.model])}")
    args.stock = sorted(([512] if tiny else [4096]) if args.stock is None else args.stock)
    args.profile_at = (512 if tiny else 32_768) if args.profile_at is None else args.profile_at
    if args.compile_at is None:
        hidden = build_config(args.model, args.layers, tiny).hidden_size
        args.compile_at = next((n for n in args.lengths if n > hidden), args.lengths[-1])
    return args


def main() -> None:
    args = arguments(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    progress = Progress(args.budget)
    if args.dry_run:
        progress.say("DRY RUN on the CPU, tiny and in float32: nothing below is a result")
    log = logging.getLogger("uniprefill_fx")
    log.addHandler(progress)
    log.setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # what is there is still written
    bench = Bench(args, progress)
    failed = bench.report["failed"]
    try:
        with torch.inference_mode():
            bench.compile(args.compile_at)
            bench.save()
            for tokens in args.lengths:
                with guarded(progress, failed, f"{tokens:,} tokens"):
                    bench.length(tokens)
            if args.profile_at in args.lengths:
                with guarded(progress, failed, "profile"):
                    profile(bench, args.profile_at)
            for result in bench.results if args.exact_limit else []:
                if result["tokens"] >= args.exact_limit_from and "rows" in result:
                    with guarded(progress, failed, f"exact limit at {result['tokens']:,}"):
                        exact_limit(bench, result)
            if args.decode_tokens_at != 0:
                with guarded(progress, failed, "decode"):
                    decode(bench, args.decode_tokens_at)
            if args.stock:
                with guarded(progress, failed, "stock"):
                    stock(bench, args.stock)
    finally:
        bench.report["seconds"] = progress.elapsed()
        bench.save()
        progress.say(f"done; {len(progress.skipped)} skipped, {len(failed)} failed")
        for line in [*progress.skipped, *(text[:300] for text in failed)]:
            print(f"    {line}")
        if args.dry_run:
            print("DRY RUN, NOT A RESULT")
        print(table(bench.results))


if __name__ == "__main__":
    main()
