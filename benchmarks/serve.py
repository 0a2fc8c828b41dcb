"""vLLM with and without dropping, on one card: time to first token, throughput, decoding, and long prompts arriving
while others decode.

    PYTHONPATH=. python benchmarks/serve.py --out serve.json --seconds 900
    PYTHONPATH=. python benchmarks/serve.py --out gemma.json --model gemma-3-12b --layers 48 --only ttft

On two cards at once, and then one file:

    CUDA_VISIBLE_DEVICES=0 PYTHONPATH=. python benchmarks/serve.py --out stock.json --systems stock stock_chunked &
    CUDA_VISIBLE_DEVICES=1 PYTHONPATH=. python benchmarks/serve.py --out ours.json --systems ours
    python benchmarks/serve.py --out serve.json --systems --add ours.json stock.json

Or with each system on two: `--tensor-parallel 2`, where the package is installed, as its plugin loads itself in ranks.

Weights are random (`load_format="dummy"`), of a shape that is written as a config.json; `keep_ratio` fixes how many
tokens stay, and scoring and selecting are real. Each system runs in a process of its own, one after the other, and
starts one engine for all that it measures:

    ours           mode 2 with this package's backend, CUDA graphs of decode steps
    stock          vLLM's default, mode 3 with CUDA graphs, whole prompts in a step as ours
    stock_chunked  the same with its default budget of tokens in a step, for the mixed load

The engine lives in the measuring process, which calls `step()`: times are of the host, with the sampled token at hand.
The file is written anew after each measurement, so that a run which is stopped keeps what it has. Measurements that
would begin after `--seconds` are left out, and named in the file.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prefill_models import DEFAULT_LAYERS, DROPS, TINY_LAYERS, build_config

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # its multicast is not to be had on every host
    # ranks, which import this file too, count in processes of their own
    "PROMETHEUS_MULTIPROC_DIR": os.environ.get("PROMETHEUS_MULTIPROC_DIR") or tempfile.mkdtemp(prefix="serve_metrics_"),
}
SYSTEMS = ("ours", "stock", "stock_chunked")
KINDS = ("ttft", "batch", "decode", "mixed")
ARCHITECTURES = {
    "llama-3.1-8b": "LlamaForCausalLM",
    "gemma-3-12b": "Gemma3ForCausalLM",
    "qwen3-next-80b-a3b": "Qwen3NextForCausalLM",
}
TINY = {"head_dim": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}  # what the CPU build can do


class Engine:
    """One engine of vLLM, driven step by step."""

    def __init__(self, args: argparse.Namespace, system: str) -> None:
        from vllm import LLM

        self.args, self.count = args, 0
        folder = Path(tempfile.mkdtemp())
        config = build_config(args.model, args.layers, args.tiny)
        settings = config.to_dict() | {"architectures": [ARCHITECTURES[args.model]]} | (TINY if args.tiny else {})
        (folder / "config.json").write_text(json.dumps(settings, default=str))
        self.vocabulary = int(settings["vocab_size"])
        longest = max([*args.lengths, *args.decode_lengths, args.mixed_length, *(n for _, n in args.batches)])
        budget = longest + 512
        options: dict[str, Any] = {
            "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": budget, "max_num_seqs": 64,
            "max_num_batched_tokens": budget, "enable_prefix_caching": False, "gpu_memory_utilization": 0.92,
            "dtype": "float32" if args.tiny and not args.model.startswith("qwen") else "bfloat16",
            "tensor_parallel_size": args.tensor_parallel,
        }  # fmt: skip
        if args.model.startswith("gemma"):
            options["disable_hybrid_kv_cache_manager"] = True
        if args.model.startswith("qwen"):
            options["gdn_prefill_backend"] = "triton"  # vLLM's own kernel; FlashInfer's would be compiled first
        if args.kv_gib:
            options["kv_cache_memory_bytes"] = int(args.kv_gib * 2**30)
            options["gpu_memory_utilization"] = 0.3  # what must be free at the start
        if system == "stock_chunked":
            del options["max_num_batched_tokens"]
        if system == "ours":
            import uniprefill_fx.vllm as served
            from uniprefill_fx.vllm import plugin

            plugin.register()  # where the package is not installed, but on the path
            drops = DROPS[args.model][args.layers]
            options |= served.engine_args(
                selection="top_k", drop_layers=list(drops), keep_ratio=list(drops.values()), min_tokens=args.min_tokens,
                strict=True, **({"inner_backend": "eager"} if args.tiny else {}),
            )  # fmt: skip
            if args.no_graphs:
                options["compilation_config"]["cudagraph_mode"] = "NONE"
        began = time.perf_counter()
        self.llm = LLM(str(folder), **options)
        self.started = time.perf_counter() - began
        self.engine = self.llm.llm_engine

    def add(self, tokens: int, new: int) -> str:
        """One more request of random tokens."""
        import torch
        from vllm import SamplingParams

        self.count += 1
        generator = torch.Generator().manual_seed(self.count)
        ids = torch.randint(10, max(20, self.vocabulary - 300), (tokens,), generator=generator).tolist()
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.count), {"prompt_token_ids": ids}, params)
        return str(self.count)

    def run(self, arrivals: Sequence[tuple[float, int, int]] = ()) -> dict[str, list[float]]:
        """Step until nothing is left: by request the seconds at which each of its tokens came, from the call on.

        arrivals: further requests, (seconds, prompt tokens, new tokens), in order. Their first number is when they
        were due.
        """
        began, waiting, times = time.perf_counter(), list(arrivals), dict[str, list[float]]()
        while waiting or self.engine.has_unfinished_requests():
            now = time.perf_counter() - began
            while waiting and waiting[0][0] <= now:
                due, tokens, new = waiting.pop(0)
                times[self.add(tokens, new)] = [due]
            if not self.engine.has_unfinished_requests():
                time.sleep(0.0005)
                continue
            outputs = self.engine.step()
            now = time.perf_counter() - began
            for output in outputs:
                seen = times.setdefault(output.request_id.split("-")[0], [0.0])
                seen += [now] * (len(output.outputs[0].token_ids) + 1 - len(seen))
        return times


def share(values: Sequence[float], part: float) -> float:
    """The value that so large a part of them does not exceed."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def ttft(engine: Engine, length: int) -> dict[str, Any]:
    """Milliseconds from a request's arrival to its first token, alone."""
    ms = []
    for _ in range(1 + engine.args.repeats):
        name = engine.add(length, 1)
        ms.append(1e3 * engine.run()[name][1])
    return {"tokens": length, "ms": statistics.median(ms[1:]), "first_ms": ms[0], "all_ms": ms[1:]}


