"""The passes in their order, and the record of one compilation.

`NORMALIZE`, `ANALYZE` and `REWRITE` are the whole order: a step takes the `Compilation` and fills in more of it.
Without a drop in the plan nothing is rewritten. `backend` runs them for the graphs that Dynamo hands over.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from uniprefill_fx import frontends
from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.errors import Category, Refusal, RefusalError, StrictError
from uniprefill_fx.frontends.eager_reads import unreadable_eagerly
from uniprefill_fx.frontends.own_attention import OwnAttention, reads_views
from uniprefill_fx.frontends.prompt_sizes import TraceAgain, trace_symbolic
from uniprefill_fx.lowering.cache_tag import tag
from uniprefill_fx.lowering.devices import check_dtypes
from uniprefill_fx.lowering.inner import compile_whole, inner_backend, tensorrt_of
from uniprefill_fx.lowering.pieces import CompiledPiece
from uniprefill_fx.lowering.prompts import PromptCompiler
from uniprefill_fx.passes import trace_log
from uniprefill_fx.passes.analyze.attention_nodes import find_attention_nodes
from uniprefill_fx.passes.analyze.entry import keys_of_earlier_tokens, reason_from_outside
from uniprefill_fx.passes.analyze.plan import Plan, make_plan
from uniprefill_fx.passes.analyze.ranks import Ranks, find_ranks
from uniprefill_fx.passes.attention_node import AttentionNode
from uniprefill_fx.passes.node_utils import copy_module, meta
from uniprefill_fx.passes.normalize.attention_form import unify_attention_form
from uniprefill_fx.passes.normalize.causal_buffers import MARK, Unchanged, mark_causal_buffers
from uniprefill_fx.passes.normalize.collectives import plain_collectives
from uniprefill_fx.passes.normalize.dtensors import plain_dtensors
from uniprefill_fx.passes.normalize.expand_layer_ops import expand_layer_ops
from uniprefill_fx.passes.normalize.fold_constants import fold_constants
from uniprefill_fx.passes.normalize.functionalize import functionalize
from uniprefill_fx.passes.normalize.module_names import name_from_self
from uniprefill_fx.passes.rewrite.drop_tokens import drop_tokens
from uniprefill_fx.passes.rewrite.extract import extract
from uniprefill_fx.passes.rewrite.lower_attention import lower_attention
from uniprefill_fx.passes.rewrite.merge_gathers import merge_gathers
from uniprefill_fx.passes.rewrite.propagate_fakes import propagate
from uniprefill_fx.passes.rewrite.split import Piece, split_at_selections
from uniprefill_fx.runtime.agreement import Agreement
from uniprefill_fx.runtime.eager_reader import EagerReader
from uniprefill_fx.runtime.length_marks import LengthMarks
from uniprefill_fx.runtime.prefill import Prefill
from uniprefill_fx.runtime.undropped import Undropped
from uniprefill_fx.torch_internals import traced_code

log = logging.getLogger(__name__)

frontends.install()  # readers of attention, and what Dynamo must know before it traces


class Compilation:
    """What becomes of one traced graph, filled in step by step; `explain()` shows it.

    Attributes:
        gm: the graph at hand. before: the same in its normal form; a copy where somebody observes the compilation.
        inputs: what Dynamo handed over with it. config: the options.
        attention: what the readers found in it. blocked: a reason from outside the decoder to stay dense.
        ranks: those that run the graph together. prompts: what compiles graphs of prompts.
        eager_reader: whether steps could read a compact cache eagerly. written: a step's graph as Dynamo traced it.
        plan: the decisions.
        after: the rewritten graph, None if it stays dense. pieces: what `after` was cut into.
        seconds: time of each step, by name. run: what Dynamo calls.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], config: PrefillConfig, observed: bool) -> None:
        self.gm, self.inputs, self.config, self.observed = gm, inputs, config, observed
        self.prompts = PromptCompiler(inner_backend(config), tensorrt_of(config))
        self.attention: list[AttentionNode] = []
        self.blocked: Refusal | None = None
        self.ranks: Ranks | None = None
        self.plan = Plan(())
        self.before: fx.GraphModule = gm
        self.after: fx.GraphModule | None = None
        self.pieces: list[Piece] = []
        self.eager_reader = EagerReader(None, None)
        self.written: fx.GraphModule | None = None
        self.seconds: dict[str, float] = {}
        self.run: Callable[..., Any] | None = None

    def refuse(self, refusal: Refusal) -> None:
        """Keep one more reason why something stays as the model wrote it."""
        self.plan = replace(self.plan, refusals=(*self.plan.refusals, refusal))


