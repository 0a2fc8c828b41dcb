"""What the backend does with one family: drops exactly, drops in calls only, stays dense with a reason, or not built.

A result is compared with `arch_reference`, which chooses rows itself, or with the stock model where nothing is dropped.
It counts as a drop only where tokens were lost, and a result that differs is an error: nothing else becomes of it.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from arch_builders import ARCHS, Arch
from arch_reference import StockReference
from arch_walk import Walked, families
from eager_reference import DropSpec
from exactness import TIE, TOLERANCE, largest, options_of
from torch import Tensor
from torch.utils import _pytree as pytree

import uniprefill_fx
from uniprefill_fx import LastCall, frontends

EXACT, CALLS, DENSE, UNBUILT = "drops exactly", "drops in calls only", "dense", "cannot be built"
GENERATE, FAILS, NOT_RUN = "drops in generate only", "fails", "not run"
RANKS = (EXACT, CALLS, GENERATE, DENSE, UNBUILT, FAILS, NOT_RUN)  # from the best
LENGTHS, NEW = (437, 611), 6  # no multiples of a block, a chunk of a recurrence, or a window
P = (0.7, 0.8, 0.6, 0.9)  # the next one where blocks tie


def rows() -> list[str]:
    """The names of the table's rows: families of transformers, and variants of them that `arch_builders` holds."""
    walked = families()
    return [*walked, *(name for name in ARCHS if name not in walked and name + "_text" not in walked)]


def prompt_ids(length: int) -> Tensor:
    return torch.randint(3, 256, (1, length), generator=torch.Generator().manual_seed(length))


class WrongError(AssertionError):
    """A result is not the reference's."""


class TieError(Exception):
    """Two blocks score too nearly the same to say which one is to be kept."""


