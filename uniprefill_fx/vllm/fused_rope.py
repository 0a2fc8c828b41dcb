"""Make vLLM's Triton kernel in front of Qwen3-Next's attention an operator whose rows are known.

The kernel normalises queries and keys, rotates them and copies the gate, a token at a time. Traced, its launch has the
number of tokens in its grid, and strides as numbers. Before::

    q = torch.empty((tokens, 4096));  k = torch.empty((tokens, 512));  gate = torch.empty_like(q)
    triton_kernel_wrapper_mutation(grid=[(tokens, 18, 1)], kwargs={"q_out_ptr": q, ...})

After::

    q, k, gate = uniprefill.served_qk_norm_rope_gate(q_gate, k_in, ..., eps, 16, 2, 256, 64, norm_beta)
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from uniprefill_fx.passes.node_utils import meta, name_of
from uniprefill_fx.passes.operator_internals import triton_launch
from uniprefill_fx.vllm.ops import QK_NORM_ROPE_GATE

KERNEL = "_fused_qk_rmsnorm_rope_gate_kernel"
OUTPUTS = ("q_out_ptr", "k_out_ptr", "gate_out_ptr")
INPUTS = ("q_gate_ptr", "k_ptr", "q_weight_ptr", "k_weight_ptr", "cos_sin_cache_ptr", "positions_ptr")
NUMBERS = ("eps", "num_q_heads", "num_kv_heads", "head_dim", "rotary_dim")
FOLLOW = frozenset(
    "q_gate_stride_t k_stride_t q_out_stride_t k_out_stride_t gate_out_stride_t cache_stride_p positions_stride_m "
    "positions_stride_t half_rotary INPUT_DTYPE HEAD_BLOCK ROT_HALF_BLOCK HAS_PASS".split()
)
"""Arguments that follow from the others."""
ONE_POSITION = ("HAS_MROPE", "MROPE_SECTION_H", "MROPE_SECTION_W")
"""Not zero where a token has several positions."""


def name_fused_rope(graph: fx.Graph) -> None:
    """Do what is shown above, in place. A launch with arguments that are not known here stays, and is refused later."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        launched = triton_launch(node)
        if launched is not None and launched[0] == KERNEL and _understood(node, launched[1], order):
            _replace(graph, node, launched[1], order)


def _understood(node: fx.Node, given: dict[str, Any], order: dict[fx.Node, int]) -> bool:
    known = {*OUTPUTS, *INPUTS, *NUMBERS, *FOLLOW, *ONE_POSITION, "norm_beta"}
    if not set(given) <= known or not {*OUTPUTS, *INPUTS, *NUMBERS} <= set(given):
        return False
    if any(given.get(name) for name in ONE_POSITION):
        return False
    for name in OUTPUTS:
        made = given[name]
        before = [user for user in made.users if order[user] < order[node]]
        if name_of(made) not in ("empty", "empty_like") or any(name_of(user) != "empty_like" for user in before):
            return False
    return all(meta(given[name]).ndim == 1 for name in ("q_weight_ptr", "k_weight_ptr", "positions_ptr"))


def _replace(graph: fx.Graph, node: fx.Node, given: dict[str, Any], order: dict[fx.Node, int]) -> None:
    arguments = [given[name] for name in (*INPUTS, *NUMBERS)]
    made = [given[name] for name in OUTPUTS]
    with graph.inserting_before(node):
        call = graph.call_function(QK_NORM_ROPE_GATE, (*arguments, float(given.get("norm_beta", 0.0))))
        call.meta["example_value"] = tuple(meta(n) for n in made)
        parts = [graph.call_function(operator.getitem, (call, i)) for i in range(len(made))]
    for old, new in zip(made, parts, strict=True):
        new.meta = dict(old.meta)
        for user in [user for user in old.users if order[user] > order[node]]:
            user.replace_input_with(old, new)
    graph.erase_node(node)
