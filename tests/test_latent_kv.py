"""Keys that a model computes from what its cache stores: which computations may run on some of the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import uniprefill_fx.ops  # noqa: F401  (registers the operators)
from uniprefill_fx.errors import RefusalError
from uniprefill_fx.passes.analyze.latent_kv import LatentKV, latent_kv
from uniprefill_fx.passes.node_utils import expression, is_op, meta, name_of

Keys = tuple[Tensor, Tensor]
HEADS, LATENT, ROTARY = 4, 8, 2


def latent(rows: Tensor, rotary: Tensor) -> Keys:
    """As DeepSeek does: keys are half computed, half shared by the heads, and copied into a buffer."""
    seen = rows.shape[2]
    wide = torch.nn.functional.linear(rows, torch.ones(HEADS * 6, LATENT)).view(1, seen, HEADS, 6).transpose(1, 2)
    own, values = wide.split([4, 2], dim=-1)
    keys = wide.new_empty(1, HEADS, seen, 4 + ROTARY)
    keys[..., :4].copy_(own)
    keys[..., 4:].copy_(rotary.expand(-1, HEADS, -1, -1))
    return keys, values


def plain(rows: Tensor, rotary: Tensor) -> Keys:
    return rows, rotary


def centred(rows: Tensor, rotary: Tensor) -> Keys:
    return rows - rows.mean(dim=2, keepdim=True), rotary


def shifted(rows: Tensor, rotary: Tensor) -> Keys:
    return rows.roll(1, dims=2), rotary


def numbered(rows: Tensor, rotary: Tensor) -> Keys:
    return rows + torch.arange(rows.shape[2])[:, None], rotary


def counted(rows: Tensor, rotary: Tensor) -> Keys:
    return rows * rows.shape[2], rotary


def related(rows: Tensor, rotary: Tensor) -> Keys:
    return (rows @ rows.transpose(2, 3)).softmax(-1) @ rows, rotary


def beside(rows: Tensor, rotary: Tensor) -> Keys:
    return rows, torch.zeros(1, 1, rows.shape[2], ROTARY)


def traced(compute: Callable[[Tensor, Tensor], Keys]) -> tuple[fx.Graph, Any]:
    """The graph of a decode step that computes keys from a cache layer, and its symbol of tokens."""
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Any) -> fx.GraphModule:
        found.append(gm)
        return gm

    def step(keys: Tensor, values: Tensor, positions: Tensor, timeline: Tensor) -> Keys:
        view, seen = torch.ops.uniprefill.logical_view, timeline.shape[0]
        return compute(view(keys, positions, seen, seen), view(values, positions, seen, seen))

    torch._dynamo.reset()
    inputs = torch.randn(1, 1, 9, LATENT), torch.randn(1, 1, 9, ROTARY), torch.arange(9)[None], torch.empty(9, 0)
    for tensor, axis in zip(inputs, (2, 2, 1, 0), strict=True):
        torch._dynamo.maybe_mark_dynamic(tensor, axis)
    torch.compile(step, backend=keep)(*inputs)
    (gm,) = found
    (view, _) = [node for node in gm.graph.nodes if is_op(node, "logical_view")]
    return gm.graph, expression(meta(view).shape[2])


def expanded(compute: Callable[[Tensor, Tensor], Keys]) -> LatentKV:
    graph, tokens = traced(compute)
    ends: Any = graph.output_node().args[0]
    return latent_kv(ends, lambda node: is_op(node, "logical_view"), tokens, tokens)


def test_keys_that_are_stored_as_they_are_need_nothing() -> None:
    found = expanded(plain)
    assert len(found.roots) == 2 and not found.region


def test_latents_are_expanded_by_everything_between() -> None:
    found = expanded(latent)
    assert len(found.roots) == 2
    assert [name_of(node) for node in found.region] == (
        "linear view transpose split getitem getitem new_empty getitem copy_ getitem expand copy_".split()
    )


@pytest.mark.parametrize("compute", [centred, shifted, numbered, counted, related, beside])
def test_what_depends_on_other_tokens_is_refused(compute: Callable[[Tensor, Tensor], Keys]) -> None:
    with pytest.raises(RefusalError):
        expanded(compute)
