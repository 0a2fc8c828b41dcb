"""The package changes nothing for eager models and other backends, and its caches never answer wrongly there."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ROOT
from eager_reference import DropSpec, EagerReference
from exactness import assert_dropped, assert_near, options_of
from tiny import LLAMA, tiny_gemma3, tiny_llama, token_ids

import uniprefill_fx
from uniprefill_fx import CompactCacheError

GEMMA = DropSpec((1, 3), p=(0.9, 0.8), block_size=8, last_n=16, sink_tokens=8)
MODELS: dict[str, tuple[Callable[[], Any], DropSpec]] = {"llama": (tiny_llama, LLAMA), "gemma3": (tiny_gemma3, GEMMA)}

RECORD = """if True:
    import json, sys, torch
    from tiny import tiny_gemma3, tiny_llama, token_ids
    torch.set_num_threads(1)
    config = torch._dynamo.config
    def settings():
        return {name: repr(value) for name, value in config.get_config_copy().items()}
    before = settings()
    if sys.argv[1] == "with":
        import uniprefill_fx
        from exactness import options_of
        from tiny import LLAMA
        for way in ("ours", "explain"):
            model = tiny_llama()
            with torch.inference_mode():
                if way == "explain":
                    uniprefill_fx.explain(model, token_ids(300), **options_of(LLAMA))
                else:
                    model.compile(backend="uniprefill", options=options_of(LLAMA))
                    model.generate(token_ids(300), max_new_tokens=3)
        assert uniprefill_fx.last_call().dropped
    found = {"settings": before == settings(), "codes": [], "outputs": []}
    def backend(gm, inputs):
        found["codes"].append([gm.code, [str(n.meta.get("example_value")) for n in gm.graph.nodes]])
        return gm.forward
    for build in (tiny_llama, tiny_gemma3):
        for dynamic in (None, True):
            torch._dynamo.reset()
            model, ids = build(), token_ids(100)
            with torch.inference_mode():
                out = torch.compile(model, backend=backend, dynamic=dynamic)(ids)
                eager = model(ids)
                again = torch.compile(model, backend=backend)(ids[:, :1].clone(), past_key_values=out.past_key_values)
            found["outputs"] += [t.double().sum().item() for t in (out.logits, eager.logits, again.logits)]
            found["outputs"].append([type(layer).__name__ for layer in out.past_key_values.layers])
    print(json.dumps(found))
"""


def record(mode: str) -> dict[str, Any]:
    command = [sys.executable, "-c", RECORD, mode]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT / "tests").stdout
    found: dict[str, Any] = json.loads(done.splitlines()[-1])
    return found


def test_graphs_and_outputs_of_others_and_dynamo_settings_stay_the_same() -> None:
    """Another backend traces what it traced before the package was imported and used."""
    plain, used = record("without"), record("with")
    assert plain["settings"] and used["settings"]
    assert len(plain["codes"]) == len(used["codes"]) >= 8
    for was, now in zip(plain["codes"], used["codes"], strict=True):
        assert was == now
        assert "uniprefill" not in now[0]
    assert plain["outputs"] == used["outputs"]


@pytest.fixture(scope="module", params=MODELS)
def prompt(request: pytest.FixtureRequest) -> Iterator[tuple[Any, DropSpec, Any]]:
    """A model compiled for us with the function that makes another, its spec, and a compact cache of 300 tokens."""
    build, spec = MODELS[request.param]
    torch._dynamo.reset()
    model = build()
    model.compile(backend="uniprefill", options=options_of(spec))
    yield model, spec, build
    torch._dynamo.reset()


def other(model: Any, how: str) -> Any:
    """The same model as eager code, or as another backend compiles it."""
    return model if how == "eager" else torch.compile(model, backend=how, dynamic=True)


@torch.inference_mode()
def exact_or_refused(run: Callable[[], Any], want: torch.Tensor) -> str:
    try:
        got = run().logits
    except CompactCacheError as error:
        assert "uniprefill" in str(error)
        return "refused"
    assert_near(got, want)
    return "exact"


@pytest.mark.parametrize("count", [1, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_compact_cache_handed_to_others_is_refused_or_answered_exactly(prompt: Any, how: str, count: int) -> None:
    model, spec, build = prompt
    ids, more = token_ids(300), token_ids(count, seed=1)
    with torch.inference_mode():
        cache = model(ids, logits_to_keep=1).past_key_values
    call = uniprefill_fx.last_call()
    assert call is not None
    assert_dropped(call)
    reference = EagerReference(build(), spec)
    reference.prefill(ids)
    want = reference.step(more)
    untouched = copy.deepcopy(cache)
    outcome = exact_or_refused(lambda: other(build(), how)(more, past_key_values=cache), want)
    assert outcome == "exact" or how != "eager"  # eager code reads the rows by their positions
    with torch.inference_mode():  # and the one it belongs to still answers
        assert_near(model(more, past_key_values=untouched).logits, want)


@pytest.mark.parametrize("how", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_cache_that_holds_every_token_works_with_others(prompt: Any, how: str) -> None:
    model, _, build = prompt
    ids = token_ids(300)
    with torch.inference_mode(), uniprefill_fx.disabled():
        cache = model(ids, logits_to_keep=1).past_key_values
    call = uniprefill_fx.last_call()
    assert call is not None and not call.dropped
    dense = EagerReference(build(), None)
    dense.prefill(ids)
    run = other(build(), how)
    with torch.inference_mode():
        for count in (1, 5, 1):
            more = token_ids(count, seed=count)
            assert_near(run(more, past_key_values=cache).logits, dense.step(more))
    more = token_ids(3, seed=9)
    with torch.inference_mode():  # back to the model it came from
        assert_near(model(more, past_key_values=cache).logits, dense.step(more))


def test_other_prompts_of_an_eager_model_are_as_ever(prompt: Any) -> None:
    _, _, build = prompt
    ids = token_ids(300)
    got = build().generate(ids, max_new_tokens=4, do_sample=False)
    tokens, _ = EagerReference(build(), None).generate(ids, 4)
    assert torch.equal(got[:, 300:], tokens[:, : got.shape[1] - 300])


def test_the_folder_kernels_is_no_package_named_kernels() -> None:
    """transformers looks a package of that name up. A folder without `__init__.py` has no loader and loses to a package
    that is installed, so that transformers takes it for absent."""
    code = "import importlib.util as u, transformers.utils as t; s = u.find_spec('kernels'); "
    code += "print(s and s.origin, t.is_kernels_available())"
    for place in (ROOT, ROOT / "tests", ROOT / "kernels"):
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=place)
        assert done.stdout.split() == ["None", "False"]
    assert importlib.util.find_spec("uniprefill_fx.kernels.block_scores.kernel") is not None


def test_an_installed_package_named_kernels_wins_over_the_folder(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    code = "import kernels; print(kernels.__file__)"
    environment = dict(os.environ, PYTHONPATH=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.stdout.strip() == str(tmp_path / "kernels" / "__init__.py")
