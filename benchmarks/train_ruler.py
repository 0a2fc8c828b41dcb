"""Trains a small decoder on RULER's needle tasks, so that the real harness has something to measure without a download.

    python benchmarks/train_ruler.py --budget 480 --out FOLDER        on a GPU
    python benchmarks/train_ruler.py --budget 300 --resume FOLDER --out FOLDER2
    python benchmarks/train_ruler.py --small --budget 60 --out FOLDER on a CPU: runs the code, learns little

A Gemma-3 of nine layers reads characters; the texts are `ruler_prompts.py`'s. Prompts get longer when enough answers of
fresh exams are right, so the progress lines show where it stands. FOLDER holds the model in bf16, the tokenizer and
`training.json`; `examples/ruler.py --model FOLDER` runs the harness on it. To resume is to warm up again: the state of
the optimizer is not kept.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ruler_prompts import ANSWER, CHARACTERS, END, FREE, KNOWN, PAD, SPECIAL, TASKS, Batches, batch, character_tokenizer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

CLASS_WEIGHTS = {FREE: 0.1, KNOWN: 1.0, ANSWER: 1.0}
TASK_WEIGHTS = (0.2, 0.5, 0.3)
WARM_UP = 100
COOL_DOWN = 0.3
"""Share of the budget in which the learning rate falls."""


@dataclass(frozen=True)
class Stage:
    """`length` characters, a multiple of the window; on to the next one when `enough` numbers are right in each task
    that asks for them, or when the share `until` of the budget is spent: the last length must have its time."""

    length: int
    rows: int
    enough: float
    until: float = 1.0
    repeats: tuple[float, ...] = (0.0, 0.0, 0.3)


STAGES = (
    Stage(
        1024, 64, 0.85, 0.45, repeats=(0.2, 0.5, 0.8)
    ),  # to find what was said before is learned from needles said twice
    Stage(3072, 48, 0.9, 0.65),
    Stage(8320, 24, 2.0),
)
SMALL_STAGES = (Stage(512, 16, 0.9, 0.7, repeats=(0.2, 0.5, 0.8)), Stage(1024, 8, 2.0))


def configuration(small: bool) -> Gemma3TextConfig:
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    return Gemma3TextConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=128 if small else 256,
        intermediate_size=256 if small else 640,
        layer_types=[kinds[letter] for letter in ("ssfsf" if small else "sssfssfsf")],
        num_hidden_layers=5 if small else 9,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32 if small else 64,
        query_pre_attn_scalar=32 if small else 64,
        sliding_window=128,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=None,
        use_cache=True,
    )


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **other: Any
) -> tuple[Tensor, None]:
    """Causal attention (b, heads, n, d) by transformers' interface; a window is read in chunks of its size."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    window, n = other.get("sliding_window"), query.shape[2]
    size = n if window is None else min(window, n)
    first = [t[:, :, :size] for t in (query, key, value)]
    out = F.scaled_dot_product_attention(*first, is_causal=True, scale=scaling)
    if size < n:
        rest = [_chunks(query[:, :, size:], size), *(_with_previous(t, size) for t in (key, value))]
        i, j = torch.arange(size, device=query.device)[:, None], torch.arange(2 * size, device=query.device)
        seen = (j > i) & (j <= i + size)  # key j - size, as counted from the chunk's beginning
        near = F.scaled_dot_product_attention(*rest, attn_mask=seen[None, None], scale=scaling)
        near = near.unflatten(0, (query.shape[0], -1)).transpose(1, 2).flatten(2, 3)
        out = torch.cat([out, near], dim=2)
    return out.transpose(1, 2), None


def _chunks(x: Tensor, size: int) -> Tensor:
    """(b, heads, c · size, d) to (b · c, heads, size, d)."""
    return x.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)


def _with_previous(x: Tensor, size: int) -> Tensor:
    """All chunks but the first, each behind the one before it: (b · (c - 1), heads, 2 · size, d)."""
    return torch.cat([_chunks(x[:, :, :-size], size), _chunks(x[:, :, size:], size)], dim=2)


ALL_ATTENTION_FUNCTIONS.register("windows_in_chunks", attend)


def logits(model: Any, ids: Tensor) -> Tensor:
    """(b, n, vocabulary); what the next characters are. Without masks, which `attend` does not need."""
    masks = {"full_attention": None, "sliding_attention": None}
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        return model(input_ids=ids, attention_mask=masks, use_cache=False).logits  # type: ignore[no-any-return]


