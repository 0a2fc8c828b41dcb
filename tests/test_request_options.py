"""What a request of an engine may bring along, and what it then means. Needs no vllm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from uniprefill_fx.config import OptionError, PrefillConfig
from uniprefill_fx.vllm.request_options import config_of_request

ENGINE = PrefillConfig(p=0.8, drop_layers=(1, 2), block_size=16)


@pytest.mark.parametrize(
    ("own", "part"),
    [
        (
            {"block_size": 2**63},
            "option 'block_size': got 9223372036854775808; allowed: an integer of at most 2147483647",
        ),
        ({"sink_tokens": 2**31}, "option 'sink_tokens': got 2147483648; allowed: an integer of at most 2147483647"),
        ({1: 2, "a": 3}, "option 'uniprefill': got {1: 2, 'a': 3}; allowed: false, true, or options among"),
        ("{'p': 0.5}", "option 'uniprefill': got \"{'p': 0.5}\"; allowed: false, true, or options among"),
        ("[" * 10**5, "option 'uniprefill': got '[[["),
        ('{"block_size": 1e3}', "option 'block_size': got 1000.0"),
        ('{"p": NaN}', "option 'p': got nan"),
        ('"{}"', "option 'uniprefill': got '\"{}\"'"),
        ("null", "option 'uniprefill': got 'null'"),
        (2, "option 'uniprefill': got 2"),
        ({"p": 0.5, "keep_ratio": 0.5}, "option 'keep_ratio': got 0.5; allowed: p or keep_ratio"),
        ({"preset": "fast", "keep_ratio": 0.5}, "option 'keep_ratio': got 0.5; allowed: preset or keep_ratio"),
        (1.0, "option 'uniprefill': got 1.0"),
        ({1: 2}, "option 'uniprefill': got {1: 2}"),
        ({"drop_layers": [1]}, "option 'uniprefill': got {'drop_layers': [1]}"),
        ({"p": [0.9] * 3}, "option 'p': got (0.9, 0.9, 0.9); allowed: "),
        ([1, 2], "option 'uniprefill': got [1, 2]"),
        (None, "option 'uniprefill': got None"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused(own: Any, part: str) -> None:
    with pytest.raises(OptionError) as raised:
        config_of_request(own, ENGINE, 2)
    assert str(raised.value).startswith(part)


ENGINES = {"p": ENGINE, "top_k": replace(ENGINE, selection="top_k", keep_ratio=(0.9, 0.8)), "preset": PrefillConfig()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("own", "kept"),
    [
        ({"p": 0.5}, [(0.5, None)] * 2),
        ({"p": [0.9, 0.5]}, [(0.9, None), (0.5, None)]),
        ({"preset": "fast"}, [(0.9, None), (0.7, None)]),  # as docs/choosing-p.md has it, at depths 1/3 and 1
        ({"preset": "fast", "p": 0.6}, [(0.6, None)] * 2),
        ({"p": "auto"}, [(0.999, None), (0.95, None)]),
        ({"keep_ratio": 0.3}, [(None, 0.3)] * 2),
    ],
    ids=str,
)
def test_how_much_is_kept_is_what_the_request_says(engine: str, own: dict[str, Any], kept: list[Any]) -> None:
    """Whatever the engine has; its other options stay."""
    config = config_of_request(own, ENGINES[engine], 2)
    assert config is not None
    assert [config.kept_for(0, 2, 1 / 3), config.kept_for(1, 2, 1.0)] == kept
    assert config.block_size == ENGINES[engine].block_size and config.drop_layers == ENGINES[engine].drop_layers


def test_what_says_nothing_of_it_keeps_what_the_engine_has() -> None:
    for engine in ENGINES.values():
        config = config_of_request({"block_size": 32}, engine, 2)
        assert config == replace(engine, block_size=32)
        assert config_of_request(True, engine, 2) == engine and config_of_request(False, engine, 2) is None


@pytest.mark.parametrize(
    ("meant", "sent"),
    [
        ({"p": 0.5}, '{"p": 0.5}'),
        ({"preset": "fast", "block_size": 32}, ' {"block_size": 32, "preset": "fast"} '),
        (True, 1),
        (True, "true"),
        (False, 0),
        (False, "0"),
        (False, "false"),
    ],
    ids=str,
)
def test_as_http_sends_it(meant: Any, sent: Any) -> None:
    assert config_of_request(sent, ENGINE, 2) == config_of_request(meant, ENGINE, 2)
