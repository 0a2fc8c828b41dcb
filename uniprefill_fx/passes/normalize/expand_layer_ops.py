"""Spell out the ops that hold a whole layer of `torch.nn`, so that its attention can be seen.

In eval mode, without gradients, `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` are one op each. Before::

    x_1 = torch._transformer_encoder_layer_fwd(x, width, heads, w_qkv, b_qkv, ..., mask, 2)

After (pre-norm)::

    q, k, v = ...linear(layer_norm(x), w_qkv, b_qkv)...                 # (1, heads, N, D) each
    attn = scaled_dot_product_attention(q, k, v, logical_not(mask.bool()))
    h = x + linear(attn.transpose(1, 2).flatten(2), w_out, b_out)
    x_1 = h + linear(gelu(linear(layer_norm(h), ...)), ...)
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from uniprefill_fx.passes.node_utils import meta
from uniprefill_fx.passes.operator_internals import fused_attention, fused_layer
from uniprefill_fx.torch_internals import dispatch_in_python

KEYS_ALONE = 1  # kind of mask: of keys, without a causal one


def expand_layer_ops(gm: fx.GraphModule) -> int:
    """Replace every such op that can be, in place; returns how many."""
    expanded = 0
    for node in list(gm.graph.nodes):
        body = _body(node)
        if body is not None:
            _inline(node, body)
            expanded += 1
    if expanded:
        gm.graph.lint()
        gm.recompile()
    return expanded


def _body(node: fx.Node) -> Callable[..., Any] | None:
    """The function to put in place of a node, called with the node's arguments; None if there is none."""
    if node.target is fused_layer() and len(node.args) == 20:
        return None if node.args[19] == KEYS_ALONE else _encoder_layer
    output_only = all(user.target is operator.getitem and (user.args[1] == 0 or not user.users) for user in node.users)
    if len(node.args) < 3 or not output_only or not node.args[0] is node.args[1] is node.args[2]:
        return None
    if node.target is fused_attention() and len(node.args) == 13:
        return None if node.args[12] == KEYS_ALONE else _attention_op
    if node.target is F.multi_head_attention_forward and len(node.args) == 13:
        given = inspect.signature(F.multi_head_attention_forward).bind(*node.args, **node.kwargs)
        given.apply_defaults()
        call = given.arguments
        unknown = ("bias_k", "bias_v", "add_zero_attn", "key_padding_mask", "use_separate_proj_weight", "static_k")
        dropped = call["training"] and call["dropout_p"] != 0
        flat = call["attn_mask"] is None or meta(call["attn_mask"]).ndim == 2
        known = flat and not dropped and all(call[name] in (None, False) for name in unknown)
        return _attention_call if known else None
    return None


def _attention(x: Any, heads: int, projections: Sequence[Any], mask: Any, causal: bool = False) -> Any:
    """Self-attention over (batch, tokens, width), with a mask as `scaled_dot_product_attention` takes it.

    Projections: weight and bias that make queries, keys and values, then those of the output.
    """
    w, b, w_out, b_out = projections
    qkv = F.linear(x, w, b).chunk(3, -1)
    q, k, v = (qkv[i].unflatten(-1, (heads, -1)).transpose(1, 2) for i in range(3))
    attended = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
    return F.linear(attended.transpose(1, 2).flatten(2), w_out, b_out)


def _seen(mask: Any) -> Any:
    """What the fused ops let through: their masks are nonzero where a key is hidden."""
    return None if mask is None else torch.logical_not(mask.bool())


def _attention_call(x: Any, _k: Any, _v: Any, _width: int, heads: int, w: Any, b: Any, *rest: Any, **call: Any) -> Any:
    causal = bool(call.get("is_causal")) and not call.get("need_weights", True)
    given = (heads, (w, b, *rest[4:6]), None if causal else call.get("attn_mask"), causal)
    if x.node.meta["example_value"].ndim == 2:  # one sequence, (tokens, width)
        y = _attention(x.unsqueeze(0), *given)
        return (y.squeeze(0), None)
    y = _attention(x.transpose(0, 1), *given)
    return (y.transpose(0, 1), None)


def _attention_op(x: Any, _k: Any, _v: Any, _width: int, heads: int, *rest: Any) -> Any:
    return (_attention(x, heads, rest[:4], _seen(rest[4])), None)


def _encoder_layer(x: Any, width: int, heads: int, *rest: Any) -> Any:
    gelu, norm_first, eps = rest[4:7]
    attended = (heads, rest[:4], _seen(rest[15]))

    def normed(y: Any, weight: Any, bias: Any) -> Any:
        return F.layer_norm(y, (width,), weight, bias, eps)

    def fed(y: Any) -> Any:
        inner = F.linear(y, rest[11], rest[12])
        return F.linear(F.gelu(inner) if gelu else F.relu(inner), rest[13], rest[14])

    if norm_first:
        x = x + _attention(normed(x, *rest[7:9]), *attended)
        return x + fed(normed(x, *rest[9:11]))
    x = normed(x + _attention(x, *attended), *rest[7:9])
    return normed(x + fed(x), *rest[9:11])


def _inline(node: fx.Node, body: Callable[..., Any]) -> None:
    traced, inputs, results = _trace(node, body)
    new: dict[fx.Node, Any] = dict(inputs)
    kept: dict[str, Any] = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
    mode = meta(node.all_input_nodes[0]).fake_mode
    with node.graph.inserting_before(node), torch.no_grad(), dispatch_in_python(), mode:
        for part in traced.nodes:
            if part not in new:
                new[part] = node.graph.node_copy(part, new.__getitem__)
                new[part].meta = dict(kept, example_value=_value(new[part]))
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(new[results])
    for user in list(node.users):  # the others read an element of a tuple
        if user.users:
            user.replace_all_uses_with(new[results[user.args[1]]])
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _trace(node: fx.Node, body: Callable[..., Any]) -> tuple[fx.Graph, dict[fx.Node, fx.Node], Any]:
    """The graph of `body`, the nodes that its placeholders stand for, and its results."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    stand_ins = {given: graph.placeholder(given.name) for given in node.all_input_nodes}
    for given, stand_in in stand_ins.items():
        stand_in.meta = dict(given.meta)

    def proxy(given: fx.Node) -> Any:
        return fx.Proxy(stand_ins[given], tracer)

    args: Any = fx.node.map_arg(node.args, proxy)
    kwargs: Any = fx.node.map_arg(node.kwargs, proxy)
    results = fx.node.map_aggregate(body(*args, **kwargs), lambda p: p.node if isinstance(p, fx.Proxy) else p)
    return graph, {stand_in: given for given, stand_in in stand_ins.items()}, results


def _value(node: fx.Node) -> Any:
    """What a node gives for the values that its arguments were traced with."""
    args: Any = fx.node.map_arg(node.args, meta)
    kwargs: Any = fx.node.map_arg(node.kwargs, meta)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)
