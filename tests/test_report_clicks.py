"""The report's page, used: slider, presets, text and map, by real clicks in headless Chromium.

What it shows for another p is compared with the eager reference run at that p, not with the package.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_reference import DropSpec, EagerReference
from test_html_report import BLOCK, CHROMIUM, TOKENS, expected_map, needs_chromium
from tiny import tiny_llama, token_ids

import uniprefill_fx
from uniprefill_fx.tools.explain import Explanation

P, LAYERS, ANSWER = (0.9, 0.7), (1, 2), 3


class Tokenizer:
    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"<{i}>" for i in ids)


@pytest.fixture(scope="module")
def report() -> Explanation:
    options: dict[str, Any] = {"p": list(P), "block_size": BLOCK, "last_n": 16, "sink_tokens": 16, "min_tokens": 0}
    return uniprefill_fx.explain(tiny_llama(4), token_ids(TOKENS), answer=ANSWER, drop_layers=list(LAYERS), **options)


def reference(*p: float) -> EagerReference:
    return EagerReference(tiny_llama(4), DropSpec(LAYERS, p=p, block_size=BLOCK, last_n=16, sink_tokens=16))


# Without a browser


def test_answers_are_those_of_the_reference(report: Explanation) -> None:
    ids = token_ids(TOKENS)
    tokens, logits = reference(*P).generate(ids, ANSWER)
    dense_tokens, dense = EagerReference(tiny_llama(4), None).generate(ids, ANSWER)
    found = report.answers
    assert found is not None
    assert (list(found.dropped), list(found.dense)) == (tokens[0].tolist(), dense_tokens[0].tolist())
    got, want = logits[0].double().log_softmax(-1), dense[0].double().log_softmax(-1)
    kl = torch.nn.functional.kl_div(got, want, log_target=True, reduction="sum")
    assert found.kl == pytest.approx(float(kl), abs=1e-6) and found.kl > 1e-4
    assert f"KL of the next token {found.kl:.2g}" in str(report)
    assert not report.refusals and len(report.compilations) == 1, "steps are no part of the report"


def test_answers_need_one_prompt() -> None:
    with pytest.raises(ValueError, match=r"answer=3 needs one prompt of token ids"):
        uniprefill_fx.explain(tiny_llama(2), token_ids(64).reshape(2, 32), answer=3)


def test_scores_are_the_attention_of_the_last_queries(report: Explanation) -> None:
    """Of every block, those that were dropped too: the shares by which the reference kept what it kept."""
    assert report.call is not None
    scores = report.call.block_scores[LAYERS[0]][0].double()
    by_share = (scores / scores.sum()).sort(descending=True, stable=True)
    above = by_share.values.cumsum(0) - by_share.values
    for p in (0.5, 0.9):
        kept = set((reference(p, 1.0).prefill(token_ids(TOKENS)).kept[LAYERS[0]] // BLOCK).tolist())
        assert set(by_share.indices[above < p].tolist()) | {0, TOKENS // BLOCK - 1, TOKENS // BLOCK} == kept


def test_a_notebook_shows_the_page(report: Explanation) -> None:
    shown = report._repr_html_()
    assert repr(report) == str(report)
    assert shown.startswith("<iframe srcdoc=") and shown.count('"') == 6
    page = html.unescape(shown.split('srcdoc="')[1].split('"')[0])
    assert page.startswith("<!DOCTYPE html>") and 'id="whatif"' in page


# With one


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright (pip install playwright)")
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture
def page(chromium: Any, report: Explanation, tmp_path: Path) -> Iterator[Any]:
    report.to_html(tmp_path / "report.html", Tokenizer())
    opened = chromium.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
    opened.goto((tmp_path / "report.html").as_uri())
    assert opened.evaluate("document.body.dataset.error") is None
    yield opened
    opened.close()


def shown_map(page: Any) -> list[list[float]]:
    """By layer and column, the shares that the map shows."""
    script = (
        "[...document.querySelectorAll('.row')].map(r => [...r.querySelectorAll('.cell')].map(c => +c.dataset.kept))"
    )
    return [[round(share, 3) for share in row] for row in page.evaluate(script)]


def shares(kept: torch.Tensor) -> list[float]:
    inside = set(kept.tolist())
    blocks = [range(i, min(i + BLOCK, TOKENS)) for i in range(0, TOKENS, BLOCK)]
    return [round(sum(t in inside for t in block) / len(block), 3) for block in blocks]


def percent(share: float) -> str:
    return f"{share:.0%}"


@needs_chromium
def test_as_it_was(page: Any, report: Explanation) -> None:
    """At first it shows the run: its map, and what was saved as the report counts it."""
    assert report.savings is not None and report.call is not None
    assert shown_map(page) == expected_map(report)
    assert page.inner_text("#compute") == percent(report.savings.flops_saved)
    assert page.inner_text("#cache") == percent(report.savings.kv_saved)
    assert page.inner_text("#left") == percent(1 - len(report.call.kept_indices[2]) / TOKENS)
    assert page.input_value("#p") == str(P[0])
    assert " s instead of " in page.inner_text("#timed")
    assert page.locator("#presets button[aria-pressed=true]").inner_text() == "as it was"


@needs_chromium
@pytest.mark.parametrize("p", [0.5, 0.7, 0.95])
def test_the_slider(page: Any, p: float) -> None:
    """Exactly what the reference keeps behind the first drop; less is never kept by a larger p."""
    page.locator("#p").fill(str(p))
    assert page.inner_text("#chosen") == str(p)
    kept = reference(p, p).prefill(token_ids(TOKENS)).kept[LAYERS[0]]
    shown = shown_map(page)
    assert shown[0] == shown[1] == [1.0] * len(shown[0]) and shown[2] == shares(kept)
    assert all(late <= early for early, late in zip(shown[2], shown[3], strict=True)) and shown[3] != [1.0] * 19


@needs_chromium
def test_keeping_everything_saves_nothing(page: Any) -> None:
    page.locator("#p").fill("1")
    assert [page.inner_text(f"#{name}") for name in ("cache", "left", "time")] == ["0%"] * 3
    assert shown_map(page) == [[1.0] * 19] * 4


@needs_chromium
def test_presets(page: Any, report: Explanation) -> None:
    page.get_by_role("button", name="fast").click()
    assert page.inner_text("#chosen") == "0.8, 0.7"  # layers 1 and 2 of 4 end half and three quarters of the depth
    kept = reference(0.8, 0.7).prefill(token_ids(TOKENS)).kept[LAYERS[0]]
    assert shown_map(page)[2] == shares(kept)
    page.get_by_role("button", name="as it was").click()
    assert shown_map(page) == expected_map(report)


@needs_chromium
def test_the_text_is_shaded_by_the_last_layer_that_sees_it(page: Any, report: Explanation) -> None:
    """And says why: its share of the attention, that it is among the first or last, or that it went."""
    assert report.call is not None
    pieces = page.locator("#text span")
    assert "".join(pieces.all_inner_texts()) == Tokenizer().decode(token_ids(TOKENS)[0].tolist())
    for i in range(pieces.count()):
        tokens = set(range(i * BLOCK, min((i + 1) * BLOCK, TOKENS)))
        last = next((layer for layer in LAYERS if not tokens & set(report.call.kept_indices[layer].tolist())), 3)
        assert pieces.nth(i).get_attribute("data-last") == str(last)
    pieces.nth(0).click()
    reason = page.inner_text("#tip")
    assert "after layer 1: " in reason and "% of the attention, stayed; the first 16 always stay" in reason
    gone = next(i for i in range(pieces.count()) if pieces.nth(i).get_attribute("data-last") == "1")
    pieces.nth(gone).click()
    scores = report.call.block_scores[1][0].double()
    share = f"{100 * float(scores[gone] / scores.sum()):.2f}% of the attention, dropped"
    assert f"last seen by layer 1\nafter layer 1: {share}" == page.inner_text("#tip")


@needs_chromium
def test_answers_are_side_by_side(page: Any, report: Explanation) -> None:
    assert report.answers is not None
    dense, dropped = page.locator(".answers > div").all_inner_texts()
    assert dense.split() == ["dense", "".join(f"<{i}>" for i in report.answers.dense)]
    assert dropped.split() == ["dropped", "".join(f"<{i}>" for i in report.answers.dropped)]
    differ = sum(a != b for a, b in zip(report.answers.dense, report.answers.dropped, strict=True))
    assert page.locator(".answers mark").count() == 2 * differ


@needs_chromium
def test_narrow_and_dark(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    back, ink = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
    light = [sum(map(int, color.removeprefix("rgb(").removesuffix(")").split(","))) for color in (back, ink)]
    assert light[0] < 150 < 600 < light[1]
