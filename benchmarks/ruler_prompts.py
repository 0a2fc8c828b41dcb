"""Prompts in the format of RULER's needle tasks as lm_eval 0.4 asks them, for a decoder that reads characters.

A prompt is a heading, a context of lines, a question and the beginning of its answer; right is what the line of the
asked key says. niah_single_1 hides one needle in repeated noise; in niah_multikey_2 and 3 every line is a needle, keys
and values are words and numbers, or UUIDs. For training, a text asks several questions and says some needles twice.
Words are made of syllables, so the harness' own words are unseen in training.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

PAD, END, UNKNOWN = 0, 1, 2
SPECIAL = ["<pad>", "<end>", "<unk>"]
CHARACTERS = [chr(c) for c in range(32, 127)] + ["\n"]
STOP = "\0"
"""Stands for the token END in texts here."""

FREE, KNOWN, ANSWER = 1, 2, 3
"""Classes of characters: what nothing says before, what was said before, and the answer with its END. 0 is padding."""

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_ONSETS = (
    "b c d f g h j k l m n p r s t v w y z bl br ch cl cr dr fl fr gl gr pl pr qu sc sh sk sl sp st str th tr".split()
)
_VOWELS = "a e i o u a e i o u ai ea ee io oo ou".split()
_CODAS = ["", "", "", *"b d g k l m n p r s t ck ct ld ll nd ng nt rd rt ss st".split()]
_ENDINGS = ["", "", "", *"able al ed er ful ing ion ish ist ity ive less ment ness ous s y".split()]


@dataclass(frozen=True)
class Task:
    """`kind`: "number" with two words as keys, or "uuid" for keys and values. `noise`: lines that are no needles."""

    name: str
    kind: str
    noise: bool = False


TASKS = (
    Task("niah_single_1", "number", noise=True),
    Task("niah_multikey_2", "number"),
    Task("niah_multikey_3", "uuid"),
)


def heading(kind: str) -> str:
    return (
        f"A special magic {kind} is hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind} afterwards.\n"
    )


def needle(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind}s for {key} is: {value}."


def question(kind: str, key: str) -> tuple[str, str]:
    """The question up to its last word, with the key for the second time between the two parts."""
    first = (
        f"\nWhat is the special magic {kind} for {key} mentioned in the provided text? The special magic {kind} for "
    )
    return first, " mentioned in the provided text is"


def prompt(kind: str, lines: list[str], key: str) -> str:
    """What the harness gives the model, character for character."""
    return heading(kind) + "\n".join(lines) + key.join(question(kind, key))


def random_uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def random_word(rng: random.Random) -> str:
    """Two to about fifteen letters: syllables, or letters without a pattern."""
    if rng.random() < 0.3:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 12)))
    syllables = rng.choice((1, 1, 1, 2, 2, 3))
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables)]
    return "".join(parts) + rng.choice(_ENDINGS)


class Keys:
    """Distinct keys of one text. Sometimes few first or few second words, so that both must be read."""

    def __init__(self, rng: random.Random, kind: str) -> None:
        self.rng, self.kind, self.seen = rng, kind, set[str]()
        few = rng.choice((None, 0, 1))
        self.pools = [[random_word(rng) for _ in range(rng.randint(4, 40))] if few == i else None for i in (0, 1)]

    def __call__(self) -> str:
        while True:
            key = random_uuid(self.rng) if self.kind == "uuid" else "-".join(map(self._word, self.pools))
            if key not in self.seen:
                self.seen.add(key)
                return key

    def _word(self, pool: list[str] | None) -> str:
        return random_word(self.rng) if pool is None else self.rng.choice(pool)


def write(
    rng: random.Random, task: Task, length: int, exam: bool = False, repeats: Sequence[float] = (0.0,)
) -> tuple[str, list[tuple[int, int, int]]]:
    """A text of at most `length` characters, and (start, end, class) of its characters that are not FREE.

    One of `repeats` is the share of needles that say again what an earlier one said. An `exam` is as the harness asks:
    one question, no needle twice, one needle in noise.
    """
    kind, keys = task.kind, Keys(rng, task.kind)
    asked, line_room = (250, 120) if kind == "uuid" else (210, 85)  # the longest question with its answer, and line
    line_room += (len(NOISE) + 1) * task.noise
    most = max(1, length // 2 // asked)
    questions = 1 if exam else 1 + int(most * rng.random() ** 2)
    again = 0.0 if exam else rng.choice(repeats)
    room = length - questions * asked - len(heading(kind)) - line_room
    hidden = (1 if exam else rng.randint(1, 8)) if task.noise else None
    facts: list[tuple[str, str]] = []
    lines: list[tuple[str, int]] = []  # and how much of its end, before the full stop, was said before
    while (room > 0 and (hidden is None or len(facts) < hidden)) or not facts:
        if facts and rng.random() < again:
            key, value = rng.choice(facts)
            known = len(value)
        else:
            key, known = keys(), 0
            value = random_uuid(rng) if kind == "uuid" else str(rng.randint(10**6, 10**7 - 1))
            facts.append((key, value))
        lines.append((needle(kind, key, value), known))
        room -= len(lines[-1][0]) + 1
    if task.noise:
        lines += [(NOISE, 0)] * max(1, room // (len(NOISE) + 1))
        order = sorted(range(len(lines)), key=lambda i: (rng.random(), i))
        if again:  # what is said again must stay behind what it repeats
            needles = iter([line for line in lines if line[0] != NOISE])
            lines = [next(needles) if lines[i][0] != NOISE else lines[i] for i in order]
        else:
            lines = [lines[i] for i in order]
    parts, token_bounds, at = [heading(kind)], list[tuple[int, int, int]](), len(heading(kind))
    for line, known in lines:
        parts.append(line + "\n")
        at += len(line) + 1
        if known:
            token_bounds.append((at - 2 - known, at - 2, KNOWN))
    parts[-1], at = parts[-1][:-1], at - 1  # the question brings its line break
    for key, value in rng.sample(facts, min(questions, len(facts))):
        first, rest = question(kind, key)
        parts += [first, key, rest, " ", value, STOP]
        token_bounds.append((at + len(first), at + len(first) + len(key), KNOWN))
        at += len(first) + len(key) + len(rest)
        token_bounds.append((at, at + len(value) + 2, ANSWER))
        at += len(value) + 2
    return "".join(parts), token_bounds


_TABLE = bytearray([UNKNOWN] * 256)
for _id, _character in enumerate(CHARACTERS):
    _TABLE[ord(_character)] = len(SPECIAL) + _id
_TABLE[0] = END


def encode(text: str) -> np.ndarray:
    """Token ids (len(text),) uint8."""
    return np.frombuffer(text.encode("ascii").translate(bytes(_TABLE)), dtype=np.uint8)


def batch(
    rng: random.Random, tasks: list[Task], length: int, exam: bool = False, repeats: Sequence[float] = (0.0,)
) -> tuple[Tensor, Tensor]:
    """Token ids and classes, both (len(tasks), length) uint8, a row for each task."""
    ids = np.full((len(tasks), length), PAD, dtype=np.uint8)
    classes = np.zeros((len(tasks), length), dtype=np.uint8)
    for row, task in enumerate(tasks):
        text, token_bounds = write(rng, task, length, exam, repeats)
        size = min(len(text), length)
        ids[row, :size] = encode(text)[:size]
        classes[row, :size] = FREE
        for start, end, kind in token_bounds:
            classes[row, start:end] = kind
    return torch.from_numpy(ids), torch.from_numpy(classes)


class Batches(IterableDataset):  # type: ignore[type-arg]
    """Endless batches of training texts; each worker of a DataLoader has a seed of its own."""

    def __init__(self, rows: int, length: int, weights: Sequence[float], repeats: Sequence[float], seed: int) -> None:
        self.rows, self.length, self.weights, self.repeats, self.seed = rows, length, weights, repeats, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        rng = random.Random(f"{self.seed} {self.length} {info.id if info else 0}")
        for _ in cycle([None]):
            yield batch(rng, rng.choices(TASKS, self.weights, k=self.rows), self.length, repeats=self.repeats)


def character_tokenizer() -> Any:
    """One token for each printable character and the line break; nothing is added to a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {c: i for i, c in enumerate(SPECIAL + CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token=SPECIAL[UNKNOWN]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[END],
        unk_token=SPECIAL[UNKNOWN],
        clean_up_tokenization_spaces=False,
    )
