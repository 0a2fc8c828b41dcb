"""The options of block-sparse attention as the tensor that the rewritten graph takes: each call may have its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from uniprefill_fx.config import OptionError
from uniprefill_fx.specs import SparseSpec

PREFIX = "sparse_"
NAMES = tuple(PREFIX + field.name for field in fields(SparseSpec) if field.name != "fp8")


def sparse_options(specs: Sequence[SparseSpec], changed: Mapping[str, Any]) -> Tensor:
    """(layers, fields) float64 on the CPU: what each layer was compiled with, but for what `override()` changed.

    Raises:
        OptionError: a list of alphas that does not have one for each block-sparse layer.
    """
    values = {name.removeprefix(PREFIX): value for name, value in changed.items() if name in NAMES}
    alphas = values.pop("alpha", None)
    if isinstance(alphas, tuple) and len(alphas) != len(specs):
        allowed = f"a number, or a list of {len(specs)}, one for each block-sparse layer"
        raise OptionError("sparse_alpha", alphas, allowed, f"The list has {len(alphas)} values.")
    rows = []
    for i, spec in enumerate(specs):
        own = {} if alphas is None else {"alpha": alphas[i] if isinstance(alphas, tuple) else alphas}
        rows.append(replace(spec, **values, **own).numbers())
    return torch.tensor(rows, dtype=torch.float64)
