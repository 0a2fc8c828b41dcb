"""The functions of `benchmarks/accuracy.py`, on a few prompts of one checkpoint; and what is said where files lack."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import folder, stock
from eager_reference import DropSpec, EagerReference
from exactness import assert_near

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
tools: Any = importlib.import_module("accuracy_tools")
suite: Any = importlib.import_module("accuracy")

NAME, LAYERS, P = "needle-llama", (0, 3), 0.9
CELL = tools.Cell(768, 4)


@pytest.fixture(scope="module")
def subject() -> Iterator[Any]:
    folder(NAME)
    yield tools.Subject(NAME, list(LAYERS), "position", "cpu")
    torch._dynamo.reset()


@pytest.mark.parametrize("place", ["in", "out"])
def test_prompts(place: str) -> None:
    """The length is exact, the fact is there once, and the question lies where the cell says."""
    folder(NAME)
    for seed in range(3):
        prompt = tools.make_prompt(tools.Cell(768, 4, place), seed)
        ids = prompt.first[0].tolist()
        assert len(ids) == 768
        end = 768 if place == "in" else 768 - tools.BEHIND
        query, key, ans = ids[end - 3 : end]
        assert (query, ans) == (4, 5)
        (fact,) = [i for i in range(end - 3) if ids[i : i + 3] == [2, key, 3]]
        assert ids[fact + 3 : fact + 8] == [*prompt.answer, 6]
        assert prompt.second[0].tolist() == ([] if place == "in" else [query, key, ans])
        assert all(16 <= token < 256 for token in ids[end:])


def test_missing_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program ends with what to set, before transformers looks for the name on its hub."""
    monkeypatch.setattr(tools, "CHECKPOINTS", tmp_path)
    with pytest.raises(SystemExit, match=f"no {NAME} in {tmp_path}: set UNIPREFILL_CHECKPOINTS"):
        tools.Subject(NAME, list(LAYERS), "position", "cpu")


def test_architectures_without_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "architectures", raising=False)
    monkeypatch.setitem(sys.modules, "arch_measure", None)
    with pytest.raises(SystemExit, match="with PYTHONPATH=tests"):
        importlib.import_module("architectures")


@pytest.mark.slow
def test_own_selection_against_the_reference(subject: Any) -> None:
    """Answers, the first distribution, rows and KL are those of the eager reference."""
    prompt = tools.make_prompt(CELL, 0)
    got, dense = subject.dropped(prompt, tools.Setting("p", {"p": P})), subject.dense(prompt)
    reference = EagerReference(stock(NAME), DropSpec(LAYERS, p=P))
    tokens, logits = reference.generate(prompt.first, tools.ANSWER)
    plain_tokens, plain = EagerReference(stock(NAME), None).generate(prompt.first, tools.ANSWER)
    want = reference.prefill(prompt.first)
    assert got.tokens == tokens[0].tolist() and dense.tokens == plain_tokens[0].tolist()
    assert got.kept == {layer: len(rows) for layer, rows in want.kept.items()}
    assert list(got.kept.values())[-1] < CELL.tokens
    assert_near(got.logprobs.float(), logits[0][0].log_softmax(-1))
    row = tools.Row(NAME, "", "", "", CELL.tokens, CELL.pairs, CELL.place)
    row.add(prompt, got, dense)
    target, given = plain[0].double().log_softmax(-1), logits[0].double().log_softmax(-1)
    kl = torch.nn.functional.kl_div(given, target, log_target=True, reduction="sum")
    assert row.kl_sum == pytest.approx(float(kl), abs=1e-5)
    assert (row.n, row.gone, row.exact) == (1, 1, int(tokens[0].tolist() == prompt.answer))


def test_rivals_keep_as_many_rows(subject: Any) -> None:
    """The rows of each rival, worked out by hand, and other answers to the question than the backend's rows give."""
    prompt = tools.make_prompt(CELL, 1)
    keep = [500, 300]
    rows: dict[str, list[int]] = {}
    for kind in ("sinks+last", "random", "mean"):
        answer = subject.dropped(prompt, tools.Setting(kind, kind=kind), keep)
        call = tools.uniprefill_fx.last_call()
        assert list(answer.kept.values()) == keep and answer.rows == (768, 500, 500, 500, 300, 300, 300, 300)
        for kept in call.kept_indices.values():
            assert set(range(128)) | set(range(640, 768)) <= set(kept.tolist())
        rows[kind] = call.kept_indices[0].tolist()
    assert rows["sinks+last"] == [*range(128), *range(768 - 372, 768)]
    assert len({tuple(kept) for kept in rows.values()}) == 3


