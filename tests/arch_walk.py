"""Every text decoder of transformers as a tiny model, found in its auto-mapping and shrunk by its config's own fields.

No list of families is kept here: `families()` reads the mapping, `SMALL` shrinks what a field name means, and
`OVERRIDES` says, each with its reason, what these rules cannot know.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, get_args

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

LAYERS, HEADS, HEAD_DIM, WIDTH, POSITIONS, VOCABULARY, SPREAD = 2, 4, 16, 64, 1024, 256, 0.2
TURNS = 3  # layers, where they differ: one of another kind behind a drop, and a drop behind that


def _named(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


# A field that is there, and is no None, becomes at most this.
SMALL: dict[str, int] = {
    **_named(VOCABULARY, "vocab_size decoder_vocab_size vocab_size_per_layer_input"),
    **_named(WIDTH, "hidden_size d_model n_embd emb_dim embedding_dim embedding_size lru_width attention_hidden_size"),
    **_named(WIDTH, "word_embed_proj_dim dim_model_base input_embedding_size output_embedding_size"),
    **_named(HEADS, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"),
    **_named(HEADS, "encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads"),
    **_named(HEADS, "swa_num_attention_heads linear_num_heads linear_num_value_heads num_attention_heads_per_layer"),
    **_named(2, "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads index_n_heads"),
    **_named(2, "num_query_groups num_global_key_value_heads"),
    **_named(HEAD_DIM, "head_dim global_head_dim swa_head_dim v_head_dim qk_nope_head_dim d_head dim_head kv_channels"),
    **_named(HEAD_DIM, "linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim attention_head_size"),
    **_named(24, "qk_head_dim"),
    **_named(8, "qk_rope_head_dim rotary_dim gated_norm_rank laurel_rank adapter_rank d_rel"),
    **_named(32, "kv_lora_rank q_lora_rank o_lora_rank moe_intermediate_size shared_expert_intermediate_size"),
    **_named(32, "moe_shared_expert_intermediate_size expert_ffn_hidden_size hc_lowrank router_hidden_size"),
    **_named(2 * WIDTH, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dff dim_ff d_inner"),
    **_named(2 * WIDTH, "intermediate_size_mlp dense_intermediate_size shared_intermediate_size feed_forward_size"),
    **_named(2 * WIDTH, "n_inner mamba_d_ssm"),
    **_named(HEAD_DIM, "hidden_size_per_layer_input"),
    **_named(4, "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num"),
    **_named(2, "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts n_group"),
    **_named(1, "topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace"),
    **_named(1, "num_dense_layers num_expert_group n_groups mamba_n_groups mamba_ngroups num_nextn_predict_layers"),
    **_named(HEAD_DIM, "mamba_d_state state_size ssm_state_size mamba_d_head mamba_head_dim mamba_headdim"),
    **_named(8, "mamba_n_heads mamba_num_heads n_mamba_heads mamba_dt_rank time_step_rank"),
    **_named(64, "mamba_chunk_size chunk_size index_topk index_block_size"),
    **_named(2, "index_topk_blocks"),
    **_named(128, "sliding_window sliding_window_size window_size attention_window_size local_attention"),
    **_named(128, "attention_chunk_size"),
    **_named(2, "num_mem_blocks"),
    **_named(1, "num_kv_shared_layers hc_sinkhorn_iters"),
}
# Fields that count layers. More than one of them, as in a decoder of an encoder-decoder, agree.
COUNTS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"}
COUNTS |= {"num_encoder_layers", "num_decoder_layers", "num_blocks"}
# A field that is there becomes exactly this.
EXACT: dict[str, Any] = {
    **_named(POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length"),
    "initializer_range": SPREAD,
    "is_decoder": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
    "head_dim": HEAD_DIM,  # where it may be left out, some models divide by it all the same
    "attn_layer_period": 2,
    "attn_layer_offset": 0,
    "attn_layer_indices": [0, 2],
}
# Kinds of layers that a list names; of several kinds the first of these begins each turn.
KINDS_FIRST = ("full_attention", "hybrid", "attention")

# What the rules above cannot know, by model type.
_FULL = "full_attention"
_TURNS, _CONV_TURNS = [[_FULL, kind, _FULL] for kind in ("sliding_attention", "conv")]
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_ROUTED: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
_INDEXER: dict[str, Any] = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 16,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    # Its rope holds for each kind of layer, and has sections that add up to a head.
    "cohere_compass_text": {
        "layer_types": _TURNS,
        "rope_parameters": dict.fromkeys(_TURNS, _ROPE | {"mrope_section": [3, 3, 2]}),
    },
    # Its attention reads a field that its config does not have.
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    # The default counts no experts.
    "deepseek_v2": {**_ROUTED, "moe_intermediate_size": 32},
    "dots1": {**_ROUTED, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    # One list follows from the other, and the default's is as long as the default's layers.
    "gpt_neo": {
        "attention_types": [[["global", "local", "global"], 1]],
        "attention_layers": ["global", "local", "global"],
    },
    # The default has no layer with attention, or no other.
    "granitemoehybrid": {"layer_types": ["attention", "mamba", "attention"]},
    "lfm2": {"layer_types": _CONV_TURNS},
    "lfm2_moe": {"layer_types": _CONV_TURNS},
    # Its layers run several times over.
    "hrm_text": {"num_hidden_layers": 2, "H_cycles": 1, "L_cycles": 1},
    # Rotary embeddings of `head_dim`, which is that of the rotated part here.
    "longcat_flash": {"head_dim": 8},
    # Heads times their size are twice the width.
    "mamba2": {"num_heads": 8},
    # The default leaves out what the model divides by.
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": _INDEXER,
    "qwen4_exp_text": _INDEXER,
    # Four kinds of blocks, two turns of which would be eight.
    "nemotron_h": {"layers_block_type": [_FULL, "moe", "linear_attention", _FULL]},
    # Its layers cycle through a pattern, which is longer than a tiny model.
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    # Position tables whose shapes multiply to the length and add up to the width.
    "reformer": {"axial_pos_embds": False},
    # The default has no layer with its indexer.
    "minimax_m3_vl_text": {"layer_types": [_FULL, "minimax_m3_sparse", _FULL]},
    # Its kernel for the CPU wants queries as wide as values.
    "xlstm": {"qk_dim_factor": 1.0},
    # It refuses to run without one.
    "xmod": {"default_language": "en_XX"},
    # Twice the width, as the concatenation of two streams.
    "zamba": {"attention_hidden_size": 2 * WIDTH},
}


def families() -> list[str]:
    """The model types that have a causal language model."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _kinds(value: Any, layers: int) -> list[Any]:
    """The kinds that a list with an entry for each layer names, in the order of a turn."""
    if not isinstance(value, list) or len(value) != layers or not all(isinstance(v, str | int | float) for v in value):
        return []
    if set(value) == {"sliding_attention"}:
        value = [*value, "full_attention"]  # the family can do without a window that holds everywhere
    return sorted(dict.fromkeys(value), key=lambda kind: KINDS_FIRST.index(kind) if kind in KINDS_FIRST else TURNS)


