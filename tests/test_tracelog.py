"""Log lines under TORCH_LOGS, and artifacts in torch's structured trace."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from tiny import tiny_llama, token_ids
options = {"drop_layers": [1], "p": 0.7, "block_size": 16, "last_n": 16, "sink_tokens": 16}
options |= {"min_tokens": 0, "inner_backend": "eager"}
model = torch.compile(tiny_llama(), backend="uniprefill", options=options)
with torch.inference_mode():
    model(token_ids(300), logits_to_keep=1)
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Standard error under TORCH_LOGS, and the folder of TORCH_TRACE."""
    folder = tmp_path_factory.mktemp("trace")
    tests = Path(__file__).resolve().parent
    environment = os.environ | {
        "TORCH_LOGS": "+uniprefill_fx",
        "TORCH_TRACE": str(folder),
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr, folder


def test_log_lines(logs: tuple[str, Path]) -> None:
    text, _ = logs
    assert re.search(r"graph of 3 layers, prefill: drops after \[1\]; .*drop tokens [\d.]+ s", text)
    assert "rewritten graph:" in text and "uniprefill.select" in text
    assert "dropped: 300 tokens, compute" in text


def test_artifacts(logs: tuple[str, Path]) -> None:
    """Each artifact is a line of metadata, and its payload in the indented lines that follow."""
    (trace,) = logs[1].iterdir()
    lines = trace.read_text(encoding="utf-8").splitlines()
    payloads: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in lines:
        if line.startswith("\t"):
            if current is not None:
                current.append(line[1:])
            continue
        current = None
        entry = json.loads(line[line.index("{") :])
        name = entry.get("artifact", {}).get("name", "")
        if name.startswith("uniprefill_"):
            current = payloads.setdefault(name, [])
    plan = json.loads("\n".join(payloads["uniprefill_plan"]))
    assert plan["drops"] == {"1": {"p": 0.7, "keep_ratio": None}} and plan["layers"] == 3 and plan["prefill"]
    assert plan["attention"] == {"0": "full", "1": "full", "2": "full"} and not plan["refusals"]
    assert any("uniprefill.compact" in line for line in payloads["uniprefill_rewritten"])
