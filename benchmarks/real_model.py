"""Quality and speed at the same settings, on any model and any texts.

    python benchmarks/real_texts.py --out texts
    python benchmarks/real_model.py --model FOLDER_OR_GGUF --text texts/*.txt --out real.json
    python benchmarks/real_model.py --model ... --text ... --parts time --inner-backend inductor --out time.json
    python benchmarks/real_model.py --table real.json time.json            # no run, only the tables
    python benchmarks/real_model_plot.py real.json time.json --out curve.png

(With PYTHONPATH=. where the package is not installed.) Each text file is a kind; prompts are windows of it, evenly
spaced. Parts, in this order:

- time: milliseconds to the first token, medians, of dense, of torch.compile without the package ("stock"), and of the
  settings.
- text: KL divergence from dense and top-1 agreement, of the next token and averaged over 64 positions: the next token
  and 63 that follow it, which are the dense model's own. Dense is the same compilation inside `disabled()`. "p=1" keeps
  everything: what is left is rounding. Logits are computed in float32 here.
- variants: the same for other scores and for rivals, in a forward without the package (`masked_forward.py`), which keep
  as many rows as the published scores do on the same prompt ("like p").
- passkey, multikey: one needle, or ten of which one is asked for, at ten depths; right when each token of the answer is
  the likeliest one behind those before it.

A run ends early when its seconds are spent; the file is written as it goes. Several runs side by side need files of
their own, and no part "time" among them.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from masked_forward import MaskedForward
from real_model_table import read, tables
from real_model_tools import COLUMNS, Subject, begin_of, compare, greedy, load, spread, times, with_float_head
from real_texts import DEPTHS, hide, multi_key, pass_key, windows
from score_variants import RIVALS, VARIANTS, Variant
from torch import Tensor

PARTS = ("time", "text", "variants", "passkey", "multikey")
GRID = (
    *((p, p) for p in (1.0, 0.999, 0.99, 0.975, 0.95, 0.9, 0.8)),
    *((0.999, p) for p in (0.95, 0.9, 0.7, 0.5)),
    *((0.99, p) for p in (0.9, 0.8, 0.7, 0.5)),
    *((0.975, p) for p in (0.9, 0.8, 0.6)),
    *((0.95, p) for p in (0.8, 0.6, 0.5)),
    *((0.9, p) for p in (0.7, 0.5)),
    (0.8, 0.5),
)
"""p at the first and at the last drop layer."""
LIKE = ((0.99, 0.7), (0.9, 0.7))
"""Where variants and rivals are compared."""
TIMED = ((0.999, 0.9), (0.99, 0.99), (0.99, 0.9), (0.99, 0.7), (0.95, 0.95), (0.95, 0.5), (0.9, 0.5))
NEEDLED = ((0.99, 0.99), (0.99, 0.9), (0.99, 0.7), (0.95, 0.95), (0.95, 0.5), (0.9, 0.9), (0.9, 0.5))
TASKS = {"passkey": pass_key, "multikey": multi_key}
POSITIONS = 64


def name_of(pair: tuple[float, float]) -> str:
    return f"p={pair[0]:g}" if pair[0] == pair[1] else f"p={pair[0]:g}..{pair[1]:g}"


class Study:
    """One model, its prompts, and the records so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.perf_counter()
        self.model, self.tokenizer = load(args.model, args.tokenizer, args.device)
        self.begin = begin_of(self.tokenizer)
        self.ids = {path.stem: self._read(path) for path in args.text}
        self.records: list[list[Any]] = []
        self.report: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "machine": torch.cuda.get_device_name() if args.device != "cpu" else f"CPU, {os.cpu_count()} cores",
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "model": Path(args.model).name,
            "inner_backend": args.inner_backend,
            "block_size": args.block_size,
            "text_tokens": {kind: len(ids) for kind, ids in self.ids.items()},
            "times": {},
            "columns": COLUMNS,
            "records": self.records,
        }

    def _read(self, path: Path) -> list[int]:
        text = path.read_text(encoding="utf-8")
        pieces = [text[i : i + 100_000] for i in range(0, len(text), 100_000)]
        return [i for own in self.tokenizer(pieces, add_special_tokens=False).input_ids for i in own]

    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def save(self) -> None:
        self.report["seconds"] = round(self.elapsed())
        self.args.out.write_text(json.dumps(self.report, separators=(",", ":")) + "\n")

    def say(self, line: str) -> None:
        print(f"[{self.elapsed():6.1f} s] {line}", file=sys.stderr, flush=True)

    def prompts(self, tokens: int) -> Iterator[tuple[str, int, Tensor]]:
        """The kinds take turns."""
        each = {kind: windows(ids, tokens, self.args.prompts, self.begin) for kind, ids in self.ids.items()}
        for i in range(self.args.prompts):
            for kind, own in each.items():
                yield kind, i, own[i].to(self.args.device)

    def note(self, part: str, ids: Tensor, kind: str, prompt: int, setting: str, values: dict[str, Any]) -> None:
        known = {"part": part, "tokens": ids.shape[1], "kind": kind, "prompt": prompt, "setting": setting} | values
        self.records.append([known.get(column) for column in COLUMNS])

    def time(self) -> None:
        """Alone on its device, before anything else is compiled."""
        subject = Subject(self.model, self.args.inner_backend, self.args.block_size)
        first = next(self.prompts(self.args.lengths[0]))[2]
        subject.prefill(first, None)
        count = len(subject.drop_layers)
        settings = {"dense": None} | {name_of(pair): spread(*pair, count) for pair in self.args.timed}
        stock: Any = None
        if self.args.stock:
            stock = torch.compile(copy.deepcopy(self.model), dynamic=True, backend=self.args.inner_backend)
        for tokens in self.args.lengths:
            prompts = [ids for _, i, ids in self.prompts(tokens) if i == 0]
            self.report["times"][str(tokens)] = times(subject, stock, prompts, settings, self.args.rounds)
            self.say(f"time, {tokens} tokens: {self.report['times'][str(tokens)]}")
            self.save()

    def quality(self) -> None:
        """All other parts; of the seconds, needles have a third."""
        plain = copy.deepcopy(self.model)
        self.subject = Subject(with_float_head(self.model), self.args.inner_backend, self.args.block_size)
        first = next(self.prompts(self.args.lengths[0]))[2]
        self.subject.prefill(first[:, :512], None)
        self.masked = MaskedForward(self.model, self.subject.drop_layers)
        self.say(f"drop layers {self.subject.drop_layers}")
        needles = [part for part in self.args.parts if part in TASKS]
        works = [(part, tokens) for tokens in self.args.lengths for part in ("text", *needles)]
        ends = self.elapsed()
        for part, tokens in works:
            share = (1 / 3 / len(needles) if part in TASKS else 2 / 3) if needles else 1
            ends += (self.args.seconds - ends if (part, tokens) == works[-1] else 0) or (
                self.args.seconds * share / len(self.args.lengths)
            )
            if part in TASKS:
                self.needles(part, tokens, ends)
            elif {"text", "variants"} & set(self.args.parts):
                self.texts(plain, tokens, ends)
            self.save()

    def texts(self, plain: Any, tokens: int, ends: float) -> None:
        done = 0
        for kind, i, ids in self.prompts(tokens):
            if done and self.elapsed() > ends:
                break
            follow = greedy(plain, ids, POSITIONS - 1)
            if "text" in self.args.parts:
                self.by_package(kind, i, ids, follow)
            if "variants" in self.args.parts and i < self.args.variant_prompts:
                self.by_masks(kind, i, ids, follow)
            done += 1
            self.save()
        self.say(f"{tokens} tokens: {done} prompts")

    def by_package(self, kind: str, prompt: int, ids: Tensor, follow: Sequence[int]) -> None:
        count = len(self.subject.drop_layers)
        dense, _ = self.subject.say(ids, follow, None)
        for pair in self.args.grid:
            logits, call = self.subject.say(ids, follow, spread(*pair, count))
            kept = [round(len(rows) / ids.shape[1], 4) for rows in call.kept_indices.values()]
            more = {"compute": round(call.compute_fraction, 4), "kept": kept}
            self.note("text", ids, kind, prompt, name_of(pair), compare(dense, logits) | more)

    def by_masks(self, kind: str, prompt: int, ids: Tensor, follow: Sequence[int]) -> None:
        tokens, masked = ids.shape[1], self.masked
        dense, _ = masked(ids, follow)
        for pair in self.args.like:
            base = Variant(p=spread(*pair, len(masked.drop_layers)))
            logits, kept = masked(ids, follow, base)
            more = {
                "compute": round(masked.compute_fraction(tokens, kept), 4),
                "kept": [round(len(rows) / tokens, 4) for rows in kept],
            }
            self.note("variants", ids, kind, prompt, f"sum like {name_of(pair)}", compare(dense, logits) | more)
            for variant in [*VARIANTS[1:], *map(Variant, RIVALS)]:
                logits, _ = masked(ids, follow, variant.like(kept, seed=prompt))
                label = f"{variant.label} like {name_of(pair)}"
                self.note("variants", ids, kind, prompt, label, compare(dense, logits) | more)

    def needles(self, task: str, tokens: int, ends: float) -> None:
        """A prompt for each depth, again with other text and numbers while there is time."""
        kinds, count, done = list(self.ids), len(self.subject.drop_layers), 0
        for number in range(self.args.needles * DEPTHS):
            if done >= DEPTHS and self.elapsed() > ends:
                break
            depth, kind = number % DEPTHS, kinds[number % len(kinds)]
            hidden, question, answer = (self._tokens(part) for part in TASKS[task](depth, number // DEPTHS))
            filler = windows(self.ids[kind], tokens, self.args.needles * DEPTHS, self.begin)[number]
            ids = hide(filler, hidden, question, len(self.begin)).to(self.args.device)
            right = torch.tensor(answer, device=ids.device)

            def correct(logits: Tensor, right: Tensor = right) -> float:
                return float((logits.argmax(-1) == right).all())

            logits, _ = self.subject.say(ids, answer[:-1], None)
            self.note(task, ids, kind, depth, "dense", {"right": correct(logits), "compute": 1.0})
            for pair in self.args.needled:
                logits, call = self.subject.say(ids, answer[:-1], spread(*pair, count))
                found = {"right": correct(logits), "compute": round(call.compute_fraction, 4)}
                self.note(task, ids, kind, depth, name_of(pair), found)
            if "variants" in self.args.parts:
                self.needles_by_masks(task, kind, depth, ids, answer, correct)
            done += 1
        self.say(f"{task}, {tokens} tokens: {done} prompts")

    def needles_by_masks(
        self, task: str, kind: str, depth: int, ids: Tensor, answer: Sequence[int], correct: Any
    ) -> None:
        for pair in self.args.like[-1:]:
            base = Variant(p=spread(*pair, len(self.masked.drop_layers)))
            logits, kept = self.masked(ids, answer[:-1], base)
            more = {"compute": round(self.masked.compute_fraction(ids.shape[1], kept), 4)}
            self.note(task, ids, kind, depth, f"sum like {name_of(pair)}", {"right": correct(logits)} | more)
            for variant in [*VARIANTS[1:], *map(Variant, RIVALS)]:
                logits, _ = self.masked(ids, answer[:-1], variant.like(kept, seed=depth))
                label = f"{variant.label} like {name_of(pair)}"
                self.note(task, ids, kind, depth, label, {"right": correct(logits)} | more)

    def _tokens(self, part: Any) -> Any:
        """Texts as ids, also inside a list of what is to be hidden."""
        if isinstance(part, str):
            return self.tokenizer(part, add_special_tokens=False).input_ids
        return [(share, self._tokens(text)) for share, text in part]


def pair(text: str) -> tuple[float, float]:
    """ "0.99" or "0.99..0.7" """
    first, _, last = text.partition("..")
    return float(first), float(last or first)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, nargs="+", help="only print what these files hold")
    parser.add_argument("--model", help="hub name, folder, or GGUF file")
    parser.add_argument("--tokenizer", help="hub name or folder (default: the model's)")
    parser.add_argument("--text", type=Path, nargs="+", help="files in UTF-8, one for each kind of text")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16_384, 32_768], help="(%(default)s)")
    parser.add_argument("--prompts", type=int, default=7, help="of each kind and length (%(default)s)")
    parser.add_argument("--variant-prompts", type=int, default=7, help="so many of them for variants (%(default)s)")
    parser.add_argument("--needles", type=int, default=2, help="of each task, length and depth (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="of timing (%(default)s)")
    for name, default in {"grid": GRID, "like": LIKE, "timed": TIMED, "needled": NEEDLED}.items():
        parser.add_argument(f"--{name}", type=pair, nargs="+", default=default, help="p, or p..p: first to last drop")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--stock", action="store_true", help="time torch.compile without the package, too")
    parser.add_argument("--seconds", type=float, default=3600, help="for all but timing; then nothing new begins")
    parser.add_argument("--inner-backend", default="eager", help="compiles the pieces (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.table is None and None in (args.model, args.text, args.out):
        parser.error("wanted --model, --text and --out, or --table")
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.table is None:
        study = Study(args)
        if "time" in args.parts:
            study.time()
        if set(args.parts) - {"time"}:
            study.quality()
        args.table = [args.out]
    print(tables(read(args.table)))


if __name__ == "__main__":
    main()
