"""The error bound of a drop: measured numbers against attention weights of the stock model, and that it holds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_sparse_reference import reference
from checkpoints import FULL_LAYERS, TWO_LAYERS, folder, fresh, needle_ids, stock
from eager_reference import DropSpec, EagerReference
from tiny import tiny_llama, token_ids
from torch import Tensor
from transformers import AttentionInterface

from uniprefill_fx import error_bound, override
from uniprefill_fx.tools.error_bound import BoundReport, DropError, measure

SHARP: dict[str, Any] = {"block_size": 16, "last_n": 32, "sink_tokens": 24}


def by_hand(weights: Tensor, values: Tensor, kept: Tensor) -> DropError:
    """Query by query and head by head: weights (1, heads, tokens, tokens), values (1, kv_heads, tokens, dim)."""
    heads, tokens = weights.shape[1], weights.shape[-1]
    inside = torch.zeros(tokens, dtype=torch.bool)
    inside[kept] = True
    masses, errors, bounds = [], [], []
    for head in range(heads):
        v = values[0, head * values.shape[1] // heads].double()
        for query in range(tokens - SHARP["last_n"], tokens):
            a = weights[0, head, query].double()
            a = a / a.sum()  # float32 weights sum to 1 but for 1e-7, and dropped masses can be smaller
            few = a * inside
            errors.append(float((a @ v - few @ v / few.sum()).norm()))
            masses.append(float(a[~inside].sum()))
            bounds.append(2 * masses[-1] * float(v.norm(dim=-1).max()))
    count = len(masses)
    ratio = max(e / b for e, b in zip(errors, bounds, strict=True) if b > 0)
    mean = sum(masses) / count
    return DropError(-1, len(kept), mean, None, max(masses), sum(errors) / count, sum(bounds) / count, ratio)


def assert_alike(got: DropError, want: DropError) -> None:
    assert got.kept == want.kept
    for name in ("mass", "worst_mass", "error", "bound", "worst_ratio"):
        rel = 0.02 if name == "worst_ratio" else 1e-3  # of small numbers that come from float32 weights here
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=rel, abs=1e-6), name


def check(model: Any, eager: Any, ids: Tensor, layers: tuple[int, ...], p: float) -> BoundReport:
    """The first drop against the stock model's own attention weights; the later ones hold as well."""
    found = error_bound(model, ids, drop_layers=list(layers), p=p, min_tokens=0, **SHARP)
    reference = EagerReference(eager, DropSpec(layers, p=p, **SHARP))
    kept = reference.prefill(ids).kept
    store: Any = reference._stores[layers[0]]
    with torch.inference_mode():
        weights = eager(ids, output_attentions=True).attentions
    full = [w for w in weights if w is not None]
    layer = (
        layers[0] if len(full) == eager.config.num_hidden_layers else FULL_LAYERS["needle-qwen3-next"].index(layers[0])
    )
    assert_alike(found.drops[0], by_hand(full[layer], store.values, kept[layers[0]]))
    assert [drop.layer for drop in found.drops] == list(layers)
    for drop in found.drops:
        assert drop.kept == len(kept[drop.layer]) < ids.shape[1]
        assert drop.mass <= 1 - p + 1e-6 and drop.allowed == pytest.approx(1 - p)
        assert drop.worst_ratio <= 1 and drop.error <= drop.bound
        assert drop.holds
    assert found.holds and found.drops[0].mass > 0 and found.drops[0].error > 0  # a later drop may find nothing more
    return found


def test_tiny() -> None:
    """The attention of a drop layer is dense: kept rows are exact until the attention of the layer behind it."""
    found = check(tiny_llama(4), tiny_llama(4, attention="eager"), token_ids(300), (1, 2), 0.8)
    assert list(found.drift) == [0, 1, 2, 3]
    assert found.drift[0] == found.drift[1] == 0.0
    assert found.drift[2] < 1e-5 and found.drift[3] > 1e-3
    assert str(found).count("\n") == 4


