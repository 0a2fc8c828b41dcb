"""What the engine is doing: its requests, which of them drop tokens in the step at hand, and what happened.

A request drops when its whole prompt is computed in one step, and it is long enough; every other prompt stays dense,
with a reason. After that each layer's cache holds fewer tokens of it than there were: `Request.dropped`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from uniprefill_fx.config import OptionError, PrefillConfig
from uniprefill_fx.vllm.request_options import config_of_request

log = logging.getLogger(__name__)


@dataclass
class Request:
    """A request of the engine. dropped: by drop, how many of its tokens the caches behind it lack."""

    prompt: int
    config: PrefillConfig | None
    reason: str | None
    dropped: list[int]


@dataclass
class Step:
    """One forward.

    Attributes:
        tokens: by request, how many are computed. dense: by request whose prompt comes in this step and stays dense,
            why. dropping: those whose prompt drops tokens, with their options.
        prompts: by request whose prompt comes in this step, how many tokens that has, the generated ones among them.
        order: requests as they lie in the stream. bounds: by request of `order`, where its rows lie by now.
        kept: by request, for each drop the positions in its prompt that stay, (kept,) int64.
    """

    tokens: dict[str, int]
    dense: dict[str, str] = field(default_factory=dict)
    dropping: dict[str, PrefillConfig] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    bounds: list[tuple[int, int]] = field(default_factory=list)
    rows: Tensor | None = None
    kept: dict[str, list[Tensor]] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)

    def note_kept(self, rows: Tensor, bounds: Sequence[tuple[int, int]]) -> None:
        """After a selection: `rows` (kept,) of the stream so far stay, and lie in `bounds`."""
        if self.rows is None:
            self.starts = {request: start for request, (start, _) in zip(self.order, self.bounds, strict=True)}
        self.rows = rows if self.rows is None else self.rows.index_select(0, rows)
        self.bounds = list(bounds)
        for request, (start, end) in zip(self.order, bounds, strict=True):
            if request in self.dropping:
                self.kept.setdefault(request, []).append(self.rows[start:end] - self.starts[request])


class Steps:
    """The requests of one engine.

    Args:
        config: the engine's options. count: called with each step that is over.
        layers: the engine's layers by name, the one thing that its runner and its compiled model both hold.

    Attributes:
        drops: how many drops there are; 0: none, because of `reason`.
        warm_up: whether prompts that drop are run while the engine starts.
        runner: what runs the model, once it has been seen. Dynamo holds a compiled model for as long as the process
            lives, so it is the runner that tells whether the engine is still there.
    """

    def __init__(self, config: PrefillConfig, count: Callable[[Step], None] | None = None, layers: Any = None) -> None:
        self.layers = layers
        self.runner: Callable[[], Any] = lambda: None
        self.config, self.drops, self.reason = config, 0, "the model was not compiled"
        self.requests: dict[str, Request] = {}
        self.step: Step | None = None
        self.last: Step | None = None
        self.watchers: list[list[Step]] = []
        self.count = count
        self.warm_up, self.counting = False, True
        self.ask_order: Callable[[], Sequence[str]] | None = None

    def begin(self, scheduled: Any, ask_order: Callable[[], Sequence[str]] | None = None) -> None:
        """Before the runner prepares a step.

        Args:
            scheduled: vLLM's `SchedulerOutput`.
            ask_order: tells the order of the requests once the step is prepared; None: somebody calls `ordered`.
        """
        self.ask_order = ask_order
        for name in scheduled.finished_req_ids:
            self.requests.pop(name, None)
        step = Step(dict(scheduled.num_scheduled_tokens))
        for new in scheduled.scheduled_new_reqs:
            known = new.prefill_token_ids if getattr(new, "prefill_token_ids", None) else new.prompt_token_ids
            tokens = len(known) if known is not None else int(new.prompt_embeds.shape[0])
            config, reason = self._options(new)
            prompt = tokens if new.prompt_token_ids is None else len(new.prompt_token_ids)
            held = self.requests.get(new.req_id)  # a session whose input goes on keeps its caches
            lacking = held.dropped if held is not None and new.num_computed_tokens else [0] * self.drops
            self.requests[new.req_id] = Request(prompt, config, reason, lacking)
            self._decide(step, new.req_id, tokens, new.num_computed_tokens)
        again = scheduled.scheduled_cached_reqs
        for i, name in enumerate(again.req_ids):
            if name in again.resumed_req_ids:
                self.requests[name].dropped = [0] * self.drops
                tokens = self.requests[name].prompt + again.num_output_tokens[i]
                self._decide(step, name, tokens, again.num_computed_tokens[i])
        self.step = step if step.tokens else None

    def _options(self, new: Any) -> tuple[PrefillConfig | None, str | None]:
        """The options of a new request, or why it stays dense."""
        params = new.sampling_params
        if params is None:
            return None, "pooling"
        if params.prompt_logprobs is not None:
            return None, "prompt log-probabilities are asked for"
        own = (params.extra_args or {}).get("uniprefill", True)
        try:
            config = config_of_request(own, self.config, self.drops)
            return config, "disabled by the request" if config is None else None
        except OptionError as error:
            log.warning("request %s stays dense: %s", new.req_id, error)
            return None, "options that are not understood"

    def _decide(self, step: Step, name: str, tokens: int, computed: int) -> None:
        """Whether a prompt (with what was generated before a preemption) of so many tokens drops some in this step."""
        request = self.requests[name]
        reason, step.prompts[name] = request.reason, tokens
        if not self.drops:
            reason = self.reason
        elif computed:
            reason = "keys of earlier tokens: a session that goes on, or a cached prefix"
        elif step.tokens[name] < tokens:
            reason = "the prompt does not arrive whole (chunked prefill)"
        elif request.config is not None and request.prompt < request.config.min_tokens:
            reason = "below min_tokens"  # whatever was generated before a preemption
        if reason is None and request.config is not None:
            step.dropping[name] = request.config
        else:
            step.dense[name] = reason or "no options"

    def ordered(self, names: Sequence[str] | None = None) -> None:
        """Note the order of the requests in the stream, once the runner knows it."""
        if self.step is None or self.step.order:
            return
        if names is None:
            assert self.ask_order is not None
            names = self.ask_order()
        self.step.order = list(names)
        ends = torch.tensor([0, *(self.step.tokens[name] for name in names)]).cumsum(0).tolist()
        self.step.bounds = list(itertools.pairwise(ends))

    def end(self) -> None:
        """After the forward."""
        step, self.step = self.step, None
        if step is None or not self.counting:
            return
        for name in [name for name in step.dropping if name not in step.kept]:
            del step.dropping[name]
            step.dense[name] = "the step replayed a CUDA graph, which drops nothing"
        self.last = step
        for watcher in self.watchers:
            watcher.append(step)
        if self.count is not None:
            self.count(step)
        for name, reason in step.dense.items():
            log.debug("request %s stays dense: %s", name, reason)
        for name in step.dropping:
            kept = [len(rows) for rows in step.kept.get(name, [])]
            log.debug("request %s kept %s of %d tokens", name, kept, step.tokens[name])

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Steps inside of the context are seen by nobody: the engine warms up."""
        self.counting = False
        try:
            yield
        finally:
            self.counting = True

    def lost(self, names: Sequence[str], segment: int) -> list[int]:
        """By request, how many tokens the caches of a segment (1: behind the first drop) lack."""
        found = (self.requests.get(name) for name in names)
        return [r.dropped[segment - 1] if r is not None and segment <= len(r.dropped) else 0 for r in found]


