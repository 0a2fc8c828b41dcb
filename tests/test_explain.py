"""What `explain()` says, word for word, and what it holds."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from exactness import options_of
from expecttest import TestCase
from tiny import LLAMA, tiny_gemma3, tiny_llama, token_ids

import uniprefill_fx
from uniprefill_fx import StrictError


def explained(model: Any, ids: torch.Tensor | None = None, **options: Any) -> str:
    torch._dynamo.reset()
    report = uniprefill_fx.explain(model, token_ids(300) if ids is None else ids, **(options_of(LLAMA) | options))
    return re.sub(r"passes: \d.*", "passes: ...", str(report))


class Words(torch.nn.Module):
    """No decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(256, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids) * 2


class Hidden(Words):
    @torch.compiler.disable
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids)


def test_no_call_of_another_model() -> None:
    """Where no graph is a prefill, the prefill that an earlier model ran is not shown as this one's."""
    assert "kept 208" in explained(tiny_llama())
    report = uniprefill_fx.explain(Words(), token_ids(300))
    assert report.call is None and report.savings is None and "this prompt" not in str(report)
    assert uniprefill_fx.last_call() is not None


def test_no_graph() -> None:
    with pytest.raises(RuntimeError, match="Dynamo handed over no graph"):
        uniprefill_fx.explain(Hidden(), token_ids(300))


class TestText(TestCase):
    maxDiff = None

    def test_a_drop(self) -> None:
        self.assertExpectedInline(
            explained(tiny_llama()),
            """\
this prompt: 300 tokens, 208 of them left after the last drop; 10% of the tokens saved, averaged over layers
drops after layers [1] (as given, or as published)
layer  attention                      rows in  drop after it
    0  full                               300
    1  full                               300  p=0.7, kept 208
    2  full                               208
compiled: 1 of the prompt in 2 pieces by eager, 0 of other tokens
passes: ...""",
        )

    def test_layers_chosen(self) -> None:
        self.assertExpectedInline(
            explained(tiny_gemma3(), drop_layers="all", p=[0.9, 0.8], min_tokens=500),
            """\
this prompt ran dense: [below-min-tokens] 300 tokens, min_tokens=500 (lower min_tokens to drop here)
planned drops after layers [1, 3] (drop_layers='all': every layer with full attention)
layer  attention                      rows in  drop after it
    0  sliding window 32                  300
    1  full                               300  planned: p=0.9
    2  sliding window 32                  300
    3  full                               300  planned: p=0.8
    4  sliding window 32                  300
compiled: 1 of the prompt, 0 of other tokens
passes: ...""",
        )

    def test_a_refusal(self) -> None:
        self.assertExpectedInline(
            explained(tiny_llama(1), drop_layers="auto"),
            """\
this prompt ran dense: [no-full-attention] no layer to drop after with drop_layers='auto' (dropping needs full causal attention before the last layer)
layer  attention                      rows in  drop after it
    0  full
refused: [no-full-attention] no layer to drop after with drop_layers='auto' (dropping needs full causal attention before the last layer)
compiled: 1 of the prompt, 0 of other tokens
passes: ...""",  # noqa: E501
        )


@pytest.mark.parametrize(
    ("options", "now"),
    [
        ({"p": 1.0}, "lower p (now p=1 after layer 1)"),
        ({"p": "auto", "selection": "top_k", "keep_ratio": 1.0}, "lower keep_ratio (now keep_ratio=1 after layer 1)"),
    ],
)
def test_hardly_anything_dropped(options: dict[str, Any], now: str) -> None:
    """The second line says so and what to lower; no word of it where enough was dropped."""
    done, hint = explained(tiny_llama(), **options).split("\n")[:2]
    assert (
        done
        == "this prompt: 300 tokens, 300 of them left after the last drop; 0% of the tokens saved, averaged over layers"
    )
    stays = "the first {sink_tokens} tokens and the last {last_n} stay in any case".format(**options_of(LLAMA))
    assert hint == f"that is hardly less than dense: to drop more, {now}; {stays}"


def test_it_holds_the_plan_and_the_times_and_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    report = uniprefill_fx.explain(tiny_llama(2), token_ids(300), **(options_of(LLAMA) | {"drop_layers": [0]}))
    assert capsys.readouterr().out == ""
    seconds = report.decoder.seconds
    order = ["find attention", "retrace", "plan", "drop tokens", "propagate fakes", "split", "lower attention"]
    assert [name for name in seconds if name in order] == order
    assert all(s > 0 for s in seconds.values())


def test_later_tokens_are_told_apart() -> None:
    torch._dynamo.reset()
    model, ids = tiny_llama(2), token_ids(300)
    with torch.inference_mode():
        cache = model(ids).past_key_values
    text = explained(model, token_ids(5), call={"past_key_values": cache}, drop_layers=[0])
    assert "compiled: 0 of the prompt, 1 of other tokens" in text


def test_strict_raises_the_first_reason() -> None:
    torch._dynamo.reset()
    model = tiny_llama(is_causal=False)
    with pytest.raises(StrictError, match=r"^layer 0: \[non-causal-attention\]"):
        uniprefill_fx.explain(model, token_ids(300), **(options_of(LLAMA) | {"strict": True}))
