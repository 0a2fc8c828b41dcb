"""Masks that compare positions beside a term for packed prompts: read as masks of indices, where that is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from traced import trace

from uniprefill_fx.errors import RefusalError
from uniprefill_fx.passes.analyze.masks.kinds import MaskKind, classify
from uniprefill_fx.passes.node_utils import shape

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
WINDOW = 5


def runs(positions: Tensor, first: int = 1, jump: int = 1) -> Tensor:
    """What transformers numbers packed prompts by."""
    return (torch.diff(positions, prepend=positions[:, :1] - first, dim=-1) != jump).cumsum(-1)


def at(values: Tensor, by_query: bool) -> Tensor:
    """(batch, tokens) numbers as (batch, 1, tokens, 1) of the queries, or (batch, 1, 1, tokens) of the keys."""
    batch, tokens = (torch.arange(size) for size in values.shape)
    index = tokens[None, None, :, None] if by_query else tokens[None, None, None, :]
    return values[batch[:, None, None, None], index]


def same_run(numbers: Tensor) -> Tensor:
    return at(numbers, True) == at(numbers, False)


def full(positions: Tensor) -> Tensor:
    return (at(positions, False) <= at(positions, True)) & same_run(runs(positions))


def sliding(positions: Tensor) -> Tensor:
    return (at(positions, False) > at(positions, True) - WINDOW) & full(positions)


def read(mask: Callable[[Tensor], Tensor], positions: Tensor) -> tuple[MaskKind, fx.GraphModule, list[Tensor]]:
    gm, inputs = trace(lambda given: mask(given).float(), positions)
    node = next(n for n in reversed(gm.graph.nodes) if n.meta.get("example_value") is not None and n.op != "output")
    made = node.all_input_nodes[0]
    sizes = shape(made)
    assert sizes is not None and len(sizes) == 4
    return classify([(made, False)], sizes[2]), gm, inputs


def values(gm: fx.GraphModule, inputs: list[Tensor], wanted: fx.Node) -> Tensor:
    """What a node of the graph computes."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(gm.graph, copies)
    graph.output(copies[wanted])
    found: Tensor = fx.GraphModule(gm, graph)(*inputs)
    return found


# Two prompts; three whose positions are not from 0, one of them of one token; positions that go down; repeated ones;
# prompts of other lengths in another row.
ROWS = [
    [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]],
    [[7, 8, 9, 10, 11, 12, 13, 40, 3, 4, 5, 6, 7]],
    [[9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3]],
    [[3, 3, 3, 4, 4, 5, 6, 7, 8, 9, 10, 11, 11]],
    [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 8]],
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mask", [full, sliding])
def test_positions_in_one_run_are_read_as_indices(mask: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """The kind, spelled out over indices, hides and shows what the mask itself does."""
    index = torch.arange(13)
    query, key = index[:, None], index[None, :]
    for row in ROWS:
        positions = torch.tensor(row, dtype=dtype)
        kind, gm, inputs = read(mask, positions)
        assert kind.offset == 0 and kind.window == (WINDOW if mask is sliding else None)
        assert kind.sequence_ids is not None and kind.chunk is None and kind.key_mask is None
        numbers = values(gm, inputs, kind.sequence_ids)
        shown = (key <= query) & (numbers[:, :, None] == numbers[:, None, :])
        if kind.window is not None:
            shown &= key > query - kind.window
        assert torch.equal(shown, mask(positions)[:, 0])


def chunked(positions: Tensor) -> Tensor:
    return full(positions) & (at(positions, False) // 4 == at(positions, True) // 4)


def without_runs(positions: Tensor) -> Tensor:
    return at(positions, False) <= at(positions, True)


def other_runs(positions: Tensor) -> Tensor:
    return without_runs(positions) & same_run(runs(positions * positions))


def runs_of_another_start(positions: Tensor) -> Tensor:
    return without_runs(positions) & same_run(runs(positions, first=2))


def runs_by_two(positions: Tensor) -> Tensor:
    return without_runs(positions) & same_run(runs(positions, first=2, jump=2))


def written_in_between(positions: Tensor) -> Tensor:
    own = positions.clone()
    numbers = runs(own)
    own.mul_(-1)
    return without_runs(own) & same_run(numbers)


def numbers_written(positions: Tensor) -> Tensor:
    numbers = runs(positions)
    numbers.fill_(0)
    return without_runs(positions) & same_run(numbers)


def narrow(positions: Tensor) -> Tensor:
    return full(positions.to(torch.uint8))  # 255 and 0 lie one apart


@pytest.mark.parametrize(
    "mask",
    [
        chunked,
        without_runs,
        other_runs,
        runs_of_another_start,
        runs_by_two,
        written_in_between,
        numbers_written,
        narrow,
    ],
)
def test_other_masks_of_positions_are_refused(mask: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RefusalError):
        read(mask, torch.tensor(ROWS[0]))
