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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from arch_builders import Arch
from eager_reference import DropSpec, Selection, select_rows
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

IMPLEMENTATION = "uniprefill_test_reference"
MIXER = re.compile(r"(Mixer|GatedDeltaNet|ShortConv|DeltaAttention|LightningAttention)$")  # names of module classes
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
    cache_name = next(name for name in ("cache_params", "past_key_values") if name in names)

    def forward(*args: Any, **kwargs: Any) -> Any:
        alive, cache = run.alive(run.layer_of[module]), new_cache()
        steps = [run.in_prompt(run.layer_of[module]), *(torch.tensor([at]) for at in range(run.prompt, run.total))]
        parts = []
        for at in steps:
            given = {name: _rows(value, at, run.total) for name, value in kwargs.items()}
            given |= {"attention_mask": None, cache_name: cache}
            part = original(*_rows(args, at, run.total), **given)
            parts.append(part[0] if isinstance(part, tuple) else part)
        output = torch.cat(parts, dim=1)
        output = output.new_zeros(1, run.total, output.shape[-1]).index_copy(1, alive, output)
        return (output, None) if isinstance(part, tuple) else output

    module.forward = forward
    try:
        yield
    finally:
        module.forward = original


def _spelled_hooks(run: _Run, module: nn.Module) -> list[Any]:
    """The same for an attention module that spells out its softmax and returns (output, weights)."""

    def hide(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs["attention_mask"]
        hidden = run.hidden(run.layer_of[module])
        return args, kwargs | {"attention_mask": mask.masked_fill(hidden, torch.finfo(mask.dtype).min)}

    def observe(module: nn.Module, _args: Any, output: Any) -> None:
        run.observe(int(run.layer_of[module]), output[1])

    return [module.register_forward_pre_hook(hide, with_kwargs=True), module.register_forward_hook(observe)]


class StockReference:
    """One architecture: the stock model, run with drops or without."""

    def __init__(self, arch: Arch) -> None:
        self.spelled = not arch.interface
        self.model = arch.build("eager" if self.spelled else IMPLEMENTATION)
        own_cache = getattr(sys.modules[type(self.model).__module__], f"{arch.family}Cache", None)
        self.new_cache: Callable[[], Any] = own_cache or partial(DynamicCache, config=self.model.config)
        self.softcapped = arch.attention == "eager"
        self.layers = self.model.config.num_hidden_layers
        self.layer_of: dict[nn.Module, float] = {}
        for name, module in self.model.named_modules():
            numbered = re.match(r"[a-z_.]+?\.(\d+)\.", name)
            if numbered is not None:
                behind = 0.5 if type(module).__name__ == "Zamba2MambaMixer" else 0  # it reads the layer's attention
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
            for name, module in self.model.named_modules():
                if MIXER.search(type(module).__name__) and module in self.layer_of:
                    stack.enter_context(_mixer(run, module, self.new_cache))
                elif self.spelled and name.endswith(("self_attention", "attn.attention")):
                    for handle in _spelled_hooks(run, module):
                        stack.callback(handle.remove)
            _runs.append(run)
            stack.callback(_runs.pop)
            yield
