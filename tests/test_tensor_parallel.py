"""Models that are split over two ranks drop what one drops: two processes on the CPU, beside the eager reference."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ROOT
from eager_reference import EagerReference
from exactness import TIE, assert_near
from split_models import LENGTHS, SPLIT, STEPS, TIED, TOKENS, padded_batch
from tiny import tiny_llama, token_ids

pytest.importorskip("transformers.distributed.tensor_parallel", reason="a transformers without DTensor plans")
RANKS = (0, 1)
LATER = ("qwen3_moe", "gemma3", "qwen3_next")
LOADS = importlib.util.find_spec("accelerate") is not None
Found = Callable[..., list[dict[str, Any]]]  # what the ranks found in a scenario


def ran(folder: Path, *scenarios: str) -> Found:
    """Run scenarios in two processes."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    worker = [sys.executable, str(ROOT / "tests" / "split_worker.py")]
    logs = [folder / f"log-{rank}.txt" for rank in RANKS]
    running = []
    for rank, log in zip(RANKS, logs, strict=True):
        command = [*worker, str(rank), str(folder), *scenarios]
        with log.open("w") as file:
            running.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment))
    try:
        for process in running:
            process.wait(timeout=600)  # a hang ends here
    finally:
        for process in running:
            process.kill()

    def found(scenario: str, ranks: tuple[int, ...] = RANKS) -> list[dict[str, Any]]:
        files = [folder / f"{scenario}-{rank}.pt" for rank in ranks]
        missing = [logs[rank].read_text()[-3000:] for file, rank in zip(files, ranks, strict=True) if not file.exists()]
        assert not missing, "\n".join(missing)
        return [torch.load(file, weights_only=False) for file in files]

    return found


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """All scenarios that two processes can run one after the other; the last one ends one of them."""
    folder = tmp_path_factory.mktemp("ranks")
    scenarios = ["asked", "ties", "min_tokens", "whole_attention", *(f"prompt:{name}" for name in LATER)]
    if LOADS:
        tiny_llama(2).save_pretrained(folder / "llama")
        scenarios.append("from_pretrained")
    yield ran(folder, *scenarios, "dies")


def assert_exact(found: list[dict[str, Any]], name: str) -> None:
    """Every rank kept what the reference keeps on one, and said the same."""
    build, spec = SPLIT[name]
    reference = EagerReference(build(), spec)
    want = reference.prefill(token_ids(TOKENS))
    assert min(want.margins.values()) > TIE and min(want.gaps.values()) > TIE
    tokens, _ = reference.generate(token_ids(TOKENS), STEPS) if "tokens" in found[0] else (None, None)
    for own in found:
        assert own["dropped"] and sorted(own["kept"]) == sorted(want.kept)
        for layer, positions in want.kept.items():
            assert len(positions) < TOKENS and torch.equal(own["kept"][layer], positions)
        assert_near(own["logits"], want.last_logits)
        assert tokens is None or torch.equal(own["tokens"], tokens)


@pytest.mark.parametrize("name", LATER)
def test_ranks_keep_what_one_rank_keeps(split: Found, name: str) -> None:
    assert_exact(split(f"prompt:{name}"), name)


def test_ranks_generate_what_one_rank_generates(split: Found) -> None:
    assert_exact(split("asked"), "llama")


@pytest.mark.slow
def test_every_model_generates_what_one_rank_generates(tmp_path: Path) -> None:
    found = ran(tmp_path, *(f"model:{name}" for name in LATER))
    for name in LATER:
        assert_exact(found(f"model:{name}"), name)


def test_ranks_that_score_the_same_heads_keep_what_one_rank_keeps(split: Found) -> None:
    """The sum of their scores is a multiple of one rank's."""
    assert_exact(split("whole_attention"), "llama")


@pytest.mark.skipif(not LOADS, reason="transformers loads by a plan with accelerate only")
def test_a_model_that_was_loaded_by_its_plan(split: Found) -> None:
    assert_exact(split("from_pretrained"), "llama")


