"""`python -m uniprefill_fx`: each command on a tiny model in a folder, and errors that say what to do."""

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
from tiny import tiny_llama, token_ids
from transformers.utils import logging as transformers_logging

from uniprefill_fx.tools.cli import main

OPTIONS = ["--p", "0.9,0.7", "--option", "block_size=16", "--option", "min_tokens=0", "--option", "drop_layers=[1,2]"]
OPTIONS += ["--option", "last_n=16", "--option", "sink_tokens=16"]
SPEC = DropSpec((1, 2), p=(0.9, 0.7), block_size=16, last_n=16, sink_tokens=16)
TOKENS = 300


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers_logging.disable_progress_bar()
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model without a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama(4, eos_token_id=None).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def prompt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids in a file."""
    path = tmp_path_factory.mktemp("prompt") / "ids.txt"
    path.write_text(" ".join(map(str, token_ids(TOKENS)[0].tolist())))
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    """A command with --json: what it printed; nothing else is on standard output."""
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def reference() -> EagerReference:
    return EagerReference(tiny_llama(4), SPEC)


def test_explain(model: str, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    found = run(capsys, "explain", "--model", model, "--prompt-file", str(prompt), *OPTIONS, "--html", str(page))
    kept = {str(layer): len(rows) for layer, rows in reference().prefill(token_ids(TOKENS)).kept.items()}
    assert found["dropped"] and found["kept"] == kept and found["tokens"] == TOKENS
    assert found["drops"] == {"1": {"p": 0.9, "keep_ratio": None}, "2": {"p": 0.7, "keep_ratio": None}}
    assert set(found["attention"].values()) == {"full"} and len(found["attention"]) == 4
    assert 0 < found["flops_saved"] < 1 and 0 < found["kv_saved"] < 1
    assert "<title>" in page.read_text()


def test_demo(model: str, prompt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["demo", "--model", model, "--prompt-file", str(prompt), *OPTIONS, "--inner-backend", "eager"]
    found = run(capsys, *argv, "--new-tokens", "4")
    tokens, logits = reference().generate(token_ids(TOKENS), 4)
    assert found["dropped"] and found["text"] == " ".join(map(str, tokens[0].tolist()))
    plain_tokens, dense = EagerReference(tiny_llama(4), None).generate(token_ids(TOKENS), 4)
    assert found["dense"] == " ".join(map(str, plain_tokens[0].tolist()))
    got, want = logits[0].double().log_softmax(-1), dense[0].double().log_softmax(-1)
    kl = torch.nn.functional.kl_div(got, want, log_target=True, reduction="sum")
    assert found["kl"] == pytest.approx(float(kl), abs=1e-6) and found["kl"] > 1e-4


@pytest.mark.slow
def test_bench(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "--model", model, "--tokens", "200", "300", *OPTIONS, "--inner-backend", "eager"]
    found = run(capsys, *argv, "--repeats", "1")
    assert [row["tokens"] for row in found["results"]] == [200, 300]
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
def test_text(model: str, prompt: Path) -> None:
    """Without --json it prints the table."""
    done = start("explain", "--model", model, "--prompt-file", str(prompt), *OPTIONS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("this prompt: 300 tokens, ")


ERRORS: dict[str, tuple[list[str], str]] = {
    "no folder": (["--model", "./nowhere"], "--model ./nowhere: no such folder"),
    "no gguf": (["--model", "nowhere.gguf"], "--model nowhere.gguf: no such file"),
    "no prompt": (["--model", "{model}", "--prompt-file", "nowhere.txt"], "--prompt-file nowhere.txt: no such file"),
    "option": (["--model", "{model}", "--option", "blocksize=3"], "Did you mean 'block_size'?"),
    "value": (["--model", "{model}", "--p", "2"], "option 'p': got 2; allowed: a number in (0, 1]"),
    "form": (["--model", "{model}", "--option", "block_size"], "wanted NAME=VALUE"),
    "layer": (["--model", "{model}", "--option", "drop_layers=[9]", "--tokens", "64"], "Layer 9 has none"),
    "no model": (["--model", "{tmp}"], "transformers cannot load it"),
    "no ids": (
        ["--model", "{model}", "--prompt-file", "{text}"],
        "the file must hold token ids, numbers from 0 to 255",
    ),
    "too long": (["--model", "{model}", "--prompt-file", "{ids}", "--tokens", "9"], "--tokens 9: "),
    "power": (["--model", "{model}", "--prompt-file", "{power}"], "the file must hold token ids"),
    "no utf-8": (["--model", "{model}", "--prompt-file", "{latin}"], "no text in UTF-8"),
    "broken": (["--model", "{broken.gguf}"], "transformers cannot load it"),
    "device": (["--model", "{model}", "--device", "abacus"], "--device abacus: "),
    "no place": (["--model", "{model}", "--html", "nowhere/report.html"], "--html nowhere/report.html: no folder"),
    "place": (["--model", "{model}", "--html", "{tmp}"], "it is a folder"),
    "empty": (["--model", "{model}", "--prompt-file", "{none}"], "it holds no tokens"),
}


@pytest.mark.parametrize(("argv", "part"), ERRORS.values(), ids=ERRORS)
def test_errors(model: str, argv: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in {"text": "some words", "ids": "1 2 3", "none": " ", "power": "1 \N{SUPERSCRIPT TWO}"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        argv = [word.replace("{" + name + "}", str(tmp_path / name)) for word in argv]
    for name, content in {"latin": b"\xe9", "broken.gguf": b"GGUF"}.items():
        (tmp_path / name).write_bytes(content)
        argv = [word.replace("{" + name + "}", str(tmp_path / name)) for word in argv]
    argv = [word.replace("{tmp}", str(tmp_path)).replace("{model}", model) for word in argv]
    assert main(["explain", *argv]) == 2
    shown = capsys.readouterr()
    assert not shown.out and shown.err.splitlines()[-1].startswith("uniprefill_fx explain: ")
    assert part in shown.err


@pytest.mark.parametrize("argv", [["--tokens", "0"], ["--tokens", "-5"], ["--tokens", "8", "x"]])
def test_numbers_of_tokens(argv: list[str], prompt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not the whole file for 0, nor the file without its beginning for a negative number."""
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "--model", "nowhere", "--prompt-file", str(prompt), *argv])
    assert "argument --tokens: " in capsys.readouterr().err
