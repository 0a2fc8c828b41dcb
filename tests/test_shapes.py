"""The rewritten graph: its shapes, its operations, and that nothing in it is as large as tokens by tokens."""

from __future__ import annotations

import collections
import re
import unittest
from typing import Any

import pytest
import torch
from checkpoints import TWO_LAYERS, fresh, needle_ids
from eager_reference import DropSpec
from exactness import SHARP, options_of
from expecttest import TestCase
from graphs import assert_no_square, operation, tensors, value
from tiny import tiny_gemma3, tiny_llama, token_ids
from torch import fx
from transformers_version import PLAIN_CAUSAL

import uniprefill_fx

SPEC = DropSpec((0,), p=0.7, block_size=16, last_n=16, sink_tokens=16)
SHOWN = frozenset(
    "embedding linear scaled_dot_product_attention le attention score select compact restore bind_positions cat".split()
)


def listing(gm: fx.GraphModule) -> str:
    """One line for each operation that shows what the pass does; lengths are called N, K1, K2 as they appear."""
    names: dict[str, str] = {}

    def renamed(size: Any) -> str:
        return re.sub(r"\b[su]\d+\b", lambda m: names.setdefault(m[0], f"K{len(names)}" if names else "N"), str(size))

    lines = []
    for node in gm.graph.nodes:
        shapes = ["(" + ", ".join(map(renamed, t.shape)) + ")" for t in tensors(value(node))]
        if operation(node) in SHOWN:
            lines.append(f"{operation(node)} {' '.join(shapes)}")
    return "\n".join(lines)


def counts(gm: fx.GraphModule) -> dict[str, int]:
    return dict(collections.Counter(operation(n) for n in gm.graph.nodes if n.op.startswith("call_")))


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["last logits", "all logits"])
def test_no_tensor_of_tokens_by_tokens(checkpoint: str, full: bool) -> None:
    options = options_of(DropSpec(TWO_LAYERS[checkpoint], p=(0.9, 0.8), **SHARP))
    call = {"logits_to_keep": 0 if full else 1}
    report = uniprefill_fx.explain(fresh(checkpoint), needle_ids(300), call=call, **options)
    assert report.after is not None and report.call is not None and report.call.dropped
    assert len([n for n in report.after.graph.nodes if operation(n) == "select"]) == 2
    assert_no_square(report.after)
    if not (PLAIN_CAUSAL and checkpoint == "needle-llama"):
        with pytest.raises(AssertionError):  # the test sees what it looks for: the model's own masks
            assert_no_square(report.before)


CALLS: list[dict[str, Any]] = [
    {},
    {"output_hidden_states": True},
    {"attention_mask": torch.ones(1, 300)},
    {"use_cache": False, "position_ids": torch.arange(300)[None]},
]


@pytest.mark.parametrize(
    "call", [CALLS[0], *(pytest.param(call, marks=pytest.mark.slow) for call in CALLS[1:3]), CALLS[3]], ids=list
)
def test_no_tensor_of_tokens_by_tokens_in_other_calls(call: dict[str, Any]) -> None:
    report = uniprefill_fx.explain(
        tiny_gemma3(), token_ids(300), call=call, **options_of(DropSpec((1, 3), p=(0.9, 0.8), **SHARP))
    )
    rewritten = [c.after for c in report.compilations if c.after is not None]
    assert report.call is not None and report.call.dropped and len(rewritten) == 1
    assert_no_square(rewritten[0])
    assert report.after is rewritten[0]  # the report shows the graph that drops, wherever Dynamo broke the model


def test_explain_asks_for_the_last_logits_only() -> None:
    report = uniprefill_fx.explain(tiny_llama(2), token_ids(300), **options_of(SPEC))
    assert report.after is not None and "restore" not in counts(report.after)