@pytest.mark.slow
def test_pieces_with_collectives_are_compiled_by_inductor(tmp_path: Path) -> None:
    assert_exact(ran(tmp_path, "inductor")("inductor"), "llama")


def test_a_padded_batch(split: Found) -> None:
    """Each prompt is what it is alone."""
    build, spec = SPLIT["llama"]
    reference = EagerReference(build(), spec)
    (ids, mask), (layer,) = padded_batch(), spec.drop_layers
    for row, length in enumerate(LENGTHS):
        want = reference.prefill(ids[row : row + 1, ids.shape[1] - length :])
        for own in split("asked"):
            batch = own["batch"]
            begin, end = batch["ends"][layer][row : row + 2]
            kept = batch["kept"][layer][begin:end] - (ids.shape[1] - length)
            assert torch.equal(kept, want.kept[layer])
            assert_near(batch["logits"][row], want.last_logits[0])
    assert mask.sum() == sum(LENGTHS)


def test_ties_break_alike(split: Found) -> None:
    """Queries of zeros: every whole block has the same score, and the first ones stay."""
    blocks = [range(begin, min(begin + 16, TOKENS)) for begin in range(0, TOKENS, 16)]
    whole = int(-(-TIED.keep_ratio * TOKENS // 16))  # type: ignore[operator]
    kept = {t for block in blocks[:whole] for t in block} | {*range(TOKENS - TIED.last_n, TOKENS)}
    for own in split("ties"):
        assert own["kept"][TIED.drop_layers[0]].tolist() == sorted(kept)


def dense_logits() -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = tiny_llama(2)(token_ids(TOKENS), logits_to_keep=1).logits
    return logits


@pytest.mark.parametrize(
    ("case", "reasons"),
    [("one disabled", ["several-ranks", "disabled"]), ("p differs", ["several-ranks", "several-ranks"])],
)
def test_ranks_that_are_asked_for_different_things_run_dense(split: Found, case: str, reasons: list[str]) -> None:
    found = [own[case] for own in split("asked")]
    assert [own["reason"] for own in found] == reasons and not any(own["dropped"] for own in found)
    for own in found:
        assert_near(own["logits"], dense_logits())


def test_ranks_that_were_compiled_with_other_options_run_dense(split: Found) -> None:
    found = split("min_tokens")
    assert [own["reason"] for own in found] == ["several-ranks", "below-min-tokens"]
    for own in found:
        assert not own["dropped"]
        assert_near(own["logits"], dense_logits())


def test_they_drop_again_once_they_agree(split: Found) -> None:
    for own in split("asked"):
        assert own["again"]["dropped"] and torch.equal(own["again"]["logits"], own["logits"])


def test_scores_of_one_rank_that_are_not_finite_keep_every_token_on_all(split: Found) -> None:
    for own in split("asked"):
        assert own["NaN"]["reason"] == "scores-not-finite"
        assert own["NaN"]["kept"][0].tolist() == list(range(TOKENS))


def test_a_rank_without_this_backend_is_named_to_the_other(tmp_path: Path) -> None:
    """Stock torch beside ours: no collective of ours meets one of the model, and neither rank hangs."""
    ours, stock = ran(tmp_path, "stock")("stock")
    assert ours["error"].startswith("RanksError: rank 1 of the ranks [0, 1] did not come to this prompt within 2 s")
    assert "Compile the model on all of these ranks or on none" in ours["error"]
    assert "gloo" in stock["error"]  # the other rank has ended


def test_a_rank_that_dies_ends_the_other_with_an_error(split: Found) -> None:
    """In the middle of a prompt, behind the agreement: the other is told so by its next collective."""
    with pytest.raises(AssertionError):
        split("dies", (1,))  # it left no result
    (left,) = split("dies", (0,))
    assert left["error"] and "gloo" in left["error"]