def batch(engine: Engine, prompts: int, length: int) -> dict[str, Any]:
    """Prompt tokens a second, of many prompts at once; the first time is not counted."""
    seconds = []
    for _ in range(2):
        for _ in range(prompts):
            engine.add(length, 1)
        seconds.append(max(times[-1] for times in engine.run().values()))
    return {"tokens": length, "prompts": prompts, "s": seconds[1], "tokens_per_s": length * prompts / seconds[1]}


def decode(engine: Engine, length: int) -> dict[str, Any]:
    """Milliseconds a token behind a long prompt, alone: from one token to the next, without the first two."""
    name = engine.add(length, 67)
    times = engine.run()[name][3:]
    ms = [1e3 * (b - a) for a, b in itertools.pairwise(times)]
    return {
        "tokens": length, "steps": len(ms), "ms_per_token": statistics.median(ms),
        "mean_ms": statistics.mean(ms), "p99_ms": share(ms, 0.99),
    }  # fmt: skip


def mixed(engine: Engine) -> dict[str, Any]:
    """Requests decode, and long prompts arrive at random intervals (a Poisson process, the same for each system)."""
    args, draw, due = engine.args, random.Random(0), 0.0
    arrivals = []
    for _ in range(args.mixed_long):
        due += draw.expovariate(1 / args.interval)
        arrivals.append((due, args.mixed_length, 32))
    short = {engine.add(args.mixed_short, args.mixed_new) for _ in range(args.prompts)}
    times = engine.run(arrivals)
    first = [1e3 * (at[1] - at[0]) for name, at in times.items() if name not in short]
    between = [1e3 * (b - a) for at in times.values() for a, b in itertools.pairwise(at[1:])]
    seconds = max(at[-1] for at in times.values())
    made = sum(len(at) - 1 for at in times.values())
    prompts = args.mixed_length * args.mixed_long + args.mixed_short * args.prompts
    return {
        "s": seconds, "tokens_per_s": (prompts + made) / seconds, "made_per_s": made / seconds,
        "ttft_p50_ms": share(first, 0.5), "ttft_p99_ms": share(first, 0.99),
        "tpot_p50_ms": share(between, 0.5), "tpot_mean_ms": statistics.mean(between),
        "tpot_p99_ms": share(between, 0.99), "decoding": args.prompts, "long_prompts": args.mixed_long,
        "tokens": args.mixed_length, "interval_s": args.interval,
    }  # fmt: skip


def schedule(args: argparse.Namespace) -> list[tuple[str, tuple[int, ...]]]:
    """What is measured, the most telling first: time may run out."""
    by_size = sorted(args.lengths, reverse=True)
    plan: list[tuple[str, tuple[int, ...]]] = [("ttft", (n,)) for n in by_size if n in (4096, 32_768, 131_072)]
    plan += [("decode", (n,)) for n in args.decode_lengths[:1]]
    plan += [("batch", b) for b in args.batches[:1]] + [("mixed", ())]
    plan += [("ttft", (n,)) for n in by_size if ("ttft", (n,)) not in plan]
    plan += [("batch", b) for b in args.batches[1:]] + [("decode", (n,)) for n in args.decode_lengths[1:]]
    return [
        (kind, of) for kind, of in plan if kind in args.only and (args.system != "stock_chunked" or kind == "mixed")
    ]


