"""Drawn decoders whose layers hold operations of `mixing_ops`: each drops and is right, or is dense with a reason."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from eager_reference import DropSpec
from exactness import TIE, assert_near, options_of
from mixing_decoders import LAYOUTS, MixingDecoder, build
from mixing_ops import MIXING, ROWWISE
from plain_decoders import VOCABULARY
from plain_reference import reference
from torch import Tensor

import uniprefill_fx

QUICK, MANY = 9, 300
DEPTH, LENGTH = 3, 197

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:uniprefill. outputs of all positions"),
]


@dataclass(frozen=True)
class Draw:
    """One decoder: how its stream is laid out, the operations of each layer, and the layers behind which it drops."""

    seed: int
    layout: str
    ops: tuple[tuple[str, ...], ...]
    drops: tuple[int, ...]

    @property
    def mixes_behind_a_drop(self) -> bool:
        return any(name in MIXING for of_layer in self.ops[self.drops[0] :] for name in of_layer)

    def build(self) -> MixingDecoder:
        ops = [[{**ROWWISE, **MIXING}[name] for name in of_layer] for of_layer in self.ops]
        return build(self.layout, ops, self.seed)


def draw(seed: int) -> Draw:
    """Half of the draws mix tokens somewhere, some of them in front of the first drop."""
    rng = random.Random(seed)
    # The names of both tables, without those that both have: there the one is the other along another axis.
    rows = [name for name in ROWWISE if name not in MIXING]
    ops = [rng.sample(rows, rng.choice([0, 1, 1, 2])) for _ in range(DEPTH)]
    if rng.random() < 0.5:
        rng.choice(ops).append(rng.choice(list(MIXING)))
    drops = rng.choice([(0,), (1,), (0, 1)])
    return Draw(seed, rng.choice(LAYOUTS), tuple(map(tuple, ops)), drops)


def ids_of(seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def check(drawn: Draw) -> bool:
    """One draw; whether it dropped. What is known to work row by row, or mixes in front of all drops, has to drop."""
    spec = DropSpec(drawn.drops, p=0.7, block_size=16, last_n=16, sink_tokens=16)
    model, untouched = drawn.build(), drawn.build()
    for seed in range(drawn.seed, drawn.seed + 8):
        ids = ids_of(seed)
        want = reference(untouched, ids, spec)
        if all(min(s.margin, s.gap) > TIE for s in want.selections.values()):
            break
    torch._dynamo.reset()
    before = uniprefill_fx.last_call()
    got = torch.compile(model, backend="uniprefill", dynamic=True, options=options_of(spec))(ids)
    call = uniprefill_fx.last_call()
    assert call is not None and call is not before
    random_ops = {name for of_layer in drawn.ops for name in of_layer} & {"noise"}
    if not call.dropped:
        assert call.reason is not None and call.reason.category.value == "operation-mixes-tokens", str(call)
        assert drawn.mixes_behind_a_drop, str(call)
        if not random_ops:
            assert_near(got, untouched(ids))
        return False
    assert not drawn.mixes_behind_a_drop, "dropped behind an operation that mixes tokens"
    if random_ops:
        return True
    assert call.kept_indices.keys() == want.kept.keys()
    for layer, kept in want.kept.items():
        assert torch.equal(call.kept_indices[layer], kept) and len(kept) < LENGTH
    assert_near(got, want.logits, 1e-3)
    return True


def run_draws(seeds: range) -> None:
    dropped = []
    for seed in seeds:
        drawn = draw(seed)
        try:
            dropped.append(check(drawn))
        except Exception as error:
            raise AssertionError(str(drawn)) from error
    assert any(dropped) and not all(dropped)


def test_drawn_decoders() -> None:
    run_draws(range(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_three_hundred_drawn_decoders(part: int) -> None:
    each = MANY // 10
    run_draws(range(1000 + part * each, 1000 + (part + 1) * each))
