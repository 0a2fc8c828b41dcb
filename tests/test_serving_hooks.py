"""What is wrapped of vLLM, and that nothing else of the process changes by it. Needs vllm."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import ROOT
from eager_reference import EagerReference
from serving_cases import OPTIONS, prompt, spec_of
from tiny import tiny_llama

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


ENGINES = """
import json, sys
import serving_worker
from vllm import LLM, SamplingParams
import uniprefill_fx.vllm as served
from uniprefill_fx.vllm import plugin
plugin.register()
folder, options, prompt = json.loads(sys.argv[1])
params = SamplingParams(max_tokens=4, temperature=0.0, detokenize=False, ignore_eos=True)
for p in (0.8, 0.5):
    llm = LLM(folder, **(serving_worker.ENGINE | served.engine_args(**(options | {"p": p}))))
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    print("ANSWER" + json.dumps(list(answer.outputs[0].token_ids)))
    llm.llm_engine.engine_core.shutdown()
    del llm, answer
"""


@pytest.mark.slow
def test_an_engine_after_another_in_one_process(tmp_path: Path) -> None:
    model = tiny_llama(4, hidden_size=128, head_dim=32, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    ids = prompt(400, 60)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    asked = json.dumps([str(tmp_path), OPTIONS, ids])
    done = subprocess.run([sys.executable, "-c", ENGINES, asked], capture_output=True, text=True, env=environment)
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    want = [EagerReference(model, spec_of(OPTIONS | {"p": p})).generate(torch.tensor([ids]), 4)[0] for p in (0.8, 0.5)]
    assert found == [tokens[0].tolist() for tokens in want], done.stderr[-3000:]
