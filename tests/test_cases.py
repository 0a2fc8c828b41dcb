"""Where tools of this kind have failed their users, by the row of the report: what a call answers.

The other rows are in `test_cases_compiled.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from arch_builders import ARCHS
from arch_reference import StockReference
from cases import BUILD, LLAMA_FIRST, LLAMA_SPEC, WINDOW, check_dense, check_prefill, compiled, graphs
from eager_reference import DropSpec
from exactness import (
    assert_differs,
    assert_dropped,
    assert_near,
    kv_lengths,
    options_of,
)
from tiny import token_ids
from transformers import StaticCache

import uniprefill_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("first", [199, pytest.param(200, marks=pytest.mark.slow)])
def test_case_02_prompts_below_min_tokens_run_dense(first: int) -> None:
    """Decided call by call, without another compilation."""
    model = compiled(min_tokens=200)
    for length in (first, 199, 200, 64, 333):
        ids = token_ids(length, seed=length)
        if length < 200:
            check_dense(model, ids, "below-min-tokens")
        else:
            check_prefill(model, ids)
    assert graphs() == 1


@pytest.mark.parametrize("name", LLAMA_FIRST)
def test_case_05_the_kept_count_is_never_zero(name: str) -> None:
    """Every prompt within the forced rows is whole, and dense; beyond them the least amount keeps a block."""
    model = compiled(name)
    for least in ({"p": 0.01}, {"keep_ratio": 0.001}):
        with uniprefill_fx.override(block_size=8, last_n=10, sink_tokens=6, **least):
            for length in range(1, 17):
                ids = token_ids(length)
                out, done = model.prefill(ids, logits_to_keep=1)
                assert_near(out.logits, model.dense(ids, logits_to_keep=1).logits)
                assert done.dropped == (length > 1) and all(len(kept) == length for kept in done.kept_indices.values())
        with uniprefill_fx.override(block_size=8, last_n=1, sink_tokens=0, **least):
            for length in (2, 17, 300):
                out, done = model.prefill(token_ids(length), logits_to_keep=1)
                assert torch.isfinite(out.logits).all()
                assert all(1 <= len(kept) <= 9 for kept in done.kept_indices.values())


@pytest.mark.parametrize("name", LLAMA_FIRST)
def test_case_06_lengths_around_last_n_sinks_and_blocks(name: str) -> None:
    model = compiled(name)
    spec = model.spec
    around = [spec.last_n, spec.sink_tokens + spec.last_n, WINDOW, 4 * spec.block_size, 16 * spec.block_size]
    for length in sorted({at + off for at in around for off in (-1, 0, 1)}):
        check_prefill(model, token_ids(length, seed=length))


@pytest.mark.parametrize("name", LLAMA_FIRST)
def test_case_07_later_chunks_see_what_was_stored(name: str) -> None:
    """The first chunk is a prompt and drops; the others attend to the rows it stored, and drop nothing."""
    model, ids = compiled(name), token_ids(300)
    got = model.generate(ids, 4, prefill_chunk_size=128)
    done = uniprefill_fx.last_call()
    assert done is not None and done.tokens == 128
    assert_dropped(done)
    model.reference.prefill(ids[:, :128])
    model.reference.step(ids[:, 128:256])
    want = model.reference.step(ids[:, 256:])[:, -1:]
    for step, token in zip(got.logits, got.sequences[0, 300:], strict=True):
        assert_near(step, want[:, -1])
        want = model.reference.step(token.view(1, 1))
    assert_differs(got.logits[0], model.dense(ids, logits_to_keep=1).logits[:, -1])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", LLAMA_FIRST)
def test_case_08_generate_after_dropping(name: str, attention: str) -> None:
    """Layers of different lengths, under either attention of transformers."""
    model, ids = compiled(name, attention), token_ids(300)
    tokens, logits = model.reference.generate(ids, 10)
    got = model.generate(ids, 10)
    done = uniprefill_fx.last_call()
    assert done is not None and type(got.past_key_values).__name__ == "DynamicCache"
    assert_dropped(done)
    assert torch.equal(got.sequences[:, 300:], tokens)
    for ours, theirs in zip(got.logits, logits, strict=True):
        assert_near(ours, theirs)


def test_case_09_position_ids_of_three_axes() -> None:
    """Time, height and width of each token: gathered along the tokens, and not read as packed sequences."""
    full = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    arch = replace(ARCHS["qwen3_5"], config=ARCHS["qwen3_5"].config | full, drops=(0,))
    model, reference = arch.build(), StockReference(arch)
    model.compile(backend="uniprefill", options=options_of(LLAMA_SPEC))
    for length in (300, 337):
        ids, at = token_ids(length), torch.arange(length)
        positions = torch.stack([at, at // 2, at % 17])[:, None]
        want = reference.run(ids, length, LLAMA_SPEC, position_ids=positions)
        with torch.inference_mode():
            out = model(ids, position_ids=positions, logits_to_keep=1)
        done = uniprefill_fx.last_call()
        assert done is not None
        assert_dropped(done)
        assert torch.equal(done.kept_indices[0], want.kept[0])
        assert_near(out.logits[:, -1], want.logits)
        assert_differs(want.logits, reference.run(ids, length, LLAMA_SPEC).logits)  # the positions matter


@pytest.mark.parametrize("name", LLAMA_FIRST)
@pytest.mark.parametrize("pads", [(33, 0, 65), pytest.param((10, 31, 1), marks=pytest.mark.slow)], ids=str)
def test_case_10_left_padding(name: str, pads: tuple[int, ...]) -> None:
    """Rows that see nothing but padding: finite, never kept, and each request is generated as if it were alone."""
    model, length = compiled(name), 200
    ids = torch.cat([token_ids(length, seed=row) for row in range(len(pads))])
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    got = model.generate(ids, 4, attention_mask=mask)
    done = uniprefill_fx.last_call()
    assert done is not None
    assert_dropped(done)
    for layer, kept in done.kept_indices.items():
        bounds = done.cu_seqlens[layer]
        assert all(int(kept[bounds[row]]) >= pad for row, pad in enumerate(pads))
    for row, pad in enumerate(pads):
        tokens, logits = model.reference.generate(ids[row : row + 1, pad:], 4)
        assert torch.equal(got.sequences[row : row + 1, length:], tokens)
        for ours, theirs in zip(got.logits, logits, strict=True):
            assert torch.isfinite(ours).all()
            assert_near(ours[row : row + 1], theirs)


@pytest.mark.parametrize("name", BUILD)
def test_case_12_a_static_cache_longer_than_the_prompt_stays_dense(name: str) -> None:
    model, ids = compiled(name), token_ids(100)
    caches = [StaticCache(config=model.stock.config, max_cache_len=150) for _ in range(2)]
    out, done = model.prefill(ids, logits_to_keep=1, past_key_values=caches[0])
    assert not done.dropped and done.reason is not None, str(done)
    # transformers 5.24 makes another mask for such a cache, which is understood; then it is the writes that are not
    assert "DynamicCache" in done.reason.hint or done.reason.category.value == "mutation-across-cut", str(done)
    assert_near(out.logits, model.dense(ids, logits_to_keep=1, past_key_values=caches[1]).logits)
    for seed in range(3):
        more = token_ids(1, seed)
        with torch.inference_mode():
            ours, theirs = (m(more, past_key_values=c) for m, c in zip((model.model, model.stock), caches, strict=True))
        assert_near(ours.logits, theirs.logits)


def test_case_15_kept_counts_that_are_no_multiple_of_the_scan_chunk() -> None:
    two = ARCHS["falcon_h1"].config | {"num_hidden_layers": 2}
    arch = replace(ARCHS["falcon_h1"], config=two, drops=(0,))
    model, spec = arch.build(), DropSpec(arch.drops, p=0.7, block_size=8, last_n=30, sink_tokens=5)
    chunk = arch.config["mamba_chunk_size"]
    model.compile(backend="uniprefill", options=options_of(spec))
    for length in (301, 437):
        ids = token_ids(length)
        want = StockReference(arch).run(ids, length, spec)
        with torch.inference_mode():
            out = model(ids, logits_to_keep=1)
        done = uniprefill_fx.last_call()
        assert done is not None
        assert_dropped(done)
        assert all(len(kept) % chunk for kept in done.kept_indices.values())
        assert_near(out.logits[:, -1], want.logits)


@pytest.mark.parametrize("name", LLAMA_FIRST)
def test_case_16_every_cache_layer_is_as_long_as_the_plan_says(name: str) -> None:
    """The drop layer too: it stores its own keys once, those of the rows that entered it."""
    model = compiled(name)
    for length in (100, 300):
        out = check_prefill(model, token_ids(length))
        done = uniprefill_fx.last_call()
        assert done is not None
        assert_dropped(done)
        kinds = model.reference.kinds
        window = {i: WINDOW - 1 for i, kind in enumerate(kinds) if kind == "sliding_attention"}
        assert kv_lengths(out.past_key_values) == [min(n, window.get(i, n)) for i, n in enumerate(done.num_tokens)]
