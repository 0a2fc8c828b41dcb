"""Long prompts on your own model: what is dropped and why, answers beside the dense ones, time to the first token.

    uniprefill explain --model NAME_OR_FOLDER --prompt-file notes.txt --html report.html
    uniprefill demo    --model NAME_OR_FOLDER --prompt-file notes.txt --p 0.95
    uniprefill bench   --model model.gguf --tokens 4096 16384 --option drop_layers=[7,15] --json
    uniprefill serve   MODEL --p 0.95 [any flag of vllm serve]

Without a prompt file the prompt is made up: sentences with one fact among them. Results go to standard output, progress
and errors to standard error. Exit status: 0, 2 for what you can mend, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uniprefill_fx
from uniprefill_fx.config import PRESETS, OptionError, PrefillConfig
from uniprefill_fx.errors import StrictError
from uniprefill_fx.tools.cli_output import Progress, UserError, say

HUB_SECONDS = 10.0
"""How long the hub has to answer that it knows a model."""

COMMANDS = {
    "explain": "what is found in the model, dropped and refused on one prompt",
    "demo": "one prompt dense and dropped: layers, time to the first token, answers, KL of the next token",
    "bench": "time to the first token, dense and dropped, by length",
}
SERVE = "serve", "vLLM's server with dropping, and all of its flags: uniprefill serve MODEL --p 0.95"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] == ["serve"]:  # all that it does not know are vLLM's flags
        return int(importlib.import_module("uniprefill_fx.vllm.serve").main(given[1:]))
    args = _parser().parse_args(given)
    try:
        options = options_of(args)
        check(args)
        with Progress():
            say("loading PyTorch")
            # Not before: it takes seconds, and what a user can mend is known without it.
            result, text = importlib.import_module("uniprefill_fx.tools.cli_commands").run(args, options)
    except (UserError, OptionError, StrictError) as error:
        print(f"uniprefill {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"uniprefill {args.command}: interrupted", file=sys.stderr)
        return 130
    with contextlib.suppress(BrokenPipeError):  # `| head`
        print(json.dumps(result, indent=1) if args.json else text, flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="uniprefill", description=__doc__, formatter_class=form)
    parser.add_argument("--version", action="version", version=f"uniprefill-fx {uniprefill_fx.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join((*COMMANDS, SERVE[0])))
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("--model", required=True, help="hub name, folder, or GGUF file")
        command.add_argument("--prompt-file", type=Path, help="text; token ids for a model without a tokenizer")
        command.add_argument("--chat", action="store_true", help="the prompt is a user's turn: apply the chat template")
        command.add_argument("--tokens", type=_positive, nargs="+", help="lengths: cuts the file's start, or made up")
        command.add_argument("--preset", choices=tuple(PRESETS), help="how much stays; quality unless --p says it")
        command.add_argument("--p", help="attention mass to keep: 0.95, or 0.99,0.9 for each drop layer")
        command.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="any other option")
        command.add_argument("--device", help="default: cuda where there is a GPU, else cpu")
        command.add_argument("--json", action="store_true", help="the result as JSON")
        backend = "eager, compiling nothing" + ("" if name == "explain" else ", on a CPU, inductor on a GPU")
        command.add_argument("--inner-backend", help=f"compiles the pieces (default: {backend})")
        if name == "explain":
            command.add_argument("--html", type=Path, help="also write the report as a page")
            command.add_argument(
                "--answer", type=_positive, default=0, metavar="N", help="tokens to generate, compared"
            )
        if name == "demo":
            command.add_argument("--new-tokens", type=_positive, default=16, help="to generate (%(default)s)")
            command.add_argument("--expect", metavar="TEXT", help="says whether the answers hold this text")
        if name != "explain":
            command.add_argument("--repeats", type=_positive, default=5, help="timed prompts a kind (%(default)s)")
    commands.add_parser(SERVE[0], help=SERVE[1])
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: wanted a number, 1 or more")
    return int(text)


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The backend's options from --preset, --p, --option and --inner-backend, those of them that the command has.

    A value that is no literal is a string.

    Raises:
        OptionError, UserError: an option that is unknown, bad, or given twice.
    """

    def value(text: str) -> Any:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text

    chosen = {name: getattr(args, name, None) for name in ("inner_backend", "preset")}
    options: dict[str, Any] = {name: text for name, text in chosen.items() if text is not None}
    if args.p is not None:
        options["p"] = value(args.p)
    for text in args.option:
        name, equals, given = text.partition("=")
        if not equals:
            raise UserError(f"--option {text}: wanted NAME=VALUE, for example --option drop_layers=[7,15]")
        if name in options:
            raise UserError(f"--option {text}: {name} is given already, as {options[name]!r}; give it once")
        options[name] = value(given)
    PrefillConfig.from_options(options)
    return options


def check(args: argparse.Namespace) -> None:
    """What can be known of files and names before anything is loaded. Sets `args.local`: look at no network.

    Raises:
        UserError: a file or folder that is not there, or a model that the hub does not have.
    """
    html = getattr(args, "html", None)
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        raise UserError(f"--html {html}: " + ("it is a folder" if html.is_dir() else f"no folder {html.parent}"))
    if len(args.tokens or []) > 1 and (html is not None or args.command == "demo"):
        shows = f"--html {html}: a page" if html is not None else "--tokens: demo"
        raise UserError(f"{shows} shows one prompt, and {len(args.tokens)} lengths are given; give one")
    if args.prompt_file is not None and not args.prompt_file.is_file():
        wrong = "it is a folder, name a file" if args.prompt_file.is_dir() else "no such file"
        raise UserError(f"--prompt-file {args.prompt_file}: {wrong}")
    path = Path(args.model).expanduser()
    args.local = path.exists()
    if args.model.endswith(".gguf"):
        if not path.is_file():
            raise UserError(f"--model {args.model}: no such file")
    elif path.is_file():
        raise UserError(f"--model {args.model}: a file, but not a GGUF file; name the folder that it is in")
    elif not path.is_dir():
        if args.model.startswith((".", "/", "~")):
            raise UserError(f"--model {args.model}: no such folder")
        args.local = _only_cached(args.model)


def _only_cached(name: str) -> bool:
    """Whether a model of the hub is to be had from the cache alone. Loading would try, and wait, for each of its files.

    Raises:
        UserError: the hub has no such model, or does not answer and the model is not in the cache.
    """
    hub = importlib.import_module("huggingface_hub")
    errors = importlib.import_module("huggingface_hub.errors")
    where = f"--model {name}: no folder of that name, and"
    try:
        cached = isinstance(hub.try_to_load_from_cache(name, "config.json"), str)
        if not hub.constants.HF_HUB_OFFLINE:
            hub.HfApi().model_info(name, timeout=HUB_SECONDS)
            return False
        reason = "HF_HUB_OFFLINE is set"
    except errors.HFValidationError as error:
        raise UserError(f"{where} no name of the hub: {error}") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"{where} the hub has no such model, or not for everybody (log in: hf auth login)") from error
    except Exception as error:  # whatever the network has
        reason = f"the hub cannot be reached ({error})"
    if not cached:
        raise UserError(f"{where} {reason}; the model is not in the cache either")
    return True
