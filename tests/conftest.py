"""Fixtures of the tests that compile models."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from checkpoints import NAMES, folder
from exactness import Case, Compiled
from triton_worker import Run, interpreter, on_cuda

from uniprefill_fx.runtime.warn_once import forget_warnings


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # the models are small: more threads only disturb one another


@pytest.fixture(autouse=True, scope="session")
def _rarely_collected() -> None:
    """Tracing makes many objects that live, and Python would search them and all that was imported time and again."""
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(autouse=True)
def _warnings_of_this_test() -> None:
    """Warnings that are said once a process are said in each test."""
    forget_warnings()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """No compilations and no counts of earlier tests, and none left behind: `pytest.mark.usefixtures`."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


@pytest.fixture(scope="module", params=["interpreter", CUDA])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Where kernels run: in Triton's interpreter, and on a card."""
    if request.param == "cuda":
        yield Run(on_cuda, slack=10.0)
    else:
        with interpreter() as run:
            yield run


@pytest.fixture(params=NAMES)
def checkpoint(request: pytest.FixtureRequest) -> str:
    """The name of each checkpoint that is here."""
    folder(request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    """A `Case` (indirect), compiled once for all tests of a module that name it."""
    assert isinstance(request.param, Case)
    yield Compiled(request.param)
    torch._dynamo.reset()
