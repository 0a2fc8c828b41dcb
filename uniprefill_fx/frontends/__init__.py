"""What a library must teach Dynamo so that its decoders trace well. `install()` is idempotent and cheap."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger(__name__)
_installed: set[str] = set()


def install() -> bool:
    """Install the frontend of each supported library that the process has imported. True if one was new."""
    if "transformers" not in sys.modules or "transformers" in _installed:
        return False
    from uniprefill_fx.frontends import transformers

    transformers.install()
    _installed.add("transformers")
    log.debug("frontend of transformers installed")
    return True
