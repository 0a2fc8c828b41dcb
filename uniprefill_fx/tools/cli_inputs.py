"""What the command line works on: a model, its tokenizer and prompts, from names and files."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEFAULT_TOKENS = 4096


class UserError(Exception):
    """Something the user can mend: the message says what was wrong and what to do."""


@dataclass(frozen=True)
class Subject:
    """A loaded model, its tokenizer (None if it has none), and prompts (1, tokens) int64 on its device."""

    model: Any
    tokenizer: Any
    prompts: list[Tensor]

    def read(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids)) if self.tokenizer is not None else " ".join(map(str, ids))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load(args: argparse.Namespace) -> Subject:
    """The model and its prompts.

    Raises:
        UserError: no such model, file or device, or a prompt that does not fit the model.
    """
    html = getattr(args, "html", None)
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        raise UserError(f"--html {html}: " + ("it is a folder" if html.is_dir() else f"no folder {html.parent}"))
    if args.prompt_file is not None and not args.prompt_file.is_file():
        raise UserError(f"--prompt-file {args.prompt_file}: no such file")
    model, tokenizer = load_model(args.model, args.device)
    prompts = [ids.to(args.device) for ids in _prompts(args, model, tokenizer)]
    say(f"{type(model).__name__} on {args.device}, {', '.join(f'{ids.shape[1]:,}' for ids in prompts)} tokens")
    return Subject(model, tokenizer, prompts)


def load_model(name: str, device: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, extra = name, {}
    if name.endswith(".gguf"):
        if not Path(name).is_file():
            raise UserError(f"--model {name}: no such file")
        where, extra = str(Path(name).parent), {"gguf_file": Path(name).name}
    elif name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise UserError(f"--model {name}: no such folder")
    say(f"loading {name}")
    # Not every CPU multiplies bfloat16 well; float32 is the safe choice there.
    dtype = "auto" if device != "cpu" else torch.float32
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **extra)
    except Exception as error:  # broken files raise whatever their readers do
        raise UserError(f"--model {name}: transformers cannot load it: {error}") from error
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for a device
        raise UserError(f"--device {device}: {error}") from error
    tokenizer = None
    if _has_tokenizer(Path(where), extra):
        try:
            tokenizer = AutoTokenizer.from_pretrained(where, **extra)
        except (OSError, ValueError, ImportError) as error:
            say(f"the tokenizer cannot be loaded: {error}")
    if tokenizer is None:
        say("no tokenizer: prompts are token ids")
    return model.eval(), tokenizer


def _has_tokenizer(folder: Path, extra: dict[str, Any]) -> bool:
    """For a folder without one, transformers makes an empty tokenizer of the model's type, which reads nothing."""
    files = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
    return bool(extra) or not folder.is_dir() or any(path for pattern in files for path in folder.glob(pattern))


def _prompts(args: argparse.Namespace, model: Any, tokenizer: Any) -> list[Tensor]:
    """(1, tokens) int64 each. From the file, cut at its beginning, so that its end (the question) stays."""
    vocabulary = model.config.get_text_config().vocab_size
    if args.prompt_file is None:
        random = torch.Generator().manual_seed(0)
        say("no --prompt-file: random tokens, over which attention spreads widely")
        return [torch.randint(vocabulary, (1, n), generator=random) for n in args.tokens or [DEFAULT_TOKENS]]
    try:
        text = args.prompt_file.read_text(encoding="utf-8")
    except ValueError as error:
        raise UserError(f"--prompt-file {args.prompt_file}: no text in UTF-8: {error}") from error
    ids = list(tokenizer(text)["input_ids"]) if tokenizer is not None else _numbers(text, vocabulary, args)
    if not ids:
        raise UserError(f"--prompt-file {args.prompt_file}: it holds no tokens")
    for n in args.tokens or []:
        if n > len(ids):
            raise UserError(f"--tokens {n}: {args.prompt_file} has {len(ids)} tokens")
    return [torch.tensor([ids[-n:]]) for n in args.tokens or [len(ids)]]


def _numbers(text: str, vocabulary: int, args: argparse.Namespace) -> list[int]:
    words = text.split()
    if not all(word.isdecimal() and int(word) < vocabulary for word in words):
        raise UserError(
            f"--prompt-file {args.prompt_file}: the model has no tokenizer, so the file must hold token ids, numbers "
            f"from 0 to {vocabulary - 1} with spaces between them"
        )
    return [int(word) for word in words]
