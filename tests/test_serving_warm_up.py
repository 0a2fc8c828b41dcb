"""Which prompts an engine warms up with: they drop tokens, and their blocks are there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from uniprefill_fx.config import PrefillConfig, auto_block_size
from uniprefill_fx.vllm.steps import Step, Steps
from uniprefill_fx.vllm.warm_up import _blocks, lengths


def worker(max_model_len: int = 8192, budget: int = 8192, blocks: int = 10_000, sizes: tuple[int, ...] = (16,)) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in sizes]
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=max_model_len),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=budget),
        ),
        model_runner=SimpleNamespace(kv_cache_config=SimpleNamespace(num_blocks=blocks, kv_cache_groups=groups)),
    )


CONFIG = PrefillConfig(min_tokens=2050, last_n=64, sink_tokens=64)


@pytest.mark.parametrize(
    ("engine", "want"),
    [
        ({}, [2064, 8191]),  # the first multiple of 16 that is long enough; a token is left to be generated
        ({"budget": 4096}, [2064, 4095]),  # no longer than a step
        ({"blocks": 300}, [2064, 4095]),  # half as long, as 512 blocks are not there
        ({"sizes": (16, 8192), "blocks": 512}, [2064, 4095]),  # 512 blocks and one: there are 511, and that of nobody
        ({"sizes": (16, 8192), "blocks": 514}, [2064, 8191]),
        ({"max_model_len": 2048}, []),  # no prompt is long enough
    ],
)
def test_lengths(engine: dict[str, Any], want: list[int]) -> None:
    assert lengths(worker(**engine), CONFIG) == want


def test_a_length_for_each_size_of_blocks() -> None:
    config = PrefillConfig(min_tokens=2050, last_n=64, sink_tokens=64, block_size="auto")
    found = lengths(worker(max_model_len=100_000, budget=100_000), config)
    assert found == [2064, 8192, 65_536, 99_999]
    assert {auto_block_size(tokens) for tokens in found} == {auto_block_size(tokens) for tokens in range(2064, 100_000)}
    assert lengths(worker(max_model_len=8000), config) == [2064, 7999]


def test_blocks_are_told_apart_and_the_first_is_left_out() -> None:
    held = worker(sizes=(16, 64)).model_runner.kv_cache_config
    assert _blocks(held, 65) == [[1, 2, 3, 4, 5], [6, 7]]


def test_steps_of_the_warm_up_are_seen_by_nobody() -> None:
    counted: list[Step] = []
    steps = Steps(CONFIG, counted.append)
    seen: list[Step] = []
    steps.watchers.append(seen)
    with steps.uncounted():
        steps.step = Step({"a": 3})
        steps.end()
    assert steps.step is None and steps.last is None and not counted and not seen
    steps.step = Step({"b": 3})
    steps.end()
    assert [step.tokens for step in counted] == [step.tokens for step in seen] == [{"b": 3}]
