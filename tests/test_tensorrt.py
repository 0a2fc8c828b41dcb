"""torch-tensorrt as the inner backend, by a stand-in of its name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import Case, Compiled, assert_near, assert_same_rows
from split_models import FIRST
from tiny import tiny_llama, token_ids
from torch import fx

from uniprefill_fx.config import OptionError, PrefillConfig
from uniprefill_fx.lowering.inner import inner_backend
from uniprefill_fx.passes.node_utils import is_op

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
LIBRARY = """
import torch
given = []
def backend(gm, inputs, **options):
    given.append((gm, options))
    return gm.forward
for name in ("torch_tensorrt", "tensorrt"):
    torch._dynamo.register_backend(backend, name=name)
"""
Given = list[tuple[fx.GraphModule, dict[str, Any]]]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Given]]:
    """A library of that name, which nobody has imported yet, and what it was given."""
    (tmp_path / "torch_tensorrt.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_tensorrt", raising=False)
    yield lambda: sys.modules["torch_tensorrt"].given
    for name in ("torch_tensorrt", "tensorrt"):
        torch._dynamo.backends.registry._BACKENDS.pop(name, None)
        torch._dynamo.backends.registry._COMPILER_FNS.pop(name, None)
    sys.modules.pop("torch_tensorrt", None)


@pytest.mark.parametrize("name", ["torch_tensorrt", "tensorrt"])
def test_it_is_imported_when_it_is_asked_for(stand_in: Callable[[], Given], name: str) -> None:
    assert "torch_tensorrt" not in sys.modules
    options = {"workspace_size": 1 << 20}
    compiled = Compiled(
        Case("tiny", FIRST, {"inner_backend": name, "inner_options": options}), tiny_llama(2), tiny_llama(2)
    )
    ids = token_ids(300)
    want = compiled.expected(ids)
    out, call = compiled.prefill(ids, logits_to_keep=1)
    assert_same_rows(call, want, 300)
    assert_near(out.logits, want.last_logits)
    given = stand_in()
    assert len(given) == 2  # the pieces before and behind the drop
    for gm, said in given:
        assert said == {"options": {"pass_through_build_failures": True, **options}}
        assert not any(is_op(node, op) for node in gm.graph.nodes for op in ("score", "select"))


def test_failures_pass_in_silence_only_where_that_is_asked_for(stand_in: Callable[[], Given]) -> None:
    quiet = {"pass_through_build_failures": False}
    backend: Any = inner_backend(PrefillConfig(inner_backend="tensorrt", inner_options=quiet))  # type: ignore[arg-type]
    backend(fx.symbolic_trace(lambda x: x), [torch.ones(1)])
    assert stand_in()[0][1]["options"] == quiet


def test_a_library_that_is_not_there_is_named_with_the_version_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)  # importing it raises ImportError
    minor = ".".join(torch.__version__.split(".")[:2])
    with pytest.raises(OptionError, match=rf"torch-tensorrt=={minor}\.\*"):
        inner_backend(PrefillConfig(inner_backend="torch_tensorrt"))
