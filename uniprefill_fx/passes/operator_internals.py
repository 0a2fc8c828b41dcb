"""Private APIs of PyTorch's dispatcher that reading and watching operators relies on, like `torch_internals`.

`tests/test_writes.py` and `tests/test_torch_internals.py` call each on the torch at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import fx, nn
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "OpOverload",
    "OpOverloadPacket",
    "as_plain_tensors",
    "backward_hook_methods",
    "collective",
    "collective_of",
    "fused_attention",
    "fused_layer",
    "has_kernel",
    "has_registered_effect",
    "is_composite",
    "moves_between_vmap_levels",
    "schema_of",
    "storage_of",
    "triton_launch",
    "version_of",
    "watching",
    "without_modes",
]


def has_kernel(overload: OpOverload) -> bool:
    """Whether an overload is an operator of the dispatcher; TorchScript has more, for its own lists and strings.

    Relies on `torch._C._dispatch_has_kernel`.
    """
    return bool(torch._C._dispatch_has_kernel(overload.name()))


def has_registered_effect(overload: OpOverload) -> bool:
    """Whether `torch.fx.node.has_side_effect` was called on an overload.

    Relies on `torch.fx.node._side_effectful_functions`. `Node.is_impure` of torch 2.11 does not look from a packet to
    its overloads.
    """
    return overload in fx.node._side_effectful_functions


def is_composite(overload: OpOverload) -> bool:
    """Whether an operator is made of others: then its schema need not tell whose storage it returns.

    Relies on `torch._C._dispatch_has_kernel_for_dispatch_key`.
    """
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd"))


def storage_of(tensor: torch.Tensor) -> int:
    """A number that tensors which share their memory have in common, on the meta device too, where none has an address.

    Relies on `UntypedStorage._cdata`.
    """
    return int(tensor.untyped_storage()._cdata)


def watching(see: Callable[[Any, Any, dict[str, Any]], None]) -> AbstractContextManager[Any]:
    """Inside, `see(overload, args, kwargs)` is called before each operator that is dispatched.

    Relies on `torch.utils._python_dispatch.TorchDispatchMode`.
    """
    return _Watching(see)


class _Watching(TorchDispatchMode):
    def __init__(self, see: Callable[[Any, Any, dict[str, Any]], None]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.see(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def without_modes() -> AbstractContextManager[Any]:
    """Inside, no dispatch mode is on: operations run on real tensors. Relies on `_disable_current_modes`."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def fused_layer() -> Any:
    """The op that an eager `nn.TransformerEncoderLayer` becomes in inference: `torch._transformer_encoder_layer_fwd`.

    Relies on its 20 arguments, the last the kind of its mask.
    """
    return torch._transformer_encoder_layer_fwd


def fused_attention() -> Any:
    """The op that an eager `nn.MultiheadAttention` becomes in inference: `torch._native_multi_head_attention`.

    Relies on its 13 arguments, the last the kind of its mask.
    """
    return torch._native_multi_head_attention


def as_plain_tensors() -> AbstractContextManager[Any]:
    """Inside, tensors of a subclass are ordinary ones to every operator: what `__torch_function__` does its work in.

    Relies on `torch._C.DisableTorchFunctionSubclass`.
    """
    return torch._C.DisableTorchFunctionSubclass()


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor, or what shares its memory, was written to. Not for tensors made in inference mode.

    Relies on `Tensor._version`.
    """
    return tensor._version


def schema_of(op: Any) -> Any:
    """The `torch.FunctionSchema` of an `OpOverload`: `name` ("aten::add"), `arguments`, `returns`; None for others.

    Relies on `OpOverload._schema`.
    """
    return getattr(op, "_schema", None)


def moves_between_vmap_levels(node: fx.Node) -> bool:
    """Whether a node enters or leaves a level of `torch.vmap`: nobody reads it, and it must stay.

    Relies on Dynamo tracing these as calls of functions of `torch._functorch`.
    """
    return (getattr(node.target, "__module__", None) or "").startswith("torch._functorch")


# Several processes


def collective(name: str) -> OpOverload:
    """A collective that returns its result: "all_reduce", "all_gather_into_tensor", "wait_tensor".

    Relies on `torch.ops._c10d_functional`, whose operators Dynamo makes of `torch.distributed` calls.
    """
    found: OpOverload = getattr(torch.ops._c10d_functional, name).default
    return found


def collective_of(target: Any) -> str:
    """The name of the collective that a node calls, in place or not; "" for anything else.

    Relies on the namespaces `_c10d_functional`, `_c10d_functional_autograd`, `c10d` and `symm_mem` of operators.
    """
    if not isinstance(target, OpOverload | OpOverloadPacket):
        return ""
    library, _, name = str(target).partition(".")
    known = library.startswith(("_c10d_functional", "c10d", "symm_mem", "_dtensor"))
    return name.split(".")[0] if known else ""


def backward_hook_methods() -> tuple[str, ...]:
    """The methods by which a call of a module asks for its backward hooks; each returns one or two lists.

    Relies on `Module._get_backward_hooks` and `_get_backward_pre_hooks`, and on `_call_impl` asking them only where
    there are such hooks.
    """
    return nn.Module._get_backward_hooks.__name__, nn.Module._get_backward_pre_hooks.__name__


def triton_launch(node: fx.Node) -> tuple[str, dict[str, Any]] | None:
    """The name of the Triton kernel that a node launches, and its arguments by name; None for any other node.

    Relies on `triton_kernel_wrapper_mutation` and the table in which Dynamo keeps kernels and constants.
    """
    if node.target is not triton_kernel_wrapper_mutation:
        return None
    kernel: Any = kernel_side_table.get_kernel(cast(int, node.kwargs["kernel_idx"]))
    while not isinstance(getattr(kernel, "__name__", None), str):
        kernel = kernel.fn  # what an autotuner chooses settings for
    constants = kernel_side_table.get_constant_args(cast(int, node.kwargs["constant_args_idx"]))
    return kernel.__name__, {**constants, **cast(dict[str, Any], node.kwargs["kwargs"])}
