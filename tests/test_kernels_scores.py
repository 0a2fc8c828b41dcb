"""The block score kernels in Triton's interpreter, against float64."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton_worker import Run

from uniprefill_fx.kernels.block_scores.kernel import block_scores
from uniprefill_fx.kernels.block_scores.naive import block_scores_reference
from uniprefill_fx.kernels.tiles import Tiles

Side = Literal["left", "right", "both"]


@dataclass(frozen=True)
class Case:
    """A padded batch. What is padding holds NaN: whoever reads it shows."""

    heads: int
    kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    last_n: int
    block_size: int
    dtype: torch.dtype
    token_first: bool = False
    """In memory (batch, tokens, heads, head_dim), with room behind each head: no two dimensions merge."""
    side: Side = "left"
    """Where the padding of shorter requests lies."""

    @property
    def token_bounds(self) -> Tensor:
        columns = max(self.lengths)
        share = {"left": 1.0, "right": 0.0, "both": 0.5}[self.side]
        starts = [int(share * (columns - length)) for length in self.lengths]
        return torch.tensor([[a, a + length] for a, length in zip(starts, self.lengths, strict=True)]).int()

    def tensors(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        batch, columns, parts = len(self.lengths), max(self.lengths), []
        for heads, spread in ((self.heads, 2.5), (self.kv_heads, 1.0)):  # logits of a standard deviation of 2.5
            if self.token_first:
                x = torch.randn(batch, columns, heads, self.head_dim + 8, generator=generator)[..., : self.head_dim]
                x = (x * spread).to(self.dtype).transpose(1, 2)
            else:
                x = (torch.randn(batch, heads, columns, self.head_dim, generator=generator) * spread).to(self.dtype)
            for row, (start, end) in zip(x, self.token_bounds.tolist(), strict=True):
                row[:, :start] = row[:, end:] = torch.nan
            parts.append(x)
        return parts[0], parts[1]

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        q, k = self.tensors(seed)
        sizes = {"scale": self.head_dim**-0.5, "last_n": self.last_n, "block_size": self.block_size}
        return {"q": q, "k": k, "token_bounds": self.token_bounds, **sizes}


CASES = {
    "grouped": Case(8, 2, 64, (300,), 64, 64, torch.bfloat16),
    "odd lengths": Case(6, 2, 80, (129, 0, 17, 70), 48, 32, torch.float16, True),
    "one group, small blocks": Case(2, 2, 96, (77,), 24, 16, torch.float32, True),
    "many tiles of rows and keys": Case(4, 1, 128, (290,), 128, 64, torch.bfloat16),
    "largest head, largest block": Case(4, 1, 256, (200, 90), 32, 128, torch.bfloat16, side="right"),
    "float32, largest head": Case(2, 1, 256, (130,), 16, 64, torch.float32),
    "block size not a power of two": Case(6, 2, 64, (150, 50), 10, 48, torch.float32),
    "one block": Case(2, 1, 64, (5,), 128, 64, torch.float16),
    "many short requests": Case(2, 1, 16, (*range(1, 9), 40, 1, 1, 33), 4, 16, torch.float32, side="both"),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def exact(
    q: Tensor,
    k: Tensor,
    token_bounds: Tensor,
    scale: float,
    last_n: int,
    block_size: int,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """A softmax row at a time, in float64."""
    groups, scores = q.shape[1] // k.shape[1], []
    for r, (start, end) in enumerate(token_bounds.tolist()):
        scores.append(torch.zeros(-(-q.shape[2] // block_size), dtype=torch.float64))
        block_of_key = torch.arange(end - start) // block_size
        for token in range(max(start, end - last_n), end):
            for head in range(q.shape[1]):
                logits = k[r, head // groups, start : token + 1].double() @ q[r, head, token].double() * scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                all_logits = logits if sinks is None else torch.cat([logits, sinks[head].double().reshape(1)])
                scores[-1].index_add_(0, block_of_key[: len(logits)], all_logits.softmax(0)[: len(logits)])
    return torch.stack(scores)


def assert_near(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Within `tolerance` of each block's own score, but for blocks that hold next to nothing."""
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance * 1e-3)


