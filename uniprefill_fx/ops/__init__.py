"""The operators that the passes insert: importing this package registers them under `torch.ops.uniprefill`.

Each has a fake (shapes and strides only) and a plain torch implementation that is its reference.
"""

from __future__ import annotations

import uniprefill_fx.ops.attention
import uniprefill_fx.ops.block_sparse_attention
import uniprefill_fx.ops.cache
import uniprefill_fx.ops.gather
import uniprefill_fx.ops.known_mask
import uniprefill_fx.ops.mixer
import uniprefill_fx.ops.score
import uniprefill_fx.ops.select
import uniprefill_fx.ops.vocab_rows  # noqa: F401
