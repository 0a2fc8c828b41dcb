"""Ranks that drop tokens together decide together: one small exchange before each prompt.

A rank that dropped alone would wait for sums of scores that the others never send, or add rows of other tokens to
theirs. So each rank says which graph it runs and what it is about to do with it; where two say different things, all of
them run the prompt dense.

They say it in the store of their process group, and not by a collective. A rank that runs the model without this
backend says nothing there, and goes on to a collective of the model. Ours would meet that one, and NCCL would wait for
ever, or add up what does not belong together. Here the others learn which rank is missing.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from uniprefill_fx.errors import RanksError
from uniprefill_fx.passes.distributed import is_dtensor, placement_of
from uniprefill_fx.passes.node_utils import leaves_of, meta
from uniprefill_fx.torch_internals import group_named

log = logging.getLogger(__name__)
SOON = datetime.timedelta(seconds=10)
"""After so long a log line says which rank is waited for."""
PATIENCE = datetime.timedelta(minutes=5)
"""How much longer one rank may trace the model, or read its prompt, than another."""

# By process group: the number of its next prompt. Every rank counts alike, as each prompt is an exchange on all.
_prompts: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()


class Agreement:
    """What the ranks of a group ask one another before a prompt.

    Args:
        group: the name of the process group. graph: of the prompt. options: whatever else decides what ranks do.
    """

    def __init__(self, group: str, graph: fx.Graph, options: Any) -> None:
        self.group = group
        self.program = hashlib.sha256("\n".join(_lines(graph)).encode())
        self.program.update(repr(options).encode())

    def reached(self, *decision: Any) -> bool:
        """Whether every rank runs this graph and calls with this decision, whose parts are told apart by their `repr`.

        Every rank of the group has to call it, at the same prompt.

        Raises:
            RanksError: a rank does not, for `PATIENCE`.
        """
        digest = self.program.copy()
        digest.update(repr(decision).encode())
        return len(set(exchanged(group_named(self.group), digest.hexdigest()))) == 1


def exchanged(group: Any, word: str) -> list[str]:
    """What each rank of a process group says at the same prompt, by rank.

    Raises:
        RanksError: a rank says nothing for `PATIENCE`. An error of `torch.distributed`, if the store is gone.
    """
    store, own, ranks = group.get_group_store(), group.rank(), dist.get_process_group_ranks(group)
    number = next(_prompts.setdefault(group, itertools.count()))
    store.set(_key(number, own), word)
    for rank, name in enumerate(ranks):
        _wait(store, _key(number, rank), name, ranks)
    keys = [_key(number, rank) for rank in range(len(ranks))]
    said = [store.get(key).decode() for key in keys]
    counter = f"uniprefill/{number}/read"
    if store.add(counter, 1) == len(ranks):
        # All have read. A group that is made anew over this store counts from 0 again: nothing may be left for it.
        for key in (*keys, counter):
            store.delete_key(key)
    return said


def _key(number: int, rank: int) -> str:
    return f"uniprefill/{number}/{rank}"


def _wait(store: Any, key: str, rank: int, ranks: list[int]) -> None:
    if _comes(store, key, SOON):
        return
    log.warning("waits for rank %d to come to a prompt", rank)
    if not _comes(store, key, PATIENCE):
        raise RanksError(
            f"rank {rank} of the ranks {ranks} did not come to this prompt within {PATIENCE.total_seconds():g} s: it "
            "runs the model without this backend (not compiled, or past Dynamo's recompile limit), was given another "
            "call, or is gone. Compile the model on all of these ranks or on none, and give each the same calls"
        )


def _comes(store: Any, key: str, patience: datetime.timedelta) -> bool:
    """Whether a key is there within a time. Raises what the store raises if it is gone."""
    try:
        store.wait([key], patience)
    except RuntimeError:  # a store of files has no type of its own for that
        return bool(store.check([key]))
    return True


def _lines(graph: fx.Graph) -> Iterator[str]:
    """A graph as text that is the same in every process which traced the same, whatever device it runs on."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        arguments = [_text(leaf, number) for leaf in leaves_of((node.args, node.kwargs))]
        yield f"{node.op} {target if node.op != 'placeholder' else ''} {arguments} {sorted(node.kwargs)} {_value(node)}"


def _text(leaf: Any, number: dict[fx.Node, int]) -> str:
    if isinstance(leaf, fx.Node):
        return f"%{number[leaf]}"
    if isinstance(leaf, torch.device):
        return leaf.type  # ranks of one host have a device each
    plain = leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype | type(Ellipsis))
    return repr(leaf) if plain else type(leaf).__name__


def _value(node: fx.Node) -> str:
    value = meta(node)
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    sizes = [int(size) if isinstance(size, int) else "dynamic" for size in value.shape]
    return f"{value.dtype} {sizes} {placement_of(value)[1] if is_dtensor(value) else ''}"