def _eager_reader(c: Compilation) -> None:
    c.eager_reader = EagerReader(unreadable_eagerly(c.gm.graph), traced_code())
    c.written = copy_module(c.gm) if reads_views(c.gm.graph) else None


def _find_attention(c: Compilation) -> None:
    c.before = copy_module(c.gm) if c.observed else c.gm
    c.attention = find_attention_nodes(c.gm.graph)
    c.prompts = replace(c.prompts, batch={a.batch for a in c.attention if a.spec is not None})
    c.blocked = reason_from_outside(c.gm, c.inputs)


def _find_ranks(c: Compilation) -> None:
    try:
        c.ranks = find_ranks(c.gm.graph)
    except RefusalError as error:
        c.blocked = c.blocked or error.refusal


def _retrace(c: Compilation) -> None:
    if not keys_of_earlier_tokens(c.gm.graph, c.attention):
        trace_symbolic(c.gm, c.attention, c.inputs)


def _plan(c: Compilation) -> None:
    c.plan = make_plan(c.gm, c.attention, c.config, c.blocked, c.ranks)
    refusals = c.plan.refusals
    # of a prompt of one token there is nothing to say
    if c.config.strict and c.plan.prefill and refusals and refusals[-1].category is not Category.TOO_SHORT:
        in_order = sorted(refusals, key=lambda refusal: float("inf") if refusal.layer is None else refusal.layer)
        raise StrictError("; ".join(map(str, in_order)))
    if c.plan.rewrites:
        check_dtypes(c.config, meta(c.plan.attention_nodes[0].q).device)


def _drop_tokens(c: Compilation) -> None:
    c.after = drop_tokens(c.gm, c.plan, c.config)


def _propagate(c: Compilation) -> None:
    assert c.after is not None
    propagate(c.after, c.plan.batch)


def _merge_gathers(c: Compilation) -> None:
    assert c.after is not None
    merge_gathers(c.after)


def _split(c: Compilation) -> None:
    assert c.after is not None
    c.pieces = split_at_selections(c.after)


Step = Callable[[Compilation], Any]
NORMALIZE: tuple[tuple[str, Step], ...] = (
    # Before anything: eager code calls what the model wrote, not its normal form.
    ("eager reader", _eager_reader),
    ("module names", lambda c: name_from_self(c.gm)),  # any pass may ask for the layer of a node
    # Numbers first: all that follow compare sizes and scales.
    ("fold constants", lambda c: fold_constants(c.gm)),
    # Needs numbers for dtypes. The plan refuses writes across a drop, so those that nobody else sees go before it.
    ("functionalize", lambda c: functionalize(c.gm)),
    # Need no other pass. Ranks are found by what they write.
    ("DTensors", lambda c: plain_dtensors(c.gm)),
    ("collectives", lambda c: plain_collectives(c.gm)),
    # Before anybody looks for attention: a layer op of torch hides it.
    ("expand layer ops", lambda c: expand_layer_ops(c.gm)),
    # Behind the expansion, which writes products too. Readers know products over four axes only.
    ("attention form", lambda c: unify_attention_form(c.gm)),
    # Needs the inputs as they are now. Masks are read by what this notes.
    ("causal buffers", lambda c: mark_causal_buffers(c.gm, c.inputs)),
)
ANALYZE: tuple[tuple[str, Step], ...] = (
    # Needs the normal form. All that follows knows attention by what is found here.
    ("find attention", _find_attention),
    # Needs plain collectives. A reason from outside comes before any that is found here.
    ("find ranks", _find_ranks),
    # Needs the attention of a prompt. Raises to have Dynamo trace again, so it comes before anything dear.
    ("retrace", _retrace),
    # Needs attention whose sizes are symbols. Decides everything that the rewrite does.
    ("plan", _plan),
)
REWRITE: tuple[tuple[str, Step], ...] = (
    # Executes the plan on a new graph; the old one stays for prompts that run dense.
    ("drop tokens", _drop_tokens),
    # Needs the whole new graph. Finds out whether it holds for all lengths.
    ("propagate fakes", _propagate),
    # Needs a graph that holds. What layers share then crosses the cuts, which makes the layers between drops equal.
    ("merge gathers", _merge_gathers),
    # Needs fakes at the edges of the pieces.
    ("split", _split),
)


