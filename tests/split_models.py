"""Tiny models whose tensor-parallel plans split them over two ranks, and how each drops tokens.

A process of a rank and the test that checks it make the same weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from eager_reference import DropSpec
from tiny import LLAMA, SIZES, tiny_gemma3, tiny_llama, token_ids
from torch import Tensor

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32,
}


def tiny_qwen3_moe() -> Any:
    torch.manual_seed(0)
    settings = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, num_hidden_layers=2)
    return transformers.Qwen3MoeForCausalLM(settings).eval()


def tiny_qwen3_next() -> Any:
    """Linear and full attention in turn."""
    torch.manual_seed(0)
    settings = transformers.Qwen3NextConfig(
        **SIZES, **EXPERTS, **LINEAR, num_hidden_layers=2, layer_types=["full_attention", "linear_attention"]
    )
    return transformers.Qwen3NextForCausalLM(settings).eval()


FIRST = replace(LLAMA, drop_layers=(0,))
SPLIT: dict[str, tuple[Callable[[], Any], DropSpec]] = {
    "llama": (partial(tiny_llama, 2), FIRST),
    "qwen3_moe": (tiny_qwen3_moe, FIRST),
    "gemma3": (partial(tiny_gemma3, layers=3), DropSpec((1,), p=0.7, block_size=8, last_n=16, sink_tokens=8)),
    "qwen3_next": (tiny_qwen3_next, FIRST),
}
TOKENS, STEPS = 300, 8
LENGTHS = (300, 217)  # of a padded batch
TIED = DropSpec((0,), selection="top_k", keep_ratio=0.4, block_size=16, last_n=16, sink_tokens=16)


def indifferent_llama() -> Any:
    """A Llama whose drop layer has queries of zeros: every query sees all tokens before it alike, and blocks tie."""
    model = tiny_llama(2)
    with torch.no_grad():
        model.model.layers[TIED.drop_layers[0]].self_attn.q_proj.weight.zero_()
    return model


def split_over(model: Any, mesh: Any) -> Any:
    """Split the weights of a model as `from_pretrained(..., tp_plan="auto")` does when it has loaded one."""
    apply: Any = importlib.import_module("transformers.distributed.tensor_parallel").apply_tensor_parallelism
    expand = getattr(model, "_expand_parallel_plan", None)
    if expand is None:
        return apply(model, mesh)
    # Since 5.24 it takes the plan, whose layers have their numbers. Weights are tied when they are loaded, after it.
    names = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    plan = {name: style for name, style in expand(model.tp_plan).items() if name in names}
    apply(model, mesh, plan)
    model.tie_weights()
    return model


def padded_batch() -> tuple[Tensor, Tensor]:
    """Prompts of `LENGTHS`, padded on the left, and their mask."""
    longest = max(LENGTHS)
    ids = torch.zeros(len(LENGTHS), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        ids[row, longest - length :] = token_ids(length, seed=row + 1)[0]
        mask[row, longest - length :] = 1
    return ids, mask
