"""Tensor parallelism inside vLLM's CPU build: two processes keep the same rows, those of the eager reference, which
knows no ranks. Needs vllm."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_reference import ROTARY
from serving_cases import OPTIONS, check, prompt, serve
from test_serving_families import FAMILIES
from tiny import tiny_llama
from transformers.models.qwen3_moe import modeling_qwen3_moe

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm (make test-vllm)")
LLAMA: dict[str, Any] = {"layers": 4, "hidden_size": 128, "head_dim": 32, "tie_word_embeddings": False}
REQUESTS: dict[str, Any] = {
    "a": {"prompt": prompt(400, 0), "max_tokens": 12},
    "b": {"prompt": prompt(60, 1), "max_tokens": 6, "add_at": 2},
    "c": {"prompt": prompt(333, 2), "max_tokens": 6, "add_at": 2},
    "d": {"prompt": prompt(523, 3), "max_tokens": 6, "add_at": 4, "extra_args": {"uniprefill": {"keep_ratio": 0.4}}},
}


def split(folder: Path, requests: dict[str, Any], options: dict[str, Any] = OPTIONS, **engine: Any) -> Any:
    """What an engine of two ranks answered, which both did the same."""
    served = serve(folder, requests, options, tensor_parallel_size=2, **engine)
    assert not isinstance(served, str), served[-3000:]
    one, other = served["ranks"]
    assert one["prefills"] == other["prefills"] and one["steps"] == other["steps"] and one["prefills"]
    assert one["counts"] and not other["counts"]  # a prompt is counted once
    return served


def test_ranks_keep_what_one_keeps(tmp_path: Path) -> None:
    """Beside requests that decode. The first drop layer is indifferent: all its blocks tie, and the lower ones stay."""
    model = tiny_llama(**LLAMA)
    with torch.no_grad():
        model.model.layers[OPTIONS["drop_layers"][0]].self_attn.q_proj.weight.zero_()
    model.save_pretrained(tmp_path)
    served = split(tmp_path, REQUESTS)
    assert check(model, served, REQUESTS) == 3
    assert any(1 in sizes and max(sizes) > 100 for sizes in served["steps"])
    last_n = OPTIONS["last_n"]
    for prefill in (p for p in served["prefills"] if p["dense"] is None):
        first, second = prefill["kept"]
        before = len(first) - last_n
        assert first == [*range(before), *range(prefill["tokens"] - last_n, prefill["tokens"])]
        assert second[:before] != first[:before] and len(second) < len(first) < prefill["tokens"]
    for rank in served["ranks"]:
        assert rank["agreed"] == [True, False]
    parts = torch.tensor([rank["part"] for rank in served["ranks"]])
    for rank in served["ranks"]:
        torch.testing.assert_close(torch.tensor(rank["sum"]), parts.sum(0))
        assert rank["sum"] == served["ranks"][0]["sum"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3", "qwen3_next"])
def test_families(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROTARY, "qwen3_moe", modeling_qwen3_moe.apply_rotary_pos_emb)
    build, layers, engine = FAMILIES[family]
    rounds = engine.get("dtype") == "bfloat16"
    model = build().bfloat16().float() if rounds else build()
    model.save_pretrained(tmp_path)
    options = OPTIONS | {"drop_layers": layers}
    served = split(tmp_path, REQUESTS, options, **engine)
    assert check(model, served, REQUESTS, options, 0.15 if rounds else 1e-4) == 3


@pytest.mark.slow
def test_fewer_key_heads_than_ranks(tmp_path: Path) -> None:
    """Both ranks hold the one key head, and each its own half of the queries, which are scored once each."""
    model = tiny_llama(**LLAMA, num_key_value_heads=1)
    model.save_pretrained(tmp_path)
    assert check(model, split(tmp_path, REQUESTS), REQUESTS) == 3


@pytest.mark.slow
def test_preempted_requests_resume_on_all_ranks(tmp_path: Path) -> None:
    model = tiny_llama(**LLAMA)
    model.save_pretrained(tmp_path)
    requests = {f"r{i}": {"prompt": prompt(240 + i, 20 + i), "max_tokens": 40} for i in range(4)}
    served = split(tmp_path, requests, num_gpu_blocks_override=18, block_size=64)
    assert check(model, served, requests) > len(requests), "nothing was preempted"


@pytest.mark.slow
def test_compiled_by_inductor(tmp_path: Path) -> None:
    model = tiny_llama(**LLAMA)
    model.save_pretrained(tmp_path)
    options = OPTIONS | {"inner_backend": "inductor"}
    assert check(model, split(tmp_path, REQUESTS, options), REQUESTS, options) == 3


@pytest.mark.slow
def test_ranks_that_differ_stay_dense(tmp_path: Path) -> None:
    """One of them says that it runs something else: neither drops, and answers are those of the model."""
    model = tiny_llama(**LLAMA)
    model.save_pretrained(tmp_path)
    served = split(tmp_path, REQUESTS, worker_extension_cls="serving_differs.Extension")
    assert check(model, served, REQUESTS) == 0
    assert all("ranks whose graphs or options differ" in p["dense"] for p in served["prefills"])
