"""The options of block-sparse attention as the tensor that the rewritten graph takes: each call may have its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from uniprefill_fx.passes.analyze.sparse_attention import alpha_by_layer
from uniprefill_fx.passes.attention_node import AttentionNode
from uniprefill_fx.specs import SparseSpec

PREFIX = "sparse_"
NAMES = tuple(PREFIX + field.name for field in fields(SparseSpec) if field.name != "fp8")


def sparse_options(sparse: Sequence[tuple[AttentionNode, SparseSpec]], changed: Mapping[str, Any]) -> Tensor:
    """(attentions, fields) float64 on the CPU: what each was compiled with, but for what `override()` changed.

    Raises:
        OptionError: a list of alphas that does not have one for each block-sparse layer.
    """
    values = {name.removeprefix(PREFIX): value for name, value in changed.items() if name in NAMES}
    alphas = values.pop("alpha", None)
    own = {} if alphas is None else alpha_by_layer(alphas, sorted({a.layer for a, _ in sparse}))
    rows = [replace(spec, **values, alpha=own.get(a.layer, spec.alpha)).numbers() for a, spec in sparse]
    return torch.tensor(rows, dtype=torch.float64)
