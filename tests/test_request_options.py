"""What a request of an engine may bring along, and what it then means. Needs no vllm."""

from __future__ import annotations

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
        ({1: 2, "a": 3}, "option 'uniprefill': got {1: 2, 'a': 3}; allowed: false, or options among"),
        ({1: 2}, "option 'uniprefill': got {1: 2}"),
        ({"drop_layers": [1]}, "option 'uniprefill': got {'drop_layers': [1]}"),
        ({"p": [0.9] * 3}, "option 'p': got (0.9, 0.9, 0.9); allowed: "),
        ([1, 2], "option 'uniprefill': got [1, 2]"),
        (None, "option 'uniprefill': got None"),
    ],
    ids=str,
)
def test_refused(own: Any, part: str) -> None:
    with pytest.raises(OptionError) as raised:
        config_of_request(own, ENGINE, 2)
    assert str(raised.value).startswith(part)
