"""The Dynamo backend `uniprefill`: options -> config -> passes -> inner compiler."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from uniprefill_fx import frontends
from uniprefill_fx.api import warn_of_lost_generate
from uniprefill_fx.config import OptionError, PrefillConfig
from uniprefill_fx.errors import Category, Refusal, RefusalError, StrictError
from uniprefill_fx.frontends import gating
from uniprefill_fx.lowering.devices import check_score_dtype
from uniprefill_fx.lowering.inner import inner_backend
from uniprefill_fx.lowering.pieces import CompiledPiece
from uniprefill_fx.passes.analyze.attention_nodes import find_attention_nodes
from uniprefill_fx.passes.analyze.plan import Plan, make_plan
from uniprefill_fx.passes.analyze.ranks import find_ranks
from uniprefill_fx.passes.node_utils import copy_module, decoder_layer, meta
from uniprefill_fx.passes.normalize.attention_form import unify_attention_form
from uniprefill_fx.passes.normalize.causal_buffers import mark_causal_buffers
from uniprefill_fx.passes.normalize.expand_layer_ops import expand_layer_ops
from uniprefill_fx.passes.normalize.fold_constants import fold_constants
from uniprefill_fx.passes.normalize.functionalize import functionalize
from uniprefill_fx.passes.rewrite.drop_tokens import rewrite
from uniprefill_fx.passes.rewrite.extract import extract
from uniprefill_fx.passes.rewrite.lower_attention import lower_attention
from uniprefill_fx.passes.rewrite.propagate_fakes import propagate
from uniprefill_fx.passes.rewrite.split import split_at_selections
from uniprefill_fx.runtime.prefill import LengthMarks, Prefill, Undropped
from uniprefill_fx.runtime.retrace import TraceAgain, trace_symbolic
from uniprefill_fx.timing import collect
from uniprefill_fx.tracelog import note

log = logging.getLogger(__name__)
Observer = Callable[["Compilation"], None]

frontends.install()


def uniprefill(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Compile a graph that Dynamo traced; `torch.compile(model, backend="uniprefill", options={...})` calls this.

    Raises:
        OptionError: unknown option or bad value.
        StrictError: with `strict=True`, when something would have stayed dense.
    """
    if kwargs.get("mode") is not None:
        raise OptionError(
            "mode", kwargs["mode"], "no mode", "Pass options={'inner_options': {...}} to tune the inner backend."
        )
    config = PrefillConfig.from_options(kwargs.get("options") or {})
    return compile_graph(gm, example_inputs, config)


setattr(uniprefill, gating.OURS, True)


class Compilation:
    """What became of one traced graph, for `explain()`: filled in as the passes run.

    Attributes:
        plan: the decisions. before: Dynamo's graph. after: the rewritten one, None if it stays dense.
        seconds: time of each pass, by name. run: what Dynamo calls.
    """

    def __init__(self, plan: Plan, before: fx.GraphModule, seconds: dict[str, float]) -> None:
        self.plan, self.before, self.seconds = plan, before, seconds
        self.after: fx.GraphModule | None = None
        self.run: Callable[..., Any] | None = None


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: PrefillConfig, observer: Observer | None = None
) -> Callable[..., Any]:
    """Plan, rewrite and compile one graph."""
    seconds: dict[str, float] = {}
    with collect(seconds):
        return _compile_graph(gm, example_inputs, config, observer, seconds)


