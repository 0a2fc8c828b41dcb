"""Options of the selection that change from call to call, by one compilation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from eager_reference import DropSpec, EagerReference
from exactness import assert_differs, assert_dropped, assert_near, assert_same_rows, options_of
from tiny import tiny_llama, token_ids
from torch._dynamo.utils import counters

import uniprefill_fx
from uniprefill_fx import OptionError, override
from uniprefill_fx.config import PRESETS
from uniprefill_fx.runtime.overrides import as_compiled
from uniprefill_fx.tools.html_report import contents

SPEC = DropSpec((1, 2), p=0.9, block_size=16, last_n=16, sink_tokens=16)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    torch._dynamo.reset()
    compiled = tiny_llama(4)
    compiled.compile(backend="uniprefill", options=options_of(SPEC))
    yield compiled
    torch._dynamo.reset()


def run(model: Any, length: int = 300) -> tuple[Any, uniprefill_fx.LastCall]:
    with torch.inference_mode():
        out = model(token_ids(length), logits_to_keep=1).logits
    call = uniprefill_fx.last_call()
    assert call is not None
    return out, call


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "p": ({"p": 0.7}, {"p": 0.7}),
    "p by layer": ({"p": [0.9, 0.5]}, {"p": (0.9, 0.5)}),
    "top_k": ({"keep_ratio": 0.5}, {"selection": "top_k", "keep_ratio": 0.5}),
    "block size": ({"p": 0.7, "block_size": 32}, {"p": 0.7, "block_size": 32}),
    "queries and sinks": ({"last_n": 40, "sink_tokens": 5}, {"last_n": 40, "sink_tokens": 5}),
}


@pytest.mark.parametrize(("options", "spec"), CHANGES.values(), ids=CHANGES)
def test_equals_a_model_compiled_so(model: Any, options: dict[str, Any], spec: dict[str, Any]) -> None:
    """The rows and logits are the reference's with those options; afterwards those of the compilation are back."""
    ids, (before, plain) = token_ids(300), run(model)
    assert_same_rows(plain, EagerReference(tiny_llama(4), SPEC).prefill(ids), 300)
    compiled = counters["stats"]["unique_graphs"]
    want = EagerReference(tiny_llama(4), replace(SPEC, **spec)).prefill(ids)
    with override(**options):
        got, call = run(model)
    assert_dropped(call)
    assert_same_rows(call, want, 300)
    assert_near(got, want.last_logits)
    assert_differs(got, before)
    assert list(call.changed) == list(options) and not plain.changed
    again, restored = run(model)
    assert torch.equal(again, before) and restored.num_tokens == plain.num_tokens
    assert counters["stats"]["unique_graphs"] == compiled


def test_auto_is_the_preset_beside_it_or_the_default_one(model: Any) -> None:
    """Whatever the model was compiled with. Its drop layers end 2 and 3 quarters of it."""
    found = {}
    for options, name in (({}, "quality"), ({"preset": "fast"}, "fast")):
        with override(p="auto", **options):
            found[name] = run(model)[1].num_tokens
        with override(p=[PRESETS[name].p(0.5), PRESETS[name].p(0.75)]):
            assert found[name] == run(model)[1].num_tokens
    assert found["fast"] < found["quality"] and found["quality"] != run(model)[1].num_tokens


def test_inner_values_win(model: Any) -> None:
    with override(p=0.5, block_size=32):
        with override(keep_ratio=0.25):
            assert run(model)[1].changed == {"block_size": 32, "keep_ratio": 0.25}
        with override(p=1.0):
            assert run(model)[1].num_tokens == (300,) * 4
        assert run(model)[1].changed == {"p": 0.5, "block_size": 32}


def test_explain_shows_it() -> None:
    """The amount of the call stands at its layer, in the table and on the page."""
    with override(keep_ratio=0.25):
        report = uniprefill_fx.explain(tiny_llama(), token_ids(300), **options_of(replace(SPEC, drop_layers=(1,))))
    assert "for this call: keep_ratio=0.25" in str(report) and "keep_ratio=0.25, kept " in str(report)
    shown = contents(report)
    assert shown["layers"][1]["drop"].startswith("keep_ratio=0.25: ")
    assert "keep_ratio=0.25" in shown["about"] and "p=0.9" not in str(report) + shown["about"]
    torch._dynamo.reset()


def test_threads_enter_their_own(model: Any) -> None:
    """A thread that is started inside does not see it, and what one enters reaches no other."""
    plain = run(model)[1].num_tokens
    with override(p=0.5), ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, model).result()[1].num_tokens == plain
        assert run(model)[1].num_tokens != plain
        with override(p=1.0):
            assert run(model)[1].num_tokens == (300,) * 4


def test_tasks_take_turns(model: Any) -> None:
    """Two asyncio tasks whose contexts overlap in time."""

    async def task(p: float) -> tuple[int, ...]:
        with override(p=p):
            await asyncio.sleep(0)
            rows = run(model)[1].num_tokens
            await asyncio.sleep(0)
            assert run(model)[1].num_tokens == rows
        return rows

    async def both() -> tuple[tuple[int, ...], tuple[int, ...]]:
        return await asyncio.gather(task(0.5), task(1.0))

    few, all_rows = asyncio.run(both())
    assert all_rows == (300,) * 4 and few[-1] < 300


def test_an_error_inside_leaves_nothing_behind(model: Any) -> None:
    with pytest.raises(KeyError), override(p=0.5):
        raise KeyError
    assert not run(model)[1].changed


def test_as_compiled(model: Any) -> None:
    with override(p=0.5), as_compiled():
        assert not run(model)[1].changed


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"drop_layers": [1]}, "option 'drop_layers': got [1]; allowed: with override(), preset, p, keep_ratio"),
        ({"p": 2}, "option 'p': got 2; allowed: a number in (0, 1]"),
        ({"p": 0.9, "keep_ratio": 0.5}, "option 'keep_ratio': got 0.5; allowed: p or keep_ratio"),
        ({"preset": "fast", "keep_ratio": 0.5}, "option 'keep_ratio': got 0.5; allowed: preset or keep_ratio"),
    ],
)
def test_bad_options(options: dict[str, Any], part: str) -> None:
    with pytest.raises(OptionError) as raised, override(**options):
        pass
    assert str(raised.value).startswith(part)


def test_list_of_another_length(model: Any) -> None:
    with pytest.raises(OptionError, match="The list has 3 values, and there are 2 drop layers"), override(p=[0.9] * 3):
        run(model)


def test_rows_that_are_shown_stay(model: Any) -> None:
    """The last rows of a call that shows no others are kept by `last_n`: fewer must not be, silently."""
    torch._dynamo.reset()  # a second number of rows would be traced as a symbol
    wanted = "option 'last_n': got 8; allowed: 12 or more in this call"
    with torch.inference_mode(), pytest.raises(OptionError, match=wanted), override(last_n=8):
        model(token_ids(300), logits_to_keep=12)
