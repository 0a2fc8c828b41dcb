"""Block-sparse attention in Triton's interpreter, and its twin, against float64 written from the description."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from block_sparse_reference import Result, reference
from cardless_launch import SHARED_MEMORY, Machine, compiling_for
from torch import Tensor
from triton_worker import Run

from uniprefill_fx.kernels.block_sparse_attention import block_energies, kernel
from uniprefill_fx.kernels.block_sparse_attention.api import block_sparse_attention
from uniprefill_fx.kernels.block_sparse_attention.naive import block_sparse_attention_naive, mass_not_computed
from uniprefill_fx.kernels.block_sparse_attention.tiles import AttentionTiles, EnergyTiles

TOLERANCE = 1e-5
SPILLED = 256  # bytes a thread: the limit of registers that makes room for a second program costs some


@dataclass(frozen=True)
class Case:
    """Arguments of one attention: keys in runs of 50 tokens with something in common, so that blocks differ."""

    tokens: int
    heads: tuple[int, int] = (4, 1)
    dims: tuple[int, int] = (16, 16)
    queries: int = 0
    """The last ones of the tokens; 0: all."""
    bounds: tuple[tuple[int, int], ...] = ()
    sinks: bool = False
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    token_first: bool = False
    """In memory (batch, tokens, heads, dim), with other columns behind each head."""
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        torch.manual_seed(seed)
        batch, (heads, kv_heads), (dim, v_dim) = len(self.bounds) or 1, self.heads, self.dims
        common = torch.randn(batch, kv_heads, self.tokens // 50 + 1, dim).repeat_interleave(50, 2)[:, :, : self.tokens]
        given: dict[str, Any] = {
            "q": self._laid_out(2.5 * torch.randn(batch, heads, self.queries or self.tokens, dim)),
            "k": self._laid_out(torch.randn(batch, kv_heads, self.tokens, dim) + 1.3 * common),
            "v": self._laid_out(torch.randn(batch, kv_heads, self.tokens, v_dim)),
            "token_bounds": torch.tensor(self.bounds) if self.bounds else None,
            "softcap": self.softcap,
            "sinks": torch.randn(heads) if self.sinks else None,
            "alpha": 0.3, "block_size": 64, "sink_blocks": 1, "window_blocks": 1, "last_tokens": 20, **self.options,
        }  # fmt: skip
        return given

    def _laid_out(self, x: Tensor) -> Tensor:
        if not self.token_first:
            return x.to(self.dtype)
        batch, heads, tokens, dim = x.shape
        room = torch.empty(batch, tokens, heads, dim + 8, dtype=self.dtype)[..., :dim].transpose(1, 2)
        return room.copy_(x)


CASES = {
    "plain": Case(500),
    "blocks of 128": Case(700, options={"block_size": 128}),
    "one part": Case(500, options={"parts": 1}),
    "not corrected": Case(500, options={"correction": False}),
    "no groups": Case(330, (2, 2)),
    "groups of 3": Case(300, (6, 2), token_first=True),
    "everything in one group": Case(300, (16, 1)),
    "head 96, values of 40": Case(200, (2, 1), (96, 40)),
    "alpha 0": Case(300, options={"alpha": 0.0}),
    "wide window": Case(400, options={"window_blocks": 3, "sink_blocks": 2, "last_tokens": 200}),
    "nothing forced": Case(400, options={"sink_blocks": 0, "last_tokens": 0}),
    "second chunk": Case(500, queries=130),
    "second chunk, unaligned": Case(477, queries=201),
    "one query": Case(300, queries=1),
    "softcap, sinks": Case(400, softcap=8.0, sinks=True),
    "one token": Case(1),
    "less than a block": Case(50, options={"block_size": 128}),
    **{f"{n} tokens": Case(n, options={"block_size": 128, "last_tokens": 0}) for n in (127, 128, 129)},
    "1,000 tokens": Case(1000, (4, 1), options={"block_size": 128}),
    "requests": Case(330, bounds=((0, 330), (250, 330), (0, 100), (40, 300)), sinks=True),
    "requests, some empty or short": Case(300, bounds=((300, 300), (0, 1), (299, 300), (11, 290))),
    "second chunk of requests": Case(330, queries=150, bounds=((100, 330), (250, 330), (0, 200))),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def on_rounding_fp8(**arguments: Any) -> tuple[Tensor, Tensor]:
    """`block_sparse_attention` with casts to e4m3 that round (runs in the worker).

    The interpreter's own leave a carry out of the mantissa unheeded: 1.97 becomes 1.0.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounding(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(x, source, target, mode)
        exact = torch.from_numpy(np.ascontiguousarray(x).view(np.float32))
        return exact.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(x.shape)

    with mock.patch.object(interpreter, "_convert_float", rounding):
        return block_sparse_attention(**arguments)


