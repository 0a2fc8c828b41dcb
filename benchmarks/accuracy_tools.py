"""What `accuracy.py` measures with: checkpoints, prompts, one compiled model, and the sums of its rows."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accuracy_rivals import Chooser
from torch import Tensor, fx
from transformers import AutoModelForCausalLM

import uniprefill_fx
from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.errors import Category
from uniprefill_fx.frontends import gating
from uniprefill_fx.pipeline import compile_graph
from uniprefill_fx.runtime.last_call import watched

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINTS = Path(os.environ.get("UNIPREFILL_CHECKPOINTS") or ROOT.parent / "shared" / "checkpoints")
ANSWER = 4
BEHIND = 256
"""Noise after the question when it is to lie outside the window of scoring queries."""


@dataclass(frozen=True)
class Cell:
    """One kind of prompt. `place`: whether the question is "in" the last tokens, or pushed "out" of them by noise."""

    tokens: int
    pairs: int
    place: str = "in"


@dataclass(frozen=True)
class Prompt:
    """Two turns (1, tokens) int64, the second empty where the question ends the first; and the right answer."""

    first: Tensor
    second: Tensor
    answer: list[int]


def checkpoint(name: str) -> Path:
    """A file or folder beside the needle checkpoints; ends the program with a sentence where it is missing."""
    if not (CHECKPOINTS / name).exists():
        raise SystemExit(
            f"no {name} in {CHECKPOINTS}: set UNIPREFILL_CHECKPOINTS to the folder that holds the needle checkpoints "
            "and their generator.py"
        )
    return CHECKPOINTS / name


@cache
def _generator() -> Any:
    source = importlib.util.spec_from_file_location("needle_generator", checkpoint("generator.py"))
    assert source is not None and source.loader is not None
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    return module


def make_prompt(cell: Cell, seed: int) -> Prompt:
    """A needle prompt. Out of the window: the question, 256 tokens of noise, and then, as a second turn on the cache,
    the question again, because the checkpoints answer only right behind a question. The selection never sees it."""
    behind = 0 if cell.place == "in" else BEHIND
    ids, _ = _generator().needle_batch(1, cell.tokens - behind + ANSWER + 1, cell.pairs, 1, seed)
    question, answer = ids[:, -ANSWER - 4 : -ANSWER - 1], ids[0, -ANSWER - 1 : -1].tolist()
    prompt = ids[:, : -ANSWER - 1]
    if not behind:
        return Prompt(prompt, ids[:, :0], answer)
    noise = torch.randint(16, 256, (1, behind), generator=torch.Generator().manual_seed(seed))
    return Prompt(torch.cat([prompt, noise], 1), question, answer)


@dataclass(frozen=True)
class Setting:
    """How one row of the table selects: `changed` goes to `override` (a kind of its own takes a `p` alone), `kind` to
    `Chooser`.

    `like`: the p whose kept rows a rival matches prompt by prompt, and `top_k` on average.
    """

    name: str
    changed: dict[str, Any] = field(default_factory=dict)
    kind: str = "own"
    like: float | None = None


@dataclass(frozen=True)
class Answer:
    """What a model said: the generated tokens, log-probabilities (vocabulary,) of the first one, rows, rows kept."""

    tokens: list[int]
    logprobs: Tensor
    compute: float = 1.0
    rows: tuple[int, ...] = ()
    kept: dict[int, int] = field(default_factory=dict)


class Subject:
    """A checkpoint, compiled once; selections change from call to call.

    `layers` and `window` are fixed by the compilation: another pair needs another subject, after which Dynamo's
    compilations of this one are gone (they would count towards its limit, beyond which it runs eager).
    """

    def __init__(self, name: str, layers: Any, window: str, device: str, inner: str = "eager") -> None:
        torch._dynamo.reset()
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=dtype).to(device).eval()
        self.model.generation_config.pad_token_id = 0
        self.device, self.chooser = device, Chooser()
        options = {"drop_layers": layers, "window": window, "min_tokens": 0, "inner_backend": inner}
        config = PrefillConfig.from_options(options)

        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            return compile_graph(gm, inputs, config, self.chooser.take_over)

        setattr(backend, gating.OURS, True)
        self.model.compile(backend=backend)

    def dense(self, prompt: Prompt) -> Answer:
        """The same compilation inside `disabled()`."""
        with uniprefill_fx.disabled():
            tokens, logprobs, call = self._generate(prompt)
        assert call.reason is not None and call.reason.category is Category.DISABLED, call
        return Answer(tokens, logprobs)

    def dropped(self, prompt: Prompt, setting: Setting, keep: Sequence[int] = ()) -> Answer:
        """With a selection; raises where the prefill did not go through the backend or ran dense."""
        with self._choosing(setting, keep), _override(setting.changed if setting.kind == "own" else {}):
            tokens, logprobs, call = self._generate(prompt)
        if not call.dropped or call.tokens != prompt.first.shape[1]:
            raise RuntimeError(f"{setting.name}: the prompt was to drop tokens, and did not: {call}")
        return Answer(
            tokens,
            logprobs,
            call.compute_fraction,
            call.num_tokens,
            {layer: len(rows) for layer, rows in call.kept_indices.items()},
        )

    @contextmanager
    def _choosing(self, setting: Setting, keep: Sequence[int]) -> Iterator[None]:
        self.chooser.kind, self.chooser.keep, self.chooser.p = setting.kind, list(keep), setting.changed.get("p")
        try:
            yield
        finally:
            self.chooser.kind = "own"

    @torch.inference_mode()
    def _generate(self, prompt: Prompt) -> tuple[list[int], Tensor, uniprefill_fx.LastCall]:
        ids = prompt.first.to(self.device)
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
        steps = 1 if prompt.second.shape[1] else ANSWER
        out, call = watched(lambda: self.model.generate(ids, max_new_tokens=steps, output_logits=True, **options))
        if call is None:
            raise RuntimeError("the prefill ran past the backend: Dynamo gave up compiling it")
        if prompt.second.shape[1]:
            ids = torch.cat([ids, prompt.second.to(self.device)], 1)
            cache = out.past_key_values
            out = self.model.generate(ids, past_key_values=cache, max_new_tokens=ANSWER, output_logits=True, **options)
        logprobs = out.logits[0][0].double().log_softmax(-1)
        return out.sequences[0, ids.shape[1] :].tolist(), logprobs.cpu(), call


def _override(changed: dict[str, Any]) -> Any:
    return uniprefill_fx.override(**changed) if changed else nullcontext()


@dataclass
class Row:
    """Sums over the prompts of one cell under one setting; `lost` are answers that only dense got right.

    `exact` counts whole answers, `right` single tokens of them; `gone` prompts of which rows were really dropped.
    """

    model: str
    layers: str
    window: str
    setting: str
    tokens: int
    pairs: int
    place: str
    n: int = 0
    exact: int = 0
    right: int = 0
    lost: int = 0
    gained: int = 0
    gone: int = 0
    kl_sum: float = 0.0
    kl_max: float = 0.0
    compute_sum: float = 0.0
    kept_sum: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.model, self.layers, self.window, self.setting, self.tokens, self.pairs, self.place)

    def add(self, prompt: Prompt, got: Answer, dense: Answer) -> None:
        exact, was = got.tokens == prompt.answer, dense.tokens == prompt.answer
        kl = max(0.0, float((dense.logprobs.exp() * (dense.logprobs - got.logprobs)).sum()))  # but for rounding
        self.n += 1
        self.exact += exact
        self.right += sum(a == b for a, b in zip(got.tokens, prompt.answer, strict=True))
        self.lost += was and not exact
        self.gained += exact and not was
        self.gone += any(kept < prompt.first.shape[1] for kept in got.kept.values())
        self.kl_sum += kl
        self.kl_max = max(self.kl_max, kl)
        self.compute_sum += got.compute
        for layer, kept in got.kept.items():
            fraction = kept / prompt.first.shape[1]
            self.kept_sum[str(layer)] = self.kept_sum.get(str(layer), 0.0) + fraction
