"""transformers: caches that know their tokens, and masks that say what they are.

This works by `torch.compiler.substitute_in_graph`: Dynamo traces the substitute, eager code never sees it, and the
substitute calls a copy of the original function unless the trace is for this backend.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import masking_utils
from transformers.cache_utils import EncoderDecoderCache

from uniprefill_fx.frontends.cache import ADOPTED, adopt, holds_keys
from uniprefill_fx.frontends.cache_argument import cache_of
from uniprefill_fx.frontends.gating import compiling_for_uniprefill, copy_function
from uniprefill_fx.frontends.prompt_sizes import ask_for_symbols
from uniprefill_fx.torch_internals import comptime

# Every decoder asks one of these for its masks before it writes to its cache.
MASK_FUNCTIONS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")


_taught: set[str] = set()


def install() -> bool:
    """Teach Dynamo the substitutes that it does not know yet; True if there were any.

    Process-wide, and inert for other backends and eager code. Modeling files are imported one by one, so this is
    called before each compilation.
    """
    new = [name for name in MASK_FUNCTIONS if name not in _taught]
    for name in new:
        _teach(name, getattr(masking_utils, name))
        _taught.add(name)
    return bool(new)


def _teach(name: str, function: Any) -> None:
    original = copy_function(function)
    names = list(inspect.signature(function).parameters)

    @torch.compiler.substitute_in_graph(function, skip_signature_check=True)
    def substitute(*args: Any, **kwargs: Any) -> Any:
        if not compiling_for_uniprefill():
            return original(*args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        shared = getattr(given.get("config"), "num_kv_shared_layers", None)
        cache = _of_decoder(cache_of(given), given.get("config"))
        adopt(cache, bool(shared))
        # Dynamo takes a tensor for an input of the graph when somebody looks at it.
        tensors = {argument: value for argument, value in given.items() if isinstance(value, torch.Tensor)}
        embeds = tensors.get("inputs_embeds")
        if embeds is not None and _is_first(cache):
            comptime(ask_for_symbols)
        return _annotated(original(*args, **kwargs), given, name)


def _of_decoder(cache: Any, config: Any) -> Any:
    """Where the decoder's own keys go: one that could read an encoder, but stands alone, may hold them in a pair."""
    alone = type(cache) is EncoderDecoderCache and not getattr(config, "is_encoder_decoder", True)
    return cache.self_attention_cache if alone else cache


def _is_first(cache: Any) -> bool:
    """Whether a call is the first one: it has no cache, or one that we know and that holds no keys yet."""
    return cache is None or (type(cache) in ADOPTED and not holds_keys(cache))


# Further arguments that change what a mask lets through.
CHANGES = ("or_mask_function", "and_mask_function", "block_sequence_ids")


def _annotated(mask: Any, given: dict[str, Any], maker: str) -> Any:
    """A mask of `maker`, with what it is written around it where the arguments leave no doubt. Traced by Dynamo.

    Others are read like the mask of any model: chunks, whose beginning depends on the padding, prompts that may be
    packed in a row, masks that the user or the model brings.
    """
    config, padding, cache = given["config"], given.get("attention_mask"), cache_of(given)
    if maker == "create_chunked_causal_mask" or not isinstance(mask, torch.Tensor):
        return mask
    if any(given.get(argument) is not None for argument in CHANGES) or not getattr(config, "is_causal", True):
        return mask
    if config._attn_implementation not in ("sdpa", "eager") or (cache is not None and type(cache) not in ADOPTED):
        return mask
    if padding is None:
        packed = cache is None and given.get("position_ids") is not None
        if packed:
            return mask
    else:
        # Compared here, two sizes are one symbol from then on: else nothing says that the padding is that of the keys.
        embeds = given.get("inputs_embeds")
        if padding.ndim != 2 or (_is_first(cache) and embeds is not None and padding.shape != embeds.shape[:2]):
            return mask
    window = config.sliding_window if maker == "create_sliding_window_causal_mask" else None
    return torch.ops.uniprefill.known_mask(mask, padding, cache is not None, window)
