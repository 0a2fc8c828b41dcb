"""Thirty architectures against the stock model that cannot see what was dropped (`arch_reference`)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from arch_builders import ARCHS, Arch
from arch_reference import Expected, StockReference
from eager_reference import DropSpec
from exactness import TIE, assert_differs, assert_near, options_of
from torch import Tensor
from transformers import DynamicCache

import uniprefill_fx
from uniprefill_fx import CompactCacheError, LastCall, frontends

LENGTHS = (611, 437, 702)  # no multiples of a block, a chunk of a recurrence, or a window
NEW = 8
QUICK = {"gpt_oss", "bloom", "falcon_h1"}
SLOW = pytest.mark.slow
TURNS = (5, 1, 40)
NAMES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ARCHS]


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def spec_of(arch: Arch) -> DropSpec:
    return DropSpec(arch.drops, p=arch.p, block_size=16, last_n=32, sink_tokens=16)


def prompt_ids(length: int) -> Tensor:
    return torch.randint(3, 256, (1, length), generator=torch.Generator().manual_seed(length))


def left_padded(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Prompts of these lengths as a batch: token ids and attention mask, (prompts, tokens) int64."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:], mask[row, -length:] = prompt_ids(length), 1
    return ids, mask


class Subject:
    """One architecture, compiled for the backend, with its references."""

    def __init__(self, name: str) -> None:
        self.arch = ARCHS[name]
        self.spec = spec_of(self.arch) if self.arch.drops else None
        self.reference = StockReference(self.arch)
        self.stock, self.model = self.arch.build(), self.arch.build()
        options = options_of(spec_of(self.arch)) | {"drop_layers": "all"}
        frontends.install()  # or else the first trace meets a module imported since, may break, and is done again
        self.model.compile(backend="uniprefill", options=options)
        self.last_only = "logits_to_keep" in inspect.signature(self.model.forward).parameters

    @torch.inference_mode()
    def prefill(self, length: int, **options: Any) -> tuple[Tensor, LastCall]:
        """The compiled model's logits of the last position (1, vocabulary), and its record of the call."""
        before = uniprefill_fx.last_call()
        only: dict[str, Any] = {"logits_to_keep": 1} if self.last_only else {}
        logits = self.model(prompt_ids(length), **only, **options).logits[:, -1]
        call = uniprefill_fx.last_call()
        assert call is not None and call is not before
        return logits, call

    @torch.inference_mode()
    def dense(self, length: int) -> Tensor:
        return self.stock(prompt_ids(length)).logits[:, -1]

    @torch.inference_mode()
    def generate(self, length: int) -> Any:
        return self.model.generate(
            prompt_ids(length),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )

    def expected(self, ids: Tensor, prompt: int) -> Expected:
        want = self.reference.run(ids, prompt, self.spec)
        for layer, selection in want.selections.items():
            assert min(selection.margin, selection.gap) > TIE, f"a tie at layer {layer}: choose another prompt"
        return want


def assert_dropped_as(call: LastCall, want: Expected, arch: Arch, length: int) -> None:
    """The backend dropped where it should, the rows that the reference chose itself."""
    assert call.dropped and call.reason is None and call.tokens == length, str(call)
    assert tuple(call.kept_indices) == arch.drops
    for layer, positions in want.kept.items():
        assert torch.equal(call.kept_indices[layer], positions), f"kept set after layer {layer}"
    assert list(call.num_tokens) == want.rows
    lengths = [len(positions) for positions in call.kept_indices.values()]
    assert all(after < before for before, after in zip([length, *lengths], lengths, strict=False)), lengths


def assert_dense_because(call: LastCall, category: str) -> None:
    assert not call.dropped and call.reason is not None
    assert call.reason.category.value == category, str(call)


def assert_cache_holds(cache: Any, config: Any, rows: list[int], new: int) -> None:
    """Each attention layer holds the prompt's rows that entered it and the new tokens, its window permitting."""
    held = DynamicCache(config=config).layers
    assert len(cache.layers) == len(held)
    for layer, (kind, entries) in enumerate(zip(held, cache.layers, strict=True)):
        keys = getattr(entries, "keys", None)
        if keys is None:
            continue
        window = getattr(kind, "sliding_window", None)
        want = rows[layer] + new if window is None else min(rows[layer] + new, window - 1)
        assert keys.shape[-2] == want, f"layer {layer} holds {keys.shape[-2]} keys, not {want}"


@pytest.mark.parametrize("name", NAMES)
def test_architecture(name: str) -> None:
    subject = Subject(name)
    arch = subject.arch
    assert_near(subject.reference.run(prompt_ids(LENGTHS[0]), LENGTHS[0], None).logits, subject.dense(LENGTHS[0]))
    for length in LENGTHS:
        got, call = subject.prefill(length)
        if arch.dense is not None:
            assert_dense_because(call, arch.dense)
            assert_near(got, subject.dense(length))
            continue
        want = subject.expected(prompt_ids(length), length)
        assert_dropped_as(call, want, arch, length)
        assert_near(got, want.logits)
        assert_differs(got, subject.dense(length))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]
    if arch.dense is None:
        got, call = subject.prefill(LENGTHS[0], use_cache=False)
        want = subject.expected(prompt_ids(LENGTHS[0]), LENGTHS[0])
        assert_dropped_as(call, want, arch, LENGTHS[0])
        assert_near(got, want.logits)


