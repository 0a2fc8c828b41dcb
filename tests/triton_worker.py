"""Runs kernels on CPU tensors: in Triton's interpreter, in a process of its own, or on a card and back.

Triton reads TRITON_INTERPRET when it decorates a function, its own library functions included, so the variable must be
set before triton is first imported. In the pytest process another test may have imported it by then (torch.compile
does), or may need it compiled. A spawned process has neither trouble, whatever the order of the tests.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from uniprefill_fx.specs import AttentionSpec


@dataclass(frozen=True)
class Run:
    """`run(function, *args, **options)` calls a module's function where kernels run; what it raises is raised here.

    `slack`: how many times the interpreter's rounding is allowed. A card multiplies float32 as three products of TF32,
    and adds products of eight bits in fewer bits than float32 has.
    """

    call: Callable[..., Any]
    slack: float = 1.0

    def __call__(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self.call(function, *args, **options)


def _call(payload: bytes) -> bytes:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # torch.empty then gives NaN, which shows where a kernel did not write
    function, args, options = pickle.loads(payload)
    return pickle.dumps(function(*args, **options))


@contextmanager
def interpreter() -> Iterator[Run]:
    """Calls in the worker."""
    versions = [tuple(int(n) for n in version(name).split(".")[:2]) for name in ("triton", "numpy")]
    if versions[0] < (3, 7) and versions[1] >= (2, 5):
        pytest.skip("the interpreter of Triton before 3.7 takes arrays for numbers, as numpy before 2.5 did")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:

        def run(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            # plain bytes: multiprocessing would share the tensors' memory instead, through files of /dev/shm
            return pickle.loads(pool.submit(_call, pickle.dumps((function, args, options))).result())

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setenv(
                "PYTHONWARNINGS", "ignore::RuntimeWarning"
            )  # numpy's, where a kernel means exp2(-inf) and the like
            pool.submit(int).result()  # starts the process
        yield Run(run)


def on_cuda(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls with all tensors on the card, but int64 bounds of requests, which the host holds; results come back."""
    held = [x for name, x in options.items() if name.endswith("bounds") and x is not None and x.dtype == torch.int64]
    there = {id(x): x for x in held}

    def move(x: torch.Tensor) -> Any:
        if id(x) not in there:  # one tensor for two arguments stays one
            there[id(x)] = x.cuda()
        return there[id(x)]

    def sent(x: Any) -> Any:
        if isinstance(x, AttentionSpec):
            return x.map(sent)
        return move(x) if isinstance(x, torch.Tensor) else x

    args, options = pytree.tree_map(sent, (args, options))
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, function(*args, **options))
