"""Hundreds of drawn calls of one model in one process: every answer against the eager reference, memory and graphs.

    PYTHONPATH=tests python benchmarks/soak.py --out benchmarks/results/soak_cpu.json --calls 500
    PYTHONPATH=tests python benchmarks/soak.py --out soak.json --device cuda --inner-backend inductor

A call is of a drawn kind (`Soak.kinds`): last or all logits, greedy, padded batches, beams, samples, prompt lookup, a
second turn, a cache that is copied, cropped or reordered, calls under `override()` and `disabled()`. Prompts have 1 to
4,096 tokens, most of them a few hundred. The reference (`tests/eager_reference.py`) computes layer by layer on kept
rows; what it answers by a hair (a cut or a token within 1e-4 of the next) is drawn again. The last calls come from
eight threads.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import json
import os
import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from eager_reference import DropSpec, EagerReference, PrefillResult
from exactness import options_of
from tiny import tiny_llama
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache

import uniprefill_fx

SPEC = DropSpec((1, 3), p=0.8, block_size=16, last_n=16, sink_tokens=16)
LAYERS, MIN_TOKENS, STEPS, THREADS = 5, 48, 5, 8
# A card adds products in another order, and multiplies float32 as three products of TF32.
TIES, TOLERANCES = {"cpu": 1e-4, "cuda": 2e-4}, {"cpu": 2e-4, "cuda": 2e-3}


class Tie(Exception):
    """The reference's answer is a matter of rounding."""


