"""`examples/ruler.py` with the real harness, on a tiny model that reads characters (needs lm_eval)."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ROOT
from tiny import tiny_llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None, reason='no lm_eval: pip install "lm_eval[hf,ruler]"'
    ),
]


def save_reader_of_characters(folder: Path) -> None:
    """A model of random weights, and a tokenizer with one token for each printable character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "<unk>"]
    letters = special + [chr(c) for c in range(32, 127)] + ["\n"]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    pad, start, unknown = special
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=start, eos_token=start, unk_token=unknown
    )
    fast.save_pretrained(folder)
    tiny_llama(3, max_position_embeddings=8192).save_pretrained(folder)


def test_dense_and_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both columns are there, the dense one dropped nothing, the other one dropped in every prompt."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    save_reader_of_characters(tmp_path)
    out = tmp_path / "scores.json"
    argv = ["--model", str(tmp_path), "--limit", "2", "--p", "0.6", "--inner-backend", "eager", "--out", str(out)]
    importlib.import_module("ruler").main([*argv, "--option", "drop_layers=[1]"])
    (row,) = json.loads(out.read_text())
    assert (row["length"], row["dense"]["prompts"], row["uniprefill"]["prompts"]) == (4096, 2, 2)
    assert (row["dense"]["dropped"], row["uniprefill"]["dropped"]) == (0, 2)
    assert row["dense"]["work"] == 1.0 and 0.5 < row["uniprefill"]["work"] < 0.99
    assert set(row["dense"]["scores"]) == {"niah_single_1"}
    assert "niah_single_1" in capsys.readouterr().out
    sys.modules.pop("ruler", None)
