"""`python -m uniprefill_fx`: each command on the checkpoint of the examples, and errors that say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ROOT
from eager_reference import DropSpec, EagerReference
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from uniprefill_fx.cli import main

MODEL = ROOT / "examples" / "needle-gemma3"
OPTIONS = ["--p", "0.9,0.8", "--option", "block_size=16", "--option", "min_tokens=0"]
SPEC = DropSpec((2, 5), p=(0.9, 0.8), block_size=16)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers_logging.disable_progress_bar()
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def prompt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """512 token ids of a needle prompt, as the model has no tokenizer."""
    sys.path.insert(0, str(ROOT / "examples"))
    from needle_prompts import needle_prompt

    path = tmp_path_factory.mktemp("prompt") / "ids.txt"
    path.write_text(" ".join(map(str, needle_prompt(512, facts=4).ids[0].tolist())))
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    """A command with --json: what it printed; nothing else is on standard output."""
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def ids_of(prompt: Path) -> torch.Tensor:
    return torch.tensor([list(map(int, prompt.read_text().split()))])


def reference() -> EagerReference:
    return EagerReference(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval(), SPEC)


def test_explain(prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    found = run(capsys, "explain", "--model", str(MODEL), "--prompt-file", str(prompt), *OPTIONS, "--html", str(page))
    kept = {str(layer): len(rows) for layer, rows in reference().prefill(ids_of(prompt)).kept.items()}
    assert found["dropped"] and found["kept"] == kept and found["tokens"] == 512
    assert found["drops"] == {"2": {"p": 0.9, "keep_ratio": None}, "5": {"p": 0.8, "keep_ratio": None}}
    assert found["attention"]["0"] == "sliding window 256" and found["attention"]["2"] == "full"
    assert 0 < found["flops_saved"] < 1 and 0 < found["kv_saved"] < 1
    assert "<title>" in page.read_text()


def test_demo(prompt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["demo", "--model", str(MODEL), "--prompt-file", str(prompt), *OPTIONS, "--inner-backend", "eager"]
    found = run(capsys, *argv, "--new-tokens", "4")
    tokens, logits = reference().generate(ids_of(prompt), 4)
    assert found["dropped"] and found["text"] == " ".join(map(str, tokens[0].tolist()))
    plain = EagerReference(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval(), None)
    plain_tokens, dense = plain.generate(ids_of(prompt), 4)
    assert found["dense"] == " ".join(map(str, plain_tokens[0].tolist()))
    got, want = logits[0].double().log_softmax(-1), dense[0].double().log_softmax(-1)
    kl = torch.nn.functional.kl_div(got, want, log_target=True, reduction="sum")
    assert found["kl"] == pytest.approx(float(kl), abs=1e-6)


@pytest.mark.slow
def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "--model", str(MODEL), "--tokens", "300", "512", *OPTIONS, "--inner-backend", "eager"]
    found = run(capsys, *argv, "--repeats", "1")
    assert [row["tokens"] for row in found["results"]] == [300, 512]
    assert all(row["dropped"] and row["dense_ms"] > 0 and row["ratio"] > 0 for row in found["results"])


def start(*argv: str) -> subprocess.CompletedProcess[str]:
    """As a user starts it."""
    command = [sys.executable, "-m", "uniprefill_fx", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


def test_module() -> None:
    done = start("bench", "--model", "./nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "uniprefill_fx bench: --model ./nowhere: no such folder\n"


@pytest.mark.slow
def test_text(prompt: Path) -> None:
    """Without --json it prints the table."""
    done = start("explain", "--model", str(MODEL), "--prompt-file", str(prompt), *OPTIONS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("layer  attention") and "this prompt: 512 tokens, work" in done.stdout


ERRORS: dict[str, tuple[list[str], str]] = {
    "no folder": (["--model", "./nowhere"], "--model ./nowhere: no such folder"),
    "no gguf": (["--model", "nowhere.gguf"], "--model nowhere.gguf: no such file"),
    "no prompt": (["--model", str(MODEL), "--prompt-file", "nowhere.txt"], "--prompt-file nowhere.txt: no such file"),
    "option": (["--model", str(MODEL), "--option", "blocksize=3"], "Did you mean 'block_size'?"),
    "value": (["--model", str(MODEL), "--p", "2"], "option 'p': got 2; allowed: a number in (0, 1]"),
    "form": (["--model", str(MODEL), "--option", "block_size"], "wanted NAME=VALUE"),
    "layer": (["--model", str(MODEL), "--option", "drop_layers=[0]", "--tokens", "64"], "Layer 0 has none"),
    "no model": (["--model", "{tmp}"], "transformers cannot load it"),
    "no ids": (
        ["--model", str(MODEL), "--prompt-file", "{text}"],
        "the file must hold token ids, numbers from 0 to 511",
    ),
    "too long": (["--model", str(MODEL), "--prompt-file", "{ids}", "--tokens", "9"], "--tokens 9: "),
    "empty": (["--model", str(MODEL), "--prompt-file", "{none}"], "it holds no tokens"),
}


@pytest.mark.parametrize(("argv", "part"), ERRORS.values(), ids=ERRORS)
def test_errors(argv: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in {"text": "some words", "ids": "1 2 3", "none": " "}.items():
        (tmp_path / name).write_text(text)
        argv = [word.replace("{" + name + "}", str(tmp_path / name)) for word in argv]
    argv = [word.replace("{tmp}", str(tmp_path)) for word in argv]
    assert main(["explain", *argv]) == 2
    shown = capsys.readouterr()
    assert not shown.out and shown.err.splitlines()[-1].startswith("uniprefill_fx explain: ")
    assert part in shown.err
