"""Block-sparse attention as a pass: whole prefills against float64 attention from the description of the method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from block_sparse_reference import reference
from plain_decoders import DECODERS
from tiny import SIZES, tiny_gemma3, tiny_llama, token_ids
from torch import Tensor, fx, nn
from transformers import AttentionInterface

import uniprefill_fx
from uniprefill_fx import LastCall, OptionError
from uniprefill_fx.errors import Category, StrictError
from uniprefill_fx.runtime.last_call import DroppedCall, Drops

TOKENS = 700
HOW: dict[str, Any] = {"alpha": 0.97, "block_size": 64, "sink_blocks": 1, "window_blocks": 1, "last_tokens": 64}
OPTIONS: dict[str, Any] = {f"sparse_{name}": value for name, value in HOW.items()}
OPTIONS |= {"attention": "block_sparse", "sparse_min_tokens": 0, "min_tokens": 0, "inner_backend": "eager"}
ALONE = OPTIONS | {"drop_layers": "none"}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(model: Any, *args: Any, **options: Any) -> tuple[Tensor, LastCall]:
    """Logits of the last position by the compiled model, and the record."""
    compiled = torch.compile(model.forward, backend="uniprefill", options=options)
    with torch.inference_mode():
        kwargs = args[1] if len(args) > 1 else {}
        out = compiled(args[0], logits_to_keep=1, **kwargs)
    call = uniprefill_fx.last_call()
    assert call is not None
    return out.logits, call


class Exact:
    """Attention for transformers' interface: block-sparse in float64, of a window where the layer has one."""

    def __init__(self, bounds: Tensor | None = None, **how: Any) -> None:
        self.bounds, self.how, self.blocks = bounds, HOW | how, [0, 0]

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **given: Any
    ) -> tuple[Tensor, None]:
        window = getattr(module, "sliding_window", None)
        if window is not None:
            place = torch.arange(q.shape[2])
            seen = (place <= place[:, None]) & (place > place[:, None] - window)
            out = F.scaled_dot_product_attention(q, k, v, seen, scale=given["scaling"], enable_gqa=True)
        else:
            found = reference(q, k, v, self.bounds, given["scaling"], **self.how)
            out = found.out.to(q.dtype)
            self.blocks[0] += sum(map(len, found.kept.values()))
            self.blocks[1] += sum(found.causal.values())
        return out.transpose(1, 2), None


def exact(model: Any, ids: Tensor, bounds: Tensor | None = None, **how: Any) -> tuple[Tensor, float]:
    """Logits of the last position from `Exact`, and the density over all layers."""
    attention = Exact(bounds, **how)
    AttentionInterface.register("block_sparse_reference", attention)
    before = model.config._attn_implementation
    model.config._attn_implementation = "block_sparse_reference"
    try:
        with torch.inference_mode():
            return model(ids, logits_to_keep=1, use_cache=False).logits, attention.blocks[0] / attention.blocks[1]
    finally:
        model.config._attn_implementation = before


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=2e-4, rtol=0)


@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3])
def test_a_prompt_without_drops(make: Callable[[], Any], correction: bool) -> None:
    model, ids = make(), token_ids(TOKENS)
    with torch.inference_mode():
        dense = model(ids, logits_to_keep=1).logits
    got, call = run(model, ids, **ALONE, sparse_correction=correction)
    want, density = exact(make(), ids, correction=correction)
    near(got, want)
    assert (got - dense).abs().max() > 1e-2, "blocks that matter a little were left out"
    layers = [1, 3] if make is tiny_gemma3 else [0, 1, 2]
    assert not call.dropped and list(call.density) == layers and call.tokens == TOKENS
    assert sum(call.density.values()) / len(layers) == pytest.approx(density) and density < 0.9


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_its_prompts_one_by_one(side: str) -> None:
    model, lengths = tiny_llama(2), (TOKENS, 450)
    prompts = [token_ids(n, seed=n) for n in lengths]
    pads = [(TOKENS - n, 0) if side == "left" else (0, TOKENS - n) for n in lengths]
    ids = torch.cat([F.pad(p, pad) for p, pad in zip(prompts, pads, strict=True)])
    mask = torch.cat([F.pad(torch.ones_like(p), pad) for p, pad in zip(prompts, pads, strict=True)])
    compiled = torch.compile(model.forward, backend="uniprefill", options=ALONE)
    with torch.inference_mode():
        got = compiled(ids, attention_mask=mask).logits
    call = uniprefill_fx.last_call()
    assert call is not None and call.density and call.reason is None
    for row, prompt in enumerate(prompts):
        last = -1 if side == "left" else lengths[row] - 1
        near(got[row, last], exact(tiny_llama(2), prompt)[0][0, 0])


