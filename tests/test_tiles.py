"""Tiles fit the GPU that they are chosen for: by what is known of it, and by compiling for it, without a card."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cardless_launch import SHARED_MEMORY, Machine, compiling_for
from torch import Tensor

from uniprefill_fx.kernels.block_scores.kernel import block_scores
from uniprefill_fx.kernels.checks import MAX_BLOCK, MIN_BLOCK
from uniprefill_fx.kernels.position_attention.kernel import position_attention
from uniprefill_fx.kernels.select_blocks.kernel import queue_selection
from uniprefill_fx.kernels.tiles import Tiles, attention_tiles, fit_attention, fit_scores, score_tiles
from uniprefill_fx.lowering import devices
from uniprefill_fx.specs import AttentionSpec

DIMS = (1, 16, 40, 64, 80, 128, 192, 256)
SMALL = 65_536  # bytes of shared memory of an older card
HOPPER = SHARED_MEMORY[90]
BF16, FP32 = torch.bfloat16, torch.float32
ROWS = 300
BOUNDS = torch.tensor([[0, ROWS]], dtype=torch.int32)


def test_what_is_chosen_fits_and_hopper_keeps_what_was_measured() -> None:
    for limit, dim, item, fp8, block in itertools.product(
        (SMALL, *SHARED_MEMORY.values()), DIMS, (2, 4), (False, True), (MIN_BLOCK, 48, 64, MAX_BLOCK)
    ):
        tiles = score_tiles(dim, item, fp8, block, limit)
        assert tiles is None or fit_scores(tiles, dim, item, fp8, block, limit)
        float32 = item == 4 and not fp8  # which the op leaves to plain torch; its parts of wide blocks are large
        assert tiles is not None or float32 or (limit == SMALL and dim > 128), (limit, dim, item, fp8, block)
    narrow, wide = Tiles(256, 64, 8, 2), Tiles(128, 64, 8, 1)
    assert [score_tiles(dim, 2, False, 64, HOPPER) for dim in (64, 128, 256)] == [narrow, narrow, wide]
    narrow, wide = Tiles(128, 64, 4, 2, registers=128), Tiles(128, 64, 4, 2)
    assert [score_tiles(dim, 2, True, 64, HOPPER) for dim in (64, 128, 256)] == [narrow, narrow, wide]


def test_what_is_chosen_for_attention_fits_too() -> None:
    for limit, dim, v_dim, item, queries, window in itertools.product(
        (SMALL, *SHARED_MEMORY.values()), DIMS, DIMS, (2, 4), (1, 300), (None, 128)
    ):
        tiles = attention_tiles(dim, v_dim, item, queries, 4, window, limit)
        assert tiles is None or fit_attention(tiles, dim, v_dim, item, limit)
        assert tiles is not None or (limit == SMALL and item == 4 and max(dim, v_dim) > 128)
    chosen = [attention_tiles(dim, dim, 2, 300, 4, None, HOPPER) for dim in (64, 128, 256)]
    assert chosen == [Tiles(64, 128, 8, 3), Tiles(128, 128, 8, 2), Tiles(64, 128, 8, 2)]


def test_a_limit_of_registers_below_the_accumulator_is_refused() -> None:
    """ptxas asks for 158 registers here, "Insufficient registers (128)"."""
    capped = Tiles(512, 128, 8, 1, registers=128)
    assert not fit_scores(capped, 64, 2, False, 64, 1 << 20)
    assert not fit_scores(Tiles(512, 128, 8, 1), 64, 2, False, 64, 1 << 20)
    assert fit_scores(Tiles(256, 64, 8, 1, registers=128), 64, 2, False, 64, 1 << 20)
    assert not fit_attention(Tiles(128, 128, 4, 2), 128, 128, 2, 1 << 20)


def scores(dim: int, dtype: torch.dtype, block: int, mode: Any = "input", **terms: Any) -> None:
    q, k = (torch.zeros(1, heads, ROWS, dim, dtype=dtype) for heads in (8, 2))
    block_scores(q, k, BOUNDS, dim**-0.5, 128, block, dtype=mode, **terms)


def select(block: int, top_k: bool) -> None:
    scores = torch.zeros(1, -(-ROWS // block))
    queue_selection(scores, BOUNDS, torch.tensor([ROWS], dtype=torch.int32), block, 16, 16, 0.5, top_k)


def every_term() -> dict[str, Any]:
    """All terms that a kernel can have at once."""
    ones = torch.ones(1, ROWS, dtype=torch.bool)
    return {"softcap": 30.0, "sinks": torch.zeros(8), "key_mask": ones, "sequence_ids": ones.int()}


def attention(dim: int, v_dim: int, dtype: torch.dtype, queries: int, **terms: Any) -> None:
    def rows(heads: int, count: int, width: int) -> Tensor:
        return torch.zeros(1, heads, count, width, dtype=dtype)

    places = torch.arange(ROWS)[None]
    position_attention(
        rows(8, queries, dim), rows(2, ROWS, dim), rows(2, ROWS, v_dim), places[:, ROWS - queries :].contiguous(),
        places, None, AttentionSpec(**terms),
    )  # fmt: skip


def assert_fit(found: list[Machine], capability: int, *names: str) -> None:
    assert {m.name for m in found} >= set(names), found
    assert all(m.fits(capability) for m in found), found


def test_a_card_that_is_not_there_tells_what_it_would() -> None:
    """The sample of every day: the scoring of long prompts on Hopper, in both types, and the selection."""
    with compiling_for(90) as found:
        scores(128, BF16, 64)
        select(64, top_k=False)
    assert_fit(found, 90, "_block_lse_kernel", "_row_lse_kernel", "_combine_kernel", "_mark_kernel", "_write_kernel")
    (main,) = (m for m in found if m.name == "_block_lse_kernel")
    assert 2 * main.shared < 228 * 1024 and 2 * main.registers * main.threads <= 65_536  # two programs side by side
    assert main.spilled == 0


def test_what_the_compiler_refuses_is_seen_here() -> None:
    """The tile of `test_a_limit_of_registers_below_the_accumulator_is_refused`, past the check."""
    with compiling_for(90), pytest.MonkeyPatch.context() as patch:
        patch.setattr("uniprefill_fx.kernels.checks.fit_scores", lambda *_: True)
        with pytest.raises(Exception, match="ptxas"):
            scores(64, BF16, 64, tiles=Tiles(512, 128, 8, 1, registers=128))


CAPABILITIES = pytest.mark.parametrize("capability", SHARED_MEMORY)


@pytest.mark.slow
@CAPABILITIES
@pytest.mark.parametrize("block", [16, 48, 64, 128])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_tile_of_the_scores_compiles(capability: int, dim: int, block: int) -> None:
    with compiling_for(capability) as found:
        scores(dim, BF16, block)
        scores(dim, BF16, block, softcap=30.0, sinks=torch.zeros(8))
        if capability >= 89:
            scores(dim, BF16, block, "fp8")
        if score_tiles(dim, 4, False, block, SHARED_MEMORY[capability]) is not None:
            scores(dim, FP32, block)
    assert_fit(found, capability, "_block_lse_kernel")


@pytest.mark.slow
@CAPABILITIES
@pytest.mark.parametrize("block", [16, 48, 64, 128])
def test_every_selection_compiles(capability: int, block: int) -> None:
    with compiling_for(capability) as found:
        select(block, top_k=False)
        select(block, top_k=True)
    assert_fit(found, capability, "_mark_kernel", "_write_kernel")


@pytest.mark.slow
@CAPABILITIES
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_every_tile_of_the_attention_compiles(capability: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    with compiling_for(capability) as found:
        for queries, window in ((ROWS, None), (ROWS, 128), (16, None)):
            attention(*dims, dtype, queries, window=window)
        attention(*dims, dtype, ROWS, window=128, **every_term())
        attention(*dims, dtype, ROWS, chunk=64, bias=torch.zeros(8, 1, ROWS))
    assert_fit(found, capability, "_attention_kernel")


@pytest.mark.parametrize("hip, cuda, registered", [(None, True, True), ("6.3", True, False), (None, False, False)])
def test_kernels_are_for_nvidia_alone(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, cuda: bool, registered: bool
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert devices.runs_kernels() is registered
