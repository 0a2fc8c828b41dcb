"""Inside vLLM on a GPU, with its CUDA graphs: answers are those of the eager reference, up to the rounding of products.

Queries and keys are float32, which vLLM multiplies as TF32 there; a wrong slot or length shows in the first digit.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from serving_cases import OPTIONS, check, prompt, serve
from tiny import tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]
ENGINE: dict[str, Any] = {
    "attention_backend": "TRITON_ATTN",
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 30,  # whatever else runs on the card
}


@pytest.mark.parametrize("graphs", [True, False])
def test_mixed_steps_and_decoding(graphs: bool, tmp_path: Path) -> None:
    model = tiny_llama(layers=4, hidden_size=256, head_dim=64, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    requests: dict[str, Any] = {
        f"r{i}": {"prompt": prompt(length, i), "max_tokens": 16, "add_at": 2 * i}
        for i, length in enumerate((400, 50, 700, 301, 640, 220))
    }
    options = OPTIONS | {"inner_backend": "inductor"}
    engine = ENGINE | {"cudagraph_mode": "FULL_DECODE_ONLY" if graphs else "NONE"}
    served = serve(tmp_path, requests, options, **engine)
    assert check(model, served, requests, options, tolerance=0.15) == 5
