"""Readers of attention that PyTorch itself writes: `scaled_dot_product_attention`, and softmax between two products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from uniprefill_fx.errors import Category, RefusalError, refuse
from uniprefill_fx.frontends.explicit_attention import read_explicit_attention
from uniprefill_fx.passes.analyze.attention_nodes import register_reader
from uniprefill_fx.passes.analyze.latent_kv import latent_kv
from uniprefill_fx.passes.analyze.masks.kinds import MaskKind, classify
from uniprefill_fx.passes.attention_node import AttentionNode, CachedKeys
from uniprefill_fx.passes.node_utils import decoder_layer, expression, is_op, meta, module_path, name_of, shape
from uniprefill_fx.specs import AttentionSpec


@register_reader
def fused_attention(node: fx.Node) -> AttentionNode | None:
    """`torch.nn.functional.scaled_dot_product_attention`."""
    if node.target is not F.scaled_dot_product_attention:
        return None
    bound = _bind(node)
    mask = _mask(bound)
    k, v = _unrepeated(bound["key"], bound["value"])
    return _attention(node, bound["query"], k, v, mask, frozenset({node}), scale=bound["scale"])


@register_reader
def named_attention(node: fx.Node) -> AttentionNode | None:
    """Attention that is seen for what it is, and not read. Always refused."""
    if node.op == "call_function" and node.target is torch.ops.aten.scaled_dot_product_attention.default:
        hint = "compile the model itself, not what torch.export made of it"
        raise refuse(Category.ATTENTION, "attention as an ATen operator, as an exported program has it", hint)
    if node.op == "call_function" and name_of(node) == "flex_attention":
        hint = 'load the model with attn_implementation="sdpa"'
        raise refuse(Category.ATTENTION, "flex_attention, whose mask and scores are functions", hint)
    return None


@register_reader
def spelled_out_attention(node: fx.Node) -> AttentionNode | None:
    """A softmax between the product of queries and keys and that with the values (`frontends.explicit_attention`)."""
    found = read_explicit_attention(node) if name_of(node) == "softmax" else None
    if found is None:
        return None
    q, (k, v) = found.q, _unrepeated(found.k, found.v)
    queries, keys = meta(q).shape[2], meta(k).shape[2]
    masks: list[tuple[fx.Node, bool]] = []
    bias = found.bias
    for mask, hides in found.masks:
        fake = meta(mask)
        if not hides and fake.is_floating_point() and expression(fake.shape[-2]) == 1 != expression(queries):
            if bias is not None:
                raise refuse(Category.ATTENTION, "two biases on the attention logits", "such a layer stays dense")
            bias = mask  # the same for all queries: not a mask but a bias of keys (alibi)
        else:
            masks.append((mask, hides))
    if masks:
        kind = _classify(masks, expression(queries), k)
    elif expression(queries) == 1:
        kind = MaskKind(expression(keys) - 1)
    else:
        raise refuse(
            Category.NON_CAUSAL,
            "attention without a mask",
            "only causal attention can drop tokens or leave out blocks of keys",
        )
    biases = [b for b in (kind.alibi, kind.bias, bias) if b is not None]
    if len(biases) > 1 or (biases and found.scaled_masks):
        raise refuse(Category.ATTENTION, "two biases on the attention logits, or a scaled one", "it stays dense")
    terms = {"scale": found.scale, "softcap": found.softcap, "sinks": found.sinks, "bias": bias}
    return _attention(found.out, q, k, v, kind, frozenset(found.interior), **terms)


def _attention(
    node: fx.Node, q: fx.Node, k: fx.Node, v: fx.Node, mask: MaskKind, interior: frozenset[fx.Node], **terms: Any
) -> AttentionNode:
    if mask.bias is not None:
        terms["bias"] = mask.bias
    _check_heads(q, k, v, terms)
    spec = AttentionSpec(
        window=mask.window,
        chunk=mask.chunk,
        key_mask=mask.key_mask,
        sequence_ids=mask.sequence_ids,
        chunk_start=mask.chunk_start,
        **terms,
    )
    return AttentionNode(
        node,
        q,
        k,
        v,
        spec,
        decoder_layer(node),
        module_path(node),
        mask.offset,
        cached=_cached(mask, q, k, v),
        alibi=mask.alibi,
        causal_buffers=mask.causal_buffers,
        interior=interior,
    )


def _check_heads(q: fx.Node, k: fx.Node, v: fx.Node, terms: Mapping[str, Any]) -> None:
    """Check that keys and values have as many heads, and that a bias has a row for each: it is not broadcast later.

    Raises:
        RefusalError: heads share a bias, or an axis of heads is not found in it; or there are other heads of values.
    """
    q_shape, k_shape, v_shape = shape(q), shape(k), shape(v)
    assert q_shape is not None and k_shape is not None and v_shape is not None
    if k_shape[1] != v_shape[1]:
        raise refuse(
            Category.ATTENTION, f"{k_shape[1]} heads of keys and {v_shape[1]} of values", "such a layer stays dense"
        )
    count, keys = q_shape[1], k_shape[2]
    bias = shape(term) if isinstance(term := terms.get("bias"), fx.Node) else None
    if bias is not None:
        # Of three axes the first one may hold the heads of several prompts, one prompt behind the other.
        by_head = len(bias) in (3, 4) and (bias[-3] == count or (len(bias) == 3 and (bias[0] / count).is_integer))
        if not by_head or bias[-1] == 1 != keys:
            raise refuse(
                Category.ATTENTION,
                f"a bias of the attention logits of shape {tuple(bias)}, which is not one number a head and key",
                "such a layer stays dense; expand it to (batch, heads, 1, keys)",
            )


def _bind(node: fx.Node) -> dict[str, Any]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    bound: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
    bound.update(zip(names, node.args, strict=False))
    bound.update(node.kwargs)
    return bound


def _mask(bound: dict[str, Any]) -> MaskKind:
    q_shape, k_shape = shape(bound["query"]), shape(bound["key"])
    assert q_shape is not None and k_shape is not None
    if len(q_shape) != 4:
        raise refuse(Category.ATTENTION, f"attention over {len(q_shape)}-D queries", "4-D operands are understood")
    if bound["dropout_p"] != 0:
        raise refuse(Category.ATTENTION, f"attention with dropout {bound['dropout_p']}", "call model.eval()")
    queries, keys = q_shape[2], k_shape[2]
    if queries == keys == 1:
        return MaskKind(sympy.Integer(0))  # one token sees itself, whatever the mask says
    if queries == 1 and bound["attn_mask"] is not None and expression(meta(bound["attn_mask"]).shape[-1]) == 1:
        return MaskKind(keys - 1)  # one number for all keys: it would hide all of them or none
    if bound["attn_mask"] is not None:
        return _classify([(bound["attn_mask"], False)], queries, bound["key"])
    if bound["is_causal"]:
        if queries != keys:
            raise refuse(
                Category.ATTENTION,
                f"is_causal=True with {queries} queries and {keys} keys",
                "causal attention without a mask is understood when both are the same tokens",
            )
        return MaskKind(sympy.Integer(0))
    if queries == 1:  # one query without a mask: it sees all keys
        return MaskKind(keys - 1)
    raise refuse(
        Category.NON_CAUSAL,
        "attention without mask and without is_causal",
        "only causal attention can drop tokens or leave out blocks of keys",
    )


def _classify(masks: Sequence[tuple[fx.Node, bool]], queries: sympy.Expr, k: fx.Node) -> MaskKind:
    """`classify`; where the number of keys has nothing to do with that of queries, and they are from no cache that is
    known, the reason is the cache."""
    try:
        return classify(masks, queries)
    except RefusalError as error:
        keys = expression(meta(k).shape[2])
        related = keys == queries or bool(keys.free_symbols & queries.free_symbols)
        if error.refusal.category is not Category.MASK or related or _is_view(_unrepeat(k)):
            raise
        hint = "tokens are dropped with transformers' DynamicCache only: leave out cache_implementation"
        raise refuse(Category.PAST, f"{queries} queries over {keys} keys of another cache", hint) from error


def _unrepeated(k: fx.Node, v: fx.Node) -> tuple[fx.Node, fx.Node]:
    """K and V before they were repeated; as they are where only one is seen to be (Flint casts its repeated keys)."""
    own = _unrepeat(k), _unrepeat(v)
    heads = [(shape(node) or (None, None))[1] for node in own]
    return own if heads[0] == heads[1] else (k, v)


def _unrepeat(node: fx.Node) -> fx.Node:
    """K or V before it was repeated for grouped queries: keys[:, :, None].expand(b, h, groups, s, d).reshape(...)."""
    if name_of(node) != "reshape":
        return node
    expand = node.args[0]
    if not isinstance(expand, fx.Node) or name_of(expand) != "expand":
        return node
    source = expand.args[0]
    if not isinstance(source, fx.Node) or name_of(source) not in ("getitem", "unsqueeze"):
        return node
    base = source.args[0]
    out, wide, flat = shape(base) if isinstance(base, fx.Node) else None, shape(expand), shape(node)
    if out is None or wide is None or flat is None or (len(out), len(wide), len(flat)) != (4, 5, 4):
        return node
    repeats = wide[:2] == out[:2] and wide[3:] == out[2:] and flat == (out[0], wide[1] * wide[2], *out[2:])
    return base if repeats and isinstance(base, fx.Node) else node


def _cached(mask: MaskKind, q: fx.Node, k: fx.Node, v: fx.Node) -> CachedKeys | None:
    """The cache layer behind keys and values.

    Raises:
        RefusalError: they are computed from one in a way that is not known to work on fewer rows.
    """
    roots: tuple[fx.Node, ...] = tuple(dict.fromkeys((k, v)))
    region: tuple[fx.Node, ...] = ()
    if not (_is_view(k) and _is_view(v)):
        tokens = expression(meta(k).shape[2])
        before = list((tokens - expression(meta(q).shape[2])).free_symbols)
        if mask.offset == 0 or len(before) != 1:
            return None
        found = latent_kv((k, v), _is_view, before[0], tokens)
        roots, region = found.roots, found.region
    layers = {(root.args[1], root.args[2], *root.args[4:5]) for root in roots}
    if len(layers) > 1:
        raise refuse(Category.CACHE, "keys computed from several layers of a cache", "such a layer stays dense")
    for positions, seen, *rest in layers:
        assert isinstance(positions, fx.Node)
        dropped_after = rest[0] if rest and isinstance(rest[0], fx.Node) else None
        return CachedKeys(roots, region, positions, seen, dropped_after)
    return None


def _is_view(node: fx.Node) -> bool:
    return is_op(node, "logical_view")
