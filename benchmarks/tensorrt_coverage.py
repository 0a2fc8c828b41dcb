"""Which operators torch-tensorrt converts in the pieces of a prompt, and in how many engines: no TensorRT, no GPU.

    python -m venv trt && trt/bin/pip install torch==2.11.0 --editable .
    trt/bin/pip install --no-deps torch-tensorrt-rtx==2.11.0 dllist psutil
    trt/bin/python benchmarks/tensorrt_coverage.py --out benchmarks/results/tensorrt_coverage.json \\
        CHECKPOINTS/needle-llama examples/needle-gemma3 qwen3-next

The library lowers and partitions each piece as it would to build engines, and stops there (`dryrun=True`). What it
needs of TensorRT for that is names, which a module that has every name stands for; its compiled half is not loaded.
Nothing is known of engines that were built: TensorRT may refuse what the library hands over, and no time was measured.

One thing is changed. The library has PyTorch choose a kernel for attention, by device, and has converters for those
that a GPU has. Here there is none, so attention stays `aten.scaled_dot_product_attention`, which has a converter of
the same conditions.

What a piece computes here is PyTorch's. The logits are compared with those of `inner_backend="eager"`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


class AnyName(type):
    """A class that has every attribute: another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, AnyName(name, (), {}))
        return getattr(cls, name)


class AnyModule(types.ModuleType):
    """A module that has every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, AnyName(name, (), {}))
        return getattr(self, name)


def library() -> Any:
    """torch-tensorrt over a TensorRT that has nothing but names, on a device that is not there."""
    module: Any = AnyModule("tensorrt_rtx")
    module.__path__, module.__file__, module.__version__ = [], "tensorrt_rtx", "1.3.0"
    module.__spec__ = importlib.machinery.ModuleSpec("tensorrt_rtx", None, is_package=True)
    module.tensorrt_rtx = module
    for name in ("tensorrt_rtx", "tensorrt.tensorrt", "tensorrt.plugin"):
        sys.modules[name] = module
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.current_device = lambda: 0
    cuda.mem_get_info = lambda *_: (1 << 40, 1 << 40)
    is_file = os.path.isfile
    os.path.isfile = lambda path: "libtorchtrt" not in str(path) and is_file(path)  # type: ignore[assignment]
    import torch_tensorrt

    os.path.isfile = is_file
    compiler, lowering = torch_tensorrt.dynamo._compiler, torch_tensorrt.dynamo.lowering
    for module in (compiler, lowering._decompositions):
        module.to_torch_device = lambda _: torch.device("cpu")
    decompositions = compiler.get_decompositions
    attention = torch.ops.aten.scaled_dot_product_attention.default
    compiler.get_decompositions = lambda *args: {k: v for k, v in decompositions(*args).items() if k is not attention}
    return torch_tensorrt


@contextlib.contextmanager
def recorded(compiler: Any) -> Iterator[list[dict[str, Any]]]:
    """What the library says of each program that it is given inside."""
    from uniprefill_fx.lowering.tensorrt import TensorRT

    rows: list[dict[str, Any]] = []
    trackers: list[Any] = []
    build, display = TensorRT.build, compiler.dryrun_stats_display
    compiler.dryrun_stats_display = lambda tracker, _: trackers.append(tracker)

    def noting(self: Any, name: str, *args: Any) -> Any:
        trackers.clear()
        run = build(self, name, *args)
        rows.append({"program": name, **figures(trackers[0] if trackers else None)})
        return run

    TensorRT.build = noting  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        TensorRT.build, compiler.dryrun_stats_display = build, display  # type: ignore[method-assign]


def figures(tracker: Any) -> dict[str, Any]:
    """Operators in all, those that a converter takes, engines and how many operators each holds."""
    if tracker is None:  # too few operators, or none that converts: the library returns the graph
        return {"operators": None, "convert": 0, "engines": []}
    return {
        "operators": tracker.total_ops_in_graph,
        "convert": tracker.supported_ops_in_graph,
        "engines": [part.subgraph_op_count for part in tracker.per_subgraph_data],
        "not_converted": dict(tracker.unsupported_ops),
    }


def model_of(name: str) -> Any:
    import transformers

    if Path(name).is_dir():
        return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    torch.manual_seed(0)
    if name == "qwen3-next":  # three layers of linear attention to one of full attention, as the published models have
        config = transformers.Qwen3NextConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        )
        return transformers.Qwen3NextForCausalLM(config).eval()
    raise SystemExit(f"--models: got {name!r}; wanted a folder with a checkpoint, or 'qwen3-next'")


def measure(trt: Any, name: str, tokens: int) -> dict[str, Any]:
    """One model: every program of a prompt that drops, and of the same prompt dense."""
    import uniprefill_fx

    ids = torch.randint(16, 256, (1, tokens), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"min_tokens": 0, "block_size": 16, "last_n": 32, "sink_tokens": 32, "p": 0.8}
    result: dict[str, Any] = {"model": Path(name).name, "tokens": tokens}
    torch._dynamo.reset()
    plain = uniprefill_fx.compile(model_of(name), inner_backend="eager", **options)
    with torch.inference_mode():
        want = plain(ids, logits_to_keep=1).logits
    torch._dynamo.reset()
    model = uniprefill_fx.compile(
        model_of(name), inner_backend="torch_tensorrt", inner_options={"dryrun": True}, **options
    )
    with torch.inference_mode(), recorded(trt.dynamo._compiler) as rows:
        got = model(ids, logits_to_keep=1).logits
        call = uniprefill_fx.last_call()
        assert call is not None and call.dropped
        result |= {"pieces": list(rows), "kept": [len(kept) for kept in call.kept_indices.values()]}
        rows.clear()
        with uniprefill_fx.disabled():
            model(ids, logits_to_keep=1)
        result["dense"] = list(rows)
    result["largest_difference"] = float((got - want).abs().max())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["examples/needle-gemma3", "qwen3-next"])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    trt = library()
    import transformers

    report = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "torch_tensorrt": trt.__version__,
        "how": "dry run, no engine built",
        "models": [],
    }
    for name in args.models:
        report["models"].append(measure(trt, name, args.tokens))
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps(report["models"][-1], indent=1), file=sys.stderr)


if __name__ == "__main__":
    main()
