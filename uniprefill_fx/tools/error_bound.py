"""`error_bound()`: how much attention mass a prompt loses at each drop and to blocks left out; what error it makes.

The paper (arXiv 2605.06221, Eq. 6) bounds the error by the mass that the kept blocks lack, which is at most 1 - p. Here
is the form that is checked, for one query and head with weights a, values v, and dropped mass e = sum of a over dropped
keys. Attention over the kept keys alone, with weights a / (1 - e), differs from the full one by

    e · (mean of dropped values - mean of kept values),   so by at most   2 · e · max |v|

where the means are weighted by a and the maximum is over the keys. Averaged over heads and the last queries, e is the
share of the scores that was dropped: at most 1 - p by the choice of blocks, and less by the rows that always stay.

This is what a drop layer's keys would be worth to the last queries if they were gone. They are not gone there: the
attention of a drop layer is dense, so kept rows leave it exact, and so do the keys and values of the next layer. From
its attention on they err, for which there is no bound without knowing the weights; it is measured, as the relative
error of the keys and values that each layer writes.

Block-sparse attention loses mass to the blocks of keys that it leaves out, of every query; the same bound holds, and
with its correction as well: a block's mean in place of its keys weighs w <= e in all, as the exponential is convex, and
moves the result by at most ((1 - e) (e - w) + w) / (1 - e + w) + e = 2 e times max |v|. (Soft-capped logits are not
convex in q · k; there it is a guide.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor, fx

from uniprefill_fx.api import options_for
from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.kernels.block_sparse_attention.naive import mass_not_computed
from uniprefill_fx.ops.block_sparse_attention import dense
from uniprefill_fx.ops.logits import with_terms
from uniprefill_fx.passes.operator_internals import schema_of
from uniprefill_fx.pipeline import Compilation
from uniprefill_fx.runtime.last_call import watched
from uniprefill_fx.runtime.overrides import Changed, arguments
from uniprefill_fx.runtime.prefill import Prefill, disabled
from uniprefill_fx.runtime.shown_options import Options, shows_options
from uniprefill_fx.specs import SparseSpec, bias_of_request
from uniprefill_fx.tools.isolated import checked_prompt, isolated, takes


@dataclass(frozen=True)
class DropError:
    """One drop layer. `error` and `bound` are norms of attention outputs, averaged over heads and last queries.

    Attributes:
        mass: dropped share of the attention mass. allowed: 1 - p, None with `top_k`. worst_mass: of a query and head.
        worst_ratio: the largest error / bound of a query and head; the bound holds when it is at most 1.
    """

    layer: int
    kept: int
    mass: float
    allowed: float | None
    worst_mass: float
    error: float
    bound: float
    worst_ratio: float

    @property
    def holds(self) -> bool:
        """Whether every error is within its bound, and the mass within what p allows; up to rounding of float32."""
        return self.worst_ratio <= 1 + 1e-4 and (self.allowed is None or self.mass <= self.allowed + 1e-5)


@dataclass(frozen=True)
class SparseError:
    """One layer of block-sparse attention, over the rows that enter it.

    Attributes:
        density: computed part of the causal blocks. mass: of dense attention on keys of blocks that were left out,
            averaged over heads and queries. worst_mass: of a query and head.
        error, bound: norms of attention outputs, averaged over heads and queries: off from dense attention over the
            same rows, and 2 · mass · max |v|.
    """

    layer: int
    density: float
    mass: float
    worst_mass: float
    error: float
    bound: float


@dataclass(frozen=True)
class BoundReport:
    """`drops`: each drop layer. `drift`: by attention layer, the relative error of the keys and values of kept rows.
    `sparse`: each layer of block-sparse attention."""

    drops: tuple[DropError, ...]
    drift: dict[int, float]
    sparse: tuple[SparseError, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the bound holds at every drop layer."""
        return all(drop.holds for drop in self.drops)

    def __str__(self) -> str:
        names = ("error", "bound", "worst ratio")
        lines = []
        if self.drops:
            lines.append(
                f"{'drop':>5} {'kept':>8} {'dropped mass':>13} {'allowed':>8}" + "".join(f"{n:>12}" for n in names)
            )
        for d in self.drops:
            allowed = "" if d.allowed is None else f"{d.allowed:.4f}"
            lines.append(
                f"{d.layer:>5} {d.kept:>8} {d.mass:>13.6f} {allowed:>8}"
                f"{d.error:>12.3g}{d.bound:>12.3g}{d.worst_ratio:>12.4f}"
            )
        if self.sparse:
            lines.append(f"{'layer':>5} {'density':>8} {'skipped mass':>13} {'worst':>8}{'error':>12}{'bound':>12}")
        for b in self.sparse:
            lines.append(
                f"{b.layer:>5} {b.density:>8.3f} {b.mass:>13.6f} {b.worst_mass:>8.4f}{b.error:>12.3g}{b.bound:>12.3g}"
            )
        lines.append("relative error of the keys and values of kept rows, by layer:")
        lines.append("  " + "  ".join(f"{layer}: {error:.3g}" for layer, error in self.drift.items()))
        return "\n".join(lines)