class Measure:
    """One family: its stock model, its reference and its compiled model."""

    def __init__(self, name: str) -> None:
        self.arch: Arch | Walked = Walked(name) if name in families() else ARCHS[name]
        self.stock = self.arch.build()
        self.differences: dict[str, list[float]] = {}
        self.lost: list[int] = []
        self.places = False  # whether generate passes position ids, one for each token
        self._reference: StockReference | None = None
        only = "logits_to_keep" in inspect.signature(self.stock.forward).parameters
        self.only: dict[str, Any] = {"logits_to_keep": 1} if only else {}

    @property
    def reference(self) -> StockReference:
        """Built when first needed: what stays dense is compared with the stock model."""
        if self._reference is None:
            ids = prompt_ids(LENGTHS[0])
            with torch.inference_mode():
                differs = largest(self.arch.build("eager")(ids).logits - self.stock(ids).logits) > TOLERANCE
            # Gemma-2 caps the scores of attention with one implementation, and not with another
            self._reference = StockReference(self.arch, None if differs else "eager")
        return self._reference

    def compile(self, p: float, **options: Any) -> Any:
        """A compiled model; what was compiled before is forgotten."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.model, self.spec = self.arch.build(), DropSpec((), p=p, block_size=16, last_n=32, sink_tokens=16)
        given = {**options_of(self.spec), **options}
        if "drop_layers" not in options:
            del given["drop_layers"]
        frontends.install()
        self.model.compile(backend="uniprefill", options=given)

    def compare(self, kind: str, got: Tensor, want: Tensor) -> None:
        difference = largest(got - want)
        self.differences.setdefault(kind, []).append(difference)
        if not difference <= TOLERANCE * max(1.0, largest(want) / 10):
            raise WrongError(f"{kind}: logits differ by {difference:.1e} of {largest(want):.1f}")

    def check(self, kind: str, got: Tensor, ids: Tensor, prompt: int, call: LastCall) -> None:
        """Logits from the prompt's last position on, (tokens, vocabulary), and the rows that were kept."""
        if not call.dropped:
            self.check_dense(kind, got, lambda model: model(ids, **self.only).logits[0, -1:])
            return
        spec = DropSpec(tuple(call.kept_indices), p=self.spec.p, block_size=16, last_n=32, sink_tokens=16)
        want = self.reference.run(ids, prompt, spec, **(self.positions(ids) if kind == "generate" else {}))
        if min(min(s.margin, s.gap) for s in want.selections.values()) <= TIE:
            raise TieError(kind)
        for layer, kept in want.kept.items():
            if not torch.equal(call.kept_indices[layer], kept):
                raise WrongError(f"{kind}: other tokens kept after layer {layer}")
        self.lost.append(prompt - min(len(kept) for kept in want.kept.values()))
        if self.lost[-1] == 0:
            raise TieError(f"{kind}: nothing was lost")
        self.compare(kind, got, want.logits)

    def positions(self, ids: Tensor) -> dict[str, Tensor]:
        """What generate passes: positions from 0, where RoBERTa by itself counts from its padding index."""
        return {"position_ids": torch.arange(ids.shape[1])[None]} if self.places else {}

    def check_dense(self, kind: str, got: Tensor, run: Callable[[Any], Tensor]) -> None:
        """The result is that of the stock model; or, as some compute something else when traced (Doge's eager attention
        sees later tokens), of the stock model traced by Dynamo alone."""
        with torch.inference_mode():
            try:
                self.compare(kind, got, run(self.stock))
            except WrongError:
                self.differences[kind].pop()
                traced = self.arch.build()
                traced.compile(backend="eager")
                self.compare(kind, got, run(traced))

    def fails_without_us(self) -> bool:
        """Whether a call or a generate of the model fails when Dynamo alone compiles it."""
        torch._dynamo.reset()
        model = self.arch.build()
        model.compile(backend="eager")
        try:
            with torch.inference_mode():
                model(prompt_ids(LENGTHS[0]))
                model.generate(prompt_ids(LENGTHS[0]), **GREEDY)
        except Exception:
            return True
        return False

    def forward(self, length: int) -> tuple[Tensor, LastCall]:
        before = uniprefill_fx.last_call()
        ids = prompt_ids(length)
        _mark(ids, length)
        with torch.inference_mode():
            logits = self.model(ids, **self.only).logits[0, -1:]
        call = uniprefill_fx.last_call()
        if call is None or call is before:
            raise WrongError("the call ran past the backend, without a record")
        return logits, call

    def generate(self) -> tuple[Any, LastCall]:
        before = uniprefill_fx.last_call()
        prepare = self.model.prepare_inputs_for_generation

        def marked(*args: Any, **kwargs: Any) -> Any:
            inputs = prepare(*args, **kwargs)
            self.places = getattr(inputs.get("position_ids"), "ndim", 0) == 2
            _mark(inputs, LENGTHS[0])
            return inputs

        with torch.inference_mode(), patch.object(self.model, "prepare_inputs_for_generation", marked):
            out = self.model.generate(prompt_ids(LENGTHS[0]), **GREEDY)
        call = uniprefill_fx.last_call()
        if call is None or call is before:
            raise WrongError("generate ran past the backend, without a record")
        return out, call


GREEDY: dict[str, Any] = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "eos_token_id": None,
    "output_logits": True,
    "return_dict_in_generate": True,
}


