"""What is wrapped of vLLM, and that nothing else of the process changes by it. Needs vllm."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from checkpoints import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm (make test-vllm)")
CODE = """
import importlib, sys, types
import torch
from uniprefill_fx.vllm import hooks
from vllm import platforms
for module, _ in (*hooks.RUNNERS, hooks.GPU_WORKER):
    importlib.import_module(module)
event, stream = torch.cuda.Event, torch.cuda.Stream
cpu = platforms.current_platform
platforms.current_platform = types.SimpleNamespace(is_cpu=lambda: False)
hooks.install()
worker = getattr(sys.modules[hooks.GPU_WORKER[0]], hooks.GPU_WORKER[1])
assert worker.compile_or_warm_up_model.__wrapped__.__qualname__ == "Worker.compile_or_warm_up_model"
for module, name in hooks.RUNNERS:
    assert getattr(sys.modules[module], name).execute_model.__wrapped__
assert hooks.CPU_WORKER[0] not in sys.modules
assert torch.cuda.Event is event and torch.cuda.Stream is stream
platforms.current_platform = cpu
hooks.install()
worker = getattr(sys.modules[hooks.CPU_WORKER[0]], hooks.CPU_WORKER[1])
assert worker.compile_or_warm_up_model.__wrapped__.__qualname__ == "CPUWorker.compile_or_warm_up_model"
assert torch.cuda.Event is not event, "vLLM's CPU worker leaves CUDA's events alone now: this file can go"
"""


def test_vllms_cpu_worker_is_not_imported_on_a_gpu() -> None:
    """Its module puts placeholders in place of CUDA's events and streams, with which no graph is captured."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT), VLLM_LOGGING_LEVEL="ERROR")
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
