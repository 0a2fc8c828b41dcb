"""What a library must teach Dynamo so that its decoders trace well. `install()` is idempotent and cheap."""

from __future__ import annotations

import sys


def install() -> bool:
    """Install what is new since the last call, for the libraries that the process has imported. True if there was."""
    if "transformers" not in sys.modules:
        return False
    from uniprefill_fx.frontends import transformers

    return transformers.install()
