"""What an error says: one line that names what was got, what was wanted, and what to do. Every option has one here."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
from checkpoints import ROOT
from option_refusals import FRACTION, refuse
from tiny import tiny_llama, token_ids
from transformers import AutoTokenizer

import uniprefill_fx
from uniprefill_fx import OptionError, PrefillConfig

LAYERS = "or a non-empty list of different decoder layer indices, counted from 0"
BACKENDS = "the name of a registered torch.compile backend ('inductor', 'aot_eager', 'eager', …), or a callable"
TRUTH = ("True or False", "Pass a bool, not a number or a string.")

# By option: a value that is refused, what the message says is allowed, and its hint.
REFUSED: dict[str, tuple[Any, str, str]] = {
    "preset": ("balance", "'quality', 'balanced', 'fast'", "Did you mean 'balanced'?"),
    "p": (2, f"{FRACTION}, or 'auto'", "p=1.0 keeps every token."),
    "block_size": (0, "an integer of at least 1, or 'auto'", "The default is 64 tokens."),
    "last_n": (0, "an integer of at least 1", "The last queries score the blocks, so there must be at least one."),
    "sink_tokens": (-1, "an integer of at least 0", "0 forces no first tokens to stay."),
    "drop_layers": (3, f"'auto', 'all', 'none', {LAYERS}", "Pass a list, even for one layer."),
    "window": ("indices", "'position', 'index'", "Did you mean 'index'?"),
    "full_logits": (True, "'frozen', 'dense'", "Pass one of these strings."),
    "selection": ("topk", "'top_p', 'top_k'", "Did you mean 'top_k'?"),
    "keep_ratio": (0.5, "None with selection='top_p'", "Set selection='top_k' as well, or use p in its place."),
    "min_tokens": ("2k", "an integer of at least 0", "0 lets a prompt of any length drop."),
    "inner_backend": ("uniprefill", BACKENDS, "This backend cannot be its own inner backend."),
    "inner_options": ([1], "None or a dict with string keys", "It becomes the inner backend's options=."),
    "score_dtype": (torch.float64, "'float32', 'float64', 'float8_e4m3'", "Pass one of these strings."),
    "attention": ("sparse", "'dense', 'block_sparse'", "Did you mean 'block_sparse'?"),
    "sparse_alpha": (
        1,
        "a number in [0, 1), or a list with one for each block-sparse layer",
        "0 keeps every block; larger numbers keep fewer.",
    ),
    "sparse_block_size": (32, "64 or 128", "The kernels have these sizes."),
    "sparse_sink_blocks": (-1, "an integer of at least 0", "0 forces no first blocks of keys."),
    "sparse_window_blocks": (0, "an integer of at least 1", "The block of a query itself is always computed."),
    "sparse_last_tokens": (-1, "an integer of at least 0", "0: the last queries are no exception."),
    "sparse_correction": (1, *TRUTH),
    "sparse_layers": ("none", "'auto', 'all', or a list of layers", "attention='dense' computes every block."),
    "sparse_min_tokens": (-1, "an integer of at least 0", "0 lets a prompt of any length leave out blocks."),
    "attention_dtype": (
        "float8_e4m3",
        "'model' with attention='dense'",
        "Set attention='block_sparse' as well.",
    ),
    "strict": (0, *TRUTH),
}


def test_every_option_is_here() -> None:
    assert list(REFUSED) == [option.name for option in dataclasses.fields(PrefillConfig)]


@pytest.mark.parametrize("option", REFUSED)
def test_refused(option: str) -> None:
    value, allowed, hint = REFUSED[option]
    refuse({option: value}, option, value, f"{allowed}. {hint}")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("P", "p"),
        ("Block_Size", "block_size"),
        ("mode", "inner_options"),
        ("options", "inner_options"),
        ("backend", "inner_backend"),
        ("top_p", "p"),
        ("layers", "drop_layers"),
    ],
)
def test_names_that_mean_an_option(name: str, meant: str) -> None:
    with pytest.raises(OptionError) as raised:
        uniprefill_fx.compile(tiny_llama(2), **{name: "max-autotune"})  # type: ignore[arg-type]
    assert str(raised.value).endswith(f"There is no such option. Did you mean {meant!r}?")


def test_mode_of_torch_compile() -> None:
    fast = torch.compile(tiny_llama(2), backend="uniprefill", mode="max-autotune")
    with pytest.raises(Exception, match=r"got 'max-autotune'; allowed: no mode\. Pass options={'inner_options': {"):
        fast(token_ids(16))


def test_an_unknown_inner_backend_fails_at_once() -> None:
    """Not when the first prompt comes; with all names that work, those for debugging and TensorRT's among them."""
    with pytest.raises(OptionError) as raised:
        uniprefill_fx.compile(tiny_llama(2), inner_backend="inducter")
    assert str(raised.value).endswith(", or a callable. Did you mean 'inductor'?")
    named = str(raised.value).split("allowed: ")[1].split(", or a callable")[0].split(", ")
    always = {"inductor", "eager", "aot_eager", "torch_tensorrt", "tensorrt"}
    assert always | set(torch.compiler.list_backends()) - {"uniprefill"} == set(named)
    with pytest.raises(OptionError, match=r"Register the backend first\."):
        uniprefill_fx.explain(tiny_llama(2), token_ids(16), inner_backend="zzzz")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gpt2", "'gpt2' is a name: wanted a loaded model, AutoModelForCausalLM.from_pretrained('gpt2')"),
        (None, "got NoneType: wanted a model (torch.nn.Module) or a function"),
        ({"model": 1}, "got dict: wanted a model (torch.nn.Module) or a function"),
    ],
)
def test_what_is_no_model(model: Any, message: str) -> None:
    for function, arguments in (
        (uniprefill_fx.compile, ()),
        (uniprefill_fx.explain, (token_ids(16),)),
        (uniprefill_fx.error_bound, (token_ids(16),)),
        (uniprefill_fx.calibrate, ([token_ids(16)],)),
    ):
        with pytest.raises(TypeError) as raised:
            function(model, *arguments)
        assert str(raised.value) == message


PROMPTS: dict[str, tuple[Any, str]] = {
    "text": ("a prompt", "a prompt is text: wanted token ids, tokenizer(text, return_tensors='pt').input_ids"),
    "list": ([1, 2], "a prompt is a list: wanted a tensor of token ids, torch.tensor([ids])"),
    "1-D": (torch.arange(9), "a prompt is (9,): wanted (1, tokens), prompt[None]"),
    "encoding": (None, "a prompt is a BatchEncoding: wanted its 'input_ids', and call={...} for the rest"),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_what_is_no_prompt(kind: str) -> None:
    prompt, message = PROMPTS[kind]
    if kind == "encoding":
        prompt = AutoTokenizer.from_pretrained(ROOT / "examples" / "ruler-gemma3")("text", return_tensors="pt")
    for function in (uniprefill_fx.explain, uniprefill_fx.error_bound):
        with pytest.raises((TypeError, ValueError)) as raised:
            function(tiny_llama(2), prompt)
        assert str(raised.value) == message


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    report = uniprefill_fx.explain(tiny_llama(2), token_ids(64))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError) as raised:
        report.plot()
    assert str(raised.value) == "plot() needs matplotlib: pip install matplotlib"
