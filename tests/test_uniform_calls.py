"""Ways of writing one call share a graph, and none of them changes what the model is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import BUILD, graphs
from eager_reference import EagerReference
from exactness import assert_dropped, assert_near, options_of
from tiny import token_ids
from torch import Tensor, nn
from transformers.utils.deprecation import deprecate_kwarg

import uniprefill_fx
from uniprefill_fx.frontends.uniform_calls import UniformCalls

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
X, Y = torch.ones(1, 2), torch.ones(1, 2)
OWN_LIMITS = "isolate_recompiles" in inspect.signature(torch.compile).parameters


class Model(nn.Module):
    """Keeps the calls that reach `forward`."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.seen.append((args, kwargs))
            return forward(*args, **kwargs)

        noted.__wrapped__ = forward  # type: ignore[attr-defined]
        self.forward = noted


@pytest.fixture
def of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of this file pass for those of transformers."""
    monkeypatch.setitem(globals(), "__name__", "transformers.models.made_up")


def decoder(
    input_ids: Any,
    attention_mask: Any = None,
    labels: Any = None,
    use_cache: bool | None = None,
    logits_to_keep: int = 0,
    **kwargs: Any,
) -> Any:
    return input_ids


def reached(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What one call hands to `forward`."""
    model = Model(forward)
    UniformCalls(model, backend="eager", disable=True)(*args, **kwargs)
    (seen,) = model.seen
    return seen


@pytest.mark.usefixtures("of_transformers")
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((X, Y), {}), ((X,), {"attention_mask": Y}), ((), {"attention_mask": Y, "input_ids": X, "logits_to_keep": 0})],
)
def test_one_form(args: Any, kwargs: Any) -> None:
    got, named = reached(decoder, *args, **kwargs)
    assert got == () and list(named) == ["input_ids", "attention_mask", "use_cache", "logits_to_keep"]
    assert named["input_ids"] is X and named["attention_mask"] is Y and named["use_cache"] is None


def newer(input_ids: Any, cache: Any = None, use_cache: bool | None = None, **kwargs: Any) -> Any:
    return input_ids


@pytest.mark.usefixtures("of_transformers")
def test_a_cache_by_its_older_name() -> None:
    """transformers 5.24 takes both names; a function without its decorator gets what the caller wrote."""
    both = deprecate_kwarg("past_key_values", "99.0", new_name="cache")(newer)
    for call in ({"past_key_values": Y}, {"cache": Y}):
        assert reached(both, X, **call) == ((), {"input_ids": X, "cache": Y, "use_cache": None})
        assert reached(newer, X, past_key_values=Y) == ((X,), {"past_key_values": Y})
    assert reached(both, X, past_key_values=X, cache=Y) == ((X,), {"past_key_values": X, "cache": Y})


def packed(*args: Any, **kwargs: Any) -> Any:
    return args


def keyword_only(input_ids: Any, attention_mask: Any = None, *, logits_to_keep: int = 0) -> Any:
    return input_ids


def unnamed(input_ids: Any, /, mask: Any = None) -> Any:
    return input_ids


@pytest.mark.usefixtures("of_transformers")
@pytest.mark.parametrize(
    ("forward", "args", "kwargs"),
    [
        (decoder, (X,), {"old_name_of_it": Y}),  # a decorator may know it
        (decoder, (X,), {"return_dict": True}),  # no config that says what is usual
        (packed, (X, Y), {}),
        (packed, (X,), {"mask": Y}),
        (unnamed, (X, Y), {}),
    ],
)
def test_what_is_left_as_it_was_written(forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
    got, named = reached(forward, *args, **kwargs)
    assert len(got) == len(args) and all(a is b for a, b in zip(got, args, strict=True)) and named == kwargs


@pytest.mark.usefixtures("of_transformers")
@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((X,), {"input_ids": Y}), ((X, Y, None, None, 0, 1), {})])
@pytest.mark.parametrize("forward", [decoder, keyword_only])
def test_wrong_calls_raise_what_python_raises(forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
    with pytest.raises(TypeError):
        reached(forward, *args, **kwargs)


def test_hooks_see_the_call_as_it_was_written() -> None:
    model, seen = Model(decoder), []
    model.register_forward_pre_hook(lambda module, args: seen.append(args))
    UniformCalls(model, backend="eager", disable=True)(X, Y)
    assert len(seen) == 1 and seen[0][0] is X and seen[0][1] is Y


def test_functions_that_others_wrote_see_the_call_as_it_was_written() -> None:
    """A decorator may ask which keywords there are."""
    assert reached(decoder, X, attention_mask=Y) == ((X,), {"attention_mask": Y})


@pytest.mark.usefixtures("of_transformers")
def test_a_column_of_a_longer_tensor_has_strides_of_its_own() -> None:
    ids = torch.arange(6).reshape(1, 6)
    _, named = reached(decoder, ids[:, 2:3], ids[:, 1:])
    assert named["input_ids"].tolist() == [[2]] and named["input_ids"].stride() == (1, 1)
    assert named["attention_mask"].tolist() == [[1, 2, 3, 4, 5]] and named["attention_mask"].stride() == (5, 1)


def compiled() -> tuple[Any, EagerReference]:
    build, spec = BUILD["llama"]
    return uniprefill_fx.compile(build(), **options_of(spec)), EagerReference(build(), spec)


def test_ways_of_writing_a_prompt_share_a_graph() -> None:
    model, reference = compiled()
    ids = token_ids(300)
    mask, want = torch.ones_like(ids), reference.prefill(ids).last_logits
    ways: list[Callable[[], Any]] = [
        lambda: model(ids, mask, logits_to_keep=1),
        lambda: model(logits_to_keep=1, attention_mask=mask, input_ids=ids, use_cache=None),
        lambda: model(ids, attention_mask=mask, logits_to_keep=1, return_dict=True),
    ]
    with torch.no_grad():
        for way in ways:
            assert_near(way().logits, want)
            done = uniprefill_fx.last_call()
            assert done is not None
            assert_dropped(done)
    assert graphs() == 1


@pytest.mark.skipif(not OWN_LIMITS, reason="torch counts graphs by function")
def test_a_step_finds_room_however_many_prompts_there_were() -> None:
    """One graph is allowed: the prompts have theirs, and another prompt finds none; the steps have one too."""
    model, reference = compiled()
    ids = token_ids(300)
    call: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        model(ids, logits_to_keep=1)
        assert graphs() == 1
        cache = model(ids, logits_to_keep=1).past_key_values
        want: list[Tensor] = [reference.prefill(ids).last_logits]
        for seed in (1, 2):
            token = token_ids(1, seed=seed)
            want.append(reference.step(token))
            assert_near(model(token, past_key_values=cache, logits_to_keep=1).logits, want[-1])
        assert graphs() == 2
        stock = BUILD["llama"][0]()
        assert torch.equal(model.generate(ids, **call), stock.generate(ids, **call))  # no graph left: it runs dense
    assert graphs() == 2
