"""How far block-sparse attention moves what a model says: by alpha, with and without its correction, and with drops.

    python benchmarks/sparse_accuracy.py --model needle-gemma3 --pairs 16 --lengths 4096 --out sparse.json --device cpu
    python benchmarks/sparse_accuracy.py --model FOLDER_OR_GGUF --text a.txt b.txt --p 0.99 0.7 --out sparse.json
    python benchmarks/sparse_accuracy.py --table --out sparse.json                     # no run, only the table

(With PYTHONPATH=. where the package is not installed.) Prompts are windows of text files, evenly spaced, or with
`--pairs` those of the needle checkpoints, whose answers of four tokens are counted as well.

The last `sparse_last_tokens` queries see every block, so the next token feels block-sparse attention only through the
keys and values of earlier tokens. "KL" and "top-1" are of that token, from dense. "KL inside" and "top-1 inside" are
averages over the positions of the second half of the prompt up to those last queries, whose own attention leaves out
blocks: many more positions, and the sharper measure. With tokens dropped there are no logits of all positions.

Dense is the same compilation inside `uniprefill_fx.disabled()`. "all blocks" is an alpha so small that nothing is left
out: the kernel's own rounding. Eight bits are those of the kernels on a card that has them, and of the plain twin
elsewhere. Each record of a call is checked: a prompt that ran dense by mistake ends the program.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from accuracy_tools import Cell, make_prompt
from sparse_accuracy_tools import EVERY_BLOCK, Row, Setting, Subject
from torch import Tensor

ALPHAS = (0.02, 0.05, 0.1, 0.18, 0.3)


def text_prompts(args: argparse.Namespace, tokenizer: Any, tokens: int) -> list[Tensor]:
    """(1, tokens) windows of all files, evenly spaced; each begins as the tokenizer begins a text."""
    ids = [
        i for path in args.text for i in tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
    ]
    begin = [tokenizer.bos_token_id] if tokenizer("a").input_ids[0] == tokenizer.bos_token_id else []
    room = len(ids) - (tokens - len(begin))
    if room < 0:
        raise SystemExit(f"--lengths {tokens}: the files hold {len(ids)} tokens; give more of them, or shorter lengths")
    starts = [room * i // max(args.prompts - 1, 1) for i in range(args.prompts)]
    return [torch.tensor([begin + ids[start : start + tokens - len(begin)]]) for start in starts]


def prompts(args: argparse.Namespace, tokenizer: Any, tokens: int) -> list[tuple[Tensor, list[int]]]:
    """Prompts of a length, and what should follow each; nothing where it is not known."""
    if args.pairs:
        made = [make_prompt(Cell(tokens, args.pairs), seed) for seed in range(args.prompts)]
        return [(prompt.first, prompt.answer) for prompt in made]
    return [(ids, []) for ids in text_prompts(args, tokenizer, tokens)]


def settings(args: argparse.Namespace, drops: bool) -> list[Setting]:
    corrected = [Setting(alpha) for alpha in args.alphas]
    if drops:
        return [Setting(0.0), *corrected]
    plain = [Setting(alpha, correction=False) for alpha in args.alphas]
    return [Setting(EVERY_BLOCK), *corrected, *plain, *(Setting(alpha, fp8=True) for alpha in args.fp8_alphas)]


def run(args: argparse.Namespace) -> None:
    """All lengths without drops, then with them, until the time is up; the file is written after each length."""
    began = time.perf_counter()
    subject = Subject(args)
    rows: list[Row] = []
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if args.device != "cpu" else f"CPU, {os.cpu_count()} cores",
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": Path(args.model).name,
        "prompts": f"needles, {args.pairs} pairs" if args.pairs else "text",
        "block_size": args.block_size,
        "layers": args.layers,
        "p": args.p,
    }
    parts = [(drops, tokens) for drops in ([False] if args.no_drops else [False, True]) for tokens in args.lengths]
    before = json.loads(args.out.read_text()) if args.out.is_file() else []
    for i, (drops, tokens) in enumerate(parts):
        if not i or drops is not parts[i - 1][0]:
            subject.compile(drops)
        found = {setting: Row(drops, setting.name, tokens) for setting in settings(args, drops)}
        for done, (ids, answer) in enumerate(prompts(args, subject.tokenizer, tokens)):
            # each part has its share of the time, what others left of theirs, and one prompt in any case
            if time.perf_counter() - began > args.budget * ((i + 1) / len(parts) if done else 1):
                break
            ids = ids.to(args.device)
            dense = subject.dense(ids, len(answer))
            for setting, row in found.items():
                row.add(dense, *subject.cut(ids, len(answer), setting), answer)
        rows += [row for row in found.values() if row.n]
        report |= {"seconds": round(time.perf_counter() - began), "rows": [asdict(row) for row in rows]}
        args.out.write_text(json.dumps([*before, report], indent=1) + "\n")
        n = next(iter(found.values())).n
        print(f"[{report['seconds']} s] drops {drops}, {tokens} tokens: {n} prompts", file=sys.stderr, flush=True)


def table(runs: list[dict[str, Any]]) -> str:
    """All rows, as Markdown."""
    lines = []
    for made in runs:
        lines += [
            f"\n{made['model']}, {made['prompts']}, {made['machine']}, {made['dtype']}, torch {made['torch']}, "
            f"blocks of {made['block_size']}, layers {made['layers'] or 'auto'}, p {made['p']}, {made['date']}\n",
            "| tokens | drops | setting | n | right (dense), lost | KL | worst | top-1 | KL inside | top-1 inside "
            "| density | compute |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in (Row(**fields) for fields in made["rows"]):
            answers = f"{row.right} ({row.dense_right}), {row.lost}" if made["prompts"] != "text" else ""
            inside = ("", "")
            if row.inside:
                inside = f"{row.inside_kl_sum / row.inside:.2g}", f"{row.inside_top1 / row.inside:.4f}"
            lines.append(
                f"| {row.tokens:,} | {'yes' if row.drops else ''} | {row.setting} | {row.n} | {answers} "
                f"| {row.kl_sum / row.n:.2g} | {row.kl_max:.2g} | {row.top1 / row.n:.2f} | {inside[0]} | {inside[1]} "
                f"| {row.density_sum / row.n:.2f} | {row.compute_sum / row.n:.2f} |"
            )
    return "\n".join(lines)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON; a file that is there gets one run more")
    parser.add_argument("--model", help="hub name, folder, GGUF file, or a needle checkpoint")
    parser.add_argument("--tokenizer", help="folder, where that of --model is wrong (`gguf_tokenizer.py` makes one)")
    parser.add_argument("--text", type=Path, nargs="+", help="files in UTF-8 that prompts are windows of")
    parser.add_argument("--pairs", type=int, help="needle prompts with so many pairs in place of text")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16_384], help="(%(default)s)")
    parser.add_argument("--prompts", type=int, default=4, help="of each length (%(default)s)")
    parser.add_argument("--alphas", type=float, nargs="+", default=list(ALPHAS))
    parser.add_argument("--fp8-alphas", type=float, nargs="*", default=[0.1], help="in eight bits (%(default)s)")
    parser.add_argument("--block-size", type=int, default=128, choices=(64, 128))
    parser.add_argument("--layers", type=int, nargs="+", help="block-sparse layers (default: all that can be)")
    parser.add_argument("--p", type=float, nargs="+", help="mass to keep at each drop layer (default: the package's)")
    parser.add_argument("--no-drops", action="store_true", help="block-sparse attention alone")
    parser.add_argument("--budget", type=float, default=120, help="seconds, shared by lengths; then no prompt begins")
    parser.add_argument("--inner-backend", default="eager", help="compiles the pieces (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--table", action="store_true", help="only print what --out holds")
    args = parser.parse_args(argv)
    if not args.table and (args.model is None or (args.text is None) == (args.pairs is None)):
        parser.error("wanted --model, and one of --text and --pairs")
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if not args.table:
        run(args)
    print(table(json.loads(args.out.read_text())))


if __name__ == "__main__":
    main()
