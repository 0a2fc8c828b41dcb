"""`calibrate()`: drop layers, and a p for each, from the user's own prompts under a budget of KL divergence."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers.utils.logging import tqdm

from uniprefill_fx.api import options_for
from uniprefill_fx.config import OptionError, PrefillConfig
from uniprefill_fx.passes.analyze.plan import Plan
from uniprefill_fx.runtime.last_call import LastCall, watched
from uniprefill_fx.runtime.overrides import as_compiled, override
from uniprefill_fx.runtime.prefill import disabled
from uniprefill_fx.runtime.shown_options import Options, shows_options
from uniprefill_fx.tools.isolated import isolated, takes
from uniprefill_fx.tools.search import Measured, Search

log = logging.getLogger(__name__)

GRID = (1.0, 0.999, 0.99, 0.975, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.3)
"""Values of p that are tried, mild ones first. 1.0 keeps everything: no drop at that layer."""

POSITIONS = 16
"""How many of the last positions of a prompt have their next-token distributions compared. They are never dropped."""

HELD_OUT = 3
"""Every so many-th prompt takes no part in the search."""


FOUND = ("preset", "p", "selection", "keep_ratio")
"""Options that say how much is kept, which is what is looked for."""


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found: `uniprefill_fx.compile(model, **found.options)`.

    Attributes:
        options: `drop_layers`, `p`, and the options that were given; fit for JSON.
        kl: mean over the prompts that were searched with. worst_kl: of the one that differs most. bound: what the mean
            over prompts like these stays below, with 90% confidence; one prompt has none, and its bound is its KL.
        max_kl: the budget. compute_fraction: kept fraction, averaged over layers and prompts. kept: by drop layer,
            averaged over prompts.
        held_out_kl, held_out_compute: the same means over the prompts that had no part in the search; None without any.
        runs: prefills that it took.
    """

    options: dict[str, Any]
    kl: float
    worst_kl: float
    max_kl: float
    compute_fraction: float
    kept: dict[int, float] = field(default_factory=dict)
    runs: int = 0
    bound: float = math.nan
    held_out_kl: float | None = None
    held_out_compute: float | None = None

    @property
    def work(self) -> float:
        """Deprecated: `compute_fraction`."""
        warnings.warn("Calibration.work is called compute_fraction now", DeprecationWarning, stacklevel=2)
        return self.compute_fraction

    def save(self, path: str | Path) -> None:
        """Write the options as JSON; `uniprefill_fx.compile(model, **json.load(file))` reads them."""
        Path(path).write_text(json.dumps(self.options, indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        lines = [f"{'layer':>5}  {'p':>6}  kept after it"]
        for layer, p in zip(self.options["drop_layers"], self.options["p"], strict=True):
            lines.append(f"{layer:>5}  {p:>6g}  {self.kept[layer]:.2f}")
        lines.append(
            f"KL {self.kl:.2g}, below {self.bound:.2g} with 90% confidence (budget {self.max_kl:g}, worst prompt "
            f"{self.worst_kl:.2g}), compute {self.compute_fraction:.2f} of dense"
        )
        if self.held_out_kl is not None:
            lines.append(f"held-out prompts: KL {self.held_out_kl:.2g}, compute {self.held_out_compute:.2f}")
        return "\n".join(lines)


@shows_options(preset=..., p=..., selection=..., keep_ratio=..., drop_layers="all", inner_backend="eager", min_tokens=0)
def calibrate(
    model: Any,
    prompts: Iterable[Tensor],
    *,
    max_kl: float = 0.01,
    grid: Sequence[float] = GRID,
    positions: int = POSITIONS,
    **options: Unpack[Options],
) -> Calibration:
    """Choose drop layers and a p for each, so that little is computed and the answers stay near the dense
    ones.

    All layers are searched together: from no drop at all, the next step is the one that saves most compute for the KL
    it costs, as long as the upper 90% bound of the mean KL stays within the budget. Every candidate is measured as a
    whole, by one compilation. Of three prompts or more every third is held out: the search does not see it, the result
    says what it cost there, and steps are taken back while that is over the budget. An `override` around the call has
    no part in it. A progress bar is shown (not with `transformers.utils.logging.disable_progress_bar()`).

    Args:
        model: a decoder; it stays as it is, compiled or not.
        prompts: tensors (1, tokens) or (tokens,) int64, like those the model will get, with what makes them hard. The
            fewer they are, the wider the bound: a dozen or more.
        max_kl: budget for the mean KL divergence of next-token distributions from the dense model's, in nats.
        grid: values of p to try, in (0, 1]. positions: how many of the last positions are compared.
        options: as for `uniprefill_fx.compile`, but those that say how much is kept; with `drop_layers`, only
            these are candidates. `inner_backend` is "eager" unless given, and then not part of the result.

    Raises:
        OptionError: an unknown option or a bad value; one that says how much is kept.
        ValueError: no prompts, batches of them or too short ones, or a bad budget, grid or number of positions; a
            prompt whose KL divergence is not finite.
        RuntimeError: nothing can be dropped, or a prompt ran dense, so nothing can be measured with it; the message
            has the reason.
    """
    given: dict[str, Any] = dict(options)
    for name in FOUND:
        if name in given:
            raise OptionError(name, given[name], "no value in calibrate()", "It finds p for each drop layer; see grid.")
    merged = {"drop_layers": "all", "inner_backend": "eager", "min_tokens": 0} | given
    config = PrefillConfig.from_options(options_for(model, merged) | {"selection": "top_p", "p": 1.0})
    steps = sorted({1.0, *map(float, grid)}, reverse=True)
    fits = len(grid) > 0 and all(0 < p <= 1 for p in steps)  # NaN does not
    if not max_kl > 0 or not fits or not 1 <= positions <= config.last_n:
        raise ValueError(
            f"max_kl={max_kl}, grid={grid}, positions={positions}: wanted a positive budget, values of p in (0, 1], "
            f"and between 1 and last_n={config.last_n} positions"
        )
    trial = _Trial(model, [_single(ids) for ids in prompts], config, positions)
    bar: Any = tqdm(desc="calibrate", unit="trial")
    with as_compiled(), contextlib.closing(bar):
        search = Search(trial.layers, trial.measure, steps, max_kl, bar.update)
        path = search.run()
        found, unseen = path[-1], None
        while trial.held_out:
            unseen = trial.measure([steps[i] for i in found], held_out=True)
            if unseen.kl <= max_kl or len(path) == 1:
                break
            path.pop()
            found = path[-1]
        measured = search.measure(found)
    return _result(trial, [steps[i] for i in found], measured, unseen, max_kl, given)


def _kl(dense: Tensor, logprobs: Tensor) -> float:
    """KL divergence, in nats, of `logprobs` from `dense`, both (positions, vocabulary) float64, averaged over
    positions. A token that dense never takes adds nothing: p·log(p/q) goes to 0 with p, whatever q is."""
    p = dense.exp()
    return float((p * (dense - logprobs)).where(p > 0, 0.0).where(~dense.isnan(), math.nan).sum(-1).mean())


def _single(ids: Tensor) -> Tensor:
    """(1, tokens) of (tokens,) or (1, tokens)."""
    if not isinstance(ids, Tensor) or ids.dim() not in (1, 2) or (ids.dim() == 2 and len(ids) != 1):
        got = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"a prompt is {got}: wanted a tensor of token ids, (tokens,) or (1, tokens)")
    return ids.reshape(1, -1)


def _result(
    trial: _Trial,
    ps: Sequence[float],
    found: Measured,
    unseen: Measured | None,
    max_kl: float,
    given: dict[str, Any],
) -> Calibration:
    drops = {layer: p for layer, p in zip(trial.layers, ps, strict=True) if p < 1.0}
    if not drops:
        log.warning("calibrate: no drop fits max_kl=%g; the options keep everything", max_kl)
        drops = {trial.layers[-1]: 1.0}
    options = {name: value for name, value in given.items() if name not in ("drop_layers", "inner_backend")}
    options |= {"drop_layers": list(drops), "p": list(drops.values())}
    return Calibration(
        options,
        found.kl,
        max(found.kls),
        max_kl,
        found.compute_fraction,
        {layer: found.kept[layer] for layer in drops},
        trial.runs,
        found.bound,
        unseen.kl if unseen else None,
        unseen.compute_fraction if unseen else None,
    )


class _Trial:
    """One compilation with a drop at every candidate; p = 1 switches a drop off."""

    def __init__(self, model: Any, prompts: Sequence[Tensor], config: PrefillConfig, positions: int) -> None:
        if not prompts:
            raise ValueError("calibrate needs at least one prompt")
        for ids in prompts:
            if ids.shape[1] <= positions:
                raise ValueError(f"a prompt of {ids.shape[1]} tokens: wanted more than positions={positions}")
        plans: list[Plan] = []
        self.run: Callable[..., Any] = isolated(model, config, lambda done: plans.append(done.plan))
        self.kwargs = {"logits_to_keep": positions} if takes(model, "logits_to_keep") else {}
        self.prompts, self.positions, self.runs = prompts, positions, 0
        with disabled():
            self.dense = [self._logprobs(ids)[0] for ids in prompts]
        self.held_out = list(range(HELD_OUT - 1, len(prompts), HELD_OUT))
        self.searched = [i for i in range(len(prompts)) if i not in self.held_out]
        attention_nodes = [drop.attention.layer for plan in plans for drop in plan.drops]
        if not attention_nodes:
            reasons = [str(refusal) for plan in plans for refusal in plan.refusals]
            raise RuntimeError("nothing can be dropped in this model: " + ("; ".join(reasons) or "no graph was traced"))
        num_layers = max(plan.num_layers for plan in plans)
        self.layers = sorted({layer for layer in attention_nodes if layer is not None and layer < num_layers - 1})
        if not self.layers:
            raise RuntimeError(f"a drop after layer {num_layers - 1} saves nothing: it is the last one")
        self.last = [
            layer for layer in sorted({s for s in attention_nodes if s is not None}) if layer not in self.layers
        ]

    def measure(self, ps: Sequence[float], held_out: bool = False) -> Measured:
        """The prompts of the search, or those held out, with one p for each candidate layer."""
        kls, fractions, chosen = [], [], self.held_out if held_out else self.searched
        kept = dict.fromkeys(self.layers, 0.0)
        with override(p=[*ps, *([1.0] * len(self.last))]):
            for i in chosen:
                ids, dense = self.prompts[i], self.dense[i]
                logprobs, call = self._logprobs(ids)
                if not call.dropped or call.tokens != ids.shape[1]:
                    raise RuntimeError(f"a prompt of {ids.shape[1]} tokens ran dense: {call.reason}")
                kl = _kl(dense, logprobs)
                if not math.isfinite(kl):
                    raise ValueError(
                        f"prompt {i} ({ids.shape[1]} tokens): the KL divergence from dense is {kl} at p={list(ps)}: "
                        "wanted next-token distributions without NaN, and no token with logit -inf after dropping alone"
                    )
                kls.append(kl)
                fractions.append(call.compute_fraction)
                for layer in self.layers:
                    kept[layer] += len(call.kept_indices[layer]) / ids.shape[1] / len(chosen)
        return Measured(tuple(kls), tuple(fractions), kept)

    @torch.inference_mode()
    def _logprobs(self, ids: Tensor) -> tuple[Tensor, LastCall]:
        """(positions, vocabulary) float64 log-probabilities of the last positions, and what the call did."""
        out, call = watched(lambda: self.run(ids, **self.kwargs))
        if call is None:
            raise RuntimeError("the prompt ran past the backend: Dynamo gave up compiling the model")
        self.runs += 1
        logits = out if isinstance(out, Tensor) else out[0]
        return logits[0, -self.positions :].double().log_softmax(-1).cpu(), call
