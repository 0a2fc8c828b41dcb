"""An independent reference for any transformers decoder: the stock model, which cannot see what was dropped.

The stock model runs eagerly over all tokens at once, without a cache. In layers after a drop, attention hides the
dropped keys, and recurrences and convolutions get the remaining rows alone, side by side. The remaining rows are then
exact; dropped rows compute something that nobody looks at. Which rows remain is computed here as well, from the
attention weights of the drop layer. Tokens after the prompt stand for generated ones: no drop removes them.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from arch_builders import Arch
from arch_walk import Walked
from eager_reference import DropSpec, Selection, fused_logits, select_rows
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

IMPLEMENTATION = "uniprefill_test_reference"
# Names of module classes.
MIXER = re.compile(r"(Mixer|MambaLayer|GatedDeltaNet|ShortConv|DeltaAttention|LightningAttention)$")
ENTRY = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)\.\d+")  # names of decoder layers
SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)
AFTER_ATTENTION = ("ZambaMambaMixer", "Zamba2MambaMixer")  # mixers that read the attention of their layer
IGNORED = {"dropout", "sliding_window", "is_causal", "position_ids", "use_cache", "output_router_logits"}


@dataclass
class Expected:
    """What a run of the reference gave.

    Attributes:
        logits: (tokens after the prompt + 1, vocabulary): from the prompt's last position on.
        selections: by drop layer, in order. kept: original positions of the prompt that remain after it.
        rows: by decoder layer, the prompt's rows that enter it.
    """

    logits: Tensor
    selections: dict[int, Selection]
    kept: dict[int, Tensor]
    rows: list[int]


@dataclass
class _Run:
    """One forward of the stock model, as it goes."""

    prompt: int
    total: int
    spec: DropSpec | None
    layer_of: dict[nn.Module, float]
    softcapped: bool
    selections: dict[int, Selection] = field(default_factory=dict)
    kept: dict[int, Tensor] = field(default_factory=dict)

    def in_prompt(self, layer: float) -> Tensor:
        """Positions of the prompt that enter a layer."""
        before = [at for at in self.kept if at < layer]
        return self.kept[max(before)] if before else torch.arange(self.prompt)

    def alive(self, layer: float) -> Tensor:
        """Positions that enter a layer, those of tokens after the prompt included."""
        return torch.cat([self.in_prompt(layer), torch.arange(self.prompt, self.total)])

    def hidden(self, layer: float) -> Tensor:
        """(total, total) bool: keys a query must not see, because they were dropped. Each sees itself."""
        gone = torch.ones(self.total, dtype=torch.bool)
        gone[self.alive(layer)] = False
        return gone[None, :] & ~torch.eye(self.total, dtype=torch.bool)

    def observe(self, layer: int, weights: Tensor) -> None:
        """Select at a drop layer: weights (1, heads, total, total) are its softmax."""
        if self.spec is None or layer not in self.spec.drop_layers or layer in self.kept:
            return  # of a layer that holds several attentions the first one chooses
        rows = self.in_prompt(layer)
        queries = rows[-self.spec.last_n :]
        token_scores = weights[0].double()[:, queries][:, :, rows].sum((0, 1))
        selection = select_rows(token_scores, self.spec, self.spec.amount(layer), self.prompt)
        self.selections[layer], self.kept[layer] = selection, rows[selection.rows]


_runs: list[_Run] = []  # the run in progress, for `_attend`, which transformers calls


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention spelled out, for transformers' AttentionInterface."""
    unknown = {name for name, given in kwargs.items() if given is not None} - IGNORED
    assert not unknown, f"attention arguments that this reference does not know: {sorted(unknown)}"
    run = _runs[-1]
    layer = run.layer_of[module]
    if s_aux is None and type(module).__module__.endswith("swa"):  # the implementation reads them off the module
        s_aux = module.get_parameter("sinks")
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None and run.softcapped:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill((attention_mask < -1.0) | run.hidden(layer), -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(1, -1, run.total, 1)], dim=-1)
    weights = scores.softmax(-1)[..., : run.total]
    run.observe(int(layer), weights)
    return (weights @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register(IMPLEMENTATION, _attend)
AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)


def _rows(value: Any, at: Tensor, length: int) -> Any:
    """The rows `at` of every tensor with `length` rows, in tuples as well."""
    if isinstance(value, tuple):
        return tuple(_rows(v, at, length) for v in value)
    return value[:, at] if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == length else value


@contextmanager
def _mixer(run: _Run, module: nn.Module, new_cache: Callable[[], Any]) -> Iterator[None]:
    """A mixer sees the rows that are alive, side by side: the prompt's at once, then the others one by one.

    One by one, as some models compute steps a little differently (NemotronH: 8e-4 in its logits).
    """
    original = module.forward
    names = inspect.signature(original).parameters
    cache_name = next(name for name in ("cache", "cache_params", "past_key_values") if name in names)

    def forward(*args: Any, **kwargs: Any) -> Any:
        alive, cache = run.alive(run.layer_of[module]), new_cache()
        steps = [run.in_prompt(run.layer_of[module]), *(torch.tensor([at]) for at in range(run.prompt, run.total))]
        parts = []
        for at in steps:
            given = {name: _rows(value, at, run.total) for name, value in kwargs.items()}
            given |= {"attention_mask": None, cache_name: cache}
            part = original(*_rows(args, at, run.total), **given)
            parts.append(part[0] if isinstance(part, tuple) else part)
            for layer in cache.layers:  # some ask the cache as a whole, which holds other layers' states too
                if hasattr(layer, "has_previous_state"):
                    layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
        output = torch.cat(parts, dim=1)
        output = output.new_zeros(1, run.total, output.shape[-1]).index_copy(1, alive, output)
        return (output, None) if isinstance(part, tuple) else output

    module.forward = forward
    try:
        yield
    finally:
        module.forward = original


