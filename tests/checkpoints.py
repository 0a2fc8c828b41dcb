"""Where the needle checkpoints are, and prompts for them.

One of them is part of the repository (`examples/`), so that the core of the suite runs on a fresh clone. The others are
looked for in the folder UNIPREFILL_CHECKPOINTS, or in `shared/checkpoints` beside the repository.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINTS = Path(os.environ.get("UNIPREFILL_CHECKPOINTS") or ROOT.parent / "shared" / "checkpoints")
BOS, KEY, VAL, QUERY, ANS, SEP = 1, 2, 3, 4, 5, 6  # the ids of a prompt, as `examples/needle_prompts.py` has them
FIRST_NOISE, FIRST_SYMBOL, VOCABULARY = 16, 256, 512
FACTS, QUESTIONS, FACT_TOKENS = 4, 2, 8
NAMES = ("needle-llama", "needle-gemma3", "needle-qwen3-next")
FULL_LAYERS: dict[str, tuple[int, ...]] = {
    "needle-llama": tuple(range(8)),
    "needle-gemma3": (2, 5, 8),
    "needle-qwen3-next": (3, 7),
}
AUTO_LAYERS: dict[str, tuple[int, ...]] = {"needle-llama": (3,), "needle-gemma3": (2, 5), "needle-qwen3-next": (3,)}
TWO_LAYERS: dict[str, tuple[int, ...]] = {"needle-llama": (2, 5), "needle-gemma3": (2, 5), "needle-qwen3-next": (3, 7)}


def _found(name: str) -> Path | None:
    places = (place / name for place in (CHECKPOINTS, ROOT / "examples"))
    return next((place for place in places if (place / "config.json").is_file()), None)


def at_hand(names: Iterable[str]) -> tuple[str, ...]:
    """Those of some checkpoints that are here; if none is, the repository's own."""
    return tuple(name for name in names if _found(name) is not None) or ("needle-gemma3",)


def folder(name: str) -> Path:
    """The folder of a checkpoint; the test is skipped without it."""
    found = _found(name)
    if found is not None:
        return found
    pytest.skip(f"no checkpoint {name} (set UNIPREFILL_CHECKPOINTS to their folder)")


def fresh(name: str, attention: str = "sdpa") -> Any:
    """A new instance of a checkpoint in fp32, for a test that compiles it."""
    loaded = AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32, attn_implementation=attention)
    return loaded.eval()


@cache
def stock(name: str) -> Any:
    """The instance of a checkpoint that nobody compiles or changes."""
    return fresh(name)


@cache
def _needles(length: int, seed: int) -> Tensor:
    """Four facts `KEY k VAL v1 v2 v3 v4 SEP` in noise, and at the end two of them as `QUERY k ANS v1 v2 v3 v4 SEP`."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_NOISE, FIRST_SYMBOL, (1, length), generator=random)
    ids[0, 0] = BOS
    keys = FIRST_SYMBOL + torch.randperm(VOCABULARY - FIRST_SYMBOL, generator=random)[:FACTS]
    values = torch.randint(FIRST_SYMBOL, VOCABULARY, (FACTS, 4), generator=random)
    end = length - FACT_TOKENS * QUESTIONS
    places = torch.randperm((end - FACT_TOKENS) // FACT_TOKENS, generator=random)[:FACTS]
    for key, value, place in zip(keys.tolist(), values.tolist(), places.tolist(), strict=True):
        start = 1 + FACT_TOKENS * place
        ids[0, start : start + FACT_TOKENS] = torch.tensor([KEY, key, VAL, *value, SEP])
    for i, fact in enumerate(torch.randperm(FACTS, generator=random)[:QUESTIONS].tolist()):
        start = end + FACT_TOKENS * i
        question = [QUERY, int(keys[fact]), ANS, *values[fact].tolist(), SEP]
        ids[0, start : start + FACT_TOKENS] = torch.tensor(question)
    return ids


def needle_ids(length: int, seed: int = 3) -> Tensor:
    """(1, length) int64: a needle prompt, cut from its end where it is too short for one. A new tensor each time."""
    return _needles(max(length, 64), seed)[:, -length:].clone(memory_format=torch.contiguous_format)
