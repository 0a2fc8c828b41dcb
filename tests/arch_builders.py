"""Thirty tiny architectures (one of them with two kinds of attention), and what each is expected to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers

LAYERS = {"num_hidden_layers": 4}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# Large enough that attention prefers some tokens to others, and that no two blocks score nearly the same.
VOCABULARY = {"vocab_size": 256, "initializer_range": 0.2}
WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 4096}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
PLAIN: dict[str, Any] = {**VOCABULARY, **WIDTHS, **HEADS, **LAYERS, **TOKENS}
SIZED: dict[str, Any] = {**PLAIN, "head_dim": 16}

# Short and long rotary frequencies, one for each pair of a head of 16.
LONG_ROPE: dict[str, Any] = {
    "original_max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 512,
    },
}
NTK: dict[str, Any] = {
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}
WINDOW = {"sliding_window": 128}
# In turns, so that a layer of either kind comes after the first drop: one after the last layer changes no output.
TURNS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR_TURNS = {"layer_types": ["linear_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
MLA = {"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
JAMBA: dict[str, Any] = {
    **PLAIN,
    **EXPERTS,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": 8,
    "use_mamba_kernels": False,
}
GEMMA3N: dict[str, Any] = {
    **SIZED,
    **WINDOW,
    "num_hidden_layers": 6,
    "intermediate_size": [128] * 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "activation_sparsity_pattern": [0.0] * 6,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 16,
    "altup_num_inputs": 2,
    "laurel_rank": 8,
    "num_kv_shared_layers": 2,
}
LLAMA4: dict[str, Any] = {
    **SIZED,
    **LOCAL_EXPERTS,
    "attention_chunk_size": 128,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 128,
    "interleave_moe_layer_step": 1,
    "no_rope_layers": [1, 0] * 2,
}
DEEPSEEK: dict[str, Any] = {
    **PLAIN,
    **MLA,
    **ROUTED,
    "q_lora_rank": 32,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
INDEXER = {"index_topk": 64, "index_n_heads": 2, "index_head_dim": 16}
NEMOTRON: dict[str, Any] = {
    **{name: value for name, value in SIZED.items() if name != "num_hidden_layers"},
    **ROUTED,
    "layers_block_type": ["mamba", "attention", "moe"] * 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 1,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 64,
    "n_group": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "moe_latent_size": None,
}
MAMBA2: dict[str, Any] = {
    "vocab_size": 256,
    "initializer_range": 0.2,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 1,
    "expand": 2,
    "chunk_size": 64,
    **TOKENS,
}
QWEN3_NEXT: dict[str, Any] = {
    **SIZED,
    **EXPERTS,
    **DELTA,
    **LINEAR_TURNS,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
KIMI: dict[str, Any] = {
    **PLAIN,
    **MLA,
    **LOCAL_EXPERTS,
    "q_lora_rank": None,
    "moe_intermediate_size": 32,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    **LINEAR_TURNS,
}
MHA: dict[str, Any] = {name: value for name, value in PLAIN.items() if name != "num_key_value_heads"}
GPT2: dict[str, Any] = {**VOCABULARY, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 1024}
BLOOM: dict[str, Any] = {**VOCABULARY, "hidden_size": 64, "n_layer": 4, "n_head": 4}
FALCON: dict[str, Any] = {
    **VOCABULARY,
    **LAYERS,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "multi_query": True,
    "alibi": False,
}
GPT_NEO: dict[str, Any] = {
    **VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 4,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 2]],
    "window_size": 128,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ZAMBA2: dict[str, Any] = {
    **PLAIN,
    "num_key_value_heads": 4,
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "num_mem_blocks": 2,
    "adapter_rank": 8,
    "use_mem_rope": True,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "n_mamba_heads": 8,
    "mamba_ngroups": 1,
    "chunk_size": 64,
    "use_mamba_kernels": False,
}
MOE_OF_QWEN = {**EXPERTS, "moe_intermediate_size": 32}
FALCON_H1 = {**MAMBA, "mamba_d_ssm": 128, "mamba_chunk_size": 64}
EVERY, ODD = (0, 1, 2, 3), (1, 3)


@dataclass(frozen=True)
class Arch:
    """One architecture.

    Attributes:
        family: prefix of its classes' names. config: of the model.
        drops: its full-attention layers, where `drop_layers="all"` drops; () when it stays dense.
        dense: why it stays dense: a category of refusal.
        suffixes: of the names of the config class and of the model class.
        attention: transformers' name of its implementation; None: the default.
        interface: whether its attention goes through transformers' AttentionInterface.
        p: of the drops in tests.
    """

    family: str
    config: dict[str, Any]
    drops: tuple[int, ...]
    dense: str | None = None
    suffixes: tuple[str, str] = ("Config", "ForCausalLM")
    attention: str | None = None
    interface: bool = True
    p: float = 0.7

    def build(self, attention: str | None = None) -> Any:
        """The model, with its own attention unless another is named; the same weights each time."""
        torch.manual_seed(0)
        config_class = getattr(transformers, self.family + self.suffixes[0])
        model_class = getattr(transformers, self.family + self.suffixes[1])
        # A config may be given lists, and some change them.
        values = {name: list(v) if isinstance(v, list) else v for name, v in self.config.items()}
        return model_class(config_class(**values, attn_implementation=attention or self.attention)).eval()


TEXT = ("TextConfig", "ForCausalLM")
ARCHS = {
    "llama": Arch("Llama", SIZED, EVERY),
    "mistral_sw": Arch("Mistral", {**SIZED, **WINDOW}, (), "no-full-attention"),
    "qwen2": Arch("Qwen2", PLAIN, EVERY),
    "qwen3": Arch("Qwen3", SIZED, EVERY),
    "qwen3_moe": Arch("Qwen3Moe", {**SIZED, **MOE_OF_QWEN}, EVERY),
    "mixtral": Arch("Mixtral", {**SIZED, **LOCAL_EXPERTS, "sliding_window": None}, EVERY),
    # Only the eager implementation applies the soft-capping; transformers' sdpa leaves it out.
    "gemma2": Arch("Gemma2", {**SIZED, **WINDOW, "query_pre_attn_scalar": 16}, ODD, attention="eager"),
    "gemma2_sdpa": Arch("Gemma2", {**SIZED, **WINDOW, "query_pre_attn_scalar": 16}, ODD),
    "gemma3": Arch("Gemma3", {**SIZED, **WINDOW, **TURNS, "query_pre_attn_scalar": 16}, ODD, suffixes=TEXT),
    "gemma3n": Arch("Gemma3n", GEMMA3N, (1, 3, 5), suffixes=TEXT),
    "phi3": Arch("Phi3", {**PLAIN, "sliding_window": None}, EVERY),
    "phi3_longrope": Arch("Phi3", {**PLAIN, **LONG_ROPE, "sliding_window": None}, EVERY, p=0.8),
    "olmo2": Arch("Olmo2", PLAIN, EVERY),
    "gpt_oss": Arch("GptOss", {**SIZED, **WINDOW, **TURNS, **LOCAL_EXPERTS}, ODD),
    "llama4": Arch("Llama4", LLAMA4, ODD, suffixes=TEXT),
    "deepseek_v3": Arch("DeepseekV3", DEEPSEEK, EVERY),
    "granite": Arch("Granite", PLAIN, EVERY),
    # Two attentions a layer, over the same queries and keys.
    "diffllama": Arch("DiffLlama", SIZED, EVERY),
    "bamba": Arch(
        "Bamba", {**PLAIN, **MAMBA, "mamba_expand": 2, "mamba_chunk_size": 64, "attn_layer_indices": [1, 3]}, ODD
    ),
    "jamba": Arch("Jamba", JAMBA, ODD),
    "jamba_noassoc": Arch("Jamba", {**JAMBA, "use_associative_scan": False}, ODD),
    "falcon_h1": Arch("FalconH1", {**PLAIN, **FALCON_H1}, EVERY),
    "nemotron_h": Arch("NemotronH", NEMOTRON, (1, 4)),
    "mamba2": Arch("Mamba2", MAMBA2, (), "no-full-attention"),
    "lfm2": Arch(
        "Lfm2", {**PLAIN, "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}, ODD
    ),
    "qwen3_next": Arch("Qwen3Next", QWEN3_NEXT, ODD),
    "qwen3_5": Arch("Qwen3_5", {**SIZED, **DELTA, **LINEAR_TURNS}, ODD, suffixes=TEXT),
    "kimi_linear": Arch("KimiLinear", KIMI, ODD),
    "minimax": Arch("MiniMax", {**SIZED, **LINEAR_TURNS, **LOCAL_EXPERTS, "block_size": 64}, ODD),
    "gpt_neox": Arch("GPTNeoX", MHA, EVERY),
    "gpt2": Arch("GPT2", {**GPT2, "bos_token_id": 1, "eos_token_id": 2}, EVERY, suffixes=("Config", "LMHeadModel")),
    "bloom": Arch("Bloom", {**BLOOM, "bos_token_id": 1, "eos_token_id": 2}, EVERY, interface=False, p=0.95),
    "gpt_neo": Arch("GPTNeo", GPT_NEO, (0, 2), interface=False),
    "granite_swa": Arch("GraniteSWA", {**PLAIN, **WINDOW, **TURNS, "initializer_range": 0.15}, ODD),
    "zamba2": Arch("Zamba2", ZAMBA2, ODD),
    "falcon": Arch("Falcon", {**FALCON, "bos_token_id": 1, "eos_token_id": 2}, EVERY, interface=False),
}
