"""`python -m uniprefill_fx explain|demo|bench`: a report, a comparison, or times on the user's own model and prompt.

    python -m uniprefill_fx explain --model NAME_OR_FOLDER --prompt-file notes.txt --html report.html
    python -m uniprefill_fx demo    --model NAME_OR_FOLDER --prompt-file notes.txt --p 0.95
    python -m uniprefill_fx bench   --model model.gguf --tokens 4096 16384 --option drop_layers=[7,15] --json

Results go to standard output, progress and errors to standard error. Exit status: 0, or 2 for what the user can mend.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import uniprefill_fx
from uniprefill_fx.config import OptionError
from uniprefill_fx.errors import StrictError
from uniprefill_fx.passes.trace_log import decisions
from uniprefill_fx.runtime.last_call import watched
from uniprefill_fx.tools.cli_inputs import Subject, UserError, load, say
from uniprefill_fx.tools.isolated import unwrapped


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        options = options_of(args)
        with unwrapped():
            result, text = args.run(args, load(args), options)
    except (UserError, OptionError, StrictError) as error:
        print(f"uniprefill_fx {args.command}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=1) if args.json else text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m uniprefill_fx", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="explain|demo|bench")
    about = {
        "explain": (explain, "what is found in the model, dropped and refused on one prompt"),
        "demo": (demo, "one prompt dense and dropped: tokens that follow, and how far the next token's odds moved"),
        "bench": (bench, "time to the first token, dense and dropped"),
    }
    for name, (run, help_text) in about.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.set_defaults(run=run)
        command.add_argument("--model", required=True, help="hub name, folder, or GGUF file")
        command.add_argument("--prompt-file", type=Path, help="text; token ids for a model without a tokenizer")
        command.add_argument("--tokens", type=_positive, nargs="+", help="lengths: cuts the file, or random tokens")
        command.add_argument("--p", help="attention mass to keep: 0.95, or 0.99,0.9 for each drop layer")
        command.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="any other option")
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        command.add_argument("--json", action="store_true", help="the result as JSON")
        if name == "explain":
            command.add_argument("--html", type=Path, help="also write the report as a page")
        else:
            command.add_argument("--inner-backend", default="inductor", help="compiles the pieces (%(default)s)")
        if name == "demo":
            command.add_argument("--new-tokens", type=_positive, default=16)
        if name == "bench":
            command.add_argument("--repeats", type=_positive, default=5)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: wanted a number, 1 or more")
    return int(text)


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The backend's options from --p, --option and --inner-backend; a value that is no literal is a string."""

    def value(text: str) -> Any:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text

    options: dict[str, Any] = {}
    if hasattr(args, "inner_backend"):
        options["inner_backend"] = args.inner_backend
    if args.p is not None:
        options["p"] = value(args.p)
    for text in args.option:
        name, equals, given = text.partition("=")
        if not equals:
            raise UserError(f"--option {text}: wanted NAME=VALUE, for example --option drop_layers=[7,15]")
        options[name] = value(given)
    uniprefill_fx.PrefillConfig.from_options(options)
    return options


# Commands


def explain(args: argparse.Namespace, subject: Subject, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The report of the first prompt, also as a page with --html."""
    report = uniprefill_fx.explain(subject.model, subject.prompts[0], **options)
    if args.html is not None:
        report.to_html(args.html, subject.tokenizer)
        say(f"wrote {args.html}")
    call, savings = report.call, report.savings
    result = decisions(report.plan, report.decoder.seconds) | _ran(call)
    if savings is not None:
        result |= {"flops_saved": savings.flops_saved, "kv_saved": savings.kv_saved}
    return result, str(report)


def _ran(call: uniprefill_fx.LastCall | None) -> dict[str, Any]:
    """What a prefill did, fit for JSON."""
    if call is None:
        call = uniprefill_fx.LastCall(False, None, None)
        return _ran(call) | {"reason": "no prefill reached the backend"}
    return {
        "dropped": call.dropped,
        "reason": str(call.reason) if call.reason is not None else None,
        "tokens": call.tokens,
        "num_tokens": list(call.num_tokens),
        "kept": {layer: len(kept) for layer, kept in call.kept_indices.items()},
        "compute_fraction": call.compute_fraction,
    }


def demo(args: argparse.Namespace, subject: Subject, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What follows the first prompt, dense and dropped, and KL of the next token's distribution."""
    model, ids = uniprefill_fx.compile(subject.model, **options), subject.prompts[0]
    config: dict[str, Any] = {"max_new_tokens": args.new_tokens, "do_sample": False, "return_dict_in_generate": True}

    def generate() -> tuple[list[int], Tensor]:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), output_logits=True, **config)
        return out.sequences[0, ids.shape[1] :].tolist(), out.logits[0][0].double().log_softmax(-1)

    with torch.inference_mode():
        say(f"dropped: tracing, and compiling with {args.inner_backend!r}")
        (tokens, logprobs), call = watched(generate)
        say("dense, by the same trace")
        with uniprefill_fx.disabled():
            dense_tokens, dense = generate()
    kl = float((dense.exp() * (dense - logprobs)).sum())
    result = _ran(call) | {"kl": kl, "dense": subject.read(dense_tokens), "text": subject.read(tokens)}
    same = "the same tokens" if tokens == dense_tokens else "different tokens"
    lines = [str(call or result["reason"]), f"KL of the next token from dense: {kl:.2g}; {same} follow"]
    return result, "\n".join([*lines, f"dense:   {result['dense']!r}", f"dropped: {result['text']!r}"])


def bench(args: argparse.Namespace, subject: Subject, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Medians of the time to the first token, dense and dropped in turn, for each prompt."""
    model = uniprefill_fx.compile(subject.model, **options)

    def seconds(ids: Tensor) -> float:
        began = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
        out.tolist()  # waits for the device
        return time.perf_counter() - began

    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for ids in subject.prompts:
            say(f"{ids.shape[1]:,} tokens: compiling with {args.inner_backend!r} where it is new")
            times = _in_turn(lambda ids=ids: seconds(ids), args.repeats)  # type: ignore[misc]
            rows.append(times | {"tokens": ids.shape[1]})
    head = f"{'tokens':>8} {'dense ms':>10} {'dropped ms':>11} {'ratio':>6} {'compute':>7}"
    lines = [
        f"{row['tokens']:>8} {row['dense_ms']:>10.1f} {row['dropped_ms']:>11.1f} {row['ratio']:>6.2f} "
        + f"{row['compute_fraction']:>7.2f}"
        + ("" if row["dropped"] else f"  ran dense: {row['reason']}")
        for row in rows
    ]
    return {"device": args.device, "results": rows}, "\n".join([head, *lines])


def _in_turn(run: Callable[[], float], repeats: int) -> dict[str, Any]:
    """In turn, so that a busy machine slows both; the first of each, which compiles, is not counted."""
    times: dict[str, list[float]] = {"dense": [], "dropped": []}
    for _ in range(repeats + 1):
        with uniprefill_fx.disabled():
            times["dense"].append(run())
        took, call = watched(run)
        times["dropped"].append(took)
    dense, dropped = (1e3 * statistics.median(times[name][1:]) for name in ("dense", "dropped"))
    return _ran(call) | {"dense_ms": dense, "dropped_ms": dropped, "ratio": dense / dropped}
