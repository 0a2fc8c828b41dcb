"""The attention kernel in Triton's interpreter, and its twin, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attention_cases import CASES, Case, exact
from torch import Tensor
from triton_worker import Run

from uniprefill_fx.kernels.position_attention.kernel import position_attention
from uniprefill_fx.kernels.position_attention.naive import position_attention_reference
from uniprefill_fx.kernels.tiles import Tiles, attention_tiles
from uniprefill_fx.specs import AttentionSpec

TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: 5e-6}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype, slack: float = 1.0) -> None:
    assert got.dtype == dtype and got.shape == want.shape
    assert got.transpose(1, 2).is_contiguous()
    if dtype != torch.float32:  # a card also rounds the weights to it, which the interpreter does in float32
        slack = min(slack, 2.0)
    tolerance = TOLERANCE[dtype] * slack
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@each_case
def test_attention_is_that_of_float64(run: Run, case: Case) -> None:
    arguments = case.arguments()
    assert_near(run(position_attention, **arguments), exact(**arguments), case.dtype, run.slack)


@each_case
def test_twin_agrees_with_float64(case: Case) -> None:
    assert_near(position_attention_reference(**case.arguments(1)), exact(**case.arguments(1)), case.dtype)


OTHER_TILES = [
    *itertools.product(
        ("window by position", "requests, everything", "second chunk"), (Tiles(32, 16, 4, 1), Tiles(16, 256, 8, 3))
    ),
    ("window by position", Tiles(32, 32, 4, 1, heads=2)),
    ("window by row, batch", Tiles(16, 64, 4, 1, heads=4)),
    ("requests, window by position", Tiles(32, 16, 4, 1, heads=2)),
    ("sinks and nothing else", Tiles(32, 32, 4, 1, heads=2)),
    ("second chunk", Tiles(64, 128, 8, 1, heads=2)),
]


@pytest.mark.parametrize("name, tiles", OTHER_TILES)
def test_tiles_do_not_change_the_result(run: Run, name: str, tiles: Tiles) -> None:
    arguments = CASES[name].arguments(2)
    assert_near(run(position_attention, **arguments, tiles=tiles), exact(**arguments), CASES[name].dtype, run.slack)


@pytest.mark.parametrize(
    "groups, window, queries, heads",
    [(8, 128, 9000, 4), (16, 128, 9000, 4), (6, 128, 9000, 2), (5, 128, 9000, 1), (8, None, 9000, 1), (8, 128, 4, 1)],
)
def test_heads_share_tiles_of_narrow_windows(groups: int, window: int | None, queries: int, heads: int) -> None:
    narrow, wide = (attention_tiles(64, 64, 2, queries, groups, w, 1 << 18) for w in (window, 4096))
    assert narrow is not None and wide is not None and (narrow.heads, wide.heads) == (heads, 1)


def test_keys_outside_the_window_are_not_read(run: Run) -> None:
    """NaN in a key that no query may see spoils nothing, however near its row is."""
    arguments = CASES["window by position"].arguments(3)
    want = exact(**arguments)
    positions = arguments["k_positions"][0]
    outside = positions <= positions[-1] - 90
    for x in (arguments["k"], arguments["v"]):
        x[:, :, outside] = torch.nan
    arguments["q"], arguments["q_positions"] = arguments["q"][:, :, -1:], positions[None, -1:]
    assert 0 < int((~outside).sum()) < 90  # the window is narrower in rows than in positions
    assert_near(run(position_attention, **arguments), want[:, :, -1:], torch.float32, run.slack)


def test_large_logits_do_not_overflow(run: Run) -> None:
    arguments = CASES["sinks and nothing else"].arguments(4)
    arguments["q"] *= 30
    got = run(position_attention, **arguments)
    torch.testing.assert_close(got.double(), exact(**arguments), rtol=0, atol=1e-4 * run.slack)


def test_a_nan_key_reaches_the_queries_that_see_it_and_no_other_request(run: Run) -> None:
    arguments = CASES["requests"].arguments(5)
    arguments["k"][0, :, 60] = torch.nan
    got = run(position_attention, **arguments)
    assert got[0, :, :60].isfinite().all() and got[1:].isfinite().all()
    assert got[0, :, 60:].isnan().all()


def test_padding_is_not_read_and_gives_zeros(run: Run) -> None:
    arguments = CASES["requests, window by row"].arguments(7)
    want, token_bounds = exact(**arguments), arguments["token_bounds"].tolist()
    padding = torch.ones(len(token_bounds), 300, dtype=torch.bool)
    for row, (start, end) in zip(padding, token_bounds, strict=True):
        row[start:end] = False
    for name in "qkv":
        arguments[name].transpose(1, 2)[padding] = torch.nan
    got = run(position_attention, **arguments)
    assert_near(got, want, torch.float32, run.slack)
    assert (got.transpose(1, 2)[padding] == 0).all()


def as_on_cuda(**arguments: Any) -> tuple[Tensor, int]:
    """The op's CUDA implementation, and how often the kernel ran (runs in the worker, which interprets it)."""
    from uniprefill_fx.lowering import cuda

    ran: list[str] = []

    def counted(*args: Any, **options: Any) -> Tensor:
        ran.append("kernel")
        return position_attention(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "position_attention", counted)
        names = ("q", "k", "v", "q_positions", "k_positions", "token_bounds")
        operands = [arguments[name] for name in names]
        return cuda._attention(*operands, *arguments["spec"].arguments()), len(ran)


