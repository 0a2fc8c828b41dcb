"""The sizes of a rewritten graph: every symbol is traced with a number of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eager_reference import DropSpec, EagerReference
from exactness import assert_near, options_of
from graphs import symbols, tensors, value
from test_batches import assert_kept, padded
from tiny import tiny_llama, token_ids

from uniprefill_fx.backend import Compilation
from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.runtime.last_call import watched
from uniprefill_fx.tools.isolated import isolated

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:uniprefill. outputs of all positions"),
]
DROPS = 6
SPEC = DropSpec(tuple(range(DROPS)), p=0.97, block_size=8, last_n=16, sink_tokens=16)


def sizes_of(graph: torch.fx.Graph) -> tuple[dict[Any, int], set[int]]:
    """The number that each symbol of a graph was traced with, and the fixed sizes of its inputs."""
    hints: dict[Any, int] = {}
    fixed: set[int] = set()
    for node in graph.nodes:
        sizes: list[Any] = [s for t in tensors(value(node)) for s in t.shape]
        for size in sizes:
            for symbol in symbols(size):
                hints[symbol] = size.node.shape_env.backed_var_to_val[symbol]
            if node.op == "placeholder" and not symbols(size):
                fixed.add(int(size))
    return hints, fixed


def test_many_drops_of_a_batch_never_meet_by_chance() -> None:
    """Seven layers of which six drop, three prompts; two fixed sizes lie where the numbers are taken from."""
    build: dict[str, Any] = {"layers": DROPS + 1, "vocab_size": 1029, "intermediate_size": 1021}
    prompts = [token_ids(n, seed=i) for i, n in enumerate((281, 300, 260))]
    batch = padded(prompts, "left")
    compilations: list[Compilation] = []
    run = isolated(tiny_llama(**build), PrefillConfig.from_options(options_of(SPEC)), compilations.append)
    with torch.inference_mode():
        out, call = watched(lambda: run(**batch, logits_to_keep=1))
    (after,) = (done.after for done in compilations)
    assert after is not None and call is not None, str(call)
    hints, fixed = sizes_of(after.graph)
    assert {1029, 1021} <= fixed
    assert len(hints) == DROPS + 2  # those of the kept rows, of prompts, and of columns
    assert len(set(hints.values())) == len(hints), hints
    assert not fixed & set(hints.values())
    assert len(call.kept_indices) == DROPS
    wants = [EagerReference(tiny_llama(**build), SPEC).prefill(p) for p in prompts]
    assert_kept(call, wants, batch)
    for row, want in zip(out.logits, wants, strict=True):
        assert_near(row[None], want.last_logits)
