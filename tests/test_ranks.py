"""What ranks exchange, in graphs of one rank: its normal form, what is proven of it, and what stays dense."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from eager_reference import EagerReference
from exactness import assert_near, options_of
from split_models import FIRST, split_over, tiny_qwen3_moe
from tiny import tiny_llama, token_ids
from torch import Tensor, fx, nn
from traced import calls, trace

import uniprefill_fx
from uniprefill_fx.errors import RefusalError
from uniprefill_fx.lowering.structure import structure
from uniprefill_fx.passes import operator_internals as internals
from uniprefill_fx.passes.analyze.ranks import find_ranks
from uniprefill_fx.passes.distributed import collective_name
from uniprefill_fx.passes.node_utils import copy_module
from uniprefill_fx.passes.normalize.collectives import plain_collectives
from uniprefill_fx.passes.normalize.dtensors import plain_dtensors
from uniprefill_fx.runtime.agreement import Agreement

plans = pytest.importorskip("transformers.distributed.tensor_parallel")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def group() -> Iterator[str]:
    """The name of a process group of one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    assert dist.group.WORLD is not None
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def split(module: nn.Module, **styles: str) -> Any:
    """Split submodules as a plan of transformers does."""
    mesh = dist.init_device_mesh("cpu", (1,))
    for name, style in styles.items():
        part, how = module.get_submodule(name), plans.ALL_PARALLEL_STYLES[style]
        for parameter, _ in list(part.named_parameters(recurse=False)):
            how.shard_param(part, parameter, mesh)
        how.install_forward(part, mesh)
    return module


def layer(**styles: str) -> Any:
    torch.manual_seed(0)
    return split(nn.ModuleDict({"a": nn.Linear(4, 6), "b": nn.Linear(6, 4), "e": nn.Embedding(8, 4)}).eval(), **styles)


