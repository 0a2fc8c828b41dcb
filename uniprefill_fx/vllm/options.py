"""The options of an engine, the flags of vLLM that they need, and what is refused before an engine starts."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from uniprefill_fx.config import OptionError, PrefillConfig, over_published
from uniprefill_fx.lowering.tensorrt import NAMES
from uniprefill_fx.option_checks import InnerOptions

BACKEND = "uniprefill_fx.vllm.backend"
GRAPHS = "FULL_DECODE_ONLY"
"""vLLM's mode of CUDA graphs in which steps of one token a request are captured, and no others."""
NOT_TAKEN = ("enable_auto_functionalized_v2", "combo_kernels", "benchmark_combo_kernel")
"""Settings of Inductor with which vLLM compiles a layer at a time, and that do not suit a model's whole graph: writes
into views would be copied, and trying combined kernels takes long and found none to combine."""
OLDEST, NEWEST = (0, 24), (0, 32)
"""The versions of vLLM whose ends are tested."""


class ServingError(ValueError):
    """An engine was asked for whose answers could be wrong."""


def engine_args(*, warm_up: bool = True, **options: Any) -> dict[str, Any]:
    """Keyword arguments for `vllm.LLM` (and the fields of `EngineArgs`) that make it drop tokens.

    Args:
        warm_up: whether the graph that drops is compiled while the engine starts, not by the first prompt that drops.
        options: see `PrefillConfig`. A window counts kept rows, `window="index"`.

    Raises:
        OptionError: an unknown option or a bad value.
    """
    given = options if warm_up is True else {"warm_up": warm_up, **options}
    _config(_split(given)[0])
    return {
        "compilation_config": {"mode": 2, "backend": BACKEND, "custom_ops": ["none"], "cudagraph_mode": GRAPHS},
        # norms as torch spells them, which the inner backend fuses with what lies around them
        "kernel_config": {"ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}},
        "additional_config": {"uniprefill": given},
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
    }


def _split(given: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The options of the package, and `warm_up`, which only an engine has.

    Raises:
        OptionError: `warm_up` is no bool.
    """
    options = dict(given)
    warm_up = options.pop("warm_up", True)
    if not isinstance(warm_up, bool):
        raise OptionError("warm_up", warm_up, "True or False", "False leaves compiling to the first prompt that drops.")
    return options, warm_up


def _config(options: Mapping[str, Any]) -> PrefillConfig:
    merged = {"window": "index", **options}
    config = PrefillConfig.from_options(merged)
    if config.attention != "dense":
        raise OptionError("attention", config.attention, "'dense' in vLLM", "Block-sparse attention is not served.")
    if config.inner_backend in NAMES:
        hint = "Layers write into vLLM's cache between any two parts, and engines return copies."
        raise OptionError("inner_backend", config.inner_backend, "in vLLM, any but torch-tensorrt", hint)
    return config


def config_of(vllm_config: Any) -> PrefillConfig:
    """The options of an engine, over what was published for its model."""
    given, _ = _split(_given(vllm_config))
    text = vllm_config.model_config.hf_text_config
    return _config(over_published(getattr(text, "model_type", ""), getattr(text, "num_hidden_layers", -1), given))


def as_engine_compiles(config: PrefillConfig, compilation_config: Any) -> PrefillConfig:
    """The options with Inductor set as the engine's `inductor_compile_config` says; `inner_options` go before it,
    and alone say what is `NOT_TAKEN`.

    Without that, what a user writes there is lost, and torch 2.11 checks the strides of every weight before a step's
    first kernel is launched, which vLLM has switched off.
    """
    if config.inner_backend != "inductor":
        return config
    engine = {k: v for k, v in compilation_config.inductor_compile_config.items() if k not in NOT_TAKEN}
    return dataclasses.replace(config, inner_options=InnerOptions({**engine, **(config.inner_options or {})}))


def warms_up(vllm_config: Any) -> bool:
    """Whether the graph that drops is compiled while the engine starts."""
    return _split(_given(vllm_config))[1]


def _given(vllm_config: Any) -> dict[str, Any]:
    return dict((vllm_config.additional_config or {}).get("uniprefill") or {})


def asked_for(vllm_config: Any) -> bool:
    """Whether an engine names our backend, or our options."""
    return vllm_config.compilation_config.backend == BACKEND or "uniprefill" in (vllm_config.additional_config or {})


def check(vllm_config: Any) -> None:
    """Refuse an engine whose answers could be wrong.

    Raises:
        ServingError: says which flag, and what to do. OptionError: a bad option.
    """
    config = config_of(vllm_config)
    warn_of_version()
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    scheduler, compilation = vllm_config.scheduler_config, vllm_config.compilation_config
    windows = _windows(model.hf_text_config)
    graphs = getattr(compilation.cudagraph_mode, "name", "NONE")
    reasons = {
        "LoRA adapters: which rows are of which adapter is told by the places of all tokens; leave enable_lora "
        "out": vllm_config.lora_config is not None,
        f"compilation mode {compilation.mode}: only mode 2 hands a model's whole graph to this backend; pass "
        f"compilation_config={{'mode': 2, 'backend': '{BACKEND}'}}": int(compilation.mode or 0) != 2,
        f"compilation backend {compilation.backend!r}; pass {BACKEND!r}": compilation.backend != BACKEND,
        "prefix caching: a cached block holds a token for the layers that kept it, and for no others; pass "
        "enable_prefix_caching=False": bool(cache.enable_prefix_caching),
        "speculative decoding: drafts are checked against caches that lack tokens; leave speculative_config "
        "out": vllm_config.speculative_config is not None,
        "a KV connector: whoever reads the blocks elsewhere does not know which tokens they hold; leave "
        "kv_transfer_config out": vllm_config.kv_transfer_config is not None,
        "pipeline parallelism: the kept rows of a step would have to travel along; pass "
        "pipeline_parallel_size=1": parallel.pipeline_parallel_size > 1,
        "data parallelism: ranks exchange the number of their tokens before any is dropped; pass "
        "data_parallel_size=1": parallel.data_parallel_size > 1,
        "expert parallelism: tokens of several ranks meet in one layer; leave enable_expert_parallel out": bool(
            parallel.enable_expert_parallel
        ),
        "context parallelism: each rank holds a part of the keys; pass 1": any(
            getattr(parallel, name, 1) > 1 for name in ("decode_context_parallel_size", "prefill_context_parallel_size")
        ),
        "micro-batches: a step is cut in two before it is known what is dropped; leave enable_dbo out": bool(
            getattr(parallel, "enable_dbo", False)
        ),
        "returned experts: dropped tokens have none; leave enable_return_routed_experts out": _returns_experts(
            vllm_config
        ),
        "a pooling model: it reads the rows of all tokens": model.runner_type != "generate",
        "the hybrid KV cache manager with sliding windows: it frees blocks by the places that tokens had before any "
        "was dropped; pass disable_hybrid_kv_cache_manager=True": windows
        and not scheduler.disable_hybrid_kv_cache_manager,
        "window='position': vLLM's kernels count the rows of a cache; leave it out, or pass 'index'": windows
        and config.window == "position",
        f"cudagraph_mode {graphs}: a graph of a step with prompts would be replayed without dropping; pass "
        f"{GRAPHS!r} or 'NONE'": graphs not in (GRAPHS, "NONE"),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ServingError(f"uniprefill does not serve with {reason}.")


def _returns_experts(vllm_config: Any) -> bool:
    homes = (getattr(vllm_config, "aux_output_config", None), vllm_config.model_config)  # by version
    return any(getattr(home, "enable_return_routed_experts", False) for home in homes)


def _windows(text_config: Any) -> bool:
    """Whether some layers have a sliding window."""
    kinds = getattr(text_config, "layer_types", None) or ()
    return any("sliding" in str(kind) or "chunked" in str(kind) for kind in kinds) or (
        not kinds and getattr(text_config, "sliding_window", None) is not None
    )


def warn_of_version() -> None:
    """Warn, once, of a vLLM that was not tested."""
    import vllm

    numbers = tuple(int(part) for part in vllm.__version__.split(".")[:2] if part.isdigit())
    if not OLDEST <= numbers <= NEWEST:
        warnings.warn(
            f"uniprefill: vLLM {vllm.__version__} was not tested; {OLDEST[0]}.{OLDEST[1]} to "
            f"{NEWEST[0]}.{NEWEST[1]} were. Compare its answers with those of an engine without uniprefill.",
            stacklevel=2,
        )
