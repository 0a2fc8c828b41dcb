"""The block score kernels in Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_worker import Run

from uniprefill_fx.kernels.block_scores.kernel import block_scores
from uniprefill_fx.kernels.block_scores.naive import block_scores_reference
from uniprefill_fx.kernels.tiles import Tiles


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    last_n: int
    block_size: int
    dtype: torch.dtype
    token_first: bool = False
    """In memory (tokens, heads, head_dim), with room for other columns behind each head: no two dimensions merge."""

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0).int()

    def tensors(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens, parts = sum(self.lengths), []
        for heads, spread in ((self.heads, 2.5), (self.kv_heads, 1.0)):  # logits of a standard deviation of 2.5
            if self.token_first:
                x = torch.randn(tokens, heads, self.head_dim + 8, generator=generator)[..., : self.head_dim]
                parts.append((x * spread).to(self.dtype).transpose(0, 1))
            else:
                parts.append((torch.randn(heads, tokens, self.head_dim, generator=generator) * spread).to(self.dtype))
        return parts[0], parts[1]

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        q, k = self.tensors(seed)
        sizes = {"scale": self.head_dim**-0.5, "last_n": self.last_n, "block_size": self.block_size}
        return {"q": q, "k": k, "cu_seqlens": self.cu_seqlens, **sizes}


CASES = {
    "grouped": Case(8, 2, 64, (300,), 64, 64, torch.bfloat16),
    "odd lengths": Case(6, 2, 80, (129, 0, 17, 70), 48, 32, torch.float16, True),
    "one group, small blocks": Case(2, 2, 96, (77,), 24, 16, torch.float32, True),
    "many tiles of rows and keys": Case(4, 1, 128, (513,), 128, 64, torch.bfloat16),
    "largest head, largest block": Case(4, 1, 256, (200, 90), 32, 128, torch.bfloat16),
    "float32, largest head": Case(2, 1, 256, (130,), 16, 64, torch.float32),
    "block size not a power of two": Case(6, 2, 64, (150, 50), 10, 48, torch.float32),
    "one block": Case(2, 1, 64, (5,), 128, 64, torch.float16),
    "many short requests": Case(2, 1, 16, (*range(1, 9), 40, 1, 1, 33), 4, 16, torch.float32),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def exact(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    last_n: int,
    block_size: int,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """A softmax row at a time, in float64."""
    bounds, groups = cu_seqlens.tolist(), q.shape[0] // k.shape[0]
    scores = torch.zeros(q.shape[1] // block_size + len(bounds) - 1, dtype=torch.float64)
    for r in range(len(bounds) - 1):
        start, end = bounds[r], bounds[r + 1]
        slot_of_key = start // block_size + r + torch.arange(end - start) // block_size
        for token in range(max(start, end - last_n), end):
            for head in range(q.shape[0]):
                logits = k[head // groups, start : token + 1].double() @ q[head, token].double() * scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                all_logits = logits if sinks is None else torch.cat([logits, sinks[head].double().reshape(1)])
                scores.index_add_(0, slot_of_key[: len(logits)], all_logits.softmax(0)[: len(logits)])
    return scores


def assert_near(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Within `tolerance` of each block's own score, but for blocks that hold next to nothing."""
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance * 1e-3)


@each_case
def test_scores_are_those_of_float64(run: Run, case: Case) -> None:
    arguments = case.arguments()
    got, want = run(block_scores, **arguments), exact(**arguments)
    assert_near(got, want, 3e-6 * run.slack)
    queries = sum(min(case.last_n, length) for length in case.lengths)
    assert got.sum().item() == pytest.approx(case.heads * queries, rel=1e-5)
    assert bool((got[want == 0] == 0).all())  # entries that no block uses


@each_case
def test_twin_agrees_with_float64(case: Case) -> None:
    assert_near(block_scores_reference(**case.arguments()), exact(**case.arguments()), 1e-5)


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
        power = 2.0 ** (torch.arange(x.shape[1]) // 16 % 3)
        x.copy_(torch.randint(-7, 8, x.shape, generator=generator) * power[:, None] / 8)
        x[:, :, 0] = 7 * power / 8
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


@pytest.mark.parametrize("tiles", [Tiles(128, 64, 4, 2), Tiles(16, 16, 4, 1), Tiles(512, 128, 8, 3, registers=128)])
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
    arguments["k"][:, 160] = torch.nan
    got = run(block_scores, **arguments)
    first_of_second = 150 // 48 + 1
    assert got[:first_of_second].isfinite().all()
    assert got[first_of_second:].isnan().any()  # the selection then keeps all of this request


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"q": torch.zeros(3, 8, 16)}, r"q \(3, 8, 16\).*multiple"),
    "head_dim": ({"q": torch.zeros(2, 8, 300), "k": torch.zeros(2, 8, 300)}, "head_dim 300: wanted 1 to 256"),
    "dtypes": ({"k": torch.zeros(2, 8, 16).half()}, r"k is torch\.float16"),
    "strides": ({"k": torch.zeros(2, 16, 8).mT}, "strides"),
    "block_size": ({"block_size": 8}, "block_size 8: wanted 16 to 128"),
    "last_n": ({"last_n": 0}, "last_n 0"),
    "scale": ({"scale": -1.0}, "scale -1.0"),
    "softcap": ({"softcap": 0.0}, "softcap 0.0"),
    "dtype": ({"dtype": "fp4"}, "'fp4'"),
    "sinks": ({"sinks": torch.zeros(3)}, r"sinks of shape \(3,\)"),
    "cu_seqlens": ({"cu_seqlens": torch.tensor([0, 8])}, r"cu_seqlens is torch\.int64"),
    "shared memory": (
        {"q": torch.zeros(2, 8, 160), "k": torch.zeros(2, 8, 160), "block_size": 128},
        "wanted block_size up to 64",
    ),
}


@pytest.mark.parametrize("options, message", BAD.values(), ids=BAD.keys())
def test_refusals_say_what_was_wanted(run: Run, options: dict[str, Any], message: str) -> None:
    good = dict(
        q=torch.zeros(2, 8, 16),
        k=torch.zeros(2, 8, 16),
        cu_seqlens=torch.tensor([0, 8], dtype=torch.int32),
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
