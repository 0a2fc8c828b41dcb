"""RULER's tasks by lm-evaluation-harness on a model of yours, dense and with dropped tokens, side by side.

    pip install "lm_eval[hf,ruler]"
    python examples/ruler.py --model NAME_OR_FOLDER --lengths 4096 16384 --limit 50
    python examples/ruler.py --model NAME_OR_FOLDER --tasks niah_single_1 niah_multikey_2 ruler_vt --p 0.95 --out r.json

niah_single_1 and niah_multikey_2 and 3 make their own haystack; tasks with essays or questions download data.
Both columns are one compilation: the dense one runs inside `uniprefill_fx.disabled()`. "dropped" counts the prompts of
which tokens were really dropped, as `last_call()` recorded it, "work" is the kept fraction averaged over layers.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import uniprefill_fx


@dataclass
class Seen:
    """What the prefills of one evaluation did."""

    prompts: int = 0
    dropped: int = 0
    works: list[float] = field(default_factory=list)

    def note(self, call: uniprefill_fx.LastCall) -> None:
        self.prompts += 1
        self.dropped += call.dropped
        self.works.append(call.work)


def harness(model: Any, tokenizer: Any, max_length: int) -> tuple[Any, Seen]:
    """lm_eval's model class around a compiled model, and a record of what its prefills do."""
    from lm_eval.models.huggingface import HFLM

    seen = Seen()

    class Watched(HFLM):
        def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
            before = uniprefill_fx.last_call()
            out = super()._model_generate(*args, **kwargs)
            call = uniprefill_fx.last_call()
            if call is None or call is before:
                raise RuntimeError("a prompt ran past the backend: Dynamo gave up compiling the model")
            seen.note(call)
            return out

    return Watched(pretrained=model, tokenizer=tokenizer, max_length=max_length, batch_size=1), seen


def evaluate(args: argparse.Namespace, model: Any, tokenizer: Any, length: int, dense: bool) -> dict[str, Any]:
    """Scores by task at one length, in [0, 1], as lm_eval computes them."""
    import lm_eval

    lm, seen = harness(model, tokenizer, length + args.room)
    context = uniprefill_fx.disabled() if dense else contextlib.nullcontext()
    with context, torch.inference_mode():
        results = lm_eval.simple_evaluate(
            lm,
            tasks=args.tasks,
            limit=args.limit,
            bootstrap_iters=0,
            metadata={"pretrained": args.model, "max_seq_lengths": [length]},
        )
    assert results is not None
    scores = {task: results["results"][task][f"{length},none"] for task in args.tasks}
    return {"scores": scores, "prompts": seen.prompts, "dropped": seen.dropped, "work": sum(seen.works) / seen.prompts}


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    dtype = "auto" if args.device != "cpu" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    model = model.to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    options: dict[str, Any] = {"inner_backend": args.inner_backend}
    options |= {} if args.p is None else {"p": ast.literal_eval(args.p)}
    uniprefill_fx.compile(model, **options | {name: ast.literal_eval(value) for name, value in args.option})
    rows = []
    for length in args.lengths:
        dense = evaluate(args, model, tokenizer, length, dense=True)
        dropped = evaluate(args, model, tokenizer, length, dense=False)
        rows.append({"length": length, "dense": dense, "uniprefill": dropped})
        if args.out is not None:
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{'task':<18} {'length':>7} {'dense':>7} {'uniprefill':>11} {'dropped':>9} {'work':>5}")
    for row in rows:
        for task in args.tasks:
            kept = row["uniprefill"]
            print(
                f"{task:<18} {row['length']:>7} {row['dense']['scores'][task]:>7.3f} {kept['scores'][task]:>11.3f} "
                f"{kept['dropped']:>4}/{kept['prompts']:<4} {kept['work']:>5.2f}"
            )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face name or folder, with a tokenizer")
    parser.add_argument("--tasks", nargs="+", default=["niah_single_1"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096], help="of 4096, 8192, … 131072 (lm_eval's)")
    parser.add_argument("--limit", type=int, help="prompts of each task and length (default: all 500)")
    parser.add_argument("--room", type=int, default=256, help="tokens for the answer beyond the length")
    parser.add_argument("--p", help="0.95, or 0.99,0.9 for each drop layer")
    parser.add_argument("--option", type=lambda text: tuple(text.split("=", 1)), action="append", default=[])
    parser.add_argument("--inner-backend", default="inductor")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="also write JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
