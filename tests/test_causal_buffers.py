"""When a buffer that held a causal triangle is read again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from uniprefill_fx.passes.normalize.causal_buffers import CausalBuffer, Unchanged

ROWS = 64


class Counted(CausalBuffer):
    """Counts how often a buffer is read."""

    reads = 0

    def fits(self, tensor: Tensor) -> bool:
        Counted.reads += 1
        return super().fits(tensor)


@pytest.fixture
def unchanged() -> Unchanged:
    Counted.reads = 0
    return Unchanged(Counted(1.0, 0.0))


def triangle() -> Tensor:
    return torch.ones(1, 1, ROWS, ROWS).tril()


def test_it_is_read_once(unchanged: Unchanged) -> None:
    buffer = triangle()
    assert unchanged(buffer) and unchanged(buffer) and unchanged(buffer)
    assert Counted.reads == 1


def test_writes_are_seen_through_views_too(unchanged: Unchanged) -> None:
    buffer = triangle()
    assert unchanged(buffer)
    buffer[0, 0, 40:][:, :10] = 0
    assert not unchanged(buffer) and not unchanged(buffer)
    buffer[0, 0, 40:][:, :10] = 1
    assert unchanged(buffer)
    assert Counted.reads == 3


def test_a_buffer_at_the_address_of_one_that_is_gone_is_read(unchanged: Unchanged) -> None:
    """Each takes the place of the one before: allocators hand memory out again at once, and a fresh tensor's count of
    writes is that of the other."""
    for n in range(40):
        buffer = triangle() if n % 2 == 0 else torch.ones(1, 1, ROWS, ROWS).triu()
        assert unchanged(buffer) == (n % 2 == 0), n
        del buffer
    assert Counted.reads == 40


def test_data_that_is_put_in_its_place_is_read(unchanged: Unchanged) -> None:
    buffer = triangle()
    assert unchanged(buffer)
    for n in range(1, 40):
        buffer.data = triangle() if n % 2 == 0 else torch.ones(1, 1, ROWS, ROWS).triu()
        assert unchanged(buffer) == (n % 2 == 0), n


def test_another_view_of_the_same_memory_is_read(unchanged: Unchanged) -> None:
    buffer = triangle()
    assert unchanged(buffer) and not unchanged(buffer.mT)


def test_a_buffer_of_inference_mode_has_no_count_of_writes(unchanged: Unchanged) -> None:
    with torch.inference_mode():
        buffer = triangle()
        assert unchanged(buffer)
        buffer[..., 40:, :10] = 0
        assert not unchanged(buffer)
