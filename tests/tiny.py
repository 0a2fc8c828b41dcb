"""Tiny models with random weights, for tests of how the backend behaves rather than of what a checkpoint answers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from eager_reference import DropSpec
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,  # attention that prefers some tokens to others
}
LLAMA = DropSpec((1,), p=0.7, block_size=16, last_n=16, sink_tokens=16)  # drops rows of `tiny_llama()`


def tiny_llama(layers: int = 3, attention: str = "sdpa", **config: Any) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = SIZES | {"num_hidden_layers": layers, "attn_implementation": attention} | config
    settings = transformers.LlamaConfig(**options)
    return transformers.LlamaForCausalLM(settings).eval()


def tiny_gemma3(window: int = 32, layers: int = 5, attention: str = "sdpa", **config: Any) -> Any:
    """Sliding and full attention in turn."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "num_hidden_layers": layers,
        "sliding_window": window,
        "layer_types": (["sliding_attention", "full_attention"] * layers)[:layers],
        "query_pre_attn_scalar": 16,
        "attn_implementation": attention,
    }
    settings = transformers.Gemma3TextConfig(**(SIZES | options | config))
    return transformers.Gemma3ForCausalLM(settings).eval()


def token_ids(length: int, seed: int = 0) -> Tensor:
    """(1, length) int64, none of them a special token."""
    return torch.randint(3, 256, (1, length), generator=torch.Generator().manual_seed(seed))
