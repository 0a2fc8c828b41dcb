"""The attention kernel in Triton's interpreter, and its twin, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_worker import Run, interpreter

from uniprefill_fx.kernels.slot_attention import slot_attention
from uniprefill_fx.kernels.slot_attention_reference import slot_attention_reference
from uniprefill_fx.kernels.tiles import Tiles


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with interpreter() as run:
        yield run


@dataclass(frozen=True)
class Case:
    """Arguments of one attention.

    `slots` is how many original tokens each request had: its keys are a random choice of them, in order. 0: none are
    given, and the keys are 0, 1, ... . Without `lengths` there are no packed requests but `batch` rows of `keys`.
    """

    heads: tuple[int, int]
    dims: tuple[int, int]
    keys: int = 0
    queries: int = 0
    """The last ones of the keys; 0: all."""
    lengths: tuple[int, ...] = ()
    slots: int = 0
    batch: int = 1
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    padding: bool = False
    sinks: bool = False
    bias: bool = False
    segments: bool = False
    chunk_start: tuple[int, ...] = ()
    pads: int = 0
    """The first keys, which are padding (slot -1)."""
    dtype: torch.dtype = torch.float32
    token_first: bool = False
    """In memory (batch, tokens, heads, dim), with other columns behind each head: no two dimensions merge."""

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        torch.manual_seed(seed)
        (heads, kv_heads), (dim, v_dim) = self.heads, self.dims
        tokens = (sum(self.lengths) or self.keys) + self.pads
        queries = self.queries or tokens
        parts = self.lengths or (self.keys,)
        places = max(parts) if not self.slots else self.slots
        slots = torch.cat([torch.randperm(places)[:n].sort().values for n in parts]) if self.slots else None
        if slots is not None and self.pads:
            slots = torch.cat([torch.full((self.pads,), -1), slots])
        mask = None
        if self.padding:
            mask = torch.rand(self.batch, places) > 0.3
            mask[:, :3] = False  # as padding on the left: the first queries see nothing
        return {
            "q": self._operand(heads, queries, dim, 2.5),
            "k": self._operand(kv_heads, tokens, dim, 1.0),
            "v": self._operand(kv_heads, tokens, v_dim, 1.0),
            # the same tensor where rows are the same, as the passes hand it over
            "q_slots": None if slots is None else slots[tokens - queries :] if queries < tokens else slots,
            "k_slots": slots,
            "cu_seqlens": torch.tensor([0, *self.lengths]).cumsum(0).int() if self.lengths else None,
            "key_mask": mask,
            "scale": None,
            "window": self.window,
            "chunk": self.chunk,
            "softcap": self.softcap,
            "sinks": torch.randn(heads, 1, 1).to(self.dtype) if self.sinks else None,
            "bias": torch.randn(1, heads, 1, places) if self.bias else None,
            "segments": (torch.rand(self.batch, places) < 0.02).cumsum(1) if self.segments else None,
            "chunk_start": torch.tensor(self.chunk_start) if self.chunk_start else None,
            "padded": self.pads > 0,
        }

    def _operand(self, heads: int, tokens: int, dim: int, spread: float) -> Tensor:
        if not self.token_first:
            return (torch.randn(self.batch, heads, tokens, dim) * spread).to(self.dtype)
        x = torch.randn(self.batch, tokens, heads, dim + 8)[..., :dim] * spread
        return x.to(self.dtype).transpose(1, 2)


CASES = {
    "window by slot": Case((2, 1), (32, 32), 270, slots=700, window=90),
    "window by row, batch": Case((4, 1), (16, 16), 150, batch=2, window=20, token_first=True),
    "window of one": Case((1, 1), (16, 16), 40, slots=90, window=1),
    "window wider than the prompt": Case((2, 2), (32, 32), 140, slots=150, window=1000),
    "chunk by slot": Case((2, 1), (80, 80), 260, slots=400, chunk=128, dtype=torch.float16, token_first=True),
    "chunk by row": Case((2, 1), (16, 16), 200, chunk=48),
    "window in a chunk": Case((2, 1), (16, 16), 200, slots=300, window=30, chunk=64),
    "sinks": Case((6, 2), (64, 64), 200, slots=300, window=50, sinks=True, dtype=torch.bfloat16),
    "sinks and nothing else": Case((2, 1), (16, 16), 130, sinks=True),
    "softcap": Case((2, 1), (256, 256), 150, slots=200, softcap=3.0, dtype=torch.bfloat16),
    "alibi": Case((4, 4), (96, 96), 150, slots=260, bias=True, dtype=torch.float16),
    "alibi by row": Case((4, 2), (16, 16), 70, bias=True, batch=2),
    "padding": Case((2, 1), (16, 16), 150, slots=200, batch=2, padding=True),
    "padding, window": Case((2, 1), (16, 16), 150, batch=2, padding=True, window=40),
    "different dims": Case((2, 1), (192, 128), 140, slots=150, dtype=torch.bfloat16),
    "prompts in a row": Case((2, 1), (16, 16), 200, slots=300, batch=2, segments=True),
    "prompts in a row, by row": Case((2, 1), (16, 16), 200, queries=140, segments=True, window=60),
    "chunks that begin later": Case((2, 1), (16, 16), 200, slots=300, batch=2, chunk=48, chunk_start=(7, 100)),
    "chunks that begin later, by row": Case((2, 1), (16, 16), 150, batch=2, chunk=33, chunk_start=(5, 70)),
    "packed, causal": Case((4, 2), (32, 32), lengths=(150, 0, 1, 129, 7)),
    "packed, window by slot": Case((2, 1), (16, 16), lengths=(150, 0, 1, 129, 7), slots=300, window=60),
    "packed, window by row": Case((2, 1), (16, 16), lengths=(33, 300), window=60),
    "packed, chunk by slot": Case((2, 2), (16, 16), lengths=(33, 0, 200, 128), slots=300, chunk=100),
    "packed, everything": Case(
        (4, 2), (48, 40), lengths=(129, 2, 70), slots=200, window=60, chunk=100, softcap=5.0, padding=True,
        sinks=True, bias=True, token_first=True,
    ),
    "packed, terms by row": Case((2, 1), (16, 16), lengths=(60, 9, 100), padding=True, bias=True),
    "padded keys": Case((2, 1), (16, 16), 260, queries=150, slots=400, pads=40),
    "padded keys, terms": Case(
        (2, 1), (16, 16), 160, queries=60, slots=400, pads=40, window=300, padding=True, bias=True, segments=True
    ),
    "one query": Case((4, 2), (64, 64), 500, queries=1, slots=900, window=100),
    "drafted tokens": Case((4, 2), (64, 64), 500, queries=5, slots=900, sinks=True),
    "second chunk": Case((2, 1), (16, 16), 400, queries=150, slots=900),
    "second chunk by row": Case((2, 1), (16, 16), 400, queries=150, window=100),
    "one token": Case((1, 1), (16, 16), 1),
}  # fmt: skip
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: 5e-6}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def exact(**arguments: Any) -> Tensor:
    """A query at a time, over the list of keys that it sees, in float64."""
    q, k, v = (arguments[name].double() for name in "qkv")
    (batch, heads, queries, dim), tokens = q.shape, k.shape[2]
    q_slots, k_slots, cu, mask = (arguments[name] for name in ("q_slots", "k_slots", "cu_seqlens", "key_mask"))
    sinks, bias, softcap = (arguments[name] for name in ("sinks", "bias", "softcap"))
    request = [0] * tokens
    places = list(range(tokens))
    if cu is not None:
        spans = list(itertools.pairwise(cu.tolist()))
        request = [r for r, (start, end) in enumerate(spans) for _ in range(start, end)]
        places = [i for start, end in spans for i in range(end - start)]
    key_places = places if k_slots is None else k_slots.tolist()
    query_places = places[tokens - queries :] if q_slots is None else q_slots.tolist()
    out = torch.zeros(batch, heads, queries, v.shape[3], dtype=torch.float64)
    for n, i in itertools.product(range(batch), range(queries)):
        a, seen = query_places[i], []
        for j, b in enumerate(key_places):
            hidden = b < 0 or b > a or request[j] != request[tokens - queries + i]
            hidden = hidden or (arguments["window"] is not None and a - b >= arguments["window"])
            if arguments["chunk"] is not None:
                start = 0 if arguments["chunk_start"] is None else int(arguments["chunk_start"][n])
                hidden = hidden or (a - start) // arguments["chunk"] != (b - start) // arguments["chunk"]
            if arguments["segments"] is not None:
                hidden = hidden or bool(arguments["segments"][n, a] != arguments["segments"][n, b])
            if not hidden and (mask is None or mask[n, b]):
                seen.append(j)
        for head in range(heads if seen else 0):
            group = head // (heads // k.shape[1])
            logits = k[n, group, seen] @ q[n, head, i] * dim**-0.5
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if bias is not None:
                logits = logits + bias[0, head, 0, [key_places[j] for j in seen]].double()
            weights = logits.exp()
            total = weights.sum() + (0.0 if sinks is None else sinks.flatten()[head].double().exp())
            out[n, head, i] = weights @ v[n, group, seen] / total
    return out


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == want.shape
    assert got.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@each_case
def test_attention_is_that_of_float64(run: Run, case: Case) -> None:
    arguments = case.arguments()
    assert_near(run(slot_attention, **arguments), exact(**arguments), case.dtype)


@each_case
def test_twin_agrees_with_float64(case: Case) -> None:
    assert_near(slot_attention_reference(**case.arguments(1)), exact(**case.arguments(1)), case.dtype)


@pytest.mark.parametrize("tiles", [Tiles(32, 16, 4, 1), Tiles(16, 256, 8, 3)])
@pytest.mark.parametrize("name", ["window by slot", "packed, everything", "second chunk"])
def test_tiles_do_not_change_the_result(run: Run, name: str, tiles: Tiles) -> None:
    arguments = CASES[name].arguments(2)
    assert_near(run(slot_attention, **arguments, tiles=tiles), exact(**arguments), CASES[name].dtype)


def test_keys_outside_the_window_are_not_read(run: Run) -> None:
    """NaN in a key that no query may see spoils nothing, however near its row is."""
    arguments = CASES["window by slot"].arguments(3)
    want = exact(**arguments)
    slots, last = arguments["k_slots"], arguments["k_slots"][-1]
    outside = slots <= last - 90
    for x in (arguments["k"], arguments["v"]):
        x[:, :, outside] = torch.nan
    arguments["q"], arguments["q_slots"] = arguments["q"][:, :, -1:], slots[-1:]
    assert 0 < int((~outside).sum()) < 90  # the window is narrower in rows than in slots
    assert_near(run(slot_attention, **arguments), want[:, :, -1:], torch.float32)


def test_large_logits_do_not_overflow(run: Run) -> None:
    arguments = CASES["sinks and nothing else"].arguments(4)
    arguments["q"] *= 30
    got = run(slot_attention, **arguments)
    torch.testing.assert_close(got.double(), exact(**arguments), rtol=0, atol=1e-4)


def test_a_nan_key_reaches_the_queries_that_see_it_and_no_other_request(run: Run) -> None:
    arguments = CASES["packed, causal"].arguments(5)
    arguments["k"][:, :, 160] = torch.nan
    got = run(slot_attention, **arguments)
    assert got[:, :, :160].isfinite().all() and got[:, :, 280:].isfinite().all()
    assert got[:, :, 160:280].isnan().all()


def as_on_cuda(**arguments: Any) -> tuple[Tensor, bool]:
    """The op's CUDA implementation, and whether the kernel ran (runs in the worker, which interprets it)."""
    from uniprefill_fx.lowering import cuda

    ran: list[str] = []

    def counted(*args: Any, **options: Any) -> Tensor:
        ran.append("kernel")
        return slot_attention(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "slot_attention", counted)
        return cuda._attend(**arguments), bool(ran)


