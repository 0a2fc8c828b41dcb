"""`p="auto"` and `block_size="auto"`: what they stand for, and that they do it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from eager_reference import DropSpec, EagerReference
from exactness import assert_near, assert_same_rows, options_of
from option_refusals import FRACTION, refuse
from tiny import tiny_llama, token_ids

import uniprefill_fx
from uniprefill_fx.config import PrefillConfig, auto_block_size, auto_p

SPEC = DropSpec((0, 1, 2), p=0.9, block_size=16, last_n=16, sink_tokens=16)


def test_p_falls_from_layer_to_layer() -> None:
    assert [auto_p(i, 3) for i in range(3)] == [0.99, 0.945, 0.9]
    assert auto_p(0, 1) == 0.99 and [auto_p(i, 2) for i in range(2)] == [0.99, 0.9]
    assert PrefillConfig(p="auto").kept_for(1, 3) == (0.945, None)
    with pytest.raises(IndexError):
        auto_p(2, 2)


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
    further compilation; `override` takes "auto" as well."""
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
    torch._dynamo.reset()


def test_explain_shows_them() -> None:
    options = options_of(SPEC) | {"p": "auto", "block_size": "auto"}
    text = str(uniprefill_fx.explain(tiny_llama(4), token_ids(300), **options))
    assert "p=0.99" in text and "p=0.945" in text and "p=0.9," in text and "for this call: block_size=128" in text
