"""`Report`: what the backend found in a model, decided, and did with one prompt, as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.errors import Category, Refusal
from uniprefill_fx.lowering.engines import EnginePiece
from uniprefill_fx.lowering.pieces import LazyPiece
from uniprefill_fx.passes.analyze.plan import Plan
from uniprefill_fx.pipeline import Compilation
from uniprefill_fx.runtime.last_call import LastCall
from uniprefill_fx.runtime.overrides import arguments
from uniprefill_fx.runtime.prefill import Prefill
from uniprefill_fx.tools.answers import Answers
from uniprefill_fx.tools.savings import Savings, estimate

BREAK_EVEN = 0.8
"""Density from which on dense attention is as fast as block-sparse attention, at some tens of thousands of tokens
(`benchmarks/block_sparse_notes.md`)."""

LITTLE = 0.98
"""Work of a prompt, as a share of dense, from which on the report says how to drop more."""


@dataclass(frozen=True)
class Report:
    """What was found, decided and done. `print(report)` shows it as a table.

    Attributes:
        config: the options used. compilations: one for each graph that Dynamo handed over, in order.
        call: what the prompt's prefill did, as it ran; None when no graph was a prefill. input_ids: the prompt.
        model: name of the model's class. answers: what follows the prompt, dense and dropped, where it was asked for.
        again: runs the prompt once more, with the options of an `override()`; what it did, and the seconds it took.
    """

    config: PrefillConfig
    compilations: tuple[Compilation, ...]
    call: LastCall | None
    input_ids: torch.Tensor | None = None
    model: str = "model"
    answers: Answers | None = None
    again: Callable[..., tuple[LastCall | None, float]] | None = None

    @property
    def decoder(self) -> Compilation:
        """The graph that holds the decoder: the last one that drops, or else the one with the most layers."""
        return max(self.compilations, key=lambda c: (bool(c.plan.drops), c.plan.num_layers))

    @property
    def plan(self) -> Plan:
        """The decisions about the decoder."""
        return self.decoder.plan

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Every reason to stay dense, over all graphs; each once."""
        return tuple(dict.fromkeys(r for c in self.compilations for r in c.plan.refusals))

    @property
    def breaks(self) -> tuple[str, ...]:
        """What divides the model into several graphs, and which layers cannot drop for it; one entry a dense piece."""
        found = []
        for compilation in self.compilations:
            plan = compilation.plan
            reasons = [r for r in plan.refusals if r.category is Category.GRAPH_BREAK and r.layer is None]
            if not plan.drops and plan.attention_nodes and reasons:
                layers = sorted({attention.layer for attention in plan.attention_nodes})
                named = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
                found.append(f"{named} cannot drop, as {reasons[-1].seen}")
        return tuple(found)

    @property
    def before(self) -> fx.GraphModule:
        """The graph as Dynamo traced it."""
        return self.decoder.before

    @property
    def after(self) -> fx.GraphModule | None:
        """The rewritten graph; None when nothing is dropped."""
        return self.decoder.after

    @property
    def amounts(self) -> dict[int, str]:
        """How much each drop layer keeps, as "p=0.9" or "keep_ratio=0.5": as compiled, or as `override()` had it."""
        out = {}
        for i, drop in enumerate(self.plan.drops):
            values = {"p": drop.spec.p, "keep_ratio": drop.spec.keep_ratio}
            if self.call is not None:
                values |= arguments(self.call.changed, i, len(self.plan.drops), self.plan.depth(i))
            assert drop.attention.layer is not None
            out[drop.attention.layer] = next(f"{n}={values[n]:g}" for n in ("p", "keep_ratio") if values[n] is not None)
        return out

    @property
    def savings(self) -> Savings | None:
        """FLOPs and cache bytes of the prompt, beside those of a dense prefill; an estimate by counting."""
        return None if self.call is None else estimate(self.before, self.plan, self.config, self.call)

    @property
    def headline(self) -> tuple[str, ...]:
        """What this call did, in one line or two: dense and why, or how much was dropped."""
        call = self.call
        if call is None:
            return ("nothing was dropped: no graph was a prefill",)
        if not call.dropped and not call.density:
            return (f"this prompt ran dense: {call.reason or 'no reason was recorded'}",)
        if not call.dropped:
            share = sum(call.density.values()) / len(call.density)
            done = (
                f"this prompt: {call.tokens} tokens, none dropped; attention computed {share:.0%} of the blocks of keys"
            )
            return (done, str(call.reason)) if call.reason is not None else (done,)
        left = len(list(call.kept_indices.values())[-1])
        done = f"this prompt: {call.tokens} tokens, {left} of them left after the last drop; "
        done += f"{1 - call.compute_fraction:.0%} of the tokens saved, averaged over layers"
        if call.reason is not None:
            return (done, str(call.reason))
        return (done, self._hint()) if call.compute_fraction >= LITTLE else (done,)

    def _hint(self) -> str:
        """How to drop more. Nothing is said of the quality that this costs: a report does not measure it."""
        name = next(iter(self.amounts.values())).split("=")[0]
        now = ", ".join(f"{amount} after layer {layer}" for layer, amount in self.amounts.items())
        changed = self.call.changed if self.call is not None else {}
        sinks, last = (changed.get(n, getattr(self.config, n)) for n in ("sink_tokens", "last_n"))
        return (
            f"that is hardly less than dense: to drop more, lower {name} (now {now}); the first {sinks} tokens and the "
            f"last {last} stay in any case"
        )

    def __str__(self) -> str:
        plan, call = self.plan, self.call
        amounts = self.amounts
        attention_nodes = {attention.layer: attention for attention in plan.attention_nodes}
        tokens = call.tokens if call is not None else None
        lines = [*self.headline, *([self._choice()] if amounts else [])]
        lines.append(f"{'layer':>5}  {'attention':<28} {'rows in':>9}  {'drop after it'}")
        for layer in range(plan.num_layers):
            attention = attention_nodes.get(layer)
            kind = "no attention" if attention is None else attention.kind
            if call is not None and layer in call.density:
                kind += f", {call.density[layer]:.0%} of blocks"
            rows = str(call.num_tokens[layer]) if call is not None and call.num_tokens else str(tokens or "")
            decision = ""
            if layer in amounts:
                kept = (
                    f", kept {len(call.kept_indices[layer])}" if call is not None and layer in call.kept_indices else ""
                )
                decision = ("" if kept else "planned: ") + amounts[layer] + kept
            lines.append(f"{layer:>5}  {kind:<28} {rows:>9}  {decision}".rstrip())
        lines += self._dear()
        lines += [f"graph break: {cost}" for cost in self.breaks]
        lines += [f"refused: {refusal}" for refusal in self.refusals]
        if call is not None and call.dropped and call.changed:
            lines.append("for this call: " + ", ".join(f"{name}={value}" for name, value in call.changed.items()))
        lines += [] if self.answers is None else [str(self.answers)]
        return "\n".join([*lines, self._compiled(), self._times()])

    def _dear(self) -> list[str]:
        """The block-sparse layers that would have been as fast dense: choosing, and a kernel that follows lists, cost
        more there than blocks that were left out."""
        density = self.call.density if self.call is not None else {}
        dear = [layer for layer, share in density.items() if share > BREAK_EVEN]
        if not dear or all(share == 1.0 for share in density.values()):  # attention of few rows does not choose
            return []
        return [
            f"layers {dear} computed more than {BREAK_EVEN:.0%} of their blocks, and are as fast dense: a higher "
            "sparse_alpha leaves out more, and sparse_layers can do without them"
        ]

    def _choice(self) -> str:
        """The drop layers, and why these; only planned ones where the call dropped nothing."""
        why = {
            "auto": "drop_layers='auto': about every fourth layer, neither the first ones nor the last",
            "all": "drop_layers='all': every layer with full attention",
        }
        layers = [drop.attention.layer for drop in self.plan.drops]
        drops = "drops" if self.call is not None and self.call.dropped else "planned drops"
        return f"{drops} after layers {layers} ({why.get(str(self.config.drop_layers), 'as given, or as published')})"

    def _compiled(self) -> str:
        """What was compiled: graphs of the prompt and of tokens after it, and the pieces of the former."""
        prompts = [c for c in self.compilations if c.plan.prefill]
        # pieces of one structure have one run
        runs = dict.fromkeys(run for c in prompts if isinstance(c.run, Prefill) for _, run in c.run.steps)
        parts = [part for run in runs for part in (run.parts if isinstance(run, EnginePiece) else [run])]
        pieces = sum(len(part.variants) for part in parts if isinstance(part, LazyPiece))
        inner = self.config.inner_backend if isinstance(self.config.inner_backend, str) else "the inner backend"
        text = f"compiled: {len(prompts)} of the prompt"
        text += f" in {pieces} pieces by {inner}" if pieces else ""
        text += f", {len(self.compilations) - len(prompts)} of other tokens"
        return text + (": Dynamo broke the model, or compiled it again" if len(self.compilations) > 1 else "")

    def _times(self) -> str:
        """Time of the passes on the decoder; those below a twentieth of it are summed up."""
        seconds = self.decoder.seconds
        total = sum(seconds.values())
        shown = {name: s for name, s in seconds.items() if s >= total / 20}
        parts = [f"{name} {s:.2f}" for name, s in shown.items()]
        return f"passes: {total:.2f} s: " + ", ".join([*parts, f"others {total - sum(shown.values()):.2f}"])
