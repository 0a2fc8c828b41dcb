"""Which attention of a prompt is computed block by block, and why other full attention is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from uniprefill_fx.config import OptionError, PrefillConfig
from uniprefill_fx.errors import Category, Refusal
from uniprefill_fx.passes.attention_node import AttentionNode
from uniprefill_fx.passes.node_utils import meta
from uniprefill_fx.specs import MAX_HEAD_DIM, TILE_ROWS, SparseSpec


def sparse_attention(
    attention_nodes: Iterable[AttentionNode], config: PrefillConfig
) -> tuple[tuple[tuple[AttentionNode, SparseSpec], ...], tuple[Refusal, ...]]:
    """[(attention, how its blocks are chosen)] in graph order, and the reasons why others that were asked for are not.

    Raises:
        OptionError: `sparse_layers` names a layer without full attention; `sparse_alpha` is a list of another length.
    """
    if config.attention == "dense":
        return (), ()
    full = [a for a in attention_nodes if a.is_prefill and a.full]
    if isinstance(config.sparse_layers, tuple):
        able = sorted({a.layer for a in full})
        for layer in config.sparse_layers:
            if layer not in able:
                allowed = f"layers with full causal attention over the prompt, here {able}"
                raise OptionError("sparse_layers", list(config.sparse_layers), allowed, f"Layer {layer} has none.")
        full = [a for a in full if a.layer in config.sparse_layers]
    reasons = [(a, _reason(a)) for a in full]
    chosen = [a for a, reason in reasons if reason is None]
    layers = sorted({a.layer for a in chosen})
    refusals = tuple(replace(r, layer=a.layer) for a, r in reasons if r is not None)
    alphas = alpha_by_layer(config.sparse_alpha, layers)
    specs = [_spec(config, alphas[a.layer]) for a in chosen]
    return tuple(zip(chosen, specs, strict=True)), refusals if config.sparse_layers != "auto" else ()


def alpha_by_layer(alphas: float | tuple[float, ...], layers: Sequence[int]) -> dict[int, float]:
    """The alpha of each block-sparse layer, of which `layers` are the numbers in order.

    Raises:
        OptionError: a list that does not have one for each.
    """
    if not isinstance(alphas, tuple):
        return dict.fromkeys(layers, alphas)
    if len(alphas) != len(layers):
        allowed = f"a number, or a list of {len(layers)}, one for each block-sparse layer, here {list(layers)}"
        raise OptionError("sparse_alpha", alphas, allowed, f"The list has {len(alphas)} values.")
    return dict(zip(layers, alphas, strict=True))


def check_named_layers(attention_nodes: Iterable[AttentionNode], config: PrefillConfig) -> None:
    """Raise OptionError where `sparse_layers` names a layer whose attention is not causal."""
    if config.attention == "dense" or not isinstance(config.sparse_layers, tuple):
        return
    for attention in attention_nodes:
        refusal = attention.refusal
        if attention.layer in config.sparse_layers and refusal is not None and refusal.category is Category.NON_CAUSAL:
            hint = f"Layer {attention.layer} has {refusal.seen}. Leave it out, or pass 'auto'."
            raise OptionError("sparse_layers", list(config.sparse_layers), "layers with full causal attention", hint)


def _reason(attention: AttentionNode) -> Refusal | None:
    """Why full attention cannot leave out blocks; None where it can."""
    spec = attention.spec
    assert spec is not None
    if spec.bias is not None or attention.alibi is not None:
        return _refusal("a bias of the attention logits by position (alibi)")
    if max(attention.head_dim, attention.v_dim) > MAX_HEAD_DIM:
        return _refusal(f"heads {max(attention.head_dim, attention.v_dim)} wide, where {MAX_HEAD_DIM} is the most")
    if attention.num_heads // attention.num_kv_heads > TILE_ROWS:
        return _refusal(f"{attention.num_heads} heads on {attention.num_kv_heads} of keys")
    if not meta(attention.q).dtype.is_floating_point or meta(attention.q).dtype.itemsize > 4:
        return _refusal(f"attention in {meta(attention.q).dtype}")
    return None


def _refusal(seen: str) -> Refusal:
    return Refusal(Category.SPARSE, seen, "this layer computes every block of keys")


def _spec(config: PrefillConfig, alpha: float) -> SparseSpec:
    own: dict[str, Any] = {"alpha": alpha, "fp8": config.attention_dtype == "float8_e4m3"}
    names = (field.name for field in fields(SparseSpec) if field.name not in own)
    return SparseSpec(**own, **{name: getattr(config, f"sparse_{name}") for name in names})
