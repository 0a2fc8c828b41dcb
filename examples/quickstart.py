"""Prefill one long prompt dense and with dropped tokens, and show what was dropped, how long it took, and the answer.

python examples/quickstart.py                                  # the small checkpoint beside this file
python examples/quickstart.py --model NAME_OR_FOLDER --tokens 16384 --inner-backend inductor
python examples/quickstart.py --model NAME_OR_FOLDER --prompt-file notes.txt --p 0.95
python examples/quickstart.py --option "drop_layers=[5]" --option "p=0.8"
"""

from __future__ import annotations

import argparse
import ast
import logging
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from needle_prompts import ANSWER_TOKENS, VOCABULARY, needle_prompt
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

import uniprefill_fx

CHECKPOINT = os.path.relpath(Path(__file__).resolve().parent / "needle-gemma3")

# Inductor needs about three minutes to compile the five graphs of this run on two busy cores. The demo should take one,
# so its pieces run as plain PyTorch ops, dense and dropped ones alike, unless --inner-backend says otherwise.
INNER_BACKEND = "eager"

# The checkpoint's prompts are noise, over which attention spreads widely: the default preset keeps nearly all of it.
CHECKPOINT_P = 0.9

SENTENCES = (
    "The ferry left the harbour a little after seven and met no wind until noon.",
    "Most of the orchard had been picked, and the ladders leaned in a row by the wall.",
    "In the archive the older ledgers stand on the lower shelves, tied with tape.",
    "Rain came over the ridge in the afternoon and was gone before the shops closed.",
    "Nobody could say who had painted the bridge, but it had been done with care.",
    "The train to the coast takes the longer line on Sundays and stops at every village.",
)
FACT = "The code of the north gate is 48213."
QUESTION = "\nQuestion: What is the code of the north gate?\nAnswer: The code of the north gate is"
FACT_ANSWER = "48213"


@dataclass(frozen=True)
class Prompt:
    """A prompt, how to read what the model says to it, and the right answer if there is one.

    Attributes:
        ids: (1, tokens) int64. about: one line for the user. new_tokens: how many tokens to generate.
        read: token ids -> text. answer: what the text must hold; None when nobody knows.
    """

    ids: Tensor
    about: str
    new_tokens: int
    read: Callable[[list[int]], str]
    answer: str | None


class Progress(logging.Handler):
    """Prints lines with the time since the start; the package's log (a line for each compiled piece) comes here too."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.began = time.perf_counter()

    def say(self, line: str) -> None:
        print(f"[{time.perf_counter() - self.began:6.1f} s] {line}", flush=True)

    def emit(self, record: logging.LogRecord) -> None:
        sizes = r" for sizes \[.*?\]"  # one for each input: a long list
        self.say("    " + re.sub(sizes, "", record.getMessage()))


def main() -> None:
    args = parse_arguments()
    progress = Progress()
    log = logging.getLogger("uniprefill_fx")
    log.addHandler(progress)
    log.setLevel(logging.INFO)
    transformers_logging.disable_progress_bar()

    progress.say(f"loading {args.model}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Not every CPU multiplies bfloat16 well; float32 is the safe choice there.
    dtype = "auto" if device == "cuda" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    model = model.to(device).eval()
    prompt = make_prompt(args, model)
    ids = prompt.ids.to(device)
    progress.say(f"prompt: {ids.shape[1]} tokens; {prompt.about}")

    options = options_of(args)
    try:
        uniprefill_fx.compile(model, **options)
    except uniprefill_fx.OptionError as error:
        raise SystemExit(str(error)) from None
    if args.explain:
        progress.say("explaining: a trace of its own, which the runs below do not use")
        traced = {name: value for name, value in options.items() if name != "inner_backend"}
        report = uniprefill_fx.explain(model, ids, call={"logits_to_keep": 1}, **traced)
        print(f"\n{report}\n")

    def generate(new_tokens: int) -> list[int]:
        """The next tokens, greedily. Reading them waits for the device."""
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
        return out[0, ids.shape[1] :].tolist()

    with torch.inference_mode():
        progress.say(f"first prompt with dropping: tracing takes a while; compiling with {options['inner_backend']!r}")
        generate(1)
        call = uniprefill_fx.last_call()
        if call is None or not call.dropped:
            raise SystemExit(f"The prompt ran dense: {call.reason if call else 'no prefill reached the backend'}")
        progress.say("first prompt dense: the same trace, compiled in one piece")
        with uniprefill_fx.disabled():
            generate(1)
        progress.say(f"time to first token, {args.repeats} times each, in turn")
        dense, dropped = time_in_turn(generate, args.repeats)
        progress.say(f"answer, {prompt.new_tokens} tokens: traces and compiles the decode step")
        answer = generate(prompt.new_tokens)
        with uniprefill_fx.disabled():
            dense_answer = generate(prompt.new_tokens)
    progress.say("done")

    print()
    show_layers(model, call, ids.shape[1])
    print()
    show_times(dense, dropped, device, model)
    print()
    show_answers(prompt, dense_answer, answer)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One long prompt, dense and with dropped tokens.")
    parser.add_argument("--model", default=CHECKPOINT, help="Hugging Face name or folder (default: %(default)s)")
    parser.add_argument("--prompt-file", type=Path, help="text file to use as the prompt, for models with a tokenizer")
    parser.add_argument("--tokens", type=int, default=4096, help="prompt length to generate (default: %(default)s)")
    parser.add_argument("--p", type=float, help="attention mass to keep; default: 0.9 for the checkpoint of the demo")
    parser.add_argument("--inner-backend", default=INNER_BACKEND, help="compiles the pieces (default: %(default)s)")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="any other option")
    parser.add_argument("--repeats", type=int, default=5, help="timed prompts of each kind (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--explain", action="store_true", help="also print what was found in the traced graph, and why")
    return parser.parse_args()


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options for `uniprefill_fx.compile` from the command line."""
    options: dict[str, Any] = {"inner_backend": args.inner_backend}
    if args.p is not None:
        options["p"] = args.p
    elif is_checkpoint(args.model):
        options["p"] = CHECKPOINT_P
    for option in args.option:
        name, _, value = option.partition("=")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value  # a bare word is a string
    return options


