"""Architectures inside vLLM's CPU build, against the eager reference for each request alone. Needs vllm."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from eager_reference import ROTARY
from serving_cases import OPTIONS, check, prompt, serve
from tiny import SIZES, tiny_gemma3
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm (make test-vllm)")
WIDE: dict[str, Any] = SIZES | {"hidden_size": 128, "head_dim": 32, "tie_word_embeddings": False}


def gemma3() -> Any:
    return tiny_gemma3(layers=5, hidden_size=128, head_dim=32)


def qwen3_moe() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **WIDE, num_hidden_layers=4, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
        decoder_sparse_step=1,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).eval()


def qwen3() -> Any:
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**WIDE, num_hidden_layers=4)).eval()


def qwen3_next() -> Any:
    torch.manual_seed(0)
    # both experts take every token: rounding to 8 bits would have them change places
    sizes: dict[str, Any] = WIDE | {"full_attention_interval": 2}
    config = transformers.Qwen3NextConfig(
        **sizes, num_hidden_layers=6, num_experts=2, num_experts_per_tok=2,
        moe_intermediate_size=64, shared_expert_intermediate_size=64, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=128, linear_value_head_dim=128,
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config).eval()


FAMILIES: dict[str, tuple[Callable[[], Any], list[int], dict[str, Any]]] = {
    "gemma3": (gemma3, [1, 3], {"disable_hybrid_kv_cache_manager": True}),
    "qwen3_moe": (qwen3_moe, [1, 2], {}),
    "qwen3": (qwen3, [0, 2], {}),
    "qwen3_next": (qwen3_next, [1, 3], {"dtype": "bfloat16"}),  # vLLM has no other linear attention on a CPU
}
FAMILIES |= {
    f"{name}_as_on_a_gpu": (*FAMILIES[name][:2], FAMILIES[name][2] | {"experts_as_operators": True})
    for name in ("qwen3_moe", "qwen3_next")
}
SLOW = ("qwen3",)


@pytest.mark.parametrize("family", [pytest.param(f, marks=[pytest.mark.slow] * (f in SLOW)) for f in FAMILIES])
def test_families(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FAMILIES[family][2]
    check_family(family, tmp_path, monkeypatch, 0.15 if engine.get("dtype") == "bfloat16" else 1e-4, **engine)


def check_family(
    family: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tolerance: float,
    inner: str = "eager",
    variables: dict[str, str] | None = None,
    **engine: Any,
) -> None:
    """Check that an engine with these arguments answers right, alone and in mixed steps."""
    monkeypatch.setitem(ROTARY, "qwen3", modeling_qwen3.apply_rotary_pos_emb)
    monkeypatch.setitem(ROTARY, "qwen3_moe", modeling_qwen3_moe.apply_rotary_pos_emb)
    build, layers, _ = FAMILIES[family]
    model = build()
    if engine.get("dtype") == "bfloat16":
        model = model.bfloat16().float()  # weights that both hold
    model.save_pretrained(folder)
    options = OPTIONS | {"drop_layers": layers, "inner_backend": inner}
    requests: dict[str, Any] = {
        "a": {"prompt": prompt(400, 0), "max_tokens": 12},
        "b": {"prompt": prompt(60, 1), "max_tokens": 6, "add_at": 2},
        "c": {"prompt": prompt(333, 2), "max_tokens": 6, "add_at": 2},
        "d": {"prompt": prompt(520, 3), "max_tokens": 6, "add_at": 4},
    }
    served = serve(folder, requests, options, variables, **engine)
    assert check(model, served, requests, options, tolerance) == 3
