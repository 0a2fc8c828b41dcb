"""How far block-sparse attention moves what a model says: by alpha, with and without its correction, and with drops.

    python benchmarks/sparse_accuracy.py --model needle-gemma3 --pairs 16 --lengths 4096 --out sparse.json --device cpu
    python benchmarks/sparse_accuracy.py --model FOLDER_OR_GGUF --text a.txt b.txt --p 0.99 0.7 --out sparse.json
    python benchmarks/sparse_accuracy.py --table sparse.json                           # no run, only the table

(With PYTHONPATH=. where the package is not installed.) Each text file is a kind; prompts are windows of it, evenly
spaced, none with a token of another. With `--pairs` they are those of the needle checkpoints, whose answers of four
tokens are counted as well.

The last `sparse_last_tokens` queries see every block, so the next token feels block-sparse attention only through the
keys and values of earlier tokens. "KL" is of that token, from dense; "last 64" averages over the prompt's last 64
positions, itself among them. "Inside" averages over the positions of the second half of the prompt up to those last
queries, whose own attention leaves out blocks: the sharper measure. With tokens dropped there are no logits of all
positions. Logits are computed in the model's own dtype and compared in float32.

Dense is the same compilation inside `uniprefill_fx.disabled()`. "all blocks" is an alpha so small that nothing is left
out: the kernel's own rounding. Eight bits are those of the kernels on a card that has them, and of the plain twin
elsewhere. Each record of a call is checked: a prompt that ran dense by mistake ends the program.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from accuracy_tools import CHECKPOINTS, Cell, make_prompt
from real_model_table import read
from real_model_tools import bootstrap
from sparse_accuracy_tools import EVERY_BLOCK, Row, Setting, Subject
from study import Study, common_arguments
from torch import Tensor

ALPHAS = (0.02, 0.05, 0.1, 0.18, 0.3)


def settings(args: argparse.Namespace, drops: bool) -> list[Setting]:
    corrected = [Setting(alpha) for alpha in args.alphas]
    if drops:
        return [Setting(0.0), *corrected]
    plain = [Setting(alpha, correction=False) for alpha in args.alphas]
    return [Setting(EVERY_BLOCK), *corrected, *plain, *(Setting(alpha, fp8=True) for alpha in args.fp8_alphas)]


class SparseAccuracy(Study):
    """One model, its prompts, and the rows so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rows: list[Row] = []
        kind = f"needles, {args.pairs} pairs" if args.pairs else "text"
        super().__init__(args, prompts=kind, block_size=args.block_size, layers=args.layers, p=args.p, rows=[])
        self.subject = Subject(self.model, args)

    def examples(self, tokens: int) -> Iterable[tuple[Tensor, list[int]]]:
        """Prompts of a length, and what should follow each; nothing where it is not known."""
        if not self.args.pairs:
            return ((ids, []) for *_, ids in self.prompts(tokens))
        made = (make_prompt(Cell(tokens, self.args.pairs), seed) for seed in range(self.args.prompts))
        return ((prompt.first.to(self.args.device), prompt.answer) for prompt in made)

    def run(self) -> None:
        """All lengths without drops, then with them. Each part has its share of the time and what others left of
        theirs, and one prompt in any case."""
        parts = [
            (drops, tokens)
            for drops in ([False] if self.args.no_drops else [False, True])
            for tokens in self.args.lengths
        ]
        for i, (drops, tokens) in enumerate(parts):
            if not i or drops is not parts[i - 1][0]:
                self.subject.compile(drops)
            self.part(drops, tokens, self.args.seconds * (i + 1) / len(parts))

    def part(self, drops: bool, tokens: int, until: float) -> None:
        found = {setting: Row(drops, setting.name, tokens) for setting in settings(self.args, drops)}
        self.rows += found.values()
        done = 0
        for ids, answer in self.examples(tokens):
            if done and self.elapsed() > until:
                break
            dense = self.subject.dense(ids, len(answer))
            for setting, row in found.items():
                row.add(dense, *self.subject.cut(ids, len(answer), setting), answer)
            done += 1
            self.report["rows"] = [asdict(row) for row in self.rows]
            self.save()
        self.say(f"drops {drops}, {tokens} tokens: {done} prompts")


def table(runs: list[dict[str, Any]]) -> str:
    """All rows, as Markdown; means over prompts, with 95% intervals where each prompt's value is there."""
    lines = []
    for made in runs:
        lines += [
            f"\n{made['model']}, {made['prompts']}, {made['machine']}, {made['dtype']}, torch {made['torch']}, "
            f"blocks of {made['block_size']}, layers {made['layers'] or 'auto'}, p {made['p']}, {made['date']}\n",
            "| tokens | drops | setting | n | right (dense), lost | KL | worst | KL, last 64 | top-1, last 64 "
            "| KL inside | top-1 inside | density | compute |",
            "|---" * 13 + "|",
        ]
        for row in (Row(**fields) for fields in made["rows"]):
            answers = f"{row.right} ({row.dense_right}), {row.lost}" if made["prompts"] != "text" else ""
            each = [row.last_kls, row.last_top1s, row.inside_kls, row.inside_top1s]
            means = [format(bootstrap(own), ".3f" if i % 2 else ".2g") if own else "" for i, own in enumerate(each)]
            if row.inside and not row.inside_kls:
                means[2:] = f"{row.inside_kl_sum / row.inside:.2g}", f"{row.inside_top1 / row.inside:.4f}"
            lines.append(
                f"| {row.tokens:,} | {'yes' if row.drops else ''} | {row.setting} | {row.n} | {answers} "
                f"| {row.kl_sum / row.n:.2g} | {row.kl_max:.2g} | {' | '.join(means)} "
                f"| {row.density_sum / row.n:.2f} | {row.compute_sum / row.n:.2f} |"
            )
    return "\n".join(lines)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser)
    parser.add_argument("--pairs", type=int, help="needle prompts with so many pairs in place of text")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16_384], help="(%(default)s)")
    parser.add_argument("--prompts", type=int, default=4, help="of each kind and length (%(default)s)")
    parser.add_argument("--alphas", type=float, nargs="+", default=list(ALPHAS))
    parser.add_argument("--fp8-alphas", type=float, nargs="*", default=[0.1], help="in eight bits (%(default)s)")
    parser.add_argument("--block-size", type=int, default=128, choices=(64, 128))
    parser.add_argument("--layers", type=int, nargs="+", help="block-sparse layers (default: all that can be)")
    parser.add_argument("--p", type=float, nargs="+", help="mass to keep at each drop layer (default: the package's)")
    parser.add_argument("--no-drops", action="store_true", help="block-sparse attention alone")
    args = parser.parse_args(argv)
    if args.table is None and (None in (args.model, args.out) or (args.text is None) == (args.pairs is None)):
        parser.error("wanted --model, --out, and one of --text and --pairs; or --table")
    if args.model and (CHECKPOINTS / args.model).is_dir():
        args.model = str(CHECKPOINTS / args.model)
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.table is None:
        SparseAccuracy(args).run()
        args.table = [args.out]
    print(table(read(args.table)))


if __name__ == "__main__":
    main()
