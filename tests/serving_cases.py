"""Checks what an engine of vLLM answered against the eager reference, each request alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from checkpoints import ROOT
from eager_reference import DropSpec, EagerReference, Selection
from torch import Tensor

OPTIONS: dict[str, Any] = {
    "drop_layers": [1, 2], "p": 0.8, "block_size": 16, "last_n": 24, "sink_tokens": 8, "min_tokens": 100,
    "inner_backend": "eager",
}  # fmt: skip


def serve(
    folder: Path,
    requests: dict[str, Any],
    options: dict[str, Any] | None = OPTIONS,
    variables: Mapping[str, str] | None = None,
    **engine: Any,
) -> Any:
    """What an engine of its own process answered; a failure is what it wrote last, as a string.

    variables: further ones of the environment.
    """
    return run("serving_worker.py", folder, {"engine": engine, "options": options, "requests": requests}, variables)


def run(worker: str, folder: Path, asked: dict[str, Any], variables: Mapping[str, str] | None = None) -> Any:
    """What a worker answered in a process of its own, about the model in `folder`; else what it wrote, as a string."""
    result, log = folder / "result.json", folder / "log.txt"
    for file in (result, log):
        file.unlink(missing_ok=True)
    (folder / "case.json").write_text(json.dumps({"model": str(folder)} | asked), "utf-8")
    if variables is None:
        forks = _forking(worker)
        assert forks.stdin is not None and forks.stdout is not None
        forks.stdin.write(f"{folder}\n")
        forks.stdin.flush()
        forks.stdout.readline()
    else:  # which imports may have read, and which a GPU's tests give: a process of CUDA is not forked
        with log.open("w") as out:
            subprocess.run([*_command(worker), str(folder)], stdout=out, stderr=out, env=_environment(variables))
    if result.exists():
        return json.loads(result.read_text())
    return log.read_text() if log.exists() else f"{worker} answered nothing"


def _command(worker: str) -> list[str]:
    return [sys.executable, str(ROOT / "tests" / worker)]


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return dict(os.environ, PYTHONPATH=paths, OMP_WAIT_POLICY="PASSIVE") | dict(variables)


@cache
def _forking(worker: str) -> subprocess.Popen[str]:
    """What all cases without variables of their own are forked from; it ends with its standard input."""
    pipe = subprocess.PIPE
    return subprocess.Popen(_command(worker), stdin=pipe, stdout=pipe, text=True, env=_environment({}))


def prompt(length: int, seed: int, vocabulary: int = 256) -> list[int]:
    return torch.randint(3, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def spec_of(options: dict[str, Any]) -> DropSpec:
    amounts = options.get("p", 0.99)
    if (ratio := options.get("keep_ratio")) is not None:
        amounts = 1.0
    return DropSpec(
        tuple(options["drop_layers"]),
        p=tuple(amounts) if isinstance(amounts, list) else amounts,
        block_size=options["block_size"],
        last_n=options["last_n"],
        sink_tokens=options["sink_tokens"],
        window="index",
        selection="top_p" if ratio is None else "top_k",
        keep_ratio=ratio,
    )


@dataclass
class Answer:
    """How an answer compares: prefills that dropped tokens, and by token the largest error of a log-probability."""

    request: str
    dropped: int = 0
    errors: list[float] = field(default_factory=list)

    def mean(self) -> float:
        return sum(self.errors) / len(self.errors)


def check(
    model: Any,
    served: Any,
    requests: dict[str, Any],
    options: dict[str, Any] = OPTIONS,
    tolerance: float = 1e-4,
    errors: list[float] | None = None,
) -> int:
    """Check every token, log-probability and kept set; returns how many prompts dropped tokens.

    errors: gets the largest error of each token.

    A tolerance above 1e-3 is for engines that round: the errors of a request may be so large on average, and the
    reference runs on the rows that the engine kept, nine in ten of which it would have kept too.
    """
    answers = compare(model, served, requests, options, tolerance)
    for answer in answers:
        if errors is not None:
            errors += answer.errors
        worst = max(answer.errors) if tolerance <= 1e-3 else answer.mean()
        assert worst < tolerance, (answer.request, answer.errors)
    return sum(answer.dropped for answer in answers)


def compare(
    model: Any, served: Any, requests: dict[str, Any], options: dict[str, Any] = OPTIONS, tolerance: float = 1e-4
) -> list[Answer]:
    """Each answer against the reference; tokens and kept sets are checked, log-probabilities are left to the caller."""
    assert not isinstance(served, str), served[-3000:]
    answers = []
    for name, request in requests.items():
        for output in served["outputs"].get(name, []):
            own = f"{output['index']}_{name}" if request.get("n", 1) > 1 else name  # what vLLM calls its parts
            prefills = [p for p in served["prefills"] if p["request"].split("-")[0] == own]
            answers.append(_compare(model, request, output, prefills, options, Answer(own), tolerance))
    return answers


def _compare(
    model: Any,
    request: dict[str, Any],
    output: Any,
    prefills: list[Any],
    options: dict[str, Any],
    answer: Answer,
    tolerance: float,
) -> Answer:
    tokens: list[int] = request["prompt"]
    made: list[int] = output["tokens"]
    own = request.get("extra_args") or {}
    own = own.get("uniprefill") or {}
    spec = spec_of(options | (own if isinstance(own, dict) else {}))
    exact, near_tie = tolerance <= 1e-3, tolerance / 10
    starts = {p["tokens"] - len(tokens): p for p in prefills}  # by how many tokens were generated before
    reference: EagerReference | None = None
    logits = torch.empty(0)
    for i, token in enumerate(made):
        if i in starts and (i == 0 or starts[i]["tokens"] > 1):
            kept = starts[i]["kept"]
            ids = torch.tensor([tokens + made[:i]])
            forced = kept and not exact
            reference = OnRows(model, spec, kept) if forced else EagerReference(model, spec if kept else None)
            found = reference.prefill(ids)
            logits = found.last_logits[0, -1]
            if kept and exact:
                want = [found.kept[layer].tolist() for layer in spec.drop_layers]
                if kept != want:  # two blocks that weigh the same but for rounding, or a block at the very cut
                    near = min(*found.gaps.values(), *found.margins.values())
                    assert near < near_tie, (found.gaps, found.margins)
                    reference = OnRows(model, spec, kept)
                    logits = reference.prefill(ids).last_logits[0, -1]
            if kept:
                answer.dropped += len(kept[-1]) < starts[i]["tokens"]
        elif i:
            assert reference is not None
            logits = reference.step(torch.tensor([[made[i - 1]]]))[0, -1]
        greedy = exact and request.get("temperature", 0.0) == 0.0
        answer.errors.append(_error(logits, output["logprobs"][i], token, near_tie if greedy else None))
    return answer


class OnRows(EagerReference):
    """The reference on rows that were selected elsewhere, (kept,) positions for each drop layer."""

    def __init__(self, model: Any, spec: DropSpec, kept: list[list[int]]) -> None:
        super().__init__(model, spec)
        self.given = dict(zip(spec.drop_layers, kept, strict=True))

    def _select(self, i: int, query: Tensor) -> Selection:
        store = self._stores[i]
        assert store is not None
        given = torch.tensor(self.given[i])
        own = store.positions[super()._select(i, query).rows]
        assert torch.isin(own, given).float().mean() > 0.9 and torch.isin(given, own).float().mean() > 0.9
        return Selection(torch.nonzero(torch.isin(store.positions, given)).flatten())


def _error(logits: Tensor, given: dict[str, float], token: int, near_tie: float | None) -> float:
    """The largest difference of log-probabilities; near_tie: how far a greedy token may be from the best one."""
    want = logits.float().log_softmax(-1)
    if near_tie is not None:
        assert token == int(want.argmax()) or float(want.max() - want[token]) < near_tie
    return max(abs(value - float(want[int(key)])) for key, value in given.items())
