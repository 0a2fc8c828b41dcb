"""The eager reference against the stock models: dense as it stands, and dropping through masks and hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import checkpoints
import pytest
import torch
from eager_reference import DropSpec, EagerReference, select_rows
from torch import Tensor

LENGTH, TOLERANCE = 777, 1e-4  # no multiple of a block, of a chunk of the recurrence, or of the window


def spec_for(name: str, **options: Any) -> DropSpec:
    """Small blocks and a low p, so that two cuts fall within a short prompt."""
    defaults: dict[str, Any] = {"p": (0.8, 0.6), "block_size": 16, "last_n": 32, "sink_tokens": 24}
    return DropSpec(checkpoints.TWO_LAYERS[name], **(defaults | options))


def load(name: str, attention: str = "sdpa") -> Any:
    return checkpoints.stock(name) if attention == "sdpa" else checkpoints.fresh(name, attention)


def prompt_ids() -> Tensor:
    return checkpoints.needle_ids(LENGTH, seed=0)


@pytest.fixture
def name(checkpoint: str) -> str:
    return checkpoint


@torch.inference_mode()
def stock(model: Any, ids: Tensor, **options: Any) -> Any:
    return model(ids, **options)


def assert_near(got: Tensor, want: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_without_a_spec_prefill_and_steps_are_the_stock_model(name: str) -> None:
    model, ids = load(name), prompt_ids()
    reference = EagerReference(model, None)
    result = reference.prefill(ids[:, :700])
    want = stock(model, ids[:, :700], use_cache=True, output_hidden_states=True)
    assert_near(result.logits, want.logits)
    assert_near(result.last_logits, want.logits[:, -1:])
    assert len(result.hidden_states) == len(want.hidden_states)
    for got, expected in zip(result.hidden_states, want.hidden_states, strict=True):
        assert_near(got, expected)
    assert result.kept == {} and result.margins == {} and result.gaps == {}
    for chunk in (ids[:, 700:701], ids[:, 701:706], ids[:, 706:]):
        assert_near(reference.step(chunk), stock(model, chunk, past_key_values=want.past_key_values).logits)
    layers = [getattr(layer, "keys", None) for layer in want.past_key_values.layers]
    assert reference.kv_lengths() == [None if keys is None else keys.shape[2] for keys in layers]


def test_without_a_spec_generate_is_the_stock_greedy_search(name: str) -> None:
    model, ids = load(name), prompt_ids()[:, :-5]
    tokens, logits = EagerReference(model, None).generate(ids, 8)
    want = model.generate(
        ids, max_new_tokens=8, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True
    )
    assert torch.equal(tokens, want.sequences[:, ids.shape[1] :])
    assert len(logits) == 8
    for got, expected in zip(logits, want.logits, strict=True):
        assert_near(got, expected)


@pytest.mark.parametrize("window", ["position", "index"])
def test_p_of_one_is_dense(name: str, window: str) -> None:
    dense, full = (EagerReference(load(name), s) for s in (None, spec_for(name, p=1.0, window=window)))
    want, got = dense.prefill(prompt_ids()), full.prefill(prompt_ids())
    assert torch.equal(got.logits, want.logits)
    assert [len(kept) for kept in got.kept.values()] == [LENGTH, LENGTH]
    assert torch.equal(full.step(prompt_ids()[:, -3:]), dense.step(prompt_ids()[:, -3:]))


@pytest.mark.parametrize("options", [{}, {"selection": "top_k", "keep_ratio": (0.5, 0.25)}], ids=["top_p", "top_k"])
def test_a_spec_drops_rows_and_freezes_them(name: str, options: dict[str, Any]) -> None:
    model, ids, spec = load(name), prompt_ids(), spec_for(name, **options)
    reference = EagerReference(model, spec)
    result, dense = reference.prefill(ids), EagerReference(model, None).prefill(ids)
    first, second = spec.drop_layers
    assert not torch.allclose(result.last_logits, dense.last_logits, atol=TOLERANCE)
    everything = torch.arange(LENGTH)
    forced = torch.cat([everything[: spec.sink_tokens], everything[-spec.last_n :]])
    for kept in result.kept.values():
        assert kept.dtype == torch.int64 and torch.equal(kept, kept.unique())
        assert torch.isin(forced, kept).all()
    assert len(forced) < len(result.kept[second]) < len(result.kept[first]) < LENGTH
    assert torch.isin(result.kept[second], result.kept[first]).all()
    for layer, positions in enumerate(result.kv_positions):
        stream = everything if layer <= first else result.kept[first] if layer <= second else result.kept[second]
        assert positions is None or torch.equal(positions, stream)
    for got, want in zip(result.hidden_states[: first + 1], dense.hidden_states, strict=False):
        assert torch.equal(got, want)
    for layer, previous in ((first, everything), (second, result.kept[first])):
        gone = previous[~torch.isin(previous, result.kept[layer])]
        for later in result.hidden_states[layer + 1 : -1]:
            assert torch.equal(later[:, gone], result.hidden_states[layer][:, gone])
    window = getattr(model.config, "sliding_window", 0)
    lengths = [None if positions is None else len(positions) for positions in result.kv_positions]
    for kind, length, held in zip(reference.kinds, lengths, reference.kv_lengths(), strict=True):
        assert held == (min(length or 0, window - 1) if kind == "sliding_attention" else length)


@contextmanager
def masked_stock(model: Any, prompt: int, total: int, kept: dict[int, Tensor], window: str) -> Iterator[None]:
    """The stock model over all `total` rows, in which layers after a drop do not see the dropped ones.

    Attention layers get an explicit mask; linear-attention layers get the remaining rows alone, side by side.
    Rows that were dropped compute something nobody looks at.
    """
    rows, added, handles = torch.arange(total), torch.arange(prompt, total), []
    for i, layer in enumerate(model.model.layers):
        drops = [b for b in kept if b < i]
        alive = torch.cat([kept[max(drops)], added]) if drops else rows
        if hasattr(layer, "linear_attn"):

            def gather(_m: Any, _args: Any, kwargs: dict[str, Any], alive: Tensor = alive) -> Any:
                return (), kwargs | {"hidden_states": kwargs["hidden_states"][:, alive], "attention_mask": None}

            def scatter(_m: Any, _args: Any, output: Tensor, alive: Tensor = alive) -> Tensor:
                return output.new_zeros(1, total, output.shape[-1]).index_copy(1, alive, output)

            handles.append(layer.linear_attn.register_forward_pre_hook(gather, with_kwargs=True))
            handles.append(layer.linear_attn.register_forward_hook(scatter))
            continue
        visible = (rows[None, :] <= rows[:, None]) & torch.isin(rows, alive)[None, :]
        if layer.self_attn.__dict__.get("sliding_window") is not None:
            at = rows.clone()
            if window == "index":  # the remaining rows count as the last ones of the prompt
                at[alive] = torch.arange(total - len(alive), total)
            visible &= at[None, :] > at[:, None] - layer.self_attn.sliding_window
        visible |= torch.eye(total, dtype=torch.bool)

        hidden = torch.zeros(1, 1, total, total).masked_fill(~visible, float("-inf"))

        def mask(_m: Any, args: Any, kwargs: dict[str, Any], hidden: Tensor = hidden) -> Any:
            return args, kwargs | {"attention_mask": hidden}

        handles.append(layer.self_attn.register_forward_pre_hook(mask, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("window", ["position", "index"])
def test_dropping_is_the_stock_model_that_cannot_see_dropped_rows(name: str, window: str) -> None:
    model, ids, prompt = load(name), prompt_ids(), LENGTH - 70
    reference = EagerReference(model, spec_for(name, window=window))
    result = reference.prefill(ids[:, :prompt])
    got = [reference.step(chunk) for chunk in ids[:, prompt:].split([1, 1, 1, 5, LENGTH - prompt - 8], dim=1)]
    with masked_stock(model, prompt, LENGTH, result.kept, window):
        want = stock(model, ids, use_cache=False).logits
    alive = result.kept[max(result.kept)]
    assert_near(result.logits[:, alive], want[:, alive])
    assert_near(torch.cat(got, dim=1), want[:, prompt:])


def test_rows_are_chosen_by_the_attention_weights_of_the_stock_model(name: str) -> None:
    model, ids, spec = load(name, "eager"), prompt_ids(), spec_for(name)
    result = EagerReference(model, spec).prefill(ids)
    first, second = spec.drop_layers
    assert isinstance(spec.p, tuple) and min(result.margins.values()) > 1e-5 and min(result.gaps.values()) > 1e-5
    with masked_stock(model, LENGTH, LENGTH, {first: result.kept[first]}, spec.window):
        attentions = stock(model, ids, use_cache=False, output_attentions=True).attentions
    with_weights = [i for i, layer in enumerate(model.model.layers) if hasattr(layer, "self_attn")]
    for layer, p, alive in ((first, spec.p[0], torch.arange(LENGTH)), (second, spec.p[1], result.kept[first])):
        weights = attentions[with_weights.index(layer)][0, :, -spec.last_n :, alive].double()
        shares = [block.sum().item() / weights.sum().item() for block in weights.split(spec.block_size, dim=-1)]
        want = []
        for row, position in enumerate(alive.tolist()):
            block = row // spec.block_size
            higher = sum(s for i, s in enumerate(shares) if (s, -i) > (shares[block], -block))
            if higher < p or row < spec.sink_tokens or row >= len(alive) - spec.last_n:
                want.append(position)
        assert result.kept[layer].tolist() == want


def test_windows_by_index_and_by_position_differ_only_with_sliding_layers(name: str) -> None:
    by_position, by_index = (
        EagerReference(load(name), spec_for(name, window=window)).prefill(prompt_ids()).last_logits
        for window in ("position", "index")
    )
    assert torch.equal(by_position, by_index) == (name != "needle-gemma3")


def test_prompts_within_the_forced_rows_keep_everything(name: str) -> None:
    spec = spec_for(name, p=0.05)
    for length in (1, 31, 32, 33, 55, 56, 57):
        ids = prompt_ids()[:, :length]
        reference = EagerReference(load(name), spec)
        result = reference.prefill(ids)
        kept = [torch.arange(length)] * 2
        if length <= spec.sink_tokens + spec.last_n:
            assert all(torch.equal(a, b) for a, b in zip(result.kept.values(), kept, strict=True))
            assert_near(result.logits, stock(load(name), ids).logits)
        assert reference.step(ids[:, :1]).isfinite().all()


def test_prefill_starts_over(name: str) -> None:
    reference = EagerReference(load(name), spec_for(name))
    tokens, first = reference.generate(prompt_ids(), 3)
    again, second = reference.generate(prompt_ids(), 3)
    assert torch.equal(tokens, again) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Blocks of 2 over 9 rows; one sink, one last row: the shares are .1 .3 .3 .1 .2 and the last block has one row.
SCORES = torch.tensor([0.5, 0.5, 1.0, 2.0, 0.0, 3.0, 1.0, 0.0, 2.0])
HAND: dict[str, Any] = {"block_size": 2, "last_n": 1, "sink_tokens": 1}


@pytest.mark.parametrize(
    ("selection", "amount", "rows"),
    [
        ("top_p", 0.2, [0, 2, 3, 8]),  # blocks 1 and 2 are equal: the lower one first
        ("top_p", 0.31, [0, 2, 3, 4, 5, 8]),  # mass above block 2 is .3 < p
        ("top_p", 0.85, [0, 1, 2, 3, 4, 5, 8]),  # mass above block 0 is .8 < p; its equal, block 3, has .9 above it
        ("top_p", 0.95, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("top_p", 1.0, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("top_k", 0.1, [0, 2, 3, 8]),  # ceil(.1 * 9 / 2) = 1 block; the sink and the last row come on top, as rows
        ("top_k", 0.5, [0, 2, 3, 4, 5, 8]),  # ceil(2.25) = 3 blocks: 1, 2 and the last one
        ("top_k", 1.0, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_select_rows_by_hand(selection: str, amount: float, rows: list[int]) -> None:
    spec = DropSpec((0,), p=amount, keep_ratio=amount, selection=selection, **HAND)
    assert select_rows(SCORES, spec, amount, prompt=9).rows.tolist() == rows


def test_margin_and_gap_by_hand() -> None:
    spec = DropSpec((0,), p=0.75, **HAND)
    chosen = select_rows(SCORES, spec, 0.75, prompt=9)  # masses above: 0 .3 .6 .8 .9
    assert chosen.margin == pytest.approx(0.05) and chosen.gap == pytest.approx(0.1)
    ratio = DropSpec((0,), selection="top_k", keep_ratio=0.1, **HAND)
    assert select_rows(SCORES, ratio, 0.1, prompt=9).margin == 0.0
    assert select_rows(SCORES, ratio, 0.1, prompt=30).rows.tolist() == [0, 2, 3, 4, 5, 8]  # a stream after a drop


@pytest.mark.parametrize(
    "options",
    [{"p": 0.0}, {"p": (0.5,) * 3}, {"window": "row"}, {"selection": "top_q"}, {"selection": "top_k"}, {"last_n": 0}],
)
def test_specs_that_say_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        DropSpec((2, 5), **options)
    with pytest.raises(ValueError, match="repeat"):
        DropSpec((2, 2))