def loss_of(model: Any, ids: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted loss, and its mean over answers alone."""
    each = F.cross_entropy(logits(model, ids).flatten(0, 1).float()[:-1], ids.flatten()[1:], reduction="none")
    target = classes.flatten()[1:].clone()
    target[classes.shape[1] - 1 :: classes.shape[1]] = 0  # the first character of a row follows nothing
    means = {kind: (each * (target == kind)).sum() / (target == kind).sum().clamp(min=1) for kind in CLASS_WEIGHTS}
    return sum((CLASS_WEIGHTS[kind] * mean for kind, mean in means.items()), torch.zeros(())), means[ANSWER].detach()


def exam(model: Any, stage: Stage, prompts: int, seed: int, device: str) -> dict[str, float]:
    """Share of fresh prompts of each task whose answer is right in every character, END included.

    Gradients stay on, so that what was compiled for training serves here.
    """
    scores = {}
    for task in TASKS:
        rng = random.Random(f"exam {seed}")
        right: list[Tensor] = []
        while len(right) * stage.rows < prompts:
            ids, classes = (t.to(device).long() for t in batch(rng, [task] * stage.rows, stage.length, exam=True))
            wrong = (logits(model, ids).detach()[:, :-1].argmax(-1) != ids[:, 1:]) & (classes[:, 1:] == ANSWER)
            right.append(~wrong.any(dim=1))
        scores[task.name] = torch.cat(right).float().mean().item()
    return scores


def save(model: Any, folder: Path, record: dict[str, Any]) -> None:
    """A copy in bf16, the tokenizer, and what the training did."""
    plain = Gemma3ForCausalLM(copy.deepcopy(model.config))  # the one in training keeps its own attention
    plain.load_state_dict(model.state_dict())
    plain.config._attn_implementation = "sdpa"
    plain.to(torch.bfloat16).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def load(folder: Path | None, small: bool, device: str) -> tuple[Any, dict[str, Any]]:
    """The model in float32, new or of a folder, and its record."""
    if folder is None:
        model, record = Gemma3ForCausalLM(configuration(small)), {"stage": 0, "steps": 0, "seconds": 0.0, "history": []}
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        record = json.loads((folder / "training.json").read_text())
    model.config._attn_implementation = "windows_in_chunks"
    return model.to(device).train(), record


def optimizers_of(model: Any, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of layers, which finds the way to look things up in a third of AdamW's steps."""
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    torch.manual_seed(args.seed)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("high")
    model, record = load(args.resume, args.small, args.device)
    stages = SMALL_STAGES if args.small else STAGES
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.1f}M parameters, {args.device}, stage {record['stage']}", flush=True)
    if args.compile:
        torch._dynamo.config.recompile_limit = 64  # two kinds of layers, at each length
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    optimizers = optimizers_of(model, args.rate)
    begun = told = saved = time.monotonic()
    stage, batches, answers = stages[record["stage"]], None, torch.zeros((), device=args.device)
    steps = since = 0
    while (spent := time.monotonic() - begun) < args.budget:
        if batches is None:
            data = Batches(stage.rows, stage.length, TASK_WEIGHTS, stage.repeats, args.seed + 1000 * record["steps"])
            cuda = args.device == "cuda"
            batches = iter(DataLoader(data, batch_size=None, num_workers=args.workers, pin_memory=cuda))
        left = 1 - spent / args.budget
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = args.rate * min(1.0, (steps + 1) / WARM_UP, 0.02 + left / COOL_DOWN)
        ids, classes = (t.to(args.device, non_blocking=True).long() for t in next(batches))
        loss, answer = loss_of(model, ids, classes)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        steps, since, answers = steps + 1, since + 1, answers + answer
        record["steps"] += 1
        if time.monotonic() - told < args.every:
            continue
        mean, pace = answers.item() / since, since * ids.numel() / (time.monotonic() - told)  # .item() waits for it
        scores = exam(model, stage, args.exams, record["steps"], args.device)
        line = {"seconds": round(record["seconds"] + spent), "step": record["steps"], "length": stage.length}
        record["history"].append(line | {"answer_loss": round(mean, 4), "right": scores})
        right = " ".join(f"{name} {score:.2f}" for name, score in scores.items())
        print(f"{spent:5.0f} s  step {record['steps']:>6}  length {stage.length:>5}  answer loss {mean:.4f}  {right}  "
              f"{pace / 1e3:.0f}K tokens/s", flush=True)  # fmt: skip
        told, since, answers = time.monotonic(), 0, torch.zeros((), device=args.device)
        learned = min(scores[task.name] for task in TASKS if task.kind == "number") >= stage.enough
        if stage is not stages[-1] and (learned or spent > stage.until * args.budget):
            record["stage"] += 1
            stage, batches = stages[record["stage"]], None
        if told - saved > 60:
            save(model, args.out, record)
            saved = told
    record["seconds"] += round(time.monotonic() - begun)
    scores = exam(model, stage, 4 * args.exams, -1, args.device)
    record["final"] = {"length": stage.length, "prompts": 4 * args.exams, "right": scores}
    save(model, args.out, record)
    print(f"{'task':<18} {'length':>7} {'right':>6}  (teacher-forced, {4 * args.exams} prompts or more)")
    for name, score in scores.items():
        print(f"{name:<18} {stage.length:>7} {score:>6.3f}")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--budget", type=float, default=480, help="seconds of training")
    parser.add_argument("--resume", type=Path, help="folder of an earlier run")
    parser.add_argument("--small", action="store_true", help="a smaller model and shorter texts")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--every", type=float, default=10, help="seconds between progress lines")
    parser.add_argument("--exams", type=int, default=64, help="prompts of each task in an exam")
    parser.add_argument("--workers", type=int, default=8 if cuda else 0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=cuda)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
