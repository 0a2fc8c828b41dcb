"""What captured CUDA graphs read of a step lies where it lay at the capture, and says what the step is. Needs vllm."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.vllm import metadata
from uniprefill_fx.vllm.steps import Request, Step, Steps, install

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm (make test-vllm)")
BLOCK, REQUESTS, TOKENS, SEGMENTS = 16, 8, 64, 2
BLOCKS = {"a": [5, 9, 2, 7, 11], "b": [1, 3, 4, 6, 8], "c": [20, 21, 22, 23, 24]}
LOST = {"a": [10, 25], "b": [0, 0], "c": [3, 40]}  # by segment, tokens that the caches of a request lack


class Runner:
    """The buffers of vLLM's runner, refilled by each step as it does: padded requests are empty, padded slots -1."""

    def __init__(self) -> None:
        self.starts = torch.zeros(REQUESTS + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(REQUESTS, dtype=torch.int32)
        self.table = torch.zeros(REQUESTS, 8, dtype=torch.int32)
        self.slots = torch.zeros(TOKENS, dtype=torch.int64)

    def common(self, step: dict[str, tuple[int, int]], size: int | None = None) -> Any:
        """By request (tokens in its cache after the step, tokens of the step); padded to a graph of `size` requests."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        lengths, rows = [n for n, _ in step.values()], [new for _, new in step.values()]
        requests = size or len(step)
        total = size or sum(rows)
        ends = torch.tensor([0, *rows]).cumsum(0)
        self.starts[: len(ends)], self.starts[len(ends) :] = ends, ends[-1]
        self.seq_lens.zero_()
        self.seq_lens[: len(step)] = torch.tensor(lengths)
        self.table[: len(step), :5] = torch.tensor([BLOCKS[name] for name in step])
        self.table[len(step) : requests] = 0
        self.slots.fill_(-1)
        self.slots[: ends[-1]] = torch.tensor(
            [BLOCKS[name][p // BLOCK] * BLOCK + p % BLOCK for name, (n, new) in step.items() for p in range(n - new, n)]
        )
        known = {f.name for f in fields(CommonAttentionMetadata)}
        bound = (
            {"seq_lens_cpu_upper_bound": self.seq_lens[:requests].clone()}
            if "seq_lens_cpu_upper_bound" in known
            else {}
        )
        return CommonAttentionMetadata(
            query_start_loc=self.starts[: requests + 1], query_start_loc_cpu=self.starts[: requests + 1].clone(),
            seq_lens=self.seq_lens[:requests], num_reqs=requests, num_actual_tokens=total, max_query_len=max(rows),
            max_seq_len=max(lengths), block_table_tensor=self.table[:requests], slot_mapping=self.slots[:total],
            **bound,
        )  # fmt: skip

    def capture(self, size: int) -> Any:
        """What a capture sees: as many requests of one token, whose slots are -1."""
        common = self.common({"a": (1, 1)}, size)
        common.seq_lens.fill_(1)
        common.slot_mapping.fill_(-1)
        common.query_start_loc.copy_(torch.arange(size + 1))
        common.query_start_loc_cpu.copy_(torch.arange(size + 1))
        return common


@pytest.fixture
def steps() -> Iterator[Steps]:
    steps = Steps(PrefillConfig())
    steps.drops = SEGMENTS
    install(steps)
    steps.requests = {name: Request(100, steps.config, None, list(lost)) for name, lost in LOST.items()}
    yield steps
    metadata._latest.clear()
    metadata._made.clear()
    metadata.builds.clear()


@pytest.fixture
def builders() -> list[Any]:
    """The builder of each segment, of the backend that vLLM has for any GPU."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=[1, 2, 4, 8],
        max_cudagraph_capture_size=8, static_forward_context={},
    )  # fmt: skip
    model = SimpleNamespace(
        get_num_attention_heads=lambda parallel: 4,
        get_num_kv_heads=lambda parallel: 2,
        get_head_size=lambda: 32,
        rswa_window=None,
    )
    scheduler = SimpleNamespace(max_num_seqs=REQUESTS, max_num_batched_tokens=TOKENS)
    config = SimpleNamespace(
        compilation_config=compilation, model_config=model, scheduler_config=scheduler, parallel_config=None
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    found = []
    for segment in range(1, SEGMENTS + 1):
        made: Any = metadata.backend_of_segment(TritonAttentionBackend, segment).get_builder_cls()  # type: ignore[attr-defined]
        found.append(made(spec, [f"layers.{segment}"], config, torch.device("cpu")))
    return found


def tensors(built: Any) -> dict[str, torch.Tensor]:
    """The tensors of a layer's metadata by name; copies of numbers for the host are no input of a kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated properties
        found = {f.name: getattr(built, f.name) for f in fields(built)}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def run(
    steps: Steps, runner: Runner, builders: Sequence[Any], step: dict[str, tuple[int, int]], size: int | None
) -> Any:
    """One step: what each segment's builder makes of it."""
    steps.step = Step({name: new for name, (_, new) in step.items()})
    steps.ordered(list(step))
    common = runner.common(step, size)
    made = [builder.build(0, common) for builder in builders]
    steps.step = None
    return made


def test_a_captured_graph_reads_the_step_at_hand(steps: Steps, builders: list[Any]) -> None:
    runner, captured = Runner(), {}
    for size in (4, 2):
        common = runner.capture(size)
        captured[size] = [builder.build_for_cudagraph_capture(common) for builder in builders]
        for built in captured[size]:
            assert bool((built.slot_mapping == -1).all()), "the capture would store keys"
    decoding: list[tuple[dict[str, tuple[int, int]], int | None]] = [
        ({"a": (50, 1), "b": (17, 1), "c": (60, 1)}, 4),
        ({"a": (51, 1), "b": (18, 1), "c": (61, 1)}, 4),  # the same requests: nothing is sent to the card but lengths
        ({"c": (62, 1), "a": (52, 1)}, 2),  # in another order
        ({"a": (75, 1), "b": (40, 2)}, None),  # not captured: a chunk beside it
        ({"b": (43, 3)}, None),  # nor this one, which lacks nothing in any segment
        ({"b": (44, 1), "c": (63, 1), "a": (76, 1)}, 4),
    ]
    for step, padded_to in decoding:
        made = run(steps, runner, builders, step, padded_to)
        for segment, built in enumerate(made):
            lengths = [n - LOST[name][segment] for name, (n, _) in step.items()]
            places = [(name, p) for name, n in zip(step, lengths, strict=True) for p in range(n - step[name][1], n)]
            slots = [BLOCKS[name][p // BLOCK] * BLOCK + p % BLOCK for name, p in places]
            replayed = built
            if padded_to is not None:  # a replay reads what was captured
                replayed = captured[padded_to][segment]
                now, then = tensors(built), tensors(replayed)
                assert now.keys() == then.keys() and {"seq_lens", "slot_mapping", "block_table"} <= now.keys()
                for name in now:
                    assert now[name].data_ptr() == then[name].data_ptr(), name
                    assert now[name].shape == then[name].shape and now[name].stride() == then[name].stride(), name
            padded = (padded_to or len(step)) - len(step)
            assert replayed.seq_lens.tolist() == lengths + [0] * padded
            assert replayed.slot_mapping.tolist() == slots + [-1] * padded
            assert bool((replayed.block_table[len(step) :] == 0).all())
            assert built.max_seq_len >= max(lengths)


def test_segments_have_buffers_of_their_own(steps: Steps, builders: list[Any]) -> None:
    made = run(steps, Runner(), builders, {"a": (50, 1), "c": (60, 1)}, 2)
    own = [tensors(built) for built in made]
    for name in ("seq_lens", "slot_mapping", "softmax_segm_output"):
        assert own[0][name].data_ptr() != own[1][name].data_ptr(), name
    assert made[0].seq_lens.tolist() == [40, 57] and made[1].seq_lens.tolist() == [25, 20]


def test_segments_that_lack_nothing_share_what_one_builder_made(steps: Steps, builders: list[Any]) -> None:
    """As vLLM does for layers of one kind: in steps with prompts, which are not captured."""
    prompt, decoding = {"b": (40, 30)}, {"b": (41, 1)}
    one, two = run(steps, Runner(), builders, prompt, None)
    assert one is two
    fresh = run(steps, Runner(), builders[1:], prompt, None)[0]
    assert fresh is not two
    now, then = tensors(two), tensors(fresh)
    for name in ("seq_lens", "slot_mapping", "block_table", "query_start_loc"):
        assert torch.equal(now[name], then[name]), name
    assert (two.max_seq_len, two.max_query_len, two.num_actual_tokens) == (40, 30, 30)
    assert two.seq_lens.tolist() == [40] and two.slot_mapping.tolist() == [
        BLOCKS["b"][p // BLOCK] * BLOCK + p % BLOCK for p in range(10, 40)
    ]
    next_one = run(steps, Runner(), builders, prompt, None)
    assert next_one[0] is next_one[1] and next_one[0] is not one, "of this step"
    one, two = run(steps, Runner(), builders, decoding, None)
    assert one is not two, "a captured graph reads each segment's buffers"


def test_segments_that_differ_share_nothing(steps: Steps, builders: list[Any]) -> None:
    prompt = {"b": (40, 30)}
    steps.requests["b"].dropped = [0, 7]
    one, two = run(steps, Runner(), builders, prompt, None)
    assert one.seq_lens.tolist() == [40] and two.seq_lens.tolist() == [33]
    assert two.slot_mapping.tolist() == [BLOCKS["b"][p // BLOCK] * BLOCK + p % BLOCK for p in range(3, 33)]
    steps.requests["b"].dropped = [0, 0]
    builders[1].window_size = 4  # what a builder finds out of its layers
    one, two = run(steps, Runner(), builders, prompt, None)
    assert one is not two


def test_a_builder_that_keeps_no_names_of_layers_is_enough() -> None:
    """As that of linear attention in vLLM 0.24."""

    class Builder:
        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
            pass

        def build(self, common_prefix_len: int, common: Any) -> Any:
            return common_prefix_len, common

    backend = type("Backend", (), {"get_builder_cls": staticmethod(lambda: Builder)})
    made: Any = metadata.backend_of_segment(backend, 1).get_builder_cls()(None, ["layers.5"], None, None)  # type: ignore[attr-defined]
    assert made.layer_names == ["layers.5"] and made.build(0, "step") == (0, "step")


def test_a_prompt_whose_step_replayed_a_graph_is_dense(steps: Steps) -> None:
    """A prompt of one token looks like a decoding request to vLLM, which replays the graph of the plain model."""
    seen: list[Step] = []
    steps.watchers.append(seen)
    steps.step = Step({"a": 1}, dropping={"a": steps.config}, prompts={"a": 1})
    steps.end()
    assert not seen[0].dropping and "CUDA graph" in seen[0].dense["a"]
