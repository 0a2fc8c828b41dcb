"""The order of the passes, and what happens when one of them fails."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ROOT
from exactness import options_of
from tiny import LLAMA, tiny_llama, token_ids

import uniprefill_fx
from uniprefill_fx import StrictError, pipeline
from uniprefill_fx.errors import Category

OPTIONS = options_of(LLAMA) | {"drop_layers": [0]}
PACKAGE = ROOT / "uniprefill_fx"
# A package of the left column may import only from those of the right one, besides itself and the shared bottom.
BOTTOM = {"errors", "config", "option_checks", "torch_internals", "specs"}
BELOW = {
    "kernels": set(),
    "ops": {"kernels"},
    "passes": {"ops"},
    "lowering": {"ops", "passes", "kernels"},
    "runtime": {"ops", "passes", "lowering"},
    "frontends": {"ops", "passes", "runtime"},
    "tools": {"kernels", "ops", "passes", "lowering", "runtime", "pipeline", "api", "frontends"},
}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def imports_of(path: Path) -> set[str]:
    """The parts of the package that a file imports when it is loaded or run."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom) and node.module == "uniprefill_fx":
            names = [f"uniprefill_fx.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("uniprefill_fx.")}
    return found


@pytest.mark.parametrize("package", BELOW)
def test_no_import_runs_back_up(package: str) -> None:
    allowed = BELOW[package] | BOTTOM | {package}
    for path in sorted((PACKAGE / package).rglob("*.py")):
        assert imports_of(path) <= allowed, f"{path.relative_to(ROOT)} imports {imports_of(path) - allowed}"


def test_at_most_ten_modules_at_the_top_and_none_over_300_lines() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 10
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        assert len(path.read_text().splitlines()) <= 300, path


def test_the_passes_run_in_the_order_that_is_written() -> None:
    report = uniprefill_fx.explain(tiny_llama(2), token_ids(300), **OPTIONS)
    steps = [name for name, _ in (*pipeline.NORMALIZE, *pipeline.ANALYZE, *pipeline.REWRITE)]
    assert list(report.decoder.seconds) == [*steps, "lower attention"]
    assert report.call is not None and report.call.dropped


def fail(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("made to fail")


@pytest.mark.parametrize("step", ["drop_tokens", "propagate", "split_at_selections"])
def test_a_failure_leaves_the_model_dense_with_a_reason(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_llama(2), token_ids(300)
    with torch.inference_mode():
        want = model(ids, logits_to_keep=1).logits
    monkeypatch.setattr(pipeline, step, fail)
    with pytest.warns(UserWarning, match="made to fail"):
        report = uniprefill_fx.explain(model, ids, **OPTIONS)
    assert report.refusals[-1].category is Category.FAILURE and "made to fail" in str(report)
    assert report.call is not None and not report.call.dropped
    compiled = torch.compile(model, backend="uniprefill", options=OPTIONS | {"inner_backend": "eager"})
    with torch.inference_mode(), pytest.warns(UserWarning, match="made to fail"):
        torch.testing.assert_close(compiled(ids, logits_to_keep=1).logits, want, rtol=1e-4, atol=1e-4)


def test_a_dense_graph_that_cannot_be_lowered_keeps_the_attention_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of its attention was replaced when it failed; the graph that runs has none of that."""
    model, ids = tiny_llama(2), token_ids(300)
    with torch.inference_mode():
        want = model(ids, logits_to_keep=1).logits
    lower = pipeline.lower_attention

    def half(gm: torch.fx.GraphModule, attention: Any, with_buffers: bool) -> int:
        lower(gm, attention[:1], with_buffers)
        return fail()

    monkeypatch.setattr(pipeline, "lower_attention", half)
    with pytest.warns(UserWarning, match="made to fail"):
        report = uniprefill_fx.explain(model, ids, **(OPTIONS | {"min_tokens": 500}))
    assert report.refusals[-1].category is Category.FAILURE
    compiled = torch.compile(model, backend="uniprefill", options=OPTIONS | {"min_tokens": 500})
    with torch.inference_mode(), pytest.warns(UserWarning, match="made to fail"):
        torch.testing.assert_close(compiled(ids, logits_to_keep=1).logits, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("step", ["drop_tokens", "lower_attention"])
def test_strict_raises_what_failed(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, step, fail)
    with pytest.raises(Exception, match="made to fail"):
        uniprefill_fx.explain(tiny_llama(2), token_ids(300), **(OPTIONS | {"strict": True}))


def test_strict_names_every_reason() -> None:
    with pytest.raises(StrictError, match=r"layer 0: \[non-causal.*; layer 1: \[non-causal"):
        uniprefill_fx.explain(tiny_llama(2, is_causal=False), token_ids(300), **(OPTIONS | {"strict": True}))
