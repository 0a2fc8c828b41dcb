"""The commands of `cli.py`: each returns its result for `--json`, and as text."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor

import uniprefill_fx
from uniprefill_fx.lowering.inner import checked_inner_backend
from uniprefill_fx.passes.trace_log import decisions
from uniprefill_fx.runtime.last_call import watched
from uniprefill_fx.tools.cli_inputs import Subject, check_device, load
from uniprefill_fx.tools.cli_output import say
from uniprefill_fx.tools.isolated import unwrapped

Result = tuple[dict[str, Any], str]


def run(args: argparse.Namespace, options: dict[str, Any]) -> Result:
    """Load what the arguments name, and run their command on it.

    Raises:
        UserError, OptionError, StrictError: what the user can mend.
    """
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(args.device)
    args.inner_backend = options.setdefault("inner_backend", inner_backend_for(args.command, args.device))
    checked_inner_backend(args.inner_backend)
    commands = {"explain": explain, "demo": demo, "bench": bench}
    with unwrapped():
        return commands[args.command](args, load(args), options)


def inner_backend_for(command: str, device: str) -> str:
    """Inductor where its minutes of compiling are few and pay: on a GPU, and not for one look at a prompt."""
    return "eager" if command == "explain" or device == "cpu" else "inductor"


def explain(args: argparse.Namespace, subject: Subject, options: dict[str, Any]) -> Result:
    """The report of each prompt; of one, also as a page with --html."""
    found = [_explained(args, subject, ids, options) for ids in subject.prompts]
    if len(found) == 1:
        return found[0]
    return {"results": [result for result, _ in found]}, "\n\n".join(text for _, text in found)


def _explained(args: argparse.Namespace, subject: Subject, ids: Tensor, options: dict[str, Any]) -> Result:
    say(f"{ids.shape[1]:,} tokens: tracing the model, and running the prompt once")
    report = uniprefill_fx.explain(subject.model, ids, answer=args.answer, **options)
    call, savings = report.call, report.savings
    if args.html is not None:
        say("running it twice more, for the page's slider")
        report.to_html(args.html, subject.tokenizer)
        say(f"wrote {args.html}")
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


class Timed:
    """A compiled model and one prompt: what follows, and the time to the first token."""

    def __init__(self, model: Any, ids: Tensor, inner_backend: str) -> None:
        self.model, self.ids, self.inner_backend = model, ids, inner_backend

    def generate(self, new_tokens: int) -> tuple[list[int], Tensor]:
        """The next tokens, greedily, and the log-probabilities of the first, (vocabulary,) float64. Waits for the
        device."""
        out = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = out.sequences[0, self.ids.shape[1] :].tolist()
        return tokens, out.logits[0][0].double().log_softmax(-1)

    def seconds(self) -> float:
        began = time.perf_counter()
        self.generate(1)
        return time.perf_counter() - began

    def times(self, repeats: int) -> dict[str, Any]:
        """Medians in milliseconds, in turn, so that a busy machine slows both; the first of each, which compiles, is
        not counted."""
        compiles = "a first run, not timed, which traces the model if need be"
        if self.inner_backend != "eager":
            compiles += (
                f" and compiles with {self.inner_backend!r}, for minutes on a CPU (--inner-backend eager does not)"
            )
        say(f"{self.ids.shape[1]:,} tokens, dense: {compiles}")
        with uniprefill_fx.disabled():
            self.seconds()
        say(f"{self.ids.shape[1]:,} tokens, dropped: {compiles}")
        _, call = watched(self.seconds)
        say(f"time to the first token, {repeats} times each, in turn")
        times: dict[str, list[float]] = {"dense": [], "dropped": []}
        for _ in range(repeats):
            with uniprefill_fx.disabled():
                times["dense"].append(self.seconds())
            times["dropped"].append(self.seconds())
        dense, dropped = (1e3 * statistics.median(times[name]) for name in ("dense", "dropped"))
        return _ran(call) | {"dense_ms": dense, "dropped_ms": dropped, "ratio": dense / dropped}


def demo(args: argparse.Namespace, subject: Subject, options: dict[str, Any]) -> Result:
    """The first prompt dense and dropped: tokens by layer, times, KL of the next token's distribution, answers."""
    timed = Timed(uniprefill_fx.compile(subject.model, **options), subject.prompts[0], args.inner_backend)
    with torch.inference_mode():
        result = timed.times(args.repeats)
        say(f"{args.new_tokens} tokens of the answer, dropped and dense; the first step after the prompt is traced")
        tokens, logprobs = timed.generate(args.new_tokens)
        with uniprefill_fx.disabled():
            dense_tokens, dense = timed.generate(args.new_tokens)
    kl = float((dense.exp() * (dense - logprobs)).sum())
    result |= {"kl": kl, "dense": subject.read(dense_tokens), "text": subject.read(tokens)}
    result |= {"expected": subject.expected}
    return result, "\n".join([*_layers(subject.model, result), "", *_times(subject.model, result), *_answers(result)])


