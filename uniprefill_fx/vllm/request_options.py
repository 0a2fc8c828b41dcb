"""The options that one request brings along in `SamplingParams.extra_args["uniprefill"]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from uniprefill_fx.config import OptionError, PrefillConfig
from uniprefill_fx.runtime.overrides import amount

PER_REQUEST = frozenset("preset p keep_ratio block_size last_n sink_tokens min_tokens".split())
"""Options that a request may bring."""


def config_of_request(own: object, config: PrefillConfig, drops: int) -> PrefillConfig | None:
    """The options of a request; None: it asks to stay dense. What it says of `preset`, `p` and `keep_ratio` stands in
    place of all that the engine has of them, as in `override()`.

    Args:
        own: what the request brings: True, False, or a mapping of options.
        config: the engine's options. drops: how many drops the model has.

    Raises:
        OptionError: what is not understood; a list that does not have one value for each drop.
    """
    if isinstance(own, bool):
        return config if own else None
    if not isinstance(own, Mapping) or not all(isinstance(name, str) and name in PER_REQUEST for name in own):
        raise OptionError("uniprefill", own, f"false, or options among {sorted(PER_REQUEST)}", "Remove it.")
    config = replace(config, **{**own, **amount(own)})
    for drop in range(drops):
        config.kept_for(drop, drops, 1.0)  # raises for lists of another length
    return config
