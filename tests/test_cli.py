"""The command line: each command on a tiny model, what it says meanwhile, and errors that say what to do."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
import torch
from checkpoints import ROOT
from eager_reference import DropSpec, EagerReference
from tiny import tiny_llama, token_ids
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

import uniprefill_fx
from uniprefill_fx.tools import cli_output
from uniprefill_fx.tools.cli import main
from uniprefill_fx.tools.cli_commands import inner_backend_for
from uniprefill_fx.tools.cli_inputs import load

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


def test_explain_at_several_lengths(model: str, prompt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The end of the file, at each length."""
    argv = ["explain", "--model", model, "--prompt-file", str(prompt), "--tokens", "200", "300", *OPTIONS]
    for found in run(capsys, *argv)["results"]:
        ids = token_ids(TOKENS)[:, -found["tokens"] :]
        kept = {str(layer): len(rows) for layer, rows in reference().prefill(ids).kept.items()}
        assert found["kept"] == kept


def test_demo(model: str, prompt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["demo", "--model", model, "--prompt-file", str(prompt), *OPTIONS]  # on a CPU: eager
    tokens, logits = reference().generate(token_ids(TOKENS), 4)
    text = " ".join(map(str, tokens[0].tolist()))
    found = run(capsys, *argv, "--new-tokens", "4", "--repeats", "1", "--expect", text)
    assert found["dropped"] and found["text"] == found["expected"] == text
    kept = reference().prefill(token_ids(TOKENS)).kept
    assert found["num_tokens"] == [TOKENS, TOKENS, len(kept[1]), len(kept[2])]
    plain_tokens, dense = EagerReference(tiny_llama(4), None).generate(token_ids(TOKENS), 4)
    assert found["dense"] == " ".join(map(str, plain_tokens[0].tolist()))
    got, want = logits[0].double().log_softmax(-1), dense[0].double().log_softmax(-1)
    kl = torch.nn.functional.kl_div(got, want, log_target=True, reduction="sum")
    assert found["kl"] == pytest.approx(float(kl), abs=1e-6) and found["kl"] > 1e-4


def test_what_compiles_the_pieces_by_default() -> None:
    """A newcomer's CPU compiles nothing, unless told to."""
    found = {(c, d): inner_backend_for(c, d) for c in ("explain", "demo", "bench") for d in ("cpu", "cuda")}
    assert {pair for pair, backend in found.items() if backend == "inductor"} == {("demo", "cuda"), ("bench", "cuda")}


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
    assert done.stderr == "uniprefill bench: --model ./nowhere: no such folder\n"


FAKE_VLLM = """
import json, os, sys
print(json.dumps([sys.executable, sys.argv[1:], os.environ["PROMETHEUS_MULTIPROC_DIR"]]))
"""


def test_serve_becomes_vllm(tmp_path: Path) -> None:
    """The one of this Python, whatever PATH has, with the flags that dropping needs, all said."""
    (tmp_path / "vllm" / "entrypoints" / "cli").mkdir(parents=True)
    for folder in ("vllm", "vllm/entrypoints", "vllm/entrypoints/cli"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "vllm" / "entrypoints" / "cli" / "main.py").write_text(FAKE_VLLM)
    (tmp_path / "bin").mkdir()
    other = tmp_path / "bin" / "vllm"
    other.write_text("#!/bin/sh\necho another\n")
    other.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "uniprefill_fx", "serve", "some/model", "--preset", "fast", "--port", "8001"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ
        | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
        | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    python, command, metrics = json.loads(done.stdout)
    assert (python, metrics) == (sys.executable, str(tmp_path))
    assert command[:2] == ["serve", "some/model"] and command[-2:] == ["--port", "8001"]
    assert json.loads(command[command.index("--additional-config") + 1]) == {"uniprefill": {"preset": "fast"}}
    assert all(flag in done.stderr for flag in command if flag.startswith("--") and flag != "--port")


@pytest.mark.parametrize("folder", [False, True])
def test_serve_without_vllm(
    folder: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What to install, though PATH has another Python's vllm, or a folder has its name."""
    (tmp_path / "vllm").mkdir()
    alone = importlib.machinery.PathFinder.find_spec("vllm", [str(tmp_path)]) if folder else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: alone)
    monkeypatch.setattr(os, "execvp", lambda file, command: pytest.fail(f"became {command}"))
    assert main(["serve", "some/model"]) == 2
    assert "there is no vllm here" in capsys.readouterr().err


def test_text(model: str, prompt: Path) -> None:
    """Without --json it prints the table."""
    done = start("explain", "--model", model, "--prompt-file", str(prompt), *OPTIONS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("this prompt: 300 tokens, ")


ERRORS: dict[str, tuple[list[str], str]] = {
    "no folder": (["--model", "./nowhere"], "--model ./nowhere: no such folder"),
    "no gguf": (["--model", "nowhere.gguf"], "--model nowhere.gguf: no such file"),
    "no prompt": (["--model", "{model}", "--prompt-file", "nowhere.txt"], "--prompt-file nowhere.txt: no such file"),
    "folder": (["--model", "{model}", "--prompt-file", "{tmp}"], "--prompt-file {tmp}: it is a folder"),
    "option": (["--model", "{model}", "--option", "blocksize=3"], "Did you mean 'block_size'?"),
    "value": (["--model", "{model}", "--p", "2"], "option 'p': got 2; allowed: a number in (0, 1]"),
    "twice": (
        ["--model", "{model}", "--p", "0.8", "--option", "p=0.9"],
        "--option p=0.9: p is given already, as 0.8; give it once",
    ),
    "twice an option": (
        ["--model", "{model}", "--option", "last_n=8", "--option", "last_n=9"],
        "--option last_n=9: last_n is given already, as 8",
    ),
    "form": (["--model", "{model}", "--option", "block_size"], "wanted NAME=VALUE"),
    "layer": (["--model", "{model}", "--option", "drop_layers=[9]", "--tokens", "64"], "Layer 9 has none"),
    "no model": (["--model", "{tmp}"], "transformers cannot load it"),
    "no ids": (
        ["--model", "{model}", "--prompt-file", "{text}"],
        "the file must hold token ids, numbers from 0 to 255 with spaces between them, and 'some' is none",
    ),
    "too large": (["--model", "{model}", "--prompt-file", "{large}"], "and '256' is none"),
    "too long": (["--model", "{model}", "--prompt-file", "{ids}", "--tokens", "9"], "--tokens 9: "),
    "power": (["--model", "{model}", "--prompt-file", "{power}"], "the file must hold token ids"),
    "no utf-8": (["--model", "{model}", "--prompt-file", "{latin}"], "no text in UTF-8"),
    "broken": (["--model", "{broken.gguf}"], "transformers cannot load it"),
    "chat": (["--model", "{model}", "--chat"], "--chat: {model} has no tokenizer"),
    "a file": (["--model", "{text}"], "a file, but not a GGUF file"),
    "backend": (["--model", "{model}", "--inner-backend", "inducter"], "Did you mean 'inductor'?"),
    "device": (["--model", "{model}", "--device", "abacus"], "--device abacus: "),
    "no place": (["--model", "{model}", "--html", "nowhere/report.html"], "--html nowhere/report.html: no folder"),
    "place": (["--model", "{model}", "--html", "{tmp}"], "it is a folder"),
    "one page": (
        ["--model", "{model}", "--html", "{tmp}/a.html", "--tokens", "64", "128"],
        "--html {tmp}/a.html: a page shows one prompt, and 2 lengths are given; give one",
    ),
    "empty": (["--model", "{model}", "--prompt-file", "{none}"], "it holds no tokens"),
}


TEXTS = {"text": "some words", "ids": "1 2 3", "none": " ", "power": "1 \N{SUPERSCRIPT TWO}", "large": "255 256"}


@pytest.mark.parametrize(("argv", "part"), ERRORS.values(), ids=ERRORS)
def test_errors(model: str, argv: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        argv = [word.replace("{" + name + "}", str(tmp_path / name)) for word in argv]
    for name, content in {"latin": b"\xe9", "broken.gguf": b"GGUF"}.items():
        (tmp_path / name).write_bytes(content)
        argv = [word.replace("{" + name + "}", str(tmp_path / name)) for word in argv]
    *argv, part = (word.replace("{tmp}", str(tmp_path)).replace("{model}", model) for word in (*argv, part))
    assert main(["explain", *argv]) == 2
    shown = capsys.readouterr()
    assert not shown.out and shown.err.splitlines()[-1].startswith("uniprefill explain: ")
    assert part in shown.err


def test_devices_are_known_before_the_model_is_read(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("explain", "demo", "bench"):
        assert main([command, "--model", model, "--device", "abacus"]) == 2
        shown = capsys.readouterr().err
        assert f"uniprefill {command}: --device abacus: " in shown and "loading PyTorch" in shown
        assert f"loading {model}" not in shown


def test_demo_shows_one_prompt(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", model, "--tokens", "64", "128"]) == 2
    assert "--tokens: demo shows one prompt, and 2 lengths are given; give one" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--tokens", "0"], ["--tokens", "-5"], ["--tokens", "8", "x"]])
def test_numbers_of_tokens(argv: list[str], prompt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not the whole file for 0, nor the file without its beginning for a negative number."""
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "--model", "nowhere", "--prompt-file", str(prompt), *argv])
    assert "argument --tokens: " in capsys.readouterr().err


# Before torch is loaded

EARLY = [
    ["--version"],
    ["--help"],
    ["explain", "--help"],
    ["explain"],
    ["bench", "--model", "./nowhere"],
    ["demo", "--model", ".", "--prompt-file", "nowhere.txt"],
    ["demo", "--model", ".", "--p", "2"],
]


@pytest.mark.parametrize("argv", EARLY, ids=" ".join)
def test_help_and_errors_come_before_torch(argv: list[str]) -> None:
    code = f"""if True:
        import sys
        from uniprefill_fx.tools.cli import main
        try:
            status = main({argv!r})
        except SystemExit as error:
            status = error.code
        assert not {{"torch", "transformers", "numpy"}} & set(sys.modules), "loaded"
        sys.exit(status)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if argv[-1] in ("--version", "--help") else 2), done.stderr
    assert "Traceback" not in done.stderr and (done.stdout or done.stderr)
    assert argv != ["--version"] or done.stdout == f"uniprefill-fx {uniprefill_fx.__version__}\n"


# Names of the hub


class NoHub:
    """A hub that fails in one way."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def model_info(self, name: str, timeout: float) -> None:
        raise self.error


def missing() -> Exception:
    response = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
    return huggingface_hub.errors.RepositoryNotFoundError("no", response=response)


@pytest.mark.parametrize(
    ("name", "error", "part"),
    [
        ("no/such", missing(), "the hub has no such model"),
        ("no/such", httpx.ConnectError("name or service not known"), "cannot be reached (name or service not known)"),
        ("a/b/c", AssertionError("not asked"), "no name of the hub"),
    ],
)
def test_names_that_cannot_be_had(
    name: str, error: Exception, part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: NoHub(error))
    assert main(["explain", "--model", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"uniprefill explain: --model {name}: no folder of that name, and ") and part in line


# What it says meanwhile


def test_a_step_that_takes_long_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with the time, the package's own log below them, and a line again where a step takes long."""
    monkeypatch.setattr(cli_output, "SILENCE", 0.1)
    level = logging.getLogger("uniprefill_fx").level
    shown = ""
    with cli_output.Progress():
        cli_output.say("a step")
        logging.getLogger("uniprefill_fx.passes").info("a graph")
        for _ in range(100):
            time.sleep(0.1)
            shown += capsys.readouterr().err
            if shown.count("still: a step") > 1:
                break
    lines = [line.split("] ", 1)[1] for line in shown.splitlines()]
    assert lines[:4] == ["a step", "    a graph", "still: a step", "still: a step"]
    logging.getLogger("uniprefill_fx").warning("nobody listens now")
    assert not capsys.readouterr().out and logging.getLogger("uniprefill_fx").level == level


def heed_interrupts() -> None:
    """A shell starts what it puts into the background deaf to them, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interrupt_is_one_line(model: str) -> None:
    command = [sys.executable, "-m", "uniprefill_fx", "explain", "--model", model, "--tokens", "100000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=heed_interrupts)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "tracing the model" in line:
            process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    assert lines[-1] == "uniprefill explain: interrupted\n" and not any("Traceback" in line for line in lines)


INTERRUPTED = """
import sys

class Interrupting:
    def find_spec(self, name, *rest):
        if name == "uniprefill_fx.tools.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from uniprefill_fx.__main__ import main
sys.exit(main())
"""


def test_an_interrupt_of_an_import_is_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "uniprefill: interrupted\n")


# Prompts


def arguments(model: str, **given: Any) -> argparse.Namespace:
    plain = {"model": model, "local": True, "device": "cpu", "chat": False, "tokens": None, "prompt_file": None}
    return argparse.Namespace(**plain | given)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model that reads characters, with a chat template."""
    path = tmp_path_factory.mktemp("reader")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "ruler-gemma3")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %} [model] "
    tokenizer.save_pretrained(path)
    tiny_llama(2, vocab_size=len(tokenizer), max_position_embeddings=64).save_pretrained(path)
    return str(path)


def test_chat(reader: str, tmp_path: Path) -> None:
    """The text is one turn of the user; what is cut away is the text's beginning, not the template's."""
    (tmp_path / "prompt.txt").write_text("what is the code of the north gate?")
    subject = load(arguments(reader, chat=True, prompt_file=tmp_path / "prompt.txt"))
    assert subject.read(subject.prompts[0][0].tolist()) == "[user] what is the code of the north gate? [model] "
    whole = subject.prompts[0].shape[1]
    subject = load(arguments(reader, chat=True, prompt_file=tmp_path / "prompt.txt", tokens=[whole, whole - 5]))
    assert [ids.shape[1] for ids in subject.prompts] == [whole, whole - 5]
    assert subject.read(subject.prompts[1][0].tolist()) == "[user] is the code of the north gate? [model] "


def test_a_prompt_longer_than_the_context(reader: str, caplog: pytest.LogCaptureFixture) -> None:
    """Made up where there is no file: sentences with a fact, whose answer is then known."""
    with caplog.at_level(logging.INFO, "uniprefill_fx"):
        subject = load(arguments(reader, tokens=[900]))
    text = subject.read(subject.prompts[0][0].tolist())
    assert f"gate is {subject.expected}." in text and text.endswith("The code of the north gate is")
    assert 700 < subject.prompts[0].shape[1] <= 900
    assert "are more than the 64 that the model was made for" in caplog.text
