"""The shapes that `prefill.py` measures: the real ones with random weights, and tiny ones for a dry run."""

from __future__ import annotations

from typing import Any

from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen3NextConfig

# by model and number of layers, {drop layer: share of the prompt that is kept after it}; where layers were cut off
# there are fewer drops
DROPS: dict[str, dict[int, dict[int, float]]] = {
    "llama-3.1-8b": {
        32: {7: 0.65, 11: 0.55, 15: 0.45, 19: 0.40, 23: 0.35, 27: 0.30},
        16: {3: 0.65, 7: 0.45, 11: 0.35},
        12: {2: 0.65, 5: 0.45, 8: 0.35},
        8: {1: 0.65, 3: 0.45, 5: 0.35},
        4: {1: 0.65, 2: 0.40},
    },
    # the preset's layers of a model of 48: each ends a group of five sliding windows and one full attention
    "gemma-3-12b": {48: {29: 0.65, 35: 0.50, 41: 0.40}, 24: {11: 0.65, 17: 0.45}, 12: {5: 0.65}},
    # three linear attentions to a full one; the real model has 48 layers
    "qwen3-next-80b-a3b": {12: {3: 0.65, 7: 0.45}, 8: {3: 0.65}},
}
DEFAULT_LAYERS = {"llama-3.1-8b": 32, "gemma-3-12b": 48, "qwen3-next-80b-a3b": 12}
TINY_LAYERS = {"llama-3.1-8b": 4, "gemma-3-12b": 12, "qwen3-next-80b-a3b": 8}
LONG = {"rope_type": "default", "rope_theta": 500_000.0}


def build_config(model: str, layers: int, tiny: bool) -> PreTrainedConfig:
    """The configuration of a model's shape with so many layers; `tiny`: the same layers, of small sizes."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": False,
    }
    small = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    small |= {"head_dim": 16, "vocab_size": 256}
    if model == "llama-3.1-8b":
        real = {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8}
        real |= {"head_dim": 128, "vocab_size": 128_256}
        return LlamaConfig(**sizes, **(small if tiny else real), rope_parameters=LONG, rms_norm_eps=1e-5)
    if model == "gemma-3-12b":
        real = {"hidden_size": 3840, "intermediate_size": 15_360, "num_attention_heads": 16, "num_key_value_heads": 8}
        real |= {"head_dim": 256, "vocab_size": 262_208, "sliding_window": 1024, "query_pre_attn_scalar": 256}
        small |= {"sliding_window": 64, "query_pre_attn_scalar": 16}
        kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)]
        return Gemma3TextConfig(**sizes, **(small if tiny else real), layer_types=kinds)
    real = {"hidden_size": 2048, "intermediate_size": 5120, "num_attention_heads": 16, "num_key_value_heads": 2}
    real |= {"head_dim": 256, "vocab_size": 151_936, "num_experts": 512, "num_experts_per_tok": 10}
    real |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    real |= {"linear_num_value_heads": 32, "linear_num_key_heads": 16}
    small |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    small |= {"shared_expert_intermediate_size": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    small |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    return Qwen3NextConfig(**sizes, **(small if tiny else real), full_attention_interval=4)
