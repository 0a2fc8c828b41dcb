"""Past Dynamo's limit of graphs a model still answers: from a compact cache, eagerly, or from a dense one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import compiled
from exactness import Compiled, assert_differs, assert_dropped, assert_near
from tiny import tiny_llama, token_ids
from torch import Tensor, nn
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

import uniprefill_fx
from uniprefill_fx import CompactCacheError
from uniprefill_fx.frontends import eager_reads
from uniprefill_fx.frontends.eager_view import compact_view

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LIMIT_1 = torch._dynamo.config.patch(recompile_limit=1)
SEEN = 10
POSITIONS = torch.tensor([[0, 1, 4, 5, 9], [-1, -1, 2, 3, 9]])  # of a batch whose requests keep different numbers


class Module(nn.Module):
    """What attention functions of transformers read of an attention layer."""

    num_key_value_groups = 2

    def __init__(self) -> None:
        super().__init__()
        self.sinks = torch.linspace(-1.0, 1.0, 4)
        self.eval()


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries of the last two tokens, the rows that are held, a mask by original index, the same by row."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 2, 8, generator=generator)
    k, v = (torch.randn(2, 2, 5, 8, generator=generator) for _ in range(2))
    mask = (torch.arange(SEEN) <= torch.arange(SEEN - 2, SEEN)[:, None]).expand(2, 1, 2, SEEN).clone()
    mask[0, :, :, 0] = False  # padding in front of the first request
    by_row = mask.gather(3, POSITIONS.clamp(min=0)[:, None, None].expand(2, 1, 2, 5)) & (POSITIONS >= 0)[:, None, None]
    return q, k, v, mask, by_row


def as_float(mask: Tensor) -> Tensor:
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min)


def fused(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **kwargs: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=True).transpose(1, 2), None


ATTENTION: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sdpa": (fused, {}),
    "llama": (modeling_llama.eager_attention_forward, {}),
    "sinks": (modeling_gpt_oss.eager_attention_forward, {}),
    "softcap": (modeling_gemma2.eager_attention_forward, {"softcap": 2.0}),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_over_a_view_is_that_over_the_rows(name: str) -> None:
    attention, terms = ATTENTION[name]
    q, k, v, mask, by_row = operands()
    views = [compact_view(x, POSITIONS, SEEN) for x in (k, v)]
    got, weights = attention(Module(), q, *views, as_float(mask), scaling=0.3, **terms)
    want, _ = attention(Module(), q, k, v, as_float(by_row), scaling=0.3, **terms)
    assert type(got) is Tensor
    assert_near(got, want, 1e-6)
    if weights is not None:  # what a user may look at: all tokens seen, nothing for those that are gone
        assert weights.shape == (2, 4, 2, SEEN) and float(weights[0, :, :, 2:4].abs().max()) == 0.0


@pytest.mark.parametrize(
    "misuse",
    [
        lambda k: k.sum(),
        lambda k: k.sort(2),
        lambda k: k.cumsum(2),
        lambda k: k[:, :, torch.tensor([0])],
        lambda k: k.softmax(2),
        lambda k: torch.ones(SEEN, SEEN) @ k,
        lambda k: k.mul_(2.0),
        lambda k: torch.zeros(k.shape).copy_(k),
        lambda k: F.linear(k.transpose(2, 3), torch.ones(3, SEEN)),
        lambda k: (k @ k.transpose(2, 3)).relu() @ k,
    ],
)
def test_what_would_read_a_hole_is_refused(misuse: Callable[[Any], Any]) -> None:
    with pytest.raises(CompactCacheError):
        misuse(compact_view(operands()[1], POSITIONS, SEEN))


def answer(model: Compiled, ids: Tensor, steps: int = 5) -> list[Tensor]:
    """Logits of every step; a prefill that dropped has to be the reference's, and so do the steps behind it."""
    tokens, logits = model.reference.generate(ids, steps)
    got = model.generate(ids, steps)
    assert torch.equal(got.sequences[:, ids.shape[1] :], tokens)
    for ours, theirs in zip(got.logits, logits, strict=True):
        assert_near(ours, theirs)
    return list(got.logits)


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_steps_that_find_no_graph(name: str) -> None:
    """One graph in all, the prefill: every step runs eagerly, and one warning says what to raise."""
    model, ids = compiled(name), token_ids(300)
    with LIMIT_1, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            logits = answer(model, ids)
            done = uniprefill_fx.last_call()
            assert done is not None
            assert_dropped(done)
    said = [str(w.message) for w in caught if "recompile_limit" in str(w.message)]
    assert len(said) == 1 and "1 graphs" in said[0]
    assert_differs(logits[0], model.dense(ids, logits_to_keep=1).logits[:, -1])


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile"])
def test_stances(stance: str) -> None:
    """Cold, everything is the stock model; warm, a compact cache is read eagerly."""
    model, ids, more = compiled(), token_ids(300), [token_ids(n, seed=n) for n in (1, 4, 1)]
    with torch.compiler.set_stance(stance):
        got = model.generate(ids, 3)
    assert torch.equal(got.sequences, model.stock.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None))
    model.expected(ids)
    out, done = model.prefill(ids, logits_to_keep=1)
    assert_dropped(done)
    with torch.compiler.set_stance(stance), torch.inference_mode():
        for tokens in more:
            got = model.model(tokens, past_key_values=out.past_key_values).logits
            assert_near(got, model.reference.step(tokens))
    with torch.inference_mode():  # and compiled again
        tokens = token_ids(1, seed=9)
        assert_near(model.model(tokens, past_key_values=out.past_key_values).logits, model.reference.step(tokens))


def test_a_model_that_could_not_read_it_stays_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its attention does with keys is nothing that the view knows: no prompt drops without room for its steps."""

    def ranked(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        k = k.flip(3).flip(3)
        return original(module, q, k, v, mask, **kwargs)

    original = modeling_llama.eager_attention_forward
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", ranked)
    model, ids = compiled(attention="eager"), token_ids(300)
    with LIMIT_1:
        got = model.generate(ids, 4)
    done = uniprefill_fx.last_call()
    assert done is not None and not done.dropped and done.reason is not None
    assert done.reason.category.value == "recompile-limit" and "flip" in str(done) and "recompile_limit" in str(done)
    assert torch.equal(got.sequences, model.stock.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None))


def test_what_the_graph_says_of_eager_steps() -> None:
    found: list[str | None] = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(eager_reads.unreadable_eagerly(gm.graph))
        return gm.forward

    backend._uniprefill_backend = True  # type: ignore[attr-defined]
    for attention in ("sdpa", "eager"):
        torch._dynamo.reset()
        with torch.inference_mode():
            torch.compile(tiny_llama(1, attention), backend=backend, dynamic=True)(token_ids(40))
    assert found == [None, None]
