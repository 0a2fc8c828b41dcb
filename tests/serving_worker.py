"""One engine of vLLM in a process of its own: runs requests by a schedule, and writes down what came out.

    python serving_worker.py FOLDER             # reads FOLDER/case.json, writes FOLDER/result.json
    echo FOLDER | python serving_worker.py      # and FOLDER/log.txt, in a process that is forked from this one

The case: `model`, `engine` (keyword arguments of LLM), `options` (of `engine_args`; null: a stock engine), `requests`
(id -> prompt, max_tokens, n, extra_args, add_at: the step before which it is added, abort_at or null).
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks of one machine with as many cores as there are
}

ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 1024, "max_num_batched_tokens": 2048,
    "max_num_seqs": 8,
}  # fmt: skip


def count_replays() -> list[int]:
    """A list that grows by a 1 whenever a CUDA graph is replayed."""
    import torch

    found: list[int] = []
    original = torch.cuda.CUDAGraph.replay

    def replay(self: Any) -> None:
        found.append(1)
        original(self)

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
    return found


def call_experts_as_operators() -> None:
    """Have a layer of experts be one operator that knows it by name, as on a GPU; a CPU traces what is in it."""
    import torch
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    def select(self: Any) -> Any:
        ops = torch.ops.vllm
        return ops.moe_forward if self._shared_experts is None else ops.moe_forward_shared

    moe_runner.MoERunner._select_forward = select


class Compilations(logging.Handler):
    """What the package says that it compiled in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        pieces = logging.getLogger("uniprefill_fx.lowering.pieces")
        pieces.setLevel(logging.INFO)
        pieces.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "compiled for sizes" in record.getMessage():
            self.found.append(record.getMessage())


def run(case: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    import uniprefill_fx.vllm as served
    from uniprefill_fx.vllm import plugin

    plugin.register()  # as vLLM does where the package is installed
    own: dict[str, Any] = {"enable_prefix_caching": False}
    if case["options"] is not None:
        own = served.engine_args(**case["options"])
    replayed, compilations = count_replays(), Compilations()
    engine = dict(case["engine"])
    if graphs := engine.pop("cudagraph_mode", None):
        own["compilation_config"] = own["compilation_config"] | {"cudagraph_mode": graphs}
    if engine.pop("experts_as_operators", False):
        call_experts_as_operators()
    llm = LLM(case["model"], **(ENGINE | own | engine))
    at_start = len(compilations.found)
    llm.collective_rpc(watch)
    core, waiting = llm.llm_engine, dict(case["requests"])
    outputs: dict[str, dict[int, Any]] = {}
    step = 0
    while waiting or core.has_unfinished_requests():
        for name, request in list(waiting.items()):
            if request.get("add_at", 0) <= step:
                params = SamplingParams(
                    max_tokens=request.get("max_tokens", 8), temperature=request.get("temperature", 0.0), logprobs=3,
                    n=request.get("n", 1), detokenize=False, ignore_eos=True, seed=0,
                    extra_args=request.get("extra_args"), prompt_logprobs=request.get("prompt_logprobs"),
                )  # fmt: skip
                core.add_request(name, {"prompt_token_ids": request["prompt"]}, params)
                del waiting[name]
        for name, request in case["requests"].items():
            if request.get("abort_at") == step:
                core.abort_request([name])
        for output in core.step():
            for part in output.outputs:  # of n samples, those that went on
                outputs.setdefault(output.request_id, {})[part.index] = part
        step += 1
    results = {
        name: [
            {
                "index": o.index,
                "tokens": list(o.token_ids),
                "logprobs": [{t: v.logprob for t, v in at.items()} for at in o.logprobs or []],
            }
            for _, o in sorted(output.items())
        ]
        for name, output in outputs.items()
    }
    found: list[dict[str, Any]] = llm.collective_rpc(seen)
    if engine.get("tensor_parallel_size", 1) > 1:
        for own, more in zip(found, llm.collective_rpc(exchanged), strict=True):
            own |= more
    compiled = {"replays": len(replayed), "compilations": [at_start, len(compilations.found)]}  # by this process
    return {"outputs": results, "ranks": found} | compiled | found[0]


def watch(worker: Any) -> None:
    """In each rank's process: have its steps noted."""
    from uniprefill_fx.vllm import steps

    current = steps.current()
    worker.uniprefill_seen = []
    if current is not None:
        current.watchers.append(worker.uniprefill_seen)


def seen(worker: Any) -> dict[str, Any]:
    """In each rank's process: what its steps did, and what it counted."""
    from prometheus_client import REGISTRY

    steps: list[Any] = worker.uniprefill_seen
    prefills = [
        {"request": name, "tokens": s.prompts[name], "dense": s.dense.get(name), "step": i,
         "kept": [rows.tolist() for rows in s.kept.get(name, [])]}
        for i, s in enumerate(steps) for name in (*s.dropping, *s.dense)
    ]  # fmt: skip
    samples = [s for family in REGISTRY.collect() for s in family.samples if s.name.startswith("uniprefill:")]
    counts = {"".join((s.name, *s.labels.values())): s.value for s in samples if s.name.endswith("_total")}
    return {"prefills": prefills, "counts": counts, "steps": [list(s.tokens.values()) for s in steps]}


def exchanged(worker: Any) -> dict[str, Any]:
    """In each rank's process: what it and the others make of scores and programs that they have in common, or not."""
    import torch

    from uniprefill_fx.vllm import ranks

    part = torch.rand(3, 70, generator=torch.Generator().manual_seed(worker.rank)).to(worker.device)
    agreed = [ranks.agree("the same"), ranks.agree(f"that of {worker.rank}")]
    return {"part": part.tolist(), "sum": ranks.summed(part).tolist(), "agreed": agreed}


def answer_each(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer the case of the folder on the command line, or of each that standard input names, and say so by a line.

    Of the latter each has a process of its own, forked from this one when nothing but imports has happened: they are
    most of the time that a small engine takes.
    """
    from vllm import LLM  # noqa: F401

    import uniprefill_fx.vllm  # noqa: F401

    if len(sys.argv) == 2:
        _answer(run, Path(sys.argv[1]))
        return
    for line in sys.stdin:
        if os.fork() == 0:
            folder = Path(line.removesuffix("\n"))
            log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(log, stream)
            _answer(run, folder)
            return
        os.wait()
        print(flush=True)


def _answer(run: Callable[[dict[str, Any]], dict[str, Any]], folder: Path) -> None:
    found = run(json.loads((folder / "case.json").read_text("utf-8")))
    (folder / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    answer_each(run)
