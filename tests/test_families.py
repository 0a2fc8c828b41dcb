"""Kinds of decoders one by one: how they write attention, what their reasons say, what they warn of."""

from __future__ import annotations

import copy
import functools
import pickle
import types
import warnings
from typing import Any

import pytest
import torch
import transformers
from arch_builders import DEEPSEEK, FALCON, INDEXER, SIZED
from arch_measure import Measure, prompt_ids
from eager_reference import DropSpec, EagerReference
from exactness import TIE, assert_differs, assert_dropped, assert_near, options_of
from plain_reference import _Attention as HiddenKeys
from tiny import LLAMA, tiny_llama, token_ids
from torch import Tensor, nn

import uniprefill_fx
from uniprefill_fx import OptionError
from uniprefill_fx.frontends import gating
from uniprefill_fx.frontends.mixers import register_mixer
from uniprefill_fx.passes.normalize.causal_buffers import CausalBuffer
from uniprefill_fx.pipeline import compile_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SPEC = DropSpec((0,), p=0.7, block_size=16, last_n=32, sink_tokens=16)
TWO = {"num_hidden_layers": 2}


def falcon() -> Any:
    torch.manual_seed(0)
    config = transformers.FalconConfig(**FALCON | TWO | {"alibi": True, "bos_token_id": 1, "eos_token_id": 2})
    return transformers.FalconForCausalLM(config).eval()


@pytest.mark.parametrize("masked", [False, True])
@torch.inference_mode()
def test_falcon_with_alibi(masked: bool) -> None:
    """`slopes * (mask.cumsum(-1) - 1)` in the mask is a bias of keys, read at their original positions."""
    model, stock, ids = falcon(), falcon(), token_ids(400)
    model.compile(backend="uniprefill", options=options_of(SPEC))
    given = {"attention_mask": torch.ones_like(ids)} if masked else {}
    got = model(ids, logits_to_keep=1, **given).logits[:, -1]
    call = uniprefill_fx.last_call()
    reference = HiddenKeys(ids.shape[1], SPEC, range(2))
    with reference:
        want = stock(ids, logits_to_keep=1, use_cache=False).logits[:, -1]
    assert min(reference.selections[0].margin, reference.selections[0].gap) > TIE
    assert call is not None and call.dropped and torch.equal(call.kept_indices[0], reference.kept[0]), str(call)
    assert_near(got, want)
    assert_differs(got, stock(ids).logits[:, -1])


@torch.inference_mode()
def test_a_decorator_around_forward_hides_no_layers() -> None:
    """`wrapped(*args)`, as transformers writes since 5.24: Dynamo names the model as an argument's first element."""
    model, ids = tiny_llama(), token_ids(300)
    forward = type(model).forward
    wrapped = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
    model.forward = types.MethodType(wrapped, model)
    model.compile(backend="uniprefill", options=options_of(LLAMA))
    with pytest.warns(UserWarning, match="outputs of all positions"):
        got = model(ids).logits
    want = EagerReference(tiny_llama(), LLAMA).prefill(ids)
    call = uniprefill_fx.last_call()
    assert call is not None and call.dropped, str(call)
    assert_near(got, want.logits)


def nested(x: Tensor, tables: Any) -> Tensor:
    """A scan whose factors come in a dict of tuples."""
    scale, shift = tables["of"]
    return (x * scale + shift).cumsum(1) / tables["by"][0]


register_mixer(nested, "x")


