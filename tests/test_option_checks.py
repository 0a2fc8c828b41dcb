"""Option by option: what is accepted, how it is stored, and what each refusal tells the user."""

from __future__ import annotations

import functools
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from option_refusals import FRACTION, refuse

from uniprefill_fx.config import OptionError, PrefillConfig, over_published

LAYERS = "'auto', 'all', 'none', or a non-empty list of different decoder layer indices, counted from 0"
BACKENDS = "the name of a registered torch.compile backend ('inductor', 'aot_eager', 'eager', …), or a callable"


def test_option_error_keeps_its_parts() -> None:
    error = OptionError("p", 2, "a number", "Try 1.")
    assert isinstance(error, ValueError)
    assert str(error) == "option 'p': got 2; allowed: a number. Try 1."
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.option, copy.value, copy.allowed, copy.hint, str(copy)) == ("p", 2, "a number", "Try 1.", str(error))


# Fractions: p and keep_ratio


@pytest.mark.parametrize("value", [1, 1.0, 0.5, 1e-9, Fraction(1, 2), np.float32(0.5), np.float64(0.5), np.int64(1)])
def test_fraction_is_stored_as_float(value: Any) -> None:
    for stored in (PrefillConfig(p=value).p, PrefillConfig(selection="top_k", keep_ratio=value).keep_ratio):
        assert type(stored) is float
        assert stored == value


@pytest.mark.parametrize(("name", "value"), [("preset", "fast"), ("preset", "quality"), ("p", 0.9), ("p", [0.9, 0.8])])
def test_what_nothing_reads_is_refused(name: str, value: object) -> None:
    options = {name: value, "selection": "top_k", "keep_ratio": 0.5}
    refuse(options, name, value, f"no {name} with selection='top_k'", "top_k reads keep_ratio, and no p")


def test_a_published_p_gives_way_to_top_k() -> None:
    options = over_published("gemma3", 48, {"selection": "top_k", "keep_ratio": 0.5})
    assert options["drop_layers"] == (29, 35, 41) and PrefillConfig.from_options(options).keep_ratio == 0.5


@pytest.mark.parametrize("value", [[0.9, 1], (0.9, 1)])
def test_fraction_list_is_stored_as_tuple_of_floats(value: Any) -> None:
    for stored in (PrefillConfig(p=value).p, PrefillConfig(selection="top_k", keep_ratio=value).keep_ratio):
        assert stored == (0.9, 1.0)
        assert isinstance(stored, tuple)
        assert all(type(number) is float for number in stored)


BAD_FRACTIONS = [
    0, 0.0, -0.5, 1.0001, 2, float("nan"), float("inf"), -float("inf"), 10**400, True, False, "0.9", b"0.9", 1j,
    {}, {0.9}, [], (), [0.9, 0], [0.9, True], [0.9, "0.9"], [0.9, float("nan")], [0.9, None], [[0.9]],
]  # fmt: skip


@pytest.mark.parametrize("value", BAD_FRACTIONS, ids=repr)
def test_bad_fraction(value: object) -> None:
    if repr(value).startswith("1000"):  # a long value is cut short in the message
        with pytest.raises(OptionError, match=r"option 'p': got 10{199}…; allowed: "):
            PrefillConfig.from_options({"p": value})
        return
    refuse({"p": value}, "p", value, FRACTION, "p=1.0 keeps every token.")
    refuse(
        {"selection": "top_k", "keep_ratio": value}, "keep_ratio", value, FRACTION, "keep_ratio=1.0 keeps every block."
    )


def test_p_may_not_be_none() -> None:
    refuse({"p": None}, "p", None, FRACTION)


# Integers


@pytest.mark.parametrize(
    ("option", "minimum"), [("block_size", 1), ("last_n", 1), ("sink_tokens", 0), ("min_tokens", 0)]
)
def test_integers(option: str, minimum: int) -> None:
    for value in (minimum, 4096, np.int32(7), 2**31 - 1):
        stored = getattr(PrefillConfig.from_options({option: value}), option)
        assert type(stored) is int
        assert stored == value
    for bad in (minimum - 1, -64, True, False, 64.0, float("nan"), "64", None, [64]):
        refuse({option: bad}, option, bad, f"an integer of at least {minimum}")
    for large in (2**31, 2**63, 10**100, np.int64(2**31)):
        refuse({option: large}, option, large, "an integer of at most 2147483647")


