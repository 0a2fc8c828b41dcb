"""UniPrefill as a `torch.compile` backend: long prompts prefill on the tokens that attention looks at.

`torch.compile(model, backend="uniprefill")` needs no import of this package where it is installed; what is here is for
convenience and for looking inside. Importing it loads neither torch nor transformers, and makes the backend known where
the package is only on the path.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from uniprefill_fx.runtime.registration import register

if TYPE_CHECKING:
    from uniprefill_fx.api import compile
    from uniprefill_fx.config import OptionError, PrefillConfig
    from uniprefill_fx.errors import CompactCacheError, StrictError
    from uniprefill_fx.frontends.mixers import register_mixer
    from uniprefill_fx.runtime.last_call import LastCall, last_call, watched
    from uniprefill_fx.runtime.overrides import override
    from uniprefill_fx.runtime.prefill import disabled
    from uniprefill_fx.tools.calibrate import Calibration, calibrate
    from uniprefill_fx.tools.error_bound import error_bound
    from uniprefill_fx.tools.explain import explain

__version__ = "0.1.0"

_HOME = {
    "calibrate": "tools.calibrate",
    "Calibration": "tools.calibrate",
    "compile": "api",
    "explain": "tools.explain",
    "error_bound": "tools.error_bound",
    "disabled": "runtime.prefill",
    "last_call": "runtime.last_call",
    "override": "runtime.overrides",
    "LastCall": "runtime.last_call",
    "register_mixer": "frontends.mixers",
    "PrefillConfig": "config",
    "watched": "runtime.last_call",
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
    "watched",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """What is public; not the submodules that happen to be loaded."""
    return [*__all__, "__version__"]


register(__version__)