@each_case
def test_scores_are_those_of_float64(run: Run, case: Case) -> None:
    arguments = case.arguments()
    got, want = run(block_scores, **arguments), exact(**arguments)
    assert_near(got, want, 3e-6 * run.slack)
    queries = torch.tensor([min(case.last_n, length) for length in case.lengths])
    torch.testing.assert_close(got.sum(1), case.heads * queries.float(), rtol=1e-5, atol=0)
    blocks = torch.tensor([-(-length // case.block_size) for length in case.lengths])
    behind = torch.arange(got.shape[1]) >= blocks[:, None]
    assert got.shape[1] == blocks.max() and bool((got[behind] == 0).all())


@each_case
def test_twin_agrees_with_float64(case: Case) -> None:
    assert_near(block_scores_reference(**case.arguments()), exact(**case.arguments()), 1e-5)


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that an operator made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def test_a_block_longer_than_the_prompt_is_one_block() -> None:
    """Memory does not grow with it."""
    arguments = CASES["one block"].arguments()
    with Largest() as largest:
        got = block_scores_reference(**arguments | {"block_size": 10**8})
    assert_near(got, exact(**arguments), 1e-5)
    assert largest.numel < 10**4


def test_more_queries_than_any_prompt_has(run: Run) -> None:
    """Nothing is laid out for them: 2³¹ - 1 rows a head would fit no memory."""
    arguments = CASES["one block"].arguments() | {"last_n": 2**31 - 1}
    want = exact(**arguments)
    assert_near(run(block_scores, **arguments), want, 3e-6 * run.slack)
    assert_near(block_scores_reference(**arguments), want, 1e-5)


@pytest.mark.parametrize("softcap", [1.0, 30.0])
def test_softcap(run: Run, softcap: float) -> None:
    arguments = CASES["odd lengths"].arguments(1)
    want = exact(**arguments, softcap=softcap)
    assert_near(run(block_scores, **arguments, softcap=softcap), want, 1e-5 * run.slack)
    assert_near(block_scores_reference(**arguments, softcap=softcap), want, 1e-5)


def test_sinks_take_their_share(run: Run) -> None:
    arguments = CASES["odd lengths"].arguments(7)
    sinks = torch.linspace(-3.0, 9.0, 6).half()  # from a share of next to nothing to most of the mass
    want, without = exact(**arguments, sinks=sinks), exact(**arguments)
    assert want.sum() < 0.8 * without.sum()
    assert_near(run(block_scores, **arguments, sinks=sinks[:, None]), want, 1e-5 * run.slack)
    assert_near(block_scores_reference(**arguments, sinks=sinks), want, 1e-5)


FP8_CASES = ["grouped", "odd lengths"]


@pytest.mark.parametrize("name", FP8_CASES)
def test_fp8_is_exact_where_e4m3_holds_the_operands(run: Run, name: str) -> None:
    case = CASES[name]
    arguments = case.arguments()
    generator = torch.Generator().manual_seed(2)
    for x in (
        arguments["q"],
        arguments["k"],
    ):  # whole numbers up to 7 times a power of two that differs between blocks of tokens
        power = 2.0 ** (torch.arange(x.shape[2]) // 16 % 3)
        x.copy_(torch.randint(-7, 8, x.shape, generator=generator) * power[:, None] / 8)
        x[..., 0] = 7 * power / 8
    want = exact(**arguments)
    assert_near(run(block_scores, **arguments, dtype="fp8"), want, 5e-6 * run.slack)
    assert_near(block_scores_reference(**arguments, dtype="fp8"), want, 5e-6)


@pytest.mark.parametrize("name", FP8_CASES)
def test_fp8_stays_near_on_any_operands(run: Run, name: str) -> None:
    """The interpreter rounds 2% of the values wrongly (a carry into the exponent is lost), the twin does not."""
    arguments = CASES[name].arguments(2)
    want = exact(**arguments)
    for got in (run(block_scores, **arguments, dtype="fp8"), block_scores_reference(**arguments, dtype="fp8")):
        error = (got - want).norm() / want.norm()
        assert 1e-5 < error < 0.02  # above: the operands were rounded at all


@pytest.mark.parametrize("tiles", [Tiles(128, 64, 4, 2), Tiles(16, 16, 4, 1), Tiles(256, 64, 8, 2, registers=168)])
def test_tiles_do_not_change_the_scores(run: Run, tiles: Tiles) -> None:
    arguments = CASES["block size not a power of two"].arguments(3)
    assert_near(run(block_scores, **arguments, tiles=tiles), exact(**arguments), 3e-6 * run.slack)


def with_unshared_tiles(**arguments: Any) -> Tensor:
    """As on a long stream, where a program goes through all tiles of queries (runs in the worker)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uniprefill_fx.kernels.block_scores.kernel.MIN_PROGRAMS", 1)
        return block_scores(**arguments)


@pytest.mark.parametrize("dtype, tolerance", [("input", 3e-6), ("fp8", 0.2)])
def test_a_program_can_take_many_tiles_of_queries(run: Run, dtype: str, tolerance: float) -> None:
    arguments = CASES["many tiles of rows and keys"].arguments(6)
    got = run(with_unshared_tiles, **arguments, dtype=dtype)
    assert_near(got, exact(**arguments), tolerance * run.slack)
    torch.testing.assert_close(got, run(block_scores, **arguments, dtype=dtype), rtol=0, atol=0)


def test_large_logits_do_not_overflow(run: Run) -> None:
    arguments = CASES["one group, small blocks"].arguments(4)
    arguments["q"] *= 300
    got = run(block_scores, **arguments)
    assert_near(got, exact(**arguments), 1e-3 * run.slack)  # logits near 1,000 in float32 are good to 1e-4


def test_a_nan_key_spoils_only_its_own_request(run: Run) -> None:
    arguments = CASES["block size not a power of two"].arguments(5)
    arguments["k"][1, :, 110] = torch.nan
    got = run(block_scores, **arguments)
    assert got[0].isfinite().all()
    assert got[1].isnan().any()  # the selection then keeps all of this request


SIDES: tuple[Side, ...] = ("left", "right", "both")
UNEQUAL = {side: Case(4, 2, 64, (150, 33, 0, 97), 20, 32, torch.float16, side == "both", side) for side in SIDES}


@pytest.mark.parametrize("case", UNEQUAL.values(), ids=UNEQUAL.keys())
@pytest.mark.parametrize("dtype", ["input", "fp8"])
def test_a_request_scores_in_a_batch_as_it_does_alone(run: Run, case: Case, dtype: str) -> None:
    arguments = case.arguments(8)
    got = run(block_scores, **arguments, dtype=dtype)
    for r, (start, end) in enumerate(case.token_bounds.tolist()):
        own = {name: arguments[name][r : r + 1, :, start:end] for name in ("q", "k")}
        own["token_bounds"] = torch.tensor([[0, end - start]], dtype=torch.int32)
        alone = run(block_scores, **(arguments | own), dtype=dtype)
        blocks = -(-case.lengths[r] // case.block_size)
        assert alone.shape == (1, blocks) and got[r, blocks:].count_nonzero() == 0
        torch.testing.assert_close(got[r, :blocks], alone[0], rtol=0, atol=0)


def packed_scores(q: Tensor, k: Tensor, token_bounds: Tensor, **options: Any) -> Tensor:
    """(heads, tokens, head_dim) of a stream that packs its requests one after another (runs in the worker)."""
    q, k = (x[None].expand(len(token_bounds), -1, -1, -1) for x in (q, k))
    assert q.stride(0) == k.stride(0) == 0
    return block_scores(q, k, token_bounds, **options)


def test_a_packed_stream_is_a_batch_with_a_stride_of_zero(run: Run) -> None:
    arguments = Case(4, 2, 64, (200,), 20, 32, torch.float16, True).arguments(9)
    arguments["token_bounds"] = torch.tensor([[0, 70], [70, 70], [70, 103], [103, 200]], dtype=torch.int32)
    want = exact(**(arguments | {name: arguments[name].expand(4, -1, -1, -1) for name in ("q", "k")}))
    stream = {name: arguments[name][0] for name in ("q", "k")}
    assert_near(run(packed_scores, **(arguments | stream)), want, 3e-6 * run.slack)


class Counted:
    """A launch of a kernel, counted by its name."""

    def __init__(self, kernel: Any, calls: list[str]) -> None:
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.calls.append(self.kernel.fn.__name__)
        return self.kernel[grid]


def launches(**arguments: Any) -> list[str]:
    """(runs in the worker)"""
    calls: list[str] = []
    module = importlib.import_module("uniprefill_fx.kernels.block_scores.kernel")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            patch.setattr(module, name, Counted(getattr(module, name), calls))
        block_scores(**arguments)
    return calls


def test_a_batch_is_one_launch_of_each_kernel(run: Run) -> None:
    arguments = UNEQUAL["left"].arguments()
    assert run(launches, **arguments) == ["_block_lse_kernel", "_row_lse_kernel", "_combine_kernel"]
    assert run(launches, **arguments, dtype="fp8")[:2] == ["_quantise_queries_kernel", "_block_lse_kernel"]


@pytest.mark.parametrize("heads_at_once", [1, 3, 100])
def test_the_twin_takes_some_heads_at_a_time(monkeypatch: pytest.MonkeyPatch, heads_at_once: int) -> None:
    monkeypatch.setattr("uniprefill_fx.kernels.block_scores.naive.LOGITS", heads_at_once * 129 * 48)
    arguments = CASES["odd lengths"].arguments(1)
    sinks = torch.linspace(-3.0, 3.0, 6)
    want = exact(**arguments, sinks=sinks)
    got = block_scores_reference(**arguments, sinks=sinks, sums=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"q": torch.zeros(1, 3, 8, 16)}, r"q \(1, 3, 8, 16\).*multiple"),
    "batch": ({"k": torch.zeros(2, 2, 8, 16)}, r"k \(2, 2, 8, 16\).*\(batch, kv_heads"),
    "head_dim": ({"q": torch.zeros(1, 2, 8, 300), "k": torch.zeros(1, 2, 8, 300)}, "head_dim 300: wanted 1 to 256"),
    "dtypes": ({"k": torch.zeros(1, 2, 8, 16).half()}, r"k is torch\.float16"),
    "strides": ({"k": torch.zeros(1, 2, 16, 8).mT}, "strides"),
    "block_size": ({"block_size": 8}, "block_size 8: wanted 16 to 128"),
    "last_n": ({"last_n": 0}, "last_n 0"),
    "scale": ({"scale": -1.0}, "scale -1.0"),
    "softcap": ({"softcap": 0.0}, "softcap 0.0"),
    "dtype": ({"dtype": "fp4"}, "'fp4'"),
    "sinks": ({"sinks": torch.zeros(3)}, r"sinks of shape \(3,\)"),
    "token_bounds": ({"token_bounds": torch.tensor([[0, 8]])}, r"token_bounds is torch\.int64"),
    "requests": ({"token_bounds": torch.zeros(2, 2, dtype=torch.int32)}, r"\(2, 2\): wanted int32, \(1, 2\)"),
    "registers": (
        {"tiles": Tiles(512, 128, 8, 1, registers=128)},
        r"block_size 16, Tiles\(keys=512.*too much for \d+ bytes of shared memory and the registers",
    ),
    "shared memory": (
        {"q": torch.zeros(1, 2, 8, 160), "k": torch.zeros(1, 2, 8, 160), "block_size": 128},
        r"float32, head_dim 160, block_size 128, any tiles: too much for \d+ bytes of shared memory",
    ),
}


@pytest.mark.parametrize("options, message", BAD.values(), ids=BAD.keys())
def test_refusals_say_what_was_wanted(run: Run, options: dict[str, Any], message: str) -> None:
    good = dict(
        q=torch.zeros(1, 2, 8, 16),
        k=torch.zeros(1, 2, 8, 16),
        token_bounds=torch.tensor([[0, 8]], dtype=torch.int32),
        scale=1.0,
        last_n=4,
        block_size=16,
    )
    with pytest.raises(ValueError, match=message):
        run(block_scores, **(good | options))


def test_cpu_tensors_need_the_interpreter() -> None:
    import triton

    if triton.knobs.runtime.interpret:
        pytest.skip("this process interprets")
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        block_scores(**CASES["one block"].arguments())
