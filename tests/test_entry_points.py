"""Every way of using the backend, on the first call and without set-up; options; what costs a compilation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from eager_reference import DropSpec, EagerReference
from exactness import assert_differs, assert_dropped, assert_near, options_of
from tiny import LLAMA, tiny_llama, token_ids
from torch._dynamo.utils import counters

import uniprefill_fx
from uniprefill_fx import LastCall, OptionError, PrefillConfig

OPTIONS = options_of(LLAMA)
WAYS = ("torch.compile", "model.compile", "model.forward", "uniprefill_fx.compile")


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def use(way: str, model: Any, options: dict[str, Any], **call: Any) -> Callable[..., Any]:
    """The model, compiled in one of the four ways."""
    if way == "torch.compile":
        return torch.compile(model, backend="uniprefill", options=options, **call)
    if way == "uniprefill_fx.compile":
        return uniprefill_fx.compile(model, **options, **call)
    if way == "model.compile":
        model.compile(backend="uniprefill", options=options, **call)
    else:
        model.forward = torch.compile(model.forward, backend="uniprefill", options=options, **call)
    return model


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


class CountingInner:
    """An inner backend that counts what it compiles, and keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any], **call: Any) -> Callable[..., Any]:
        self.calls.append(call)
        return gm.forward


def check(fast: Callable[..., Any], length: int, spec: DropSpec = LLAMA) -> LastCall:
    """One prompt: dropped, as the reference drops, and not what the dense model says."""
    ids, model = token_ids(length, seed=length), tiny_llama()
    before = uniprefill_fx.last_call()
    with torch.inference_mode():
        out = fast(ids, logits_to_keep=1)
    call = uniprefill_fx.last_call()
    assert call is not None and call is not before
    assert_dropped(call)
    want = EagerReference(model, spec).prefill(ids)
    assert_near(out.logits, want.last_logits)
    assert all(torch.equal(call.kept_indices[layer], kept) for layer, kept in want.kept.items())
    assert_differs(out.logits, model(ids, logits_to_keep=1).logits)
    return call


@pytest.mark.parametrize(
    ("way", "dynamic"),
    [(way, None) for way in WAYS]
    + [pytest.param(way, True, marks=() if way == "torch.compile" else pytest.mark.slow) for way in WAYS],
)
def test_first_call_and_other_lengths(way: str, dynamic: bool | None) -> None:
    """It drops at once; a second and a third length cost no compilation, here or in the inner backend."""
    inner = CountingInner()
    fast = use(way, tiny_llama(), OPTIONS | {"inner_backend": inner}, dynamic=dynamic)
    check(fast, 300)
    compiled, pieces = graphs(), len(inner.calls)
    assert compiled == 1 and pieces == 2  # before and after the one drop
    check(fast, 333)
    check(fast, 512)
    assert (graphs(), len(inner.calls)) == (compiled, pieces)


@pytest.mark.parametrize("way", WAYS[2:])
def test_generate(way: str) -> None:
    model, ids = tiny_llama(), token_ids(300)
    use(way, model, OPTIONS)
    tokens, logits = EagerReference(tiny_llama(), LLAMA).generate(ids, 5)
    got = model.generate(
        ids, max_new_tokens=5, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True
    )
    call = uniprefill_fx.last_call()
    assert call is not None
    assert_dropped(call)
    assert torch.equal(got.sequences[:, 300:], tokens)
    for ours, theirs in zip(got.logits, logits, strict=True):
        assert_near(ours, theirs)


def test_disabled_runs_dense_without_compiling_the_model_again() -> None:
    model, ids = tiny_llama(), token_ids(300)
    use("model.compile", model, OPTIONS)
    check(model, 300)
    compiled = graphs()
    with torch.inference_mode(), uniprefill_fx.disabled():
        out = model(ids, logits_to_keep=1)
    call = uniprefill_fx.last_call()
    assert call is not None and not call.dropped and call.tokens == 300
    assert call.reason is not None and call.reason.category.value == "disabled"
    assert_near(out.logits, tiny_llama()(ids, logits_to_keep=1).logits)
    check(model, 333)
    assert graphs() == compiled


def test_disabled_on_the_first_call() -> None:
    model, ids = tiny_llama(), token_ids(300)
    use("model.compile", model, OPTIONS)
    with torch.inference_mode(), uniprefill_fx.disabled():
        out = model(ids, logits_to_keep=1)
    assert_near(out.logits, tiny_llama()(ids, logits_to_keep=1).logits)
    compiled = graphs()
    check(model, 300)
    assert graphs() == compiled


# Options

