"""The compiled prefill against the eager reference: kept sets, rows, logits, hidden states."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import AUTO_LAYERS, FULL_LAYERS, NAMES, TWO_LAYERS, at_hand, needle_ids
from eager_reference import DropSpec
from exactness import SHARP, Case, Compiled, assert_differs, assert_dropped, assert_near, assert_same_rows

LLAMA, GEMMA, QWEN = ((name,) for name in NAMES)


def cases(
    label: str,
    layers: dict[str, tuple[int, ...]],
    extra: dict[str, Any] | None = None,
    quick: tuple[str, ...] = NAMES,
    **spec: Any,
) -> Any:
    """One case a checkpoint; those that are not `quick`, or stand in for them, are slow tests."""
    made = [Case(name, DropSpec(layers[name], **spec), extra or {}, label) for name in NAMES]
    here = at_hand(quick)
    slow = [() if case.name in here else pytest.mark.slow for case in made]
    values = [pytest.param(case, marks=mark, id=str(case)) for case, mark in zip(made, slow, strict=True)]
    return pytest.mark.parametrize("compiled", values, indirect=True)


def last_only(name: str) -> tuple[int, ...]:
    return FULL_LAYERS[name][-1:]


LAST_LAYER = {name: last_only(name) for name in NAMES}
SHARPLY = cases("sharp", TWO_LAYERS, p=(0.9, 0.8), **SHARP)
FROZEN = cases("last-layer", LAST_LAYER, None, LLAMA, p=0.8, **SHARP)


def check_prefill(compiled: Compiled, length: int, **call_options: Any) -> None:
    """Kept sets, rows and the logits of the last position; and dropping showed."""
    ids = needle_ids(length)
    want = compiled.expected(ids)
    out, call = compiled.prefill(ids, logits_to_keep=1, **call_options)
    assert_same_rows(call, want, length)
    assert_dropped(call)
    assert_near(out.logits, want.last_logits)
    assert_differs(out.logits, compiled.dense(ids, logits_to_keep=1).logits)


@SHARPLY
@pytest.mark.parametrize("length", [1111, *(pytest.param(n, marks=pytest.mark.slow) for n in (300, 2049))])
def test_two_drops_with_p_of_their_own(compiled: Compiled, length: int) -> None:
    check_prefill(compiled, length)


@cases("no-cache", TWO_LAYERS, None, GEMMA, p=(0.9, 0.8), **SHARP)
def test_without_a_cache(compiled: Compiled) -> None:
    """Such a call's mask has a term for packed prompts, read from `position_ids`."""
    check_prefill(compiled, 1111, use_cache=False)


@pytest.mark.slow
@cases("sharp", TWO_LAYERS, None, LLAMA + GEMMA, p=(0.9, 0.8), **SHARP)
def test_one_row_more_than_the_forced_ones(compiled: Compiled) -> None:
    """57 tokens: 24 sink and 32 last ones stay, one token may go. Gemma's windows are longer than the prompt."""
    ids = needle_ids(57)
    want = compiled.expected(ids)
    out, call = compiled.prefill(ids, logits_to_keep=1)
    assert_same_rows(call, want, 57)
    assert_near(out.logits, want.last_logits)


@cases("sharp", TWO_LAYERS, None, LLAMA, p=(0.9, 0.8), **SHARP)
def test_hidden_states_of_all_layers(compiled: Compiled) -> None:
    ids = needle_ids(1111)
    want = compiled.expected(ids)
    with pytest.warns(UserWarning, match="frozen"):
        out, call = compiled.prefill(ids, logits_to_keep=1, output_hidden_states=True)
    assert_same_rows(call, want, 1111)
    assert_dropped(call)
    assert len(out.hidden_states) == len(want.hidden_states)
    dense = compiled.dense(ids, output_hidden_states=True).hidden_states
    first = compiled.spec.drop_layers[0]
    for at, (got, expected) in enumerate(zip(out.hidden_states, want.hidden_states, strict=True)):
        assert_near(got, expected)
        if at > first:
            assert_differs(got, dense[at])
    assert_near(out.logits, want.last_logits)