class Decoder(nn.Module):
    """Four layers over (1, tokens, 32), 4 heads on 2, positions in the channels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(32, 64), "out": nn.Linear(32, 32), "up": nn.Linear(32, 32)})
            for _ in range(4)
        )
        self.head = nn.Linear(32, 50)

    def qkv(self, layer: Any, x: Tensor) -> Sequence[Tensor]:
        q, k, v = (layer["qkv"](F.layer_norm(x, (32,))) * 2.5).split([32, 16, 16], -1)
        return [y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (q, k, v)]

    def finish(self, layer: Any, x: Tensor, attended: Tensor) -> Tensor:
        x = x + layer["out"](attended.transpose(1, 2).flatten(2))
        return x + layer["up"](F.gelu(F.layer_norm(x, (32,))))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = self.qkv(layer, x)
            x = self.finish(layer, x, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        return self.head(F.layer_norm(x, (32,)))[:, -1:]

    def exact(self, x: Tensor, kept: dict[int, Tensor]) -> Tensor:
        """In float64 on the rows that are kept behind each layer."""
        positions = torch.arange(x.shape[1])
        for i, layer in enumerate(self.layers):
            q, k, v = self.qkv(layer, x)
            attended = reference(q, k, v, **HOW).out.to(x.dtype)
            if i in kept:
                rows = torch.isin(positions, kept[i])
                x, attended, positions = x[:, rows], attended[:, :, rows], positions[rows]
            x = self.finish(layer, x, attended)
        return self.head(F.layer_norm(x, (32,)))[:, -1:]


def test_both_cuts_together() -> None:
    """Blocks behind a drop are 64 kept rows."""
    model, x = Decoder().eval(), torch.randn(1, TOKENS, 32, generator=torch.Generator().manual_seed(1))
    drops = {"drop_layers": [1], "p": 0.6, "block_size": 16, "last_n": 24, "sink_tokens": 16}
    compiled = torch.compile(model, backend="uniprefill", options=OPTIONS | drops | {"strict": True})
    with torch.inference_mode():
        got = compiled(x)
        call = uniprefill_fx.last_call()
        assert call is not None and call.dropped and call.num_tokens[3] < TOKENS
        near(got, model.exact(x, dict(call.kept_indices)))
    assert list(call.density) == [0, 1, 2, 3] and all(0 < share < 1 for share in call.density.values())
    assert "blocks of keys computed, by layer" in str(call)


def test_other_options_need_no_compilation() -> None:
    compiled_graphs: list[fx.GraphModule] = []

    def inner(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled_graphs.append(gm)
        return gm.forward

    model, ids = tiny_llama(2), token_ids(TOKENS)
    with torch.inference_mode():
        dense = model(ids, logits_to_keep=1).logits
        compiled = torch.compile(model.forward, backend="uniprefill", options=ALONE | {"inner_backend": inner})
        first = compiled(ids, logits_to_keep=1).logits
        before = len(compiled_graphs)
        with uniprefill_fx.override(sparse_alpha=0.0):
            near(compiled(ids, logits_to_keep=1).logits, dense)
        with uniprefill_fx.override(sparse_alpha=[0.97, 0.05], sparse_correction=False):
            other = compiled(ids, logits_to_keep=1).logits
            shares = list(uniprefill_fx.last_call().density.values())  # type: ignore[union-attr]
        with uniprefill_fx.override(sparse_min_tokens=TOKENS + 1):
            near(compiled(ids, logits_to_keep=1).logits, dense)
            assert set(uniprefill_fx.last_call().density.values()) == {1.0}  # type: ignore[union-attr]
        with uniprefill_fx.override(sparse_alpha=[0.1] * 3), pytest.raises(OptionError, match="list of 2"):
            compiled(ids, logits_to_keep=1)
        torch.testing.assert_close(compiled(ids, logits_to_keep=1).logits, first)
    assert len(compiled_graphs) == before and shares[0] < shares[1] and (other - first).abs().max() > 1e-3


def test_an_alpha_for_each_layer_where_layers_hold_two_attentions() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES | {"num_hidden_layers": 2}
    model = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**sizes)).eval()
    report = uniprefill_fx.explain(model, token_ids(300), **(ALONE | {"sparse_alpha": [0.97, 0.0]}))
    assert [(a.layer, spec.alpha) for a, spec in report.plan.sparse] == [(0, 0.97), (0, 0.97), (1, 0.0), (1, 0.0)]
    call = uniprefill_fx.last_call()
    assert call is not None and call.density[0] < call.density[1] == 1.0


def test_the_density_of_a_layer_counts_all_of_its_attentions() -> None:
    bounds = torch.tensor([[0, 9]])
    drops = Drops((), 1, bounds, (), ((0, torch.tensor([1, 4])), (0, torch.tensor([4, 4])), (1, torch.zeros(2).long())))
    assert DroppedCall(drops, None, {}, 9).density == {0: 5 / 8, 1: 1.0}


def test_generation_goes_on_from_a_block_sparse_prompt() -> None:
    model, ids = tiny_llama(2), token_ids(TOKENS)
    uniprefill_fx.compile(model, **ALONE)
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True)
    near(out.logits[0], exact(tiny_llama(2), ids)[0][:, -1])
    assert [layer.keys.shape[2] for layer in out.past_key_values.layers] == [TOKENS + 3] * 2


def test_attention_that_cannot_stays_dense_with_a_reason() -> None:
    """Alibi is a bias by position: a block's mean says nothing of it."""
    name = next(name for name in DECODERS if "alibi" in name)
    model = DECODERS[name]
    found = {}
    for layers in ("auto", "all"):
        torch._dynamo.reset()
        made: Any = model() if callable(model) else model
        report = uniprefill_fx.explain(made, token_ids(300) % 64, **(ALONE | {"sparse_layers": layers}))
        found[layers] = [r.category for r in report.refusals]
        assert not report.plan.sparse
    assert Category.SPARSE in found["all"] and Category.SPARSE not in found["auto"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "alpha": ({"sparse_alpha": 1.0}, r"sparse_alpha.*1\.0.*\[0, 1\)"),
    "alphas": ({"sparse_alpha": [0.1, -0.1]}, r"sparse_alpha.*\[0, 1\)"),
    "block size": ({"sparse_block_size": 32}, r"sparse_block_size.*32.*64 or 128"),
    "window": ({"sparse_window_blocks": 0}, "sparse_window_blocks.*at least 1"),
    "layers": ({"sparse_layers": "none"}, "sparse_layers.*'auto', 'all'"),
    "name": ({"attention": "sparse"}, "attention.*'dense', 'block_sparse'"),
    "type": ({"attention_dtype": "float16"}, "attention_dtype.*'model', 'float8_e4m3'"),
    "nothing at all": ({"attention": "dense", "drop_layers": "none"}, "drop_layers.*block_sparse"),
    "type of dense": ({"attention": "dense", "attention_dtype": "float8_e4m3"}, "attention_dtype.*block_sparse"),
}