class _Spelled(TorchFunctionMode):
    """Stands in for every softmax over all tokens, and for fused attention, in whatever way a model calls it.

    A softmax may have further columns, which are no keys (sinks).
    """

    def __init__(self, run: _Run, layers: list[int]) -> None:
        super().__init__()
        self.run, self.layers = run, layers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.layers and func is F.scaled_dot_product_attention:
            return self.fused(*args, **kwargs)
        if self.layers and func in SOFTMAXES and self.is_attention(args[0].shape):
            weights = func(args[0].masked_fill(self.hidden(args[0].shape), -torch.inf), *args[1:], **kwargs)
            return self.seen(weights)
        return func(*args, **kwargs)

    def is_attention(self, shape: torch.Size) -> bool:
        return len(shape) >= 3 and shape[-2] == self.run.total <= shape[-1] <= self.run.total + 1

    def hidden(self, shape: torch.Size) -> Tensor:
        return F.pad(self.run.hidden(self.layers[-1]), (0, shape[-1] - self.run.total))

    def seen(self, weights: Tensor) -> Tensor:
        every_head = weights.reshape(1, -1, *weights.shape[-2:])
        self.run.observe(self.layers[-1], every_head[..., : self.run.total])
        return weights

    def fused(self, *args: Any, **kwargs: Any) -> Tensor:
        scores, v = fused_logits(*args, **kwargs)
        if not self.is_attention(scores.shape):
            return scores.softmax(-1) @ v
        return self.seen(scores.masked_fill(self.hidden(scores.shape), -torch.inf).softmax(-1)) @ v


@contextmanager
def _current_layer(model: nn.Module) -> Iterator[list[int]]:
    """The decoder layer that is under way, last in a list. Layers of several lists, and those that run again, count on.

    Lists of one name hold layers of one kind; others hold parts of layers (XLM's `attentions` and `ffns`).
    """
    layers: list[int] = []
    entered: Counter[str] = Counter()

    def enter(kind: str, *_: Any) -> None:
        layers.append(entered[kind])
        entered[kind] += 1

    def leave(*_: Any) -> None:
        layers.pop()

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if (numbered := ENTRY.fullmatch(name)) is not None:
                stack.callback(module.register_forward_pre_hook(partial(enter, numbered.group(1))).remove)
                stack.callback(module.register_forward_hook(leave).remove)
        yield layers


class StockReference:
    """One architecture: the stock model, run with drops or without.

    `spelled` is the implementation of attention where it does not go through transformers' interface; None: its own.
    """

    def __init__(self, arch: Arch | Walked, spelled: str | None = "eager") -> None:
        self.spelled = not arch.interface
        self.model = arch.build(spelled if self.spelled else IMPLEMENTATION)
        own_cache = getattr(sys.modules[type(self.model).__module__], f"{arch.family}Cache", None)
        self.new_cache: Callable[[], Any] = own_cache or partial(DynamicCache, config=self.model.config)
        self.softcapped = arch.attention == "eager"
        self.layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        self.layer_of: dict[nn.Module, float] = {}
        for name, module in self.model.named_modules():
            numbered = re.match(r"(?:[A-Za-z_]\w*\.)+?(\d+)\.", name)
            if numbered is not None:
                behind = 0.5 if type(module).__name__.startswith(AFTER_ATTENTION) else 0
                self.layer_of[module] = int(numbered.group(1)) + behind

    @torch.inference_mode()
    def run(self, ids: Tensor, prompt: int, spec: DropSpec | None, **call: Any) -> Expected:
        """All tokens (1, total) in one forward; the first `prompt` are the prompt, drops are the spec's.

        `call` is passed on to the model, over `use_cache=False`.
        """
        run = _Run(prompt, ids.shape[1], spec, self.layer_of, self.softcapped)
        with self._hooked(run):
            logits = self.model(ids, **({"use_cache": False} | call)).logits
        wanted = () if spec is None else spec.drop_layers
        assert sorted(run.kept) == sorted(wanted), "a drop layer that has no attention to observe"
        rows = [len(run.in_prompt(layer)) for layer in range(self.layers)]
        return Expected(logits[0, prompt - 1 :], run.selections, run.kept, rows)

    @contextmanager
    def _hooked(self, run: _Run) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self.model.modules():
                if MIXER.search(type(module).__name__) and module in self.layer_of:
                    stack.enter_context(_mixer(run, module, self.new_cache))
            if self.spelled:
                stack.enter_context(_Spelled(run, stack.enter_context(_current_layer(self.model))))
            _runs.append(run)
            stack.callback(_runs.pop)
            yield
