"""What `real_model.py` measures with: settings, a model compiled by the package, records of prompts, intervals."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from masked_forward import FloatHead
from prefill_tools import Clock, Timing
from torch import Tensor

import uniprefill_fx
from uniprefill_fx.config import PRESETS, PrefillConfig
from uniprefill_fx.errors import Category
from uniprefill_fx.pipeline import Compilation
from uniprefill_fx.runtime.last_call import watched
from uniprefill_fx.tools.isolated import isolated

COLUMNS = (
    "part",
    "tokens",
    "kind",
    "prompt",
    "setting",
    "kl",
    "kl_all",
    "top1",
    "top1_all",
    "right",
    "compute",
    "kept",
)
"""Of a record. part: "text", "variants", "calibrated" (with KL and top-1 agreement of the next token, and of all
positions), or the name of a needle task. kept: by drop layer, the share of the prompt."""


@dataclass(frozen=True)
class Setting:
    """A preset; or one p for each drop, of which two stand for all between them, too; None: dense."""

    keep: str | tuple[float, ...] | None

    @classmethod
    def parse(cls, text: str) -> Setting:
        """ "dense", a preset's name, "0.99", or "0.99..0.7" for p from the first to the last drop."""
        if text in PRESETS or text == "dense":
            return cls(text if text in PRESETS else None)
        first, _, last = text.partition("..")
        return cls((float(first), float(last or first)))

    @property
    def name(self) -> str:
        if self.keep is None or isinstance(self.keep, str):
            return self.keep or "dense"
        each = self.keep[:1] if len(set(self.keep)) == 1 else self.keep
        return "p=" + "..".join(f"{p:g}" for p in each)

    def p(self, depths: Sequence[float]) -> list[float]:
        """For each drop, by the share of the decoder's layers that its layer ends."""
        assert self.keep is not None, "dense has no p"
        if isinstance(self.keep, str):
            return [PRESETS[self.keep].p(depth) for depth in depths]
        return [*self.keep] if len(self.keep) == len(depths) else spread(self.keep[0], self.keep[-1], len(depths))

    def selecting(self, depths: Sequence[float]) -> AbstractContextManager[None]:
        """What a prefill runs inside."""
        if self.keep is None:
            return uniprefill_fx.disabled()
        if isinstance(self.keep, str):
            return uniprefill_fx.override(preset=self.keep)
        return uniprefill_fx.override(p=self.p(depths))


DENSE = Setting(None)


def spread(first: float, last: float, count: int) -> list[float]:
    """A p for each of `count` drop layers, evenly from the first to the last."""
    return [round(first + (last - first) * i / max(count - 1, 1), 6) for i in range(count)]


class Subject:
    """A model compiled by the package once; what it selects with changes from call to call.

    `inner` compiles prompts. What follows a prompt is read from its cache by a compilation of its own whose pieces run
    as traced, since only its numbers matter here.
    """

    def __init__(self, model: Any, inner: str, block_size: int | str = 64) -> None:
        torch._dynamo.reset()
        self.done: list[Compilation] = []
        options = {"min_tokens": 0, "block_size": block_size}
        self.run = isolated(model, PrefillConfig.from_options(options | {"inner_backend": inner}), self.done.append)
        self.following = isolated(model, PrefillConfig.from_options(options | {"inner_backend": "eager"}))
        self.layers = model.config.get_text_config().num_hidden_layers

    @property
    def drop_layers(self) -> list[int]:
        """Known after the first call."""
        found = {drop.attention.layer for done in self.done for drop in done.plan.drops}
        return sorted(layer for layer in found if layer is not None)

    @property
    def depths(self) -> list[float]:
        return [(layer + 1) / self.layers for layer in self.drop_layers]

    @torch.inference_mode()
    def launch(self, ids: Tensor) -> tuple[Any, uniprefill_fx.LastCall | None]:
        """One prefill, and its record, which nobody has read yet."""
        return watched(lambda: self.run(ids, use_cache=True, logits_to_keep=1))

    def prefill(self, ids: Tensor, setting: Setting) -> tuple[Any, uniprefill_fx.LastCall]:
        """The output of one prefill. Raises where a prompt was to drop tokens and ran dense."""
        with setting.selecting(self.depths):
            out, call = self.launch(ids)
        if call is None:
            raise RuntimeError("the prefill ran past the backend: Dynamo gave up compiling it")
        if setting == DENSE:
            assert call.reason is not None and call.reason.category is Category.DISABLED, call
        elif call.tokens != ids.shape[1] or not call.kept_indices:
            raise RuntimeError(f"{setting.name}: the prompt was to drop tokens, and did not: {call}")
        return out, call

    @torch.inference_mode()
    def say(self, ids: Tensor, follow: Sequence[int], setting: Setting) -> tuple[Tensor, uniprefill_fx.LastCall]:
        """Logits (1 + len(follow), vocabulary): of the prompt's last row, and of what follows it on the cache."""
        out, call = self.prefill(ids, setting)
        logits = out.logits[0, -1:]
        if follow:
            ids = torch.tensor([list(follow)], device=ids.device)
            more = self.following(ids, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=0)
            logits = torch.cat([logits, more.logits[0]])
        return logits, call