def normal(function: Callable[..., Any], *inputs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A graph before and after; what it computes is the same."""
    gm, given = trace(function, *inputs)
    after = copy_module(gm)
    plain_dtensors(after)
    plain_collectives(after)
    after.graph.lint()
    with torch.no_grad():
        torch.testing.assert_close(after(*given), copy_module(gm)(*given))
    return gm, after


def test_gathered_channels_are_gathered_plainly(group: str) -> None:
    parts = layer(a="colwise_gather_output")
    x = torch.randn(2, 5, 4)
    gm, after = normal(lambda x: parts["a"](x) * 2, x)
    assert any("redistribute" in c for c in calls(gm)) and not any("redistribute" in c for c in calls(after))
    assert [collective_name(n) for n in after.graph.nodes if collective_name(n)] == [
        "all_gather_into_tensor",
        "wait_tensor",
    ]
    ranks = find_ranks(after.graph)
    assert ranks is not None and ranks.group == group
    scaled = after.graph.output_node().all_input_nodes[0]
    assert scaled not in ranks.own  # gathered, it is the same on every rank


def test_a_split_embedding_is_looked_up_plainly() -> None:
    parts = layer(e="embedding_rowwise")
    ids = torch.tensor([[0, 7, 3]])
    want = parts["e"](ids)
    with torch.no_grad():
        gm, given = trace(lambda ids: parts["e"](ids) * 2, ids, dynamic=False)
        assert plain_dtensors(gm) == 1
        (got,) = gm(*given)
    assert sum("vocab_rows" in c for c in calls(gm)) == 1 and not any("from_local" in c for c in calls(gm))
    torch.testing.assert_close(got, want.detach() * 2)


@pytest.mark.parametrize("first", [0, 8])
def test_rows_of_a_table_that_another_rank_holds_are_zeros(group: str, first: int) -> None:
    """This rank, the first one, holds rows 0 to 7."""
    table = torch.randn(8, 4)
    got = torch.ops.uniprefill.vocab_rows(torch.arange(first, first + 8), table, group)
    assert torch.equal(got, table if first == 0 else torch.zeros(8, 4))
    torch.library.opcheck(torch.ops.uniprefill.vocab_rows.default, (torch.arange(first, first + 8), table, group))


def summed_in_place(x: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def summed_beside_a_view(x: Tensor) -> Tensor:
    y = x * 2
    view = y[0]
    dist.all_reduce(y)
    return view + 1


def test_sums_are_read_from_the_collective() -> None:
    gm, after = normal(summed_in_place, torch.ones(3, 4))
    assert "copy_" in calls(gm) and "copy_" not in calls(after)


def test_a_copy_that_another_name_shows_stays() -> None:
    _, after = normal(summed_beside_a_view, torch.ones(3, 4))
    assert "copy_" in calls(after)


def reduced(how: Any) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y, how)
        return y

    return function


def gathered(x: Tensor) -> Tensor:
    from torch.distributed._functional_collectives import all_gather_tensor

    return all_gather_tensor(x, 0, dist.group.WORLD) * 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (reduced(dist.ReduceOp.SUM), "nothing says how they are split"),
        (reduced(dist.ReduceOp.MAX), r"all_reduce` \(max\)"),
        (gathered, "all_gather_into_tensor"),  # along an axis whose length is a symbol
    ],
)
def test_what_is_no_tensor_parallelism_is_refused(function: Callable[[Tensor], Tensor], why: str) -> None:
    gm, _ = trace(function, torch.ones(3, 4))
    plain_collectives(gm)
    with pytest.raises(RefusalError, match=why):
        find_ranks(gm.graph)


def test_a_graph_of_one_rank_has_none() -> None:
    gm, _ = trace(lambda x: x * 2, torch.ones(3))
    assert find_ranks(gm.graph) is None


def explained(model: Any, plan: dict[str, str] | None = None) -> Any:
    if plan is not None:
        model._tp_plan = plan
    split_over(model, dist.init_device_mesh("cpu", (1,)))
    with torch.inference_mode():
        uniprefill_fx.explain(model, token_ids(100), **options_of(FIRST))
    return uniprefill_fx.last_call()


def test_experts_of_their_own_stay_dense() -> None:
    model = tiny_qwen3_moe()
    try:  # transformers 5.24 splits experts by a function of their own
        from transformers.distributed.expert_parallel import apply_expert_parallelism
    except ImportError:
        call = explained(model, model._ep_plan)
    else:
        mesh = dist.init_device_mesh("cpu", (1,))
        call = explained(apply_expert_parallelism(model, mesh, mesh, model._expand_parallel_plan(model._ep_plan)), {})
    assert not call.dropped and "experts" in call.reason.seen


def test_a_norm_of_sequence_parallelism_stays_dense() -> None:
    model = tiny_llama(2)
    call = explained(model, model.tp_plan | {"model.layers.*.input_layernorm": "sequence_parallel"})
    assert not call.dropped and call.reason.category.value == "several-ranks"


def test_a_stream_that_nobody_sums_stays_dense() -> None:
    """Feed-forward layers without the sum: column-parallel weights whose outputs meet whole ones, on one rank."""
    model = tiny_llama(2)
    call = explained(model, {"model.layers.*.mlp.down_proj": "colwise"})
    assert not call.dropped and "differs from rank to rank" in call.reason.seen


def test_a_graph_that_differs_is_another_program(group: str) -> None:
    def program(factor: int) -> bytes:
        gm, _ = trace(lambda x: x * factor, torch.ones(3), dynamic=False)
        return Agreement(group, gm.graph, None).program.digest()

    assert program(2) == program(2) != program(3)


def test_weights_that_are_split_alike_share_a_compilation() -> None:
    """What was compiled for one layer serves another, unless it holds other parts."""

    def key(*styles: str) -> Any:
        parts = layer(a=styles[0])
        gm, _ = trace(lambda x: parts["a"](x), torch.randn(2, 4))
        return structure(gm)

    assert key("colwise") == key("colwise")
    assert key("colwise") != key("rowwise")


def test_backward_hooks_break_no_graph_where_gradients_are_off() -> None:
    seen: list[str] = []
    inner = nn.Linear(4, 4)
    inner.register_full_backward_hook(lambda *_: seen.append("backward"))
    model = nn.Sequential(inner)
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    x = torch.randn(2, 4)
    compiled = torch.compile(model, backend="uniprefill", options={"inner_backend": backend}, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) == 1 and not seen
    torch._dynamo.reset()
    torch.compile(model, backend="uniprefill", options={"inner_backend": backend})(x).sum().backward()
    assert seen == ["backward"]


def test_a_collective_has_a_name() -> None:
    assert internals.collective_of(internals.collective("all_reduce")) == "all_reduce"
    assert internals.collective_of(torch.ops.aten.add.Tensor) == ""
    assert all(hasattr(nn.Module, name) for name in internals.backward_hook_methods())


@pytest.mark.parametrize("layers", [False, True])
def test_fsdp_drops_where_no_hook_is_inside(layers: bool) -> None:
    """Weights that are gathered before the compiled forward are plain tensors; hooks on layers break the graph."""
    from torch.distributed.fsdp import fully_shard

    model, mesh = tiny_llama(2), dist.init_device_mesh("cpu", (1,))
    model.compile(backend="uniprefill", options=options_of(FIRST))
    for block in model.model.layers if layers else ():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ids = token_ids(300)
    with torch.no_grad():  # FSDP itself does not run in inference mode
        logits = model(ids, logits_to_keep=1).logits
    call = uniprefill_fx.last_call()
    assert call is not None and call.dropped != layers
    reference = EagerReference(tiny_llama(2), None if layers else FIRST).prefill(ids)
    assert_near(logits, reference.last_logits)
    assert layers or torch.equal(call.kept_indices[0], reference.kept[0])