@pytest.mark.parametrize("name", NAMES)
def test_generate(name: str) -> None:
    subject = Subject(name)
    arch, length = subject.arch, LENGTHS[0]
    out = subject.generate(length)
    call = uniprefill_fx.last_call()
    assert call is not None and out.sequences.shape == (1, length + NEW)
    if arch.dense is None:
        want = subject.expected(out.sequences[:, :-1], length)
        assert_dropped_as(call, want, arch, length)
    else:
        assert_dense_because(call, arch.dense)
        want = subject.reference.run(out.sequences[:, :-1], length, None)
    assert_near(torch.cat(out.logits), want.logits)
    assert_cache_holds(out.past_key_values, subject.model.config, want.rows, NEW - 1)


@pytest.mark.parametrize("name", ["deepseek_v3", *(pytest.param(n, marks=SLOW) for n in ("gemma3n", "llama4"))])
def test_turns(name: str) -> None:
    """Several tokens at once read a compact cache, and are no prompt to drop from."""
    subject = Subject(name)
    ids, length = prompt_ids(LENGTHS[0]), LENGTHS[0] - sum(TURNS)
    want = subject.expected(ids, length)
    with torch.inference_mode():
        out = subject.model(ids[:, :length], logits_to_keep=1)
        call = uniprefill_fx.last_call()
        assert call is not None
        assert_dropped_as(call, want, subject.arch, length)
        logits, at = [out.logits], length
        for turn in TURNS:
            given = {
                "attention_mask": torch.ones(1, at + turn, dtype=torch.int64),
                "past_key_values": out.past_key_values,
            }
            logits.append(subject.model(ids[:, at : at + turn], **given).logits)
            at += turn
    assert uniprefill_fx.last_call() is call
    assert_near(torch.cat(logits, dim=1)[0], want.logits)
    assert_cache_holds(out.past_key_values, subject.model.config, want.rows, sum(TURNS))


def test_chunks_begin_behind_left_padding() -> None:
    """Llama-4 counts its chunks from the first token that is no padding, in prompts and in steps."""
    subject = Subject("llama4")
    ids = prompt_ids(300)
    mask = torch.ones_like(ids)
    mask[:, :37] = 0
    given = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    given |= {"output_logits": True, "return_dict_in_generate": True}
    with uniprefill_fx.disabled():
        got = subject.model.generate(ids, **given)
    call = uniprefill_fx.last_call()
    assert call is not None and not call.dropped and call.tokens == 300
    want = subject.stock.generate(ids, **given)
    assert torch.equal(got.sequences, want.sequences)
    assert_near(torch.cat(got.logits), torch.cat(want.logits))
    assert_differs(
        torch.cat(got.logits), torch.cat(subject.stock.generate(ids, **given | {"attention_mask": None}).logits)
    )


def test_keys_that_later_layers_share() -> None:
    """Gemma-3n drops behind the last layer that writes to the cache: all rows are stored, later layers see some."""
    arch = ARCHS["gemma3n"]
    spec = DropSpec((3,), p=arch.p, block_size=16, last_n=32, sink_tokens=16)
    model, stock, reference, length = arch.build(), arch.build(), StockReference(arch), LENGTHS[0]
    model.compile(backend="uniprefill", options=options_of(spec))
    ids = prompt_ids(length + 2)
    want = reference.run(ids, length, spec)
    assert want.rows == [length] * 4 + [len(want.kept[3])] * 2
    with torch.inference_mode():
        out = model(ids[:, :length], logits_to_keep=1)
        cache, logits = out.past_key_values, [out.logits]
        call = uniprefill_fx.last_call()
        assert call is not None and call.dropped and torch.equal(call.kept_indices[3], want.kept[3])
        eagerly = stock(ids[:, length:], past_key_values=copy.deepcopy(cache)).logits
        for at in (length, length + 1):
            logits.append(model(ids[:, at : at + 1], past_key_values=cache).logits)
        assert_near(torch.cat(logits, dim=1)[0], want.logits)
        assert_near(eagerly[0], want.logits[1:])  # each layer sees what entered it, in code that is not compiled too
        assert_differs(logits[-1][0], stock(ids).logits[0, -1:])
        assert_cache_holds(cache, model.config, want.rows, 2)
        for module in stock.modules():
            if getattr(module, "layer_idx", 0) >= 4:
                module.layer_idx = None
        with pytest.raises(CompactCacheError, match="the keys of an earlier one"):  # nothing says which tokens it sees
            stock(ids[:, length:], past_key_values=copy.deepcopy(cache))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama4", "gemma3n", "deepseek_v3"])
def test_a_left_padded_batch_equals_runs_of_one(name: str) -> None:
    """What is read by column (chunks, keys that layers share) begins behind each request's padding."""
    subject, lengths = Subject(name), LENGTHS[:2]
    ids, mask = left_padded(lengths)
    steps: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    steps |= {"output_logits": True, "return_dict_in_generate": True}
    got = subject.model.generate(ids, attention_mask=mask, **steps)
    call = uniprefill_fx.last_call()
    assert call is not None and call.dropped
    for row, length in enumerate(lengths):
        want = subject.model.generate(prompt_ids(length), **steps)
        call = uniprefill_fx.last_call()
        assert call is not None and call.dropped
        assert_near(torch.stack(got.logits)[:, row], torch.stack(want.logits)[:, 0])
