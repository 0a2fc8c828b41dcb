"""A layer number is that of a decoder layer, also where layers hold several attentions or share a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from arch_builders import SIZED, Arch
from arch_reference import StockReference
from eager_reference import DropSpec
from exactness import TIE, assert_differs, assert_near, options_of
from tiny import token_ids
from torch import Tensor, nn

import uniprefill_fx
from uniprefill_fx.pipeline import compile_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

DIFF_LLAMA = Arch("DiffLlama", SIZED | {"num_hidden_layers": 3}, (1,))


def test_two_attentions_of_a_layer() -> None:
    spec = DropSpec((1,), p=0.7, block_size=16, last_n=32, sink_tokens=16)
    model, stock, reference = DIFF_LLAMA.build(), DIFF_LLAMA.build(), StockReference(DIFF_LLAMA)
    model.compile(backend="uniprefill", options=options_of(spec))
    ids, prompt = token_ids(452), 450
    want = reference.run(ids, prompt, spec)
    assert min(want.selections[1].margin, want.selections[1].gap) > TIE
    with torch.inference_mode():
        out = model(ids[:, :prompt], logits_to_keep=1)
        call = uniprefill_fx.last_call()
        assert call is not None and call.dropped and torch.equal(call.kept_indices[1], want.kept[1])
        assert list(call.num_tokens) == want.rows == [prompt, prompt, len(want.kept[1])]
        logits = [out.logits]
        for at in range(prompt, 452):
            logits.append(model(ids[:, at : at + 1], past_key_values=out.past_key_values).logits)
        assert_near(torch.cat(logits, dim=1)[0], want.logits)
        assert_differs(logits[0][0], stock(ids[:, :prompt]).logits[0, -1:])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self, attentions: int) -> None:
        super().__init__()
        self.attentions = nn.ModuleDict({name: Attention() for name in ("own", "memory")[:attentions]})

    def forward(self, x: Tensor) -> Tensor:
        for attention in self.attentions.values():
            x = x + attention(x)
        return x


class Decoder(nn.Module):
    def __init__(self, layers: list[nn.Module], rounds: int = 1) -> None:
        super().__init__()
        self.layers, self.rounds, self.head = nn.ModuleList(layers), rounds, nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            for layer in self.layers:
                x = layer(x)
        return self.head(x[:, -1:])


class Shared(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def several() -> nn.Module:
    return Decoder([Layer(2), Layer(1), Layer(2)])


def run_twice() -> nn.Module:
    return Decoder([Layer(1), Layer(1)], rounds=2)


def shared_block() -> nn.Module:
    block = Layer(1)
    return Decoder([Shared(nn.Linear(32, 32)), Shared(block), Shared(nn.Linear(32, 32)), Shared(block)])


def in_a_list() -> nn.Module:
    return nn.Sequential(Decoder([Layer(1), Layer(1)]))


def compilation_of(build: Any, drop_layers: Any) -> Any:
    torch.manual_seed(0)
    seen: list[Any] = []
    config = uniprefill_fx.PrefillConfig(drop_layers=drop_layers, inner_backend="eager")

    def backend(gm: Any, inputs: Any) -> Any:
        return compile_graph(gm, inputs, config, seen.append)

    torch.compile(build().eval(), backend=backend, dynamic=True)(torch.randn(1, 40, 32))
    (compilation,) = seen
    return compilation


@pytest.mark.parametrize(
    ("build", "layers", "drops"),
    [
        (several, [0, 0, 1, 2, 2], [0, 1, 2]),
        (run_twice, [0, 1, 2, 3], [0, 1, 2, 3]),
        (shared_block, [1, 3], [1, 3]),
        (in_a_list, [0, 1], [0, 1]),
    ],
)
@torch.inference_mode()
def test_numbers(build: Any, layers: list[int], drops: list[int]) -> None:
    compilation = compilation_of(build, "all")
    assert [attention.layer for attention in compilation.attention] == layers
    assert [drop.attention.layer for drop in compilation.plan.drops] == drops, compilation.plan.refusals
    first = {a.layer: a.node for a in reversed(compilation.attention)}
    assert [drop.attention.node for drop in compilation.plan.drops] == [first[layer] for layer in drops]


@pytest.mark.parametrize(("build", "layer"), [(several, 0), (run_twice, 1), (shared_block, 1), (in_a_list, 0)])
@torch.inference_mode()
def test_auto_counts_the_same_layers(build: Any, layer: int) -> None:
    plan = compilation_of(build, "auto").plan
    assert [drop.attention.layer for drop in plan.drops] == [layer], plan.refusals
    assert plan.num_layers == max(attention.layer for attention in plan.attention_nodes) + 1
