"""Which prompts drop, and what is remembered of them, step by step as vLLM's scheduler tells it. Needs no vllm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from uniprefill_fx.specs import AttentionSpec
from uniprefill_fx.vllm import options, ranks
from uniprefill_fx.vllm.select import select_packed
from uniprefill_fx.vllm.steps import Step, Steps, current, current_of, install

CONFIG = options._config(
    {"drop_layers": [1, 2], "p": 0.6, "block_size": 16, "last_n": 24, "sink_tokens": 8, "min_tokens": 100}
)


def new(name: str, prompt: int, computed: int = 0, prefill: int | None = None, **asked: Any) -> Any:
    """A `NewRequestData`. prefill: with what was generated before a preemption, as the newer runner has it."""
    return SimpleNamespace(
        req_id=name, prompt_token_ids=[5] * prompt, prompt_embeds=None, num_computed_tokens=computed,
        prefill_token_ids=None if prefill is None else [5] * prefill,
        sampling_params=SimpleNamespace(prompt_logprobs=None, extra_args=asked),
    )  # fmt: skip


def scheduled(
    tokens: dict[str, int], *added: Any, finished: tuple[str, ...] = (), **again: tuple[int, int, bool]
) -> Any:
    """A `SchedulerOutput`. again: by request, tokens computed before, tokens generated, whether it is resumed."""
    cached = SimpleNamespace(
        req_ids=list(again), resumed_req_ids={name for name, (_, _, resumed) in again.items() if resumed},
        num_computed_tokens=[c for c, _, _ in again.values()], num_output_tokens=[g for _, g, _ in again.values()],
    )  # fmt: skip
    return SimpleNamespace(
        num_scheduled_tokens=tokens, scheduled_new_reqs=list(added), scheduled_cached_reqs=cached,
        finished_req_ids=set(finished),
    )  # fmt: skip


def begun(steps: Steps, *told: Any, **again: Any) -> Step:
    steps.begin(scheduled(*told, **again))
    assert steps.step is not None
    return steps.step


@pytest.fixture
def steps() -> Steps:
    made = Steps(CONFIG)
    made.drops = 2
    return made


def lose(steps: Steps, name: str, *lost: int) -> None:
    """As after the selections of a step."""
    steps.requests[name].dropped[:] = lost
    steps.end()


def test_a_prompt_of_min_tokens_drops(steps: Steps) -> None:
    step = begun(steps, {"a": 99, "b": 100}, new("a", 99), new("b", 100))
    assert list(step.dropping) == ["b"] and step.dense == {"a": "below min_tokens"}


def test_a_request_that_is_resumed_drops_anew(steps: Steps) -> None:
    """Its blocks were given away: its caches lack nothing until it drops again, with what it had generated."""
    begun(steps, {"a": 300}, new("a", 300))
    lose(steps, "a", 100, 150)
    assert [steps.lost(["a"], segment) for segment in (1, 2)] == [[100], [150]]
    step = begun(steps, {"a": 307, "b": 200}, new("b", 200), a=(0, 7, True))
    assert list(step.dropping) == ["b", "a"] and steps.lost(["a", "b"], 2) == [0, 0] and step.prompts["a"] == 307
    lose(steps, "a", 90, 95)
    step = begun(steps, {"b": 1, "c": 150, "a": 1}, new("c", 150), b=(200, 1, False), a=(307, 8, False))
    assert steps.lost(["a", "b", "c"], 2) == [95, 0, 0] and list(step.dropping) == ["c"]


@pytest.mark.parametrize("newer", [False, True])
def test_a_short_prompt_stays_dense_when_it_is_resumed(newer: bool, steps: Steps) -> None:
    """Whether it drops is not for a preemption to say."""
    begun(steps, {"a": 90}, new("a", 90))
    steps.end()
    resumed: dict[str, Any] = {} if newer else {"a": (0, 30, True)}
    step = begun(steps, {"a": 120}, *([new("a", 90, prefill=120)] if newer else []), **resumed)
    assert step.dense == {"a": "below min_tokens"} and not step.dropping


def test_a_request_that_is_resumed_in_chunks_stays_dense(steps: Steps) -> None:
    begun(steps, {"a": 300}, new("a", 300))
    lose(steps, "a", 100, 150)
    step = begun(steps, {"a": 256}, a=(0, 7, True))
    assert "chunked" in step.dense["a"] and steps.lost(["a"], 2) == [0]
    steps.end()
    step = begun(steps, {"a": 51}, a=(256, 7, False))
    assert not step.dense and not step.dropping and steps.lost(["a"], 2) == [0]


def test_a_session_that_goes_on_lacks_what_it_lacked(steps: Steps) -> None:
    """It comes as a new request of the same name, with tokens that are computed."""
    begun(steps, {"a": 300}, new("a", 300))
    lose(steps, "a", 100, 150)
    step = begun(steps, {"a": 120}, new("a", 430, computed=310))
    assert "session" in step.dense["a"] and steps.lost(["a"], 1) == [100] and steps.lost(["a"], 2) == [150]


def test_a_name_that_is_used_again_is_another_request(steps: Steps) -> None:
    """Even in the step that hears of the end of the first one."""
    begun(steps, {"a": 300}, new("a", 300))
    lose(steps, "a", 100, 150)
    step = begun(steps, {"a": 120}, new("a", 120, uniprefill={"p": 0.9}), finished=("a",))
    assert steps.lost(["a"], 2) == [0] and step.dropping["a"].p == 0.9


def test_a_request_that_is_gone_lacks_nothing_and_harms_nobody(steps: Steps) -> None:
    """Aborted before a step that holds it still, or finished while the next one was under way."""
    begun(steps, {"a": 300, "b": 200}, new("a", 300), new("b", 200))
    lose(steps, "a", 100, 150)
    step = begun(steps, {"a": 1, "b": 1}, finished=("a",), a=(300, 1, False), b=(200, 1, False))
    assert steps.lost(["a", "b"], 1) == [0, 0] and not step.dense
    steps.begin(scheduled({}, finished=("b",)))
    assert steps.step is None and not steps.requests


def test_options_of_two_requests_are_their_own(steps: Steps) -> None:
    told = new("a", 300, uniprefill={"keep_ratio": 0.3}), new("b", 300), new("c", 300, uniprefill=False)
    step = begun(steps, {"c": 300, "a": 300, "b": 300}, *told)
    assert step.dropping["a"].keep_ratio == 0.3 and step.dropping["b"] == CONFIG
    assert step.dense == {"c": "disabled by the request"}


class Runner:
    """A model runner of vLLM, of an engine with these layers."""

    def __init__(self, layers: dict[str, Any]) -> None:
        self.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))


def test_another_engine_in_the_process() -> None:
    """One that does not drop is left alone; one that does is refused until the first is gone."""
    first, second = Steps(CONFIG, layers={}), Steps(CONFIG, layers={})
    install(first)
    runner = Runner(first.layers)
    assert current_of(runner) is first and current_of(Runner({})) is None
    with pytest.raises(RuntimeError, match="second engine"):
        install(second)
    del runner  # its compiled model, which Dynamo keeps, holds `first`
    install(second)
    assert current() is second


def kept_alone(q: Tensor, k: Tensor) -> list[int]:
    """The rows of one prompt that stay, by float64: blocks by mass until p is reached, sinks and the last queries."""
    tokens, groups = len(q), q.shape[1] // k.shape[1]
    q, k = q.double(), k.double().repeat_interleave(groups, 1)
    logits = torch.einsum("nhd,mhd->hnm", q[-24:], k) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(torch.ones(24, tokens).triu(tokens - 23).bool(), -torch.inf)
    mass = torch.nn.functional.pad(logits.softmax(-1).sum((0, 1)), (0, -tokens % 16)).view(-1, 16).sum(1)
    order = mass.argsort(descending=True, stable=True)
    chosen = order[mass[order].cumsum(0) - mass[order] < 0.6 * mass.sum()]
    rows = torch.arange(tokens)
    return rows[torch.isin(rows // 16, chosen) | (rows < 8) | (rows >= tokens - 24)].tolist()


def test_prompts_in_a_padded_step_are_scored_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts that drop, one that does not, two that decode; behind them rows that are of nobody."""
    monkeypatch.setattr(ranks, "summed", lambda scores: scores)  # one rank
    step = Step({"x": 1, "a": 300, "b": 50, "c": 213, "y": 1}, dropping={"a": CONFIG, "c": CONFIG})
    steps = Steps(CONFIG)
    steps.step = step
    steps.ordered(["x", "a", "b", "c", "y"])
    rows, padding = sum(step.tokens.values()), 27
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(rows + padding, 4, 32, generator=generator) * 2
    k = torch.randn(rows + padding, 2, 32, generator=generator)
    q[rows:], k[rows:] = torch.nan, torch.nan
    chosen, bounds = select_packed(q, k, step, 0, [0.5, 0.75], AttentionSpec(scale=32**-0.5), None)
    want, ends = [], []
    for name, (start, end) in zip(step.order, step.bounds, strict=True):
        alone = kept_alone(q[start:end], k[start:end]) if name in step.dropping else range(end - start)
        want += [start + row for row in alone]
        ends.append((len(want) - len(alone), len(want)))
    assert chosen.tolist() == want and bounds == ends and len(want) < rows
    step.note_kept(chosen, bounds)
    assert step.kept["a"][0].tolist() == kept_alone(q[1:301], k[1:301])
