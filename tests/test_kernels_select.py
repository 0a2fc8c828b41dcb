"""The selection kernels in Triton's interpreter, against a walk down the sorted blocks in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_worker import Run

from uniprefill_fx.kernels.select_blocks.kernel import _mark_kernel, mark_blocks, select_blocks
from uniprefill_fx.kernels.select_blocks.naive import select_blocks_reference


def left_padded(lengths: Sequence[int]) -> Tensor:
    """token_bounds of a batch, as the kernels take them."""
    columns = max(lengths) + 3
    return torch.tensor([[columns - length, columns] for length in lengths], dtype=torch.int32)


def scores_for(kind: str, lengths: Sequence[int], block_size: int) -> Tensor:
    shape = len(lengths), -(-(max(lengths) + 3) // block_size)
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(sum(lengths)))
    return {
        "even": uniform,
        "peaked": uniform.log().neg().pow(6),  # over some seven orders of magnitude
        "tied in groups": (uniform * 4).ceil() / 10,
        "all equal": torch.full(shape, 0.1),
        "all zero": torch.zeros(shape),
    }[kind]


def walk(
    scores: Tensor,
    token_bounds: Tensor,
    prompts: Sequence[int],
    block_size: int,
    last_n: int,
    sinks: int,
    p: float | None,
    keep_ratio: float | None,
) -> list[list[int]]:
    """The columns that each request keeps."""
    columns: list[list[int]] = []
    for r, (start, end) in enumerate(token_bounds.tolist()):
        length = end - start
        mass = scores[r, : math.ceil(length / block_size)].tolist()
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
        columns.append([])
        for row in range(length):
            if row // block_size in kept or row < sinks or row >= length - last_n:
                columns[-1].append(start + row)
    return columns


def assert_is(got: tuple[Tensor, Tensor], columns: Sequence[Sequence[int]]) -> None:
    """A left-padded batch of these columns."""
    kept_indices, token_bounds = got
    most = max(len(own) for own in columns)
    assert kept_indices.dtype == token_bounds.dtype == torch.int64
    assert kept_indices.is_contiguous() and kept_indices.storage_offset() == 0
    assert kept_indices.tolist() == [[-1] * (most - len(own)) + list(own) for own in columns]
    assert token_bounds.tolist() == [[most - len(own), most] for own in columns]


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
    token_bounds: Tensor | None = None,
) -> list[list[int]]:
    prompts = lengths if prompts is None else prompts
    token_bounds = left_padded(lengths) if token_bounds is None else token_bounds
    rest = block_size, last_n, sinks, p, keep_ratio
    want = walk(scores, token_bounds, prompts, *rest)
    arguments = scores, token_bounds, torch.tensor(prompts), *rest
    assert_is(run(select_blocks, *arguments), want)
    assert_is(select_blocks_reference(*arguments), want)
    return want


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
    (rows,) = assert_selects(run, torch.full((1, 11), 0.1), (160,), 16, last_n=0, sinks=0, p=0.5)
    assert rows == list(range(3, 83))


def test_p_of_one_keeps_everything(run: Run) -> None:
    lengths = LENGTHS["many, some short or empty"]
    kept = assert_selects(run, scores_for("peaked", lengths, 16), lengths, 16, p=1.0)
    assert [len(rows) for rows in kept] == list(lengths)


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("options", [{"p": 0.2, "keep_ratio": None}, {"p": None, "keep_ratio": 0.1}])
def test_a_total_that_is_not_finite_keeps_its_whole_request(run: Run, value: float, options: dict[str, Any]) -> None:
    scores = scores_for("even", [160, 160], 16)
    scores[0, 3] = value
    arguments = scores, left_padded([160, 160]), torch.tensor([160, 160]), 16, 0, 0, *options.values()
    for kept_indices, bounds in (run(select_blocks, *arguments), select_blocks_reference(*arguments)):
        assert kept_indices[0].tolist() == list(range(3, 163)) and bounds[0].tolist() == [0, 160]
        assert 0 < bounds[1, 0] < 160 == bounds[1, 1]


def test_a_million_tokens(run: Run) -> None:
    """16,384 blocks: several turns of the loop over blocks, and ties that reach from one into the next."""
    tokens, block_size = 1 << 20, 64
    scores = (scores_for("peaked", [tokens], block_size) * 100).ceil() / 100
    stream = scores, torch.tensor([[0, tokens]], dtype=torch.int32), torch.tensor([tokens]), block_size, 0, 0
    (want,), _ = select_blocks_reference(*stream, 0.97, None)
    assert 0.05 < len(want) / tokens < 0.95
    # only the marks: to write the rows, the interpreter would need a program for each block
    offsets, whole, kept = run(mark_blocks, *stream, 0.97, False)
    assert kept.tolist() == [len(want)]
    blocks = whole[0, :-1].nonzero().squeeze(1)
    torch.testing.assert_close(blocks, want[::block_size] // block_size, rtol=0, atol=0)
    assert offsets[0, blocks].tolist() == list(range(0, len(want), block_size))


@pytest.mark.parametrize("side", ["left", "right", "packed"])
def test_a_request_keeps_in_a_batch_what_it_keeps_alone(run: Run, side: str) -> None:
    lengths, block_size = (150, 33, 0, 97), 16
    ends = torch.tensor({"left": (150,) * 4, "right": lengths, "packed": (150, 183, 183, 280)}[side])
    token_bounds = torch.stack((ends - torch.tensor(lengths), ends), 1).int()
    scores = scores_for("peaked", [int(ends.max())], block_size).repeat(4, 1)
    together = assert_selects(run, scores, lengths, block_size, p=0.7, token_bounds=token_bounds)
    for r, (start, end) in enumerate(token_bounds.tolist()):
        own = torch.tensor([[0, end - start]], dtype=torch.int32)
        (alone,) = assert_selects(run, scores[r : r + 1], [end - start], block_size, p=0.7, token_bounds=own)
        assert [start + row for row in alone] == together[r]


@pytest.mark.parametrize("name", ["p", "keep_ratio"])
def test_each_request_can_have_its_own_fraction(run: Run, name: str) -> None:
    lengths, fractions = (300, 160, 200), (0.3, 1.0, 0.8)
    scores, bounds = scores_for("peaked", lengths, 16), left_padded(lengths)
    want = []
    for r, fraction in enumerate(fractions):
        choice: dict[str, Any] = {"p": None, "keep_ratio": None, name: fraction}
        want += walk(scores[r : r + 1], bounds[r : r + 1], lengths[r : r + 1], 16, 5, 6, **choice)
    choice = {"p": None, "keep_ratio": None, name: torch.tensor(fractions, dtype=torch.float64)}
    arguments = scores, bounds, torch.tensor(lengths), 16, 5, 6
    assert len({len(rows) / length for rows, length in zip(want, lengths, strict=True)}) == 3
    assert_is(run(select_blocks, *arguments, **choice), want)
    assert_is(select_blocks_reference(*arguments, **choice), want)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "scores": ({"scores": torch.zeros(1, 2, dtype=torch.float64)}, r"scores is torch\.float64"),
    "shape": ({"scores": torch.zeros(2)}, r"scores .* of shape \(2,\).*\(batch, blocks\)"),
    "no requests": ({"scores": torch.zeros(0, 2)}, "scores of no requests"),
    "token_bounds": ({"token_bounds": torch.zeros(1, 2)}, r"token_bounds is torch\.float32"),
    "prompt_lengths": ({"prompt_lengths": torch.tensor([16, 1])}, r"wanted int32 or int64, \(1,\)"),
    "sizes": ({"block_size": 0}, "block_size 0"),
    "neither": ({"p": None}, "p None, keep_ratio None"),
    "both": ({"keep_ratio": 0.5}, r"p 0\.5, keep_ratio 0\.5"),
    "out of range": ({"p": 1.5}, r"p 1\.5"),
    "by request": ({"p": torch.ones(2, dtype=torch.float64)}, r"p or keep_ratio is .*wanted float64, \(1,\)"),
    "both by request": ({"p": torch.ones(1), "keep_ratio": torch.ones(1)}, "wanted one of them"),
}


@pytest.mark.parametrize("options, message", BAD.values(), ids=BAD.keys())
def test_refusals_say_what_was_wanted(run: Run, options: dict[str, Any], message: str) -> None:
    good = dict(
        scores=torch.zeros(1, 2),
        token_bounds=torch.tensor([[0, 16]], dtype=torch.int32),
        prompt_lengths=torch.tensor([16]),
        block_size=16,
        last_n=4,
        sink_tokens=4,
        p=0.5,
        keep_ratio=None,
    )
    with pytest.raises(ValueError, match=message):
        run(select_blocks, **(good | options))


def test_the_number_of_requests_compiles_nothing_anew() -> None:
    """Lengths lie behind bounds in one tensor: aligned or not by how many requests there are."""
    kernel: Any = _mark_kernel
    (lengths,) = [parameter for parameter in kernel.params if parameter.name == "prompt_lengths"]
    assert lengths.do_not_specialize_on_alignment
