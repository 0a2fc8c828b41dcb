"""`calibrate()`: what it returns holds on the eager reference, too."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import fresh, needle_ids, stock
from eager_reference import DropSpec, EagerReference
from tiny import tiny_gemma3, tiny_llama, token_ids
from torch import Tensor
from transformers.utils import logging as transformers_logging

import uniprefill_fx
from uniprefill_fx import OptionError, calibrate
from uniprefill_fx.tools import calibrate as calibration

SHARP: dict[str, Any] = {"block_size": 16, "last_n": 32, "sink_tokens": 16}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers_logging.disable_progress_bar()


def kl_by_hand(model: Any, options: dict[str, Any], ids: Tensor, positions: int) -> tuple[float, int]:
    """KL from dense in the last positions by the eager reference, and rows kept after the last drop."""
    spec = DropSpec(tuple(options["drop_layers"]), p=tuple(options["p"]), **SHARP)
    dropped = EagerReference(model, spec).prefill(ids)
    with torch.inference_mode():
        dense = model(ids).logits[0, -positions:].double().log_softmax(-1)
    got = dropped.logits[0, -positions:].double().log_softmax(-1)
    kl = torch.nn.functional.kl_div(got, dense, log_target=True, reduction="none").sum(-1).mean()
    return float(kl), len(list(dropped.kept.values())[-1])


def test_budget_holds_by_the_reference(tmp_path: Path) -> None:
    """A tight and a loose budget: KL is what the reference gives, within the budget; a looser one saves more work."""
    model, prompts = tiny_llama(4), [token_ids(300, seed=1), token_ids(333, seed=2)[0]]
    found = {
        budget: calibrate(model, prompts, max_kl=budget, grid=(0.99, 0.95, 0.9, 0.7), **SHARP)
        for budget in (0.002, 0.2)
    }
    for budget, result in found.items():
        by_hand = [kl_by_hand(model, result.options, ids.reshape(1, -1), 16) for ids in prompts]
        assert result.kl == pytest.approx(sum(kl for kl, _ in by_hand) / 2, rel=1e-3, abs=1e-6)
        assert result.worst_kl == pytest.approx(max(kl for kl, _ in by_hand), rel=1e-3, abs=1e-6)
        assert 0 < result.kl <= budget and result.max_kl == budget
        mean = sum(rows / ids.numel() for (_, rows), ids in zip(by_hand, prompts, strict=True)) / 2
        assert result.kept[result.options["drop_layers"][-1]] == pytest.approx(mean)
        assert 3 not in result.options["drop_layers"]  # a drop after the last layer saves nothing
    assert found[0.2].compute_fraction < found[0.002].compute_fraction < 1.0
    assert found[0.2].compute_fraction < 0.8
    found[0.2].save(tmp_path / "options.json")
    options = json.loads((tmp_path / "options.json").read_text())
    assert options == found[0.2].options and "inner_backend" not in options
    uniprefill_fx.PrefillConfig.from_options(options)
    assert f"budget {0.2:g}" in str(found[0.2])


def test_held_out_prompts_have_no_part_in_the_search() -> None:
    """Every third: their KL is the reference's, and another one in its place changes nothing but these figures."""
    prompts = [token_ids(250, seed=seed) for seed in range(4)]
    options: dict[str, Any] = {"max_kl": 5.0, "grid": (0.5,), **SHARP}
    found = calibrate(tiny_llama(2), prompts, **options)
    by_hand = [kl_by_hand(tiny_llama(2), found.options, ids, 16)[0] for ids in prompts]
    assert found.held_out_kl == pytest.approx(by_hand[2], rel=1e-3, abs=1e-6)
    searched = [by_hand[i] for i in (0, 1, 3)]
    assert found.kl == pytest.approx(sum(searched) / 3, rel=1e-3, abs=1e-6)
    error = statistics.stdev(searched) / 3**0.5
    assert found.kl + 1.88 * error < found.bound < found.kl + 1.89 * error  # Student's t, 2 degrees of freedom
    again = calibrate(tiny_llama(2), [*prompts[:2], token_ids(260, seed=9), prompts[3]], **options)
    assert (again.options, again.kl, again.bound) == (found.options, found.kl, found.bound)
    assert again.held_out_kl != found.held_out_kl and again.held_out_kl is not None
    assert f"held-out prompts: KL {again.held_out_kl:.2g}" in str(again)


