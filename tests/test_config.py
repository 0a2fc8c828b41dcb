"""`PrefillConfig` as a whole, the automatic drop layers, and the published options."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from option_refusals import FRACTION, refuse

import uniprefill_fx.config as config_module
from uniprefill_fx.config import (
    DEFAULT_MIN_TOKENS,
    DEFAULT_SPARSE_MIN_TOKENS,
    PUBLISHED,
    OptionError,
    PrefillConfig,
    published_for,
)
from uniprefill_fx.passes.analyze.drop_layers import auto_drop_layers

# A value unlike the default for each option, with whatever it needs beside it.
OTHER_VALUES: dict[str, dict[str, Any]] = {
    "preset": {"preset": "fast"},
    "p": {"p": 0.9},
    "block_size": {"block_size": 32},
    "last_n": {"last_n": 64},
    "sink_tokens": {"sink_tokens": 0},
    "drop_layers": {"drop_layers": "all"},
    "window": {"window": "index"},
    "full_logits": {"full_logits": "dense"},
    "selection": {"selection": "top_k", "keep_ratio": 0.5},
    "keep_ratio": {"selection": "top_k", "keep_ratio": 0.25},
    "min_tokens": {"min_tokens": 0},
    "inner_backend": {"inner_backend": "eager"},
    "inner_options": {"inner_options": {"max_autotune": True}},
    "score_dtype": {"score_dtype": "float64"},
    "attention": {"attention": "block_sparse"},
    "sparse_alpha": {"sparse_alpha": 0.2},
    "sparse_block_size": {"sparse_block_size": 64},
    "sparse_sink_blocks": {"sparse_sink_blocks": 1},
    "sparse_window_blocks": {"sparse_window_blocks": 2},
    "sparse_last_tokens": {"sparse_last_tokens": 0},
    "sparse_correction": {"sparse_correction": False},
    "sparse_layers": {"sparse_layers": "all"},
    "sparse_min_tokens": {"sparse_min_tokens": 0},
    "attention_dtype": {"attention": "block_sparse", "attention_dtype": "float8_e4m3"},
    "strict": {"strict": True},
}

TOP_K = {"selection": "top_k"}


def test_defaults() -> None:
    assert dataclasses.asdict(PrefillConfig()) == {
        "preset": "quality",
        "p": "auto",
        "block_size": 64,
        "last_n": 128,
        "sink_tokens": 128,
        "drop_layers": "auto",
        "window": "position",
        "full_logits": "frozen",
        "selection": "top_p",
        "keep_ratio": None,
        "min_tokens": DEFAULT_MIN_TOKENS,
        "inner_backend": "inductor",
        "inner_options": None,
        "score_dtype": "float32",
        "attention": "dense",
        "sparse_alpha": 0.1,
        "sparse_block_size": 128,
        "sparse_sink_blocks": 2,
        "sparse_window_blocks": 4,
        "sparse_last_tokens": 256,
        "sparse_correction": True,
        "sparse_layers": "auto",
        "sparse_min_tokens": DEFAULT_SPARSE_MIN_TOKENS,
        "attention_dtype": "model",
        "strict": False,
    }


def test_defaults_pass_their_own_checks() -> None:
    assert PrefillConfig.from_options(dataclasses.asdict(PrefillConfig())) == PrefillConfig()


@pytest.mark.parametrize("options", [None, {}])
def test_no_options(options: dict[str, Any] | None) -> None:
    assert PrefillConfig.from_options(options) == PrefillConfig()


def test_direct_construction_is_checked_too() -> None:
    with pytest.raises(OptionError, match=r"option 'p': got 2; allowed: "):
        PrefillConfig(p=2)


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PrefillConfig().p = 0.5  # type: ignore[misc]


def test_every_option_tells_configs_apart() -> None:
    """A new option must appear above, and must count in `==`, which decides whether a compilation is reused."""
    assert list(OTHER_VALUES) == [option.name for option in dataclasses.fields(PrefillConfig)]
    configs = [PrefillConfig(), *(PrefillConfig.from_options(options) for options in OTHER_VALUES.values())]
    assert len(set(configs)) == len(configs)


@pytest.mark.parametrize("options", OTHER_VALUES.values(), ids=OTHER_VALUES)
def test_equal_options_make_equal_hashes(options: dict[str, Any]) -> None:
    first, second = PrefillConfig.from_options(options), PrefillConfig.from_options(options)
    assert first == second
    assert hash(first) == hash(second)
    assert pickle.loads(pickle.dumps(first)) == first
    assert dataclasses.replace(first) == first


# Names of options


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("blocksize", "There is no such option. Did you mean 'block_size'?"),
        ("drop_layer", "There is no such option. Did you mean 'drop_layers'?"),
        ("P_", "There is no such option. Remove it."),
        ("mode", "There is no such option."),
        ("", "There is no such option. Remove it."),
    ],
)
def test_unknown_option(name: str, hint: str) -> None:
    refuse({"p": 0.9, name: 64}, name, 64, "the names " + ", ".join(OTHER_VALUES), hint)


def test_option_name_that_is_no_string() -> None:
    refuse({7: 64}, "7", 64, "the names preset, p, block_size, ", "There is no such option. Remove it.")


@pytest.mark.parametrize("options", [[("p", 0.9)], "p=0.9", 0.9, True, PrefillConfig()], ids=repr)
def test_options_that_are_no_mapping(options: object) -> None:
    with pytest.raises(OptionError) as raised:
        PrefillConfig.from_options(options)  # type: ignore[arg-type]
    assert str(raised.value).startswith("option 'options': got ")
    assert "; allowed: a dict of option names and values. " in str(raised.value)


# Options that depend on each other


def test_keep_ratio_is_required_by_top_k() -> None:
    allowed = "with selection='top_k', " + FRACTION
    hint = "Set keep_ratio, or use selection='top_p'."
    refuse(TOP_K, "keep_ratio", None, allowed, hint)
    refuse({**TOP_K, "keep_ratio": None}, "keep_ratio", None, allowed, hint)


def test_keep_ratio_is_refused_by_top_p() -> None:
    refuse({"keep_ratio": 0.5}, "keep_ratio", 0.5, "None with selection='top_p'", "Set selection='top_k' as well")


def test_sparse_layers_are_sorted_with_their_alphas() -> None:
    sparse = {"attention": "block_sparse", "sparse_layers": [17, 5, 11]}
    config = PrefillConfig.from_options(sparse | {"sparse_alpha": [0.3, 0.1, 0.2]})
    assert config.sparse_layers == (5, 11, 17) and config.sparse_alpha == (0.1, 0.2, 0.3)
    assert PrefillConfig.from_options(sparse | {"sparse_alpha": [0.3, 0.1]}).sparse_alpha == (0.3, 0.1)


def test_drop_layers_are_sorted_with_their_values() -> None:
    config = PrefillConfig.from_options({"drop_layers": [11, 5], "p": [0.9, 0.99]})
    assert (config.drop_layers, config.p) == ((5, 11), (0.99, 0.9))
    assert dataclasses.replace(config) == config
    config = PrefillConfig.from_options({**TOP_K, "drop_layers": [17, 5, 11], "keep_ratio": [0.3, 0.1, 0.2]})
    assert (config.drop_layers, config.keep_ratio, config.p) == ((5, 11, 17), (0.1, 0.2, 0.3), "auto")


def test_list_must_match_given_drop_layers() -> None:
    allowed = "a number, or a list of 2, one for each drop layer"
    hint = "The list has 3 values, and there are 2 drop layers."
    values = [0.9, 0.8, 0.7]
    refuse({"drop_layers": [5, 11], "p": values}, "p", tuple(values), allowed, hint)
    refuse({**TOP_K, "drop_layers": [5, 11], "keep_ratio": values}, "keep_ratio", tuple(values), allowed, hint)


# Values by drop layer


def test_value_for_each_drop_layer() -> None:
    assert [PrefillConfig(p=0.9).kept_for(i, 3, 0.5) for i in range(3)] == [(0.9, None)] * 3
    assert [PrefillConfig(p=(0.99, 0.9)).kept_for(i, 2, 0.5) for i in range(2)] == [(0.99, None), (0.9, None)]
    top_k = PrefillConfig(selection="top_k", keep_ratio=0.5)
    assert [top_k.kept_for(i, 2, 0.5) for i in range(2)] == [(None, 0.5)] * 2
    top_k = PrefillConfig(selection="top_k", keep_ratio=(0.5, 0.25))
    assert [top_k.kept_for(i, 2, 0.5) for i in range(2)] == [(None, 0.5), (None, 0.25)]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["p", "keep_ratio"])
def test_list_of_wrong_length_for_the_drop_layers(name: str, count: int) -> None:
    config = PrefillConfig.from_options({name: (0.99, 0.9), **(TOP_K if name == "keep_ratio" else {})})
    with pytest.raises(OptionError) as raised:
        config.kept_for(0, count, 0.5)
    assert str(raised.value) == (
        f"option '{name}': got (0.99, 0.9); allowed: a number, or a list of {count}, one for each drop layer. "
        f"The list has 2 values, and there are {count} drop layers."
    )


@pytest.mark.parametrize("index", [-1, 2])
def test_index_outside_the_drop_layers(index: int) -> None:
    with pytest.raises(IndexError, match=rf"drop layer {index} of 2: wanted an index in \[0, 2\)"):
        PrefillConfig().kept_for(index, 2, 0.5)


# Automatic drop layers, and published options


@pytest.mark.parametrize(
    ("full", "depth", "expected"),
    [
        pytest.param(range(32), 32, (7, 11, 15, 19, 23, 27), id="llama-3.1-8b, published"),
        pytest.param(range(3, 48, 4), 48, tuple(range(7, 44, 4)), id="qwen3-next, published"),
        pytest.param(range(28), 28, (7, 11, 15, 19, 23), id="28 layers"),
        pytest.param(range(16), 16, (3, 7, 11), id="16 layers"),
        pytest.param(range(80), 80, tuple(range(15, 72, 4)), id="80 layers"),
        pytest.param(range(1, 24, 2), 24, (3, 7, 11, 15, 19), id="every second of 24"),
        pytest.param(range(5, 48, 6), 48, (11, 17, 23, 29, 35, 41), id="every sixth of 48"),
        pytest.param((5, 11, 17), 18, (5, 11), id="every sixth of 18"),
        pytest.param((2, 5, 8), 9, (2, 5), id="every third of 9"),
        pytest.param((4, 12, 20, 28), 32, (12, 20, 28), id="every eighth of 32"),
        pytest.param((9, 18, 27), 32, (9, 18, 27), id="three of 32"),
        pytest.param(range(8), 8, (3,), id="8 layers"),
        pytest.param((3, 7), 8, (3,), id="every fourth of 8"),
        pytest.param(range(5), 5, (3,), id="5 layers"),
        pytest.param(range(4), 4, (1,), id="4 layers"),
        pytest.param(range(3), 3, (0,), id="3 layers, tie"),
        pytest.param(range(2), 2, (0,), id="2 layers"),
        pytest.param((0,), 32, (0,), id="only the first"),
        pytest.param((30,), 32, (30,), id="only the last but one"),
        pytest.param((31,), 32, (), id="only the last"),
        pytest.param((0,), 1, (), id="1 layer"),
        pytest.param((), 12, (), id="no full attention"),
        pytest.param((17, 5, 11, 5), 18, (5, 11), id="any order, repeated"),
    ],
)
def test_auto_drop_layers(full: Any, depth: int, expected: tuple[int, ...]) -> None:
    assert auto_drop_layers(full, depth) == expected


def test_auto_drop_layers_of_every_small_model() -> None:
    """All sets of full-attention layers up to 10 layers: a non-empty, increasing choice of attention_nodes, never the
    last."""
    for depth in range(1, 11):
        for bits in range(2**depth):
            attention_nodes = [layer for layer in range(depth) if bits >> layer & 1]
            chosen = auto_drop_layers(attention_nodes, depth)
            assert set(chosen) <= set(attention_nodes)
            assert list(chosen) == sorted(set(chosen))
            assert depth - 1 not in chosen
            assert bool(chosen) == any(layer < depth - 1 for layer in attention_nodes)


@pytest.mark.parametrize("full", [(-1, 3), (3, 8)])
def test_auto_drop_layers_outside_the_model(full: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"wanted indices in \[0, 8\)"):
        auto_drop_layers(full, 8)


@pytest.mark.parametrize("key", PUBLISHED, ids=str)
def test_published_options_are_valid(key: tuple[str, int]) -> None:
    config = PrefillConfig.from_options(published_for(*key))
    assert not isinstance(config.drop_layers, str)
    assert max(config.drop_layers) < key[1] - 1


def test_published() -> None:
    assert published_for("llama", 32) == {"drop_layers": auto_drop_layers(range(32), 32)}
    assert published_for("qwen3_next", 48) == {"drop_layers": auto_drop_layers(range(3, 48, 4), 48)}
    for model_type in ("gemma3", "gemma3_text"):
        assert published_for(model_type, 48) == {"drop_layers": (29, 35, 41), "p": 0.975}
    published_for("gemma3", 48)["p"] = 0.5  # a copy
    assert published_for("gemma3", 48)["p"] == 0.975


@pytest.mark.parametrize("key", [("llama", 16), ("gemma3_text", 18), ("gpt_neox", 32)])
def test_nothing_published(key: tuple[str, int]) -> None:
    assert published_for(*key) == {}


def test_config_needs_only_the_standard_library() -> None:
    """It is loaded with torch's backend registry, so it must be light. -S hides all installed packages."""
    package = Path(config_module.__file__).parent
    code = """if True:
        import sys, types
        package = types.ModuleType("uniprefill_fx")  # stands for the package, whose own __init__ may import more
        package.__path__ = [sys.argv[1]]
        sys.modules["uniprefill_fx"] = package
        import uniprefill_fx.config
        uniprefill_fx.config.PrefillConfig()
    """
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(package)], check=True)
