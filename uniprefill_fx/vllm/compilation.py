"""What vLLM calls as its compile backend, and what runs in place of the model's graph.

A step without a prompt that drops runs the model's graph, compiled as one by the inner backend. A step with one runs
the rewritten graph: pieces between attention and selections are compiled, those of one structure once.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx

from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.errors import Category, Refusal, StrictError
from uniprefill_fx.lowering.devices import check_dtypes, runs_kernels
from uniprefill_fx.lowering.inner import compile_whole, inner_backend
from uniprefill_fx.lowering.pieces import compile_pieces
from uniprefill_fx.passes.analyze.attention_nodes import find_attention_nodes, reading_with
from uniprefill_fx.passes.analyze.plan import Plan
from uniprefill_fx.passes.node_utils import copy_module, meta
from uniprefill_fx.passes.normalize.fold_constants import fold_constants
from uniprefill_fx.passes.normalize.functionalize import functionalize
from uniprefill_fx.passes.rewrite.merge_gathers import merge_gathers
from uniprefill_fx.passes.rewrite.propagate_fakes import propagate
from uniprefill_fx.passes.rewrite.split import split_at_selections
from uniprefill_fx.runtime.prefill import released_after
from uniprefill_fx.vllm import hooks, metadata, metrics, operators, ops, ranks
from uniprefill_fx.vllm.attention import Reader, layer_argument, layer_number, sinks_of
from uniprefill_fx.vllm.normalize import normalize, one_token_count
from uniprefill_fx.vllm.options import as_engine_compiles, check, config_of, warms_up
from uniprefill_fx.vllm.plan import plan_served
from uniprefill_fx.vllm.rewrite import drop_served, layers_in, runs_outside
from uniprefill_fx.vllm.select import select_packed
from uniprefill_fx.vllm.steps import Steps, install

log = logging.getLogger(__name__)


def backend_of_engine() -> Callable[..., Any]:
    """The compile backend of the engine that is being built: what `uniprefill_fx.vllm.backend` stands for.

    Raises:
        ServingError: the engine was asked for something with which answers could be wrong. OptionError: a bad option.
    """
    from vllm.config import get_current_vllm_config

    vllm_config = get_current_vllm_config()
    check(vllm_config)
    return functools.partial(_backend, vllm_config, config_of(vllm_config))


def _backend(
    vllm_config: Any, config: PrefillConfig, gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Compile the graph of a model.

    Raises:
        OptionError: an option does not fit the model. StrictError: with `strict`, when nothing can be dropped.
    """
    from vllm.forward_context import get_forward_context

    if runs_kernels():
        importlib.import_module("uniprefill_fx.lowering.cuda")
    operators.register()
    layers: Mapping[str, Any] = get_forward_context().no_compile_layers
    steps = Steps(config, metrics.count if vllm_config.parallel_config.rank == 0 else None, layers)
    steps.warm_up = warms_up(vllm_config)
    inner = inner_backend(as_engine_compiles(config, vllm_config.compilation_config))
    dropped = copy_module(gm)
    plan = _planned(dropped, example_inputs, layers, config)
    plain = compile_whole(inner, gm, example_inputs)
    if plan.drops:
        try:
            after = drop_served(dropped, plan, config)
            merge_gathers(after)
            propagate(after, plan.batch)
            pieces = split_at_selections(after, runs_outside)
            runs = list(zip(pieces, compile_pieces(pieces, inner), strict=True))
        except Exception as error:
            if config.strict:
                raise
            log.warning("rewriting failed, every prompt stays dense", exc_info=error)
            plan = _dense(plan, Refusal(Category.FAILURE, str(error), "report this"))
    if not ranks.agree(_program(after if plan.drops else None, plan, config)):
        what = "ranks whose graphs or options differ: they would not keep the same rows"
        plan = _dense(plan, Refusal(Category.RANKS, what, "stays dense on all of them; please report this"))
    if not plan.attention_nodes:
        return plain  # an encoder beside the decoder
    if not plan.drops:
        steps.reason = str(plan.refusals[-1]) if plan.refusals else "nothing to drop"
        log.warning("uniprefill: every prompt stays dense: %s", "; ".join(map(str, plan.refusals)))
        if config.strict:
            raise StrictError(steps.reason)
        install(steps)
        hooks.install()
        return functools.partial(_run_plain, steps, plain)  # which holds the steps
    steps.drops = len(plan.drops)
    ops.layers.update({a.path: layer_argument(a.node.args[4]) for a in plan.attention_nodes})
    segment_of = _segments(plan, layers)
    metadata.install(layers, segment_of)
    install(steps)
    hooks.install()
    return Served(plain, after, runs, plan, steps, layers, segment_of)


def _dense(plan: Plan, reason: Refusal) -> Plan:
    return Plan(plan.attention_nodes, plan.num_layers, (*plan.refusals, reason))


def _program(after: fx.GraphModule | None, plan: Plan, config: PrefillConfig) -> str:
    """What a rank is about to run, as text. Numbers in its graph may be its own: its part of the vocabulary."""
    nodes: Any = [] if after is None else after.graph.nodes
    calls = [getattr(node.target, "__name__", str(node.target)) for node in nodes]
    drops = [(drop.attention.path, drop.spec) for drop in plan.drops]
    return repr((calls, drops, config, [a.path for a in plan.attention_nodes]))


def _run_plain(steps: Steps, plain: Callable[..., Any], *args: Any) -> Any:
    return plain(*args)