def test_fp8_scores() -> None:
    """A selection piece scores with e4m3 products, and selects with the setting's p."""
    rivals: Any = importlib.import_module("accuracy_rivals")
    ops, graph = torch.ops.uniprefill, torch.fx.Graph()
    q, k, token_bounds = (graph.placeholder(name) for name in ("q", "k", "token_bounds"))
    scores = graph.call_function(
        ops.score.default, (q, k, None, token_bounds, 2.0, None, None, None, 8, 16, torch.float32)
    )
    chosen = graph.call_function(ops.select.default, (scores, token_bounds, token_bounds, 16, 8, 0, 0.9, None))
    graph.output((chosen, scores))
    chooser = rivals.Chooser("fp8", p=0.6)
    run = rivals._Selection(torch.fx.GraphModule({}, graph), 0, chooser)
    torch.manual_seed(0)
    inputs = torch.randn(1, 2, 256, 32), torch.randn(1, 2, 256, 32), torch.tensor([[0, 256]])
    (rows, _), got = run(*inputs)
    twin: Any = importlib.import_module("uniprefill_fx.kernels.block_scores.naive")
    want = twin.block_scores_reference(*inputs, 2.0, 8, 16, dtype="fp8")
    assert torch.equal(got, want)
    assert torch.equal(rows, ops.select(want, inputs[2], inputs[2], 16, 8, 0, 0.6, None)[0])
    chooser.kind = "own"
    (own_rows, _), own = run(*inputs)
    assert not torch.equal(own, want) and own_rows.shape[1] > rows.shape[1]


def test_mean_scores() -> None:
    q, k = torch.randn(1, 4, 50, 8), torch.randn(1, 2, 50, 8)
    got = importlib.import_module("accuracy_rivals").mean_scores(q, k, 5, 16)
    want = [
        sum(float(q[0, head, -5:].mean(0) @ k[0, head // 2, 16 * b : 16 * b + 16].mean(0)) for head in range(4))
        for b in range(4)
    ]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_question_out_of_the_window(subject: Any) -> None:
    prompt = tools.make_prompt(tools.Cell(768, 4, "out"), 0)
    dense = subject.dense(prompt)
    tokens = EagerReference(stock(NAME), None)
    tokens.prefill(prompt.first)
    logits = tokens.step(prompt.second)[0, -1]
    assert_near(dense.logprobs.float(), logits.log_softmax(-1))
    assert dense.tokens == prompt.answer
    assert subject.dropped(prompt, tools.Setting("p", {"p": P})).rows[-1] < 768


def test_eager_runs_are_noticed(subject: Any) -> None:
    """A model that Dynamo no longer compiles answers, but it is no result."""
    compiled, subject.model._compiled_call_impl = subject.model._compiled_call_impl, None
    try:
        with pytest.raises(RuntimeError, match="ran past the backend"):
            subject.dense(tools.make_prompt(CELL, 0))
    finally:
        subject.model._compiled_call_impl = compiled


def test_table_and_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second run adds prompts to the first one's; the table has a row for each setting that ran."""
    folder(NAME)
    seen: list[int] = []
    low, high = 1 / (1 + math.e), math.e / (1 + math.e)
    kl = 0.5 * math.log(0.5 / low) + 0.5 * math.log(0.5 / high)

    class Fake:
        def __init__(self, *_: Any) -> None: ...

        def dense(self, prompt: Any) -> Any:
            seen.append(int(prompt.first.sum()))
            return tools.Answer(prompt.answer, torch.zeros(2).log_softmax(-1))

        def dropped(self, prompt: Any, setting: Any, keep: Any = ()) -> Any:
            return tools.Answer([0, *prompt.answer[1:]], torch.tensor([0.0, 1.0]).log_softmax(-1), 0.5, (), {3: 256})

    monkeypatch.setattr(suite, "Subject", Fake)
    out = tmp_path / "accuracy.json"
    for rounds in ("1", "3"):
        suite.main(["--out", str(out), "--small", "--models", NAME, "--variants", "auto", "--rounds", rounds])
    suite.main(["--out", str(out), "--small", "--models", NAME, "--variants", "auto", "--budget", "0"])  # no time: none
    assert len(seen) == 6 and len(set(seen)) == 6  # three prompts for each of two cells
    *_, rows, pooled = capsys.readouterr().out.split("\n\n")
    line = [line for line in rows.splitlines() if "p=0.975" in line][-1]  # the second run's table comes last
    cells = line.split()
    assert cells[3:10] == ["p=0.975", "1024", "16", "in", "3", "0.0", "100.0"] and cells[10] == "3"
    assert cells[-2:] == ["3:0.25", "(3/3)"]
    (line,) = [line for line in pooled.splitlines() if line.split()[3:6] == ["in", "p=0.95", "3"]]
    assert line.split()[5:] == ["3", "0.0", "3", "0", f"{kl:.5f}", "0.50", "100%"]
    goal, together = pooled.splitlines()[-2:]
    assert f"100.0 points below dense (goal 0.5), mean KL {kl:.5f}" in goal
    assert together == "All of its cells together: 3 of 3 answers lost"