def _layers(model: Any, result: dict[str, Any]) -> list[str]:
    """How many tokens each layer computed."""
    if not result["dropped"]:
        return [f"this prompt ran dense: {result['reason'] or 'no reason was recorded'}"]
    kinds = getattr(model.config.get_text_config(), "layer_types", None)  # `explain` reads them off the graph
    lines = [f"layer  tokens in  kept after it{'  attention' if kinds else ''}"]
    for layer, rows in enumerate(result["num_tokens"]):
        kept, kind = result["kept"].get(layer, ""), kinds[layer].replace("_", " ") if kinds else ""
        lines.append(f"{layer:>5}  {rows:>9}  {kept:>13}  {kind}".rstrip())
    share = f"{result['compute_fraction']:.0%} of the {result['tokens']} tokens were computed"
    return [*lines, f"Averaged over layers, {share}."]


def _times(model: Any, result: dict[str, Any]) -> list[str]:
    device, dtype = model.device, str(model.dtype).removeprefix("torch.")
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{device}, {torch.get_num_threads()} threads"
    dense, dropped, ratio = (result[name] for name in ("dense_ms", "dropped_ms", "ratio"))
    return [
        f"Time to the first token ({where}, {dtype}): dense {dense:,.0f} ms, dropped {dropped:,.0f} ms ({ratio:.2f}x)",
        f"KL divergence of the next token's odds from dense: {result['kl']:.2g}",
    ]


def _answers(result: dict[str, Any]) -> list[str]:
    expected = result["expected"]
    lines = []
    for name, said in (("dense", result["dense"]), ("dropped", result["text"])):
        verdict = "" if expected is None else "  right" if expected in said else "  WRONG"
        lines.append(f"Answer, {name + ':':<9} {said!r}{verdict}")
    same = "The two answers are " + ("the same." if result["dense"] == result["text"] else "different.")
    return [*lines, *([] if expected is None else [f"Expected:         {expected!r}"]), same]


def bench(args: argparse.Namespace, subject: Subject, options: dict[str, Any]) -> Result:
    """Medians of the time to the first token, dense and dropped in turn, for each prompt."""
    model = uniprefill_fx.compile(subject.model, **options)
    with torch.inference_mode():
        rows = [
            Timed(model, ids, args.inner_backend).times(args.repeats) | {"tokens": ids.shape[1]}
            for ids in subject.prompts
        ]
    head = f"{'tokens':>8} {'dense ms':>10} {'dropped ms':>11} {'ratio':>6} {'compute':>7}"
    lines = [
        f"{row['tokens']:>8} {row['dense_ms']:>10.1f} {row['dropped_ms']:>11.1f} {row['ratio']:>6.2f} "
        + f"{row['compute_fraction']:>7.2f}"
        + ("" if row["dropped"] else f"  ran dense: {row['reason']}")
        for row in rows
    ]
    return {"device": str(subject.model.device), "results": rows}, "\n".join([head, *lines])