@shows_options(inner_backend=...)
def error_bound(model: Any, input_ids: Tensor, /, **options: Unpack[Options]) -> BoundReport:
    """Run one prompt dense and as the options say, without an inner backend, and measure what was lost where.

    For looking closely at a model: the scores of the last queries are formed whole, (heads, last_n, tokens) in
    float64, and block-sparse attention is followed by dense attention over the same rows. The model stays as it is.

    Args:
        model: a decoder. input_ids: (1, tokens) int64. options: as for `uniprefill_fx.compile`.

    Raises:
        OptionError: an unknown option or a bad value. TypeError, ValueError: no model, or no single prompt for it.
        RuntimeError: the prompt ran dense; the message has the reason.
    """
    if checked_prompt(model, input_ids).shape[0] != 1:
        raise ValueError(f"input_ids {tuple(input_ids.shape)}: wanted one prompt, (1, tokens)")
    config = PrefillConfig.from_options({"inner_backend": "eager", **options_for(model, options)})
    watch = _Watch()
    run = isolated(model, config, watch.take_over)
    call = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}
    with torch.inference_mode():
        with disabled():
            run(input_ids, **call)
        whole, watch.written = watch.written, []
        _, done = watched(lambda: run(input_ids, **call))
    if done is None or not (done.dropped or done.density) or watch.done is None:
        raise RuntimeError(f"the prompt ran dense: {done.reason if done else 'no prefill reached the backend'}")
    plan = watch.done.plan
    drops = []
    for i, (drop, found) in enumerate(zip(plan.drops, watch.found, strict=True)):
        p = arguments(done.changed, i, len(plan.drops), plan.depth(i)).get("p", drop.spec.p)
        allowed = None if p is None else 1.0 - p
        drops.append(replace(found, layer=drop.attention.layer, allowed=allowed))
    drift: dict[int, float] = {}
    alive: Tensor | None = None
    understood = [attention.layer for attention in plan.attention_nodes if attention.spec is not None]
    if len(whole) == len(watch.written) == len(understood):  # one attention op for each attention, in the same order
        for layer, full, few in zip(understood, whole, watch.written, strict=True):
            drift[layer] = max(_relative(a, b, alive) for a, b in zip(full, few, strict=True))
            alive = done.kept_indices.get(layer, alive)
    return BoundReport(tuple(drops), drift, tuple(watch.sparse))


def _relative(full: Tensor, few: Tensor, kept: Tensor | None) -> float:
    """|few - full[kept]| / |full[kept]| for keys or values (1, kv_heads, rows, dim)."""
    wanted = (full if kept is None else full[:, :, kept]).double()
    return float((few.double() - wanted).norm() / wanted.norm())


class _Watch:
    """Runs the pieces of a prefill node by node, and looks at attention, scores and selections as they pass."""

    def __init__(self) -> None:
        self.done: Compilation | None = None
        self.written: list[tuple[Tensor, Tensor]] = []  # keys and values of each attention op
        self.found: list[DropError] = []
        self.sparse: list[SparseError] = []
        self.scored: dict[str, Any] = {}

    def take_over(self, done: Compilation) -> None:
        """An observer of `compile_graph`."""
        if isinstance(done.run, Prefill):
            self.done = done
            done.run.steps = [(piece, _Looking(piece.gm, self)) for piece, _ in done.run.steps]
            dense: Any = _Looking(done.run.dense.gm, self)
            done.run.dense = dense
            done.run.interpreter = lambda gm, changed: _Looking(gm, self, changed)

    def look(self, name: str, values: dict[str, Any], result: Any) -> None:
        """One op of the package that ran."""
        if name in ("attention", "block_sparse_attention"):
            self.written.append((values["k"], values["v"]))
        if name == "block_sparse_attention":
            assert self.done is not None
            layer = self.done.plan.sparse[values["row"]][0].layer
            assert layer is not None
            self.sparse.append(measure_sparse(layer, values, *result))
        elif name == "score":
            self.scored = values
        elif name == "select":
            self.found.append(measure(self.scored, self.written[-1][1], result[0][0]))