_current: list[weakref.ref[Steps]] = []  # the compiled model holds it


def current() -> Steps | None:
    """The engine in this process that was asked to drop, None without one."""
    return _current[-1]() if _current else None


def current_of(runner: Any) -> Steps | None:
    """The same if that is the engine of a runner of vLLM; another one in this process is left as it is."""
    steps = current()
    if steps is None or runner.vllm_config.compilation_config.static_forward_context is not steps.layers:
        return None
    steps.runner = weakref.ref(runner)
    return steps


def install(steps: Steps) -> None:
    """Make `steps` those of the engine in this process.

    Raises:
        RuntimeError: another engine in this process drops tokens: which one a step is of could not be told.
    """
    gc.collect()  # an engine that is gone leaves cycles
    before = current()
    if before is not None and before.runner() is not None:
        raise RuntimeError(
            "uniprefill: a second engine in one process asks for dropping; run each in a process of its own "
            "(VLLM_ENABLE_V1_MULTIPROCESSING=1), or end the first one before (llm.llm_engine.engine_core.shutdown())"
        )
    _current[:] = [weakref.ref(steps)]


def last_step() -> Step | None:
    """The last forward of the engine in this process, for tests: what stayed dense and why, and what was kept."""
    steps = current()
    return None if steps is None else steps.last


@contextlib.contextmanager
def watched() -> Iterator[list[Step]]:
    """Every step of the engine in this process, inside of the context."""
    seen: list[Step] = []
    steps = current()
    if steps is None:
        raise RuntimeError("no engine in this process drops tokens (VLLM_ENABLE_V1_MULTIPROCESSING=0?)")
    steps.watchers.append(seen)
    try:
        yield seen
    finally:
        steps.watchers.remove(seen)