def compile_graph(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    config: PrefillConfig,
    observer: Callable[[Compilation], None] | None = None,
) -> Callable[..., Any]:
    """Run the passes over one graph of Dynamo's, and return what Dynamo is to call.

    Raises:
        OptionError: an option does not fit the model. StrictError: with `strict=True`, a reason to stay dense.
    """
    if frontends.install():
        raise TraceAgain("a library was imported since the backend was loaded")
    c = Compilation(gm, inputs, config, observer is not None)
    _run(c, (*NORMALIZE, *ANALYZE))
    if c.plan.rewrites:
        try:
            _run(c, REWRITE)
            c.run = _prefill(c)
        except Exception as error:
            _failed(c, error, "rewriting failed, the prompt stays dense")
            c.plan, c.after = replace(c.plan, drops=(), sparse=()), None
    if c.run is None:
        marks = LengthMarks(gm)  # before the views of cache layers are gone
        agreement = _agreement(c)
        c.run = Undropped(_without_drops(c), marks, c.plan.prefill, c.plan.refusals, agreement)
    for refusal in c.plan.refusals if c.plan.prefill else ():
        log.info("stays dense: %s", refusal)
    trace_log.note(c.plan, c.after, c.seconds)
    if observer is not None:
        observer(c)
    return c.run


def _run(c: Compilation, steps: Sequence[tuple[str, Step]]) -> None:
    for name, step in steps:
        began = time.perf_counter()
        step(c)
        c.seconds[name] = time.perf_counter() - began


def _failed(c: Compilation, error: Exception, what: str) -> None:
    """Go on without what failed, and say so; with `strict`, raise."""
    if c.config.strict:
        raise error
    log.warning(what, exc_info=error)
    if isinstance(error, RefusalError):
        c.refuse(error.refusal)
    else:
        warnings.warn(f"uniprefill: {what}: {error}", stacklevel=4)
        c.refuse(Refusal(Category.FAILURE, str(error), "please report this"))


def _prefill(c: Compilation) -> Prefill:
    """Compilation itself waits for the first call."""
    assert c.after is not None
    agreement = _agreement(c)
    steps = list(zip(c.pieces, c.prompts.pieces(c.pieces), strict=True))
    sequence_ids = extract(c.gm, c.plan.sequence_ids)
    dense = c.prompts.whole(_lowered(c), "dense")
    how = (c.config.min_tokens, sequence_ids, c.config.block_size == "auto", c.eager_reader, agreement)
    return Prefill(c.plan, c.after, steps, dense, *how)


def _agreement(c: Compilation) -> Agreement | None:
    """With whom a prompt is run together."""
    if c.ranks is None:
        return None
    options = replace(c.config, inner_backend="inductor", inner_options=None)  # what compiles decides nothing
    return Agreement(c.ranks.group, c.gm.graph, (tag(), options))


def _without_drops(c: Compilation) -> Callable[..., Any]:
    """The compiled graph; where its masks are buffers that were looked at, they are looked at again at each call.

    A step has to read its compact cache so: the model's own attention could not.
    """
    buffers = tuple(dict.fromkeys(b for a in c.attention for b in sorted(a.causal_buffers)))
    if not buffers or c.plan.prefill:
        lowered = _lowered(c)
        own = c.written if reads_views(lowered.graph) else None  # before it is compiled, which may change it
        if c.prompts.tensorrt and c.plan.prefill and not (c.blocked and c.blocked.category is Category.GRADIENTS):
            return c.prompts.whole(lowered, "dense")
        run = compile_whole(c.prompts.inner, lowered, c.inputs)
        return run if own is None else OwnAttention(run, own, next(iter(c.plan.refusals), None))
    names = [n.name for n in c.gm.graph.nodes if n.op == "placeholder"]
    checks = [(names.index(b.name), Unchanged(b.meta[MARK])) for b in buffers]
    unlowered = CompiledPiece(copy_module(c.gm), c.prompts.inner, "with the model's masks")
    run = compile_whole(c.prompts.inner, _lowered(c, with_buffers=True), c.inputs)

    def checked(*args: Any) -> Any:
        as_they_were = all(unchanged(args[index]) for index, unchanged in checks)
        return run(*args) if as_they_were else unlowered(*args)

    return checked


def _lowered(c: Compilation, with_buffers: bool = False) -> fx.GraphModule:
    """The graph without drops: understood attention needs no mask. Where that fails, the model's own stays."""
    if c.blocked is not None and c.blocked.category is Category.GRADIENTS:
        return c.gm  # our ops have no backward
    own = copy_module(c.gm)
    began = time.perf_counter()
    try:
        lower_attention(c.gm, c.attention, with_buffers)
    except Exception as error:
        _failed(c, error, "the model's own attention and masks stay in the graph")
        return own
    c.seconds["lower attention"] = time.perf_counter() - began
    return c.gm
