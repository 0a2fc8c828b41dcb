"""What a library must teach Dynamo so that its decoders trace well. `install()` is idempotent and cheap."""

from __future__ import annotations

import sys


def install() -> bool:
    """Install what is new since the last call, for the libraries that the process has imported. True if there was."""
    from uniprefill_fx.frontends import backward_hooks, known_mixers, torch_attention  # noqa: F401  registers its readers

    new = backward_hooks.install()
    new |= known_mixers.install_known() > 0
    if "transformers" not in sys.modules:
        return new
    from uniprefill_fx.frontends import rope, transformers

    taught = (transformers.install(), rope.install())
    return any(taught) or new
