"""The operators that the passes insert: importing this package registers them under `torch.ops.uniprefill`.

Each has a fake (shapes and strides only) and a plain torch implementation that is its reference.
"""

from __future__ import annotations

from uniprefill_fx.ops import attention, cache, mixer, rows, scoring

__all__ = ["attention", "cache", "mixer", "rows", "scoring"]
