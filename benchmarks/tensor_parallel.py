"""Time to first token of a model that is split over the GPUs of one host, dense and dropped, beside one GPU's.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --out benchmarks/results
    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --out /tmp/results --skip-one  # not one GPU
    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --out /tmp/results --dry-run   # tiny, on the CPU

Llama-3.1-8B's shape with random bf16 weights, which every rank makes alike and then keeps its part of, as
`from_pretrained(..., tp_plan="auto")` does (`apply_tensor_parallelism`). Of its 32 layers 16 are taken, since half the
layers take half the time to trace and compile; `--layers 32` takes all. The six drops of the paper lie at the same
depths with the same ratios, so that the same share of the rows is computed and the ratio of dense to dropped is that of
the whole model, but for the embedding, the head and what a drop itself costs, which weigh twice as much.

Prompts of random tokens: `model(ids, logits_to_keep=1, use_cache=True)` under `torch.inference_mode()`, dense
(`uniprefill_fx.disabled()`) and dropped by turns. Times are CUDA events around a call, medians. All lengths run by the
compilation of the first one. The file is written after each step, with the seconds that steps took.

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
from collections.abc import Callable, Iterator
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
from uniprefill_fx.runtime.agreement import exchanged

MODEL = "llama-3.1-8b"
DENSE, DROPPED = "dense", "dropped"
BLOCK = 64  # tokens a block of scores


def drops_of(layers: int) -> dict[int, float]:
    """The drops of the whole model, {layer: share of the prompt that is kept after it}, at the same depths of one with
    so many layers."""
    drops = {(layer + 1) * layers // 32 - 1: kept for layer, kept in DROPS[MODEL][32].items()}
    if len(drops) < len(DROPS[MODEL][32]) or layers % 8:
        raise SystemExit(f"--layers: got {layers}; wanted a multiple of 8, of which each drop has a layer of its own")
    return drops


class Bench:
    """One rank's part of the measurement; rank 0 prints and writes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.perf_counter()
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cpu" if args.dry_run else f"cuda:{os.environ['LOCAL_RANK']}")
        self.clock = Clock(self.device)
        drops = drops_of(args.layers)
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
            "steps": {},
            "skipped": [],
        }

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.began:6.1f} s] {line}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Notes how long something took, and writes what is known by then."""
        began = time.perf_counter()
        yield
        self.clock.synchronize()
        self.report["steps"][name] = time.perf_counter() - began
        self.say(f"{name}: {self.report['steps'][name]:.1f} s")
        self.save()

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
            expand = getattr(model, "_expand_parallel_plan", None)  # the plan is an argument since transformers 5.24
            apply_tensor_parallelism(model, mesh, *(() if expand is None else (expand(model.tp_plan),)))
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

    def measure(self, where: str, kinds: tuple[str, ...], together: bool) -> None:
        """Times of one model, at every length that the budget allows. together: whether ranks run the same prompts."""
        with self.step(f"{where}: model"):
            model = self.model(where == "split")
        first = self.ids(self.args.compile_at)
        for kind in kinds:
            with self.step(f"{where}: first {kind} call"):
                self.prefill(model, kind, first)
        for tokens, result in self.results.items():
            if together and not self.allows(tokens / 8192):
                self.report["skipped"].append(f"{where} at {tokens}")
                continue
            ids = self.ids(tokens)
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            with self.step(f"{where}: warm at {tokens:,}"):
                logits = {kind: self.prefill(model, kind, ids)[0, -1].float() for kind in kinds}
            with self.step(f"{where}: timed at {tokens:,}"):
                for _ in range(2 if tokens > 65_536 else 3):
                    for kind in kinds:
                        times[kind].append(self.clock.time(functools.partial(self.prefill, model, kind, ids)).ms)
                        result[f"{where}_{kind}_ms"] = statistics.median(times[kind])
                        result[f"{where}_{kind}_all_ms"] = times[kind]
            if DROPPED in kinds:
                self._same_rows(where, result)
                result[f"{where}_next_token"] = int(logits[DROPPED].argmax())
            self.save()
            self.say(f"{where} at {tokens:,} tokens: {times}")

    def _same_rows(self, where: str, result: dict[str, Any]) -> None:
        call = uniprefill_fx.last_call()
        assert call is not None and call.dropped
        result[f"{where}_rows"] = list(call.num_tokens)
        if where == "split":
            every: list[Any] = [None] * self.ranks
            kept = [kept.cpu().numpy().tobytes() for kept in call.kept_indices.values()]
            dist.all_gather_object(every, [hashlib.sha256(rows).hexdigest() for rows in kept])
            result["ranks_keep_the_same_tokens"] = all(kept == every[0] for kept in every)

    def one(self) -> None:
        """One card's times. A card each measures one of the two."""
        kinds = (DENSE, DROPPED) if self.ranks == 1 else ((DENSE,), (DROPPED,))[min(self.rank, 1)]
        self.measure("one", kinds, together=self.ranks == 1)
        for result in self.results.values():  # rank 0 writes what the others measured
            every: list[Any] = [None] * self.ranks
            dist.all_gather_object(every, {k: v for k, v in result.items() if k.startswith("one_")})
            for found in every:
                result.update(found)

    def exchanges(self) -> None:
        """What dropping adds to what a split model exchanges, alone."""
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        reduce, wait = collective("all_reduce"), collective("wait_tensor")

        def agree() -> None:
            exchanged(dist.group.WORLD, "the same")

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
    parser.add_argument("--layers", type=int, help="a multiple of 8 (default: 16 of the 32)")
    parser.add_argument("--compile-at", type=int, help="length of the first call (default: the shortest)")
    parser.add_argument("--skip-one", action="store_true", help="do not measure one GPU")
    parser.add_argument("--budget", type=float, default=230, help="seconds; a model that no longer fits is skipped")
    parser.add_argument("--inner-backend", default="inductor")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, to see that it runs")
    args = parser.parse_args()
    args.lengths = sorted(args.lengths) if args.lengths else ([512, 1024] if args.dry_run else [32_768, 131_072])
    args.layers = args.layers or (8 if args.dry_run else 16)
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
            with bench.step("exchanges"):
                bench.exchanges()
            bench.measure("split", (DENSE, DROPPED), together=True)
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