def measure(name: str) -> dict[str, Any]:
    """One row of the table, as JSON."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    try:
        subject = Measure(name)
        with torch.inference_mode():
            subject.stock(prompt_ids(LENGTHS[0]))
    except ImportError as error:
        named = re.search(r"requires the (\S+) library", str(error))
        missing = f"the package {named.group(1)}" if named else _short(error)
        decoder = f"; its decoder is the row {name}_text" if f"{name}_text" in families() else ""
        reason = f"its other parts need what is not installed here: {missing}{decoder}"
        return {"name": name, "status": UNBUILT, "reason": reason, "seconds": _since(began)}
    except Exception as error:
        return {"name": name, "status": UNBUILT, "reason": _short(error), "seconds": _since(began)}
    row: dict[str, Any] = {"name": name, "class": type(subject.stock).__name__}
    for p in P:
        try:
            row |= _measured(subject, p)
            break
        except TieError:
            subject.lost.clear()
        except WrongError:
            raise
        except Exception as error:
            if not subject.fails_without_us():
                raise
            row |= {"status": UNBUILT, "reason": f"torch.compile fails with any backend: {_short(error)}"}
            break
    else:
        raise TieError(f"blocks tie, or nothing is lost, with any p of {P}")
    if "reason" in row:
        row["reason"] = textwrap.shorten(re.sub(r"\S*/site-packages/", "", row["reason"]), 240, placeholder=" ...")
    return row | {"seconds": _since(began)}


def _measured(subject: Measure, p: float) -> dict[str, Any]:
    subject.differences.clear()
    subject.compile(p, drop_layers="all")
    for length in LENGTHS:
        got, call = subject.forward(length)
        subject.check("prompts", got, prompt_ids(length), length, call)
    found: dict[str, Any] = {"drops_after": list(call.kept_indices), "p": p}
    found |= {"status": EXACT if call.dropped else DENSE}
    if call.reason is not None:
        found |= {"category": call.reason.category.value, "reason": call.reason.seen}
    found["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if call.dropped:
        subject.compile(p)  # now after the layers that nobody chose
    found |= _generated(subject, call.dropped)
    if subject.lost:
        found["lost"] = min(subject.lost)
    return found | {kind: max(values) for kind, values in subject.differences.items()}


def _generated(subject: Measure, dropped: bool) -> dict[str, Any]:
    """What generate makes of a row whose calls drop, or do not."""
    ids = prompt_ids(LENGTHS[0])
    try:
        stock = subject.stock.generate(ids, **GREEDY)
    except Exception as error:  # not ours: the family has no generate
        return {"status": CALLS, "reason": f"the model's own generate fails: {_short(error)}"} if dropped else {}
    out, call = subject.generate()
    if not call.dropped:
        subject.check_dense("generate", _logits(out), lambda model: _logits(model.generate(ids, **GREEDY)))
        return (
            {"status": CALLS, "reason": f"in generate: {call.reason.seen if call.reason else None}"} if dropped else {}
        )
    prompt = call.tokens or 0  # of the last prefill
    found: dict[str, Any] = {"auto": list(call.kept_indices)}
    try:
        subject.check("generate", _logits(out)[prompt - LENGTHS[0] - NEW :], out.sequences[:, :-1], prompt, call)
    except WrongError:
        # Moshi's cache keeps a window that its attention does not have: nothing to compare with
        whole = subject.reference.run(
            stock.sequences[:, :-1], LENGTHS[0], None, **subject.positions(stock.sequences[:, :-1])
        )
        if largest(whole.logits - _logits(stock)) <= TOLERANCE:
            raise
        del subject.differences["generate"]
        return found | {"status": CALLS, "reason": "its own generate differs from its forward: not compared"}
    if prompt > LENGTHS[0]:
        return found | {"status": CALLS, "reason": "its generate passes no cache: each token selects anew"}
    return found if dropped else found | {"status": GENERATE}


def _mark(inputs: Any, length: int) -> None:
    """Tell Dynamo which axes hold the tokens, which spares a trace of this one length."""
    for tensor in pytree.tree_leaves(inputs):
        if isinstance(tensor, Tensor):
            for axis in (axis for axis, size in enumerate(tensor.shape) if size == length):
                torch._dynamo.maybe_mark_dynamic(tensor, axis)


def _logits(out: Any) -> Tensor:
    """What a generate of one prompt gave, (tokens, vocabulary)."""
    return torch.cat([step[-1:] for step in out.logits])


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 1)


def _short(error: BaseException) -> str:
    """The first line of an error that says something."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text[:160]}"


def quiet() -> None:
    """Neither transformers nor warnings speak while many models are built."""
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