# Choices and flags


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("window", ("position", "index")),
        ("full_logits", ("frozen", "dense")),
        ("selection", ("top_p", "top_k")),
        ("score_dtype", ("float32", "float64", "float8_e4m3")),
    ],
)
def test_choices(option: str, names: tuple[str, ...]) -> None:
    beside = {"keep_ratio": 0.5} if option == "selection" else {}
    for name in names:
        extra = beside if name == "top_k" else {}
        assert getattr(PrefillConfig.from_options({option: name, **extra}), option) == name
    allowed = ", ".join(map(repr, names))
    for bad in ("", "zzz", names[0].upper() + "!", None, True, 0, [names[0]], np.dtype("float32")):
        refuse({option: bad}, option, bad, allowed)


@pytest.mark.parametrize(
    ("option", "misspelt", "meant"),
    [
        ("window", "positon", "position"),
        ("full_logits", "frozn", "frozen"),
        ("selection", "topk", "top_k"),
        ("score_dtype", "torch.float64", "float64"),
    ],
)
def test_misspelt_choice(option: str, misspelt: str, meant: str) -> None:
    with pytest.raises(OptionError, match=f"Did you mean '{meant}'") as raised:
        PrefillConfig.from_options({option: misspelt})
    assert (raised.value.option, raised.value.value) == (option, misspelt)


def test_strict() -> None:
    assert PrefillConfig(strict=True).strict is True
    for bad in (1, 0, "True", None, np.True_):
        refuse({"strict": bad}, "strict", bad, "True or False", "Pass a bool")


# Drop layers


@pytest.mark.parametrize("value", ["auto", "all"])
def test_named_drop_layers(value: Any) -> None:
    assert PrefillConfig(drop_layers=value).drop_layers == value


@pytest.mark.parametrize("value", [[0], (5, 11), [5, 11], range(5, 12, 6), [np.int64(5), 11]])
def test_drop_layers_are_stored_as_tuple(value: Any) -> None:
    stored = PrefillConfig.from_options({"drop_layers": value}).drop_layers
    assert stored == tuple(value)
    assert isinstance(stored, tuple)
    assert all(type(layer) is int for layer in stored)


BAD_LAYERS = [
    [], (), 5, None, True, {5}, {}, 5.0, "5", "", [-1], [5, -1], [5.0], ["5"], [True], [None], [[5]], [5, 5],
    [5, np.int64(5)],
]  # fmt: skip


@pytest.mark.parametrize("value", BAD_LAYERS, ids=repr)
def test_bad_drop_layers(value: object) -> None:
    refuse({"drop_layers": value}, "drop_layers", value, LAYERS)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ([], "To drop nowhere, pass 'none', or use uniprefill_fx.disabled()."),
        (5, "Pass a list, even for one layer."),
        ([-1], "Each index is an integer of at least 0."),
        ([5, 5], "Name each layer once."),
        ("aut", "Did you mean 'auto'?"),
    ],
)
def test_bad_drop_layers_say_what_to_do(value: object, hint: str) -> None:
    refuse({"drop_layers": value}, "drop_layers", value, LAYERS, hint)


# Inner backend


def test_inner_backend_accepts_names_and_callables() -> None:
    for backend in ("inductor", "aot_eager", "someone's own", len, functools.partial(len)):
        config = PrefillConfig(inner_backend=backend)
        assert config.inner_backend is backend
        hash(config)
    bad: Any
    for bad in (None, "", 5, True, ["inductor"], {}):
        refuse({"inner_backend": bad}, "inner_backend", bad, BACKENDS, "torch.compiler.list_backends()")


def test_inner_backend_may_not_be_this_one() -> None:
    hint = "This backend cannot be its own inner backend."
    refuse({"inner_backend": "uniprefill"}, "inner_backend", "uniprefill", BACKENDS, hint)


def test_inner_options_are_a_read_only_copy() -> None:
    given = {"max_autotune": True, "nested": {"unhashable": [1, 2]}}
    config = PrefillConfig.from_options({"inner_options": given})
    assert config.inner_options is not None
    assert dict(config.inner_options) == given
    assert repr(config.inner_options) == repr(given)
    assert config != PrefillConfig.from_options({"inner_options": {**given, "max_autotune": False}})
    before = hash(config)
    given["more"] = 1
    assert "more" not in config.inner_options
    assert hash(config) == before
    with pytest.raises(TypeError):
        config.inner_options["more"] = 1  # type: ignore[index]


@pytest.mark.parametrize("value", [[], "max_autotune", 5, True, [("a", 1)], {1: 2}], ids=repr)
def test_bad_inner_options(value: object) -> None:
    refuse({"inner_options": value}, "inner_options", value, "None or a dict with string keys", "options=")
