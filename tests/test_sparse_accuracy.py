"""`benchmarks/sparse_accuracy.py`: prompts are windows of the text, and its figures those of float64 attention."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_sparse_reference import reference
from checkpoints import ROOT
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(ROOT / "benchmarks"))
study: Any = importlib.import_module("study")
suite: Any = importlib.import_module("sparse_accuracy")
tools: Any = importlib.import_module("sparse_accuracy_tools")

MODEL = ROOT / "examples" / "ruler-gemma3"
TOKENS = 1200


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Tokenizer:
    """A token a character; a text begins with 7."""

    bos_token_id = 7

    def __call__(self, text: Any, add_special_tokens: bool = True) -> Any:
        begin = [7] if add_special_tokens else []
        if isinstance(text, list):
            return SimpleNamespace(input_ids=[begin + [ord(c) for c in part] for part in text])
        return SimpleNamespace(input_ids=begin + [ord(c) for c in text])


def test_prompts_are_windows_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path, text in zip(files, ("abcdefghijk", "0123456789"), strict=True):
        path.write_text(text)
    monkeypatch.setattr(study, "load_model", lambda *_: SimpleNamespace(dtype=torch.float32))
    monkeypatch.setattr(study, "load_tokenizer", lambda *_: Tokenizer())
    args = argparse.Namespace(text=files, prompts=2, model="m", tokenizer=None, device="cpu", out=tmp_path / "out")
    args.inner_backend = "eager"
    found = study.Study(args)
    shown = [(kind, i, "".join(map(chr, ids[0, 1:].tolist()))) for kind, i, ids in found.prompts(6)]
    assert shown == [("a", 0, "abcde"), ("b", 0, "01234"), ("a", 1, "ghijk"), ("b", 1, "56789")]
    assert all(int(ids[0, 0]) == 7 for *_, ids in found.prompts(6))
    with pytest.raises(SystemExit, match="a text of 11 tokens for 2 prompts of 7: wanted 12"):
        list(found.prompts(7))


def test_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """By position, in pieces of any size."""
    dense, other = torch.randn(2, 9, 50, generator=torch.Generator().manual_seed(0)).unbind()
    other[4] = dense[4]
    want = F.kl_div(other.log_softmax(-1), dense.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    for most in (2**28, 200):
        monkeypatch.setattr(tools, "LOGITS", most)
        kl, same = tools.divergence(dense, other)
        torch.testing.assert_close(kl, want, atol=1e-6, rtol=1e-5)
        assert same.tolist() == [
            a == b for a, b in zip(dense.argmax(-1).tolist(), other.argmax(-1).tolist(), strict=True)
        ]


@pytest.mark.slow
def test_figures_are_those_of_the_reference(tmp_path: Path) -> None:
    """One prompt of text: KL of all positions from the stock model with float64 attention in its full layers."""
    out, alpha = tmp_path / "sparse.json", 0.9
    text = ROOT / "docs" / "options.md"
    argv = ["--model", str(MODEL), "--text", str(text), "--lengths", str(TOKENS), "--prompts", "1", "--p", "0.8"]
    suite.main([*argv, "--alphas", str(alpha), "--fp8-alphas", str(alpha), "--device", "cpu", "--out", str(out)])
    (made,) = json.loads(out.read_text())
    rows = {(row["drops"], row["setting"]): row for row in made["rows"]}
    assert len(rows) == 6 and all(row["n"] == 1 for row in rows.values())

    ids = torch.tensor([AutoTokenizer.from_pretrained(MODEL)(text.read_text()).input_ids[:TOKENS]])
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    counts = [0, 0]

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **given: Any) -> tuple[Tensor, None]:
        window = getattr(module, "sliding_window", None)
        if window is not None:
            place = torch.arange(q.shape[2])
            seen = (place <= place[:, None]) & (place > place[:, None] - window)
            own = F.scaled_dot_product_attention(q, k, v, seen, scale=given["scaling"], enable_gqa=True)
            return own.transpose(1, 2), None
        found = reference(q, k, v, None, given["scaling"], alpha=alpha)
        counts[0] += sum(map(len, found.kept.values()))
        counts[1] += sum(found.causal.values())
        return found.out.to(q.dtype).transpose(1, 2), None

    AttentionInterface.register("sparse_accuracy_reference", attend)
    with torch.inference_mode():
        dense = model(ids).logits[0].double().log_softmax(-1)
        model.config._attn_implementation = "sparse_accuracy_reference"
        sparse = model(ids).logits[0].double().log_softmax(-1)
    kl = F.kl_div(sparse, dense, log_target=True, reduction="none").sum(-1)
    row = rows[False, f"alpha {alpha}"]
    assert row["inside"] == TOKENS // 2 - 256
    assert row["inside_kl_sum"] == pytest.approx(float(kl[TOKENS // 2 : -256].sum()), rel=1e-2) and kl.max() > 1e-5
    assert row["kl_sum"] == pytest.approx(float(kl[-1]), rel=1e-2, abs=1e-6)
    assert row["density_sum"] == pytest.approx(counts[0] / counts[1], abs=1e-6) and row["density_sum"] < 1
    every = rows[False, "all blocks"]
    assert every["density_sum"] == 1.0 and every["inside_kl_sum"] < 1e-4 < row["inside_kl_sum"]
    assert rows[True, "dense attention"]["density_sum"] == 1.0 and rows[True, "dense attention"]["compute_sum"] < 1
    assert rows[True, f"alpha {alpha}"]["compute_sum"] < 1
    assert row["inside_kls"] == pytest.approx([float(kl[TOKENS // 2 : -256].mean())], rel=1e-2)
    assert row["last_kls"] == pytest.approx([float(kl[-64:].mean())], rel=1e-2, abs=1e-6)
    suite.main(["--table", str(out)])


def test_the_page_says_what_was_measured() -> None:
    """Density, and what alpha costs, of each row of both tables of real weights."""
    (run,) = json.loads((ROOT / "benchmarks" / "results" / "sparse_accuracy_gemma270m.json").read_text())
    rows = {(row["drops"], row["setting"], row["tokens"]): row for row in run["rows"]}
    page = (ROOT / "docs" / "block-sparse.md").read_text()
    page = page[page.index("**On real weights") :]
    tables = [(False, ["inside_kls", "inside_top1s", "last_kls"]), (True, ["last_kls", "last_top1s"])]
    for drops, keys in tables:
        lines = page[page.index("| alpha | 4,096 tokens") :].split("\n\n")[0].splitlines()
        page = page[page.index(lines[-1]) + len(lines[-1]) :]
        for line in lines[2:]:
            name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            setting = name if name == "dense attention" else f"alpha {name}"
            setting = setting.replace("FP8", "fp8").replace("not corrected", "no correction")
            for tokens in (4096, 16_384):
                row = rows.pop((drops, setting, tokens))
                density, *values = cells[: 1 + len(keys)]
                cells = cells[1 + len(keys) :]
                assert float(density) == round(row["density_sum"] / row["n"], 2)
                for key, value in zip(keys, values, strict=True):
                    assert float(value.split()[0]) == pytest.approx(sum(row[key]) / row["n"], rel=0.06, abs=6e-6)
            assert not cells
    assert {setting for _, setting, _ in rows} == {"all blocks"}
