"""Whether a budget of KL holds on prompts that a choice was not made on: by the mean, and by `calibrate()`'s bound.

    python benchmarks/calibration_replay.py benchmarks/results/real_model_gemma270m.json --budget 0.005

Prompts of one length are split at random, many times. From the settings that were measured, the one that computes least
within the budget on one part is chosen, and looked at on the other. No model runs.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from real_model_table import read, records

from uniprefill_fx.tools.search import Measured

Prompt = tuple[str, int]
Settings = dict[str, dict[Prompt, dict[str, Any]]]


def settings_of(found: list[dict[str, Any]], tokens: int) -> Settings:
    by_setting: Settings = defaultdict(dict)
    for record in found:
        if (record["part"], record["tokens"]) == ("text", tokens):
            by_setting[record["setting"]][record["kind"], record["prompt"]] = record
    most = max(map(len, by_setting.values()))  # settings that ran out of time have fewer prompts
    return {setting: prompts for setting, prompts in by_setting.items() if len(prompts) == most}


def replay(
    settings: Settings, budget: float, kl: str, searched: int, splits: int, cost: Callable[[Measured], float]
) -> tuple[float, float, float]:
    """KL and compute on the held-out prompts, averaged over splits, and the share of splits above the budget."""
    prompts, draw = list(next(iter(settings.values()))), random.Random(0)
    held, computes = [], []
    for _ in range(splits):
        draw.shuffle(prompts)
        own, others = prompts[:searched], prompts[searched:]

        def measured(setting: str, own: list[Prompt] = own) -> Measured:
            found = [settings[setting][prompt] for prompt in own]
            return Measured(tuple(r[kl] for r in found), tuple(r["compute"] for r in found), {})

        fitting = [name for name in settings if cost(measured(name)) <= budget]
        chosen = min(fitting, key=lambda name: measured(name).compute_fraction)
        held.append(statistics.fmean(settings[chosen][prompt][kl] for prompt in others))
        computes.append(statistics.fmean(settings[chosen][prompt]["compute"] for prompt in others))
    return statistics.fmean(held), statistics.fmean(computes), statistics.fmean(value > budget for value in held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--budget", type=float, default=0.005)
    parser.add_argument("--kl", choices=("kl", "kl_all"), default="kl", help="of the next token, or of 64 positions")
    parser.add_argument("--searched", type=int, default=6, help="prompts to choose on (%(default)s)")
    parser.add_argument("--splits", type=int, default=300)
    args = parser.parse_args()
    found = records(read(args.reports))
    print("| tokens | chosen by | held-out KL | compute | splits over the budget |\n|---|---|---|---|---|")
    for tokens in sorted({record["tokens"] for record in found if record["part"] == "text"}):
        settings = settings_of(found, tokens)
        ways: dict[str, Callable[[Measured], float]] = {"mean": lambda m: m.kl, "bound": lambda m: m.bound}
        for name, cost in ways.items():
            kl, compute, over = replay(settings, args.budget, args.kl, args.searched, args.splits, cost)
            print(f"| {tokens:,} | {name} | {kl:.4f} | {compute:.2f} | {over:.0%} |")


if __name__ == "__main__":
    main()