@unittest.skipIf(PLAIN_CAUSAL, "a graph without a mask, of another rotary embedding")
class TestTwoLayers(TestCase):
    """A Llama of two layers that drops after the first one, before and after."""

    maxDiff = None

    def setUp(self) -> None:
        super().setUp()
        torch._dynamo.reset()
        call = {"logits_to_keep": 1}
        self.report = uniprefill_fx.explain(tiny_llama(2), token_ids(300), call=call, **options_of(SPEC))
        assert self.report.after is not None
        self.after = self.report.after

    def test_before(self) -> None:
        self.assertExpectedInline(
            listing(self.report.before),
            """\
embedding (1, N, 64)
le (1, 1, N, N)
cat (1, N, 16)
linear (1, N, 64)
linear (1, N, 32)
linear (1, N, 32)
cat (1, 4, N, 16)
cat (1, 2, N, 16)
bind_positions (1, N)
scaled_dot_product_attention (1, 4, N, 16)
linear (1, N, 64)
linear (1, N, 128)
linear (1, N, 128)
linear (1, N, 64)
linear (1, N, 64)
linear (1, N, 32)
linear (1, N, 32)
cat (1, 4, N, 16)
cat (1, 2, N, 16)
bind_positions (1, N)
scaled_dot_product_attention (1, 4, N, 16)
linear (1, N, 64)
linear (1, N, 128)
linear (1, N, 128)
linear (1, N, 64)
linear (1, 1, 256)""",
        )

    def test_after(self) -> None:
        self.assertExpectedInline(
            listing(self.after),
            """\
embedding (1, N, 64)
cat (1, N, 16)
linear (1, N, 64)
linear (1, N, 32)
linear (1, N, 32)
cat (1, 4, N, 16)
cat (1, 2, N, 16)
attention (1, 4, N, 16)
score (1, ((N + 15)//16))
select (1, K1) (1, 2)
compact (1, K1)
compact (1, 4, K1, 16)
linear (1, K1, 64)
compact (1, K1, 64)
linear (1, K1, 128)
linear (1, K1, 128)
linear (1, K1, 64)
linear (1, K1, 64)
linear (1, K1, 32)
linear (1, K1, 32)
compact (1, 1, K1, 16)
cat (1, 4, K1, 16)
compact (1, 1, K1, 16)
cat (1, 2, K1, 16)
attention (1, 4, K1, 16)
linear (1, K1, 64)
linear (1, K1, 128)
linear (1, K1, 128)
linear (1, K1, 64)
linear (1, 1, 256)""",
        )

    def test_operations(self) -> None:
        before, after = counts(self.report.before), counts(self.after)
        for name in ("score", "select", "compact", "restore", "attention"):
            self.assertNotIn(name, before)
        self.assertEqual(before["scaled_dot_product_attention"], after["attention"])
        self.assertNotIn("scaled_dot_product_attention", after)
        self.assertNotIn("le", after)  # the mask is gone
        self.assertNotIn("logical_view", after)
        for name in ("embedding", "linear", "silu", "rsqrt", "matmul"):  # the network itself is the same
            self.assertEqual(before[name], after[name])
        self.assertEqual((after["score"], after["select"]), (1, 1))
        # positions, attention output, residual stream, cos and sin
        self.assertEqual(after["compact"], 5)
        self.assertNotIn("restore", after)  # the last rows are all that is looked at

    def test_all_logits_restore_once(self) -> None:
        call = {"logits_to_keep": 0}
        report = uniprefill_fx.explain(tiny_llama(2), token_ids(300), call=call, **options_of(SPEC))
        assert report.after is not None
        self.assertEqual(counts(report.after)["restore"], 1)

    def test_p_of_one_and_short_prompts_have_the_same_graph(self) -> None:
        options = options_of(SPEC) | {"p": 1.0}
        report = uniprefill_fx.explain(tiny_llama(2), token_ids(20), call={"logits_to_keep": 1}, **options)
        assert report.after is not None
        self.assertEqual(listing(report.after), listing(self.after))
