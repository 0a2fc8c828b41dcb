"""What an engine may not be asked for together with dropping is said at its start; vLLM alone is left as it is."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import ROOT
from tiny import tiny_gemma3, tiny_llama

import uniprefill_fx
from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.vllm import engine_args
from uniprefill_fx.vllm.options import as_engine_compiles

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm (make test-vllm)")
# by name: changed keyword arguments, and words of the message
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "prefix caching": ({"enable_prefix_caching": True}, "prefix caching"),
    "speculation": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}}, "speculative",
    ),
    "connector": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, "KV connector",
    ),
    "adapters": ({"enable_lora": True}, "LoRA"),
    "pipeline": ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
    "data": ({"data_parallel_size": 2}, "data parallelism"),
    "expert": ({"enable_expert_parallel": True}, "expert parallelism"),
    "context": ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "parallelism"),
    "mode": ({"compilation_config": {"mode": 1, "backend": "uniprefill_fx.vllm.backend"}}, "only mode 2"),
    "mode 3": ({"compilation_config": {"mode": 3, "backend": "uniprefill_fx.vllm.backend"}}, "Invalid backend"),
    "backend": ({"compilation_config": {"mode": 2, "backend": "eager"}}, "compilation backend 'eager'"),
    "option": ({"additional_config": {"uniprefill": {"pp": 0.5}}}, "Did you mean"),
    "warm-up": ({"additional_config": {"uniprefill": {"warm_up": 3}}}, "allowed: True or False"),
    "sparse": ({"additional_config": {"uniprefill": {"attention": "block_sparse"}}}, "is not served"),
}  # fmt: skip
# by name: fields of a finished configuration that are set then, as vLLM's CPU build refuses them itself before
CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"aux_output_config.enable_return_routed_experts": True}, "returned experts"),
    "experts, older vLLM": ({"model_config.enable_return_routed_experts": True}, "returned experts"),
}
CODE = """
import json, operator, sys
import vllm.config
stock = vllm.config.VllmConfig.__post_init__
from uniprefill_fx.vllm import plugin
plugin.register()
from uniprefill_fx.vllm.options import check
from vllm.engine.arg_utils import EngineArgs
found = {}
asked = json.loads(sys.stdin.read())
for name, arguments in asked["cases"].items():
    try:
        config = EngineArgs(**arguments).create_engine_config()
        if name == "graphs":  # which vLLM takes back on a CPU
            config.compilation_config.cudagraph_mode = vllm.config.CUDAGraphMode.FULL
            check(config)
        found[name] = f"started with {config.compilation_config.backend}"
    except Exception as error:
        found[name] = str(error)
for name, changes in asked["changes"].items():
    config = EngineArgs(**asked["cases"]["asked"]).create_engine_config()
    check(config)
    for path, value in changes.items():
        home, _, field = path.rpartition(".")
        setattr(operator.attrgetter(home)(config), field, value)
    try:
        check(config)
        found[name] = "started"
    except Exception as error:
        found[name] = str(error)