def _planned(gm: fx.GraphModule, inputs: Sequence[Any], layers: Mapping[str, Any], config: PrefillConfig) -> Plan:
    one_token_count(inputs)
    fold_constants(gm)
    normalize(gm)
    functionalize(gm)
    with reading_with(Reader(layers)):
        found = find_attention_nodes(gm.graph)
    plan = plan_served(gm.graph, found, config, ranks.count() > 1)
    for refusal in plan.refusals:
        log.info("uniprefill: %s", refusal)
    if plan.drops:
        check_dtypes(config, meta(found[0].q).device)
    return plan


def _segments(plan: Plan, layers: Mapping[str, Any]) -> dict[str, int]:
    """By name of a layer: how many drops lie before it. Of those before the first, the ones that keep a state only."""
    after = [drop.attention.layer for drop in plan.drops]
    found: dict[str, int] = {}
    for name, layer in layers.items():
        number = layer_number(name)
        segment = 0 if number is None else sum(number > drop for drop in after)
        if hasattr(layer, "get_attn_backend") and (segment or metadata.keeps_state(layer)):
            found[name] = segment
    return found


class Served:
    """A compiled model of vLLM: its own graph for most steps, the rewritten one for those with prompts that drop."""

    def __init__(
        self,
        plain: Callable[..., Any],
        after: fx.GraphModule,
        runs: Sequence[tuple[Any, Callable[..., Any]]],
        plan: Plan,
        steps: Steps,
        layers: Mapping[str, Any],
        segment_of: Mapping[str, int],
    ) -> None:
        self.plain, self.runs, self.plan, self.steps, self.layers = plain, runs, plan, steps, layers
        self.segment_of = segment_of
        self.inputs = after.graph.find_nodes(op="placeholder")
        self.output = after.graph.output_node().args[0]
        self.released = released_after(after.graph, runs)
        self.runs_layers = [layers_in(piece.gm.graph.nodes) & segment_of.keys() for piece, _ in runs]
        self.never_named = segment_of.keys() - set().union(*self.runs_layers)
        self.running: Set[str] = set()
        self.to_replan: dict[str, Sequence[int]] = {}  # by layer behind the last drop: where its requests end
        self.context: Any = None
        ops.selecting[:] = [self.select]

    def __call__(self, *args: Any) -> Any:
        from vllm.forward_context import get_forward_context

        self.context = context = get_forward_context()
        if not isinstance(context.attn_metadata, dict) or not context.attn_metadata:
            return self.plain(*args)  # memory is measured: there are no requests
        self._check_builders(context.attn_metadata)
        for name in self.segment_of:
            self._use_slots(name)
        step = self.steps.step
        if step is None or not step.dropping:
            return self.plain(*args)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("uniprefill: a CUDA graph is captured in a step that drops tokens. Please report this.")
        self.steps.ordered()
        self.to_replan.clear()
        values: dict[fx.Node, Any] = dict(zip(self.inputs, args, strict=True))
        for (piece, run), layers, released in zip(self.runs, self.runs_layers, self.released, strict=True):
            self.running = layers
            self._replan(layers)
            operands = [values[n] for n in piece.inputs]
            for node in released:
                del values[node]
            results = run(*operands)
            del operands
            values.update(zip(piece.outputs, results, strict=True))
        return fx.node.map_arg(self.output, values.__getitem__)

    def select(self, q: Tensor, k: Tensor, drop: int) -> Tensor:
        """What `packed_select` does: choose, and note what the layers behind are to be told."""
        step, attention = self.steps.step, self.plan.drops[drop].attention
        assert step is not None and attention.spec is not None
        sinks = sinks_of(self.layers[attention.path])
        depths = [self.plan.depth(i) for i in range(len(self.plan.drops))]
        rows, bounds = select_packed(q, k, step, drop, depths, attention.spec, sinks)
        step.note_kept(rows, bounds)
        for name, (start, end) in zip(step.order, bounds, strict=True):
            if name in step.dropping:
                self.steps.requests[name].dropped[drop] = step.tokens[name] - (end - start)
        ends = [end for _, end in bounds]
        self.to_replan = {name: ends for name, segment in self.segment_of.items() if segment == drop + 1}
        self._replan(self.running | self.never_named)
        return rows[None]

    def _replan(self, about_to_run: Set[str]) -> None:
        """Build metadata of layers for the rows that stay. It takes milliseconds, in which a GPU runs those before."""
        for name in about_to_run & self.to_replan.keys():
            if name not in self.to_replan:
                continue  # made with another one's
            build = metadata.builds[name]
            made = build.builder.replan(build, self.steps, self.segment_of[name], self.to_replan[name])
            for alike in [n for n in self.to_replan if metadata.builds[n].builder is build.builder]:
                del self.to_replan[alike]
                self.context.attn_metadata[alike] = made
                self._use_slots(alike)

    def _use_slots(self, name: str) -> None:
        """Have a layer store keys where its own metadata says; the runner's slots are those of all tokens."""
        slots = getattr(self.context.attn_metadata.get(name), "slot_mapping", None)
        if slots is not None and isinstance(self.context.slot_mapping, dict):
            self.context.slot_mapping[name] = slots

    def _check_builders(self, held: Mapping[str, Any]) -> None:
        for name in self.segment_of:
            if name in held and name not in metadata.builds:
                raise RuntimeError(
                    f"uniprefill: the metadata of {name} was not built by its own builder: the engine made its "
                    "attention groups before the model was compiled. Please report this, with the version of vLLM."
                )
