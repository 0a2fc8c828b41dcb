"""What `real_model.py` measures with: a loaded model, its compilation by the package, records of prompts, intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf_tokenizer import sentencepiece_tokenizer
from masked_forward import FloatHead
from prefill_tools import Clock
from torch import Tensor

import uniprefill_fx
from uniprefill_fx.config import PrefillConfig
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
"""Of a record. part: "text", "variants" (both with KL and top-1 agreement of the next token, and of all positions), or
the name of a needle task (prompt: its depth). kept: by drop layer, the share of the prompt."""


def load(name: str, tokenizer: str | None, device: str) -> tuple[Any, Any]:
    """A model in evaluation mode, bfloat16 but on a CPU, and its tokenizer. name: hub name, folder, or GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = Path(name) if name.endswith(".gguf") else None
    where, extra = (str(gguf.parent), {"gguf_file": gguf.name}) if gguf else (name, {})
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **extra)
    if tokenizer is None and gguf is not None:
        return model.to(device).eval(), sentencepiece_tokenizer(gguf)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(tokenizer or where)


def begin_of(tokenizer: Any) -> list[int]:
    """What the tokenizer puts in front of a text."""
    if tokenizer.bos_token_id is None or tokenizer("a").input_ids[0] != tokenizer.bos_token_id:
        return []
    return [tokenizer.bos_token_id]


def spread(first: float, last: float, count: int) -> list[float]:
    """A p for each of `count` drop layers, evenly from the first to the last."""
    return [round(first + (last - first) * i / max(count - 1, 1), 6) for i in range(count)]


class Subject:
    """A model compiled by the package once; what it selects with changes from call to call."""

    def __init__(self, model: Any, inner: str, block_size: int | str = 64) -> None:
        torch._dynamo.reset()
        self.done: list[Compilation] = []
        options = {"min_tokens": 0, "inner_backend": inner, "block_size": block_size}
        self.run = isolated(model, PrefillConfig.from_options(options), self.done.append)

    @property
    def drop_layers(self) -> list[int]:
        """Known after the first call."""
        found = {drop.attention.layer for done in self.done for drop in done.plan.drops}
        return sorted(layer for layer in found if layer is not None)

    @torch.inference_mode()
    def prefill(self, ids: Tensor, p: Sequence[float] | None) -> tuple[Any, uniprefill_fx.LastCall]:
        """The output of one prefill: dense where p is None. Raises where a prompt was to drop tokens and ran dense."""
        with uniprefill_fx.disabled() if p is None else uniprefill_fx.override(p=list(p)):
            out, call = watched(lambda: self.run(ids, use_cache=True, logits_to_keep=1))
        if call is None:
            raise RuntimeError("the prefill ran past the backend: Dynamo gave up compiling it")
        if p is None:
            assert call.reason is not None and call.reason.category is Category.DISABLED, call
        elif call.tokens != ids.shape[1] or not call.kept_indices:
            raise RuntimeError(f"p={p}: the prompt was to drop tokens, and did not: {call}")
        return out, call

    @torch.inference_mode()
    def say(
        self, ids: Tensor, follow: Sequence[int], p: Sequence[float] | None
    ) -> tuple[Tensor, uniprefill_fx.LastCall]:
        """Logits (1 + len(follow), vocabulary): of the prompt's last row, and of what follows it on the cache."""
        out, call = self.prefill(ids, p)
        logits = out.logits[0, -1:]
        if follow:
            ids = torch.tensor([list(follow)], device=ids.device)
            more = self.run(ids, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=0)
            logits = torch.cat([logits, more.logits[0]])
        return logits, call


@torch.inference_mode()
def greedy(model: Any, ids: Tensor, steps: int) -> list[int]:
    """What the model itself says next, `steps` tokens, by transformers."""
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, **options)
    said: list[int] = out[0, ids.shape[1] :].tolist()
    return said


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

    def __str__(self) -> str:
        return f"{self.mean:.2g} [{self.low:.2g}, {self.high:.2g}]"


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
    subject: Subject, stock: Callable[..., Any] | None, prompts: Sequence[Tensor], settings: dict[str, Any], rounds: int
) -> dict[str, list[float]]:
    """Milliseconds to the first token's logits by setting, a median for each prompt; settings take turns.

    "stock": torch.compile of the model as it is. The device's events on CUDA; the wall clock on the CPU.
    """
    clock = Clock(prompts[0].device)
    ways: dict[str, Callable[[Tensor], Any]] = {
        name: (lambda ids, p=p: subject.prefill(ids, p)) for name, p in settings.items()
    }
    if stock is not None:
        ways["stock"] = lambda ids: stock(ids, use_cache=True, logits_to_keep=1)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for ids in prompts:
        own: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 2):
            for name, way in ways.items():
                with torch.inference_mode():
                    ms = clock.time(lambda: way(ids)).ms  # noqa: B023 (called at once)
                if turn >= 2:
                    own[name].append(ms)
        for name, values in own.items():
            found[name].append(round(statistics.median(values), 3))
    return found
