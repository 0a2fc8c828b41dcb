"""Drawn cases against the independent references: 20 by default, 200 with `-m slow`.

A draw is one compiled model and the options it is compiled with; several prompts run through it, each with its own
length, block size, forced rows and amount, which `uniprefill_fx.override` changes without a compilation. Seeds are
fixed: a failing test names the draw that failed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from arch_builders import ARCHS
from arch_reference import StockReference
from eager_reference import DropSpec, EagerReference
from exactness import TIE, assert_near, largest, note, options_of
from tiny import tiny_gemma3, tiny_llama
from torch import Tensor

import uniprefill_fx

PROMPTS = 5  # a compiled model
QUICK, MANY = 4, 40  # draws
CHEAP = ("qwen2", "gpt2", "qwen3", "falcon", "phi3", "olmo2", "granite", "gpt_neox", "lfm2", "gemma2_sdpa")
UNBATCHED = ("falcon",)  # takes no position ids, which padding needs


@dataclass(frozen=True)
class Draw:
    """One model as it is compiled.

    Attributes:
        build: makes the model. full: its full-attention layers. arch: its name, "" for those of `tiny`.
        drops: the drop layers. window: by position or by index. inputs: "ids", "int32 ids" or "embeddings".
        shift: of the position ids that are given; None: none are.
    """

    build: Callable[[], Any]
    arch: str
    drops: tuple[int, ...]
    window: str
    inputs: str
    shift: int | None

    def __str__(self) -> str:
        name = self.arch or self.build.func.__name__  # type: ignore[attr-defined]
        return f"{name} drops {self.drops} window={self.window} {self.inputs} shift={self.shift}"


@dataclass(frozen=True)
class Prompt:
    """One call of it: a prompt, or a left-padded batch of several lengths."""

    spec: DropSpec
    lengths: tuple[int, ...]
    seed: int


def draw_model(rng: random.Random, kind: str) -> Draw:
    window = rng.choice(["position", "index"]) if kind == "gemma3" else "position"
    inputs = rng.choice(["ids", "ids", "int32 ids", "embeddings"])
    shift = rng.choice([None, None, 0, 1000])
    if kind in ("llama", "gemma3"):
        shift = (
            None if shift is None else 0
        )  # their reference counts from 0, and rotary angles of 1000 are rounded elsewhere
    build: Callable[[], Any]
    if kind == "llama":
        layers = rng.choice([2, 3])
        build, full = partial(tiny_llama, layers), tuple(range(layers))
    elif kind == "gemma3":
        layers = rng.choice([3, 4])
        build, full = partial(tiny_gemma3, rng.choice([16, 32, 48]), layers), tuple(range(1, layers, 2))
    else:
        build, full = ARCHS[kind].build, ARCHS[kind].drops
        shift = None if kind in ("gpt2", "falcon") else shift  # learned positions end at 1024; Falcon takes none
        inputs = "ids" if kind == "lfm2" else inputs
    drops = tuple(sorted(rng.sample(full, rng.randint(1, min(2, len(full))))))
    return Draw(build, "" if kind in ("llama", "gemma3") else kind, drops, window, inputs, shift)


def draw_prompt(rng: random.Random, draw: Draw) -> Prompt:
    """Lengths over three decades, and near the sizes that matter."""
    block_size, last_n, sinks = rng.choice([1, 5, 8, 16, 32]), rng.choice([1, 7, 16, 33]), rng.choice([0, 4, 16, 30])
    edge = rng.choice([last_n, last_n + sinks, block_size * rng.randint(1, 20)]) + rng.choice([-1, 0, 1])
    length = max(2, rng.choice([edge, round(2 ** rng.uniform(1, 9.3))] + [rng.randint(100, 600)] * 3))
    amounts = tuple(round(rng.uniform(0.3, 0.95), 3) for _ in draw.drops)
    amount: dict[str, Any] = {"p": amounts}
    if rng.random() < 0.3:
        amount = {"selection": "top_k", "keep_ratio": tuple(round(a / 2, 3) for a in amounts)}
    spec = DropSpec(draw.drops, block_size=block_size, last_n=last_n, sink_tokens=sinks, window=draw.window, **amount)
    others = rng.choice([0, 0, 1, 2]) if draw.arch not in UNBATCHED else 0
    lengths = (length, *(rng.randint(2, 400) for _ in range(others)))
    return Prompt(spec, lengths, rng.randrange(1 << 30))


@dataclass
class Wanted:
    """What the reference says of one prompt."""

    logits: Tensor
    kept: dict[int, Tensor]
    tie: bool


Reference = Callable[[Tensor, DropSpec], Wanted]


def reference_of(draw: Draw, untouched: Any) -> Reference:
    """The layer-by-layer reference for the models of `tiny`, the stock model with hidden keys for the others."""
    if draw.arch:
        stock = StockReference(ARCHS[draw.arch])

        def run(ids: Tensor, spec: DropSpec) -> Wanted:
            want = stock.run(ids, ids.shape[1], spec, **positions_of(draw, ids))
            near = [min(s.margin, s.gap) for s in want.selections.values()]
            return Wanted(want.logits, want.kept, min(near) <= TIE)

    else:

        def run(ids: Tensor, spec: DropSpec) -> Wanted:
            want = EagerReference(untouched, spec).prefill(ids)
            near = [*want.margins.values(), *want.gaps.values()]
            return Wanted(want.last_logits[:, -1], want.kept, min(near) <= TIE)

    return run


def positions_of(draw: Draw, ids: Tensor) -> dict[str, Any]:
    if draw.shift is None:
        return {}
    return {"position_ids": torch.arange(draw.shift, draw.shift + ids.shape[1])[None]}


def call_of(draw: Draw, prompts: list[Tensor], untouched: Any) -> dict[str, Any]:
    call: dict[str, Any] = {"logits_to_keep": 1} | positions_of(draw, prompts[0])
    ids = prompts[0]
    if len(prompts) > 1:
        longest = max(p.shape[1] for p in prompts)
        ids, mask = torch.zeros(len(prompts), longest, dtype=torch.int64), torch.zeros(len(prompts), longest).long()
        for row, prompt in enumerate(prompts):
            ids[row, longest - prompt.shape[1] :], mask[row, longest - prompt.shape[1] :] = prompt[0], 1
        positions = (mask.cumsum(1) - 1).clamp(min=0) + (draw.shift or 0)
        call |= {"attention_mask": mask, "position_ids": positions}
    if draw.inputs == "embeddings":
        return call | {"inputs_embeds": untouched.get_input_embeddings()(ids)}
    return call | {"input_ids": ids.int() if draw.inputs == "int32 ids" else ids}


def without_tie(prompt: Prompt, row: int, reference: Reference) -> tuple[Tensor, Wanted] | None:
    """Tokens for one request on which no cut is a matter of rounding; None when eight in a row are ties."""
    for seed in range(prompt.seed, prompt.seed + 8):
        generator = torch.Generator().manual_seed(seed + 1000 * row)
        ids = torch.randint(3, 256, (1, prompt.lengths[row]), generator=generator)
        want = reference(ids, prompt.spec)
        if not want.tie:
            return ids, want
    return None


@torch.inference_mode()
def check(model: Any, untouched: Any, draw: Draw, prompt: Prompt, reference: Reference) -> bool:
    """Exactness of one call; whether rows were dropped."""
    found = [without_tie(prompt, row, reference) for row in range(len(prompt.lengths))]
    requests = [pair for pair in found if pair is not None]
    if len(requests) < len(found):
        return False  # prompts of a few tokens, most of them forced
    prompts, wants = [ids for ids, _ in requests], [want for _, want in requests]
    spec = prompt.spec
    amount = {"p": spec.p} if spec.selection == "top_p" else {"keep_ratio": spec.keep_ratio}
    before = uniprefill_fx.last_call()
    with uniprefill_fx.override(block_size=spec.block_size, last_n=spec.last_n, sink_tokens=spec.sink_tokens, **amount):
        got = model(**call_of(draw, prompts, untouched)).logits[:, -1]
    done = uniprefill_fx.last_call()
    assert done is not None and done is not before
    dense = torch.cat([untouched(ids, **positions_of(draw, ids)).logits[:, -1] for ids in prompts])
    if done.reason is not None:  # a first prompt as long as some size of the model: tracing takes one for the other
        assert done.reason.category.value == "token-axis-specialised" and max(prompt.lengths) <= 64, str(done)
        assert_near(got, dense)
        return False
    assert done.tokens == sum(prompt.lengths)
    for row, want in enumerate(wants):
        assert sorted(done.kept_indices) == sorted(want.kept)
        for layer, rows in want.kept.items():
            own = done.kept_indices[layer][slice(*done.cu_seqlens[layer][row : row + 2])]
            padding = max(prompt.lengths) - prompt.lengths[row]
            assert torch.equal(own - padding, rows), f"kept set of request {row} after layer {layer}"
    want_logits = torch.cat([want.logits for want in wants])
    assert_near(got, want_logits)
    kept = {layer: len(rows) for layer, rows in done.kept_indices.items()}
    note(
        {"draw": str(draw), "tokens": prompt.lengths, "kept": kept, "block_size": spec.block_size}
        | {"last_n": spec.last_n, "sinks": spec.sink_tokens, "amount": amount, "seed": prompt.seed}
        | {"error": largest(got - want_logits), "change": largest(got - dense)}
    )
    return min(kept.values()) < sum(prompt.lengths)


def run_draws(first: int, count: int, kinds: tuple[str, ...]) -> None:
    dropped = []
    for seed in range(first, first + count):
        torch._dynamo.reset()
        rng = random.Random(seed)
        draw = draw_model(rng, kinds[seed % len(kinds)])
        model, untouched = draw.build(), draw.build()
        spec = DropSpec(draw.drops, window=draw.window)
        model.compile(backend="uniprefill", options=options_of(spec))
        reference = reference_of(draw, untouched)
        for _ in range(PROMPTS):
            prompt = draw_prompt(rng, draw)
            try:
                dropped.append(check(model, untouched, draw, prompt, reference))
            except Exception as error:
                raise AssertionError(f"draw {seed}: {draw}, {prompt}") from error
    assert sum(dropped) >= len(dropped) // 2, "too few of the draws dropped a row"


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_a_draw() -> None:
    run_draws(0, 1, ("gemma3",))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(MANY // QUICK))
def test_two_hundred_draws(part: int) -> None:
    run_draws(100 + part * QUICK, QUICK, ("llama", "gemma3", *CHEAP))
