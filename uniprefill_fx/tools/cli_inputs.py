"""What the command line works on: a model, its tokenizer and prompts; `cli.check` has seen the names of files."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uniprefill_fx.tools.cli_output import UserError, say
from uniprefill_fx.tools.sample_prompt import ANSWER, sample_prompt

DEFAULT_TOKENS = 4096


@dataclass(frozen=True)
class Subject:
    """A loaded model, its tokenizer (None if it has none), and prompts (1, tokens) int64 on its device.

    expected: a text that a right answer holds; None where nobody knows.
    """

    model: Any
    tokenizer: Any
    prompts: list[Tensor]
    expected: str | None = None

    def read(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids)) if self.tokenizer is not None else " ".join(map(str, ids))


def load(args: argparse.Namespace) -> Subject:
    """The model and its prompts.

    Raises:
        UserError: no such device, a model that cannot be loaded, or a prompt that does not fit it.
    """
    device = args.device
    model, tokenizer = load_model(args.model, device, args.local)
    if args.chat and getattr(tokenizer, "chat_template", None) is None:
        raise UserError(f"--chat: {args.model} has no " + ("tokenizer" if tokenizer is None else "chat template"))
    prompts = [ids.to(device) for ids in _prompts(args, model, tokenizer)]
    lengths = [ids.shape[1] for ids in prompts]
    say(f"{type(model).__name__} on {device}; prompt of {' and '.join(f'{n:,}' for n in lengths)} tokens")
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and max(lengths) > most:
        say(f"warning: {max(lengths):,} tokens are more than the {most:,} that the model was made for")
    expected = getattr(args, "expect", None)
    made_up = args.prompt_file is None and tokenizer is not None
    return Subject(model, tokenizer, prompts, ANSWER if expected is None and made_up else expected)


def check_device(name: str) -> None:
    """Before a model is loaded, which takes long.

    Raises:
        UserError: torch knows no such device, or there is none.
    """
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for a device
        raise UserError(f"--device {name}: {error}") from error


def load_model(name: str, device: str, local: bool = False) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(name).expanduser()
    where, extra = (str(path), {}) if path.is_dir() else (name, {})
    if name.endswith(".gguf"):
        where, extra = str(path.parent), {"gguf_file": path.name}
    say(f"loading {name}")
    # Not every CPU multiplies bfloat16 well; float32 is the safe choice there.
    dtype = "auto" if device != "cpu" else torch.float32
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, local_files_only=local, **extra)
    except Exception as error:  # broken files raise whatever their readers do
        raise UserError(f"--model {name}: transformers cannot load it: {error}") from error
    try:
        model = model.to(device)
    except RuntimeError as error:  # too large for it, say
        raise UserError(f"--device {device}: {error}") from error
    tokenizer = None
    if _has_tokenizer(Path(where), extra):
        try:
            tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=local, **extra)
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
        what = "random tokens, over which attention spreads widely"
        say(f"no --prompt-file: {what if tokenizer is None else 'sentences with one fact a third of the way in'}")
        return [_made_up(n, vocabulary, tokenizer, args.chat) for n in args.tokens or [DEFAULT_TOKENS]]
    try:
        text = args.prompt_file.read_text(encoding="utf-8")
    except ValueError as error:
        raise UserError(f"--prompt-file {args.prompt_file}: no text in UTF-8: {error}") from error
    ids = _numbers(text, vocabulary, args) if tokenizer is None else _encoded(text, tokenizer, args.chat)
    if not ids or not text.strip():
        raise UserError(f"--prompt-file {args.prompt_file}: it holds no tokens")
    for n in args.tokens or []:
        if n > len(ids):
            raise UserError(f"--tokens {n}: {args.prompt_file} has {len(ids)} tokens")
    if args.chat and args.tokens:  # the template stays whole: cut is the text inside it
        plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        around = len(ids) - len(plain)
        if min(args.tokens) <= around:
            raise UserError(f"--tokens {min(args.tokens)}: the chat template alone has about {around} tokens")
        cut = [tokenizer.decode(plain[-(n - around) :]) for n in args.tokens]
        return [torch.tensor([_encoded(part, tokenizer, True)]) for part in cut]
    return [torch.tensor([ids[-n:]]) for n in args.tokens or [len(ids)]]


def _made_up(tokens: int, vocabulary: int, tokenizer: Any, chat: bool) -> Tensor:
    if tokenizer is None:
        return torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    text = sample_prompt(tokens, lambda part: len(tokenizer(part)["input_ids"]))
    return torch.tensor([_encoded(text, tokenizer, chat)])


def _encoded(text: str, tokenizer: Any, chat: bool) -> list[int]:
    if not chat:
        return list(tokenizer(text)["input_ids"])
    turn = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=False))


def _numbers(text: str, vocabulary: int, args: argparse.Namespace) -> list[int]:
    words = text.split()
    wrong = next((word for word in words if not (word.isdecimal() and int(word) < vocabulary)), None)
    if wrong is not None:
        raise UserError(
            f"--prompt-file {args.prompt_file}: the model has no tokenizer, so the file must hold token ids, numbers "
            f"from 0 to {vocabulary - 1} with spaces between them, and {wrong[:20]!r} is none"
        )
    return [int(word) for word in words]