@pytest.mark.slow
def test_steps_are_taken_back_for_held_out_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the mean over them is above the budget, which that of the search was not."""
    prompts = [token_ids(300, seed=seed) for seed in range(3)]
    options: dict[str, Any] = {"max_kl": 0.1, "grid": (0.95, 0.9, 0.8, 0.6), **SHARP}
    loose = calibrate(tiny_llama(4), prompts, **options)
    measure, seen = calibration._Trial.measure, loose.held_out_kl
    assert seen is not None

    def harder(trial: Any, ps: Any, held_out: bool = False) -> Any:
        found = measure(trial, ps, held_out)
        return replace(found, kls=tuple(kl * 0.11 / seen for kl in found.kls)) if held_out else found

    monkeypatch.setattr(calibration._Trial, "measure", harder)
    found = calibrate(tiny_llama(4), prompts, **options)
    assert found.held_out_kl is not None and found.held_out_kl <= 0.1
    assert loose.compute_fraction < found.compute_fraction < 1


def test_candidates_are_the_given_layers() -> None:
    found = calibrate(tiny_llama(4), [token_ids(300)], max_kl=0.5, drop_layers=[1], grid=(0.9, 0.5), **SHARP)
    assert found.options["drop_layers"] == [1] and found.options["p"] == [0.5]


def test_no_drop_fits() -> None:
    """Options that keep everything, rather than ones that break the budget."""
    found = calibrate(tiny_llama(3), [token_ids(300)], max_kl=1e-12, drop_layers=[1], grid=(0.5,), **SHARP)
    assert found.options["p"] == [1.0] and found.kl == pytest.approx(0, abs=1e-12) and found.compute_fraction == 1.0


def test_rounding_above_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends where even the choice without drops differs from dense by more than the budget."""
    measure = calibration._Trial.measure
    monkeypatch.setattr(calibration._Trial, "measure", lambda trial, ps: replace(measure(trial, ps), kls=(1e-3,)))
    found = calibrate(tiny_llama(2), [token_ids(100)], max_kl=1e-4, drop_layers=[0], grid=(0.5,), **SHARP)
    assert found.options["p"] == [1.0] and found.kl > found.max_kl


def test_an_override_around_it() -> None:
    """It measures the options that it returns."""
    given: dict[str, Any] = {"max_kl": 0.5, "drop_layers": [0], "grid": (0.7,)} | SHARP
    want = calibrate(tiny_llama(2), [token_ids(300)], **given)
    with uniprefill_fx.override(block_size=128, last_n=40):
        assert calibrate(tiny_llama(2), [token_ids(300)], **given) == want


class Biased(torch.nn.Module):
    """A decoder whose logits get `bias`, (vocabulary,), added."""

    def __init__(self, model: Any, bias: Tensor) -> None:
        super().__init__()
        self.model, self.bias = model, torch.nn.Parameter(bias, requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids, use_cache=False).logits + self.bias


def biased(value: float) -> Biased:
    model = tiny_llama(2)
    bias = torch.zeros(model.config.vocab_size)
    bias[-3:] = value
    return Biased(model, bias)


