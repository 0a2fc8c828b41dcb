"""What the exactness tests share: a compiled model beside the eager reference, and what "exact" means."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from checkpoints import fresh, stock
from eager_reference import DropSpec, EagerReference, PrefillResult
from torch import Tensor

import uniprefill_fx
from uniprefill_fx import LastCall

TOLERANCE = 1e-4
TIE = 1e-7  # a cut that is nearer than this is a matter of rounding
SHARP: dict[str, Any] = {"block_size": 16, "last_n": 32, "sink_tokens": 24}  # drops much of a short prompt


def options_of(spec: DropSpec, **extra: Any) -> dict[str, Any]:
    """The backend's options that mean what `spec` means to the reference."""
    options: dict[str, Any] = {
        "drop_layers": list(spec.drop_layers),
        "block_size": spec.block_size,
        "last_n": spec.last_n,
        "sink_tokens": spec.sink_tokens,
        "window": spec.window,
        "selection": spec.selection,
        "min_tokens": 0,
        "inner_backend": "eager",
    }
    amount = spec.p if spec.selection == "top_p" else spec.keep_ratio
    key = "p" if spec.selection == "top_p" else "keep_ratio"
    return options | {key: list(amount) if isinstance(amount, tuple) else amount} | extra


def assert_near(got: Tensor, want: Tensor, tolerance: float = TOLERANCE) -> None:
    """Equal in shape, and in value to an absolute tolerance."""
    torch.testing.assert_close(got, want, atol=tolerance, rtol=0.0)


def largest(difference: Tensor) -> float:
    return float(difference.abs().max())


def note(figures: dict[str, Any]) -> None:
    """Append the figures of one comparison to the file that UNIPREFILL_FIGURES names, one JSON object a line."""
    if path := os.environ.get("UNIPREFILL_FIGURES"):
        with open(path, "a") as file:
            file.write(json.dumps(figures) + "\n")


def assert_differs(got: Tensor, dense: Tensor) -> None:
    """Dropping showed: what was compared with the reference could not have come from the dense model."""
    assert largest(got - dense) > 10 * TOLERANCE


@dataclass(frozen=True)
class Case:
    """One compiled model. `model` is None for a checkpoint, which is then loaded by `name`."""

    name: str
    spec: DropSpec
    extra: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    def __str__(self) -> str:
        return f"{self.name}-{self.label}"


class Compiled:
    """A case at work: `model` is compiled for the backend, `stock` is not."""

    def __init__(self, case: Case, model: Any = None, untouched: Any = None) -> None:
        torch._dynamo.reset()  # another set of options on the same code would end in Dynamo's recompile limit
        self.case, self.spec = case, case.spec
        self.stock = stock(case.name) if untouched is None else untouched
        self.model = fresh(case.name) if model is None else model
        self.model.compile(backend="uniprefill", options=options_of(case.spec, **case.extra))

    @cached_property
    def reference(self) -> EagerReference:
        return EagerReference(self.stock, self.spec)

    @torch.inference_mode()
    def dense(self, input_ids: Tensor, **call: Any) -> Any:
        return self.stock(input_ids, **call)

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, **call: Any) -> tuple[Any, LastCall]:
        """Run the compiled model; what it recorded is new, so it did not run past the backend."""
        before = uniprefill_fx.last_call()
        out = self.model(input_ids, **call)
        after = uniprefill_fx.last_call()
        assert after is not None and after is not before
        return out, after

    def expected(self, ids: Tensor) -> PrefillResult:
        """The reference's result, on a prompt whose cuts are no ties."""
        result = self.reference.prefill(ids)
        assert min(result.margins.values()) > TIE and min(result.gaps.values()) > TIE, "a tie: choose another prompt"
        return result

    @torch.inference_mode()
    def generate(self, ids: Tensor, steps: int, **call: Any) -> Any:
        return self.model.generate(
            ids,
            max_new_tokens=steps,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
            **call,
        )


def assert_same_rows(call: LastCall, want: PrefillResult, tokens: int) -> None:
    """The kept sets are identical, and so are the rows of every layer. Rows of layers without keys follow from it."""
    assert call.dropped and call.reason is None and call.tokens == tokens
    assert sorted(call.kept_indices) == sorted(want.kept)
    for layer, positions in want.kept.items():
        assert torch.equal(call.kept_indices[layer], positions), f"kept set after layer {layer}"
    alive = tokens
    for layer, stored in enumerate(want.kv_positions):
        assert stored is None or len(stored) == alive
        assert call.num_tokens[layer] == alive
        alive = len(want.kept[layer]) if layer in want.kept else alive
    assert len(call.num_tokens) == len(want.kv_positions)


def assert_dropped(call: LastCall) -> None:
    """Some rows are gone at the end."""
    assert call.dropped and call.tokens is not None
    assert len(list(call.kept_indices.values())[-1]) < call.tokens


def kv_lengths(cache: Any) -> list[int | None]:
    """Stored keys, layer by layer; None for linear attention."""
    keys = [getattr(layer, "keys", None) for layer in cache.layers]
    return [None if k is None else k.shape[2] for k in keys]
