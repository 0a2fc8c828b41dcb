"""Inside vLLM's CPU build: every answer is that of the eager reference for the request alone. Needs vllm."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_reference import EagerReference
from serving_cases import OPTIONS, check, prompt, run, serve, spec_of
from tiny import tiny_llama

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm (make test-vllm)")
LLAMA: dict[str, Any] = {"layers": 4, "hidden_size": 128, "head_dim": 32, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model, folder = tiny_llama(**LLAMA), tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return model, folder


def test_mixed_steps_and_reused_blocks(llama: tuple[Any, Path]) -> None:
    """Prompts of several lengths arrive while others decode, in a cache that holds three of them at once."""
    model, folder = llama
    requests: dict[str, Any] = {
        "alone": {"prompt": prompt(400, 0), "max_tokens": 32},
        "short": {"prompt": prompt(50, 1), "max_tokens": 6, "add_at": 3},
        "long": {"prompt": prompt(700, 2), "max_tokens": 12, "add_at": 3},
        "late": {"prompt": prompt(301, 3), "max_tokens": 12, "add_at": 5},
        "several": {"prompt": prompt(200, 4), "max_tokens": 5, "n": 2, "temperature": 1.0, "add_at": 34},
        "aborted": {"prompt": prompt(350, 5), "max_tokens": 20, "add_at": 35, "abort_at": 37},
        "own": {"prompt": prompt(333, 6), "extra_args": {"uniprefill": {"p": 0.5}}, "add_at": 36},
        "off": {"prompt": prompt(260, 7), "extra_args": {"uniprefill": False}, "add_at": 36},
        "asks": {"prompt": prompt(220, 8), "prompt_logprobs": 1, "add_at": 38},
        "reuses": {"prompt": prompt(640, 9), "add_at": 40},
        "again": {"prompt": prompt(500, 10), "add_at": 42},
    }
    served = serve(folder, requests, num_gpu_blocks_override=60)
    assert check(model, served, requests) >= 8
    reasons = {p["request"].split("-")[0]: p["dense"] for p in served["prefills"]}
    assert reasons["short"] == "below min_tokens" and reasons["off"] == "disabled by the request"
    assert "log-prob" in reasons["asks"] and reasons["alone"] is None
    assert served["counts"]["uniprefill:requests_dense_totalbelow min_tokens"] == 1
    kept, of = (served["counts"][f"uniprefill:{name}_tokens_total"] for name in ("kept", "prompt"))
    assert 0 < kept < of == sum(p["tokens"] for p in served["prefills"] if p["dense"] is None)
    assert any(1 in sizes and max(sizes) > 100 for sizes in served["steps"])  # decoding beside a prompt


def over_http(xargs: dict[str, Any]) -> Any:
    """What vLLM's server hands to the engine of a completion's `vllm_xargs`."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    return CompletionRequest(model="m", prompt="x", vllm_xargs=xargs).to_sampling_params(8, {}).extra_args


def test_options_of_requests(llama: tuple[Any, Path]) -> None:
    """How much is kept is what the request says; one that is not understood stays dense, and the engine lives."""
    model, folder = llama
    own: dict[str, Any] = {
        "plain": {}, "ratio": {"keep_ratio": 0.3}, "preset": {"preset": "fast"}, "sharp": {"p": 0.3},
        "large": {"block_size": 2**63}, "sinks": {"sink_tokens": 2**63}, "mixed": {1: 2, "a": 3},
        "block": {"block_size": 2**31 - 1},
    }  # fmt: skip
    requests: dict[str, Any] = {
        name: {"prompt": prompt(300, 40), "extra_args": {"uniprefill": options}} for name, options in own.items()
    }
    for name, sent in {"sharp": json.dumps(own["sharp"]), "off": False}.items():  # as a client of the server does
        requests[name] = {"prompt": prompt(300, 40), "extra_args": over_http({"uniprefill": sent})}
    as_p = {"preset": {"p": [0.8, 0.7]}}  # at depths 2/4 and 3/4
    by_hand = {
        name: request | {"extra_args": {"uniprefill": as_p.get(name, own.get(name))}}
        for name, request in requests.items()
    }
    served = serve(folder, requests)
    assert check(model, served, by_hand) >= 3
    found = {p["request"].split("-")[0]: p for p in served["prefills"]}
    for name in own:
        bad = name in ("large", "sinks", "mixed")
        assert found[name]["dense"] == ("options that are not understood" if bad else None)
    assert found["off"]["dense"] == "disabled by the request"
    assert len({str(found[name]["kept"]) for name in ("plain", "ratio", "preset", "sharp")}) == 4


def test_preempted_requests_resume(llama: tuple[Any, Path]) -> None:
    model, folder = llama
    requests = {f"r{i}": {"prompt": prompt(240 + i, 20 + i), "max_tokens": 40} for i in range(4)}
    served = serve(folder, requests, num_gpu_blocks_override=18, block_size=64)
    assert check(model, served, requests) > len(requests), "nothing was preempted"


@pytest.mark.slow
def test_a_session_goes_on_behind_what_was_dropped(llama: tuple[Any, Path]) -> None:
    """Each turn's tokens see the keys that the turns before left. vLLM hands each turn in as a new request."""
    model, folder = llama
    turns, made = [prompt(400, 50), prompt(90, 51), prompt(150, 52)], 4
    served = run("serving_session.py", folder, {"options": OPTIONS, "turns": turns, "made": made})
    assert not isinstance(served, str), served[-3000:]
    assert [bool(p["kept"]) for p in served["prefills"]] == [True, False, False]
    reference = EagerReference(model, spec_of(OPTIONS))
    for i, (turn, found) in enumerate(zip(turns, served["turns"], strict=True)):
        ids = torch.tensor([turn])
        logits = reference.step(ids)[0, -1] if i else reference.prefill(ids).last_logits[0, -1]
        for j, (token, logprobs) in enumerate(found):
            assert token == int(logits.argmax())
            want = logits.log_softmax(-1)
            assert all(abs(value - float(want[int(key)])) < 1e-4 for key, value in logprobs.items())
            if j < made - 1:  # the last one is no input of anything
                logits = reference.step(torch.tensor([[token]]))[0, -1]


def test_prompts_in_chunks_stay_dense(llama: tuple[Any, Path]) -> None:
    model, folder = llama
    requests = {f"r{i}": {"prompt": prompt(length, 30 + i)} for i, length in enumerate((200, 300, 120))}
    served = serve(folder, requests, enable_chunked_prefill=True, max_num_batched_tokens=256)
    dropped = check(model, served, requests)
    whole = "the prompt does not arrive whole (chunked prefill)"
    assert served["counts"][f"uniprefill:requests_dense_total{whole}"] >= 1 and dropped >= 1


@pytest.mark.slow
def test_compiled_by_inductor_before_the_first_request(llama: tuple[Any, Path]) -> None:
    model, folder = llama
    options = OPTIONS | {"inner_backend": "inductor", "p": [0.9, 0.6]}
    requests = {f"r{i}": {"prompt": prompt(n, 40 + i), "add_at": i} for i, n in enumerate((300, 460, 40))}
    served = serve(folder, requests, options)
    assert check(model, served, requests, options) == 2
    at_start, at_end = served["compilations"]
    assert at_start == at_end == 5, "a request compiled"  # pieces before, between and behind attention and selections
    assert sum(value for name, value in served["counts"].items() if "dropped_total" in name) == 2  # no warm-up
