"""Presets, which `p="auto"` stands for, and `block_size="auto"`: what they mean, and that they do it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from eager_reference import DropSpec, EagerReference
from exactness import assert_near, assert_same_rows, options_of
from option_refusals import FRACTION, refuse
from tiny import tiny_llama, token_ids

import uniprefill_fx
from uniprefill_fx.api import options_for
from uniprefill_fx.config import PRESETS, PrefillConfig, Preset, auto_block_size

SPEC = DropSpec((0, 1, 2), p=0.9, block_size=16, last_n=16, sink_tokens=16)


def test_p_falls_with_depth() -> None:
    """Even between a third and two thirds, and no further: at layers 7, 15 and 27 of 32, say."""
    preset = Preset(0.99, 0.9)
    by_hand = {8 / 32: 0.99, 1 / 3: 0.99, 0.5: 0.945, 0.6: 0.918, 2 / 3: 0.9, 28 / 32: 0.9, 1.0: 0.9}
    assert {depth: preset.p(depth) for depth in by_hand} == pytest.approx(by_hand)


def test_presets_go_from_strict_to_loose() -> None:
    for depth in (0.1, 0.4, 0.5, 0.6, 0.9):
        kept = [PRESETS[name].p(depth) for name in ("quality", "balanced", "fast")]
        assert kept == sorted(kept, reverse=True) and kept[0] != kept[-1]
    for preset in PRESETS.values():
        assert 0 < preset.late <= preset.early <= 1


def test_what_is_given_beside_a_preset_wins() -> None:
    class Model:
        class config:
            model_type, num_hidden_layers = "gemma3_text", 48

        def __call__(self) -> None: ...

    published = {"drop_layers": (29, 35, 41), "p": 0.975}
    assert options_for(Model(), {}) == published
    assert options_for(Model(), {"preset": "fast"}) == {"drop_layers": (29, 35, 41), "preset": "fast"}
    assert options_for(Model(), {"preset": "fast", "p": 0.9})["p"] == 0.9
    assert options_for(Model(), {"drop_layers": [5]}) == {"drop_layers": [5]}
    assert PrefillConfig.from_options({"preset": "fast", "p": 0.9}).kept_for(0, 1, 0.5) == (0.9, None)
    refuse({"preset": "balance"}, "preset", "balance", "'quality', 'balanced', 'fast'", "'balanced'")


@pytest.mark.parametrize(
    ("tokens", "size"), [(1, 128), (4096, 128), (8191, 128), (8192, 64), (65_535, 64), (65_536, 32), (131_072, 32)]
)
def test_blocks_get_finer(tokens: int, size: int) -> None:
    assert auto_block_size(tokens) == size


def test_refusals_name_it() -> None:
    refuse({"p": "oto"}, "p", "oto", FRACTION + ", or 'auto'")
    refuse({"block_size": 0}, "block_size", 0, "an integer of at least 1, or 'auto'")
    refuse({"selection": "top_k", "keep_ratio": "auto"}, "keep_ratio", "auto", FRACTION + ". ")


def test_both_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and logits are the reference's with the values they stand for; a longer prompt has finer blocks, with no
    further compilation; `override` takes "auto" and presets as well, and what is given last wins."""
    monkeypatch.setattr(
        "uniprefill_fx.config.PRESETS", {**PRESETS} | {"quality": Preset(0.99, 0.9), "fast": Preset(0.9, 0.6)}
    )
    monkeypatch.setattr("uniprefill_fx.config.AUTO_BLOCKS", ((256, 64), (400, 32)))
    torch._dynamo.reset()
    model = tiny_llama(4)
    model.compile(backend="uniprefill", options=options_of(SPEC) | {"p": "auto", "block_size": "auto"})

    def check(length: int, spec: DropSpec) -> uniprefill_fx.LastCall:
        ids = token_ids(length)
        want = EagerReference(tiny_llama(4), spec).prefill(ids)
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=1).logits
        call = uniprefill_fx.last_call()
        assert call is not None
        assert_same_rows(call, want, length)
        assert_near(logits, want.last_logits)
        return call

    auto = replace(SPEC, p=(0.99, 0.945, 0.9))
    assert check(250, replace(auto, block_size=64)).changed == {"block_size": 64}
    assert check(300, replace(auto, block_size=32)).changed == {"block_size": 32}
    with uniprefill_fx.override(block_size=16, p=0.8):
        check(300, replace(SPEC, block_size=16, p=0.8))
    with uniprefill_fx.override(p="auto"):
        check(300, replace(auto, block_size=32))
    fast = replace(SPEC, p=(0.9, 0.75, 0.6), block_size=32)
    with uniprefill_fx.override(p=0.8), uniprefill_fx.override(preset="fast"):
        assert check(300, fast).changed == {"preset": "fast", "block_size": 32}
        with uniprefill_fx.override(p=0.8):
            check(300, replace(fast, p=0.8))
        with uniprefill_fx.override(keep_ratio=0.5):
            check(300, replace(fast, p=0.8, selection="top_k", keep_ratio=0.5))
        check(300, fast)
    torch._dynamo.reset()


def test_explain_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uniprefill_fx.config.PRESETS", {**PRESETS} | {"quality": Preset(0.99, 0.9)})
    options = options_of(SPEC) | {"p": "auto", "block_size": "auto"}
    text = str(uniprefill_fx.explain(tiny_llama(4), token_ids(300), **options))
    assert "p=0.99" in text and "p=0.945" in text and "p=0.9," in text and "for this call: block_size=128" in text
