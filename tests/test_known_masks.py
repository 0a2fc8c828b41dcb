"""Masks that the transformers frontend annotates: what it says is what reading them says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from arch_builders import ARCHS
from torch import fx

from uniprefill_fx.passes.analyze.masks import kinds
from uniprefill_fx.passes.node_utils import peel


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def facts(kind: kinds.MaskKind) -> tuple[Any, ...]:
    padding = None if kind.key_mask is None else peel(kind.key_mask, ("to", "bool", "contiguous"))
    return kind.offset, kind.window, kind.chunk, padding, kind.sequence_ids, kind.chunk_start, kind.alibi


CALLS: dict[str, dict[str, Any]] = {
    "prompt": {},
    "padded batch": {"attention_mask": torch.tensor([[0] * 40 + [1] * 260, [1] * 300])},
    "no cache, padded": {"attention_mask": torch.tensor([[1] * 260 + [0] * 40, [1] * 300]), "use_cache": False},
    "packed": {"position_ids": torch.cat([torch.arange(100), torch.arange(200)])[None], "use_cache": False},
}


@pytest.mark.parametrize("name, sliding", [("llama", False), ("gemma3", True), ("gpt_oss", True)])
@pytest.mark.parametrize("call", CALLS)
def test_the_annotation_is_what_the_reader_finds(
    name: str, sliding: bool, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreed: list[tuple[Any, ...]] = []
    masks: set[fx.Node] = set()
    known = kinds.known_kind

    def compared(mask: fx.Node) -> kinds.MaskKind | None:
        masks.add(mask)
        said = known(mask)
        if said is not None:
            source: Any = mask.args[0]
            read = kinds.classify([(source, False)], (kinds.shape(mask) or ())[2])
            assert facts(said) == facts(read)
            agreed.append(facts(said))
        return said

    monkeypatch.setattr(kinds, "known_kind", compared)
    model, given = ARCHS[name].build(), CALLS[call]
    rows = given.get("attention_mask", torch.zeros(1, 300)).shape[0]
    compiled = torch.compile(model, backend="uniprefill", options={"inner_backend": "eager", "min_tokens": 0})
    with torch.inference_mode():
        out = compiled(torch.randint(3, 200, (rows, 300)), **given)
        if given.get("use_cache", True):
            padding = given.get("attention_mask")
            more = {} if padding is None else {"attention_mask": torch.nn.functional.pad(padding, (0, 1), value=1)}
            compiled(torch.randint(3, 200, (rows, 1)), past_key_values=out.past_key_values, **more)
    if name == "gpt_oss" and call != "prompt":
        # With padding it is indexed, which does not tie the lengths of the mask and of the prompt: it is read. Without
        # a cache the model hands no positions over, so that transformers looks for no packed prompts either.
        return
    if not masks:  # newer versions make none where causal attention hides all that is to be hidden
        assert (name, call) == ("llama", "prompt")
        return
    assert bool(agreed) == (call != "packed"), "prompts that may be packed are read, all others are known"
    assert {window is not None for _, window, *_ in agreed} >= ({True} if sliding and agreed else set())