def write(out: Path, results: dict[str, Any]) -> None:
    """Add results by system to what the file has; a run that is stopped meanwhile leaves the old file."""
    report = (json.loads(out.read_text()) if out.exists() else {}) | results
    part = out.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(out)


def measure(args: argparse.Namespace) -> None:
    """One system."""
    import torch
    import vllm

    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {args.system}: {text}", file=sys.stderr, flush=True)

    result: dict[str, Any] = {"system": args.system, "vllm": vllm.__version__, "torch": torch.__version__}
    result |= {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "exit": "stopped"}
    result |= {"card": "CPU" if args.tiny else torch.cuda.get_device_name(), "left_out": [], "keep_ratio": None}
    result["arguments"] = {k: v for k, v in vars(args).items() if k not in ("out", "add")}
    if args.system == "ours":
        result["keep_ratio"] = DROPS[args.model][args.layers]
    write(args.out, {args.system: result})
    say("starts an engine")
    engine = Engine(args, args.system)
    result["started_s"] = engine.started
    result["cudagraph_mode"] = engine.engine.vllm_config.compilation_config.cudagraph_mode.name
    say(f"started in {engine.started:.1f} s, CUDA graphs {result['cudagraph_mode']}")
    runs: dict[str, Callable[..., dict[str, Any]]] = {"ttft": ttft, "batch": batch, "decode": decode, "mixed": mixed}
    for kind, of in schedule(args):
        if args.seconds and time.perf_counter() - began > args.seconds:
            result["left_out"].append([kind, *of])
            say(f"{kind} {of} is left out: time is over")
            continue
        row = runs[kind](engine, *of)
        say(f"{kind} {row}")
        result.setdefault(kind, []).append(row)
        if not args.tiny and args.tensor_parallel == 1:
            result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        write(args.out, {args.system: result})
    if args.system == "ours":
        from prometheus_client import CollectorRegistry
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        samples = [s for family in registry.collect() for s in family.samples if s.name.startswith("uniprefill:")]
        result["counts"] = {f"{s.name}{s.labels or ''}": s.value for s in samples if s.name.endswith("_total")}
    result["exit"] = 0
    write(args.out, {args.system: result})


def prompts_of(text: str) -> tuple[int, int]:
    """ "32x8192" -> (32, 8192)."""
    count, _, length = text.partition("x")
    return int(count), int(length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--system", choices=SYSTEMS, help="measure one in this process; without it all, in turn")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin nothing more after so long; 0: no limit")
    parser.add_argument("--model", choices=sorted(ARCHITECTURES), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="default: the model's own, or as many as fit")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="RANKS", help="one GPU each (%(default)s)")
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 2047, 4096, 16_384, 32_768, 65_536, 131_072])
    parser.add_argument("--decode-lengths", type=int, nargs="*", default=[131_072, 32_768])
    parser.add_argument("--batches", type=prompts_of, nargs="*", default=[(32, 8192), (8, 32_768)], metavar="NxTOKENS")
    parser.add_argument("--prompts", type=int, default=32, help="requests that decode in the mixed load")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--min-tokens", type=int, default=2048)
    parser.add_argument("--mixed-short", type=int, default=1024)
    parser.add_argument("--mixed-new", type=int, default=800)
    parser.add_argument("--mixed-length", type=int, default=32_768)
    parser.add_argument("--mixed-long", type=int, default=12)
    parser.add_argument("--interval", type=float, default=1.5, help="mean seconds between the long prompts")
    parser.add_argument("--kv-gib", type=float, default=0.0, help="memory for keys and values; 0: what vLLM finds")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--add", type=Path, nargs="+", default=[], help="files of other runs, whose systems are added")
    parser.add_argument("--no-graphs", action="store_true", help="ours without CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="a small shape on the CPU build, to see that it runs")
    args = parser.parse_args()
    if args.layers is None:
        args.layers = (TINY_LAYERS if args.tiny else DEFAULT_LAYERS)[args.model]
    if args.system is not None:
        measure(args)
        return
    for path in args.add:
        write(args.out, json.loads(path.read_text()))
    began = time.perf_counter()
    for system in args.systems:
        if system == "stock_chunked" and "mixed" not in args.only:
            continue
        command = [sys.executable, __file__, *sys.argv[1:], "--system", system]
        if args.seconds:
            command += ["--seconds", str(max(1.0, args.seconds - (time.perf_counter() - began)))]
        status = subprocess.run(command).returncode
        if status:
            write(args.out, {system: json.loads(args.out.read_text())[system] | {"exit": status}})
            print(f"{system}: exit status {status}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
