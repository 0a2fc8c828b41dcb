"""An eager implementation of UniPrefill token dropping, written to be read rather than to be fast.

It is the yardstick of the compiler backend and shares no code with it. The sub-modules of a transformers model run
one by one over the kept rows of one unpadded request; attention is spelled out, and rows carry original positions.

    prefill   0..b-1 dense | layer b: attention over all rows, score, select, cut before o_proj | b+1.. over kept rows
    step      every layer attends over exactly the keys it wrote, plus the new ones; nothing is ever selected

Supported: Llama, Gemma-3 (text) and Qwen3-Next. With `spec=None` it is the stock model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_next import modeling_qwen3_next

ROTARY: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "llama": modeling_llama.apply_rotary_pos_emb,
    "gemma3_text": modeling_gemma3.apply_rotary_pos_emb,
    "qwen3_moe": modeling_qwen3_moe.apply_rotary_pos_emb,
    "qwen3_next": modeling_qwen3_next.apply_rotary_pos_emb,
}
QUERY_CHUNK = 512  # rows of queries at a time: bounds memory only, as rows of a softmax are independent


@dataclass(frozen=True)
class DropSpec:
    """Where and how to drop. `p` and `keep_ratio` are one number, or one for each entry of `drop_layers`."""

    drop_layers: tuple[int, ...]
    p: float | tuple[float, ...] = 0.99
    block_size: int = 64
    last_n: int = 128
    sink_tokens: int = 128
    window: str = "position"
    selection: str = "top_p"
    keep_ratio: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if len(set(self.drop_layers)) != len(self.drop_layers):
            raise ValueError(f"drop_layers repeat: {self.drop_layers}")
        if self.window not in ("position", "index"):
            raise ValueError(f'window is "position" or "index", not {self.window!r}')
        if self.selection not in ("top_p", "top_k"):
            raise ValueError(f'selection is "top_p" or "top_k", not {self.selection!r}')
        if self.block_size < 1 or self.last_n < 1 or self.sink_tokens < 0:
            raise ValueError(f"block_size and last_n are at least 1, sink_tokens at least 0: {self}")
        amount = self.p if self.selection == "top_p" else self.keep_ratio
        amounts = amount if isinstance(amount, tuple) else (amount,) * len(self.drop_layers)
        if len(amounts) != len(self.drop_layers) or not all(a is not None and 0.0 < a <= 1.0 for a in amounts):
            raise ValueError(f"{self.selection} takes one number in (0, 1], or one for each drop layer, not {amount}")

    def amount(self, layer: int) -> float:
        """`p` of one drop layer, or its `keep_ratio` under top_k."""
        amount = self.p if self.selection == "top_p" else self.keep_ratio
        assert amount is not None
        return amount[self.drop_layers.index(layer)] if isinstance(amount, tuple) else amount


@dataclass
class PrefillResult:
    """What a prefill returned, for a prompt of N tokens; dropped rows show their frozen states."""

    logits: Tensor  # (1, N, V)
    last_logits: Tensor  # (1, 1, V)
    hidden_states: list[Tensor]  # (1, N, H) each: the input of every layer, then the output of the final norm
    kept: dict[int, Tensor]  # drop layer -> original positions kept after it, int64, ascending
    kv_positions: list[Tensor | None]  # per layer: original positions of the keys it wrote; None: linear attention
    margins: dict[int, float]  # drop layer -> how near the cut was to moving by a block, see Selection.margin
    gaps: dict[int, float]  # drop layer -> how near two blocks were to changing places across the cut, Selection.gap


@dataclass
class Selection:
    """Rows kept of one stream."""

    rows: Tensor  # int64, ascending, indices into the stream
    margin: float = math.inf  # top_p: min |mass of all higher blocks - p|; top_k: the gap; inf: nothing was decided
    gap: float = math.inf  # share of the lowest block chosen minus that of the highest not chosen


@dataclass
class _Store:
    """Keys and values one attention layer wrote. `labels` are what its mask compares, see `_labels`."""

    keys: Tensor  # (1, kv_heads, S, D), rotated
    values: Tensor  # (1, kv_heads, S, D)
    positions: Tensor  # (S,)
    labels: Tensor  # (S,)

    def append(self, new: _Store) -> _Store:
        keys, values = torch.cat([self.keys, new.keys], dim=2), torch.cat([self.values, new.values], dim=2)
        return _Store(keys, values, torch.cat([self.positions, new.positions]), torch.cat([self.labels, new.labels]))


def select_rows(token_scores: Tensor, spec: DropSpec, amount: float, prompt: int) -> Selection:
    """Choose rows of a stream from its (S,) fp32 token scores.

    `amount` is p (top_p) or keep_ratio (top_k), `prompt` the length of the original prompt.
    """
    size = token_scores.shape[0]
    index = torch.arange(size, device=token_scores.device)
    forced = (index < spec.sink_tokens) | (index >= size - spec.last_n)
    if bool(forced.all()) or (spec.selection == "top_p" and amount == 1.0):
        return Selection(index)
    block_scores = torch.stack([block.sum() for block in token_scores.split(spec.block_size)])
    # Highest first; a stable sort leaves the lower block index first among equals.
    ordered, order = torch.sort(block_scores.double(), descending=True, stable=True)
    total = ordered.sum()
    if spec.selection == "top_p":
        higher = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)[:-1]]) / total  # mass of all higher blocks
        chosen = int((higher < amount).sum())  # `higher` never falls, so these are the first ones
        margin = float((higher - amount).abs().min())
    else:
        chosen = min(math.ceil(amount * prompt / spec.block_size), len(ordered))
    gap = float((ordered[chosen - 1] - ordered[chosen]) / total) if chosen < len(ordered) else math.inf
    if spec.selection == "top_k":
        margin = gap
    block_kept = torch.zeros(len(ordered), dtype=torch.bool, device=token_scores.device)
    block_kept[order[:chosen]] = True
    rows = torch.nonzero(block_kept[index // spec.block_size] | forced).flatten()
    return Selection(rows, margin, gap)


def fused_logits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """The logits of `F.scaled_dot_product_attention`, whose signature this has, and the values for each head."""
    groups = q.shape[-3] // k.shape[-3] if enable_gqa else 1
    k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        logits = logits + attn_mask
    return logits, v


def attention_weights(q: Tensor, k: Tensor, q_at: Tensor, k_at: Tensor, scale: float, window: int | None) -> Tensor:
    """fp32 softmax of q (1, heads, T, D), labelled q_at (T,), over k (1, kv_heads, S, D): (1, heads, T, S)."""
    visible = k_at[None, :] <= q_at[:, None]
    if window is not None:
        visible = visible & (k_at[None, :] > q_at[:, None] - window)
    k = k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = torch.matmul(q.float(), k.transpose(2, 3)) * scale
    return torch.softmax(logits.masked_fill(~visible, -math.inf), dim=-1)


class EagerReference:
    """One request on one model: `prefill`, then any number of `step`s. A new `prefill` starts a new request."""

    def __init__(self, model: Any, spec: DropSpec | None) -> None:
        config: Any = model.config
        if config.model_type not in ROTARY:
            raise ValueError(f"{config.model_type!r} is not one of {sorted(ROTARY)}")
        if getattr(config, "use_bidirectional_attention", False):
            raise ValueError("bidirectional attention is not causal prefill")
        layers = config.num_hidden_layers
        self.kinds: list[str] = list(getattr(config, "layer_types", None) or ["full_attention"] * layers)
        for layer in spec.drop_layers if spec is not None else ():
            if not 0 <= layer < layers or self.kinds[layer] != "full_attention":
                raise ValueError(f"layer {layer} is not a full-attention layer of {self.kinds}")
        self.model, self.decoder, self.config, self.spec = model, model.model, config, spec
        self._reset()

    @torch.inference_mode()
    def prefill(self, ids: Tensor) -> PrefillResult:
        """Run a whole prompt (1, N), dropping as the spec says."""
        self._reset()
        self._seen = prompt = ids.shape[1]
        positions = torch.arange(prompt, device=ids.device)
        stream = self.decoder.embed_tokens(ids)
        full = stream.clone()  # the last state of every row: a dropped row is no longer written, so it stays frozen
        hidden_states = [full.clone()]
        kept: dict[int, Tensor] = {}
        margins: dict[int, float] = {}
        gaps: dict[int, float] = {}
        for i in range(len(self.kinds)):
            drops = self.spec is not None and i in self.spec.drop_layers
            stream, selection = self._layer(i, stream, positions, drops)
            if selection is not None:
                positions = positions[selection.rows]
                kept[i], margins[i], gaps[i] = positions, selection.margin, selection.gap
            full[:, positions] = stream
            hidden_states.append(full.clone())
        hidden_states[-1] = self.decoder.norm(full)
        logits = self._head(hidden_states[-1])
        kv_positions = [None if store is None else store.positions for store in self._stores]
        return PrefillResult(logits, logits[:, -1:], hidden_states, kept, kv_positions, margins, gaps)

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        """Append (1, t) tokens, decoded, drafted or a further turn; returns their logits (1, t, V)."""
        if self._seen == 0:
            raise RuntimeError("prefill comes first")
        positions = torch.arange(self._seen, self._seen + ids.shape[1], device=ids.device)
        self._seen += ids.shape[1]
        stream = self.decoder.embed_tokens(ids)
        for i in range(len(self.kinds)):
            stream, _ = self._layer(i, stream, positions, drops=False)
        return self._head(self.decoder.norm(stream))

    def generate(self, ids: Tensor, n: int) -> tuple[Tensor, list[Tensor]]:
        """Greedy: n tokens (1, n), whatever they are, and the logits (1, V) that produced each."""
        logits = [self.prefill(ids).last_logits[:, -1]]
        tokens = [logits[-1].argmax(dim=-1, keepdim=True)]
        while len(tokens) < n:
            logits.append(self.step(tokens[-1])[:, -1])
            tokens.append(logits[-1].argmax(dim=-1, keepdim=True))
        return torch.cat(tokens, dim=1)[:, :n], logits[:n]

    def kv_lengths(self) -> list[int | None]:
        """Keys a transformers DynamicCache would hold now, layer by layer; None for linear attention."""
        lengths: list[int | None] = []
        for kind, store in zip(self.kinds, self._stores, strict=True):
            stored = None if store is None else len(store.positions)
            sliding = stored is not None and kind == "sliding_attention"
            lengths.append(min(self.config.sliding_window - 1, stored) if sliding else stored)
        return lengths

    def _reset(self) -> None:
        self._seen = 0  # tokens of the request so far, dropped ones included
        self._stores: list[_Store | None] = [None] * len(self.kinds)
        self._recurrent = DynamicCache(config=self.config)  # conv and recurrent states of linear-attention layers

    def _head(self, hidden: Tensor) -> Tensor:
        logits = self.model.lm_head(hidden)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _layer(self, i: int, stream: Tensor, positions: Tensor, drops: bool) -> tuple[Tensor, Selection | None]:
        """One decoder layer over the rows (1, T, H) of a stream; after a drop it returns fewer rows."""
        layer, residual, selection = self.decoder.layers[i], stream, None
        normed = layer.input_layernorm(stream)
        if self.kinds[i] == "linear_attention":
            mixed = layer.linear_attn(hidden_states=normed, cache_params=self._recurrent, attention_mask=None)
        else:
            query, gate = self._project(i, normed, positions)
            mixed = self._attend(i, query)
            if drops:
                selection = self._select(i, query)
                residual, mixed = residual[:, selection.rows], mixed[:, selection.rows]
                gate = None if gate is None else gate[:, selection.rows]
            if gate is not None:
                mixed = mixed * torch.sigmoid(gate)
            mixed = layer.self_attn.o_proj(mixed)
        if self.config.model_type == "gemma3_text":
            stream = residual + layer.post_attention_layernorm(mixed)
            mixed = layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(stream)))
        else:
            stream = residual + mixed
            mixed = layer.mlp(layer.post_attention_layernorm(stream))
        return stream + mixed, selection

    def _project(self, i: int, normed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rotated queries (1, heads, T, D) and the output gate (1, T, heads * D) if any; stores keys and values."""
        attn, rows, gate = self.decoder.layers[i].self_attn, normed.shape[1], None
        query = attn.q_proj(normed)
        if self.config.model_type == "qwen3_next":  # each head's projection holds its query, then its gate
            query, gate = query.view(1, rows, -1, 2 * attn.head_dim).chunk(2, dim=-1)
            gate = gate.reshape(1, rows, -1)
        query = query.reshape(1, rows, -1, attn.head_dim)
        key = attn.k_proj(normed).view(1, rows, -1, attn.head_dim)
        value = attn.v_proj(normed).view(1, rows, -1, attn.head_dim)
        if self.config.model_type != "llama":
            query, key = attn.q_norm(query), attn.k_norm(key)
        kind = (self.kinds[i],) if self.config.model_type == "gemma3_text" else ()  # Gemma-3 has one rotary per kind
        cos, sin = self.decoder.rotary_emb(normed, positions[None], *kind)
        query, key = ROTARY[self.config.model_type](query.transpose(1, 2), key.transpose(1, 2), cos, sin)
        new = _Store(key, value.transpose(1, 2), positions, self._labels(i, positions))
        old = self._stores[i]
        self._stores[i] = new if old is None else old.append(new)
        return query, gate

    def _labels(self, i: int, positions: Tensor) -> Tensor:
        """What the mask of layer i compares: positions, except a window by index, where rows count as contiguous.

        By index, the K rows of a compact prompt of N tokens are labelled N-K..N-1; tokens after it keep their position.
        """
        if self.kinds[i] == "sliding_attention" and self.spec is not None and self.spec.window == "index":
            return torch.arange(self._seen - len(positions), self._seen, device=positions.device)
        return positions

    def _attend(self, i: int, query: Tensor) -> Tensor:
        """Attention of the newest rows over all keys of layer i: (1, T, heads * D), before any gate and o_proj."""
        attn, store = self.decoder.layers[i].self_attn, self._stores[i]
        assert store is not None
        window = self.config.sliding_window if self.kinds[i] == "sliding_attention" else None
        values = store.values.float().repeat_interleave(query.shape[1] // store.values.shape[1], dim=1)
        q_labels, outputs = store.labels[-query.shape[2] :], []
        for q, labels in zip(query.split(QUERY_CHUNK, dim=2), q_labels.split(QUERY_CHUNK), strict=True):
            weights = attention_weights(q, store.keys, labels, store.labels, attn.scaling, window)
            outputs.append(torch.matmul(weights, values))
        return torch.cat(outputs, dim=2).transpose(1, 2).flatten(2).to(query.dtype)

    def _select(self, i: int, query: Tensor) -> Selection:
        """Score the stream that entered drop layer i with its last queries, and choose its rows."""
        attn, store, spec = self.decoder.layers[i].self_attn, self._stores[i], self.spec
        assert store is not None and spec is not None
        last = query[:, :, -spec.last_n :]
        labels = store.labels[-last.shape[2] :]
        weights = attention_weights(last, store.keys, labels, store.labels, attn.scaling, None)
        return select_rows(weights.sum(dim=(0, 1, 2)), spec, spec.amount(i), prompt=self._seen)
