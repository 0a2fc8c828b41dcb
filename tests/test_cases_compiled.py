"""Where tools of this kind have failed their users, by the row of the report: what is compiled, and what is not.

The other rows are in `test_cases.py`. Rows 4 and 14 are about speed on a GPU; of 14 the source is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from arch_builders import ARCHS
from cases import BUILD, QUICK, check_dense, check_prefill, compiled, graphs
from eager_reference import EagerReference
from exactness import (
    Case,
    Compiled,
    assert_near,
    options_of,
)
from graphs import assert_no_square, operation
from tiny import LLAMA, tiny_llama, token_ids
from torch import Tensor
from transformers_version import PLAIN_CAUSAL

import uniprefill_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def ranks() -> Iterator[dist.ProcessGroup]:
    """A process group of one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


class SumOverRanks(torch.nn.Module):
    """A row-parallel projection as MInference's users had it: each rank holds a part of the heads."""

    def __init__(self, projection: torch.nn.Module) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, x: Tensor) -> Tensor:
        out = self.projection(x)
        dist.all_reduce(out)
        return out


def split_by_hand(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.o_proj = SumOverRanks(layer.self_attn.o_proj)


def split_as_dtensors(model: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in model.model.layers:
        plan = {"q_proj": ColwiseParallel(), "k_proj": ColwiseParallel(), "v_proj": ColwiseParallel()}
        parallelize_module(layer.self_attn, init_device_mesh("cpu", (1,)), {**plan, "o_proj": RowwiseParallel()})


@pytest.mark.parametrize("split", [split_by_hand, split_as_dtensors])
def test_case_03_models_split_over_ranks_stay_dense(ranks: dist.ProcessGroup, split: Callable[[Any], None]) -> None:
    """Ranks that score their own heads would keep different rows."""
    model = tiny_llama()
    split(model)
    check_dense(Compiled(Case("llama", LLAMA), model, tiny_llama()), token_ids(300), "several-ranks")


def test_case_11_twelve_lengths_compile_at_most_twice() -> None:
    model, inner = compiled_counting()
    twelve_lengths(model)
    assert graphs() <= 2 and len(inner) <= 4


def test_case_17_a_length_marked_dynamic_gets_no_guard() -> None:
    """torch raises where a marked axis gets a guard; and one compilation serves the whole range."""
    model, inner = compiled_counting()
    twelve_lengths(model, lambda ids: torch._dynamo.mark_dynamic(ids, 1, min=64, max=4096))
    assert graphs() == 1 and len(inner) == 2


def compiled_counting() -> tuple[Compiled, list[torch.fx.GraphModule]]:
    """A model, and the graphs that reach its inner backend."""
    inner: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        inner.append(gm)
        return gm.forward

    return compiled(inner_backend=backend), inner


def twelve_lengths(model: Compiled, mark: Callable[[Tensor], None] = lambda ids: None) -> None:
    for length in (300, 301, 302, 303, 65, 64, 257, 1024, 1023, 777, 128, 2048):
        ids = token_ids(length)
        mark(ids)
        _, done = model.prefill(ids, logits_to_keep=1)
        assert done.dropped and done.tokens == length


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("gemma3", "falcon_h1", "gemma2") else [])
        for name in (*BUILD, *QUICK)
    ],
)
def test_case_13_nothing_is_as_large_as_tokens_by_tokens(name: str) -> None:
    if name in BUILD:
        model, drops = BUILD[name][0](), BUILD[name][1].drop_layers
    else:
        model, drops = ARCHS[name].build(), ARCHS[name].drops
    report = uniprefill_fx.explain(model, token_ids(300), **options_of(replace(LLAMA, drop_layers=drops)))
    assert report.after is not None and report.call is not None and report.call.dropped
    assert_no_square(report.after)
    if not (PLAIN_CAUSAL and name == "llama"):
        with pytest.raises(AssertionError):  # the model's own masks are
            assert_no_square(report.before)


def test_case_14_no_kernel_is_tuned_for_a_length() -> None:
    """Tuned kernels search again for every new key; these take their tiles from tables, so a first call costs none."""
    from triton.runtime import Autotuner, JITFunction

    from uniprefill_fx.kernels import common as varlen
    from uniprefill_fx.kernels.block_scores import kernel as block_scores
    from uniprefill_fx.kernels.select_blocks import kernel as select_blocks

    kernels = [f for module in (block_scores, select_blocks, varlen) for f in vars(module).values()]
    assert len([f for f in kernels if isinstance(f, JITFunction)]) > 4
    assert not [f for f in kernels if isinstance(f, Autotuner)]


def test_case_18_selections_never_reach_the_inner_backend() -> None:
    """Neither the ops with data-dependent shapes nor anything else of that kind."""
    model, inner = compiled_counting()
    for length in (300, 301):
        check_prefill(model, token_ids(length))
    names = [{operation(node) for node in gm.graph.nodes} for gm in inner]
    assert len(names) == 2 and all("compact" in found or "attention" in found for found in names)
    assert not set().union(*names) & {"score", "select", "nonzero", "item", "masked_select", "unique"}


def test_case_19_other_options_on_a_warm_model_change_the_result() -> None:
    model, ids = tiny_llama(), token_ids(300)
    specs = [replace(LLAMA, p=p) for p in (0.7, 0.9, 0.7)]
    kept = []
    for spec in specs:
        model.compile(backend="uniprefill", options=options_of(spec))
        with torch.inference_mode():
            out = model(ids, logits_to_keep=1)
        done = uniprefill_fx.last_call()
        assert done is not None
        assert_near(out.logits, EagerReference(tiny_llama(), spec).prefill(ids).last_logits)
        kept.append(len(done.kept_indices[1]))
    assert kept[0] == kept[2] < kept[1] < 300


@pytest.mark.parametrize("name", ["falcon_h1", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_case_20_hybrids_drop_by_default(name: str) -> None:
    """With no option but the prompt length from which it pays."""
    model = uniprefill_fx.compile(ARCHS[name].build(), min_tokens=0, inner_backend="eager")
    with torch.inference_mode():
        model(token_ids(700), logits_to_keep=1)
    done = uniprefill_fx.last_call()
    assert done is not None and done.dropped and done.reason is None and list(done.kept_indices) == [1]
