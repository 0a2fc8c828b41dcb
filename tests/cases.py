"""What the tests of reported failures share: two small models, and checks of one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from eager_reference import DropSpec
from exactness import (
    Case,
    Compiled,
    assert_near,
    assert_same_rows,
)
from tiny import LLAMA, tiny_gemma3, tiny_llama
from torch import Tensor
from torch._dynamo.utils import counters

WINDOW = 32
GEMMA = DropSpec((1,), p=0.7, block_size=8, last_n=16, sink_tokens=8)
LLAMA_SPEC = replace(LLAMA, drop_layers=(0,))
BUILD: dict[str, tuple[Callable[..., Any], DropSpec]] = {
    "llama": (partial(tiny_llama, 2), LLAMA_SPEC),
    "gemma3": (partial(tiny_gemma3, WINDOW, 4), GEMMA),  # full attention in every second layer
}
LLAMA_FIRST = ["llama", pytest.param("gemma3", marks=pytest.mark.slow)]
QUICK = ("gpt_oss", "bloom", "falcon_h1", "gemma2")


def compiled(name: str = "llama", attention: str = "sdpa", spec: DropSpec | None = None, **extra: Any) -> Compiled:
    build, usual = BUILD[name]
    return Compiled(Case(name, spec or usual, extra), build(attention=attention), build())


def check_prefill(model: Compiled, ids: Tensor, **call: Any) -> Any:
    """Last logits and kept rows are the reference's; returns the output."""
    want = model.expected(ids)
    out, done = model.prefill(ids, logits_to_keep=1, **call)
    assert_same_rows(done, want, ids.shape[1])
    assert_near(out.logits, want.last_logits)
    return out


def check_dense(model: Compiled, ids: Tensor, reason: str) -> None:
    """The stock model's logits, and why."""
    out, done = model.prefill(ids, logits_to_keep=1)
    assert not done.dropped and done.reason is not None and done.reason.category.value == reason, str(done)
    assert_near(out.logits, model.dense(ids, logits_to_keep=1).logits)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]
