"""What the studies of a language model share: a model, its texts, a budget of seconds, a report written as it grows."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf_tokenizer import sentencepiece_tokenizer
from real_texts import windows
from torch import Tensor


def load_model(name: str, device: str) -> Any:
    """In evaluation mode, bfloat16 but on a CPU. name: hub name, folder, or GGUF file."""
    gguf = Path(name) if name.endswith(".gguf") else None
    where, extra = (str(gguf.parent), {"gguf_file": gguf.name}) if gguf else (name, {})
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **extra)
    return model.to(device).eval()


def load_tokenizer(name: str) -> Any:
    """name: hub name, folder, or GGUF file."""
    if name.endswith(".gguf"):
        return sentencepiece_tokenizer(Path(name))
    return transformers.AutoTokenizer.from_pretrained(name)


def begin_of(tokenizer: Any) -> list[int]:
    """What the tokenizer puts in front of a text."""
    if tokenizer.bos_token_id is None or tokenizer("a").input_ids[0] != tokenizer.bos_token_id:
        return []
    return [tokenizer.bos_token_id]


def common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", type=Path, nargs="+", help="only print what these files hold")
    parser.add_argument("--model", help="hub name, folder, or GGUF file")
    parser.add_argument("--tokenizer", help="hub name or folder (default: the model's)")
    parser.add_argument("--text", type=Path, nargs="+", help="files in UTF-8, one for each kind of text")
    parser.add_argument("--out", type=Path, help="JSON, written as it grows; a file that is there gets one run more")
    parser.add_argument("--seconds", type=float, default=3600, help="then nothing new begins (%(default)s)")
    parser.add_argument("--inner-backend", default="eager", help="compiles the pieces (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


class Study:
    """A model, texts as token ids, and a report.

    Attributes:
        ids: by kind, the tokens of a text; empty without `args.text`. begin: what the tokenizer puts in front of one.
        report: one run, for JSON. args: those of `common_arguments`, and `prompts`, of each kind and length.
    """

    def __init__(self, args: argparse.Namespace, **report: Any) -> None:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.args, self.began = args, time.perf_counter()
        self.before = json.loads(args.out.read_text()) if args.out.is_file() else []
        self.model = load_model(args.model, args.device)
        self.say(f"loaded {args.model}")
        self.ids: dict[str, list[int]] = {}
        if args.text:
            self.tokenizer = load_tokenizer(args.tokenizer or args.model)
            self.begin = begin_of(self.tokenizer)
            self.ids = {path.stem: self._read(path) for path in args.text}
            self.say("tokens of text: " + ", ".join(f"{len(ids):,} {kind}" for kind, ids in self.ids.items()))
        self.report: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "machine": torch.cuda.get_device_name() if args.device != "cpu" else f"CPU, {os.cpu_count()} cores",
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "model": Path(args.model).name,
            "inner_backend": args.inner_backend,
            "text_tokens": {kind: len(ids) for kind, ids in self.ids.items()},
        } | report

    def _read(self, path: Path) -> list[int]:
        text = path.read_text(encoding="utf-8")
        pieces = [text[i : i + 100_000] for i in range(0, len(text), 100_000)]
        return [i for own in self.tokenizer(pieces, add_special_tokens=False).input_ids for i in own]

    def prompts(self, tokens: int) -> Iterator[tuple[str, int, Tensor]]:
        """Kind, number, and (1, tokens) int64. The kinds take turns, so that a run cut short has some of each."""
        each = {kind: windows(ids, tokens, self.args.prompts, self.begin) for kind, ids in self.ids.items()}
        for i in range(self.args.prompts):
            for kind, own in each.items():
                yield kind, i, own[i].to(self.args.device)

    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def spent(self) -> bool:
        """Whether the seconds are over."""
        return self.elapsed() > float(self.args.seconds)

    def say(self, line: str) -> None:
        print(f"[{self.elapsed():6.1f} s] {line}", file=sys.stderr, flush=True)

    def save(self) -> None:
        self.report["seconds"] = round(self.elapsed())
        runs: Sequence[dict[str, Any]] = [*self.before, self.report]
        self.args.out.write_text(json.dumps(runs, separators=(",", ":")) + "\n")
