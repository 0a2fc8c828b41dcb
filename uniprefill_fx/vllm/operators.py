"""What vLLM's own operators do to rows: the allow-list of the analysis.

All of them take a token's row of the first axis and write that token's row. Those in `MIXERS` run along a request's
tokens by metadata that `metadata.py` builds anew for the kept ones, so they see kept tokens as neighbours. None
computes with the number of rows.

Of what the ranks of tensor parallelism exchange, sums and gathered channels are here: rows stay those of the same
tokens, which are the same on every rank (`ranks.py`). A gather along the first axis makes more rows than tokens, and is
refused for that.
"""

from __future__ import annotations

from uniprefill_fx.passes.analyze.row_operators import register_row_operator

OUTPUTS: dict[str, tuple[str, ...]] = {
    "_C::rms_norm": ("result", "out"),
    "_C::rotary_embedding": (),  # in place on queries and keys
    "_C::silu_and_mul": ("result", "out"),
    "_C::mul_and_silu": ("result", "out"),
    "_C::gelu_and_mul": ("result", "out"),
    "_C::gelu_tanh_and_mul": ("result", "out"),
    "_C::gelu_new": ("result", "out"),
    "_C::gelu_fast": ("result", "out"),
    "_C::gelu_quick": ("result", "out"),
    "_C::onednn_mm": ("c", "out", "result"),
    "vllm::moe_forward": (),
    "vllm::moe_forward_shared": (),
    "uniprefill::served_qk_norm_rope_gate": (),
    "vllm::all_reduce": (),
    "vllm::all_gather": (),
    "_C::shm_allreduce": (),  # the same on a CPU, in place
}
MIXERS: dict[str, tuple[str, ...]] = {
    "vllm::gdn_attention_core": ("core_attn_out",),
    "vllm::qwen_gdn_attention_core": ("core_attn_out",),
    "vllm::cpu_gdn_attention_core": ("core_attn_out",),
}
EXCHANGE_NOTHING = frozenset({"_C::cpu_fused_moe", "_C::weight_packed_linear"})
"""Operators that the analysis may run on random rows where there are several ranks."""


def register() -> None:
    """Tell the analysis of them. An operator that this vLLM does not have is never met."""
    for name, outputs in (OUTPUTS | MIXERS).items():
        register_row_operator(name, outputs)
