"""What a worker of vLLM imports (`worker_extension_cls`) so that each rank says that it runs a program of its own."""

from __future__ import annotations

import os
from typing import Any

from uniprefill_fx.vllm import compilation

_own = compilation._program


def _differs(*told: Any) -> str:
    return f"{os.getpid()} {_own(*told)}"


vars(compilation)["_program"] = _differs


class Extension:
    """Nothing: importing it is enough."""