class _Looking(Changed):
    def __init__(self, gm: fx.GraphModule, watch: _Watch, changed: Mapping[str, Any] | None = None) -> None:
        super().__init__(gm, changed or {})
        self.watch = watch

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def call_package(self, op: Any, values: dict[str, Any]) -> Any:
        result = super().call_package(op, values)
        self.watch.look(schema_of(op).name.partition("::")[2], values, result)
        return result


def measure(scored: dict[str, Any], v: Tensor, rows: Tensor) -> DropError:
    """The error of one drop of one prompt, from the arguments of its score op, the values (1, kv_heads, tokens, dim),
    and the rows that were kept, (kept,) int64. Layer and allowance are filled in by the caller."""
    q, k = scored["q"][0], scored["k"][0]
    dropped = torch.ones(k.shape[1], dtype=torch.bool, device=k.device)
    dropped[rows] = False
    queries = q[:, -scored["last_n"] :]
    weights, few = _weights(scored, queries, k), _weights(scored, queries, k, dropped)
    values = v[0].double().repeat_interleave(q.shape[0] // v.shape[1], dim=0)
    lost = torch.where(dropped, weights, 0.0)
    mass = lost.sum(-1)
    # The full weight of a kept key is (1 - mass) of its weight among the kept. Taken apart so, rounding is relative to
    # the mass, and a mass of 1 divides nothing by 0.
    error = torch.matmul(lost - mass[..., None] * few, values).norm(dim=-1)
    bound = 2.0 * mass * values.norm(dim=-1).amax(-1)[:, None]
    ratio = torch.where(bound == 0, 0.0, error / bound)  # NaN stays, and then the bound does not hold
    return DropError(
        layer=-1,
        kept=len(rows),
        mass=float(mass.mean()),
        allowed=None,
        worst_mass=float(mass.max()),
        error=float(error.mean()),
        bound=float(bound.mean()),
        worst_ratio=float(ratio.max()),
    )


def measure_sparse(layer: int, values: dict[str, Any], out: Tensor, totals: Tensor) -> SparseError:
    """What block-sparse attention left out, from the arguments of its op and what it returned."""
    computed, allowed = totals.tolist()
    if not allowed:  # it chose no blocks
        return SparseError(layer, 1.0, 0.0, 0.0, 0.0, 0.0)
    operands = {name: values[name] for name in ("token_bounds", "scale", "softcap", "sinks")}
    chosen = SparseSpec.of_numbers(values["options"][values["row"]].tolist()).choice()
    q, k, v = (values[name] for name in "qkv")
    mass = mass_not_computed(q, k, **operands, **chosen).double()
    full, _ = dense(q, k, v, **operands)
    largest = v.double().norm(dim=-1).amax(-1).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return SparseError(
        layer=layer,
        density=computed / allowed,
        mass=float(mass.mean()),
        worst_mass=float(mass.max()),
        error=float((out.double() - full.double()).norm(dim=-1).mean()),
        bound=float((2.0 * mass * largest[..., None]).mean()),
    )


def _weights(scored: dict[str, Any], q: Tensor, k: Tensor, dropped: Tensor | None = None) -> Tensor:
    """float64 attention (heads, queries, keys) of the last queries over all keys but the dropped ones; a sink's share
    is left out, so that a row may sum to less than 1."""
    n, length = q.shape[1], k.shape[1]
    keys = k.double().repeat_interleave(q.shape[0] // k.shape[0], dim=0)
    scale = q.shape[-1] ** -0.5 if scored["scale"] is None else float(scored["scale"])
    logits = torch.matmul(q.double(), keys.transpose(1, 2)) * scale
    positions, bias = scored.get("positions"), scored.get("bias")
    own = None if bias is None else bias_of_request(bias, q.shape[0], 0)
    logits = with_terms(logits[None], scored.get("softcap"), own, None if positions is None else positions[0])[0]
    hidden = torch.ones(n, length, dtype=torch.bool, device=q.device).triu(length - n + 1)
    logits = logits.masked_fill(hidden if dropped is None else hidden | dropped, -torch.inf)
    sinks = scored.get("sinks")
    if sinks is not None:
        logits = torch.cat([logits, sinks.double().reshape(-1, 1, 1).expand(-1, n, 1)], -1)
    return logits.softmax(-1)[..., :length]
