"""What ranks say to one another through a store, with threads in place of ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from uniprefill_fx.runtime import agreement


class Group:
    """One rank's process group, over a store that all ranks share."""

    def __init__(self, store: dist.Store, own: int) -> None:
        self.store, self.own = store, own

    def get_group_store(self) -> dist.Store:
        return self.store

    def rank(self) -> int:
        return self.own


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    return [0, 1]


def said(store: dist.Store, words: Sequence[Sequence[str]], late: float = 0.0) -> list[list[list[str]]]:
    """By rank, what a new group of two ranks hears at each prompt. words: by rank. late: seconds of the second one."""

    def rank(own: int) -> list[list[str]]:
        group = Group(store, own)
        start.wait()
        time.sleep(late * own)
        return [agreement.exchanged(group, word) for word in words[own]]

    start = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, (0, 1)))


def test_nothing_is_left_for_a_group_that_is_made_anew() -> None:
    """Over the same store it counts its prompts from 0 again, and would take an old word for a new one."""
    store = dist.HashStore()
    assert said(store, [["old"], ["old"]]) == [[["old", "old"]]] * 2
    assert store.num_keys() == 0
    assert said(store, [["new"], ["other"]], late=0.2) == [[["new", "other"]]] * 2


def test_many_prompts_leave_no_keys() -> None:
    store = dist.HashStore()
    words = [[f"{rank}:{i}" for i in range(50)] for rank in (0, 1)]
    assert said(store, words) == [[[f"0:{i}", f"1:{i}"] for i in range(50)]] * 2
    assert store.num_keys() == 0