ROUTES = {  # whether the kernel runs, rather than SDPA
    "window by slot": True,
    "padded keys": True,
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
    "one query, no window": Case((4, 2), (16, 16), 50, queries=1, slots=90, sinks=True),
    "plain": Case((4, 2), (16, 16), 50, slots=90),
    "float64": Case((4, 2), (16, 16), 50, window=9, dtype=torch.float64),
}


@pytest.mark.parametrize("name, kernel", ROUTES.items())
def test_what_runs_on_cuda(run: Run, name: str, kernel: bool) -> None:
    case = (CASES | OTHER_ROUTES)[name]
    arguments = case.arguments(6)
    del arguments["cu_seqlens"]  # a batch is taken apart before
    got, ran = run(as_on_cuda, **arguments)
    assert ran is kernel
    assert_near(got, exact(**arguments, cu_seqlens=None), case.dtype)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"q": torch.zeros(1, 3, 8, 16)}, r"q \(1, 3, 8, 16\).*multiple"),
    "head_dim": ({"v": torch.zeros(1, 2, 8, 300)}, "v_dim of 1 to 256"),
    "dtypes": ({"v": torch.zeros(1, 2, 8, 16).half()}, r"v torch\.float16"),
    "strides": ({"k": torch.zeros(1, 2, 16, 8).mT}, "strides"),
    "cu_seqlens": ({"cu_seqlens": torch.tensor([0, 8])}, r"cu_seqlens is torch\.int64"),
    "packed queries": (
        {"q": torch.zeros(1, 2, 4, 16), "cu_seqlens": torch.tensor([0, 8], dtype=torch.int32)},
        "as many queries as keys",
    ),
    "queries": ({"q": torch.zeros(1, 2, 9, 16)}, "no more queries than keys"),
    "slots": ({"q_slots": torch.arange(8), "k_slots": torch.arange(7)}, r"k_slots is torch\.int64 of shape \(7,\)"),
    "scale": ({"scale": -1.0}, "scale -1.0"),
    "softcap": ({"softcap": 0.0}, "softcap 0.0"),
    "window": ({"window": 0}, "window 0"),
}


@pytest.mark.parametrize("options, message", BAD.values(), ids=BAD.keys())
def test_refusals_say_what_was_wanted(run: Run, options: dict[str, Any], message: str) -> None:
    names = "q_slots k_slots cu_seqlens key_mask scale window chunk".split()
    good: dict[str, Any] = dict.fromkeys(names) | {name: torch.zeros(1, 2, 8, 16) for name in "qkv"}
    with pytest.raises(ValueError, match=message):
        run(slot_attention, **(good | options))
