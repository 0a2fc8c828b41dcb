"""What `sparse_accuracy.py` measures with: a model compiled with block-sparse attention, and sums over its prompts."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

import uniprefill_fx
from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.errors import Category
from uniprefill_fx.frontends import gating
from uniprefill_fx.pipeline import Compilation, compile_graph
from uniprefill_fx.runtime.prefill import Prefill

EVERY_BLOCK = 1e-30
"""An alpha that chooses every block; 0 would not choose. On a card such attention is then dense by itself."""

LAST = 64
"""So many of a prompt's last positions are compared; they are never dropped."""

LOGITS = 2**28
"""Most numbers of logits that are looked at together."""


@dataclass(frozen=True)
class Setting:
    """One row of the table; `alpha` 0 leaves attention dense."""

    alpha: float
    correction: bool = True
    fp8: bool = False

    @property
    def name(self) -> str:
        if self.alpha == 0.0:
            return "dense attention"
        if self.alpha == EVERY_BLOCK:
            return "all blocks"
        return f"alpha {self.alpha:g}" + ("" if self.correction else ", no correction") + (", fp8" if self.fp8 else "")


@dataclass(frozen=True)
class Said:
    """Logits (positions, vocabulary) that are compared, the last `LAST` of which are the prompt's; and the tokens that
    follow."""

    logits: Tensor
    tokens: list[int]


class Subject:
    """A model, compiled with block-sparse attention once with drops and once without."""

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self.runs: list[Prefill] = []

    def compile(self, drops: bool) -> None:
        """With or without drops; the compilation before is gone."""
        torch._dynamo.reset()
        self.drops, self.runs = drops, []
        config = PrefillConfig.from_options(
            {
                "attention": "block_sparse",
                "sparse_min_tokens": 0,
                "sparse_layers": self.args.layers or "auto",
                "sparse_block_size": self.args.block_size,
                "min_tokens": 0,
                "inner_backend": self.args.inner_backend,
                "drop_layers": "auto" if drops else "none",
            }
        )
        self.last_tokens = config.sparse_last_tokens

        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            return compile_graph(gm, inputs, config, self._note)

        setattr(backend, gating.OURS, True)
        self.model.compile(backend=backend)

    def _note(self, done: Compilation) -> None:
        if isinstance(done.run, Prefill):
            self.runs.append(done.run)

    @contextlib.contextmanager
    def _eight_bits(self, on: bool) -> Iterator[None]:
        """`attention_dtype` is fixed by a compilation and refused without hardware: change the options themselves."""
        plans = [(run, run.plan) for run in self.runs]
        for run, plan in plans:
            run.plan = replace(plan, sparse=tuple((node, replace(spec, fp8=on)) for node, spec in plan.sparse))
        try:
            yield
        finally:
            for run, plan in plans:
                run.plan = plan

    def dense(self, ids: Tensor, answer: int) -> Said:
        """Without a cut; `answer` tokens follow."""
        with uniprefill_fx.disabled():
            said, call = self._say(ids, answer)
        assert call.reason is not None and call.reason.category is Category.DISABLED, call
        return said

    def cut(self, ids: Tensor, answer: int, setting: Setting) -> tuple[Said, uniprefill_fx.LastCall]:
        """With a setting, and with tokens dropped where the compilation does."""
        changed: dict[str, Any] = {"sparse_alpha": setting.alpha, "sparse_correction": setting.correction}
        if self.drops and self.args.p is not None:
            changed["p"] = self.args.p if len(self.args.p) > 1 else self.args.p[0]
        with uniprefill_fx.override(**changed), self._eight_bits(setting.fp8):
            said, call = self._say(ids, answer)
        if call.tokens != ids.shape[1] or not call.density or call.dropped is not self.drops:
            raise RuntimeError(f"{setting.name}: the prompt was to be cut, and was not: {call}")
        return said, call

    @torch.inference_mode()
    def _say(self, ids: Tensor, answer: int) -> tuple[Said, uniprefill_fx.LastCall]:
        keep = {"logits_to_keep": LAST} if self.drops else {}
        out, call = uniprefill_fx.watched(lambda: self.model(ids, use_cache=answer > 0, **keep))
        if call is None:
            raise RuntimeError("the prefill ran past the backend: Dynamo gave up compiling it")
        logits = out.logits[0]
        if not self.drops:
            tokens = ids.shape[1]
            inside = slice(tokens // 2, max(tokens - self.last_tokens, tokens // 2))
            logits = torch.cat([logits[inside], logits[-LAST:]])
        follow = [int(logits[-1].argmax())] if answer else []
        cache = out.past_key_values if answer else None
        for _ in range(answer - 1):
            out = self.model(torch.tensor([follow[-1:]], device=ids.device), past_key_values=cache, use_cache=True)
            follow.append(int(out.logits[0, -1].argmax()))
        return Said(logits, follow), call


def divergence(dense: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """By position: KL of the next token's distribution from dense, float32, and whether the likeliest is the same."""
    kls, same = [], []
    rows = max(LOGITS // dense.shape[1], 1)
    for a, b in zip(dense.split(rows), other.split(rows), strict=True):
        p, q = a.float().log_softmax(-1), b.float().log_softmax(-1)
        kls.append((p.exp() * (p - q)).sum(-1).clamp(min=0.0))  # but for rounding
        same.append(a.argmax(-1) == b.argmax(-1))
    return torch.cat(kls), torch.cat(same)


@dataclass
class Row:
    """Sums over the prompts of one length under one setting, and what intervals are made of: means by prompt.

    `right` counts whole answers, `lost` those that only dense got right; `inside` counts positions.
    """

    drops: bool
    setting: str
    tokens: int
    n: int = 0
    right: int = 0
    dense_right: int = 0
    lost: int = 0
    kl_sum: float = 0.0
    kl_max: float = 0.0
    top1: int = 0
    inside: int = 0
    inside_kl_sum: float = 0.0
    inside_top1: int = 0
    density_sum: float = 0.0
    compute_sum: float = 0.0
    last_kls: list[float] = field(default_factory=list)
    last_top1s: list[float] = field(default_factory=list)
    inside_kls: list[float] = field(default_factory=list)
    inside_top1s: list[float] = field(default_factory=list)

    def add(self, dense: Said, got: Said, call: uniprefill_fx.LastCall, answer: list[int]) -> None:
        """One prompt more."""
        kl, same = divergence(dense.logits, got.logits)
        self.n += 1
        self.kl_sum += float(kl[-1])
        self.kl_max = max(self.kl_max, float(kl[-1]))
        self.top1 += bool(same[-1])
        self.last_kls.append(float(f"{kl[-LAST:].mean():.4g}"))
        self.last_top1s.append(round(float(same[-LAST:].float().mean()), 4))
        inside_kl, inside_same = kl[:-LAST], same[:-LAST]
        if len(inside_kl):
            self.inside += len(inside_kl)
            self.inside_kl_sum += float(inside_kl.sum())
            self.inside_top1 += int(inside_same.sum())
            self.inside_kls.append(float(f"{inside_kl.mean():.4g}"))
            self.inside_top1s.append(round(float(inside_same.float().mean()), 4))
        self.density_sum += sum(call.density.values()) / len(call.density)
        self.compute_sum += call.compute_fraction
        if answer:
            right, was = got.tokens == answer, dense.tokens == answer
            self.right += right
            self.dense_right += was
            self.lost += was and not right