ROUTES = {  # whether the kernel runs, once for all requests, rather than SDPA
    "window by position": True,
    "padded keys": True,
    "requests, window by position": True,
    "requests, terms by row": True,
    "requests": False,
    "requests, one query": False,
    "second chunk": True,
    "drafted tokens": True,
    "one query": True,
    "one query, no window": False,
    "sinks": True,
    "prompts in a row": True,
    "chunks that begin later": True,
    "plain": False,
    "float64": False,
}
OTHER_ROUTES = {
    "one query, no window": Case((4, 2), (16, 16), 50, queries=1, positions=90, sinks=True),
    "requests, one query": Case((4, 2), (16, 16), 50, queries=1, positions=90, pads=(3, 0), window=20),
    "plain": Case((4, 2), (16, 16), 50, positions=90),
    "float64": Case((4, 2), (16, 16), 50, window=9, dtype=torch.float64),
}


@pytest.mark.parametrize("name, kernel", ROUTES.items())
def test_what_runs_on_cuda(run: Run, name: str, kernel: bool) -> None:
    case = (CASES | OTHER_ROUTES)[name]
    arguments = case.arguments(6)
    got, ran = run(as_on_cuda, **arguments)
    assert ran == kernel
    assert_near(got, exact(**arguments), case.dtype, run.slack)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"q": torch.zeros(1, 3, 8, 16)}, r"q \(1, 3, 8, 16\).*multiple"),
    "head_dim": ({"v": torch.zeros(1, 2, 8, 300)}, "v_dim of 1 to 256"),
    "dtypes": ({"v": torch.zeros(1, 2, 8, 16).half()}, r"v torch\.float16"),
    "strides": ({"k": torch.zeros(1, 2, 16, 8).mT}, "strides"),
    "token_bounds": ({"token_bounds": torch.tensor([0, 8])}, r"with token_bounds \(2,\)"),
    "queries of requests": (
        {"q": torch.zeros(1, 2, 4, 16), "token_bounds": torch.tensor([[0, 8]])},
        "as many queries as keys",
    ),
    "queries": ({"q": torch.zeros(1, 2, 9, 16)}, "no more queries than keys"),
    "positions": (
        {"q_positions": torch.arange(8)[None], "k_positions": torch.arange(8)},
        r"k_positions is torch\.int64 of shape \(8,\)",
    ),
    "scale": ({"spec": AttentionSpec(scale=-1.0)}, "scale -1.0"),
    "softcap": ({"spec": AttentionSpec(softcap=0.0)}, "softcap 0.0"),
    "window": ({"spec": AttentionSpec(window=0)}, "window 0"),
    "shared heads": ({"tiles": Tiles(64, 64, 4, 1, heads=2)}, "2 heads in a tile"),
}


@pytest.mark.parametrize("options, message", BAD.values(), ids=BAD.keys())
def test_refusals_say_what_was_wanted(run: Run, options: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = dict.fromkeys(("q_positions", "k_positions", "token_bounds"))
    good |= {name: torch.zeros(1, 2, 8, 16) for name in "qkv"} | {"spec": AttentionSpec()}
    with pytest.raises(ValueError, match=message):
        run(position_attention, **(good | options))