CHANGED: dict[str, Any] = {
    "preset": "fast",
    "p": 0.9,
    "block_size": 8,
    "last_n": 24,
    "sink_tokens": 24,
    "drop_layers": [0],
    "window": "index",
    "full_logits": "dense",
    "selection": "top_k",
    "keep_ratio": 0.25,
    "min_tokens": 7,
    "inner_backend": "aot_eager",
    "inner_options": {"a": 1},
    "score_dtype": "float64",
    "attention": "block_sparse",
    "sparse_alpha": 0.2,
    "sparse_block_size": 64,
    "sparse_sink_blocks": 1,
    "sparse_window_blocks": 2,
    "sparse_last_tokens": 0,
    "sparse_correction": False,
    "sparse_layers": "all",
    "sparse_min_tokens": 0,
    "attention_dtype": "float8_e4m3",
    "strict": True,
}


def test_every_option_is_part_of_what_dynamo_compares() -> None:
    """Dynamo reuses a compilation when backends are equal: a changed option must make them unequal."""
    assert set(CHANGED) == {option.name for option in dataclasses.fields(PrefillConfig)}

    def backend(options: dict[str, Any]) -> Any:
        return torch._TorchCompileWrapper("uniprefill", None, options, None)

    assert backend(OPTIONS) == backend(dict(OPTIONS))
    for name, value in CHANGED.items():
        assert backend(OPTIONS) != backend(OPTIONS | {name: value}), name


def test_two_sets_of_options_on_one_model_keep_apart() -> None:
    model = tiny_llama()
    other = dataclasses.replace(LLAMA, p=0.9)
    first = use("torch.compile", model, options_of(LLAMA))
    second = use("torch.compile", model, options_of(other))
    for _ in range(2):
        one, two = check(first, 300), check(second, 300, other)
        assert len(one.kept_indices[1]) < len(two.kept_indices[1])
    model.compile(backend="uniprefill", options=options_of(LLAMA))
    check(model, 300)
    model.compile(backend="uniprefill", options=options_of(other))
    check(model, 300, other)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"blok_size": 32}, ("blok_size", "32", "block_size", "Did you mean")),
        ({"p": 1.5}, ("'p'", "1.5", "(0, 1]")),
        ({"drop_layers": [7]}, ("drop_layers", "[7]", "[0, 1, 2]")),
        ({"p": [0.9, 0.8], "drop_layers": "all"}, ("'p'", "(0.9, 0.8)", "a list of 3")),
        ({"inner_backend": "inducktor"}, ("inner_backend", "inducktor", "inductor")),
        ({"selection": "top_k"}, ("keep_ratio", "None", "top_k")),
        ({"score_dtype": "float8_e4m3"}, ("score_dtype", "float8_e4m3", "a model on cpu", "8.9")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options_raise_when_the_model_compiles(options: dict[str, Any], words: tuple[str, ...]) -> None:
    fast = use("torch.compile", tiny_llama(), options)
    with torch.inference_mode(), pytest.raises(Exception, match="option '") as raised:
        fast(token_ids(300), logits_to_keep=1)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert isinstance(raised.value, OptionError | torch._dynamo.exc.BackendCompilerFailed)
    if not {"drop_layers", "inner_backend", "score_dtype"} & options.keys():
        with pytest.raises(OptionError):
            uniprefill_fx.compile(tiny_llama(), **options)


def test_a_mode_is_a_clear_error() -> None:
    fast = torch.compile(tiny_llama(), backend="uniprefill", mode="reduce-overhead")
    with torch.inference_mode(), pytest.raises(Exception, match=r"option 'mode'.*inner_options"):
        fast(token_ids(300))


def test_fullgraph() -> None:
    check(use("torch.compile", tiny_llama(), OPTIONS, fullgraph=True), 300)


def test_inner_options_reach_the_inner_backend() -> None:
    inner = CountingInner()
    options = OPTIONS | {"inner_backend": inner, "inner_options": {"level": 3}}
    check(use("torch.compile", tiny_llama(), options), 300)
    assert inner.calls == [{"options": {"level": 3}}] * 2


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_inner_backends(inner: str) -> None:
    fast = use("torch.compile", tiny_llama(2), options_of(DropSpec((0,), 0.7, 16, 16, 16), inner_backend=inner))
    with torch.inference_mode():
        for length in (300, 333):
            ids = token_ids(length)
            want = EagerReference(tiny_llama(2), DropSpec((0,), 0.7, 16, 16, 16)).prefill(ids)
            out = fast(ids, logits_to_keep=1)
            call = uniprefill_fx.last_call()
            assert call is not None and torch.equal(call.kept_indices[0], want.kept[0])
            assert_dropped(call)
            assert_near(out.logits, want.last_logits)
