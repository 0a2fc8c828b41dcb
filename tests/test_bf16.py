"""Whole prefills of a checkpoint in bfloat16: what each drop scores and keeps, against float64 from the same operands.

bfloat16 rounds every layer before a drop, so that no other run of the model has the same queries and keys. Those that
the drop was given are read off as it runs, and softmax, sums and the choice are made again from them. Scores that
differ by rounding may put a block on the other side of the cut, or two blocks in the other order: each block is held to
what every order within the rounding says of it. On a card, the Triton kernels must have run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkpoints import TWO_LAYERS, fresh, needle_ids
from eager_reference import DropSpec
from exactness import SHARP, options_of
from torch import Tensor, fx

from uniprefill_fx.backend import Compilation
from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.passes.operator_internals import schema_of
from uniprefill_fx.runtime.last_call import watched
from uniprefill_fx.runtime.prefill import Prefill
from uniprefill_fx.tools.isolated import isolated

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
NAME = "needle-gemma3"
ROUNDING = 1e-4  # of a score: float32 sums of exponentials of products of bfloat16, which are exact
KERNELS = ("_block_lse_kernel", "_row_lse_kernel", "_combine_kernel", "_mark_kernel", "_write_kernel")
CASES = [
    pytest.param("cpu", "eager", "float32", id="cpu"),
    pytest.param("cuda", "eager", "float32", marks=pytest.mark.gpu, id="cuda-eager"),
    pytest.param("cuda", "inductor", "float32", marks=pytest.mark.gpu, id="cuda-inductor"),
    pytest.param("cuda", "eager", "float8_e4m3", marks=pytest.mark.gpu, id="cuda-fp8"),
]


class Reading(fx.Interpreter):
    """Runs a selection and keeps the arguments, by name, and the results of the package's ops."""

    def __init__(self, gm: fx.GraphModule, seen: list[dict[str, Any]]) -> None:
        super().__init__(gm)
        self.seen = seen

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        if target in (torch.ops.uniprefill.score.default, torch.ops.uniprefill.select.default):
            names = [argument.name for argument in schema_of(target).arguments]
            self.seen.append(dict(zip(names, args, strict=False)) | kwargs | {"result": result})
        return result


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each Triton kernel was launched."""
    jit = pytest.importorskip("triton.runtime.jit")
    counts: Counter[str] = Counter()
    run = jit.JITFunction.run

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        counts[self.fn.__name__] += 1
        return run(self, *args, **options)

    monkeypatch.setattr(jit.JITFunction, "run", counted)
    yield counts


def exact_scores(q: Tensor, k: Tensor, scale: float, last_n: int, block_size: int) -> Tensor:
    """The mass that the last queries give to each block of keys: q (1, heads, N, d), k (1, kv_heads, N, d)."""
    tokens, groups = q.shape[2], q.shape[1] // k.shape[1]
    keys = k[0].double().cpu().repeat_interleave(groups, 0)
    logits = q[0, :, -last_n:].double().cpu() @ keys.mT * scale
    n = logits.shape[1]
    hidden = torch.ones(n, tokens, dtype=torch.bool).triu(tokens - n + 1)
    mass = logits.masked_fill(hidden, -torch.inf).softmax(-1).sum((0, 1))
    blocks = -(-tokens // block_size)
    return torch.nn.functional.pad(mass, (0, blocks * block_size - tokens)).view(blocks, block_size).sum(1)


def decided(scores: Tensor, p: float, rounding: float) -> tuple[Tensor, Tensor]:
    """Blocks that are kept, and that are not, whatever the order of scores which differ by `rounding` or less."""
    limit, slack = p * scores.sum(), rounding * scores.sum()
    sure, out = torch.zeros(len(scores), dtype=torch.bool), torch.zeros(len(scores), dtype=torch.bool)
    for b, score in enumerate(scores):
        others = torch.arange(len(scores)) != b
        most = scores[others & (scores > score * (1 - 2 * rounding))].sum()
        least = scores[others & (scores > score * (1 + 2 * rounding))].sum()
        sure[b], out[b] = most + slack < limit, least - slack >= limit
    return sure, out


def test_the_rule_of_what_is_decided() -> None:
    """By hand: of 12, p = 0.5 lets a block stay that has less than 6 above it; each 3 has 4 or 7."""
    sure, out = decided(torch.tensor([4.0, 3.0, 3.0, 1.0, 1.0], dtype=torch.float64), 0.5, 1e-6)
    assert sure.tolist() == [True, False, False, False, False] and out.tolist() == [False, False, False, True, True]
    sure, out = decided(torch.tensor([4.0, 3.1, 2.9, 1.0, 1.0], dtype=torch.float64), 0.5, 1e-6)
    assert sure.tolist() == [True, True, False, False, False] and out.tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("device, inner, score_dtype", CASES)
def test_each_drop_keeps_what_its_operands_say(
    device: str, inner: str, score_dtype: str, launches: Counter[str]
) -> None:
    fp8 = score_dtype == "float8_e4m3"
    spec = DropSpec(TWO_LAYERS[NAME], p=(0.9, 0.8), **SHARP)
    options = options_of(spec, inner_backend=inner, score_dtype=score_dtype)
    compilations: list[Compilation] = []
    run = isolated(fresh(NAME).to(device, torch.bfloat16), PrefillConfig.from_options(options), compilations.append)
    ids = needle_ids(1111 if device == "cpu" else 2049).to(device)
    with torch.inference_mode():
        run(ids, logits_to_keep=1)
        prefill = compilations[-1].run
        assert isinstance(prefill, Prefill)
        seen: list[dict[str, Any]] = []
        prefill.steps = [(piece, Reading(piece.gm, seen).run if piece.selection else r) for piece, r in prefill.steps]
        launches.clear()
        out, call = watched(lambda: run(ids, logits_to_keep=1))
    assert call is not None and call.dropped and out.logits.isfinite().all()
    assert len(seen) == 2 * len(spec.drop_layers)
    positions = torch.arange(ids.shape[1])
    for layer, scored, selected in zip(spec.drop_layers, seen[::2], seen[1::2], strict=True):
        block_size, p = selected["block_size"], selected["p"]
        assert scored["q"].dtype == torch.bfloat16
        scale = scored["q"].shape[-1] ** -0.5 if scored["scale"] is None else scored["scale"]
        exact = exact_scores(scored["q"], scored["k"], scale, scored["last_n"], block_size)
        got = scored["result"][0].double().cpu()
        rounding = ROUNDING
        if fp8:  # the choice is held to the scores themselves, which are near the exact ones
            assert 1e-5 < (got - exact).norm() / exact.norm() < 0.05
            exact = got
        else:
            torch.testing.assert_close(got, exact, rtol=rounding, atol=rounding * float(exact.mean()))
        tokens = len(positions)
        row = torch.arange(tokens)
        forced = (row < selected["sink_tokens"]) | (row >= tokens - selected["last_n"])
        sure, out_of_it = decided(exact, p, rounding)
        kept = torch.zeros(tokens, dtype=torch.bool)
        kept[selected["result"][0][0].cpu()] = True
        assert bool(kept[sure[row // block_size] | forced].all()), f"layer {layer} dropped what must stay"
        assert not bool(kept[out_of_it[row // block_size] & ~forced].any()), f"layer {layer} kept what must go"
        assert sure.any() and out_of_it.any() and int((~sure & ~out_of_it).sum()) <= 2, (sure, out_of_it)
        positions = positions[kept]
        assert torch.equal(call.kept_indices[layer].cpu(), positions)
    if device == "cuda":
        expected = dict.fromkeys(KERNELS, len(spec.drop_layers))
        assert {name: launches[name] for name in KERNELS} == expected
        assert launches["_quantise_queries_kernel"] == (len(spec.drop_layers) if fp8 else 0)
        assert launches["_attention_kernel"] > 0  # windows
