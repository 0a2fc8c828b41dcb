"""Models that others have changed: adapters, quantised weights, hooks, several modalities."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from cases import LLAMA_SPEC
from eager_reference import DropSpec, EagerReference
from exactness import Case, Compiled, assert_differs, assert_dropped, assert_near, options_of
from tiny import SIZES, tiny_llama, token_ids
from torch import Tensor, nn

import uniprefill_fx

LINEARS = ("q_proj", "v_proj", "o_proj", "down_proj")


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Adapted(nn.Module):
    """A low-rank adapter beside a frozen projection, as peft's LoRA layers compute it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.scaling = base, 0.5
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * self.scaling


class Int8(nn.Module):
    """Weights as int8 with one scale for each row, as bitsandbytes and torchao store them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        scale = base.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale.detach())
        self.register_buffer("weight", (base.weight / scale).round().to(torch.int8).detach())

    def forward(self, x: Tensor) -> Tensor:
        weight, scale = self.get_buffer("weight"), self.get_buffer("scale")
        return nn.functional.linear(x, weight.to(x.dtype) * scale)


def with_linears(make: Callable[[nn.Linear], nn.Module]) -> Any:
    """A tiny Llama, its projections replaced."""
    model = tiny_llama(2)
    torch.manual_seed(1)
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in LINEARS:
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], make(module))
    return model.eval()


def into_buffer(attend: Callable[..., Any], hidden_states: Tensor, **given: Any) -> Any:
    """Attention that writes into a buffer of all tokens, which was made before it ran."""
    output = torch.empty_like(hidden_states)
    output[:, : hidden_states.shape[1]], weights = attend(hidden_states=hidden_states, **given)
    return output, weights


def with_buffers() -> Any:
    model = tiny_llama(2)
    for layer in model.model.layers:
        layer.self_attn.forward = functools.partial(into_buffer, layer.self_attn.forward)
    return model


def with_torchao() -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_llama(2)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


CHANGED: dict[str, Callable[[], Any]] = {
    "adapters": lambda: with_linears(Adapted),
    "int8": lambda: with_linears(Int8),
    "torchao": with_torchao,
    "buffers": with_buffers,
}


@pytest.mark.parametrize("changed", CHANGED)
def test_changed_projections(changed: str) -> None:
    """They trace like any other module, and are exact in `generate()`."""
    build, ids = CHANGED[changed], token_ids(300)
    model = Compiled(Case("llama", LLAMA_SPEC), build(), build())
    tokens, logits = model.reference.generate(ids, 4)
    got = model.generate(ids, 4)
    done = uniprefill_fx.last_call()
    assert done is not None
    assert_dropped(done)
    assert torch.equal(got.sequences[:, 300:], tokens)
    for ours, theirs in zip(got.logits, logits, strict=True):
        assert_near(ours, theirs)
    assert_differs(got.logits[0], model.dense(ids, logits_to_keep=1).logits[:, -1])


def test_peft() -> None:
    """`generate()` of peft's wrapper calls the model inside: `uniprefill_fx.compile` compiles both."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=list(LINEARS), init_lora_weights=False)
    model, ids = peft.get_peft_model(tiny_llama(2), config).eval(), token_ids(300)
    merged = copy.deepcopy(model).merge_and_unload()
    tokens, logits = EagerReference(merged, LLAMA_SPEC).generate(ids, 4)
    uniprefill_fx.compile(model, **options_of(LLAMA_SPEC))
    with torch.inference_mode():
        out = model(input_ids=ids, logits_to_keep=1)
    called = uniprefill_fx.last_call()
    got = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    generated = uniprefill_fx.last_call()
    assert called is not None and generated is not None and generated is not called
    assert_dropped(called)
    assert_dropped(generated)
    assert_near(out.logits[:, -1], logits[0])
    assert torch.equal(got[:, 300:], tokens)


class Wrapper(nn.Module):
    """What peft's wrapper does with calls and with `generate()`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inside = model
        self.config = model.config

    def get_base_model(self) -> Any:
        return self.inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inside.forward(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.inside.generate(*args, **kwargs)


def test_a_wrapper_that_generates_with_the_model_inside() -> None:
    model, ids = uniprefill_fx.compile(Wrapper(tiny_llama(2)), **options_of(LLAMA_SPEC)), token_ids(300)
    tokens, logits = EagerReference(tiny_llama(2), LLAMA_SPEC).generate(ids, 4)
    with torch.inference_mode():
        out = model(ids, logits_to_keep=1)
    called = uniprefill_fx.last_call()
    got = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    generated = uniprefill_fx.last_call()
    assert called is not None and generated is not None and generated is not called
    assert_dropped(called)
    assert_dropped(generated)
    assert_near(out.logits[:, -1], logits[0])
    assert torch.equal(got[:, 300:], tokens)


@pytest.mark.parametrize("where", ["every module", pytest.param("the model", marks=pytest.mark.slow)])
def test_device_map_hooks_stay_dense(where: str) -> None:
    """accelerate keeps its hooks out of graphs, which breaks them: no piece may drop, and the reason says so."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, ids = tiny_llama(2), token_ids(300)
    for module in [model] if where == "the model" else list(model.modules()):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    fast = Compiled(Case("llama", LLAMA_SPEC), model, tiny_llama(2))
    out, done = fast.prefill(ids, logits_to_keep=1)
    assert not done.dropped and done.reason is not None and done.reason.category.value == "graph-break"
    assert_near(out.logits, fast.dense(ids, logits_to_keep=1).logits)


