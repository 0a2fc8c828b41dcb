"""Runs kernels in Triton's interpreter, on CPU tensors, in a process of their own.

Triton reads TRITON_INTERPRET when it decorates a function, its own library functions included, so the variable must be
set before triton is first imported. In the pytest process another test may have imported it by then (torch.compile
does), or may need it compiled. A spawned process has neither trouble, whatever the order of the tests.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import pytest
import torch

Run = Callable[..., Any]


def _call(payload: bytes) -> bytes:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # torch.empty then gives NaN, which shows where a kernel did not write
    function, args, options = pickle.loads(payload)
    return pickle.dumps(function(*args, **options))


@contextmanager
def interpreter() -> Iterator[Run]:
    """`run(function, *args, **options)` calls a module's function in the worker; what it raises is raised here."""
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
        yield run