print("RESULT" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What configurations answered, by name, all made in one process without an engine."""
    folders = {}
    for name, model in (("llama", tiny_llama(head_dim=32)), ("gemma", tiny_gemma3(head_dim=32))):
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
    common: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 512, "max_num_batched_tokens": 1024}
    cases: dict[str, Any] = {
        name: {"model": str(folders["llama"])} | common | engine_args(p=0.9) | changed
        for name, (changed, _) in REFUSED.items()
    }
    gemma = {"model": str(folders["gemma"])} | common
    cases["windows"] = gemma | engine_args(p=0.9) | {"disable_hybrid_kv_cache_manager": False}
    cases["positions"] = gemma | engine_args(p=0.9, window="position") | {"disable_hybrid_kv_cache_manager": True}
    cases["gemma"] = gemma | engine_args(p=0.9) | {"disable_hybrid_kv_cache_manager": True}
    cases["graphs"] = {"model": str(folders["llama"])} | common | engine_args(p=0.9)
    cases["asked"] = {"model": str(folders["llama"])} | common | engine_args(p=0.9)
    cases["stock"] = {"model": str(folders["llama"]), "enable_prefix_caching": True} | common
    environment = dict(os.environ, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1")
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        input=json.dumps({"cases": cases, "changes": {name: changes for name, (changes, _) in CHANGED.items()}}),
        capture_output=True,
        text=True,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-3000:]
    answers: dict[str, str] = json.loads(lines[0].removeprefix("RESULT"))
    return answers


@needs_vllm
@pytest.mark.parametrize("name", REFUSED | CHANGED)
def test_refused_at_start(name: str, said: dict[str, str]) -> None:
    assert (REFUSED | CHANGED)[name][1] in said[name] and "started" not in said[name]


@needs_vllm
def test_windows_need_one_kind_of_blocks(said: dict[str, str]) -> None:
    assert "hybrid KV cache manager" in said["windows"] and "window='position'" in said["positions"]
    assert said["gemma"] == said["asked"] == "started with uniprefill_fx.vllm.backend"


@needs_vllm
def test_graphs_of_steps_with_prompts_are_refused(said: dict[str, str]) -> None:
    assert "cudagraph_mode FULL:" in said["graphs"] and "'FULL_DECODE_ONLY'" in said["graphs"]


@needs_vllm
def test_vllm_alone_is_left_as_it_is(said: dict[str, str]) -> None:
    assert said["stock"].startswith("started with ") and "uniprefill" not in said["stock"]


def test_importing_the_package_imports_no_vllm() -> None:
    code = "import sys, uniprefill_fx.vllm as v; v.engine_args(p=0.9); assert not {'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ, PYTHONPATH=str(ROOT)))


def test_options_are_checked_before_an_engine_is_built() -> None:
    with pytest.raises(uniprefill_fx.OptionError, match="sink_token"):
        engine_args(sink_token=3)
    assert engine_args(p=0.95)["additional_config"] == {"uniprefill": {"p": 0.95}}


def test_inductor_compiles_as_the_engine_says() -> None:
    engine = SimpleNamespace(
        inductor_compile_config={"size_asserts": False, "max_autotune": True, "combo_kernels": True}
    )
    config = as_engine_compiles(PrefillConfig.from_options({"inner_options": {"max_autotune": False}}), engine)
    assert dict(config.inner_options or {}) == {"size_asserts": False, "max_autotune": False}
    eager = PrefillConfig.from_options({"inner_backend": "eager"})
    assert as_engine_compiles(eager, engine).inner_options is None


def test_the_entry_point_is_declared() -> None:
    text = (Path(ROOT) / "pyproject.toml").read_text()
    assert '"vllm.general_plugins"]\nuniprefill = "uniprefill_fx.vllm.plugin:register"' in text


def test_serve_says_vllm_what_it_needs() -> None:
    from uniprefill_fx.vllm.serve import WHY, command_of

    command = command_of(["some/model", "--p", "0.9", "--option", "drop_layers=[3,5]", "--port", "8001"])
    assert command[:3] == ["vllm", "serve", "some/model"] and command[-2:] == ["--port", "8001"]
    given = json.loads(command[command.index("--additional-config") + 1])
    assert given == {"uniprefill": {"p": 0.9, "drop_layers": [3, 5]}}
    assert [flag for flag in command if flag in WHY] and set(WHY) <= set(command)
    cold = command_of(["some/model", "--p", "0.9", "--no-warm-up"])
    given = json.loads(cold[cold.index("--additional-config") + 1])
    assert given == {"uniprefill": {"p": 0.9, "warm_up": False}} and "--no-warm-up" not in cold
    with pytest.raises(uniprefill_fx.OptionError):
        command_of(["some/model", "--option", "drop_layer=3"])
