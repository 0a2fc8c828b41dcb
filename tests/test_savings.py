"""Counted FLOPs and cache bytes against formulas written out for two tiny models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from arch_builders import ARCHS
from eager_reference import DropSpec, EagerReference
from tiny import tiny_gemma3, tiny_llama, token_ids
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import uniprefill_fx
from uniprefill_fx.tools.explain import Explanation as Report
from uniprefill_fx.tools.savings import Savings

SHARP: dict[str, Any] = {"block_size": 16, "last_n": 16, "sink_tokens": 16}
N, HIDDEN, MLP, HEADS, KV_HEADS, DIM, VOCABULARY = 300, 64, 128, 4, 2, 16, 256
QKV = 2 * HIDDEN * DIM * (HEADS + 2 * KV_HEADS)
REST = 2 * HIDDEN * DIM * HEADS + 3 * 2 * HIDDEN * MLP


def counted(report: Report) -> Savings:
    savings = report.savings
    assert savings is not None and not savings.uncounted
    return savings


def attention(positions: Tensor, window: int | None = None) -> int:
    """Every pair of kept positions that the mask lets through, one by one."""
    q, k = positions[:, None], positions[None, :]
    seen = (k <= q) if window is None else (k <= q) & (k > q - window)
    return int(seen.sum()) * HEADS * 2 * DIM * 2


def test_llama() -> None:
    ids = token_ids(N)
    report = uniprefill_fx.explain(tiny_llama(), ids, drop_layers=[1], p=0.7, min_tokens=0, **SHARP)
    kept = EagerReference(tiny_llama(), DropSpec((1,), p=0.7, **SHARP)).prefill(ids).kept[1]
    rows, everything, found = len(kept), torch.arange(N), counted(report)
    whole = N * (QKV + REST) + attention(everything)
    scoring = 2 * HEADS * DIM * SHARP["last_n"] * N
    assert rows < N
    assert {layer: found.dense_flops[layer] for layer in range(3)} == {0: whole, 1: whole, 2: whole}
    assert found.flops[0] == whole
    assert found.flops[1] == N * QKV + rows * REST + attention(everything) + scoring
    assert found.flops[2] == rows * (QKV + REST) + attention(kept)
    head = 2 * HIDDEN * VOCABULARY  # of the last position
    assert found.flops[-1] == found.dense_flops[-1] == pytest.approx(head, rel=0.2)  # and rotary's small product
    row = 2 * KV_HEADS * DIM * 4
    assert (found.kv_bytes, found.dense_kv_bytes) == (row * (2 * N + rows), row * 3 * N)
    assert found.kv_saved == pytest.approx(1 - (2 * N + rows) / (3 * N))
    assert found.flops_saved == pytest.approx(1 - sum(found.flops.values()) / sum(found.dense_flops.values()))
    with FlopCounterMode(display=False) as counter, torch.inference_mode():  # does not know attention on the CPU
        tiny_llama()(ids, logits_to_keep=1)
    products = sum(found.dense_flops.values()) - 3 * attention(everything)
    assert products == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_windows_count_positions() -> None:
    """A sliding window over kept rows holds fewer of them than a window of neighbours would; caches keep window - 1."""
    ids, window = token_ids(N), 32
    options: dict[str, Any] = {"drop_layers": [1], "p": 0.6, "min_tokens": 0, **SHARP}
    report = uniprefill_fx.explain(tiny_gemma3(window, layers=3), ids, **options)
    kept = EagerReference(tiny_gemma3(window, layers=3), DropSpec((1,), p=0.6, **SHARP)).prefill(ids).kept[1]
    found = counted(report)
    assert found.flops[2] == len(kept) * (QKV + REST) + attention(kept, window)
    assert attention(kept, window) < attention(torch.arange(len(kept)), window)
    row = 2 * KV_HEADS * DIM * 4
    assert found.kv_bytes == found.dense_kv_bytes == row * (N + 2 * (window - 1))


def linears(layer: Any, rows: int) -> int:
    """FLOPs of a decoder layer's linear layers, as torch counts them while they run."""
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module(torch.zeros(rows, module.in_features))
    return int(counter.get_total_flops())


def test_padded_batch() -> None:
    """Products and caches have the rows of the longest prompt, attention those of each."""
    ids, window, columns, padding = token_ids(2 * 256).reshape(2, 256), 32, 256, 60
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    model = tiny_gemma3(window, layers=4)
    options: dict[str, Any] = {"drop_layers": [1], "p": 0.6, "min_tokens": 0, **SHARP}
    report = uniprefill_fx.explain(model, ids, call={"attention_mask": mask}, **options)
    whole = [torch.arange(columns), torch.arange(columns - padding)]
    reference = EagerReference(tiny_gemma3(window, layers=4), DropSpec((1,), p=0.6, **SHARP))
    kept = [reference.prefill(own).kept[1] for own in (ids[:1], ids[1:, padding:])]
    most, found, layers = max(map(len, kept)), counted(report), model.model.layers
    assert len(kept[0]) != len(kept[1])
    assert found.dense_flops[2] == linears(layers[2], 2 * columns) + sum(attention(own, window) for own in whole)
    assert found.dense_flops[3] == linears(layers[3], 2 * columns) + sum(attention(own) for own in whole)
    assert found.flops[0] == found.dense_flops[0] == found.dense_flops[2]
    assert found.flops[2] == linears(layers[2], 2 * most) + sum(attention(own, window) for own in kept)
    assert found.flops[3] == linears(layers[3], 2 * most) + sum(attention(own) for own in kept)
    row, sliding = 2 * 2 * KV_HEADS * DIM * 4, window - 1
    assert found.dense_kv_bytes == row * (2 * columns + 2 * sliding)
    assert found.kv_bytes == row * (columns + most + 2 * sliding)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3n", "llama4"])
def test_cache_bytes_are_those_of_the_cache(name: str) -> None:
    """Latents, keys that layers share, layers that keep a chunk: bytes of the stock cache, and of the compact one."""
    ids, options = token_ids(N), {"drop_layers": "all", "p": 0.7, "min_tokens": 0, **SHARP}
    found = counted(uniprefill_fx.explain(ARCHS[name].build(), ids, **options))
    held = []
    for model in (ARCHS[name].build(), uniprefill_fx.compile(ARCHS[name].build(), inner_backend="eager", **options)):
        with torch.inference_mode():
            layers = model(ids, logits_to_keep=1).past_key_values.layers
        stored = [t for layer in layers for t in (layer.keys, layer.values) if t is not None]
        held.append(sum(t.numel() * t.element_size() for t in stored))
    assert [found.dense_kv_bytes, found.kv_bytes] == held and held[1] < held[0]


def test_dense_saves_nothing() -> None:
    report = uniprefill_fx.explain(tiny_llama(), token_ids(N), drop_layers=[1], min_tokens=1000)
    found = counted(report)
    assert found.flops == found.dense_flops and found.kv_saved == found.flops_saved == 0.0


def test_no_prompt_length() -> None:
    report = uniprefill_fx.explain(tiny_gemma3(layers=2, layer_types=["sliding_attention"] * 2), token_ids(N))
    assert report.savings is None
