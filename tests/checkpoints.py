"""Where the needle checkpoints are, and prompts for them."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINTS = Path(os.environ.get("UNIPREFILL_CHECKPOINTS") or ROOT.parent / "shared" / "checkpoints")
NAMES = ("needle-llama", "needle-gemma3", "needle-qwen3-next")
FULL_LAYERS: dict[str, tuple[int, ...]] = {
    "needle-llama": tuple(range(8)),
    "needle-gemma3": (2, 5, 8),
    "needle-qwen3-next": (3, 7),
}
AUTO_LAYERS: dict[str, tuple[int, ...]] = {"needle-llama": (3,), "needle-gemma3": (2, 5), "needle-qwen3-next": (3,)}
TWO_LAYERS: dict[str, tuple[int, ...]] = {"needle-llama": (2, 5), "needle-gemma3": (2, 5), "needle-qwen3-next": (3, 7)}


def folder(name: str) -> Path:
    """The folder of a checkpoint; the test is skipped without it."""
    if not (CHECKPOINTS / name / "config.json").is_file():
        pytest.skip(f"no checkpoint {name} (set UNIPREFILL_CHECKPOINTS to their folder)")
    return CHECKPOINTS / name


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
    source = importlib.util.spec_from_file_location("needle_generator", CHECKPOINTS / "generator.py")
    assert source is not None and source.loader is not None
    generator = importlib.util.module_from_spec(source)
    source.loader.exec_module(generator)
    return generator.needle_batch(1, length, pairs=4, queries=2, seed=seed)[0]


def needle_ids(length: int, seed: int = 3) -> Tensor:
    """(1, length) int64: a needle prompt, cut from its end where it is too short for one. A new tensor each time."""
    return _needles(max(length, 64), seed)[:, -length:].clone(memory_format=torch.contiguous_format)
