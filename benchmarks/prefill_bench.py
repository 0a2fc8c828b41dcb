"""The model that `prefill.py` measures, compiled once, and its times at one length after the other."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from prefill_models import DROPS, build_config
from prefill_tools import GIB, Clock, Progress, Timing, Watch, limits, median, predicted_ms
from torch import Tensor
from transformers import AutoModelForCausalLM

import uniprefill_fx
from uniprefill_fx.backend import uniprefill

DENSE, UNI, STOCK = "dense", "uniprefill", "stock"


class Bench:
    """The model, compiled once, and everything measured so far."""

    def __init__(self, args: argparse.Namespace, progress: Progress) -> None:
        self.args, self.progress = args, progress
        self.device = torch.device("cpu" if args.dry_run else "cuda")
        self.clock, self.watch = Clock(self.device), Watch()
        drops = DROPS[args.model][args.layers]
        self.options: dict[str, Any] = {
            "selection": "top_k",
            "drop_layers": list(drops),
            "keep_ratio": list(drops.values()),
            "min_tokens": 0,
            "inner_backend": args.inner_backend,
            **getattr(args, "more", {}),
        }
        self.results: list[dict[str, Any]] = []
        self.warned: set[str] = set()
        config = build_config(args.model, args.layers, args.dry_run)
        self.report: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "card": "CPU: a dry run, not a result" if args.dry_run else torch.cuda.get_device_name(),
            "dry_run": args.dry_run,
            "torch": torch.__version__,
            "triton": importlib.metadata.version("triton"),
            "transformers": transformers.__version__,
            "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "out"},
            "options": self.options,
            "model": config.to_diff_dict(),
            "results": self.results,
            "failed": [],
            "skipped": progress.skipped,
        }
        torch.manual_seed(0)
        with self.device:
            dtype = torch.float32 if args.dry_run else torch.bfloat16
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self.clock.synchronize()
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters()) / GIB
        self.report["weights_gib"] = weights
        progress.say(
            f"{args.model}, {args.layers} layers, {weights:.2f} GiB of weights on {self.report['card']}; {self.options}"
        )
        if "uniprefill" not in torch._dynamo.list_backends():  # not installed: no entry point
            torch._dynamo.register_backend(uniprefill, name="uniprefill")
        self.model.compile(backend="uniprefill", options=self.options)

    def save(self) -> None:
        limits(self.results, self.args.layers, self.args.batch)
        self.results.sort(key=lambda r: r["tokens"])
        name = "prefill_dry_run.json" if self.args.dry_run else self.args.name
        self.args.out.mkdir(parents=True, exist_ok=True)
        (self.args.out / name).write_text(json.dumps(self.report, indent=1) + "\n")

    def ids(self, tokens: int) -> Tensor:
        return torch.randint(self.model.config.vocab_size, (self.args.batch, tokens), device=self.device)

    def prefill(self, kind: str, ids: Tensor) -> Any:
        with uniprefill_fx.disabled() if kind == DENSE else contextlib.nullcontext():
            return self.model(ids, logits_to_keep=1, use_cache=True)

    def checked(self, kind: str, ids: Tensor, count: bool = False) -> tuple[Any, dict[str, int] | None]:
        """What one call returned and, if asked for, its host synchronisations; an error unless it did what it should.

        Drop what it returned before a peak of memory is measured: it holds the cache.
        """
        if count:
            out, syncs = self.clock.count_syncs(lambda: self.prefill(kind, ids))
        else:
            out, syncs = self.prefill(kind, ids), None
        call = uniprefill_fx.last_call()
        if call is None or call.dropped != (kind == UNI) or call.tokens not in (ids.shape[1], ids.numel()):
            raise RuntimeError(f"{kind} at {ids.shape[1]:,} tokens did something else: {call}")
        if not bool(out.logits.isfinite().all()):
            self.progress.warn(f"{kind} at {ids.shape[1]:,} tokens: logits are not finite")
        return out, syncs

    def compile(self, tokens: int) -> None:
        """First calls: everything is traced and compiled here. What fails here ends the run."""
        ids, seconds = self.ids(tokens), {}
        for kind in (UNI, DENSE):
            self.progress.say(f"first {kind} call, {tokens:,} tokens")
            began = time.perf_counter()
            self.checked(kind, ids)
            self.clock.synchronize()
            seconds[kind] = time.perf_counter() - began
        pieces = {s.name: s.seconds for s in self.watch.sequence_ids()}
        passes = sum(t["seconds"] for t in self.watch.tries)
        inductor = sum(pieces.values())
        hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
        self.report["compile"] = {
            "tokens": tokens,
            "first_call_s": seconds[UNI],
            "first_dense_call_s": seconds[DENSE],
            "inner_backend_s": pieces,
            "passes_s": passes,
            "tries": list(self.watch.tries),
            "fxgraph_cache_hits": hits,
        }
        self.progress.say(
            f"compiled: first calls {seconds[UNI]:.1f} + {seconds[DENSE]:.1f} s; {self.args.inner_backend} "
            f"{inductor - pieces['dense']:.1f} s for {len(pieces) - 1} pieces + {pieces['dense']:.1f} s dense; own "
            f"passes {passes:.2f} s ({passes / max(inductor, 1e-9):.1%} of it); the rest, mostly Dynamo, "
            f"{sum(seconds.values()) - inductor - passes:.1f} s; {hits} hits in Inductor's cache"
        )
        for entry in self.watch.tries:
            self.progress.say(f"    passes: {entry['kind']} {entry['seconds']:.2f} s {_rounded(entry['passes'])}")

    def check_compilations(self) -> None:
        """Lengths alone must not compile anything again."""
        for text in self.watch.repeated():
            if text not in self.warned:
                self.warned.add(text)
                self.progress.warn(f"{text}: its time is in some first call, not in the medians of later ones")
        self.report["compiled_again"] = sorted(self.warned)

    def length(self, tokens: int) -> None:
        """(a) and (c) in turn at one length: a checked warm-up of each, then as many repeats as time allows."""
        pair = self.guess(DENSE, tokens) + self.guess(UNI, tokens)
        if not self.progress.allows(f"{tokens:,} tokens", 2 * pair):
            return
        ids, result = self.ids(tokens), self.result(tokens)
        began = time.perf_counter()
        for kind in (DENSE, UNI):
            result["dense_syncs" if kind == DENSE else "syncs"] = self.checked(kind, ids, count=True)[1]
        self.clock.synchronize()
        warm = time.perf_counter() - began
        repeats = max(1, min(self.repeats(warm), int(self.progress.left() / warm)))
        call = uniprefill_fx.last_call()
        assert call is not None
        result |= {"compute": call.compute_fraction, "rows": list(call.num_tokens), "exact": []}
        timings: dict[str, list[Timing]] = {DENSE: [], UNI: []}
        for _ in range(repeats):
            for kind, times in timings.items():
                times.append(self.clock.time(lambda kind=kind: self.prefill(kind, ids)))
        for kind, times in timings.items():
            result[kind] = median(times)
        result["head_ms"] = statistics.median(self.clock.time(lambda: self._head(ids)).ms for _ in range(3))
        self.check_compilations()
        self.save()
        dense, uni = result[DENSE], result[UNI]
        self.progress.say(
            f"{tokens:,} tokens: dense {dense['all_ms']} ms, uniprefill {uni['all_ms']} ms, "
            f"{dense['ms'] / uni['ms']:.3f}x; compute {call.compute_fraction:.2f}; syncs {result['syncs']}"
        )

    def guess(self, kind: str, tokens: int) -> float:
        """Seconds of a call, from the lengths measured so far; 0 before the first."""
        return predicted_ms({r["tokens"]: r[kind]["ms"] for r in self.results if kind in r}, tokens) / 1e3

    @staticmethod
    def repeats(pair: float) -> int:
        return 5 if pair < 2 else 3 if pair < 8 else 2

    def result(self, tokens: int) -> dict[str, Any]:
        for result in self.results:
            if result["tokens"] == tokens:
                return result
        self.results.append({"tokens": tokens})
        return self.results[-1]

    def _head(self, ids: Tensor) -> Tensor:
        inner = self.model.model
        return self.model.lm_head(inner.norm(inner.embed_tokens(ids)[:, -1:]))


def _rounded(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {s:.2f}" for name, s in seconds.items())
