"""Time to first token with both cuts: dense, tokens dropped, blocks of keys left out, and both, in turns.

    python benchmarks/prefill_sparse.py --out benchmarks/results --lengths 4096 32768 131072
    python benchmarks/prefill_sparse.py --out /tmp/results --dry-run           # tiny, on the CPU: not a result

The model, its random weights and what is dropped are those of `prefill.py`. Random weights attend diffusely, so the
density is imposed: at each length `sparse_alpha` is searched until the computed part of the causal blocks is that of
`block_sparse.py`'s structured inputs at alpha 0.1, unless --density says another one for a length. Means, energies,
lists and attention over them really run; what is chosen means nothing. *Sparse* keeps every token by keep_ratio 1, so
it pays for scoring. The limits are the times measured without sparsity (*dense*; *dropped* for both) less the attention
left out: SDPA's own time, measured at the rows that each block-sparse layer has, times one less the density.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from typing import Any

import torch
from prefill import arguments
from prefill_bench import DENSE, Bench
from prefill_tools import Progress, Timing, median

import uniprefill_fx

DENSITIES = {4096: 0.59, 16_384: 0.25, 32_768: 0.14, 65_536: 0.07, 131_072: 0.037}  # of structured_inputs.py, alpha 0.1
KINDS = (DENSE, "dropped", "sparse", "both")
LIKELY = 0.9  # random weights need more than that
SEARCH = 12  # steps at most, until within 5%


class SparseBench(Bench):
    """The model compiled with both cuts; each kind of call switches some of them off."""

    def __init__(self, args: Any, progress: Progress) -> None:
        self.alpha = 0.5
        args.more = {"attention": "block_sparse", "sparse_min_tokens": 0}
        super().__init__(args, progress)

    def call(self, kind: str, ids: torch.Tensor) -> Any:
        """One prefill."""
        every = [1.0] * len(self.options["drop_layers"])
        with contextlib.ExitStack() as stack:
            if kind == DENSE:
                stack.enter_context(uniprefill_fx.disabled())
            if kind == "dropped":
                stack.enter_context(uniprefill_fx.override(sparse_alpha=0.0))
            if kind in ("sparse", "both"):
                stack.enter_context(uniprefill_fx.override(sparse_alpha=self.alpha))
            if kind == "sparse":
                stack.enter_context(uniprefill_fx.override(keep_ratio=every))
            return self.model(ids, logits_to_keep=1, use_cache=True)

    def density(self, kind: str, ids: torch.Tensor) -> float:
        """The computed part of the causal blocks, averaged over layers."""
        found = self.watched(kind, ids).density
        return sum(found.values()) / len(found)

    def watched(self, kind: str, ids: torch.Tensor) -> uniprefill_fx.LastCall:
        """What one prefill did."""
        self.call(kind, ids)
        call = uniprefill_fx.last_call()
        assert call is not None
        return call

    def impose(self, ids: torch.Tensor, wanted: float) -> float:
        """Search the alpha that computes so much; returns what was reached."""
        low, high, self.alpha = 0.0, 1.0, LIKELY
        reached = self.density("sparse", ids)
        low, high = (LIKELY, high) if reached > wanted else (low, LIKELY)
        for _ in range(SEARCH):
            self.alpha = (low + high) / 2
            reached = self.density("sparse", ids)
            if abs(reached - wanted) < 0.05 * wanted:
                break
            low, high = (self.alpha, high) if reached > wanted else (low, self.alpha)
        return reached

    def measure(self, tokens: int, repeats: int = 3) -> None:
        """All kinds in turns at one length."""
        ids, result = self.ids(tokens), self.result(tokens)
        densities = DENSITIES | dict(self.args.density)
        wanted = densities[min(densities, key=lambda n: abs(n - tokens))]
        result |= {"wanted_density": wanted, "density": self.impose(ids, wanted), "alpha": self.alpha}
        result["density_both"] = self.density("both", ids)
        calls = {kind: self.watched(kind, ids) for kind in ("sparse", "both")}
        result["rows_both"] = list(calls["both"].num_tokens)
        times: dict[str, list[Timing]] = {kind: [] for kind in KINDS}
        for _ in range(repeats):
            for kind, found in times.items():
                found.append(self.clock.time(lambda kind=kind: self.call(kind, ids)))
        for kind, found in times.items():
            result[kind] = median(found)
        lengths = {call.num_tokens[layer] for call in calls.values() for layer in call.density}
        attention = result["attention_ms"] = {n: self.attention_ms(n) for n in lengths}
        limits = result["limit_ms"] = {}
        for kind, call in calls.items():
            left_out = {layer: 1 - density for layer, density in call.density.items()}
            saved = sum(attention[call.num_tokens[layer]] * part for layer, part in left_out.items())
            limits[kind] = result[DENSE if kind == "sparse" else "dropped"]["ms"] - saved
        row = ", ".join(f"{kind} {result[kind]['ms']:.1f}" for kind in KINDS)
        ratios = ", ".join(f"{kind} {result[DENSE]['ms'] / result[kind]['ms']:.2f}x" for kind in KINDS[1:])
        self.progress.say(f"{tokens:,} tokens, density {result['density']:.3f}: {row} ms; {ratios}; limits {limits}")
        self.write()

    def attention_ms(self, rows: int) -> float:
        """Milliseconds of the best dense attention over so many rows: that which SDPA chooses."""
        config = self.model.config
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        dtype = next(self.model.parameters()).dtype
        q, k, v = (torch.randn(1, n, rows, dim, device=self.device, dtype=dtype) for n in (heads, kv_heads, kv_heads))
        attend = torch.nn.functional.scaled_dot_product_attention
        times = [self.clock.time(lambda: attend(q, k, v, is_causal=True, enable_gqa=True)).ms for _ in range(4)]
        return statistics.median(times[1:])

    def write(self) -> None:
        """The JSON, after each length."""
        name = "prefill_sparse_dry_run.json" if self.args.dry_run else self.args.name
        self.args.out.mkdir(parents=True, exist_ok=True)
        (self.args.out / name).write_text(json.dumps(self.report, indent=1) + "\n")


def _density(text: str) -> tuple[int, float]:
    tokens, _, part = text.partition("=")
    return int(tokens), float(part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--density", type=_density, nargs="+", default=[], metavar="TOKENS=PART")
    args = arguments(parser)
    progress = Progress(args.budget)
    bench = SparseBench(args, progress)
    with torch.inference_mode():
        for kind in KINDS:
            progress.say(f"first {kind} call")
            bench.call(kind, bench.ids(args.compile_at))
        for tokens in args.lengths[::-1]:  # the longest, which say most, first
            if progress.allows(f"{tokens:,} tokens", tokens / 2000):
                bench.measure(tokens)
    if args.dry_run:
        print("DRY RUN, NOT A RESULT", file=sys.stderr)


if __name__ == "__main__":
    main()
