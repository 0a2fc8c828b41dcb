"""Time to first token of a model that is split over the GPUs of one host, dense and dropped, beside one GPU's.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --out benchmarks/results
    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --out /tmp/results --skip-one  # not one GPU
    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --out /tmp/results --dry-run   # tiny, on the CPU

Llama-3.1-8B's shape with random bf16 weights, which every rank makes alike and then keeps its part of, as
`from_pretrained(..., tp_plan="auto")` does (`apply_tensor_parallelism`). Prompts of random tokens:
`model(ids, logits_to_keep=1, use_cache=True)` under `torch.inference_mode()`, dense (`uniprefill_fx.disabled()`) and
dropped by turns, with the drop layers and ratios of `prefill.py`. Times are CUDA events around a call, medians.

One GPU's times come last, in the same run: rank 0 measures dense and rank 1 dropped, at the same time on a card each.
With one rank both are measured on it. What the ranks exchange for dropping is timed alone: the sum of block scores,
once a drop, and the agreement before a prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from prefill_models import DROPS, build_config
from prefill_tools import Clock
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

import uniprefill_fx
from uniprefill_fx.backend import uniprefill
from uniprefill_fx.passes.operator_internals import collective

MODEL = "llama-3.1-8b"
DENSE, DROPPED = "dense", "dropped"
BLOCK = 64  # tokens a block of scores


class Bench:
    """One rank's part of the measurement; rank 0 prints and writes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.perf_counter()
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cpu" if args.dry_run else f"cuda:{os.environ['LOCAL_RANK']}")
        self.clock = Clock(self.device)
        drops = DROPS[MODEL][args.layers]
        self.options: dict[str, Any] = {
            "selection": "top_k",
            "drop_layers": list(drops),
            "keep_ratio": list(drops.values()),
            "block_size": BLOCK,
            "min_tokens": 0,
            "inner_backend": args.inner_backend,
        }
        self.results: dict[int, dict[str, Any]] = {n: {"tokens": n} for n in args.lengths}
        self.report: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "card": "CPU: a dry run, not a result" if args.dry_run else torch.cuda.get_device_name(self.device),
            "ranks": self.ranks,
            "torch": torch.__version__,
            "triton": importlib.metadata.version("triton"),
            "transformers": transformers.__version__,
            "backend": dist.get_backend(),
            "layers": args.layers,
            "options": self.options,
            "results": list(self.results.values()),
            "skipped": [],
        }

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.began:6.1f} s] {line}", file=sys.stderr, flush=True)

    def allows(self, seconds: float) -> bool:
        """Whether so many seconds are left, on every rank alike."""
        left = torch.tensor(self.args.budget - (time.perf_counter() - self.began), device=self.device)
        dist.all_reduce(left, dist.ReduceOp.MIN)
        return bool(left > seconds)

    def save(self) -> None:
        for result in self.results.values():
            for where in ("one", "split"):
                if {f"{where}_{DENSE}_ms", f"{where}_{DROPPED}_ms"} <= result.keys():
                    result[f"{where}_ratio"] = result[f"{where}_{DENSE}_ms"] / result[f"{where}_{DROPPED}_ms"]
        self.report["seconds"] = time.perf_counter() - self.began
        if self.rank == 0:
            self.args.out.mkdir(parents=True, exist_ok=True)
            (self.args.out / self.args.name).write_text(json.dumps(self.report, indent=1) + "\n")

    def model(self, split: bool) -> Any:
        torch._dynamo.reset()
        torch.manual_seed(0)
        with self.device:
            dtype = torch.float32 if self.args.dry_run else torch.bfloat16
            config = build_config(MODEL, self.args.layers, self.args.dry_run)
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        if split:
            mesh = dist.init_device_mesh(self.device.type, (self.ranks,))
            apply_tensor_parallelism(model, mesh)
        if "uniprefill" not in torch.compiler.list_backends():  # not installed: no entry point
            torch._dynamo.register_backend(uniprefill, name="uniprefill")
        uniprefill_fx.compile(model, **self.options)
        return model

    def ids(self, tokens: int) -> Tensor:
        """The same on every rank."""
        generator = torch.Generator().manual_seed(tokens)
        vocabulary = build_config(MODEL, self.args.layers, self.args.dry_run).vocab_size
        return torch.randint(vocabulary, (1, tokens), generator=generator).to(self.device)

    def prefill(self, model: Any, kind: str, ids: Tensor) -> Tensor:
        with uniprefill_fx.disabled() if kind == DENSE else contextlib.nullcontext():
            logits: Tensor = model(ids, logits_to_keep=1, use_cache=True).logits
        call = uniprefill_fx.last_call()
        if call is None or call.dropped != (kind == DROPPED):
            raise RuntimeError(f"{kind} at {ids.shape[1]:,} tokens did something else: {call}")
        return logits

    def measure(self, where: str, kinds: tuple[str, ...]) -> None:
        """Times of one model, at every length."""
        model = self.model(where == "split")
        first = self.ids(self.args.compile_at)
        for kind in kinds:
            began = time.perf_counter()
            self.prefill(model, kind, first)
            self.clock.synchronize()
            self.report[f"{where}_first_{kind}_call_s"] = time.perf_counter() - began
            self.say(f"{where}: first {kind} call {time.perf_counter() - began:.1f} s")
        for tokens, result in self.results.items():
            ids = self.ids(tokens)
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            logits = {kind: self.prefill(model, kind, ids)[0, -1].float() for kind in kinds}  # warms up
            for _ in range(2 if tokens > 65_536 else 3):
                for kind in kinds:
                    times[kind].append(self.clock.time(functools.partial(self.prefill, model, kind, ids)).ms)
            for kind in kinds:
                result[f"{where}_{kind}_ms"] = statistics.median(times[kind])
                result[f"{where}_{kind}_all_ms"] = times[kind]
            if DROPPED in kinds:
                self._same_rows(where, result)
                result[f"{where}_next_token"] = int(logits[DROPPED].argmax())
            self.save()
            self.say(f"{where} at {tokens:,} tokens: {times}")

    def _same_rows(self, where: str, result: dict[str, Any]) -> None:
        call = uniprefill_fx.last_call()
        assert call is not None
        result[f"{where}_rows"] = list(call.num_tokens)
        if where == "split":
            every: list[Any] = [None] * self.ranks
            kept = [kept.cpu().numpy().tobytes() for kept in call.kept_indices.values()]
            dist.all_gather_object(every, [hashlib.sha256(rows).hexdigest() for rows in kept])
            result["ranks_keep_the_same_tokens"] = all(kept == every[0] for kept in every)

    def one(self) -> None:
        """One card's times. A card each measures one of the two."""
        kinds = (DENSE, DROPPED) if self.ranks == 1 else ((DENSE,), (DROPPED,))[min(self.rank, 1)]
        self.measure("one", kinds)
        for result in self.results.values():  # rank 0 writes what the others measured
            every: list[Any] = [None] * self.ranks
            dist.all_gather_object(every, {k: v for k, v in result.items() if k.startswith("one_")})
            for found in every:
                result.update(found)

    def exchanges(self) -> None:
        """What dropping adds to what a split model exchanges, alone."""
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        reduce, wait = collective("all_reduce"), collective("wait_tensor")
        number = torch.zeros(2, dtype=torch.int64, device=self.device)

        def agree() -> None:
            dist.all_reduce(number, dist.ReduceOp.MAX)
            number.tolist()

        for tokens, result in self.results.items():
            scores = torch.rand(1, -(-tokens // BLOCK), device=self.device)
            result["scores_all_reduce_ms"] = self._alone(lambda s=scores: wait(reduce(s, "sum", group)))
        self.report["agreement_ms"] = self._alone(agree)

    def _alone(self, function: Callable[[], Any]) -> float:
        """Milliseconds of one of 20 calls in a row, behind as many that warm up; the median of five times."""

        def row() -> None:
            for _ in range(20):
                function()

        row()
        times = []
        for _ in range(5):
            dist.barrier()
            times.append(self.clock.time(row).ms / 20)
        return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON")
    parser.add_argument("--name", default="tensor_parallel_llama8b.json", help="its file name (%(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", help="prompt lengths (default: 32768 131072)")
    parser.add_argument("--layers", type=int, help="cut the model")
    parser.add_argument("--compile-at", type=int, help="length of the first call (default: the shortest)")
    parser.add_argument("--skip-one", action="store_true", help="do not measure one GPU")
    parser.add_argument("--budget", type=float, default=230, help="seconds; a model that no longer fits is skipped")
    parser.add_argument("--inner-backend", default="inductor")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, to see that it runs")
    args = parser.parse_args()
    args.lengths = sorted(args.lengths) if args.lengths else ([512, 1024] if args.dry_run else [32_768, 131_072])
    args.layers = args.layers or (4 if args.dry_run else 32)
    args.compile_at = args.compile_at or args.lengths[0]
    if not args.dry_run:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if args.dry_run else "nccl")
    bench = Bench(args)
    if bench.rank == 0:  # which piece is being compiled, and how long each took
        logging.basicConfig(stream=sys.stderr, format="%(relativeCreated)9.0f ms %(message)s")
        logging.getLogger("uniprefill_fx").setLevel(logging.INFO)
    try:
        with torch.inference_mode():
            bench.exchanges()
            bench.save()
            bench.measure("split", (DENSE, DROPPED))
            bench.save()
            if args.skip_one or not bench.allows(90):
                bench.report["skipped"].append("one")
            else:
                if bench.device.type == "cuda":
                    torch.cuda.empty_cache()
                bench.one()
    finally:
        bench.save()
        bench.say(json.dumps(list(bench.results.values())))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
