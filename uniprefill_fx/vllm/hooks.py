"""Where vLLM's model runners tell what a step computes: its requests, and their order in the stream.

No interface of vLLM hands that to a compile backend. The methods below are wrapped once an engine asks for dropping,
and never otherwise. Both runners take a `SchedulerOutput`; the older one keeps the order of requests in its
`input_batch`, the newer one returns it from `prepare_inputs`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from uniprefill_fx.vllm.steps import current

RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
_wrapped: set[type] = set()


def install() -> None:
    """Wrap the runners of this vLLM."""
    for module in RUNNERS:
        try:
            runner: Any = importlib.import_module(module).GPUModelRunner
        except ImportError:  # a build without the kernels that one of them needs
            continue
        if runner in _wrapped:
            continue
        _wrapped.add(runner)
        runner.execute_model = _execute(runner.execute_model)
        if hasattr(runner, "prepare_inputs"):
            runner.prepare_inputs = _prepare(runner.prepare_inputs)


def _execute(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        steps = current()
        if steps is None or kwargs.get("dummy_run") or (len(args) > 1 and args[1]):
            return original(self, scheduler_output, *args, **kwargs)
        older = hasattr(self, "input_batch")
        steps.begin(scheduler_output, (lambda: list(self.input_batch.req_ids)) if older else None)
        try:
            return original(self, scheduler_output, *args, **kwargs)
        finally:
            steps.end()

    return execute_model


def _prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = original(self, *args, **kwargs)
        steps = current()
        if steps is not None:
            steps.ordered(list(batch.req_ids))
        return batch

    return prepare_inputs