def test_options_of_the_call() -> None:
    """Block sizes chosen by the prompt's length, and `override`, are measured as a compilation with them would be."""
    chosen: dict[str, Any] = {"drop_layers": [1], "min_tokens": 0, "sink_tokens": 24}
    want = error_bound(tiny_llama(2), token_ids(300), p=0.7, block_size=128, last_n=40, **chosen)
    with override(p=0.7, last_n=40):
        got = error_bound(tiny_llama(2), token_ids(300), p=0.9, block_size="auto", last_n=32, **chosen)
    assert got == want and want.drops[0].allowed == pytest.approx(0.3) and want.drops[0].kept < 300


def test_drift_by_the_reference() -> None:
    ids, spec = token_ids(300), DropSpec((1,), p=0.7, **SHARP)
    found = error_bound(tiny_llama(4), ids, drop_layers=[1], p=0.7, min_tokens=0, **SHARP)
    dropped, dense = EagerReference(tiny_llama(4), spec), EagerReference(tiny_llama(4), None)
    kept = dropped.prefill(ids).kept[1]
    dense.prefill(ids)
    few: Any = dropped._stores[3]
    full: Any = dense._stores[3]
    pairs = ((few.keys, full.keys[:, :, kept]), (few.values, full.values[:, :, kept]))
    assert found.drift[3] == pytest.approx(max(float((a - b).norm() / b.norm()) for a, b in pairs), rel=1e-3)


SPARSE: dict[str, Any] = {"alpha": 0.97, "block_size": 64, "sink_blocks": 1, "window_blocks": 1, "last_tokens": 64}


