"""The search of `calibrate()` beside all states there are, on costs that are written down."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import pytest
import torch

from uniprefill_fx.tools.search import Measured, Search

STEPS = (1.0, 0.99, 0.95, 0.9, 0.8, 0.6)
LAYERS = (3, 7, 11)


def cost(seed: int, prompts: int) -> dict[tuple[int, float], tuple[float, list[float]]]:
    """By layer and p: what share is kept, and the KL of each prompt: early layers save more and cost more."""
    draw = torch.Generator().manual_seed(seed)
    found: dict[tuple[int, float], tuple[float, list[float]]] = {}
    for i, layer in enumerate(LAYERS):
        slope, price = torch.rand(2, generator=draw).tolist()
        for p in STEPS:
            kept = p ** (2 + 10 * slope)
            each = torch.rand(prompts, generator=draw) + 0.5
            found[layer, p] = kept, (each * (1 - kept) ** 2 * (0.01 + price * 0.05) / (1 + i)).tolist()
    return found


def measured(costs: dict[tuple[int, float], tuple[float, list[float]]], ps: Sequence[float], prompts: int) -> Measured:
    """Shares multiply from layer to layer of 12, costs add up."""
    share, kept, computed, kls = 1.0, dict[int, float](), 4.0, [0.0] * prompts
    for layer, p in zip(LAYERS, ps, strict=True):
        own, each = costs[layer, p]
        share *= own
        kept[layer] = share
        computed += share * (4 if layer < 11 else 0)
        kls = [a + b for a, b in zip(kls, each, strict=True)]
    return Measured(tuple(kls), (computed / 12,) * prompts, kept)


@pytest.mark.parametrize("seed", range(8))
def test_it_is_near_the_best_state_there_is(seed: int) -> None:
    """Within the budget, and of the compute that all states together could save it saves nine tenths."""
    prompts = 5
    costs = cost(seed, prompts)
    runs: list[int] = []
    search = Search(LAYERS, lambda ps: measured(costs, ps, prompts), STEPS, 0.01, lambda: runs.append(1))
    path = search.run()
    states = [measured(costs, ps, prompts) for ps in itertools.product(STEPS, repeat=len(LAYERS))]
    best = min(state.compute_fraction for state in states if state.bound <= 0.01)
    got = measured(costs, [STEPS[i] for i in path[-1]], prompts)
    assert got.bound <= 0.01 and len(runs) < len(states) / 3
    assert 1 - got.compute_fraction >= 0.9 * (1 - best)
    fractions = [measured(costs, [STEPS[i] for i in at], prompts).compute_fraction for at in path]
    assert fractions[0] == pytest.approx(1.0) and fractions == sorted(fractions, reverse=True)


def test_the_bound_holds_for_nine_means_of_ten() -> None:
    """Of normal samples; and not for nearly all of them, or it would be too wide."""
    draw = torch.Generator().manual_seed(0)
    for n in (3, 8, 40):
        held = 0
        for _ in range(1000):
            sample = (torch.randn(n, generator=draw, dtype=torch.float64) + 5).tolist()
            held += Measured(tuple(sample), (1.0,) * n, {}).bound >= 5
        assert 0.87 < held / 1000 < 0.93
    one = Measured((0.25,), (1.0,), {})
    assert one.bound == one.kl == 0.25


def test_what_removes_nothing_is_left_out() -> None:
    """A layer whose drops keep nearly all is not dropped at, even where it costs nothing."""

    def measure(ps: Sequence[float]) -> Measured:
        first, second, third = ps
        kept = {3: 1 - 0.01 * (1 - first), 7: second, 11: second * third}
        compute = statistics.fmean([1.0, kept[3], kept[7]])
        return Measured((math.fabs(1 - second) * 0.01,), (compute,), kept)

    path = Search(LAYERS, measure, STEPS, 0.003, lambda: None).run()
    assert [STEPS[i] for i in path[-1]] == [1.0, 0.8, 1.0]
