"""transformers: rotary embeddings whose frequencies follow the length of the prompt, without a branch on it.

Under longrope (Phi-3) and dynamic NTK scaling a model compares the largest position of a call with a length, and the
comparison breaks the graph: `dynamic_rope_update` in transformers' `modeling_rope_utils`. While this backend traces,
both outcomes are computed and chosen from::

    inv_freq = where(position_ids.max() + 1 > original_max_position_embeddings, long_inv_freq, original_inv_freq)

`position_ids` are those of the whole prompt, in front of every drop: how many tokens stay later changes no frequency.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import modeling_rope_utils
from transformers.utils.generic import maybe_autocast

from uniprefill_fx.frontends.gating import compiling_for_uniprefill, copy_function

Forward = Callable[..., tuple[Tensor, Tensor]]
_seen: dict[str, Any] = {}  # modules that were looked through


def _parts(self: Any, layer_type: str | None) -> tuple[str, Any, Any]:
    """The prefix of the attributes for a kind of layers, its kind of rotary embedding, and its parameters."""
    if layer_type is None:
        return "", self.rope_type, self.config.rope_parameters
    return f"{layer_type}_", self.rope_type[layer_type], self.config.rope_parameters[layer_type]


def longrope(forward: Forward, self: Any, x: Tensor, position_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Call `forward` with the long or the short frequencies in place of `inv_freq`. Traced by Dynamo.

    `inv_freq` is put back: Dynamo guards it, and each call would have to be traced anew for what the last one left.
    """
    layer_type = kwargs.get("layer_type")
    prefix, rope_type, parameters = _parts(self, layer_type)
    length = parameters["original_max_position_embeddings"]
    init = modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_type]
    long, _ = init(self.config, x.device, seq_len=length + 1, layer_type=layer_type)
    short, before = getattr(self, f"{prefix}original_inv_freq").to(x.device), getattr(self, f"{prefix}inv_freq")
    setattr(self, f"{prefix}inv_freq", torch.where(position_ids.max() + 1 > length, long, short))
    found = forward(self, x, position_ids, **kwargs)
    setattr(self, f"{prefix}inv_freq", before)
    return found


def scaled_longrope(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Phi-3.5-MoE's: the short frequencies always, and a factor on cosine and sine that follows the length."""
    parameters = self.config.rope_parameters
    is_long = position_ids.max() + 1 > parameters["original_max_position_embeddings"]
    factor = torch.where(is_long, float(parameters["long_mscale"]), float(parameters["short_mscale"]))
    inv_freq, _ = self.rope_init_fn(self.config)
    with maybe_autocast(device_type=x.device.type, enabled=False):
        frequencies = inv_freq[None, :, None].expand(position_ids.shape[0], -1, 1).to(x.device, torch.float)
        angles = (frequencies @ position_ids[:, None, :].float()).transpose(1, 2)
        both = torch.cat((angles, angles), dim=-1)
        cos, sin = both.cos() * factor, both.sin() * factor
    return cos.to(x.dtype), sin.to(x.dtype)


def dynamic(self: Any, position_ids: Tensor, device: torch.device, layer_type: str | None = None) -> None:
    """Set `inv_freq`, and the length that it is for, as `dynamic_frequency_update` does. Traced by Dynamo.

    Frequencies for a longer prompt stay for later ones, until one is shorter than what the model was trained for.
    """
    prefix, rope_type, _ = _parts(self, layer_type)
    name, trained = f"{prefix}inv_freq", self.original_max_seq_len
    cached = getattr(self, f"{prefix}max_seq_len_cached", self.max_seq_len_cached)
    length = position_ids.max() + 1
    init = modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_type]
    longer, self.attention_scaling = init(self.config, device, seq_len=length, layer_type=layer_type)
    original = getattr(self, f"{prefix}original_inv_freq").to(device)
    grown, reset = length > cached, (length < trained) & (torch.as_tensor(cached, device=device) > trained)
    setattr(self, name, torch.where(grown, longer, torch.where(reset, original, getattr(self, name))))
    kept = torch.where(reset, trained, torch.as_tensor(cached, device=device))
    setattr(self, f"{prefix}max_seq_len_cached", torch.where(grown, length, kept))


def install() -> bool:
    """Teach Dynamo the updates of every rotary embedding that was imported since the last call; True if there was one.

    Inert for other backends and eager code. Each class has functions of its own, made by its decorator.
    """
    new = False
    for path, module in list(sys.modules.items()):
        modeling = path.startswith(("transformers.models.", "transformers_modules.")) and ".modeling_" in path
        if not modeling or _seen.get(path) is module:
            continue
        _seen[path] = module
        for value in list(vars(module).values()):
            if inspect.isclass(value) and value.__module__ == path and "forward" in vars(value):
                new |= _teach(vars(value)["forward"])
    return new


def _teach(forward: Any) -> bool:
    """Substitute the updates behind a `forward` that `dynamic_rope_update` decorates; False for any other."""
    while forward is not None and getattr(forward, "__code__", None) is not _DECORATED:
        forward = getattr(forward, "__wrapped__", None)
    if forward is None:
        return False
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))
    _substitute(cells["longrope_frequency_update"].cell_contents, lambda original, *args, **kwargs: None)
    _substitute(
        cells["dynamic_frequency_update"].cell_contents, lambda original, *args, **kwargs: dynamic(*args, **kwargs)
    )
    _substitute(cells["rope_forward"].cell_contents, _rotary)
    return True


def _rotary(original: Forward, self: Any, x: Tensor, position_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    _, rope_type, parameters = _parts(self, kwargs.get("layer_type"))
    if rope_type != "default" and "long_mscale" in parameters and hasattr(self, "rope_init_fn"):
        return scaled_longrope(self, x, position_ids)
    if rope_type == "longrope":
        return longrope(original, self, x, position_ids, **kwargs)
    return original(self, x, position_ids, **kwargs)


def _substitute(function: Any, traced: Callable[..., Any]) -> None:
    original = copy_function(function)

    @torch.compiler.substitute_in_graph(function, skip_signature_check=True)
    def substitute(*args: Any, **kwargs: Any) -> Any:
        return traced(original, *args, **kwargs) if compiling_for_uniprefill() else original(*args, **kwargs)


def _decorated() -> Any:
    """The code of what `dynamic_rope_update` makes of a function."""

    def forward() -> None:
        """Never called."""

    return modeling_rope_utils.dynamic_rope_update(forward).__code__


_DECORATED = _decorated()
