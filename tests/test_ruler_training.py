"""Texts and training of the decoder for RULER in `benchmarks/`."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import ROOT
from lm_harness import WITH_HARNESS, offline
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(ROOT / "benchmarks"))
texts: Any = importlib.import_module("ruler_prompts")
training: Any = importlib.import_module("train_ruler")

LINE = re.compile(r"One of the special magic (?:number|uuid)s for (.+) is: (.+)\.")
ASKED = re.compile(r"\nWhat is the special magic (number|uuid) for (.+?) mentioned")


@pytest.mark.parametrize("task", texts.TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("exam", [False, True])
def test_texts(task: Any, exam: bool) -> None:
    """Every answer is what the one line of its key says, token_bounds lie on what they name, an exam asks once."""
    rng = random.Random(3)
    for length in [512] * 20 + [1500] * 20:
        text, token_bounds = texts.write(rng, task, length, exam, repeats=(0.0, 0.5))
        assert len(text) <= length and token_bounds
        facts = LINE.findall(text)
        assert len(dict(facts)) == len(set(facts)), "a key has two values"
        asked = [key for _, key in ASKED.findall(text)]
        answers = [text[start:end] for start, end, kind in token_bounds if kind == texts.ANSWER]
        assert answers == [f" {dict(facts)[key]}{texts.STOP}" for key in asked]
        for start, end, kind in token_bounds:
            assert kind == texts.ANSWER or text[start:end] in text[:start]
        if exam:
            assert len(asked) == 1 and len(facts) == len(set(facts)) and text.endswith(answers[0])
            assert not task.noise or len(facts) == 1


def test_characters() -> None:
    """The tokenizer and the fast table agree, and a text comes back as it was."""
    tokenizer = texts.character_tokenizer()
    text, _ = texts.write(random.Random(0), texts.TASKS[1], 900, exam=True)
    assert tokenizer(text[:-1]).input_ids == texts.encode(text[:-1]).tolist()
    assert texts.encode(text)[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(texts.encode(text[:-1]).tolist()) == text[:-1]


def test_windows_in_chunks(tmp_path: Path) -> None:
    """What training computes is what transformers' own attention computes, also after the model was saved."""
    torch.manual_seed(0)
    model, record = training.load(None, small=True, device="cpu")
    ids = torch.randint(3, 99, (2, 3 * model.config.sliding_window))
    training.save(model, tmp_path, record)
    with torch.no_grad():
        chunked = training.logits(model, ids)
        model.config._attn_implementation = "sdpa"
        stock = model(input_ids=ids).logits
    torch.testing.assert_close(chunked, stock, rtol=0, atol=1e-5)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert saved.dtype == torch.bfloat16 and saved.config._attn_implementation == "sdpa"
    torch.testing.assert_close(saved.float()(input_ids=ids).logits, stock, rtol=0, atol=0.05)


@pytest.mark.slow
@WITH_HARNESS
@pytest.mark.parametrize("task", texts.TASKS, ids=lambda task: task.name)
def test_format_is_the_harness(task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness' own prompts, taken apart into lines and key, are rebuilt character for character."""
    offline(monkeypatch)
    import lm_eval
    from lm_eval.api.model import LM

    texts.character_tokenizer().save_pretrained(tmp_path)
    training.load(None, small=True, device="cpu")[0].config.save_pretrained(tmp_path)
    prompts: list[tuple[str, list[str]]] = []

    class Listener(LM):
        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            prompts.extend((request.args[0], request.doc["outputs"]) for request in requests)
            return ["" for _ in requests]

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    for length in (2048, 8192):
        lm_eval.simple_evaluate(
            Listener(),
            tasks=[task.name],
            limit=3,
            bootstrap_iters=0,
            metadata={"pretrained": str(tmp_path), "max_seq_lengths": [length]},
        )
    assert len(prompts) == 6
    for prompt, outputs in prompts:
        kind, key = ASKED.findall(prompt)[0]
        lines = prompt[: prompt.index("\nWhat is")].split("\n")[1:]
        assert (kind, prompt) == (task.kind, texts.prompt(kind, lines, key))
        facts = dict(LINE.findall(prompt))
        assert outputs == [facts[key]]
        assert set(lines) - {texts.NOISE} == {texts.needle(kind, *fact) for fact in facts.items()}
        assert (texts.NOISE in lines) == task.noise


@pytest.mark.slow
def test_trains_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss falls, and a second run goes on from the first. By a clock that counts its readings, two or more a step,
    so that the steps do not depend on the machine."""
    readings = itertools.count()
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: float(next(readings))))
    common = ["--small", "--every", "12", "--exams", "8", "--device", "cpu", "--no-compile", "--workers", "0"]
    training.main([*common, "--budget", "60", "--out", str(tmp_path / "a")])
    first = json.loads((tmp_path / "a" / "training.json").read_text())
    begun = first["history"][0]["answer_loss"]
    assert first["history"][-1]["answer_loss"] < 0.9 * begun
    training.main([*common, "--budget", "20", "--resume", str(tmp_path / "a"), "--out", str(tmp_path / "b")])
    second = json.loads((tmp_path / "b" / "training.json").read_text())
    assert second["steps"] > first["steps"] and second["history"][: len(first["history"])] == first["history"]
    assert len(second["history"]) > len(first["history"]) and second["history"][-1]["answer_loss"] < 0.9 * begun
    assert "niah_multikey_3" in capsys.readouterr().out