def skipped_by_the_reference(model: Any, ids: Tensor, correction: bool) -> list[tuple[float, ...]]:
    """By layer, in float64: density, mass of blocks left out and the worst of it, error and bound."""
    found = []

    def attend(_: Any, q: Tensor, k: Tensor, v: Tensor, *__: Any, **given: Any) -> tuple[Tensor, None]:
        sparse = reference(q, k, v, None, given["scaling"], **SPARSE, correction=correction)
        wide = q.double(), k.double(), v.double()
        full = F.scaled_dot_product_attention(*wide, is_causal=True, scale=given["scaling"], enable_gqa=True)
        longest = v.double().norm(dim=3).amax(2).repeat_interleave(q.shape[1] // v.shape[1], 1)[..., None]
        kept, causal = sum(map(len, sparse.kept.values())), sum(sparse.causal.values())
        error, bound = (sparse.out - full).norm(dim=3), 2 * sparse.missing * longest
        assert (error <= bound + 1e-9).all(), "the bound itself"
        numbers = (sparse.missing.mean(), sparse.missing.max(), error.mean(), bound.mean())
        found.append((kept / causal, *map(float, numbers)))
        return sparse.out.to(q.dtype).transpose(1, 2), None

    AttentionInterface.register("skipped_by_the_reference", attend)
    model.config._attn_implementation = "skipped_by_the_reference"
    with torch.inference_mode():
        model(ids, use_cache=False)
    return found


CUT: dict[str, Any] = {f"sparse_{name}": value for name, value in SPARSE.items()}
CUT |= {"attention": "block_sparse", "sparse_min_tokens": 0, "min_tokens": 0}


@pytest.mark.parametrize("correction", [True, False])
def test_blocks_left_out(correction: bool) -> None:
    """By layer the mass, error and bound of the float64 reference."""
    ids = token_ids(400)
    want = skipped_by_the_reference(tiny_llama(2), ids, correction)
    found = error_bound(tiny_llama(2), ids, drop_layers="none", sparse_correction=correction, **CUT)
    assert not found.drops and [layer.layer for layer in found.sparse] == list(found.drift) == [0, 1]
    for got, numbers in zip(found.sparse, want, strict=True):
        assert (got.density, got.mass, got.worst_mass, got.error, got.bound) == pytest.approx(numbers, rel=2e-3)
        assert 0 < got.mass < got.worst_mass < 1 and got.density < 1
    assert found.drift[0] == 0.0 < found.drift[1], "the first layer's keys and values come before any block is left out"


@pytest.mark.slow
def test_blocks_left_out_and_tokens_dropped() -> None:
    """Behind a drop, blocks are of the rows that stay; with every block computed nothing is lost to blocks."""
    ids, drop = token_ids(400), {"drop_layers": [0], "p": 0.7, **SHARP}
    both = error_bound(tiny_llama(2), ids, **drop, **CUT)
    with override(sparse_alpha=0.0):
        dropped = error_bound(tiny_llama(2), ids, **drop, **CUT)
    assert both.drops == dropped.drops == error_bound(tiny_llama(2), ids, min_tokens=0, **drop).drops
    assert both.drops[0].kept < 400 and len(both.sparse) == 2 and both.drift[1] > dropped.drift[1] == 0
    assert all(layer.density == 1.0 and layer.mass == layer.error == 0.0 for layer in dropped.sparse)
    alone = error_bound(tiny_llama(2), ids, drop_layers="none", **CUT)
    assert both.sparse[0] == alone.sparse[0] and both.sparse[1] != alone.sparse[1]
    assert f"{alone.sparse[1].mass:.6f}" in str(alone) and "skipped mass" in str(alone) and "dropped" not in str(alone)


@pytest.mark.slow
def test_checkpoints(checkpoint: str) -> None:
    folder(checkpoint)
    check(stock(checkpoint), fresh(checkpoint, "eager"), needle_ids(1024), TWO_LAYERS[checkpoint], 0.9)


def test_the_bound_is_tight() -> None:
    """Two keys with opposite values and equal weight, one of them dropped: error and bound are the same number."""
    k = torch.zeros(1, 1, 2, 4)
    v = torch.tensor([[[[3.0, 0, 0, 0], [-3.0, 0, 0, 0]]]])
    scored = {"q": torch.zeros(1, 1, 2, 4), "k": k, "scale": 1.0, "last_n": 1}
    got = measure(scored, v, torch.tensor([1]))
    assert (got.mass, got.error, got.bound, got.worst_ratio) == (0.5, 3.0, 3.0, 1.0)


@pytest.mark.parametrize(("distance", "mass"), [(1000.0, 1.0), (-1000.0, 0.0), (-40.0, math.exp(-40))])
def test_nearly_all_or_nothing_is_lost(distance: float, mass: float) -> None:
    """Masses that round to 1, to 0, and to far below the precision of the weights."""
    k = torch.tensor([[[[distance], [0.0]]]])
    v = torch.tensor([[[[3.0, 0, 0, 0], [-3.0, 0, 0, 0]]]])
    scored = {"q": torch.ones(1, 1, 2, 1), "k": k, "scale": 1.0, "last_n": 1}
    got = measure(scored, v, torch.tensor([1]))
    assert (got.mass, got.error, got.bound) == pytest.approx((mass, 6 * mass, 6 * mass), rel=1e-9, abs=1e-300)
    assert got.holds and got.worst_ratio == pytest.approx(float(mass > 0))


def test_a_broken_model_does_not_hold() -> None:
    model = tiny_llama(3)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = math.nan
    assert not error_bound(model, token_ids(100), drop_layers=[1], p=0.5, min_tokens=0, **SHARP).holds


def test_a_broken_allowance_shows() -> None:
    assert not DropError(0, 1, 0.2, 0.1, 0.2, 1.0, 2.0, 0.5).holds
    assert not DropError(0, 1, 0.05, 0.1, 0.2, 1.0, 2.0, 1.5).holds
    assert DropError(0, 1, 0.05, None, 0.2, 1.0, 2.0, 0.5).holds


def test_dense_prompts_raise() -> None:
    with pytest.raises(RuntimeError, match=r"ran dense: \[below-min-tokens\]"):
        error_bound(tiny_llama(2), token_ids(100), min_tokens=200)
    with pytest.raises(ValueError, match="wanted one prompt"):
        error_bound(tiny_llama(2), token_ids(100).repeat(2, 1))
