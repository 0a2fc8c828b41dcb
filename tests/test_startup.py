"""torch's on-disk caches: a second start finds what the first one compiled, and only what this version compiled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import options_of
from tiny import LLAMA, tiny_llama, token_ids
from torch import fx
from torch._inductor.codecache import FxGraphHashDetails

import uniprefill_fx
from uniprefill_fx.lowering import cache_tag

START = """
import json, sys
import torch
import uniprefill_fx
from exactness import options_of
from tiny import LLAMA, tiny_llama, token_ids
from uniprefill_fx.lowering import cache_tag

if sys.argv[1:]:
    cache_tag._hash = lambda folder: sys.argv[1]
torch.set_num_threads(1)
model = tiny_llama(3)
uniprefill_fx.compile(model, **options_of(LLAMA, inner_backend="inductor"))
with torch.inference_mode():
    out = model.generate(token_ids(300), max_new_tokens=3, do_sample=False)
assert uniprefill_fx.last_call().dropped
counters = torch._dynamo.utils.counters
print(json.dumps([out.tolist(), counters["aot_autograd"], counters["inductor"]]))
"""


def start(caches: Path, *tag: str) -> tuple[Any, dict[str, int], dict[str, int]]:
    """A process that compiles a prefill and a decode step: its tokens, and torch's counts of cache hits."""
    paths = os.pathsep.join((str(Path(__file__).parent), str(Path(uniprefill_fx.__file__).parents[1])))
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(caches), "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", START, *tag], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    tokens, autograd, inductor = json.loads(done.stdout.splitlines()[-1])
    return tokens, autograd, inductor


@pytest.mark.slow
def test_a_second_start_hits_the_caches(tmp_path: Path) -> None:
    """All graphs, dropped pieces and decode steps; and none with operators of another version."""
    tokens, autograd, inductor = start(tmp_path)
    graphs = autograd["autograd_cache_miss"]
    assert graphs >= 3 and "autograd_cache_bypass" not in autograd and "autograd_cache_hit" not in autograd
    assert autograd["autograd_cache_saved"] == graphs
    again, autograd, inductor = start(tmp_path)
    assert again == tokens
    assert autograd["autograd_cache_hit"] == inductor["fxgraph_cache_hit"] == graphs
    assert not {"autograd_cache_miss", "autograd_cache_bypass"} & autograd.keys()
    other, autograd, inductor = start(tmp_path, "another version")
    assert other == tokens
    assert autograd["autograd_cache_miss"] == graphs
    assert "autograd_cache_hit" not in autograd and "fxgraph_cache_hit" not in inductor


def test_the_tag_follows_the_operators(tmp_path: Path) -> None:
    copy = tmp_path / "ops"
    shutil.copytree(cache_tag.SOURCES, copy)
    before = cache_tag._hash(copy)
    assert before == cache_tag._hash(cache_tag.SOURCES) and before in cache_tag.tag()
    source = copy / "gather.py"
    source.write_text(source.read_text().replace("int fill=0", "int filling=0"))
    renamed = cache_tag._hash(copy)
    source.rename(copy / "moved.py")
    assert len({before, renamed, cache_tag._hash(copy)}) == 3


def test_the_tag_is_in_torchs_key_and_keeps_the_users() -> None:
    config: Any = torch.compiler.config
    with config.patch(cache_key_tag="mine"), cache_tag.tagged():
        key: Any = FxGraphHashDetails(None, [], {}, []).cache_key_tag
        assert key.startswith("mine;") and cache_tag.tag() in key
    assert config.cache_key_tag == ""


@pytest.mark.usefixtures("fresh_dynamo")
def test_all_that_is_compiled_has_the_tag() -> None:
    """Pieces, dense prompts and decode steps."""
    tags = []

    def inner(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        config: Any = torch.compiler.config
        tags.append(config.cache_key_tag)
        return gm.forward

    model = tiny_llama(2)
    uniprefill_fx.compile(model, **options_of(LLAMA, drop_layers=[0], inner_backend=inner))
    with torch.inference_mode():
        model.generate(token_ids(300), max_new_tokens=2, do_sample=False)
        with uniprefill_fx.disabled():
            model.generate(token_ids(300), max_new_tokens=1, do_sample=False)
    assert len(tags) >= 4 and all(cache_tag.tag() in tag for tag in tags)
    assert cache_tag.tag() not in torch.compiler.config.cache_key_tag


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("batch", [1, 2])
def test_the_layers_are_traced_once(batch: int) -> None:
    """Sizes are known to be numbers before the first layer, so the trace that is thrown away is a short one."""
    ids = token_ids(300).repeat(batch, 1)
    calls = {}
    for backend in ("eager", "uniprefill"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        options = options_of(LLAMA) if backend == "uniprefill" else None
        with torch.inference_mode():
            model = torch.compile(tiny_llama(6), backend=backend, options=options)
            model(ids, attention_mask=torch.ones_like(ids), logits_to_keep=1)
        calls[backend] = torch._dynamo.utils.counters["stats"]["calls_captured"]
    record = uniprefill_fx.last_call()
    assert record is not None and record.dropped
    assert calls["eager"] < calls["uniprefill"] < 1.2 * calls["eager"]