@pytest.fixture(scope="module")
def gemma3() -> Any:
    """Gemma-3 for images and text, with a vision tower of one layer."""
    text = {"num_hidden_layers": 2, "sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"]}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=SIZES | text | {"query_pre_attn_scalar": 16},
        vision_config=vision | {"image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
    )
    torch.manual_seed(0)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


IMAGE = 255
SHARP = DropSpec((0,), p=0.7, block_size=8, last_n=16, sink_tokens=8)


def plain_ids() -> Tensor:
    ids = token_ids(300)
    return ids.masked_fill(ids == IMAGE, 3)


def with_image(ids: Tensor) -> dict[str, Tensor]:
    """Four image tokens at 100, and what the processor makes of the picture."""
    ids, types = ids.clone(), torch.zeros_like(ids)
    ids[:, 100:104], types[:, 100:104] = IMAGE, 1
    return {
        "input_ids": ids,
        "token_type_ids": types,
        "pixel_values": torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
    }


def test_text_for_a_multimodal_model_drops_and_an_image_stays_dense(gemma3: Any) -> None:
    """Image tokens see one another in both directions: their mask is no causal one."""
    model = copy.deepcopy(gemma3)
    model.compile(backend="uniprefill", options=options_of(SHARP))
    text = transformers.Gemma3ForCausalLM(gemma3.config.text_config).eval()
    text.model, text.lm_head = gemma3.model.language_model, gemma3.lm_head
    ids = plain_ids()
    want = EagerReference(text, SHARP).prefill(ids)
    for call in ({"past_key_values": transformers.DynamicCache(config=text.config)}, {"use_cache": False}):
        with torch.inference_mode():
            out = model(input_ids=ids, logits_to_keep=1, **call)
        done = uniprefill_fx.last_call()
        assert done is not None
        assert_dropped(done)
        assert torch.equal(done.kept_indices[0], want.kept[0])
        assert_near(out.logits, want.last_logits)
    with torch.inference_mode():
        ours, theirs = (m(**with_image(ids), logits_to_keep=1) for m in (model, gemma3))
    done = uniprefill_fx.last_call()
    assert done is not None and not done.dropped and done.reason is not None
    assert done.reason.category.value in ("non-causal-attention", "mask-not-understood")
    assert_near(ours.logits, theirs.logits)


def test_a_step_with_a_mask_that_nobody_reads_answers_from_a_compact_cache(gemma3: Any) -> None:
    """Blocks of image tokens are data where a step brings them: its mask is no causal one, though no block is in it."""
    model, ids = copy.deepcopy(gemma3), plain_ids()
    model.compile(backend="uniprefill", options=options_of(SHARP))
    text = transformers.Gemma3ForCausalLM(gemma3.config.text_config).eval()
    text.model, text.lm_head = gemma3.model.language_model, gemma3.lm_head
    reference = EagerReference(text, SHARP)
    reference.prefill(ids)
    cache = transformers.DynamicCache(config=text.config)
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        done = uniprefill_fx.last_call()
        assert done is not None
        assert_dropped(done)
        for token in (5, 9):
            new = torch.tensor([[token]])
            out = model(input_ids=new, past_key_values=cache, token_type_ids=torch.zeros_like(new))
            assert_near(out.logits, reference.step(new))


@pytest.mark.slow
def test_a_multimodal_model_generates(gemma3: Any) -> None:
    model, ids = copy.deepcopy(gemma3), plain_ids()
    model.compile(backend="uniprefill", options=options_of(SHARP))
    text = transformers.Gemma3ForCausalLM(gemma3.config.text_config).eval()
    text.model, text.lm_head = gemma3.model.language_model, gemma3.lm_head
    greedy = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    got = model.generate(input_ids=ids, **greedy)
    done = uniprefill_fx.last_call()
    assert done is not None
    assert_dropped(done)
    assert torch.equal(got[:, 300:], EagerReference(text, SHARP).generate(ids, 4)[0])
    got, want = (m.generate(**with_image(ids), **greedy) for m in (model, gemma3))
    done = uniprefill_fx.last_call()
    assert done is not None and not done.dropped and torch.equal(got, want)
