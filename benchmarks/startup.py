"""Seconds of the first and of the second start of a process, and host time of a prefill: dropped, dense and stock.

python benchmarks/startup.py --out startup.json                                  # examples/needle-gemma3
python benchmarks/startup.py --layers 32 --hidden 4096 --heads 32 --kv-heads 8 --device cuda --dtype bfloat16

Every start is a process of its own. The second one finds the on-disk caches that the first one of its kind has filled.
`dropped` is this package, `dense` is this package with `disabled()`, `stock` is `torch.compile`.

Host time is that of one call until it returns, with nothing waited for: the device's queue is empty when it begins. A
drop itself waits for the device, once; with `--hidden 64` the device has next to nothing to do, and host time is all
there is. On the CPU a call returns when its work is done.
"""

from __future__ import annotations

import argparse
import contextlib
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

CHECKPOINT = Path(__file__).resolve().parents[1] / "examples" / "needle-gemma3"
MODES = ("dropped", "dense", "stock")


def model_of(args: argparse.Namespace) -> Any:
    """A checkpoint, or a Llama of the given shape with random weights."""
    import torch
    import transformers

    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    if not args.layers:
        return transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device).eval()
    config = transformers.LlamaConfig(
        num_hidden_layers=args.layers,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        vocab_size=1024,
        max_position_embeddings=1 << 18,
    )
    torch.manual_seed(0)
    with device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def start(args: argparse.Namespace) -> dict[str, Any]:
    """One start of a process: seconds of its parts, hits of the caches, host milliseconds of a prefill."""
    began = time.perf_counter()
    import torch
    from torch._dynamo.utils import counters

    import uniprefill_fx

    model = model_of(args)
    ids = torch.randint(3, 60, (1, args.tokens), generator=torch.Generator().manual_seed(0)).to(args.device)
    loaded = time.perf_counter()
    if args.start == "stock":
        model.compile()
    else:
        uniprefill_fx.compile(model, p=args.p, min_tokens=16)
    cuda = args.device == "cuda"

    def prefill() -> float:
        """Host milliseconds of one prefill."""
        if cuda:
            torch.cuda.synchronize()
        at = time.perf_counter()
        model(ids, logits_to_keep=1)
        return (time.perf_counter() - at) * 1e3

    within = uniprefill_fx.disabled() if args.start == "dense" else contextlib.nullcontext()
    with torch.inference_mode(), within:
        seconds = {"load": loaded - began, "prefill": prefill() / 1e3}
        at = time.perf_counter()
        model.generate(ids, max_new_tokens=args.new_tokens, do_sample=False)
        if cuda:
            torch.cuda.synchronize()
        seconds["generate"] = time.perf_counter() - at
        seconds["total"] = time.perf_counter() - began
        host = [prefill() for _ in range(args.repeats)]
    call = uniprefill_fx.last_call()
    assert args.start == "stock" or (call is not None and call.dropped == (args.start == "dropped")), call
    usage = os.times()
    return {
        "seconds": {name: round(s, 2) for name, s in seconds.items()},
        "cpu_seconds": round(usage.user + usage.system + usage.children_user + usage.children_system, 2),
        "host_ms": {"median": round(statistics.median(host), 3), "least": round(min(host), 3)},
        "compute": None if call is None else round(call.compute_fraction, 3),
        "aot_autograd": {k: v for k, v in counters["aot_autograd"].items() if "cache" in k},
        "inductor": {k: v for k, v in counters["inductor"].items() if "fxgraph_cache" in k},
        "graphs": counters["stats"]["unique_graphs"],
    }


def child(args: argparse.Namespace, mode: str, caches: str) -> dict[str, Any]:
    """`start` in a new process, over a folder of caches."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": caches, "TRITON_CACHE_DIR": os.path.join(caches, "triton")}
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--start", mode], env=environment, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    return found


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """When, where and with what."""
    import torch
    import transformers

    card = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {os.cpu_count()} cores"
    return {
        "date": datetime.date.today().isoformat(),
        "card": card,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": "random Llama" if args.layers else os.path.basename(args.model),
        "options": {k: v for k, v in vars(args).items() if k not in ("start", "out", "model")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(CHECKPOINT), help="a folder or a name, unless --layers is given")
    parser.add_argument("--layers", type=int, default=0, help="a Llama of so many layers, with random weights")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--p", type=float, default=0.9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--start", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        print(json.dumps(start(args)))
        return
    result = environment(args)
    for mode in args.modes:
        with tempfile.TemporaryDirectory() as caches:
            for which in ("first", "second"):
                result.setdefault(which, {})[mode] = found = child(args, mode, caches)
                print(f"{which} start, {mode}: {found}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
