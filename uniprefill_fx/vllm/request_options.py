"""The options that one request brings along in `SamplingParams.extra_args["uniprefill"]`.

Over HTTP these are vLLM's `vllm_xargs`, which hold strings, numbers and lists of them: false arrives as 0, true as 1,
and options come as a string of JSON.
"""

from __future__ import annotations

import json
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
        own: what the request brings: True, False, a mapping of options, or what HTTP makes of them.
        config: the engine's options. drops: how many drops the model has.

    Raises:
        OptionError: what is not understood; a list that does not have one value for each drop.
    """
    allowed = f"false, true, or options among {sorted(PER_REQUEST)}, over HTTP as a string of JSON"
    given = own
    if isinstance(own, str):
        try:
            given = json.loads(own)
        except (ValueError, RecursionError) as error:
            raise OptionError("uniprefill", own, allowed, f"This is no JSON: {error}.") from None
    if isinstance(given, int) and given in (0, 1):  # a bool is an int
        return config if given else None
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name in PER_REQUEST for name in given):
        raise OptionError("uniprefill", own, allowed, "Remove it.")
    config = replace(config, **{**given, **amount(given)})
    for drop in range(drops):
        config.kept_for(drop, drops, 1.0)  # raises for lists of another length
    return config
