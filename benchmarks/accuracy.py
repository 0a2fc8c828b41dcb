"""Answers of the needle checkpoints with dropped tokens, beside dense ones and beside other ways to choose tokens.

    python benchmarks/accuracy.py --out benchmarks/results/accuracy.json             # 420 s; again: more prompts
    python benchmarks/accuracy.py --out /tmp/small.json --small                      # a few prompts, on the CPU
    python benchmarks/accuracy.py --out benchmarks/results/accuracy.json --table     # no run, only the table
    python benchmarks/accuracy.py --out all.json --add a.json b.json --table         # runs made side by side

(With PYTHONPATH=. where the package is not installed.) `accuracy_plot.py` draws the JSON.

Each prompt hides 1, 16 or 64 pairs of a key and four values in noise and asks for one key. The answer is four tokens
from `generate()`, right when all four are. KL is that of the distribution of the first one from dense. "kept" is by
drop layer, "compute" the kept fraction averaged over all layers. "lost" are answers right in dense and wrong here.
With the question "out", 256 tokens of noise follow it in the prompt, so that the selection does not see it, and it is
asked again on the cache.

Drop layers: "auto", "all" layers with full attention, or the "first" one of them. The checkpoints find their answer in
an early layer, and the attention of a drop layer is dense: a drop behind it shows little of how well rows are chosen.

Dense is the same compilation inside `uniprefill_fx.disabled()`. Every call's `last_call()` is checked: it is new, it
dropped (or was dense on purpose), and its length is the prompt's; "gone" are the prompts of which rows really went.
Rivals (`accuracy_rivals.py`) keep as many rows as the backend kept with p on the same prompt, layer by layer; top_k
keeps as many as p does on average. A p is tried in every cell, the rest in a few of them. Cells take turns until the
time is up, each with a new prompt; a later run with the same --out goes on with further prompts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from accuracy_rivals import RIVALS
from accuracy_tools import Answer, Cell, Row, Setting, Subject, make_prompt

PS = (0.999, 0.99, 0.975, 0.95, 0.9)
LOW = (0.8, 0.6, 0.4)
FULL = {"needle-llama": [*range(8)], "needle-gemma3": [2, 5, 8], "needle-qwen3-next": [3, 7]}
PAIRS = (1, 16, 64)
TRAINED = 16_384  # tokens; the checkpoints saw none longer


def own(*ps: float) -> list[Setting]:
    return [Setting(f"p={p}", {"p": p}) for p in ps]


def rivals(*ps: float) -> list[Setting]:
    return [Setting(f"{kind} as p={p}", kind=kind, like=p) for kind in RIVALS for p in ps]


def variants(name: str) -> Iterator[tuple[str, Any, str, float]]:
    """(label, drop_layers, window, share of the time) of each compilation."""
    yield "auto", "auto", "position", 7.0
    yield "all", "all", "position", 1.0
    yield "first", FULL[name][:1], "position", 2.0
    if name == "needle-gemma3":
        yield "auto", "auto", "index", 1.0


def settings(label: str, window: str, cell: Cell, small: bool) -> list[Setting]:
    """What is tried in a cell, in this order: what others are compared with comes first."""
    middle = cell.pairs == 16 and cell.tokens in ((1024,) if small else (4096, 16_384))
    if window == "index":
        return own(0.99, 0.95, 0.9) if middle and cell.place == "in" else []
    if cell.place == "out":
        fits = middle if label == "first" else label == "auto" and cell.tokens != 8192
        return own(0.99, 0.95, 0.9) if fits else []
    if label != "auto":
        return own(*PS[1:], *LOW) + rivals(0.95, 0.9, 0.8, 0.6) if middle else []
    if not middle:
        return own(*PS)
    others = [
        Setting("p=0.95 block_size=32", {"p": 0.95, "block_size": 32}),
        Setting("p=0.95 block_size=128", {"p": 0.95, "block_size": 128}),
        Setting("p=0.95 last_n=32", {"p": 0.95, "last_n": 32}),
        Setting("p=0.95 last_n=512", {"p": 0.95, "last_n": 512}),
        Setting("p=0.95 fp8", {"p": 0.95}, kind="fp8"),
        Setting("top_k as p=0.95", like=0.95),
    ]
    return own(*PS, *LOW) + others + rivals(0.95, 0.9, 0.6)


class Suite:
    """The rows so far, in a JSON file that is written again after each share of the time."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.perf_counter()
        self.rows: dict[tuple[Any, ...], Row] = {}
        self.dense: dict[tuple[str, Cell, int], Answer] = {}
        self.report: dict[str, Any] = {"runs": []}
        for path in [*([args.out] if args.out.is_file() else []), *args.add]:
            self.read(json.loads(path.read_text()))
        if args.add:
            self.save()

    def read(self, report: dict[str, Any]) -> None:
        """Take over the rows of an earlier run. Two runs hold the same prompts of a cell, so none may be in both."""
        self.report["runs"] += report["runs"]
        for row in (Row(**fields) for fields in report["rows"]):
            if row.key in self.rows:
                raise SystemExit(f"--add: {row.key} is in two files; runs side by side need other models or variants")
            self.rows[row.key] = row

    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def say(self, line: str) -> None:
        print(f"[{self.elapsed():6.1f} s] {line}", file=sys.stderr, flush=True)

    def row(self, name: str, label: str, window: str, setting: str, cell: Cell) -> Row:
        row = Row(name, label, window, setting, cell.tokens, cell.pairs, cell.place)
        return self.rows.setdefault(row.key, row)

    def save(self) -> None:
        rows = [asdict(row) for row in self.rows.values() if row.n]
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        self.args.out.write_text(json.dumps(self.report | {"rows": rows}, indent=1) + "\n")

    def run(self) -> None:
        args = self.args
        self.report["runs"].append(
            {
                "date": datetime.date.today().isoformat(),
                "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
                "dtype": "bfloat16" if args.device == "cuda" else "float32",
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "small": args.small,
            }
        )
        every = [(name, *variant) for name in args.models for variant in variants(name) if variant[0] in args.variants]
        for i, (name, label, layers, window, share) in enumerate(every):
            left = (args.budget - self.elapsed()) * share / sum(v[4] for v in every[i:])
            self.say(f"{name}, drop_layers={layers}, window={window}: {left:.0f} s")
            self.variant(name, label, layers, window, self.elapsed() + left)
            self.save()
        self.report["runs"][-1]["seconds"] = round(self.elapsed())
        self.save()

    def cells(self, name: str) -> list[Cell]:
        lengths = [n for n in self.args.lengths if n <= 16_384 or name == "needle-gemma3"]
        cells = [Cell(n, pairs) for n in lengths for pairs in PAIRS if not self.args.small or pairs == 16]
        return cells + [Cell(n, 16, "out") for n in lengths if n <= 16_384]

    def variant(self, name: str, label: str, layers: Any, window: str, until: float) -> None:
        """Prompts for one compilation: the cell with the fewest so far comes next, until the time is up."""
        todo = {c: s for c in self.cells(name) if (s := settings(label, window, c, self.args.small))}
        if not todo or self.elapsed() > self.args.budget:
            return
        subject = Subject(name, layers, window, self.args.device, self.args.inner_backend)
        reported, fewest = self.elapsed(), 0
        while fewest < self.args.rounds:
            cell = min(todo, key=lambda c: self.row(name, label, window, "dense", c).n)
            fewest = self.row(name, label, window, "dense", cell).n
            late = self.elapsed() > (until if fewest > 0 else self.args.budget)
            if fewest >= self.args.rounds or late:
                break
            self.prompt(subject, name, label, window, cell, todo[cell])
            if self.elapsed() > reported + 5:
                reported = self.elapsed()
                self.save()  # a run that is cut short loses little
                self.say(f"    at least {fewest} prompts in each of {len(todo)} cells")

    def prompt(self, subject: Subject, name: str, label: str, window: str, cell: Cell, wanted: list[Setting]) -> None:
        """One new prompt of a cell, under every setting."""
        seed = self.row(name, label, window, "dense", cell).n
        prompt = make_prompt(cell, seed)
        if (name, cell, seed) not in self.dense:
            self.dense[name, cell, seed] = subject.dense(prompt)
        dense = self.dense[name, cell, seed]
        kept: dict[float, Answer] = {}
        for setting in wanted:
            keep: list[int] = []
            if setting.kind == "own" and setting.like is not None:
                sums = self.row(name, label, window, f"p={setting.like}", cell)
                ratios = [total / sums.n for _, total in sorted(sums.kept_sum.items(), key=lambda kv: int(kv[0]))]
                setting = Setting(setting.name, {"keep_ratio": ratios})
            elif setting.like is not None:
                keep = list(kept[setting.like].kept.values())
            answer = subject.dropped(prompt, setting, keep)
            if setting.name == f"p={setting.changed.get('p')}":
                kept[setting.changed["p"]] = answer
            self.row(name, label, window, setting.name, cell).add(prompt, answer, dense)
        self.row(name, label, window, "dense", cell).add(prompt, dense, dense)  # last: it counts the prompts


