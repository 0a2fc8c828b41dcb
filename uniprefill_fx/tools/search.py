"""The search of `calibrate()`: which p each layer gets, under a budget of KL divergence."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

WORTHWHILE = 0.02
"""A drop that removes less than this share of the prompt, on average, is left out: scoring costs more than it saves."""

STEP = 0.005
"""The least compute that one step of the search saves: smaller ones are taken together."""

STUDENT = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372, 1.363, 1.356, 1.350, 1.345, 1.341)
"""90% quantiles of Student's t, by degrees of freedom from 1 on; 1.282, the normal distribution's, beyond 30."""


@dataclass(frozen=True)
class Measured:
    """By prompt, KL and compute fraction; by layer, the kept share."""

    kls: tuple[float, ...]
    fractions: tuple[float, ...]
    kept: dict[int, float]

    @property
    def kl(self) -> float:
        return statistics.fmean(self.kls)

    @property
    def compute_fraction(self) -> float:
        return statistics.fmean(self.fractions)

    @property
    def bound(self) -> float:
        """Upper end of the one-sided 90% confidence interval of the mean KL."""
        n = len(self.kls)
        if n == 1:
            return self.kl
        t = STUDENT[n - 2] if n - 2 < len(STUDENT) else STUDENT[-1] if n <= 30 else 1.282
        return self.kl + t * statistics.stdev(self.kls) / math.sqrt(n)


class Search:
    """From no drops towards lower values of p, a step at a time. A state holds an index into `steps` for each layer.

    Args:
        layers: that may drop. measure: what one p for each of them does.
        steps: values of p, falling from 1. max_kl: budget of the bound. progress: called before each measurement.
    """

    def __init__(
        self,
        layers: Sequence[int],
        measure: Callable[[Sequence[float]], Measured],
        steps: Sequence[float],
        max_kl: float,
        progress: Callable[[], Any],
    ) -> None:
        self.layers, self.trial, self.steps, self.max_kl, self.progress = layers, measure, steps, max_kl, progress
        self.known: dict[tuple[int, ...], Measured] = {}

    def measure(self, at: tuple[int, ...]) -> Measured:
        if at not in self.known:
            self.progress()
            self.known[at] = self.trial([self.steps[i] for i in at])
        return self.known[at]

    def run(self) -> list[tuple[int, ...]]:
        """The states on the way, from no drop to the best one; each but the first is within the budget.

        What a step gains changes little by steps at other layers, and mostly falls: only the layer that promised most
        is measured again after each step (lazy greedy).
        """
        at = (0,) * len(self.layers)
        path = [at]
        promised: dict[int, tuple[float, tuple[int, ...], tuple[int, ...]]] = {  # gain, measured at, where it leads
            i: (math.inf, (), at) for i in range(len(at))
        }
        while promised:
            i = max(promised, key=lambda i: promised[i][0])
            _, seen_at, leads = promised[i]
            if seen_at == at:
                at = leads
                path.append(at)
                log.info("calibrate: layer %d: p=%g", self.layers[i], self.steps[at[i]])
            step = self._step(at, i)
            if step is None:
                del promised[i]
            else:
                promised[i] = (step[0], at, step[1])
        return self._without_small_drops(path)

    def _step(self, at: tuple[int, ...], i: int) -> tuple[float, tuple[int, ...]] | None:
        """Compute saved for a unit of KL by the next lower p of a layer that saves enough, and that state."""
        before = self.measure(at)
        for index in range(at[i] + 1, len(self.steps)):
            to = (*at[:i], index, *at[i + 1 :])
            after = self.measure(to)
            if not after.bound <= self.max_kl:  # NaN is not within it
                return None
            saved = before.compute_fraction - after.compute_fraction
            if saved >= STEP:
                return saved / max(after.bound - before.bound, 1e-4 * self.max_kl), to
        return None

    def _without_small_drops(self, path: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The path, with one state more where the last one has drops that remove next to nothing."""
        at, before, out = path[-1], 1.0, list[int]()
        for i, layer in enumerate(self.layers):
            after = self.measure(at).kept[layer]
            out.append(at[i] if before - after >= WORTHWHILE else 0)
            before = after if out[-1] else before
        fits = tuple(out) != at and self.measure(tuple(out)).bound <= self.max_kl  # later blocks are others then
        return [*path, tuple(out)] if fits else path
