"""Many drawn calls of one model in one process (`benchmarks/soak.py` has the long run)."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
import torch
from checkpoints import ROOT
from eager_reference import DropSpec
from exactness import options_of
from tiny import tiny_llama, token_ids
from torch._dynamo.utils import counters

import uniprefill_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_layers_behind_one_drop_share_the_graph_of_a_step() -> None:
    """They store the same positions; as one object Dynamo would guard it, and steps append to each."""
    model = tiny_llama(5)
    spec = DropSpec((1,), p=0.7, block_size=16, last_n=16, sink_tokens=16)
    uniprefill_fx.compile(model, **options_of(spec))
    with torch.inference_mode():
        for length in (300, 260):
            model.generate(token_ids(length), max_new_tokens=6, do_sample=False)
    call = uniprefill_fx.last_call()
    assert call is not None and call.dropped and call.num_tokens[2] < 260
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
def test_drawn_calls() -> None:
    found: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks" / "soak.py"))["run"](calls=60, seed=1)
    assert found["calls"] >= 55
    graphs, memory = list(found["graphs_after"].values()), list(found["resident_mib_after"].values())
    assert graphs[-1] <= 24 and memory[-1] < memory[len(memory) // 2] + 300