@pytest.mark.parametrize("options, message", BAD.values(), ids=BAD.keys())
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        uniprefill_fx.PrefillConfig.from_options(ALONE | {"drop_layers": "auto"} | options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sparse_layers": [7]}, "sparse_layers.*here .0, 1.*Layer 7"),
        ({"sparse_alpha": [0.1] * 5}, "sparse_alpha.*list of 2"),
        ({"attention_dtype": "float8_e4m3"}, "attention_dtype.*8.9"),
    ],
)
def test_options_that_do_not_fit_the_model(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        uniprefill_fx.explain(tiny_llama(2), token_ids(300), **(ALONE | options))


class SeesAll(Decoder):
    """Every query sees every key."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = self.qkv(layer, x)
            x = self.finish(layer, x, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
        return self.head(x)[:, -1:]


def test_attention_that_is_not_causal() -> None:
    """Dense with that reason; an error where the layer was named, and with `strict`."""
    report = uniprefill_fx.explain(SeesAll(), torch.randn(1, 300, 32), **ALONE)
    assert [r.category for r in report.refusals] == [Category.NON_CAUSAL] and not report.plan.sparse
    assert "only causal attention can drop tokens or leave out blocks of keys" in str(report)
    torch._dynamo.reset()
    with pytest.raises(
        OptionError, match=r"sparse_layers.*\[1, 2\].*full causal attention.*Layer 1 has attention with"
    ):
        uniprefill_fx.explain(SeesAll(), torch.randn(1, 300, 32), **(ALONE | {"sparse_layers": [2, 1]}))
    torch._dynamo.reset()
    with pytest.raises(StrictError, match="non-causal-attention"):
        uniprefill_fx.explain(SeesAll(), torch.randn(1, 300, 32), **(ALONE | {"strict": True}))


def test_the_report_says_how_much_was_computed() -> None:
    text = str(uniprefill_fx.explain(tiny_gemma3(layers=2), token_ids(TOKENS), **ALONE))
    assert "700 tokens, none dropped; attention computed" in text
    assert "as fast dense" not in text
    rows = [line for line in text.splitlines() if "% of blocks" in line]
    assert len(rows) == 1 and rows[0].strip().startswith("1  full, ")


def test_the_report_names_layers_that_would_be_as_fast_dense() -> None:
    """Layer 1 keeps nearly everything, layer 0 little; attention that did not choose is not named."""
    how = ALONE | {"sparse_alpha": [0.97, 1e-6]}
    text = str(uniprefill_fx.explain(tiny_llama(2), token_ids(TOKENS), **how))
    assert "layers [1] computed more than 80% of their blocks, and are as fast dense" in text
    torch._dynamo.reset()
    text = str(uniprefill_fx.explain(tiny_llama(2), token_ids(TOKENS), **(how | {"sparse_min_tokens": 10_000})))
    assert "as fast dense" not in text
