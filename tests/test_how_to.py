"""What docs/how-to.md promises, on a small model that reads characters: tokens of the eager reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import ROOT
from eager_reference import DropSpec, EagerReference
from exactness import assert_dropped
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import uniprefill_fx
from uniprefill_fx.tools.sample_prompt import sample_prompt

FOLDER = ROOT / "examples" / "ruler-gemma3"
SPEC = DropSpec((3, 6), p=(0.7, 0.7))
NEW = 4

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def loaded() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.mark.slow
def test_a_pipeline_and_a_chat_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %} [model] "
    model, plain = loaded(), loaded()
    uniprefill_fx.compile(model, p=0.7, min_tokens=0, inner_backend="eager")
    write = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    text = sample_prompt(700, len)
    for prompt, ids in (
        (text, tokenizer(text, return_tensors="pt").input_ids),
        (
            [{"role": "user", "content": text}],
            tokenizer(f"[user] {text} [model] ", return_tensors="pt").input_ids,
        ),
    ):
        (out,) = write(prompt, max_new_tokens=NEW, do_sample=False, return_full_text=False)
        done = uniprefill_fx.last_call()
        assert done is not None and done.tokens == ids.shape[1]
        assert_dropped(done)
        tokens, _ = EagerReference(plain, SPEC).generate(ids, NEW)
        assert out["generated_text"] == tokenizer.decode(tokens[0], skip_special_tokens=True)
