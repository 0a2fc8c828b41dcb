"""Texts for `real_model.py`, from what a Python environment holds: prose, code and structured data, a few MB of each.

    python benchmarks/real_texts.py --out texts                       # prose.txt, code.txt, structured.txt
    python benchmarks/real_texts.py --out texts --root folder ...     # other folders than this environment's packages

Prose is .md, .rst and .txt files and the long descriptions in package metadata; structured is JSON, CSV, YAML and TOML.
A passage is one file, or the beginning of a long one, and none begins like another.
The texts belong to their authors: they are for measuring, not for passing on.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

KINDS = {
    "prose": (".md", ".rst", ".txt", "METADATA"),
    "code": (".py",),
    "structured": (".json", ".csv", ".yaml", ".yml", ".toml"),
}
SHORTEST, LONGEST = 1500, 60_000  # characters of a passage
DEPTHS = 10
WORDS = (
    "anchor basket candle dragon engine falcon garden hammer island jacket kettle ladder magnet needle orange pencil "
    "quartz rocket saddle temple umbrella violin window yellow zipper bridge cactus desert forest glacier"
).split()


def gather(roots: Sequence[Path], kind: str, characters: int, seed: int = 0) -> str:
    """Passages of a kind in random order, with an empty line between them, up to so many characters."""
    files = sorted({path for root in roots for path in root.rglob("*") if path.name.endswith(KINDS[kind])})
    random.Random(seed).shuffle(files)
    passages: list[str] = []
    for passage in _passages(files):
        passages.append(passage)
        characters -= len(passage)
        if characters <= 0:
            break
    return "\n\n".join(passages) + "\n"


def _passages(files: Sequence[Path]) -> Iterator[str]:
    seen: set[str] = set()
    for path in files:
        try:
            text = path.read_text(encoding="utf-8") if path.stat().st_size < 20_000_000 else ""
        except (OSError, UnicodeDecodeError):
            continue
        if path.name == "METADATA":  # headers as in a mail, then a description
            text = text.partition("\n\n")[2]
        text = text.strip()[:LONGEST]
        start = hashlib.sha256(" ".join(text[:600].split()).encode()).hexdigest()
        if len(text) >= SHORTEST and start not in seen and max(map(len, text.splitlines())) < 20_000:
            seen.add(start)
            yield text


def windows(ids: Sequence[int], tokens: int, count: int, begin: Sequence[int]) -> list[Tensor]:
    """`count` prompts (1, tokens), evenly spaced through the ids and without a token in common, each behind `begin`."""
    own = tokens - len(begin)
    room = len(ids) - own
    if room < (count - 1) * own:
        raise SystemExit(
            f"a text of {len(ids):,} tokens for {count} prompts of {tokens:,}: wanted {count * own:,}, so that none "
            "overlap; give a longer text, or fewer or shorter prompts"
        )
    starts = [room * i // max(count - 1, 1) for i in range(count)]
    return [torch.tensor([[*begin, *ids[start : start + own]]]) for start in starts]


def pass_key(depth: int, seed: int) -> tuple[list[tuple[float, str]], str, str]:
    """What to hide, at which share of the text; the question; and the answer. depth: of `DEPTHS`."""
    number = random.Random(f"pass key {seed} {depth}").randint(10_000, 99_999)
    hidden = f"\nThe pass key is {number}. Remember it. {number} is the pass key.\n"
    return [((depth + 0.5) / DEPTHS, hidden)], "\nWhat is the pass key? The pass key is", f" {number}."


def multi_key(depth: int, seed: int) -> tuple[list[tuple[float, str]], str, str]:
    """One number at each depth, under names of their own; the one at `depth` is asked for."""
    draw = random.Random(f"multi key {seed} {depth}")
    names = draw.sample(WORDS, DEPTHS)
    numbers = [draw.randint(10_000, 99_999) for _ in names]
    hidden = [
        ((i + 0.5) / DEPTHS, f"\nThe magic number for {name} is {number}.\n")
        for i, (name, number) in enumerate(zip(names, numbers, strict=True))
    ]
    question = f"\nWhat is the magic number for {names[depth]}? The magic number for {names[depth]} is"
    return hidden, question, f" {numbers[depth]}."


def hide(filler: Tensor, hidden: Sequence[tuple[float, Sequence[int]]], question: Sequence[int], head: int) -> Tensor:
    """A prompt (1, tokens) as long as the filler: tokens of it make room. head: how many of its first ones stay."""
    tokens = filler.shape[1]
    ids = filler[0].tolist()[: tokens - len(question) - sum(len(part) for _, part in hidden)]
    room = len(ids) - head
    for share, part in sorted(hidden, key=lambda item: -item[0]):
        at = head + int(room * share)
        ids[at:at] = part
    return torch.tensor([[*ids, *question]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--root", type=Path, nargs="+", default=[Path(sysconfig.get_paths()["purelib"])])
    parser.add_argument("--megabytes", type=float, default=4, help="of each kind at most (%(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        text = gather(args.root, kind, int(args.megabytes * 1e6))
        (args.out / f"{kind}.txt").write_text(text, encoding="utf-8")
        print(f"{kind}: {len(text) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