@pytest.mark.parametrize("count", [1, 2])
def test_a_padded_vocabulary(count: int) -> None:
    """Rows of the head that are no tokens have logits of -inf: they add nothing, and the budget holds."""
    prompts = [token_ids(200, seed=seed) for seed in range(count)]
    given: dict[str, Any] = {"drop_layers": [0], "grid": (0.5,), **SHARP}
    assert calibrate(biased(-math.inf), prompts, max_kl=1e-12, **given).options["p"] == [1.0]
    loose, large = (calibrate(biased(value), prompts, max_kl=5.0, **given) for value in (-math.inf, -1e4))
    assert loose.kl == pytest.approx(large.kl, rel=1e-6) and loose.kl > 0 and loose.options["p"] == [0.5]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_kl_that_is_not_finite(value: float) -> None:
    """It is in no budget, and the message names the prompt."""
    prompts = [token_ids(200, seed=seed) for seed in range(2)]
    with pytest.raises(ValueError, match=r"prompt 0 \(200 tokens\): the KL divergence from dense is nan"):
        calibrate(biased(value), prompts, drop_layers=[0], grid=(0.5,), **SHARP)


@pytest.mark.slow
def test_the_model_is_left_alone() -> None:
    model, ids = tiny_llama(3), token_ids(300)
    uniprefill_fx.compile(model, drop_layers=[1], p=0.7, min_tokens=0, inner_backend="eager", **SHARP)
    calibrate(model, [ids], max_kl=0.1, drop_layers=[0], grid=(0.9,), **SHARP)
    with torch.inference_mode():
        model(ids, logits_to_keep=1)
    call = uniprefill_fx.last_call()
    assert call is not None and list(call.kept_indices) == [1] and call.dropped


@pytest.mark.parametrize(
    ("arguments", "error", "part"),
    [
        ({"prompts": []}, ValueError, "at least one prompt"),
        ({"max_kl": 0.0}, ValueError, "max_kl=0.0"),
        ({"grid": (1.5,)}, ValueError, r"values of p in \(0, 1\]"),
        ({"grid": ()}, ValueError, r"grid=\(\), .*values of p in"),
        ({"grid": (math.nan, 0.5)}, ValueError, r"values of p in \(0, 1\]"),
        ({"p": 0.5}, OptionError, r"option 'p': got 0.5; allowed: no value in calibrate\(\). It finds p"),
        ({"preset": "nonsense"}, OptionError, r"option 'preset': got 'nonsense'; allowed: no value in calibrate"),
        ({"selection": "top_k"}, OptionError, r"option 'selection': got 'top_k'; allowed: no value in calibrate"),
        ({"positions": 200}, ValueError, "last_n=128"),
        ({"block_sice": 3}, OptionError, "block_size"),
        ({"prompts": [token_ids(300), token_ids(16)]}, ValueError, "a prompt of 16 tokens"),
        ({"prompts": [token_ids(300).reshape(2, 150)]}, ValueError, r"a prompt is \(2, 150\): wanted"),
        ({"prompts": [[1, 2, 3]]}, ValueError, "a prompt is list: wanted"),
        ({"max_kl": math.nan}, ValueError, "max_kl=nan"),
        ({"drop_layers": [1]}, RuntimeError, "a drop after layer 1 saves nothing"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=part):
        calibrate(tiny_llama(2), **({"prompts": [token_ids(300)]} | arguments))


def test_nothing_to_drop() -> None:
    model = tiny_gemma3(layers=2, layer_types=["sliding_attention"] * 2)
    with pytest.raises(RuntimeError, match=r"nothing can be dropped in this model: \[no-full-attention\]"):
        calibrate(model, [token_ids(300)])


@pytest.mark.slow
def test_checkpoint(checkpoint: str) -> None:
    """Within the budget, and near it on prompts that were not calibrated on."""
    found = calibrate(fresh(checkpoint), [needle_ids(1024, seed=s) for s in range(3)], max_kl=0.02, **SHARP)
    assert found.kl <= 0.02 and found.compute_fraction < 0.95
    others = [kl_by_hand(stock(checkpoint), found.options, needle_ids(1024, seed=s), 16)[0] for s in range(10, 13)]
    assert math.fsum(others) / 3 < 0.05