def _compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: PrefillConfig,
    observer: Observer | None,
    seconds: dict[str, float],
) -> Callable[..., Any]:
    inner = inner_backend(config)
    if frontends.install():
        raise TraceAgain("a library was imported since the backend was loaded")
    fold_constants(gm)
    functionalize(gm)
    with enable_python_dispatcher():  # otherwise composite ops are taken apart in C++, where some fix symbolic sizes
        expand_layer_ops(gm)
        unify_attention_form(gm)
    mark_causal_buffers(gm, example_inputs)
    blocked = _blocked(gm, example_inputs)
    plan = make_plan(gm, config, blocked)
    trace_symbolic(plan, gm, example_inputs)
    done = Compilation(plan, copy_module(gm) if observer is not None else gm, seconds)
    if config.strict and plan.prefill and plan.refusals and plan.refusals[-1].category is not Category.TOO_SHORT:
        raise StrictError(str(plan.refusals[0]))
    if plan.drops:
        check_score_dtype(config, meta(plan.drops[0].attention.q).device)
        try:
            done.run = _dropping(gm, config, inner, done)
        except Exception as error:
            if config.strict:
                raise
            log.warning("rewriting failed, the prompt stays dense", exc_info=error)
            warnings.warn(f"uniprefill: rewriting failed, the prompt stays dense: {error}", stacklevel=2)
            unknown = Refusal(Category.FAILURE, str(error), "please report this")
            failure = error.refusal if isinstance(error, RefusalError) else unknown
            done.plan = replace(plan, drops=(), refusals=(*plan.refusals, failure))
    if done.run is None:
        marks = LengthMarks(gm)
        # Our ops have no backward: a graph that needs gradients keeps the model's own attention.
        kept = gm if blocked is not None and blocked.category is Category.GRADIENTS else _lower(gm)
        done.run = Undropped(inner(kept, example_inputs), marks, plan.prefill, done.plan.refusals)
    for refusal in done.plan.refusals if plan.prefill else ():
        log.info("stays dense: %s", refusal)
    note(done.plan, done.after if done.plan.drops else None, done.seconds)
    if observer is not None:
        observer(done)
    return done.run


def _blocked(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Refusal | None:
    """A reason from outside the decoder why its graph must stay dense."""
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in example_inputs):
        return Refusal(Category.GRADIENTS, "gradients are on", "call inside torch.inference_mode() or torch.no_grad()")
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        why = str(reason.reason).strip().splitlines()
        stack = [
            f"{frame.filename}:{frame.lineno}, in {frame.name}" for frame in getattr(reason, "user_stack", None) or ()
        ]
        return Refusal(
            Category.GRAPH_BREAK,
            f"Dynamo broke the graph at {stack[-1] if stack else 'an unknown place'}: {why[0] if why else 'no reason'}",
            "only the last graph of a forward may drop tokens: take the break out, or behind the layers",
        )
    if gating.resumed() and all(decoder_layer(node) is None for node in gm.graph.nodes):
        return Refusal(
            Category.GRAPH_BREAK,
            "a piece behind a graph break, whose layers have no names",
            "which layers these are cannot be told: take the break out, or make the layers an nn.ModuleList",
        )
    return find_ranks(gm.graph)


def _lower(gm: fx.GraphModule) -> fx.GraphModule:
    """Take masks and cache views out of a graph, where its attention is understood. Each attention is edited whole."""
    try:
        lower_attention(gm, find_attention_nodes(gm.graph))
    except Exception as error:
        log.warning("the model's own attention and masks stay in the graph", exc_info=error)
        gm.recompile()
    return gm


def _dropping(gm: fx.GraphModule, config: PrefillConfig, inner: Any, done: Compilation) -> Prefill:
    """Rewrite, check, split; compilation itself waits for the first call."""
    auto_blocks = config.block_size == "auto"
    # The block size is an argument of the selection, which every call replaces: any number will do in the graph.
    after = rewrite(gm, done.plan, replace(config, block_size=64) if auto_blocks else config)
    propagate(after, done.plan.batch)
    done.after = after
    steps = [
        (piece, piece.gm if piece.selection else CompiledPiece(piece.gm, inner, f"piece {i // 2}"))
        for i, piece in enumerate(split_at_selections(after))
    ]
    dense = CompiledPiece(_lower(copy_module(gm)), inner, "dense")
    return Prefill(done.plan, after, steps, dense, config.min_tokens, extract(gm, done.plan.sequence_ids), auto_blocks)


if torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    importlib.import_module("uniprefill_fx.lowering.cuda")
warn_of_lost_generate()
