"""Find the attention ops of a graph and read what each of them computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch.nn.functional as F
from torch import fx

from uniprefill_fx.errors import Category, Refusal, RefusalError, refuse
from uniprefill_fx.passes.analyze.explicit_attention import read_explicit_attention
from uniprefill_fx.passes.analyze.latent_kv import LatentKV, expansion
from uniprefill_fx.passes.analyze.masks.kinds import MaskKind, classify
from uniprefill_fx.passes.node_utils import decoder_layer, expression, is_op, meta, module_path, name_of, shape
from uniprefill_fx.timing import timed


@dataclass(frozen=True)
class Stored:
    """Where keys and values come from when they come from a cache layer.

    Attributes:
        expansion: what computes them; its roots are views (`uniprefill::logical_view`) of the layer's rows.
        positions: which tokens those rows are. seen: how many tokens there were, a node or a number.
        dropped_after: the layers behind which tokens were dropped, where several layers may read this one
        (`ops.cache`).
    """

    expansion: LatentKV
    positions: fx.Node
    seen: Any
    dropped_after: fx.Node | None = None


@dataclass(frozen=True)
class AttentionNode:
    """One attention op, or the reason why it was not understood.

    Attributes:
        node: the op; its output is (batch, heads, queries, v_dim).
        q, k, v: its operands, (batch, heads or kv_heads, tokens, dim), k and v before they are repeated for GQA.
        scale: a number, a node, or None for head_dim ** -0.5.
        mask: what a query sees; None when refused.
        stored: the cache layer that k and v are computed from; None when they are all new.
        softcap, sinks, bias: further terms of the logits, see `ops.attention`.
        interior: nodes between q, k, v and the output that go away with the op; the op itself among them.
        layer: decoder layer, from the module path; without one, the ordinal among the attention_nodes.
        path: module path, "" if unknown.
    """

    node: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    scale: Any
    mask: MaskKind | None
    stored: Stored | None
    layer: int
    path: str
    refusal: Refusal | None = None
    softcap: float | None = None
    sinks: fx.Node | None = None
    bias: fx.Node | None = None
    interior: frozenset[fx.Node] = frozenset()

    @property
    def is_prefill(self) -> bool:
        """A whole new prompt: the keys are those of the queries, and nothing was stored before."""
        if self.stored is not None or self.mask is None or self.mask.offset != 0:
            return False
        return expression(meta(self.q).shape[2]) == expression(meta(self.k).shape[2])


@timed("find attention_nodes")
def find_attention_nodes(graph: fx.Graph) -> list[AttentionNode]:
    """All attention ops, in graph order. Never raises: what is not understood becomes a refused attention."""
    found = [attention for node in graph.nodes if (attention := _read(node)) is not None]
    layers = [attention.layer for attention in found]
    if None in layers or len(set(layers)) != len(layers):  # no module path: count the attention_nodes
        found = [replace(attention, layer=i) for i, attention in enumerate(found)]
    return found


def _read(node: fx.Node) -> AttentionNode | None:
    layer: Any = decoder_layer(node)
    try:
        if node.target is F.scaled_dot_product_attention:
            return _fused(node, layer)
        if name_of(node) == "softmax":
            return _spelled(node, layer)
    except RefusalError as error:
        refusal = replace(error.refusal, layer=layer)
        return AttentionNode(node, node, node, node, None, None, None, layer, module_path(node), refusal)
    return None


def _fused(node: fx.Node, layer: int) -> AttentionNode:
    bound = _bind(node)
    mask = _mask(bound)
    q, k, v = (_unrepeat(bound[name]) for name in ("query", "key", "value"))
    stored = _stored(mask, q, k, v)
    return AttentionNode(
        node, q, k, v, bound["scale"], mask, stored, layer, module_path(node), interior=frozenset({node})
    )


def _spelled(node: fx.Node, layer: int) -> AttentionNode | None:
    found = read_explicit_attention(node)
    if found is None:
        return None
    q, k, v = found.q, _unrepeat(found.k), _unrepeat(found.v)
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
        kind = classify(masks, expression(queries))
    elif expression(queries) == 1:
        kind = MaskKind(expression(keys) - 1)
    else:
        raise refuse(Category.NON_CAUSAL, "attention without a mask", "only causal attention can drop")
    biases = [b for b in (kind.alibi, bias) if b is not None]
    if len(biases) > 1 or (biases and found.scaled_masks):
        raise refuse(Category.ATTENTION, "two biases on the attention logits, or a scaled one", "it stays dense")
    return AttentionNode(
        found.out,
        q,
        k,
        v,
        found.scale,
        kind,
        _stored(kind, q, k, v),
        layer,
        module_path(node),
        softcap=found.softcap,
        sinks=found.sinks,
        bias=bias,
        interior=frozenset(found.interior),
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
        return classify([(bound["attn_mask"], False)], queries)
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
    raise refuse(Category.NON_CAUSAL, "attention without mask and without is_causal", "only causal attention can drop")


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


def _stored(mask: MaskKind, q: fx.Node, k: fx.Node, v: fx.Node) -> Stored | None:
    """The cache layer behind keys and values.

    Raises:
        RefusalError: they are computed from one in a way that is not known to work on fewer rows.
    """
    if _is_view(k) and _is_view(v):
        found = LatentKV(tuple(dict.fromkeys((k, v))), ())
    else:
        tokens = expression(meta(k).shape[2])
        before = list((tokens - expression(meta(q).shape[2])).free_symbols)
        if mask.offset == 0 or len(before) != 1:
            return None
        found = expansion((k, v), _is_view, before[0], tokens)
    layers = {(root.args[1], root.args[2], *root.args[4:5]) for root in found.roots}
    if len(layers) > 1:
        raise refuse(Category.CACHE, "keys computed from several layers of a cache", "such a layer stays dense")
    for positions, seen, *rest in layers:
        assert isinstance(positions, fx.Node)
        dropped_after = rest[0] if rest and isinstance(rest[0], fx.Node) else None
        return Stored(found, positions, seen, dropped_after)
    return None


def _is_view(node: fx.Node) -> bool:
    return is_op(node, "logical_view")


def interiors(attention_nodes: Iterable[AttentionNode]) -> frozenset[fx.Node]:
    """The nodes that go away with the attention ops that are understood."""
    return frozenset().union(*(attention.interior for attention in attention_nodes if attention.mask is not None))


def token_count(attention_nodes: list[AttentionNode]) -> sympy.Symbol:
    """The symbol that counts the tokens of a whole new prompt.

    Raises:
        RefusalError: there is no attention over a new prompt, or its length was specialised to a number.
    """
    understood = [s for s in attention_nodes if s.mask is not None]
    if not attention_nodes:
        raise refuse(Category.NO_ATTENTION, "no attention in the graph", "nothing to score tokens with")
    if not understood:
        assert attention_nodes[0].refusal is not None
        raise RefusalError(attention_nodes[0].refusal)
    fresh = [s for s in understood if s.is_prefill]
    if not fresh:
        hint = "tokens are dropped from whole new prompts only, and with transformers' DynamicCache"
        raise refuse(Category.PAST, "attention over a cache", hint)
    count = expression(meta(fresh[0].q).shape[2])
    if count == 1:
        raise refuse(Category.TOO_SHORT, "a prompt of one token", "there is nothing to drop")
    if not isinstance(count, sympy.Symbol):
        raise refuse(
            Category.TOKEN_AXIS,
            f"a prompt length specialised to {count}",
            "a loop over tokens or chunks in the model (register_mixer makes it one op, docs/mixers.md), or a size in "
            "the model that equals this length (then other lengths drop)",
        )
    return count