@torch.inference_mode()
def greedy(model: Any, prompts: Sequence[Tensor], steps: int) -> list[list[int]]:
    """What the model itself says next, `steps` tokens for each prompt, by transformers.

    Prompts, (1, tokens) of one length, are read one by one, and their caches are put together for the steps.
    """
    outs = [model(ids, use_cache=True, logits_to_keep=1) for ids in prompts]
    cache = outs[0].past_key_values
    for layer, *others in zip(*(out.past_key_values.layers for out in outs), strict=True):
        layer.keys = torch.cat([layer.keys, *(other.keys for other in others)])
        layer.values = torch.cat([layer.values, *(other.values for other in others)])
    said = [torch.cat([out.logits[:, -1].argmax(-1, keepdim=True) for out in outs])]
    while len(said) < steps:
        out = model(said[-1], past_key_values=cache, use_cache=True)
        said.append(out.logits[:, -1].argmax(-1, keepdim=True))
    return [[int(token) for token in row] for row in torch.cat(said, 1).tolist()]


def compare(dense: Tensor, logits: Tensor) -> dict[str, float]:
    """KL divergence in nats and agreement of the likeliest token: of the first position, and averaged over all."""
    want, got = dense.float().log_softmax(-1), logits.float().log_softmax(-1)
    kl = (want.exp() * (want - got)).sum(-1, dtype=torch.float64).clamp_min(0)
    same = (want.argmax(-1) == got.argmax(-1)).double()
    return {
        "kl": float(f"{kl[0]:.4g}"),
        "kl_all": float(f"{kl.mean():.4g}"),
        "top1": float(same[0]),
        "top1_all": round(float(same.mean()), 4),
    }


def with_float_head(model: Any) -> Any:
    """The model with logits in float32, so that rounding is not taken for a difference. In place."""
    model.set_output_embeddings(FloatHead(model.get_output_embeddings()))
    return model


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        spec = spec or ".2g"
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"

    def __str__(self) -> str:
        return format(self)


def bootstrap(values: Sequence[float], rounds: int = 2000) -> Interval:
    """The mean over prompts, and its 95% interval over resampled prompts."""
    x = torch.tensor(values, dtype=torch.float64)
    drawn = torch.randint(len(x), (rounds, len(x)), generator=torch.Generator().manual_seed(0))
    low, high = torch.quantile(x[drawn].mean(-1), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(float(x.mean()), low, high)


def paired_ratio(values: Sequence[float], base: Sequence[float]) -> Interval:
    """The geometric mean of values over base, prompt by prompt, and its 95% interval: no prompt outweighs the others.
    Below 1e-6 all values count as that: they are rounding."""
    x, y = (torch.tensor(v, dtype=torch.float64).clamp_min(1e-6).log() for v in (values, base))
    found = bootstrap((x - y).tolist())
    return Interval(math.exp(found.mean), math.exp(found.low), math.exp(found.high))


def times(
    subject: Subject,
    stock: Callable[..., Any] | None,
    prompts: Sequence[Tensor],
    settings: Sequence[Setting],
    rounds: int,
) -> dict[str, dict[str, list[float]]]:
    """By setting, milliseconds to the first token's logits ("ms") and until the host had asked for them ("host_ms"):
    a median of `rounds` for each prompt, behind one round that is not counted; settings take turns.

    "stock": torch.compile of the model as it is. The device's events on CUDA; the wall clock on the CPU.
    """
    clock = Clock(prompts[0].device)
    found: dict[str, dict[str, list[float]]] = {}
    for ids in prompts:
        own: dict[str, list[Timing]] = defaultdict(list)
        for turn in range(rounds + 1):
            for setting in settings:
                if turn == 0:
                    subject.prefill(ids, setting)
                    continue
                with setting.selecting(subject.depths):
                    own[setting.name].append(clock.time(lambda: subject.launch(ids)))  # noqa: B023 (called at once)
            if stock is not None:
                with torch.inference_mode():
                    timing = clock.time(lambda: stock(ids, use_cache=True, logits_to_keep=1))  # noqa: B023
                own["stock"] += [timing] * bool(turn)
        for name, timings in own.items():
            medians = found.setdefault(name, {"ms": [], "host_ms": []})
            medians["ms"].append(round(statistics.median(timing.ms for timing in timings), 3))
            medians["host_ms"].append(round(statistics.median(timing.host_ms for timing in timings), 3))
    return found