@torch.inference_mode()
def test_any_pytree_reaches_a_mixer() -> None:
    seen: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        config = uniprefill_fx.PrefillConfig(inner_backend="eager")
        return compile_graph(gm, inputs, config, seen.append)

    def call(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return nested(x, tables={"of": (a, b), "by": [2.0, None, x.shape[2]]})

    setattr(backend, gating.OURS, True)
    x, a, b = torch.randn(1, 9, 4), torch.randn(4), torch.randn(4)
    assert torch.equal(torch.compile(call, backend=backend, fullgraph=True)(x, a, b), call(x, a, b))
    targets = [str(node.target) for node in seen[0].before.graph.nodes]
    assert "uniprefill.mixer" in " ".join(targets), targets


def test_banded_buffers() -> None:
    band = torch.ones(9, 9).tril() * (1 - torch.ones(9, 9).tril(-3))
    assert CausalBuffer(1.0, 0.0, 3).fits(band) and not CausalBuffer(1.0, 0.0).fits(band)
    assert not CausalBuffer(1.0, 0.0, 4).fits(band)
    band[8, 7] = 0
    assert not CausalBuffer(1.0, 0.0, 3).fits(band)


@torch.inference_mode()
def test_the_reason_names_the_indexer() -> None:
    torch.manual_seed(0)
    config = transformers.DeepseekV32Config(**DEEPSEEK | INDEXER | TWO | {"first_k_dense_replace": 2})
    model = transformers.DeepseekV32ForCausalLM(config).eval()
    want = model(token_ids(300), logits_to_keep=1).logits
    model.compile(backend="uniprefill", options=options_of(SPEC))
    assert_near(model(token_ids(300), logits_to_keep=1).logits, want)
    call = uniprefill_fx.last_call()
    assert call is not None and call.reason is not None and not call.dropped
    assert call.reason.category.value == "indexed-attention" and "topk" in call.reason.seen


@torch.inference_mode()
def test_a_classifier_is_no_loss() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZED | TWO | {"num_labels": 3})
    model = transformers.LlamaForSequenceClassification(config).eval()
    want = model(token_ids(300)).logits
    model.compile(backend="uniprefill", options=options_of(SPEC))
    assert_near(model(token_ids(300)).logits, want)
    call = uniprefill_fx.last_call()
    assert call is not None and not call.dropped and call.reason is not None
    assert "picked by an index tensor" in call.reason.seen and "loss" not in str(call.reason)


@torch.inference_mode()
def test_a_classifier_of_the_last_token_drops() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZED | TWO | {"num_labels": 3, "pad_token_id": None})
    model, ids = transformers.LlamaForSequenceClassification(config).eval(), token_ids(400)
    with HiddenKeys(ids.shape[1], SPEC, range(2)):
        want = model(ids, use_cache=False).logits
    dense = model(ids).logits
    model.compile(backend="uniprefill", options=options_of(SPEC))
    got, call = model(ids).logits, uniprefill_fx.last_call()
    assert call is not None and call.dropped, str(call)
    assert_near(got, want)
    assert_differs(got, dense)


class Logits(nn.Module):
    """What torch.export takes: tensors in, a tensor out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False, logits_to_keep=1).logits


class Mean(Logits):
    """An embedding model: the mean of the last hidden states."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.model.model(ids, use_cache=False).last_hidden_state.mean(1)


def exported() -> Any:
    return torch.export.export(Logits(tiny_llama(2)), (token_ids(300),)).module()


def with_flex() -> nn.Module:
    return Logits(tiny_llama(2, attention="flex_attention"))


@pytest.mark.parametrize(
    ("build", "said"),
    [(exported, "exported program"), (with_flex, "flex_attention"), (lambda: Mean(tiny_llama(2)), "pooling")],
)
@torch.inference_mode()
def test_the_reason_names_what_is_there(build: Any, said: str) -> None:
    model, ids = build(), token_ids(300)
    want = (Mean if said == "pooling" else Logits)(tiny_llama(2))(ids)
    got, call = torch.compile(model, backend="uniprefill", options=options_of(SPEC))(ids), uniprefill_fx.last_call()
    assert_near(got, want)
    assert call is not None and not call.dropped and call.reason is not None and said in call.reason.seen, str(call)