def is_checkpoint(model: str) -> bool:
    """Whether a model is a folder without a tokenizer, as the checkpoint of the demo is."""
    folder = Path(model)
    return folder.is_dir() and not any(folder.glob("tokenizer*"))


def make_prompt(args: argparse.Namespace, model: Any) -> Prompt:
    """A needle prompt for the checkpoint; the user's file, or filler text with a fact in it, for other models."""
    if is_checkpoint(args.model):
        if model.config.vocab_size != VOCABULARY or args.prompt_file:
            raise SystemExit(
                f"{args.model} has no tokenizer: only needle prompts of {VOCABULARY} ids can be made for it"
            )
        needle = needle_prompt(args.tokens)
        about = f"16 facts in noise, the one that is asked for at token {needle.position}"
        return Prompt(needle.ids, about, ANSWER_TOKENS, lambda ids: " ".join(map(str, ids)), _spaced(needle.answer))
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    def read(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    if args.prompt_file:
        ids = torch.tensor([encode(args.prompt_file.read_text(encoding="utf-8"))])
        return Prompt(ids, f"from {args.prompt_file}", args.new_tokens, read, None)
    # As many sentences as fit, with the fact a third of the way in.
    per_sentence = len(encode(" ".join(SENTENCES * 10))) / (10 * len(SENTENCES))
    count = max(2, int((args.tokens - len(encode(FACT + QUESTION))) / per_sentence))
    text = [SENTENCES[i * i % 11 % len(SENTENCES)] for i in range(count)]
    text.insert(count // 3, FACT)
    ids = torch.tensor([encode(" ".join(text) + QUESTION)])
    return Prompt(ids, "filler text with one fact a third of the way in", args.new_tokens, read, FACT_ANSWER)


def _spaced(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def time_in_turn(generate: Callable[[int], Any], repeats: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token, dense and dropped. In turn, so that a busy machine slows both."""
    dense, dropped = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        with uniprefill_fx.disabled():
            generate(1)
        between = time.perf_counter()
        generate(1)
        dense.append(between - began)
        dropped.append(time.perf_counter() - between)
    return dense, dropped


def show_layers(model: Any, call: uniprefill_fx.LastCall, tokens: int) -> None:
    """How many tokens each layer computed, as the run recorded it."""
    text_config = model.config.get_text_config()
    kinds = getattr(text_config, "layer_types", None)  # not every config has them; --explain reads the graph
    print(f"layer  tokens in  kept after it{'  attention' if kinds else ''}")
    for layer, rows in enumerate(call.num_tokens):
        kept = len(call.kept_indices[layer]) if layer in call.kept_indices else ""
        print(f"{layer:>5}  {rows:>9}  {kept:>13}  {kinds[layer].replace('_', ' ') if kinds else ''}".rstrip())
    print(f"Averaged over layers, {call.compute_fraction:.0%} of the {tokens} tokens were computed.")


def show_times(dense: list[float], dropped: list[float], device: str, model: Any) -> None:
    """Medians and ranges."""
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"Time to first token ({where}, {str(model.dtype).removeprefix('torch.')})")
    for name, seconds in (("dense", dense), ("dropped", dropped)):
        print(f"  {name:<8} median {statistics.median(seconds):7.3f} s   ({min(seconds):.3f} to {max(seconds):.3f})")


def show_answers(prompt: Prompt, dense: list[int], dropped: list[int]) -> None:
    """What the model said, and whether it is right."""
    for name, ids in (("dense", dense), ("dropped", dropped)):
        said = prompt.read(ids)
        verdict = "" if prompt.answer is None else "  right" if prompt.answer in said else "  WRONG"
        print(f"Answer, {name:<8} {said!r}{verdict}")
    if prompt.answer is not None:
        print(f"Expected         {prompt.answer!r}")
    print("The two answers are " + ("the same." if dense == dropped else "different."))


if __name__ == "__main__":
    main()
