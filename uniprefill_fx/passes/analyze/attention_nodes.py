"""Find the attention of a graph, by the readers that frontends registered."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import sympy
from torch import fx

from uniprefill_fx.errors import Category, RefusalError, refuse
from uniprefill_fx.passes.attention_node import AttentionNode
from uniprefill_fx.passes.dataflow import Ancestry
from uniprefill_fx.passes.node_utils import decoder_layer, module_path

Reader = Callable[[fx.Node], AttentionNode | None]
_READERS: list[Reader] = []


def register_reader(reader: Reader) -> Reader:
    """Have `find_attention_nodes` ask `reader` about every node; the first reader that answers is believed.

    A reader returns an `AttentionNode` for a node that computes attention, and None for any other. It raises
    `RefusalError` for attention that it does not understand: the node then becomes a refused attention. Registering a
    reader again changes nothing. Usable as a decorator.
    """
    if reader not in _READERS:
        _READERS.append(reader)
    return reader


@contextlib.contextmanager
def reading_with(reader: Reader) -> Iterator[None]:
    """Inside, `find_attention_nodes` asks `reader` too, for what only one graph or one test knows of."""
    registered = reader in _READERS
    register_reader(reader)
    try:
        yield
    finally:
        if not registered:
            _READERS.remove(reader)


def find_attention_nodes(graph: fx.Graph) -> list[AttentionNode]:
    """All attention of a graph, in graph order. Never raises: what is not understood becomes a refused attention.

    A layer number is that of a decoder layer, which may hold several attentions. Where module paths do not tell the
    layers, attentions are counted.
    """
    found = [attention for node in graph.nodes if (attention := _read(node)) is not None]
    layers = [attention.layer for attention in found]
    if None in layers or layers != sorted(layers) or _ambiguous(graph, found):
        found = [replace(attention, layer=i) for i, attention in enumerate(found)]
    return found


def _ambiguous(graph: fx.Graph, found: list[AttentionNode]) -> bool:
    """Whether attentions of one number are of several layers: numbered further inside (layers in a list of models), or
    computed by one module from what it returned before (fewer modules than layers)."""
    pairs = [(a, b) for a, b in itertools.combinations(found, 2) if a.layer == b.layer]
    if any(_numbers_in(a.path) != _numbers_in(b.path) for a, b in pairs):
        return True
    again = [(a, b) for a, b in pairs if a.path == b.path]
    ancestry = Ancestry(graph) if again else None
    return ancestry is not None and any(ancestry.depends(b.node, a.node) for a, b in again)


def _numbers_in(path: str) -> list[str]:
    return [part for part in path.split(".") if part.isdigit()]


def _read(node: fx.Node) -> AttentionNode | None:
    try:
        return next((found for reader in _READERS if (found := reader(node)) is not None), None)
    except RefusalError as error:
        layer = decoder_layer(node)
        refusal = replace(error.refusal, layer=layer)
        return AttentionNode(node, node, node, node, None, layer, module_path(node), refusal=refusal)


def token_count(attention_nodes: list[AttentionNode]) -> sympy.Symbol:
    """The symbol that counts the tokens of a whole new prompt.

    Raises:
        RefusalError: there is no attention over a new prompt, or its length was specialised to a number.
    """
    understood = [a for a in attention_nodes if a.spec is not None]
    if not attention_nodes:
        raise refuse(Category.NO_ATTENTION, "no attention in the graph", "nothing to score tokens with")
    if not understood:
        refusals = [attention.refusal for attention in attention_nodes if attention.refusal is not None]
        # an indexer in some layers explains the others, too
        raise RefusalError(next((r for r in refusals if r.category is Category.INDEXED), refusals[0]))
    fresh = [a for a in understood if a.is_prefill]
    if not fresh:
        hint = "tokens are dropped from whole new prompts only, and with transformers' DynamicCache"
        raise refuse(Category.PAST, "attention over a cache", hint)
    count = fresh[0].num_queries
    if count == 1:
        raise refuse(Category.TOO_SHORT, "a prompt of one token", "there is nothing to drop")
    if not isinstance(count, sympy.Symbol):
        raise refuse(
            Category.TOKEN_AXIS,
            f"a prompt length specialised to {count}",
            "a loop over tokens or chunks in the model (register_mixer makes it one op, docs/mixers.md), or a size in "
            "the model that equals this length (then other lengths drop)",
        )
    return count
