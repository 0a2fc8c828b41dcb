"""Other scores for choosing tokens on RULER's multikey tasks, beside the published ones at equal compute.

    python benchmarks/ruler_variants.py --out benchmarks/results/ruler_variants_cpu.json

The model is `examples/ruler-gemma3`, the prompts are those of `ruler_prompts.py`, in the harness' format. Each choice
keeps as many rows as the published scores with p do at the same drop of the same prompt (`score_variants.py`). An
answer is right when each of its tokens is the likeliest one behind those before it. "lost" are those that dense had.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from masked_forward import MaskedForward
from real_model_tools import spread
from ruler_prompts import ANSWER, TASKS, batch
from score_variants import RIVALS, VARIANTS, Variant
from torch import Tensor
from transformers import AutoModelForCausalLM

from uniprefill_fx.passes.analyze.drop_layers import auto_drop_layers

MODEL = Path(__file__).resolve().parents[1] / "examples" / "ruler-gemma3"


def exam(name: str, length: int, seed: int) -> tuple[Tensor, list[int]]:
    """A prompt (1, tokens) int64 that asks one question, and its answer."""
    (task,) = (task for task in TASKS if task.name == name)
    ids, classes = batch(random.Random(f"{name} {seed}"), [task], length, exam=True)
    (places,) = (classes[0] == ANSWER).nonzero(as_tuple=True)
    start, end = int(places[0]), int(places[-1]) + 1
    return ids[:, :start].long(), ids[0, start:end].tolist()


def main() -> None:
    args = arguments()
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    kinds = model.config.layer_types
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    masked = MaskedForward(model, auto_drop_layers(full, len(kinds)))
    chosen = [v for v in (*VARIANTS[1:], *map(Variant, RIVALS)) if not args.only or v.label in args.only]
    began, counts = time.perf_counter(), defaultdict[tuple[str, str], list[float]](lambda: [0, 0, 0, 0.0])
    for seed in range(args.first, args.first + args.prompts):
        for task in args.tasks:
            prompt, answer = exam(task, args.length, seed)
            right = torch.tensor(answer)

            def correct(logits: Tensor, right: Tensor = right) -> bool:
                return bool((logits.argmax(-1) == right).all())

            dense = correct(masked(prompt, answer[:-1])[0])

            def note(setting: str, found: bool, compute: float, task: str = task, dense: bool = dense) -> None:
                row = counts[task, setting]
                for i, value in enumerate((1, found, dense and not found, compute)):
                    row[i] += value

            note("dense", dense, 1.0)
            for first, last in args.p:
                name = f"p={first:g}..{last:g}"
                base = Variant(p=spread(first, last, len(masked.drop_layers)))
                logits, kept = masked(prompt, answer[:-1], base)
                compute = masked.compute_fraction(prompt.shape[1], kept)
                note(f"sum like {name}", correct(logits), compute)
                for variant in chosen:
                    logits, _ = masked(prompt, answer[:-1], variant.like(kept, seed))
                    note(f"{variant.label} like {name}", correct(logits), compute)
        report = {
            "what": __doc__.splitlines()[0],
            "date": datetime.date.today().isoformat(),
            "device": "cpu",
            "torch": torch.__version__,
            "model": args.model.name,
            "drop_layers": masked.drop_layers,
            "length": args.length,
            "first_prompt": args.first,
            "seconds": round(time.perf_counter() - began),
            "columns": ["task", "setting", "prompts", "right", "lost", "compute"],
            "rows": [[*key, n, right, lost, round(c / n, 4)] for key, (n, right, lost, c) in counts.items()],
        }
        args.out.write_text(json.dumps(report, indent=None, separators=(",", ":")) + "\n")
        print(f"[{report['seconds']} s] {seed + 1 - args.first} prompts of each task", file=sys.stderr, flush=True)
    print("| task | setting | n | right | lost | compute |\n|---|---|---|---|---|---|")
    for (task, setting), (n, found, lost, compute) in counts.items():
        print(f"| {task} | {setting} | {n} | {found:.0f} | {lost:.0f} | {compute / n:.2f} |")


def arguments() -> argparse.Namespace:
    def pair(text: str) -> tuple[float, float]:
        first, _, last = text.partition("..")
        return float(first), float(last or first)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--tasks", nargs="+", default=["niah_multikey_2", "niah_multikey_3"])
    parser.add_argument("--length", type=int, default=4096, help="characters (%(default)s)")
    parser.add_argument("--prompts", type=int, default=50, help="of each task (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first prompt, to go on where a run ended")
    parser.add_argument("--p", type=pair, nargs="+", default=[(0.9, 0.9)], help="p, or p..p: first to last drop")
    parser.add_argument("--only", nargs="+", help="labels of variants")
    return parser.parse_args()


if __name__ == "__main__":
    main()