class Soak:
    """The compiled model, an untouched copy for the reference, and what was counted."""

    def __init__(self, seed: int, inner_backend: str, device: str) -> None:
        self.rng, self.device = random.Random(seed), device
        self.tie, self.tolerance = TIES[device], TOLERANCES[device]
        self.untouched = tiny_llama(LAYERS).to(device)
        self.model = tiny_llama(LAYERS).to(device)
        uniprefill_fx.compile(
            self.model, **(options_of(SPEC, inner_backend=inner_backend) | {"min_tokens": MIN_TOKENS})
        )
        self.count: Counter[str] = Counter()
        self.worst = 0.0

    # -- what is asked, and what the reference says -----------------------------------------------------------------

    def prompt(self, rng: random.Random, most: int = 4096) -> Tensor:
        longest = rng.choices((MIN_TOKENS, 300, 700, most), (2, 10, 6, 1))[0]
        return self.drawn(rng, rng.randint(1, min(longest, most)))

    def drawn(self, rng: random.Random, tokens: int, requests: int = 1) -> Tensor:
        return torch.randint(3, 250, (requests, tokens), generator=self.generator(rng)).to(self.device)

    @staticmethod
    def generator(rng: random.Random) -> torch.Generator:
        return torch.Generator().manual_seed(rng.getrandbits(32))

    def reference(self, ids: Tensor, spec: DropSpec | None = SPEC) -> tuple[EagerReference, PrefillResult]:
        made = EagerReference(self.untouched, spec if ids.shape[1] >= MIN_TOKENS else None)
        result = made.prefill(ids)
        if any(near < self.tie for near in (*result.margins.values(), *result.gaps.values())):
            raise Tie
        return made, result

    def near(self, got: Tensor, want: Tensor) -> None:
        error = float((got - want).abs().max())
        assert error <= self.tolerance * max(1.0, float(want.abs().max())), f"off by {error}"
        self.worst = max(self.worst, error)

    def greedy(self, ids: Tensor, spec: DropSpec | None = SPEC) -> Tensor:
        made, result = self.reference(ids, spec)
        tokens, logits = [], result.last_logits[:, -1]
        for _ in range(STEPS):
            best = logits.topk(2).values[0]
            if float(best[0] - best[1]) < 10 * self.tie:
                raise Tie
            tokens.append(logits.argmax(-1, keepdim=True))
            logits = made.step(tokens[-1])[:, -1]
        return torch.cat(tokens, 1)

    def generate(self, ids: Tensor, **call: Any) -> Any:
        return self.model.generate(ids, max_new_tokens=STEPS, eos_token_id=None, pad_token_id=0, **call)

    # -- kinds of calls -----------------------------------------------------------------------------------------------

    def last(self, rng: random.Random) -> None:
        ids = self.prompt(rng)
        _, want = self.reference(ids)
        self.near(self.model(ids, logits_to_keep=1).logits, want.last_logits)

    def everything(self, rng: random.Random) -> None:
        ids = self.prompt(rng, 1000)
        _, want = self.reference(ids)
        self.near(self.model(ids).logits, want.logits)

    def token_by_token(self, rng: random.Random) -> None:
        ids = self.prompt(rng)
        assert torch.equal(self.generate(ids, do_sample=False)[:, ids.shape[1] :], self.greedy(ids))

    def lookup(self, rng: random.Random) -> None:
        """No token comes twice in the prompt: drafts would else be part of it, and of what is scored."""
        ids = 3 + torch.randperm(247, generator=self.generator(rng))[None, : rng.randint(20, 240)].to(self.device)
        got = self.generate(ids, do_sample=False, prompt_lookup_num_tokens=3)
        assert torch.equal(got[:, ids.shape[1] :], self.greedy(ids))

    def padded(self, rng: random.Random) -> None:
        prompts = [self.prompt(rng, 700) for _ in range(rng.choice((2, 3)))]
        want = [self.greedy(ids) for ids in prompts] if sum(self.long(prompts)) in (0, len(prompts)) else None
        if want is None:
            raise Tie  # a batch drops as one: not with prompts on both sides of the limit
        ids, mask = left(prompts)
        got = self.generate(ids, attention_mask=mask, do_sample=False)[:, ids.shape[1] :]
        assert torch.equal(got, torch.cat(want))

    @staticmethod
    def long(prompts: list[Tensor]) -> list[bool]:
        return [ids.shape[1] >= MIN_TOKENS for ids in prompts]

    def beams(self, rng: random.Random) -> None:
        """The score of the sequence that won is its score by the reference."""
        ids = self.prompt(rng, 700)
        made, result = self.reference(ids)
        got = self.generate(
            ids, num_beams=rng.choice((2, 3)), do_sample=False, return_dict_in_generate=True, output_scores=True
        )
        self.near(got.sequences_scores, self.log_probability(made, result, got.sequences[:, ids.shape[1] :]) / STEPS)

    def samples(self, rng: random.Random) -> None:
        """The logits of each drawn sequence are those of the reference along it."""
        ids = self.prompt(rng, 700)
        torch.manual_seed(rng.getrandbits(32))
        got = self.generate(
            ids, do_sample=True, num_return_sequences=2, return_dict_in_generate=True, output_logits=True
        )
        for row, tokens in enumerate(got.sequences[:, ids.shape[1] :]):
            made, result = self.reference(ids)
            logits = result.last_logits[:, -1]
            for step, token in enumerate(tokens):
                self.near(got.logits[step][row : row + 1], logits)
                logits = made.step(token.view(1, 1))[:, -1]

    @staticmethod
    def log_probability(made: EagerReference, result: PrefillResult, tokens: Tensor) -> Tensor:
        total, logits = result.last_logits.new_zeros(1), result.last_logits[:, -1]
        for token in tokens[0]:
            total = total + logits.log_softmax(-1)[:, token]
            logits = made.step(token.view(1, 1))[:, -1]
        return total

    def second_turn(self, rng: random.Random) -> None:
        self.with_cache(rng, lambda cache, made, more: (cache, made.step(more)))

    def copied(self, rng: random.Random) -> None:
        def use(cache: Any, made: EagerReference, more: Tensor) -> tuple[Any, Tensor]:
            mine = copy.deepcopy(cache)
            self.model(more + 1, past_key_values=cache)  # the copy does not see this
            return mine, made.step(more)

        self.with_cache(rng, use)

    def cropped(self, rng: random.Random) -> None:
        def use(cache: Any, made: EagerReference, more: Tensor) -> tuple[Any, Tensor]:
            self.model(more + 1, past_key_values=cache)
            cache.crop(-more.shape[1])
            return cache, made.step(more)

        self.with_cache(rng, use)

    def with_cache(self, rng: random.Random, use: Callable[..., tuple[Any, Tensor]]) -> None:
        ids = self.prompt(rng, 700)
        made, want = self.reference(ids)
        cache = DynamicCache(config=self.model.config)
        self.near(self.model(ids, past_key_values=cache, logits_to_keep=1).logits, want.last_logits)
        more = self.drawn(rng, rng.choice((1, 1, 4, 9)))
        cache, answer = use(cache, made, more)
        self.near(self.model(more, past_key_values=cache).logits, answer)

    def reordered(self, rng: random.Random) -> None:
        length = rng.randint(MIN_TOKENS, 400)
        prompts = [self.drawn(rng, length) for _ in range(2)]
        made = [self.reference(ids)[0] for ids in prompts]
        cache = DynamicCache(config=self.model.config)
        self.model(torch.cat(prompts), past_key_values=cache, logits_to_keep=1)
        cache.reorder_cache(torch.tensor([1, 0], device=self.device))
        more = self.drawn(rng, 1, requests=2)
        got = self.model(more, past_key_values=cache).logits
        self.near(got, torch.cat([made[1].step(more[:1]), made[0].step(more[1:])]))

    def overridden(self, rng: random.Random) -> None:
        ids = self.prompt(rng)
        spec = replace(SPEC, p=rng.choice((0.5, 0.7, 0.95)), sink_tokens=rng.choice((0, 16, 40)))
        _, want = self.reference(ids, spec)
        with uniprefill_fx.override(p=spec.p, sink_tokens=spec.sink_tokens):
            self.near(self.model(ids, logits_to_keep=1).logits, want.last_logits)

    def switched_off(self, rng: random.Random) -> None:
        ids = self.prompt(rng)
        _, want = self.reference(ids, None)
        with uniprefill_fx.disabled():
            self.near(self.model(ids, logits_to_keep=1).logits, want.last_logits)

    def kinds(self) -> list[Callable[[random.Random], None]]:
        of_a_cache = [self.second_turn, self.copied, self.cropped, self.reordered]
        of_generate = [self.token_by_token, self.lookup, self.padded, self.beams, self.samples]
        return [self.last, self.everything, *of_generate, *of_a_cache, self.overridden, self.switched_off]

    # -- the run -------------------------------------------------------------------------------------------------------

    def one(self, rng: random.Random, kind: Callable[[random.Random], None]) -> None:
        for _ in range(20):
            state = random.Random(0)
            state.setstate(rng.getstate())
            try:
                with torch.inference_mode():
                    kind(rng)
            except Tie:
                self.count["drawn again"] += 1
                continue
            except Exception as error:
                raise AssertionError(f"{kind.__name__}, next draw {state.getrandbits(32)}: {error}") from error
            self.count[kind.__name__] += 1
            return
        raise AssertionError(f"{kind.__name__}: twenty ties in a row")

    def threads(self, each: int) -> None:
        """Eight threads at once, each with calls of its own."""
        failed: list[BaseException] = []

        def work(seed: int) -> None:
            rng = random.Random(seed)
            try:
                for _ in range(each):
                    self.one(rng, rng.choice([self.last, self.token_by_token, self.second_turn, self.switched_off]))
            except BaseException as error:
                failed.append(error)

        workers = [threading.Thread(target=work, args=(self.rng.getrandbits(32),)) for _ in range(THREADS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failed:
            raise failed[0]


def left(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Left-padded ids and mask."""
    longest = max(ids.shape[1] for ids in prompts)
    ids = torch.cat([torch.nn.functional.pad(p, (longest - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (longest - p.shape[1], 0)) for p in prompts])
    return ids, mask


def resident_mib() -> float:
    """Memory of this process that is in RAM."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def allocated_mib(device: str) -> float:
    """Memory of tensors on the card."""
    return torch.cuda.memory_allocated() / 2**20 if device == "cuda" else 0.0


def run(
    calls: int, seed: int = 0, inner_backend: str = "eager", device: str = "cpu", say: bool = False
) -> dict[str, Any]:
    """The figures of a run; an AssertionError at the first answer that differs."""
    torch._dynamo.reset()
    counters.clear()
    if "isolate_recompiles" not in signature(torch.compile).parameters:  # before torch 2.13 all calls share one limit
        torch._dynamo.config.recompile_limit = 32
    began, soak = time.perf_counter(), Soak(seed, inner_backend, device)
    alone = calls * 4 // 5
    memory, allocated, graphs = {}, {}, {}

    def note(done: int) -> None:
        memory[done], graphs[done] = round(resident_mib()), counters["stats"]["unique_graphs"]
        allocated[done] = round(allocated_mib(device), 1)
        if say:
            seconds = time.perf_counter() - began
            print(f"[{seconds:.0f} s] {done} calls, {memory[done]} and {allocated[done]} MiB", flush=True)

    for done in range(alone):
        kinds = soak.kinds()
        soak.one(soak.rng, kinds[done % len(kinds)] if done < len(kinds) else soak.rng.choice(kinds))
        if (done + 1) % max(alone // 8, 1) == 0:
            note(done + 1)
    soak.threads((calls - alone) // THREADS)
    note(calls)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "inner_backend": inner_backend,
        "seed": seed,
        "calls": sum(n for kind, n in soak.count.items() if kind != "drawn again"),
        "by_kind": dict(soak.count),
        "wrong": 0,
        "largest_error": soak.worst,
        "resident_mib_after": memory,
        "allocated_mib_on_card_after": allocated,
        "graphs_after": graphs,
        "seconds": round(time.perf_counter() - began),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inner-backend", default="eager")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = run(args.calls, args.seed, args.inner_backend, args.device, say=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
