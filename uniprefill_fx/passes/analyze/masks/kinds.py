"""Sort an attention mask into kinds, from what it says of a query index and a key index, without forming it.

Masks are broadcast compares of index vectors: `(kv <= q) & (kv > q - 128) & padding[batch, kv]`. `MaskReader` makes a
condition of them; `classify` sorts its conjuncts into a `MaskKind`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.core.function import AppliedUndef
from torch import fx

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.passes.analyze.masks.numbers import as_number
from uniprefill_fx.passes.analyze.masks.packed import by_index, sequence_ids
from uniprefill_fx.passes.analyze.masks.reader import BATCH, HEAD, KEY, QUERY, MaskReader
from uniprefill_fx.passes.node_utils import is_op, name_of, peel, shape
from uniprefill_fx.passes.schemas import effects
from uniprefill_fx.torch_internals import is_floor_div

DISTANCE = sympy.expand((QUERY - KEY) ** 2)


@dataclass(frozen=True)
class MaskKind:
    """What one attention op lets a query see, in original token indices.

    Attributes:
        offset: index of the first query minus index of the first key, symbolic. Every kind here is causal.
        window: a query sees itself and the window - 1 tokens before it; None: all before it.
        chunk: a query sees only its own chunk of this many tokens; None: all.
        key_mask: node of a (batch, keys) mask, nonzero where the token is real; None: no padding term.
        chunk_start: node of (batch,): the index at which each request's first chunk begins; None: 0.
        sequence_ids: node of (batch, tokens) numbers: a query sees only keys with its own (packed prompts); None: all.
        alibi: what is added to the logits grows with the key's index: node of `heads` slopes, and a factor on them.
        bias: node of (batch, heads, 1, keys) that is added to the logits: the same for all queries.
        causal_buffers: buffers whose values were looked at; what is said here holds while they stay
        (`passes.causal_buffers`).
    """

    offset: sympy.Expr
    window: int | None = None
    chunk: int | None = None
    key_mask: fx.Node | None = None
    sequence_ids: fx.Node | None = None
    alibi: tuple[fx.Node, float] | None = None
    causal_buffers: frozenset[fx.Node] = frozenset()
    chunk_start: fx.Node | None = None
    bias: fx.Node | None = None

    @property
    def full(self) -> bool:
        """Plain causal attention over all earlier tokens."""
        return self.window is None and self.chunk is None

    def __str__(self) -> str:
        kind = "full" if self.full else f"sliding window {self.window}" if self.window else f"chunk {self.chunk}"
        kind += ", padding mask" if self.key_mask is not None else ""
        kind += ", packed prompts" if self.sequence_ids is not None else ""
        return kind + (", alibi" if self.alibi else "")


def classify(masks: Sequence[tuple[fx.Node, bool]], queries: sympy.Expr) -> MaskKind:
    """The kind of masks (batch, heads, queries, keys) that apply together; a flag marks those of what is hidden.

    Raises:
        RefusalError: a conjunct is none of: causal, sliding window, chunk, padding of keys, packed prompts.
    """
    known = known_kind(masks[0][0]) if len(masks) == 1 and not masks[0][1] else None
    if known is not None:
        return known
    reader = MaskReader()
    read = [(reader.visible(mask), hides) for mask, hides in masks]
    condition = sympy.And(*(sympy.Not(seen) if hides else seen for (seen, _), hides in read))
    added = sympy.Add(*(value for (_, value), _ in read))
    query = sympy.Integer(0) if queries == 1 else QUERY
    offset = window = key_mask = packed_ids = None
    chunk: int | None = None
    chunk_start: fx.Node | None = None
    unsettled = []
    for term in by_index(condition.args if isinstance(condition, sympy.And) else (condition,), reader):
        found = _relation(term)
        if found is None:
            unsettled.append(term)
            continue
        kind, value = found
        distance = sympy.simplify(value - query) if kind != "data" else value
        if kind == "before" and not distance.has(QUERY, KEY) and offset is None:
            offset = distance
        elif kind == "after" and not distance.has(QUERY, KEY) and window is None:
            window = distance  # relative to the offset, which may be known only later
        elif kind == "data" and key_mask is None and value.args in ((BATCH, KEY), (sympy.Integer(0), KEY)):
            key_mask = reader.data[value.func.__name__]
        else:
            raise _unknown(term, reader)
    if offset is None:
        if condition == sympy.true and added.has(QUERY) and added.has(KEY):
            raise _unknown(added, reader)  # it may well hide later tokens
        raise refuse(
            Category.NON_CAUSAL,
            f"a mask that lets queries see later tokens: {condition}",
            "tokens can be dropped behind causal attention only",
        )
    for term in unsettled:
        packed = sequence_ids(term)
        if packed is not None and packed_ids is None and offset == 0:
            packed_ids = reader.data[packed]
            continue
        chunks = _chunk(term, query + offset)
        if chunks is None or chunk is not None:
            raise _unknown(term, reader)
        chunk, start = chunks
        chunk_start = None if start is None else reader.data[start]
    if window is not None:
        # key > query + offset - W, that is: the bound lies W below the causal one
        size = sympy.simplify(offset - window)
        if not size.is_Integer or size < 1:
            raise refuse(Category.MASK, f"a window of {size} tokens", "a window must be a constant of at least 1")
        window = int(size)
    bias = _key_bias(masks, added, reader) if added != 0 else None
    alibi = _alibi(added, reader) if added != 0 and bias is None else None
    buffers = frozenset(reader.causal_buffers)
    return MaskKind(offset, window, chunk, key_mask, packed_ids, alibi, buffers, chunk_start, bias)


def known_kind(mask: fx.Node) -> MaskKind | None:
    """The kind of a mask that a frontend annotated (`uniprefill::known_mask`); None for others, which are read."""
    if not is_op(mask, "known_mask"):
        return None
    _, padding, cached, window = mask.args
    _, _, queries, keys = shape(mask) or ()
    of_keys = not isinstance(padding, fx.Node) or (_is_input(padding) and (shape(padding) or ())[1] == keys)
    if not of_keys or not (cached or queries == keys):
        return None
    key_mask = padding if isinstance(padding, fx.Node) else None
    return MaskKind(keys - queries, window if isinstance(window, int) else None, None, key_mask)


def _is_input(mask: fx.Node) -> bool:
    """Whether a padding mask comes from outside; one that a model makes itself (all ones, say) is read."""
    return peel(mask, ("to", "bool", "contiguous", "view", "reshape")).op == "placeholder"


def _key_bias(masks: Sequence[tuple[fx.Node, bool]], added: Any, reader: MaskReader) -> fx.Node | None:
    """The node of what a mask adds to the logits, where that depends on data of the keys; None for other biases.

    As in Falcon, `masked_fill(slopes * (mask.cumsum(-1) - 1), hidden, -inf)`: one number a head and key, by position.
    """
    if len(masks) != 1 or added.has(QUERY) or not any(set(f.args) & {KEY} for f in added.atoms(AppliedUndef)):
        return None
    for read in masks[0][0].all_input_nodes:
        sizes = shape(read) or ()
        if len(sizes) == 4 and sizes[2] == 1 and sympy.expand(as_number(reader.read(read, 4)) - added) == 0:
            return read
    return None


def _distance(x: Any) -> Any:
    """The absolute value of x, where queries see no later keys."""
    return QUERY - KEY if sympy.expand(x**2) == DISTANCE else sympy.Abs(x)


def _alibi(added: Any, reader: MaskReader) -> tuple[fx.Node, float]:
    """The slopes of a bias slope[head] * (key - query), where queries see no later keys.

    A softmax is the same whatever is added to all logits of a query, so only what grows with the key counts.
    """
    added = sympy.expand(added.replace(sympy.Abs, _distance))
    slope = added.coeff(KEY)
    factor, data = slope.as_coeff_Mul()
    one_a_head = isinstance(data, AppliedUndef) and set(data.args) <= {HEAD, sympy.Integer(0)}
    if (added - slope * KEY).has(KEY) or not (one_a_head and data.has(HEAD) and factor.is_number):
        raise refuse(Category.MASK, f"a bias of the attention logits: {added}", "such a layer stays dense")
    return reader.data[data.func.__name__], float(factor)


def _relation(term: Any) -> tuple[str, Any] | None:
    """("before", x): key <= x. ("after", x): key > x. ("data", f(batch, key)): the token is real."""
    if isinstance(term, sympy.Ne) and term.rhs == 0 and isinstance(term.lhs, AppliedUndef):
        return "data", term.lhs
    if isinstance(term, sympy.Gt | sympy.Ge | sympy.Lt | sympy.Le):
        difference = sympy.expand(term.gts - term.lts)  # gts >= lts, or >
        strict = isinstance(term, sympy.StrictGreaterThan | sympy.StrictLessThan)
        coefficient = difference.coeff(KEY)
        rest = difference - coefficient * KEY
        if rest.has(KEY):
            return None
        if coefficient == -1:  # rest - key >= 0
            return "before", rest - 1 if strict else rest
        if coefficient == 1:  # key + rest >= 0
            return "after", -rest if strict else -rest - 1
    return None


def _chunk(term: Any, position: Any) -> tuple[int, str | None] | None:
    """(C, s) of `(key - s) // C == (query - s) // C`, with the query's index in the sequence; None for other terms.

    s is the name of data of one number for each request, None where the chunks begin at 0.
    """
    if not isinstance(term, sympy.Eq) or not all(is_floor_div(side) for side in term.args):
        return None
    (left, size), (right, other_size) = (side.args for side in term.args)
    of_key, of_query = (left, right) if left.has(KEY) else (right, left)
    start = sympy.simplify(KEY - of_key)
    if size != other_size or not size.is_Integer or sympy.simplify(position - of_query - start) != 0:
        return None
    if start == 0:
        return int(size), None
    by_request = isinstance(start, AppliedUndef) and start.args in ((BATCH,), (sympy.Integer(0),))
    return (int(size), str(start.func.__name__)) if by_request else None


def _unknown(term: Any, reader: MaskReader) -> Exception:
    of_keys = [reader.data.get(found.func.__name__) for found in term.atoms(AppliedUndef) if found.has(KEY)]
    for data in of_keys:
        picked = _picked_by(data)
        if picked is not None:
            return refuse(
                Category.INDEXED,
                f"an indexer picks the keys that each query sees (`{picked.name}`, {name_of(picked)})",
                "which tokens matter is the indexer's choice, query by query: such a layer stays dense",
            )
    for data in of_keys:
        if data is not None and name_of(data) == "cat":
            return refuse(
                Category.MASK,
                f"a mask put together of several (`{data.name}`): some of the keys are no tokens of the prompt",
                "of keys that stand for many tokens at once, no token can be dropped alone: such a layer stays dense",
            )
    return refuse(
        Category.MASK,
        f"a mask term that is none of causal, sliding window, chunk, padding of keys, packed prompts: {term}",
        "such a layer stays dense; report the model if the term is a standard one",
    )


def _picked_by(mask: fx.Node | None) -> fx.Node | None:
    """The `topk` whose indices were written into a mask, a few steps before it."""
    near: list[fx.Node] = [] if mask is None else [mask]
    for _ in range(12):  # of blocks: chosen, marked, widened to tokens, shared by heads
        picked = next((node for node in near if name_of(node) == "topk"), None)
        if picked is not None:
            return picked
        # what is written into a mask in place comes to it, too
        written = [user for node in near for user in node.users if node in effects(user).writes]
        behind = [node for node in (*near, *written) if not name_of(node).startswith(("linear", "matmul"))]
        near = list(dict.fromkeys(read for node in behind for read in node.all_input_nodes))
    return None