def check_selection(totals: Tensor, want: Result) -> None:
    assert totals.tolist() == [sum(map(len, want.kept.values())), sum(want.causal.values())]


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9)).item()


@each_case
def test_attention_is_that_of_float64(run: Run, case: Case) -> None:
    arguments = case.arguments()
    want = reference(**arguments)
    got, totals = run(block_sparse_attention, **arguments)
    assert got.dtype == case.dtype and got.transpose(1, 2).is_contiguous()
    tolerance = TOLERANCE * run.slack
    torch.testing.assert_close(got.double(), want.out, rtol=tolerance, atol=tolerance)
    check_selection(totals, want)


@each_case
def test_twin_agrees_with_float64(case: Case) -> None:
    arguments = case.arguments(1)
    want = reference(**arguments)
    got, totals = block_sparse_attention_naive(**arguments)
    torch.testing.assert_close(got.double(), want.out, rtol=TOLERANCE, atol=TOLERANCE)
    check_selection(totals, want)
    options = {name: value for name, value in arguments.items() if name not in ("v", "correction")}
    torch.testing.assert_close(mass_not_computed(**options).double(), want.missing, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_4095_tokens(run: Run) -> None:
    test_attention_is_that_of_float64(run, Case(4095, options={"block_size": 128, "window_blocks": 4}))


def selected(q: Tensor, k: Tensor, token_bounds: Tensor | None, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, lists and what is hidden from the correction (runs in the worker)."""
    from uniprefill_fx.kernels.block_sparse_attention.api import select_blocks_of_keys

    scale = q.shape[3] ** -0.5
    found = select_blocks_of_keys(q, k, k, token_bounds, scale, None, **options, parts=2, dtype="input").blocks
    return found.counts, found.indices, found.pseudo


def test_lists_are_those_of_the_reference(run: Run) -> None:
    arguments = CASES["plain"].arguments(2)
    want = reference(**arguments)
    options = {name: arguments[name] for name in "alpha block_size sink_blocks window_blocks last_tokens".split()}
    counts, indices, pseudo = run(selected, q=arguments["q"], k=arguments["k"], token_bounds=None, **options)
    assert any(len(kept) < want.causal[key] for key, kept in want.kept.items())
    for key, kept in want.kept.items():
        assert indices[key][: counts[key]].tolist() == kept
        assert pseudo[key][: want.causal[key]].tolist() == [
            -torch.inf if j in kept else 0.0 for j in range(want.causal[key])
        ]


def test_alpha_0_is_dense(run: Run) -> None:
    arguments = CASES["alpha 0"].arguments(3)
    q, k, v = (arguments[name] for name in "qkv")
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    got, (computed, causal) = run(block_sparse_attention, **arguments)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE * run.slack)
    assert computed == causal


def with_dense_marked(**arguments: Any) -> tuple[Tensor, Tensor]:
    """With dense attention whose result is all ones (runs in the worker)."""
    return block_sparse_attention(**arguments, dense=lambda: torch.ones_like(arguments["q"]))


@pytest.mark.parametrize("alpha, is_dense", [(0.01, True), (0.6, False)])
def test_dense_attention_is_taken_where_nearly_all_blocks_are_kept(run: Run, alpha: float, is_dense: bool) -> None:
    arguments = Case(2000, options={"alpha": alpha}).arguments(5)
    want = reference(**arguments)
    kept, allowed = sum(map(len, want.kept.values())), sum(want.causal.values())
    assert (kept > 0.75 * allowed) is is_dense and kept < allowed
    got, totals = run(with_dense_marked, **arguments)
    if is_dense:
        assert (got == 1).all() and totals.tolist() == [allowed, allowed]
    else:
        torch.testing.assert_close(got.double(), want.out, rtol=0, atol=TOLERANCE * run.slack)
        check_selection(totals, want)


OTHER_TILES: dict[str, dict[str, Any]] = {
    "few rows": {"tiles": AttentionTiles(32, 32, 4, 1), "energy_tiles": EnergyTiles(32, 64, 4, 1)},
    "by descriptors": {"tiles": AttentionTiles(128, 64, 8, 2, descriptors=True)},
    "many means": {"tiles": AttentionTiles(64, 16, 4, 2), "energy_tiles": EnergyTiles(128, 128, 8, 2)},
}


@pytest.mark.parametrize(
    "name, tiles", [*itertools.product(("plain", "second chunk, unaligned", "requests"), OTHER_TILES.values())]
)
def test_tiles_do_not_change_the_result(run: Run, name: str, tiles: dict[str, Any]) -> None:
    arguments = CASES[name].arguments(4)
    got, totals = run(block_sparse_attention, **arguments, **tiles)
    want = reference(**arguments)
    torch.testing.assert_close(got.double(), want.out, rtol=0, atol=TOLERANCE * run.slack)
    check_selection(totals, want)


@pytest.mark.parametrize("name", ["plain", "softcap, sinks", "groups of 3", "requests"])
def test_eight_bits_round_as_the_twin_does(run: Run, name: str) -> None:
    """The factor of the weights cancels, sinks included: what differs is the rounding of weights, 2^-4 at most."""
    arguments = CASES[name].arguments(5)
    got, totals = run(on_rounding_fp8, **arguments, dtype="fp8")
    twin, counted = block_sparse_attention_naive(**arguments, dtype="fp8")
    assert totals.tolist() == counted.tolist()
    assert relative(got, twin) < 0.03
    assert relative(got, reference(**arguments).out) < 0.15  # sharp logits, of which e4m3 keeps 4 bits


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1.2e-2), (torch.float16, 2e-3)])
def test_half_precision(run: Run, dtype: torch.dtype, tolerance: float) -> None:
    arguments = dataclasses.replace(CASES["softcap, sinks"], dtype=dtype).arguments(6)
    got, _ = run(block_sparse_attention, **arguments)
    twin, _ = block_sparse_attention_naive(**arguments)
    assert got.dtype == dtype and relative(got, twin) < tolerance


def test_padding_is_not_read_and_gives_zeros(run: Run) -> None:
    arguments = CASES["requests"].arguments(7)
    want = reference(**arguments).out
    padding = torch.ones(4, 330, dtype=torch.bool)
    for row, (start, end) in zip(padding, CASES["requests"].bounds, strict=True):
        row[start:end] = False
    for name in "qkv":
        arguments[name].transpose(1, 2)[padding] = torch.nan
    got, _ = run(block_sparse_attention, **arguments)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE * run.slack)
    assert (got.transpose(1, 2)[padding] == 0).all()


def test_mass_bounds_the_error() -> None:
    """Without the correction, attention is off by at most twice the largest value times the mass left out."""
    arguments = CASES["not corrected"].arguments(8)
    got, _ = block_sparse_attention_naive(**arguments)
    dense, _ = block_sparse_attention_naive(**{**arguments, "alpha": 0.0})
    options = {name: value for name, value in arguments.items() if name not in ("v", "correction")}
    bound = 2 * arguments["v"].norm(dim=3).max() * mass_not_computed(**options)
    off = (got - dense).norm(dim=3)
    assert (off <= bound + 1e-5).all() and off.max() > 1e-3


def test_correction_brings_the_result_nearer_to_dense() -> None:
    arguments = CASES["1,000 tokens"].arguments(9)
    dense, _ = block_sparse_attention_naive(**{**arguments, "alpha": 0.0})
    with_it, _ = block_sparse_attention_naive(**arguments)
    without, _ = block_sparse_attention_naive(**{**arguments, "correction": False})
    assert relative(with_it, dense) < relative(without, dense)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"q": torch.zeros(1, 3, 8, 16)}, r"q \(1, 3, 8, 16\).*multiple"),
    "group": ({"q": torch.zeros(1, 258, 8, 16)}, "258 heads on 2 kv_heads: wanted up to 128"),
    "head_dim": ({"v": torch.zeros(1, 2, 8, 300)}, "v_dim of 1 to 256"),
    "dtypes": ({"v": torch.zeros(1, 2, 8, 16).half()}, r"v torch\.float16: wanted all"),
    "strides": ({"k": torch.zeros(1, 2, 16, 8).mT}, "wanted 1 in the last"),
    "queries": ({"q": torch.zeros(1, 2, 9, 16)}, "no more queries than tokens"),
    "bounds": ({"token_bounds": torch.tensor([0, 8])}, r"shape \(2,\): wanted int32 or int64, \(1, 2\)"),
    "columns": ({"token_bounds": torch.tensor([[3, 9]])}, r"\[3, 9\): wanted columns of \[0, 8\)"),
    "sinks": ({"sinks": torch.zeros(3)}, "wanted 2 elements"),
    "scale": ({"scale": -1.0}, "got scale -1.0"),
    "softcap": ({"softcap": 0.0}, "softcap 0.0"),
    "alpha": ({"alpha": 1.0}, r"got alpha 1.0: wanted \[0, 1\)"),
    "block size": ({"block_size": 96}, r"got block_size 96: wanted one of \(64, 128\)"),
    "window": ({"window_blocks": 0}, "window_blocks 0.*wanted at least 0, 1 and 0"),
    "parts": ({"parts": 3}, "got parts 3"),
    "dtype": ({"dtype": "int8"}, "got dtype 'int8'"),
}


@pytest.mark.parametrize("options, message", BAD.values(), ids=BAD.keys())
def test_refusals_say_what_was_wanted(run: Run, options: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {name: torch.zeros(1, 2, 8, 16) for name in "qkv"}
    with pytest.raises(ValueError, match=message):
        run(block_sparse_attention, **(good | options))


@contextmanager
def card(capability: int) -> Iterator[list[Machine]]:
    """Launches compile for a card of this capability."""
    with (
        compiling_for(capability) as found,
        mock.patch.object(kernel, "shared_memory", lambda device: SHARED_MEMORY[capability]),
        mock.patch.object(block_energies, "shared_memory", lambda device: SHARED_MEMORY[capability]),
        mock.patch.object(kernel, "multiplies_by_warp_group", lambda device: capability >= 90),
    ):
        yield found


COMPILED = [
    (capability, dim, dtype)
    for capability, dim, dtype in itertools.product((80, 89, 90), (64, 128, 256), ("bfloat16", "float32", "fp8"))
    if dtype != "fp8" or capability >= 89
]


@pytest.mark.slow
@pytest.mark.parametrize("capability, dim, dtype", COMPILED)
def test_usual_tiles_compile_and_fit(capability: int, dim: int, dtype: str) -> None:
    stored = torch.float32 if dtype == "float32" else torch.bfloat16
    q, k = (torch.empty(1, 1024, heads, dim, dtype=stored).transpose(1, 2) for heads in (8, 2))
    bounds = torch.tensor([[10, 1000]])
    for options in ({"block_size": 128}, {"block_size": 64, "softcap": 9.0}, {"token_bounds": bounds}):
        with card(capability) as found:
            block_sparse_attention(q, k, k, dtype="fp8" if dtype == "fp8" else "input", **options)
        assert len(found) == (5 if dtype == "fp8" else 4)
        for machine in found:
            assert machine.fits(capability), machine
            if dtype != "float32" and capability >= 90:  # three products in the place of one leave no registers
                assert machine.spilled <= SPILLED, machine
