"""vLLM with and without dropping, on one card: time to first token, throughput, decoding, and long prompts arriving
while others decode.

    PYTHONPATH=. python benchmarks/serve.py --out serve.json
    PYTHONPATH=. python benchmarks/serve.py --out smoke.json --layers 8 --lengths 4096 32768 --only ttft decode

Weights are random (`load_format="dummy"`), of a shape that is written as a config.json; `keep_ratio` fixes how many
tokens stay, and scoring and selecting are real. Each system runs in a process of its own, one after the other:

    stock          vLLM's default, mode 3 with CUDA graphs, whole prompts in a step as ours
    stock_chunked  the same with its default budget of tokens in a step, for the mixed load
    ours           mode 2 with this package's backend, without CUDA graphs

The engine lives in the measuring process, which calls `step()`: times are of the host, with the sampled token at hand.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from prefill_models import DROPS, build_config

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
}
SYSTEMS = ("ours", "stock", "stock_chunked")
KINDS = ("ttft", "batch", "decode", "mixed")
ARCHITECTURES = {
    "llama-3.1-8b": "LlamaForCausalLM",
    "gemma-3-12b": "Gemma3ForCausalLM",
    "qwen3-next-80b-a3b": "Qwen3NextForCausalLM",
}


class Engine:
    """One engine of vLLM, driven step by step."""

    def __init__(self, args: argparse.Namespace, system: str) -> None:
        from vllm import LLM

        self.args, self.count = args, 0
        folder = Path(tempfile.mkdtemp())
        config = build_config(args.model, args.layers, args.tiny)
        settings = (
            config.to_dict() | {"architectures": [ARCHITECTURES[args.model]]} | ({"head_dim": 32} if args.tiny else {})
        )
        (folder / "config.json").write_text(json.dumps(settings, default=str))
        self.vocabulary = int(settings["vocab_size"])
        budget = max(args.lengths) + 512
        options: dict[str, Any] = {
            "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": budget, "max_num_seqs": 64,
            "max_num_batched_tokens": budget, "enable_prefix_caching": False, "gpu_memory_utilization": 0.92,
            "dtype": "float32" if args.tiny else "bfloat16",
        }  # fmt: skip
        if args.model.startswith("gemma"):
            options["disable_hybrid_kv_cache_manager"] = True
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
            if args.graphs:
                options["compilation_config"]["cudagraph_mode"] = "FULL_DECODE_ONLY"
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

    def step(self) -> dict[str, tuple[int, bool]]:
        """By request: how many tokens it has by now, and whether it is done."""
        return {o.request_id: (len(o.outputs[0].token_ids), o.finished) for o in self.engine.step()}

    def drain(self) -> list[float]:
        """Run until nothing is left; seconds of each step."""
        times = []
        while self.engine.has_unfinished_requests():
            began = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - began)
        return times


def ttft(engine: Engine, length: int) -> dict[str, Any]:
    """Milliseconds from a request's arrival to its first token, alone."""
    seconds = []
    for _ in range(1 + engine.args.repeats):  # the first one compiles
        engine.add(length, 1)
        seconds.append(sum(engine.drain()))
    return {"tokens": length, "ms": 1e3 * statistics.median(seconds[1:]), "first_ms": 1e3 * seconds[0]}


def batch(engine: Engine, length: int) -> dict[str, Any]:
    """Prompt tokens a second, of many prompts at once."""
    prompts = engine.args.prompts
    for _ in range(2):  # the first one compiles
        for _ in range(prompts):
            engine.add(length, 1)
        seconds = sum(engine.drain())
    return {"tokens": length, "prompts": prompts, "s": seconds, "tokens_per_s": length * prompts / seconds}


def decode(engine: Engine, length: int) -> dict[str, Any]:
    """Milliseconds a token behind a long prompt."""
    engine.add(length, 65)
    steps = engine.drain()[1:]
    return {"tokens": length, "ms_per_token": 1e3 * statistics.median(steps)}


