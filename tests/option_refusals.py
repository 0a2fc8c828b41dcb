"""One assertion that several tests of options share."""

from __future__ import annotations

from typing import Any

import pytest

from uniprefill_fx.config import OptionError, PrefillConfig

FRACTION = "a number in (0, 1], or a list with one for each drop layer"
"""What `p` and `keep_ratio` allow, as the messages put it."""


def refuse(options: Any, option: str, value: object, allowed: str, hint: str = "") -> None:
    """Asserts that `options` raise an `OptionError` whose message holds all four parts."""
    with pytest.raises(OptionError) as raised:
        PrefillConfig.from_options(options)
    message = str(raised.value)
    assert f"option {option!r}" in message
    assert f"got {value!r};" in message
    assert f"allowed: {allowed}" in message
    assert hint in message
