"""RULER's tasks by lm-evaluation-harness on a model of yours, dense and with dropped tokens, side by side.

    pip install "lm_eval[hf,ruler]"
    python examples/ruler.py --model NAME_OR_FOLDER --lengths 4096 16384 --limit 50
    python examples/ruler.py --model NAME_OR_FOLDER --tasks niah_single_1 niah_multikey_2 --p 0.99 0.95 0.9 --out r.json
    python examples/ruler.py --model examples/ruler-gemma3 --inner-backend eager --limit 10      on a CPU
    python examples/ruler.py --model NAME_OR_FOLDER --option attention=block_sparse --alpha 0.1 0.2

niah_single_1 and niah_multikey_2 and 3 make their own text; tasks with essays or questions download data.
All columns are one compilation: dense runs inside `uniprefill_fx.disabled()`, each p and alpha inside `override`.
"dropped" counts the prompts of which tokens were really dropped, as `last_call()` recorded it, "compute" is the kept
fraction averaged over layers and prompts, "density" the computed part of the blocks of keys where attention is
block-sparse.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import itertools
import json
from dataclasses import dataclass, field
from importlib.metadata import version
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
    densities: list[float] = field(default_factory=list)

    def note(self, call: uniprefill_fx.LastCall) -> None:
        self.prompts += 1
        self.dropped += any(len(rows) != call.tokens for rows in call.kept_indices.values())
        self.works.append(call.compute_fraction)
        self.densities += [sum(call.density.values()) / len(call.density)] if call.density else []


def harness(model: Any, tokenizer: Any, max_length: int) -> tuple[Any, Seen]:
    """lm_eval's model class around a compiled model, and a record of what its prefills do."""
    from lm_eval.models.huggingface import HFLM

    seen = Seen()

    class Watched(HFLM):
        def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
            generate = super()._model_generate
            out, call = uniprefill_fx.watched(lambda: generate(*args, **kwargs))
            if call is None:
                raise RuntimeError("a prompt ran past the backend: Dynamo gave up compiling the model")
            seen.note(call)
            return out

    return Watched(pretrained=model, tokenizer=tokenizer, max_length=max_length, batch_size=1), seen


def evaluate(args: argparse.Namespace, model: Any, tokenizer: Any, task: str, length: int) -> dict[str, Any]:
    """lm_eval's score in [0, 1] at one length, and what the prefills did."""
    import lm_eval

    lm, seen = harness(model, tokenizer, length + args.room)
    with torch.inference_mode():
        results = lm_eval.simple_evaluate(
            lm,
            tasks=[task],
            limit=args.limit,
            bootstrap_iters=0,
            metadata={"pretrained": args.model, "max_seq_lengths": [length]},
        )
    assert results is not None
    score = results["results"][task][f"{length},none"]
    return {
        "score": score,
        "prompts": seen.prompts,
        "dropped": seen.dropped,
        "compute": round(sum(seen.works) / seen.prompts, 4),
    } | ({"density": round(sum(seen.densities) / len(seen.densities), 4)} if seen.densities else {})


def side_by_side(args: argparse.Namespace, model: Any, tokenizer: Any, task: str, length: int) -> dict[str, Any]:
    """One task at one length: dense, and with each p and alpha. The harness asks the same prompts each time."""
    with uniprefill_fx.disabled():
        dense = evaluate(args, model, tokenizer, task, length)
    runs = []
    for p, alpha in itertools.product(args.p or [None], args.alpha or [None]):
        changed = {name: value for name, value in {"p": p, "sparse_alpha": alpha}.items() if value is not None}
        with uniprefill_fx.override(**changed):
            runs.append({"p": p} | changed | evaluate(args, model, tokenizer, task, length))
    return {"task": task, "length": length, "dense": dense, "uniprefill": runs}


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    dtype = "auto" if args.device != "cpu" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    model = model.to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    options = {"inner_backend": args.inner_backend} | dict(args.option)
    uniprefill_fx.compile(model, **options)
    rows: list[dict[str, Any]] = []
    report = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "dtype": str(model.dtype).removeprefix("torch."),
        **{name: version(name) for name in ("torch", "transformers", "lm_eval")},
        "model": args.model,
        "options": options,
        "limit": args.limit,
        "rows": rows,
    }
    for length in args.lengths:
        for task in args.tasks:
            rows.append(side_by_side(args, model, tokenizer, task, length))
            if args.out is not None:
                args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"{'task':<18} {'length':>7} {'dense':>7} {'p':>12} {'alpha':>6} {'uniprefill':>11} {'dropped':>9} "
        f"{'compute':>7} {'density':>7}"
    )
    for row in rows:
        for run in row["uniprefill"]:
            print(
                f"{row['task']:<18} {row['length']:>7} {row['dense']['score']:>7.3f} {run['p'] or 'as compiled':>12} "
                f"{run.get('sparse_alpha', ''):>6} {run['score']:>11.3f} {run['dropped']:>4}/{run['prompts']:<4} "
                f"{run['compute']:>7.2f} {run.get('density', 1.0):>7.2f}"
            )


def option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face name or folder, with a tokenizer")
    parser.add_argument("--tasks", nargs="+", default=["niah_single_1"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096], help="of a prompt with its answer, in tokens")
    parser.add_argument("--limit", type=int, help="prompts of each task and length (default: all 500)")
    parser.add_argument("--room", type=int, default=256, help="tokens for the answer beyond the length")
    parser.add_argument("--p", type=float, nargs="+", help="in turn (default: as the options say)")
    parser.add_argument(
        "--alpha", type=float, nargs="+", help="sparse_alpha, in turn, of --option attention=block_sparse"
    )
    parser.add_argument("--option", type=option, action="append", default=[], help='"drop_layers=[3]"; several times')
    parser.add_argument("--inner-backend", default="inductor")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="also write JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
