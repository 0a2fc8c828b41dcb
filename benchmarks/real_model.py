"""Quality and speed at the same settings, on any model and any texts.

    python benchmarks/real_texts.py --out texts
    python benchmarks/real_model.py --model FOLDER_OR_GGUF --text texts/*.txt --inner-backend inductor --out real.json
    python benchmarks/real_model.py --table real.json                      # no run, only the tables
    python benchmarks/real_model_plot.py real.json --out curve.png

(With PYTHONPATH=. where the package is not installed.) Each text file is a kind; prompts are windows of it, evenly
spaced, none with a token of another. One compilation serves all. Parts, run in the order of --parts:

- time: milliseconds to the first token, medians, of dense and of the settings.
- text: KL divergence from dense and top-1 agreement, of the next token and averaged over 64 positions: the next token
  and 63 that follow it, which are the dense model's own. Dense is the same compilation inside `disabled()`. "p=1" keeps
  everything: what is left is rounding. Logits are computed in float32 here, in part time as well.
- passkey, multikey: one needle, or ten of which one is asked for, at ten depths; right when each token of the answer is
  the likeliest one behind those before it.
- rivals, variants: as text, and needles where those are asked for, in a forward without the package
  (`masked_forward.py`): random and the most recent blocks, and other scores. They keep as many rows as the published
  scores do on the same prompt ("like" a setting).
- calibrate: `calibrate()` on prompts of one kind, and what it found on prompts of the others.
- more: as text, at further settings.

A run ends early when its seconds are spent; the file is written as it goes.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from masked_forward import MaskedForward
from real_model_table import read, tables
from real_model_tools import COLUMNS, DENSE, Setting, Subject, compare, greedy, times, with_float_head
from real_texts import DEPTHS, hide, multi_key, pass_key, windows
from score_variants import RIVALS, VARIANTS, Variant
from study import Study, common_arguments
from torch import Tensor

import uniprefill_fx

PARTS = ("time", "text", "passkey", "multikey", "rivals", "calibrate", "more", "variants")
GRID = ("1", "quality", "balanced", "fast", "0.99", "0.95", "0.9", "0.99..0.7", "0.999..0.7")
MORE = ("0.999..0.9", "0.999..0.5", "0.99..0.5", "0.975..0.6", "0.95..0.5", "0.9..0.5", "0.999", "0.975", "0.8")
LIKE = ("balanced", "fast")
"""Where variants and rivals are compared; on needles at the first."""
NEEDLED = ("quality", "balanced", "fast", "0.99", "0.9")
TASKS = {"passkey": pass_key, "multikey": multi_key}
POSITIONS = 64


class RealModel(Study):
    """One model, its prompts, and the records so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.records: list[list[Any]] = []
        super().__init__(
            args, block_size=args.block_size, times={}, calibrations=[], columns=COLUMNS, records=self.records
        )
        self.plain = copy.deepcopy(self.model)
        self.subject = Subject(with_float_head(self.model), args.inner_backend, args.block_size)
        self.continuations: dict[int, list[list[int]]] = {}
        first = next(self.prompts(args.lengths[0]))[2]
        self.subject.prefill(first, DENSE)
        self.report["drop_layers"] = self.subject.drop_layers
        self.say(f"compiled, dense; drop layers {self.subject.drop_layers}")
        self.subject.say(first, [1, 2, 3], args.grid[0])
        self.say("compiled, dropped, and what follows")
        self.masked = MaskedForward(self.model, self.subject.drop_layers)

    def run(self) -> None:
        for part in self.args.parts:
            for tokens in self.args.calibrate_lengths if part == "calibrate" else self.args.lengths:
                if self.spent():
                    self.say(f"{part}, {tokens} tokens: left out, the seconds are spent")
                    continue
                done = self.part(part, tokens)
                self.say(f"{part}, {tokens} tokens: {done} prompts")
                self.save()

    def part(self, part: str, tokens: int) -> int:
        """How many prompts."""
        if part == "time":
            return self.time(tokens)
        if part == "calibrate":
            return self.calibrate(tokens)
        if part in TASKS:
            return self.needles(part, tokens)
        if part in ("text", "more"):
            grid = self.args.grid if part == "text" else self.args.more
            return self.texts(tokens, lambda *prompt: self.by_package("text", *prompt, grid))
        variants = [*map(Variant, RIVALS)] if part == "rivals" else VARIANTS[1:]
        return self.texts(tokens, lambda *prompt: self.by_masks(*prompt, variants))

    def note(self, part: str, ids: Tensor, kind: str, prompt: int, setting: str, values: dict[str, Any]) -> None:
        known = {"part": part, "tokens": ids.shape[1], "kind": kind, "prompt": prompt, "setting": setting} | values
        self.records.append([known.get(column) for column in COLUMNS])

    def time(self, tokens: int) -> int:
        stock: Any = None
        if self.args.stock:
            stock = torch.compile(copy.deepcopy(self.model), dynamic=True, backend=self.args.inner_backend)
        prompts = [ids for _, i, ids in self.prompts(tokens) if i == 0]
        settings = [DENSE, *self.args.timed]
        self.report["times"][str(tokens)] = times(self.subject, stock, prompts, settings, self.args.rounds)
        return len(prompts)

    def texts(self, tokens: int, measure: Callable[..., None]) -> int:
        """`measure` on each prompt of a length."""
        prompts = self.continued(tokens)
        for done, prompt in enumerate(prompts):
            if done and self.spent():
                return done
            measure(*prompt)
            self.save()
        return len(prompts)

    def continued(self, tokens: int) -> list[tuple[str, int, Tensor, list[int]]]:
        """All prompts of a length, each with what the dense model says behind it."""
        prompts = list(self.prompts(tokens))
        if tokens not in self.continuations:
            self.continuations[tokens] = greedy(self.plain, [ids for *_, ids in prompts], POSITIONS - 1)
            self.say(f"{tokens} tokens: {len(prompts)} continuations")
        return [(*prompt, said) for prompt, said in zip(prompts, self.continuations[tokens], strict=True)]

    def by_package(
        self, part: str, kind: str, prompt: int, ids: Tensor, follow: Sequence[int], grid: Iterable[Setting]
    ) -> None:
        dense, _ = self.subject.say(ids, follow, DENSE)
        for setting in grid:
            logits, call = self.subject.say(ids, follow, setting)
            kept = [round(len(rows) / ids.shape[1], 4) for rows in call.kept_indices.values()]
            more = {"compute": round(call.compute_fraction, 4), "kept": kept}
            self.note(part, ids, kind, prompt, setting.name, compare(dense, logits) | more)

    def by_masks(self, kind: str, prompt: int, ids: Tensor, follow: Sequence[int], variants: Sequence[Variant]) -> None:
        dense, _ = self.masked(ids, follow)
        for like in self.args.like:
            for label, logits, more in self._like(like, ids, follow, variants, prompt):
                self.note("variants", ids, kind, prompt, label, compare(dense, logits) | more)

    def _like(
        self, like: Setting, ids: Tensor, follow: Sequence[int], variants: Sequence[Variant], seed: int
    ) -> Iterable[tuple[str, Tensor, dict[str, Any]]]:
        """Label, logits and cost of the published scores at a setting, and of variants with as many rows."""
        tokens, masked = ids.shape[1], self.masked
        logits, kept = masked(ids, follow, Variant(p=like.p(self.subject.depths)))
        share = [round(len(rows) / tokens, 4) for rows in kept]
        more = {"compute": round(masked.compute_fraction(tokens, kept), 4), "kept": share}
        yield f"sum like {like.name}", logits, more
        for variant in variants:
            logits, _ = masked(ids, follow, variant.like(kept, seed=seed))
            yield f"{variant.label} like {like.name}", logits, more

    def needles(self, task: str, tokens: int) -> int:
        """A prompt for each depth, and again with other text and numbers."""
        kinds, count = list(self.ids), self.args.needles * DEPTHS
        each = -(-count // len(kinds))
        fillers = {kind: windows(ids, tokens, each, self.begin) for kind, ids in self.ids.items()}
        for number in range(count):
            if number and self.spent():
                return number
            depth, kind = number % DEPTHS, kinds[number % len(kinds)]
            hidden, question, answer = (self._tokens(part) for part in TASKS[task](depth, number // DEPTHS))
            filler = fillers[kind][number // len(kinds)]
            self.needle(task, kind, number, hide(filler, hidden, question, len(self.begin)), answer)
            self.save()
        return count

    def needle(self, task: str, kind: str, number: int, prompt: Tensor, answer: Sequence[int]) -> None:
        ids = prompt.to(self.args.device)
        right = torch.tensor(answer, device=ids.device)

        def found(logits: Tensor, compute: float) -> dict[str, float]:
            return {"right": float((logits.argmax(-1) == right).all()), "compute": round(compute, 4)}

        for setting in (DENSE, *self.args.needled):
            logits, call = self.subject.say(ids, answer[:-1], setting)
            self.note(task, ids, kind, number, setting.name, found(logits, call.compute_fraction))
        if "rivals" in self.args.parts:
            rivals = [*map(Variant, RIVALS)]
            for label, logits, more in self._like(self.args.like[0], ids, answer[:-1], rivals, number):
                self.note(task, ids, kind, number, label, found(logits, more["compute"]))

    def _tokens(self, part: Any) -> Any:
        """Texts as ids, also inside a list of what is to be hidden."""
        if isinstance(part, str):
            return self.tokenizer(part, add_special_tokens=False).input_ids
        return [(share, self._tokens(text)) for share, text in part]

    def calibrate(self, tokens: int) -> int:
        """On each kind by itself, and then on the prompts of the others."""
        done = 0
        for kind in self.ids:
            if done and self.spent():
                break
            prompts = [ids.to(self.args.device) for ids in windows(self.ids[kind], tokens, 8, self.begin)]
            began = time.perf_counter()
            found = uniprefill_fx.calibrate(
                self.model, prompts, max_kl=self.args.max_kl, drop_layers=self.subject.drop_layers
            )
            p = dict(zip(found.options["drop_layers"], found.options["p"], strict=True))
            each = tuple(p.get(layer, 1.0) for layer in self.subject.drop_layers)
            self.report["calibrations"].append(
                {"tokens": tokens, "kind": kind, "prompts": len(prompts), "max_kl": found.max_kl, "p": each}
                | {"kl": found.kl, "bound": found.bound, "compute": found.compute_fraction, "runs": found.runs}
                | {"held_out_kl": found.held_out_kl, "seconds": round(time.perf_counter() - began, 1)}
            )
            self.say(f"calibrated on {kind}: {self.report['calibrations'][-1]}")
            for other, *prompt in self.continued(tokens):
                if other != kind:
                    self.by_package(f"calibrated on {kind}", other, *prompt, [Setting(each)])
            done += len(prompts)
            self.save()
        return done


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS[:-1]], help="(all but variants)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16_384, 32_768], help="(%(default)s)")
    parser.add_argument("--prompts", type=int, default=7, help="of each kind and length (%(default)s)")
    parser.add_argument("--needles", type=int, default=2, help="of each task, length and depth (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of timing (%(default)s)")
    wanted = {"grid": GRID, "more": MORE, "like": LIKE, "timed": GRID[1:], "needled": NEEDLED}
    for name, default in wanted.items():
        settings = [*map(Setting.parse, default)]
        what = "presets, p, or p..p: first to last drop"
        parser.add_argument(f"--{name}", type=Setting.parse, nargs="+", default=settings, help=what)
    parser.add_argument("--calibrate-lengths", type=int, nargs="+", default=[16_384], help="(%(default)s)")
    parser.add_argument("--max-kl", type=float, default=0.005, help="the budget of calibrate (%(default)s)")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--stock", action="store_true", help="time torch.compile without the package, too")
    args = parser.parse_args(argv)
    if args.table is None and None in (args.model, args.text, args.out):
        parser.error("wanted --model, --text and --out, or --table")
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.table is None:
        RealModel(args).run()
        args.table = [args.out]
    print(tables(read(args.table)))


if __name__ == "__main__":
    main()
