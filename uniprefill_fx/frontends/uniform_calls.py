"""Calls of a compiled model in one form: Dynamo guards how a call is written, and each way would be a graph more.

    model(ids, attention_mask=mask)                       forward(input_ids=ids, attention_mask=mask, position_ids=None,
    model(attention_mask=mask, input_ids=ids)       ->            past_key_values=None, use_cache=None,
    model(ids, attention_mask=mask, return_dict=True)             logits_to_keep=0)

Prompts and steps are compiled apart as well, where torch counts graphs by `torch.compile` call (2.13): each has its own
limit, so that however many kinds of prompts there are, a step finds room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import getclosurevars, signature
from typing import Any

import torch
from torch import Tensor, nn

from uniprefill_fx.frontends.cache import holds_keys
from uniprefill_fx.frontends.cache_argument import NEWER, OLDER, cache_of
from uniprefill_fx.torch_internals import compile_call, has_hooks, set_compiled_call

# What callers of transformers' decoders pass or leave out; to leave it out means its default, None or a number.
USUAL = ("attention_mask", "position_ids", NEWER, OLDER, "use_cache", "logits_to_keep")


class UniformCalls:
    """What a module calls in place of the function that `nn.Module.compile` would make.

    Args:
        module: the model. options: for `torch.compile`.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        self.module = module
        self.prompts, self.steps = (compile_call(module, **options) for _ in range(2))
        self.forward: Any = None  # whose defaults are known
        self.defaults: dict[str, Any] = {}
        self.positional: list[str] = []  # those of `defaults` that may be given without their names
        self.renames = False  # whether a cache may come by its older name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the model is a part of what is compiled
            return self.prompts(*args, **kwargs)
        uniform = None if has_hooks(self.module) else self._uniform(args, kwargs)  # hooks see how a call is written
        if uniform is not None:
            args, kwargs = (), uniform
        # Whether a call is a step decides where its graph is kept, never what it computes.
        return (self.steps if holds_keys(cache_of(kwargs)) else self.prompts)(*args, **kwargs)

    def _uniform(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """The same call by keywords, with usual defaults spelled out; None where that could mean something else."""
        defaults = self._defaults()
        if not defaults:
            return None
        if _says_the_default(self.module, kwargs, defaults):
            kwargs = {name: value for name, value in kwargs.items() if name != "return_dict"}
        if self.renames and OLDER in kwargs and NEWER not in kwargs:
            kwargs = {NEWER if name == OLDER else name: value for name, value in kwargs.items()}
        named = dict(zip(self.positional, args, strict=False)) | kwargs
        # A keyword that `forward` does not name may be read by a decorator of it.
        if len(named) < len(args) + len(kwargs) or not named.keys() <= defaults.keys():
            return None
        usual = {name: defaults[name] for name in USUAL if isinstance(defaults.get(name, ...), type(None) | int)}
        full = usual | named
        return {name: _usual_strides(full[name]) for name in defaults if name in full}

    def _defaults(self) -> dict[str, Any]:
        """By name, those of `forward` as it is now; nothing where a caller's way of writing could matter to it.

        It can to code that looks into its `**kwargs`, as a decorator or a user's own model may. Those of transformers
        do not tell a default from what is left out.
        """
        forward: Any = getattr(self.module.forward, "__func__", self.module.forward)
        if forward is not self.forward:
            every = [p for p in signature(self.module.forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
            nameless = any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in every)
            known = not nameless and _is_of_transformers(forward)
            self.defaults = {p.name: p.default for p in every} if known else {}
            self.positional = [p.name for p in every if p.kind is not p.KEYWORD_ONLY]
            self.renames = known and _renames_cache(forward)
            self.forward = forward
        return self.defaults


def compile_uniformly(module: nn.Module, **options: Any) -> None:
    """`module.compile(**options)`, whose calls are uniform."""
    calls: Callable[..., Any] = UniformCalls(module, **options)
    set_compiled_call(module, calls)


def _is_of_transformers(function: Any) -> bool:
    """Whether transformers wrote a function, and whatever is wrapped around it."""
    while function is not None:
        if not str(getattr(function, "__globals__", {}).get("__name__")).startswith("transformers."):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _renames_cache(function: Any) -> bool:
    """Whether a decorator of transformers, `deprecate_kwarg`, hands a cache of the older name on by the newer one."""
    while function is not None:
        held = getclosurevars(function).nonlocals
        if (held.get("old_name"), held.get("new_name")) == (OLDER, NEWER):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _says_the_default(module: nn.Module, kwargs: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Whether a call says `return_dict=True`, as `generate()` does, to a model that returns one anyway."""
    if kwargs.get("return_dict") is not True or "return_dict" in defaults:
        return False
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return all(getattr(c, "return_dict", None) is True for c in (config, text))


def _usual_strides(value: Any) -> Any:
    """Token ids and masks of one column that were cut out of longer ones get strides of their own: they are guarded."""
    if not isinstance(value, Tensor) or value.is_floating_point() or value.dim() != 2 or not value.is_contiguous():
        return value
    usual = value.stride() == (max(value.shape[1], 1), 1)
    return value if usual else value.clone(memory_format=torch.contiguous_format)