@torch.inference_mode()
def test_the_reason_names_a_static_cache() -> None:
    model, given = tiny_llama(2), {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
    want = model.generate(token_ids(300), **given)
    model.compile(backend="uniprefill", options=options_of(SPEC))
    assert torch.equal(model.generate(token_ids(300), **given), want)
    call = uniprefill_fx.last_call()
    assert call is not None and call.reason is not None and call.reason.category.value == "has-past-keys", str(call)
    assert "another cache" in call.reason.seen and "DynamicCache" in call.reason.hint


@torch.inference_mode()
def test_an_embedding_of_the_last_token_drops() -> None:
    """A base model drops: the last token's state is that of the reference, others may be frozen, with a warning."""
    model, ids = tiny_llama(2).model, token_ids(400)
    with HiddenKeys(ids.shape[1], SPEC, range(2)):
        want = model(ids, use_cache=False).last_hidden_state[:, -1]
    dense = model(ids).last_hidden_state[:, -1]
    model.compile(backend="uniprefill", options=options_of(SPEC))
    with pytest.warns(UserWarning, match="frozen states"):
        got, call = model(ids).last_hidden_state[:, -1], uniprefill_fx.last_call()
    assert call is not None and call.dropped, str(call)
    assert_near(got, want)
    assert_differs(got, dense)


@torch.inference_mode()
def test_few_last_rows_of_any_number() -> None:
    """After two values `logits_to_keep` is no constant: one graph for all numbers up to `last_n`, and no warning."""
    model, stock, ids = tiny_llama(2), tiny_llama(2), token_ids(300)
    model.compile(backend="uniprefill", options=options_of(SPEC))
    with HiddenKeys(ids.shape[1], SPEC, range(2)):
        want = stock(ids, use_cache=False).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in (1, 5, 3, SPEC.last_n):
            got, call = model(ids, logits_to_keep=count, use_cache=False).logits, uniprefill_fx.last_call()
            assert call is not None and call.dropped, str(call)
            assert_near(got, want[:, -count:])
        with uniprefill_fx.override(last_n=8):
            model(ids, logits_to_keep=5, use_cache=False)
            with pytest.raises(OptionError, match="9 or more"):
                model(ids, logits_to_keep=9, use_cache=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@torch.inference_mode()
def test_prompts_that_grow_by_a_token_warn_once() -> None:
    model = tiny_llama(2)
    model.compile(backend="uniprefill", options=options_of(SPEC))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (300, 301, 302, 303, 304, 305):
            model(token_ids(310)[:, :length], use_cache=False, logits_to_keep=1)
    said = [w for w in caught if "selects tokens anew" in str(w.message)]
    assert len(said) == 1, [str(w.message) for w in caught]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_says_that_it_is_not_compiled(how: Any) -> None:
    model = uniprefill_fx.compile(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="the copy is not compiled"):
        twin = how(model)
    assert torch.equal(twin.weight, model.weight) and twin._compiled_call_impl is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(twin)


@torch.no_grad()
def test_guidance_reads_last_rows() -> None:
    """Frozen logits are worth a word where all of a prompt were asked for: guidance does that of a negative prompt."""
    model, ids, other = uniprefill_fx.compile(tiny_llama(2), **options_of(SPEC)), token_ids(300), token_ids(280, seed=1)
    call: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="uniprefill")
        for _ in range(2):
            model.generate(ids, guidance_scale=1.5, **call)
            for count in (1, 4):  # no constant any more
                model(ids, logits_to_keep=count)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.generate(ids, guidance_scale=1.5, negative_prompt_ids=other, **call)
            model(ids, logits_to_keep=1)
    said = [str(w.message) for w in caught if str(w.message).startswith("uniprefill")]
    assert len(said) == 1 and "outputs of all positions" in said[0], said


@pytest.mark.slow
def test_what_bounds_and_calibrates_reads_last_rows() -> None:
    """One after the other, on one model: the numbers of rows that they read make no constant, and nobody is warned."""
    model = tiny_llama(2)
    options: dict[str, Any] = {"drop_layers": [0], "min_tokens": 0, "block_size": 16, "last_n": 32}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="uniprefill: outputs of all positions")
        uniprefill_fx.error_bound(model, token_ids(200), p=0.7, **options)
        uniprefill_fx.calibrate(model, [token_ids(220)], **options)


def test_a_decoder_that_makes_a_pair_of_caches() -> None:
    """RoCBert makes a cache for an encoder's keys, too, before its masks, though it stands alone."""
    subject, ids, prompt = Measure("roc_bert"), prompt_ids(440), 437
    subject.compile(0.7)
    with torch.inference_mode():
        out = subject.model(ids[:, :prompt])
        done, logits = uniprefill_fx.last_call(), [out.logits[0, -1:]]
        for at in range(prompt, ids.shape[1]):
            out = subject.model(ids[:, at : at + 1], past_key_values=out.past_key_values)
            logits.append(out.logits[0])
    assert done is not None
    assert_dropped(done)
    subject.check("steps", torch.cat(logits), ids, prompt, done)