@cases("published-blocks", TWO_LAYERS, None, LLAMA, p=0.8)
@pytest.mark.parametrize("length", [1023, 1024, 1301])
def test_blocks_of_64_and_128_forced_rows_at_each_end(compiled: Compiled, length: int) -> None:
    check_prefill(compiled, length)


@cases("auto", AUTO_LAYERS, {"drop_layers": "auto"}, LLAMA, p=0.95, **SHARP)
def test_automatic_drop_layers(compiled: Compiled) -> None:
    check_prefill(compiled, 1025)


@cases("all", FULL_LAYERS, {"drop_layers": "all"}, LLAMA, p=0.95, **SHARP)
def test_a_drop_at_every_full_attention_layer(compiled: Compiled) -> None:
    check_prefill(compiled, 1111)


@pytest.mark.slow
@cases("top_k", TWO_LAYERS, None, LLAMA, selection="top_k", keep_ratio=(0.5, 0.25), **SHARP)
def test_top_k(compiled: Compiled) -> None:
    check_prefill(compiled, 1301)


@pytest.mark.parametrize(
    "compiled",
    [Case("needle-gemma3", DropSpec((2, 5), p=(0.9, 0.8), window="index", **SHARP), label="index")],
    indirect=True,
    ids=str,
)
def test_a_window_by_index(compiled: Compiled) -> None:
    check_prefill(compiled, 1111)


@FROZEN
def test_logits_of_all_positions_show_frozen_states(compiled: Compiled) -> None:
    """The last layer drops, so the last position is that of the dense model: other positions tell."""
    ids = needle_ids(1111)
    want = compiled.expected(ids)
    with pytest.warns(UserWarning, match=r"frozen states \(full_logits='frozen'\)") as warned:
        out, call = compiled.prefill(ids)
    again, _ = compiled.prefill(ids)
    assert len([w for w in warned if "uniprefill" in str(w.message)]) == 1
    assert_same_rows(call, want, 1111)
    assert_dropped(call)
    dense = compiled.dense(ids).logits
    assert_near(out.logits, want.logits)
    assert_near(again.logits, want.logits)
    assert_differs(out.logits, dense)
    assert_near(out.logits[:, -1], dense[:, -1])
    kept = list(call.kept_indices.values())[-1]
    assert_near(out.logits[:, kept], dense[:, kept])


@FROZEN
def test_a_drop_at_the_last_layer_keeps_the_last_logits(compiled: Compiled) -> None:
    ids = needle_ids(1301)
    want = compiled.expected(ids)
    out, call = compiled.prefill(ids, logits_to_keep=1)
    assert_same_rows(call, want, 1301)
    assert_dropped(call)
    assert_near(out.logits, want.last_logits)


@cases("full-dense", TWO_LAYERS, {"full_logits": "dense"}, LLAMA, p=(0.9, 0.8), **SHARP)
def test_dense_logits_of_all_positions(compiled: Compiled) -> None:
    ids = needle_ids(1111)
    out, call = compiled.prefill(ids)
    assert not call.dropped and call.reason is not None and call.reason.category.value == "full-logits"
    assert_near(out.logits, compiled.dense(ids).logits)
    check_prefill(compiled, 1111)  # and with logits_to_keep=1 the same model drops


@pytest.mark.slow
@cases("p1", TWO_LAYERS, None, LLAMA, p=1.0, **SHARP)
def test_p_of_one_is_the_dense_model(compiled: Compiled) -> None:
    for length in (300, 1111):
        ids = needle_ids(length)
        out, call = compiled.prefill(ids, logits_to_keep=1)
        assert call.dropped and [len(kept) for kept in call.kept_indices.values()] == [length] * 2
        assert set(call.num_tokens) == {length}
        assert_near(out.logits, compiled.dense(ids, logits_to_keep=1).logits)
