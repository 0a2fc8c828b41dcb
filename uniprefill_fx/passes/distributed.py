"""What a graph says of other processes, node by node: collectives, and DTensors.

Dynamo traces `torch.distributed` calls as operators that return their result, and methods of DTensors as calls; torch
2.11 makes functions of its own of the latter (`prim_to_local`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from uniprefill_fx.passes.node_utils import meta, name_of
from uniprefill_fx.passes.operator_internals import collective_of

CONVERSIONS = {
    "to_local": "to_local",
    "prim_to_local": "to_local",
    "from_local": "from_local",
    "prim from_local": "from_local",
    "redistribute": "redistribute",
    "prim_redistribute": "redistribute",
}


def collective_name(node: fx.Node) -> str:
    """The name of the collective that a node calls; "" for anything else."""
    return collective_of(node.target) if node.op == "call_function" else ""


def is_dtensor(value: Any) -> bool:
    """Whether a value is a tensor that says how it is split over ranks."""
    module = sys.modules.get("torch.distributed.tensor")  # without it there is no DTensor
    return module is not None and isinstance(value, module.DTensor)


def conversion(node: fx.Node) -> str:
    """ "to_local", "from_local" or "redistribute", where a node calls that of a DTensor; "" for anything else."""
    name = CONVERSIONS.get(name_of(node), "")
    source = node.args[0] if node.args else None
    given = isinstance(source, fx.Node) and is_dtensor(meta(source))
    made = is_dtensor(meta(node))
    wanted = {"to_local": (True, False), "from_local": (False, True), "redistribute": (True, True)}
    plain = isinstance(meta(node), torch.Tensor)
    return name if name and plain and wanted[name] == (given, made) else ""


def group_of_mesh(dtensor: Any) -> str | None:
    """The name of the process group that a DTensor is split over; None for a mesh of several dimensions."""
    mesh = dtensor.device_mesh
    return str(mesh.get_group().group_name) if mesh.ndim == 1 else None


def split_dim(dtensor: Any) -> int | None:
    """The dimension along which a DTensor of a mesh of one dimension is split evenly, counted from 0.

    None where it is not split so: whole on every rank, parts of a sum, or parts of unequal size.
    """
    (placement,) = dtensor.placements
    dim = getattr(placement, "dim", None)
    if not isinstance(dim, int):
        return None
    dim %= dtensor.ndim
    return dim if dtensor.shape[dim] % dtensor.device_mesh.size() == 0 else None


def is_whole(dtensor: Any) -> bool:
    """Whether every rank holds all of a DTensor."""
    return all(placement.is_replicate() for placement in dtensor.placements)


def placement_of(dtensor: Any) -> tuple[Any, ...]:
    """Over which devices a DTensor is split, and how; equal only for those that are split alike."""
    return dtensor.device_mesh, tuple(dtensor.placements)


def in_order(dtensor: Any) -> bool:
    """Whether the parts of a DTensor that is split along one dimension are one behind the other, by rank."""
    (placement,) = dtensor.placements
    return type(placement) is sys.modules["torch.distributed.tensor"].Shard


def with_local(dtensor: Any, make: Callable[..., torch.Tensor]) -> Any:
    """A DTensor as another one says, whose own part `make(size, stride, dtype=, device=)` makes."""
    own = dtensor.to_local()
    part = make(tuple(own.shape), own.stride(), dtype=own.dtype, device=own.device)
    return type(dtensor).from_local(
        part,
        dtensor.device_mesh,
        dtensor.placements,
        run_check=False,
        shape=dtensor.shape,
        stride=dtensor.stride(),
    )