def _small(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_small(name, v) for v in value]
    if isinstance(value, int | float) and not isinstance(value, bool) and name in SMALL:
        return min(value, SMALL[name])
    return value


def tiny_fields(config_class: Any, model_type: str | None = None) -> dict[str, Any]:
    """What a config class is to be called with for a tiny model."""
    default, overrides = config_class(), OVERRIDES.get(model_type or config_class.model_type, {})
    names = set(inspect.signature(config_class.__init__).parameters) - {"self", "kwargs"}
    # not its attributes: some read others, and some may not be read where layers differ
    values = {**dict.fromkeys(names), **vars(default)}
    before = values.get("num_hidden_layers", values.get("num_layers", 0))
    kinds = {name: found for name in names if (found := _kinds(values[name], before))}
    differ = any(len(found) > 1 for found in kinds.values()) or any(isinstance(v, list) for v in overrides.values())
    layers = TURNS if differ or names & {"attn_layer_indices", "attn_layer_period"} else LAYERS
    fields: dict[str, Any] = {}
    for name in sorted(names):
        value = values[name]
        if name in config_class.sub_configs:
            sub_class = config_class.sub_configs[name] if value is None else type(value)
            fields[name] = tiny_fields(sub_class) if sub_class is not transformers.AutoConfig else value
        elif name in COUNTS and value is not None:
            fields[name] = layers
        elif name in EXACT:
            fields[name] = EXACT[name]
        elif name in kinds:
            fields[name] = [_small(name, kinds[name][i % len(kinds[name])]) for i in range(layers)]
        elif (small := _small(name, value)) != value:
            fields[name] = small
    optional = type(None) in get_args(config_class.__annotations__.get("sliding_window"))
    if optional and "layer_types" not in values:
        fields["sliding_window"] = None
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = HEADS  # latent keys are expanded for each head
    return fields | overrides


@dataclass(frozen=True)
class Walked:
    """One family, with the interface of `arch_builders.Arch` as far as references need it.

    Attributes:
        name: its model type. attention: transformers' name of its implementation; None: the default.
    """

    name: str
    attention: str | None = None
    interface: bool = False

    @property
    def model_class(self) -> Any:
        return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.name])

    @property
    def family(self) -> str:
        return str(self.model_class.__name__).removesuffix("ForCausalLM")

    def build(self, attention: str | None = None) -> Any:
        """The model with weights that make attention prefer some tokens; the same each time."""
        torch.manual_seed(0)
        config_class = self.model_class.config_class
        config = config_class(**tiny_fields(config_class, self.name))
        config._attn_implementation = attention or self.attention
        model = self.model_class(config)
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding, Conv1D)):
                nn.init.normal_(module.weight, std=SPREAD)
        return model.eval()
