"""The graph that drops is compiled while the engine starts, by prompts that nobody sent.

vLLM warms up with prompts of its own making too, which are no requests of anybody: neither counts. What they leave in
the cache is overwritten before it is read, as in vLLM's own warm-up: a block is filled by the request that gets it.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from uniprefill_fx.config import AUTO_BLOCKS, PrefillConfig
from uniprefill_fx.vllm.options import ServingError
from uniprefill_fx.vllm.steps import Steps

log = logging.getLogger(__name__)


def warm_up(worker: Any, steps: Steps) -> None:
    """Run prompts that drop tokens, each alone, through a worker that has its caches.

    Raises:
        ServingError: the memory of the card is too small for the long one.
    """
    for tokens in lengths(worker, steps.config):
        began = time.perf_counter()
        try:
            _run(worker, tokens)
        except torch.OutOfMemoryError as error:
            raise ServingError(
                f"uniprefill: the longest prompt of this engine, {tokens} tokens, does not fit while tokens are "
                "dropped; lower max_model_len or gpu_memory_utilization (warm_up=False leaves it to traffic)."
            ) from error
        log.info("uniprefill: a prompt of %d tokens compiled and ran in %.1f s", tokens, time.perf_counter() - began)


def lengths(worker: Any, config: PrefillConfig) -> list[int]:
    """How long the prompts are: the shortest of which tokens go, and the longest that a step holds.

    They differ where a tensor has more than 2**31 elements, and in what Triton knows about numbers: the short one is a
    multiple of 16, the long one is not. Between them, one for each further size of blocks that lengths choose.
    """
    held, scheduler = worker.model_runner.kv_cache_config, worker.vllm_config.scheduler_config
    longest = min(worker.vllm_config.model_config.max_model_len - 1, scheduler.max_num_batched_tokens)
    while longest and sum(map(len, _blocks(held, longest))) >= held.num_blocks:
        longest //= 2
    longest -= longest % 16 == 0
    block = config.block_size if isinstance(config.block_size, int) else 128
    goes = max(config.min_tokens, 2 * (config.last_n + config.sink_tokens + block), 16)
    shortest = -(-goes // 16) * 16
    if longest < shortest:
        log.info("uniprefill: no warm-up: prompts of this engine have up to %d tokens, too few to drop any", longest)
        return []
    sizes = [] if isinstance(config.block_size, int) else [tokens for tokens, _ in AUTO_BLOCKS]
    return [shortest, *(tokens for tokens in sizes if shortest < tokens < longest), *[longest] * (longest > shortest)]


def _blocks(held: Any, tokens: int) -> list[list[int]]:
    """Blocks for a prompt, by group of caches; block 0 is nobody's."""
    found, begin = [], 1
    for group in held.kv_cache_groups:
        count = -(-tokens // group.kv_cache_spec.block_size)
        found.append(list(range(begin, begin + count)))
        begin += count
    return found


def _run(worker: Any, tokens: int) -> None:
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    name, held = f"uniprefill-warm-up-{tokens}", worker.model_runner.kv_cache_config
    vocabulary = worker.vllm_config.model_config.get_vocab_size()
    draw = torch.Generator().manual_seed(tokens)
    prompt = torch.randint(vocabulary, (tokens,), generator=draw).tolist()
    request = NewRequestData(
        req_id=name,
        prompt_token_ids=prompt,
        mm_features=[],
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
        pooling_params=None,
        block_ids=tuple(_blocks(held, tokens)),
        num_computed_tokens=0,
        lora_request=None,
        prefill_token_ids=prompt,
    )
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [request]
    step.num_scheduled_tokens, step.total_num_scheduled_tokens = {name: tokens}, tokens
    step.num_common_prefix_blocks = [0] * len(held.kv_cache_groups)
    if worker.execute_model(step) is None:
        worker.sample_tokens(None)
    over = SchedulerOutput.make_empty()
    over.finished_req_ids = {name}
    worker.execute_model(over)
