"""The selection kernels in Triton's interpreter, against a walk down the sorted blocks in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_worker import Run

from uniprefill_fx.kernels.select_blocks.kernel import mark_blocks, select_blocks, select_blocks_reference
from uniprefill_fx.ops.scoring import packed_select as torch_op


def packed(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def scores_for(kind: str, lengths: Sequence[int], block_size: int) -> Tensor:
    positions = sum(lengths) // block_size + len(lengths)
    uniform = torch.rand(positions, generator=torch.Generator().manual_seed(positions))
    return {
        "even": uniform,
        "peaked": uniform.log().neg().pow(6),  # over some seven orders of magnitude
        "tied in groups": (uniform * 4).ceil() / 10,
        "all equal": torch.full((positions,), 0.1),
        "all zero": torch.zeros(positions),
    }[kind]


def walk(
    scores: Tensor,
    lengths: Sequence[int],
    prompts: Sequence[int],
    block_size: int,
    last_n: int,
    sinks: int,
    p: float | None,
    keep_ratio: float | None,
) -> tuple[Tensor, Tensor]:
    rows: list[int] = []
    bounds, start = [0], 0
    for r, length in enumerate(lengths):
        first = start // block_size + r
        mass = scores[first : first + math.ceil(length / block_size)].tolist()
        order = sorted(range(len(mass)), key=lambda block: (-mass[block], block))
        if keep_ratio is not None:
            kept = set(order[: math.ceil(keep_ratio * prompts[r] / block_size)])
        elif p == 1.0:
            kept = set(order)
        else:
            assert p is not None
            limit, kept = p * math.fsum(mass), set()
            for i, block in enumerate(order):
                if math.fsum(mass[b] for b in order[:i]) < limit:
                    kept.add(block)
        for row in range(length):
            if row // block_size in kept or row < sinks or row >= length - last_n:
                rows.append(start + row)
        start += length
        bounds.append(len(rows))
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(bounds, dtype=torch.int32)


def assert_selects(
    run: Run,
    scores: Tensor,
    lengths: Sequence[int],
    block_size: int,
    last_n: int = 20,
    sinks: int = 10,
    p: float | None = None,
    keep_ratio: float | None = None,
    prompts: Sequence[int] | None = None,
) -> Tensor:
    prompts = lengths if prompts is None else prompts
    rest = block_size, last_n, sinks, p, keep_ratio
    want_rows, want_bounds = walk(scores, lengths, prompts, *rest)
    for function in (select_blocks, select_blocks_reference, torch_op):
        arguments = scores, packed(lengths), torch.tensor(prompts), *rest
        rows, bounds = run(select_blocks, *arguments) if function is select_blocks else function(*arguments)
        torch.testing.assert_close(rows, want_rows, rtol=0, atol=0)
        torch.testing.assert_close(bounds, want_bounds, rtol=0, atol=0)
    return want_rows


LENGTHS = {"one request": (1000,), "many, some short or empty": (129, 0, 17, 300, 64, 1), "one block": (40,)}


@pytest.mark.parametrize(
    "kind, p",
    [("even", 0.9), ("peaked", 0.3), ("peaked", 0.9), ("tied in groups", 0.5), ("all equal", 0.9), ("all zero", 0.9)],
)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_top_p(run: Run, lengths: tuple[int, ...], kind: str, p: float) -> None:
    assert_selects(run, scores_for(kind, lengths, 16), lengths, 16, p=p)


@pytest.mark.parametrize(
    "kind, ratio", [("peaked", 0.125), ("tied in groups", 0.09), ("all zero", 0.09), ("peaked", 1.0)]
)
def test_top_k_counts_from_the_original_prompt(run: Run, kind: str, ratio: float) -> None:
    lengths = LENGTHS["many, some short or empty"]
    longer = [3 * length + 5 for length in lengths]
    assert_selects(run, scores_for(kind, lengths, 16), lengths, 16, keep_ratio=ratio, prompts=longer)


@pytest.mark.parametrize(
    "block_size, last_n, sinks", [(64, 0, 0), (48, 7, 100), (5, 10_000, 0), (200, 3, 5), (1, 2, 3)]
)
def test_block_sizes_and_forced_rows(run: Run, block_size: int, last_n: int, sinks: int) -> None:
    lengths = (260, 33)
    assert_selects(run, scores_for("peaked", lengths, block_size), lengths, block_size, last_n, sinks, p=0.6)


def test_ties_go_to_the_lower_block(run: Run) -> None:
    rows = assert_selects(run, torch.full((11,), 0.1), (160,), 16, last_n=0, sinks=0, p=0.5)
    assert rows.tolist() == list(range(80))


def test_p_of_one_keeps_everything(run: Run) -> None:
    lengths = LENGTHS["many, some short or empty"]
    rows = assert_selects(run, scores_for("peaked", lengths, 16), lengths, 16, p=1.0)
    assert len(rows) == sum(lengths)


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("options", [{"p": 0.2, "keep_ratio": None}, {"p": None, "keep_ratio": 0.1}])
def test_a_total_that_is_not_finite_keeps_its_whole_request(run: Run, value: float, options: dict[str, Any]) -> None:
    lengths = torch.tensor([160, 160])
    scores = scores_for("even", [160, 160], 16)
    scores[3] = value
    arguments = scores, packed([160, 160]), lengths, 16, 0, 0, *options.values()
    for function in (select_blocks, select_blocks_reference, torch_op):
        rows, bounds = run(select_blocks, *arguments) if function is select_blocks else function(*arguments)
        assert rows[:160].tolist() == list(range(160)) and bounds[1] == 160
        assert bounds[2] - bounds[1] < 160


def test_a_million_tokens(run: Run) -> None:
    """16,384 blocks: several turns of the loop over blocks, and ties that reach from one into the next."""
    tokens, block_size = 1 << 20, 64
    scores = (scores_for("peaked", [tokens], block_size) * 100).ceil() / 100
    stream = scores, packed([tokens]), torch.tensor([tokens]), block_size, 0, 0
    want, _ = select_blocks_reference(*stream, 0.97, None)
    assert 0.05 < len(want) / tokens < 0.95
    # only the marks: to write the rows, the interpreter would need a program for each block
    offsets, whole, kept = run(mark_blocks, *stream, 0.97, False)
    assert kept.tolist() == [len(want)]
    blocks = whole[:-1].nonzero().squeeze(1)
    torch.testing.assert_close(blocks, want[::block_size] // block_size, rtol=0, atol=0)
    assert offsets[blocks].tolist() == list(range(0, len(want), block_size))


def test_more_requests_than_one_tile_of_the_prefix_sum(run: Run) -> None:
    lengths = [1] * 70
    assert_selects(run, scores_for("even", lengths, 16), lengths, 16, p=1.0)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "scores": ({"block_scores": torch.zeros(2, dtype=torch.float64)}, r"block_scores is torch\.float64"),
    "too few scores": ({"block_scores": torch.zeros(0)}, "0 block scores"),
    "cu_seqlens": ({"cu_seqlens": torch.zeros(2)}, r"cu_seqlens is torch\.float32"),
    "prompt_lengths": ({"prompt_lengths": torch.tensor([16, 1])}, r"wanted int32 or int64, \(1,\)"),
    "sizes": ({"block_size": 0}, "block_size 0"),
    "neither": ({"p": None}, "p None, keep_ratio None"),
    "both": ({"keep_ratio": 0.5}, r"p 0\.5, keep_ratio 0\.5"),
    "out of range": ({"p": 1.5}, r"p 1\.5"),
}


@pytest.mark.parametrize("options, message", BAD.values(), ids=BAD.keys())
def test_refusals_say_what_was_wanted(run: Run, options: dict[str, Any], message: str) -> None:
    good = dict(
        block_scores=torch.zeros(2),
        cu_seqlens=torch.tensor([0, 16], dtype=torch.int32),
        prompt_lengths=torch.tensor([16]),
        block_size=16,
        last_n=4,
        sink_tokens=4,
        p=0.5,
        keep_ratio=None,
    )
    with pytest.raises(ValueError, match=message):
        run(select_blocks, **(good | options))
