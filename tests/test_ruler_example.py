"""The checkpoint in `examples/ruler-gemma3` answers RULER's needle tasks, and `examples/ruler.py` measures it."""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ROOT
from lm_harness import WITH_HARNESS, offline
from transformers import AutoModelForCausalLM, AutoTokenizer

import uniprefill_fx

sys.path.insert(0, str(ROOT / "benchmarks"))
texts: Any = importlib.import_module("ruler_prompts")

CHECKPOINT = ROOT / "examples" / "ruler-gemma3"


@pytest.mark.slow
def test_checkpoint_answers() -> None:
    """Whole answers from `generate()`, dense and with tokens dropped at both of `auto`'s layers."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    uniprefill_fx.compile(model, inner_backend="eager", min_tokens=0, p=0.9, block_size=32)
    for task, length in zip(texts.TASKS, (1500, 1200, 1400), strict=True):
        text, token_bounds = texts.write(random.Random(length), task, length, exam=True)
        start, end, _ = token_bounds[-1]
        ids = torch.tensor([tokenizer(text[:start]).input_ids])
        for dense in (True, False):
            with torch.inference_mode(), uniprefill_fx.disabled() if dense else contextlib.nullcontext():
                out = model.generate(ids, max_new_tokens=end - start, do_sample=False)
            assert tokenizer.decode(out[0, start:]) == text[start : end - 1] + tokenizer.eos_token
            call = uniprefill_fx.last_call()
            assert call is not None and call.tokens == start and call.dropped is not dense
            assert dense or start > call.num_tokens[4] > call.num_tokens[7] > 256, call


@pytest.mark.slow
@WITH_HARNESS
def test_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By the real harness every answer is right, dense and dropped; p = 0.95 takes tokens of every prompt."""
    offline(monkeypatch)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    out = tmp_path / "scores.json"
    tasks = [task.name for task in texts.TASKS]
    argv = ["--model", str(CHECKPOINT), "--tasks", *tasks, "--lengths", "4096", "--limit", "2", "--p", "0.99", "0.95"]
    importlib.import_module("ruler").main([*argv, "--device", "cpu", "--inner-backend", "eager", "--out", str(out)])
    sys.modules.pop("ruler", None)
    report = json.loads(out.read_text())
    assert (report["limit"], report["device"], report["torch"]) == (2, "cpu", torch.__version__)
    assert [(row["task"], row["length"]) for row in report["rows"]] == [(task, 4096) for task in tasks]
    for row in report["rows"]:
        assert row["dense"] == {"score": 1.0, "prompts": 2, "dropped": 0, "compute": 1.0}
        most, least = row["uniprefill"]
        assert (most["p"], least["p"]) == (0.99, 0.95)
        assert (most["score"], most["prompts"], least["score"], least["prompts"]) == (1.0, 2, 1.0, 2)
        assert least["dropped"] == 2 and 0.5 < least["compute"] < most["compute"] <= 1
    printed = capsys.readouterr().out
    assert all(printed.count(f"\n{task} ") == 2 for task in tasks), "a line for each p"
