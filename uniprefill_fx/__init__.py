"""UniPrefill as a `torch.compile` backend: long prompts prefill on the tokens that attention looks at.

`torch.compile(model, backend="uniprefill")` needs no import of this package; what is here is for convenience and
for looking inside. Importing it loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uniprefill_fx.api import compile
    from uniprefill_fx.bound import error_bound
    from uniprefill_fx.calibration import Calibration, calibrate
    from uniprefill_fx.config import OptionError, PrefillConfig
    from uniprefill_fx.errors import CompactCacheError, StrictError
    from uniprefill_fx.frontends.mixers import register_mixer
    from uniprefill_fx.record import LastCall, last_call
    from uniprefill_fx.report import explain
    from uniprefill_fx.runtime import disabled
    from uniprefill_fx.selection import override

_HOME = {
    "calibrate": "calibration",
    "Calibration": "calibration",
    "compile": "api",
    "explain": "report",
    "error_bound": "bound",
    "disabled": "runtime",
    "last_call": "record",
    "override": "selection",
    "LastCall": "record",
    "register_mixer": "frontends.mixers",
    "PrefillConfig": "config",
    "OptionError": "config",
    "CompactCacheError": "errors",
    "StrictError": "errors",
}
__all__ = [
    "Calibration",
    "CompactCacheError",
    "LastCall",
    "OptionError",
    "PrefillConfig",
    "StrictError",
    "calibrate",
    "compile",
    "disabled",
    "error_bound",
    "explain",
    "last_call",
    "override",
    "register_mixer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