def table(rows: list[Row]) -> str:
    """All rows, as text."""
    head = (
        f"{'model':<18}{'layers':<7}{'window':<9}{'selection':<24}{'tokens':>6}{'pairs':>6}{'place':>6}{'n':>5}"
        f"{'right %':>9}{'dense':>8}{'lost':>5}{'mean KL':>10}{'max KL':>9}{'compute':>8}  kept by layer (gone)"
    )
    dense = {row.key[:3] + row.key[4:]: row for row in rows if row.setting == "dense"}
    lines = [head]
    for row in sorted(rows, key=lambda r: (r.model, r.layers, r.window, r.place, r.setting, r.tokens, r.pairs)):
        if row.setting == "dense":
            continue
        kept = " ".join(f"{layer}:{total / row.n:.2f}" for layer, total in row.kept_sum.items())
        beside = dense.get(row.key[:3] + row.key[4:], row)
        lines.append(
            f"{row.model:<18}{row.layers:<7}{row.window:<9}{row.setting:<24}{row.tokens:>6}{row.pairs:>6}{row.place:>6}"
            f"{row.n:>5}{100 * row.exact / row.n:>9.1f}{100 * beside.exact / max(beside.n, 1):>8.1f}{row.lost:>5}"
            f"{row.kl_sum / row.n:>10.5f}{row.kl_max:>9.4f}{row.compute_sum / row.n:>8.2f}  {kept} ({row.gone}/{row.n})"
        )
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    """The rows of prompts within trained lengths, pooled over cells; and the goal for the default options."""
    pooled: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.tokens <= TRAINED and row.setting != "dense":
            pooled.setdefault((row.model, row.layers, row.window, row.place, row.setting), []).append(row)
    lines = [
        f"{'model':<18}{'layers':<7}{'window':<9}{'place':<6}{'selection':<24}{'prompts':>8}{'right %':>9}{'lost':>6}"
        f"{'gained':>7}{'mean KL':>10}{'compute':>8}{'dropped':>9}"
    ]
    for key, group in sorted(pooled.items()):
        n = sum(row.n for row in group)
        total = {name: sum(getattr(row, name) for row in group) for name in ("exact", "lost", "gained", "gone")}
        kl, compute = (sum(getattr(row, name) for row in group) / n for name in ("kl_sum", "compute_sum"))
        lines.append(
            f"{key[0]:<18}{key[1]:<7}{key[2]:<9}{key[3]:<6}{key[4]:<24}{n:>8}{100 * total['exact'] / n:>9.1f}"
            f"{total['lost']:>6}{total['gained']:>7}{kl:>10.5f}{compute:>8.2f}{total['gone'] / n:>9.0%}"
        )
    wanted = ("auto", "position", "p=0.99", "in")
    default = [r for r in rows if (r.layers, r.window, r.setting, r.place) == wanted and r.tokens <= TRAINED]
    if default:
        points = max((100 * (row.lost - row.gained) / row.n for row in default), default=0.0)
        kl = max(row.kl_sum / row.n for row in default)
        lines.append(
            f"Default options (p=0.99, auto), worst of {len(default)} cells: {points:.1f} points below dense (goal "
            f"0.5), mean KL {kl:.5f} (goal 0.01)"
        )
        n, lost = sum(row.n for row in default), sum(row.lost for row in default)
        at_most = f", so fewer than {300 / n:.1f} in 100 with 95% confidence" if not lost else ""
        lines.append(f"All of its cells together: {lost} of {n} answers lost{at_most}")
    return "\n".join(lines)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file, written and read again")
    parser.add_argument("--small", action="store_true", help="short prompts and few of them")
    parser.add_argument("--models", nargs="+", default=list(FULL), choices=list(FULL))
    parser.add_argument("--lengths", type=int, nargs="+", help="prompt tokens (1K to 16K, and 32K for Gemma-3)")
    parser.add_argument("--variants", nargs="+", default=["auto", "all", "first"], help="drop layers (%(default)s)")
    parser.add_argument(
        "--budget", type=float, default=420, help="seconds; a cell that got no prompt comes first in the next run"
    )
    parser.add_argument("--rounds", type=int, help="most prompts in a cell (default: as many as fit)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--inner-backend", default="eager", help="compiles the pieces (default: %(default)s)")
    parser.add_argument("--add", type=Path, nargs="+", default=[], help="JSON of runs to put into --out as well")
    parser.add_argument("--table", action="store_true", help="only print what --out holds")
    args = parser.parse_args(argv)
    args.lengths = args.lengths or ([1024] if args.small else [1024, 2048, 4096, 8192, 16_384, 32_768])
    args.rounds = args.rounds or (2 if args.small else 1_000_000)
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    suite = Suite(args)
    if not args.table:
        suite.run()
    rows = [row for row in suite.rows.values() if row.n]
    print(table(rows))
    print()
    print(summary(rows))


if __name__ == "__main__":
    main()