def mixed(engine: Engine) -> dict[str, Any]:
    """32 requests decode; long prompts arrive at even intervals."""
    args = engine.args
    for _ in range(args.prompts):
        engine.add(args.mixed_short, args.mixed_new)
    while any(count == 0 for count, _ in engine.step().values()):
        pass
    began = time.perf_counter()
    arrivals = [began + i * args.interval for i in range(args.mixed_long)]
    last: dict[str, float] = {}
    counts: dict[str, int] = {}
    arrived: dict[str, float] = {}
    first: list[float] = []
    between: list[float] = []
    while engine.engine.has_unfinished_requests() or arrivals:
        now = time.perf_counter()
        while arrivals and arrivals[0] <= now:
            arrived[engine.add(args.mixed_length, 32)] = arrivals.pop(0)
        if not engine.engine.has_unfinished_requests():
            time.sleep(0.001)
            continue
        done = engine.step()
        now = time.perf_counter()
        for name, (count, _) in done.items():
            name = name.split("-")[0]
            if count > counts.get(name, 0):
                if name in arrived and name not in last:
                    first.append(now - arrived[name])
                elif name in last:
                    between.append(now - last[name])
                last[name], counts[name] = now, count
    seconds = time.perf_counter() - began

    def at(values: list[float], share: float) -> float:
        return 1e3 * sorted(values)[min(len(values) - 1, int(share * len(values)))]

    prompts = args.mixed_length * args.mixed_long
    return {
        "s": seconds, "long_tokens_per_s": prompts / seconds,
        "ttft_p50_ms": at(first, 0.5), "ttft_p99_ms": at(first, 0.99),
        "tpot_p50_ms": at(between, 0.5), "tpot_p99_ms": at(between, 0.99), "long_prompts": args.mixed_long,
    }  # fmt: skip


def schedule(args: argparse.Namespace) -> list[tuple[str, int]]:
    """What is measured, the most telling first: time may run out."""
    by_size = sorted(args.lengths, reverse=True)
    first = [n for n in (4096, 32_768, 131_072) if n in by_size]
    others = [n for n in by_size if n not in first]
    plan = [("ttft", n) for n in first] + [("decode", n) for n in first[-1:]]
    plan += [("batch", n) for n in args.batch_lengths[:1]] + [("mixed", args.mixed_length)]
    plan += [("ttft", n) for n in others] + [("decode", n) for n in by_size if n not in first[-1:]]
    plan += [("batch", n) for n in args.batch_lengths[1:]]
    return [(kind, n) for kind, n in plan if kind in args.only and (args.system != "stock_chunked" or kind == "mixed")]


def measure(args: argparse.Namespace) -> None:
    """One system; what is measured by now is always in the file."""
    import torch
    import vllm

    began = time.perf_counter()
    result: dict[str, Any] = {"system": args.system, "vllm": vllm.__version__, "torch": torch.__version__}
    result |= {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "exit": "killed"}
    result |= {"card": "CPU" if args.tiny else torch.cuda.get_device_name(), "skipped": [], "keep_ratio": None}
    result["arguments"] = {k: v for k, v in vars(args).items() if k != "out"}
    if args.system == "ours":
        result["keep_ratio"] = DROPS[args.model][args.layers]
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    engine = Engine(args, args.system)
    result["started_s"] = engine.started
    runs = {"ttft": ttft, "batch": batch, "decode": decode, "mixed": lambda engine, _: mixed(engine)}
    for kind, length in schedule(args):
        if args.seconds and time.perf_counter() - began > 0.9 * args.seconds:
            result["skipped"].append([kind, length])
            continue
        row = runs[kind](engine, length)
        print(args.system, kind, row, flush=True)
        result.setdefault(kind, []).append(row)
        if not args.tiny:
            result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.system == "ours":
        from prometheus_client import REGISTRY

        samples = [s for family in REGISTRY.collect() for s in family.samples if s.name.startswith("uniprefill:")]
        result["counts"] = {f"{s.name}{s.labels or ''}": s.value for s in samples if s.name.endswith("_total")}
    result["exit"] = 0
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--system", choices=SYSTEMS, help="measure one in this process; without it all, in turn")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin nothing more after nine tenths of this")
    parser.add_argument("--model", choices=sorted(ARCHITECTURES), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16_384, 32_768, 65_536, 131_072])
    parser.add_argument("--batch-lengths", type=int, nargs="+", default=[8192, 32_768])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--min-tokens", type=int, default=2048)
    parser.add_argument("--mixed-short", type=int, default=1024)
    parser.add_argument("--mixed-new", type=int, default=400)
    parser.add_argument("--mixed-length", type=int, default=32_768)
    parser.add_argument("--mixed-long", type=int, default=16)
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between the long prompts")
    parser.add_argument("--kv-gib", type=float, default=0.0, help="memory for keys and values; 0: what vLLM finds")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--graphs", action="store_true", help="ours with CUDA graphs of decode steps, not tested yet")
    parser.add_argument("--tiny", action="store_true", help="a small shape on the CPU build, to see that it runs")
    args = parser.parse_args()
    if args.system is not None:
        measure(args)
        return
    report: dict[str, Any] = {}
    for system in args.systems:
        part = args.out.with_suffix(f".{system}.json")
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--system", system, "--out", str(part)])
        report[system] = json.loads(part.read_text())
        part.unlink()
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
