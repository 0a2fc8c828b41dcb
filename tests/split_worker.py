"""One of two ranks that run split models: `python split_worker.py RANK FOLDER SCENARIO ...`.

A scenario is the name of a method of `Worker`, and its arguments behind colons.

What a scenario found is saved as `FOLDER/SCENARIO-RANK.pt`. Ranks meet by a file in the folder.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from eager_reference import DropSpec
from exactness import options_of
from split_models import SPLIT, STEPS, TIED, TOKENS, indifferent_llama, padded_batch, split_over
from tiny import token_ids
from torch import Tensor
from transformers import AutoModelForCausalLM

import uniprefill_fx
from uniprefill_fx.runtime import agreement
from uniprefill_fx.runtime.agreement import Agreement

WORLD = 2
PATIENCE = datetime.timedelta(seconds=120)  # of a rank that waits for one which is alive


class Worker:
    """The scenarios, each a method."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder

    def split(self, model: Any) -> Any:
        return split_over(model, dist.init_device_mesh("cpu", (WORLD,)))

    def compiled(self, name: str = "llama", model: Any = None, spec: DropSpec | None = None, **extra: Any) -> Any:
        build, own = SPLIT[name]
        model = self.split(build()) if model is None else model
        torch._dynamo.reset()
        return uniprefill_fx.compile(model, **options_of(own if spec is None else spec, **extra))

    def prefill(self, model: Any, ids: Tensor, **call: Any) -> dict[str, Any]:
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=1, **call).logits
        done = uniprefill_fx.last_call()
        assert done is not None
        return {
            "logits": logits,
            "dropped": done.dropped,
            "reason": done.reason.category.value if done.reason else None,
            "kept": dict(done.kept_indices),
            "ends": dict(done.cu_seqlens),
        }

    def generate(self, model: Any) -> Tensor:
        """What follows a prompt, (1, STEPS)."""
        with torch.inference_mode():
            out: Tensor = model.generate(token_ids(TOKENS), max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
        return out[:, TOKENS:]

    def exact(self, model: Any) -> dict[str, Any]:
        return self.prefill(model, token_ids(TOKENS)) | {"tokens": self.generate(model)}

    def model(self, name: str) -> Any:
        return self.exact(self.compiled(name))

    def prompt(self, name: str) -> Any:
        return self.prefill(self.compiled(name), token_ids(TOKENS))

    def asked(self) -> Any:
        """The same compilation drops a batch, and is asked for different things on each rank."""
        model = self.compiled()
        found = self.exact(model)
        ids, mask = padded_batch()
        found["batch"] = self.prefill(model, ids, attention_mask=mask)
        with uniprefill_fx.disabled() if self.rank else contextlib.nullcontext():
            found["one disabled"] = self.prefill(model, token_ids(TOKENS))
        with uniprefill_fx.override(p=0.9 if self.rank else 0.5):
            found["p differs"] = self.prefill(model, token_ids(TOKENS))
        found["again"] = self.prefill(model, token_ids(TOKENS))
        if self.rank:  # a broken weight of one rank
            with torch.no_grad():
                model.model.layers[0].self_attn.q_proj.weight.to_local()[0] = torch.nan
        found["NaN"] = self.prefill(model, token_ids(TOKENS))
        return found

    def whole_attention(self) -> Any:
        """A plan that splits feed-forward layers only: every rank scores all heads."""
        model = SPLIT["llama"][0]()
        model.tp_plan = {name: how for name, how in model.tp_plan.items() if "self_attn" not in name}
        return self.prefill(self.compiled(model=self.split(model)), token_ids(TOKENS))

    def inductor(self) -> Any:
        return self.exact(self.compiled(inner_backend="inductor"))

    def ties(self) -> Any:
        return self.prefill(self.compiled(model=self.split(indifferent_llama()), spec=TIED), token_ids(TOKENS))

    def min_tokens(self) -> Any:
        """Of one rank, more than the prompt has."""
        return self.prefill(self.compiled(min_tokens=1000 * self.rank), token_ids(TOKENS))

    def from_pretrained(self) -> Any:
        """The weights lie in the folder."""
        os.environ.update(RANK=str(self.rank), LOCAL_RANK=str(self.rank), WORLD_SIZE=str(WORLD))
        model = AutoModelForCausalLM.from_pretrained(self.folder / "llama", tp_plan="auto").eval()
        return self.prefill(self.compiled(model=model), token_ids(TOKENS))

    def stock(self) -> Any:
        """One rank runs the model without this backend: what each raises."""
        model = self.split(SPLIT["llama"][0]())
        agreement.SOON, agreement.PATIENCE = (datetime.timedelta(seconds=seconds) for seconds in (0.1, 2))
        if self.rank == 0:
            return self._error(self.compiled(model=model))
        try:
            model(token_ids(TOKENS))
        except RuntimeError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"error": None}

    def _error(self, model: Any) -> dict[str, Any]:
        try:
            self.prefill(model, token_ids(TOKENS))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"error": None}

    def dies(self) -> Any:
        """One rank is gone in the middle of a prompt: what the other raises."""
        model = self.compiled()
        if self.rank:
            reached = Agreement.reached

            def reached_and_gone(own: Agreement, *decision: Any) -> bool:
                reached(own, *decision)
                os._exit(3)

            Agreement.reached = reached_and_gone  # type: ignore
        return self._error(model)


def main() -> None:
    rank, folder, scenarios = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "ranks"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=PATIENCE)
    worker = Worker(rank, folder)
    for scenario in scenarios:
        name, *arguments = scenario.split(":")
        torch.save(getattr(worker, name)(*arguments), folder / f"{scenario}-{rank}.pt")
        print(f"done: {scenario}", flush=True)
    os._exit(0)  # without waiting for a rank that is gone


if __name__ == "__main__":
    main()
