"""Where vLLM's model runners tell what a step computes: its requests, and their order in the stream.

No interface of vLLM hands that to a compile backend. The methods below are wrapped once an engine asks for dropping,
and never otherwise. Both runners take a `SchedulerOutput`; the older one keeps the order of requests in its
`input_batch`, the newer one returns it from `prepare_inputs`.

Workers are wrapped where they warm up: prompts that drop come first, and none of what is computed then is counted.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from uniprefill_fx.vllm.steps import current_of
from uniprefill_fx.vllm.warm_up import warm_up

RUNNERS = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner"),
)
GPU_WORKER, CPU_WORKER = ("vllm.v1.worker.gpu_worker", "Worker"), ("vllm.v1.worker.cpu_worker", "CPUWorker")
_wrapped: set[type] = set()


def install() -> None:
    """Wrap the runners and the workers of this vLLM."""
    for runner in _not_yet_wrapped(RUNNERS):
        runner.execute_model = _execute(runner.execute_model)
        if hasattr(runner, "prepare_inputs"):
            runner.prepare_inputs = _prepare(runner.prepare_inputs)
    # Asked first: to import vLLM's CPU worker puts placeholders in place of CUDA's streams and events.
    from vllm.platforms import current_platform

    for worker in _not_yet_wrapped([CPU_WORKER if current_platform.is_cpu() else GPU_WORKER]):
        worker.compile_or_warm_up_model = _warm_up(worker.compile_or_warm_up_model)


def _not_yet_wrapped(classes: Iterable[tuple[str, str]]) -> Iterator[Any]:
    for module, name in classes:
        try:
            found = getattr(importlib.import_module(module), name)
        except ImportError:  # a build without the kernels that it needs
            continue
        if found not in _wrapped:
            _wrapped.add(found)
            yield found


def _execute(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        steps = current_of(self)
        if steps is None or kwargs.get("dummy_run") or (len(args) > 1 and args[1]):
            return original(self, scheduler_output, *args, **kwargs)
        older = hasattr(self, "input_batch")
        steps.begin(scheduler_output, (lambda: list(self.input_batch.req_ids)) if older else None)
        try:
            output = original(self, scheduler_output, *args, **kwargs)
        except BaseException:
            steps.step = None  # the engine is lost, and nothing of this step happened
            raise
        finally:
            steps.ask_order = None  # which holds the runner
        steps.end()
        return output

    return execute_model


def _prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = original(self, *args, **kwargs)
        steps = current_of(self)
        if steps is not None:
            steps.ordered(list(batch.req_ids))
        return batch

    return prepare_inputs


def _warm_up(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile_or_warm_up_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps = current_of(self.model_runner)
        if steps is None:
            return original(self, *args, **kwargs)
        with steps.uncounted():
            if steps.warm_up and steps.drops:
                warm_up(self, steps)  # before vLLM frees what that took, captures its graphs and resets its seed
            return original(self, *args, **kwargs)

    return compile_or_warm_up_model
