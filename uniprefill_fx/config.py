"""What a user may choose, checked once: `PrefillConfig`; presets, and what UniPrefill was published with, as data.

Nothing here imports torch. The module is loaded with torch's backend registry, long before anyone compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from uniprefill_fx import option_checks as checks
from uniprefill_fx.option_checks import Check, InnerOptions, OptionError

__all__ = [
    "DEFAULT_MIN_TOKENS",
    "PRESETS",
    "PUBLISHED",
    "OptionError",
    "PrefillConfig",
    "Preset",
    "auto_block_size",
    "over_published",
    "published_for",
]

SPARSE_TOO = "Set attention='block_sparse' as well."
DEFAULT_MIN_TOKENS = 2048
"""Prompts with fewer tokens run dense: scoring and gathering must cost less than they save. On an H200 with
Llama-3.1-8B's shape dropping took 1.2 times as long as dense at 1,024 tokens, and 0.75 times as long at 2,048."""

DEFAULT_SPARSE_MIN_TOKENS = 8192
"""Attention over fewer rows computes every block: choosing costs more there than it saves. On an H200 in bf16, dense
attention over 4,096 rows takes as long as this one at a density of 0.40, and the blocks that are always computed are
0.43 of them; over 8,192 rows it is 0.67 against 0.23 (`benchmarks/block_sparse_notes.md`)."""


@dataclass(frozen=True)
class Preset:
    """How much each drop keeps, by where it lies: `early` is the p of the first third of a model's depth, `late` that
    of the last third, and between them it falls evenly. What early drops lose is missing for longest."""

    early: float
    late: float

    def p(self, depth: float) -> float:
        """The p of a drop after a layer that ends this share of the decoder, in (0, 1]."""
        late = min(max(3 * depth - 1, 0.0), 1.0)
        return round(self.early + (self.late - self.early) * late, 3)


PRESETS: Mapping[str, Preset] = {
    "quality": Preset(0.999, 0.95),
    "balanced": Preset(0.975, 0.8),
    "fast": Preset(0.9, 0.7),
}
"""What each costs on real weights is in `docs/choosing-p.md`."""

PUBLISHED: Mapping[tuple[str, int], Mapping[str, Any]] = {
    ("llama", 32): {"drop_layers": (7, 11, 15, 19, 23, 27)},  # Llama-3.1-8B
    ("qwen3_next", 48): {"drop_layers": (7, 11, 15, 19, 23, 27, 31, 35, 39, 43)},
    ("gemma3", 48): {"drop_layers": (29, 35, 41), "p": 0.975},  # Gemma-3-12B; its text model has a type of its own
    ("gemma3_text", 48): {"drop_layers": (29, 35, 41), "p": 0.975},
}
"""Options that UniPrefill (arXiv 2605.06221) was published with, by transformers' `model_type` and
`num_hidden_layers`: a set of layers holds for one depth only."""


def published_for(model_type: str, num_hidden_layers: int) -> dict[str, Any]:
    """The published options of a model; empty when there are none."""
    return dict(PUBLISHED.get((model_type, num_hidden_layers), {}))


def over_published(model_type: str, num_hidden_layers: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """A user's options over the published ones of a model: its p only where it is read, nothing with drop layers."""
    published = {} if "drop_layers" in options else published_for(model_type, num_hidden_layers)
    if "preset" in options or options.get("selection") == "top_k":
        published.pop("p", None)
    return {**published, **options}


AUTO_BLOCKS = ((8192, 128), (65_536, 64))
"""(prompts of fewer tokens than this, tokens a block) of `block_size="auto"`; longer prompts have blocks of 32. In the
paper's ablation (arXiv 2605.06221) 128 did best at 4K tokens and 32 at 128K."""


def auto_block_size(tokens: int) -> int:
    """The block size that `block_size="auto"` stands for: coarse blocks on short prompts, fine ones on long."""
    return next((size for below, size in AUTO_BLOCKS if tokens < below), 32)


_CHECKS: Mapping[str, Check] = {
    "preset": checks.choice(*PRESETS),
    "p": checks.or_auto(checks.fractions("p=1.0 keeps every token.")),
    "block_size": checks.or_auto(checks.integer(1, "The default is 64 tokens.")),
    "last_n": checks.integer(1, "The last queries score the blocks, so there must be at least one."),
    "sink_tokens": checks.integer(0, "0 forces no first tokens to stay."),
    "drop_layers": checks.drop_layers,
    "window": checks.choice("position", "index"),
    "full_logits": checks.choice("frozen", "dense"),
    "selection": checks.choice("top_p", "top_k"),
    "keep_ratio": checks.optional(checks.fractions("keep_ratio=1.0 keeps every block.")),
    "min_tokens": checks.integer(0, "0 lets a prompt of any length drop."),
    "inner_backend": checks.inner_backend,
    "inner_options": checks.optional(checks.inner_options),
    "score_dtype": checks.choice("float32", "float64", "float8_e4m3"),
    "attention": checks.choice("dense", "block_sparse"),
    "sparse_alpha": checks.alphas,
    "sparse_block_size": checks.one_of(64, 128),
    "sparse_sink_blocks": checks.integer(0, "0 forces no first blocks of keys."),
    "sparse_window_blocks": checks.integer(1, "The block of a query itself is always computed."),
    "sparse_last_tokens": checks.integer(0, "0: the last queries are no exception."),
    "sparse_correction": checks.boolean,
    "sparse_layers": checks.sparse_layers,
    "sparse_min_tokens": checks.integer(0, "0 lets a prompt of any length leave out blocks."),
    "attention_dtype": checks.choice("model", "float8_e4m3"),
    "strict": checks.boolean,
}


@dataclass(frozen=True)
class PrefillConfig:
    """The options of one compilation: immutable, hashable, and equal only if every option is equal.

    Lists become tuples, and `drop_layers` and `sparse_layers` are stored in increasing order; lists that came with them
    (`p`, `keep_ratio`, `sparse_alpha`) move along, so that the i-th value always belongs to the i-th of these layers
    from the bottom. Bad values raise `OptionError`. Whether a layer exists and holds full attention is checked
    where the model is known.
    """

    preset: Literal["quality", "balanced", "fast"] = "quality"
    """How much is kept where `p` does not say it."""

    p: float | tuple[float, ...] | Literal["auto"] = "auto"
    """Share of the attention mass that the kept blocks hold at least, in (0, 1], or "auto", as the preset has it.
    `top_k` refuses it."""

    block_size: int | Literal["auto"] = 64
    """Tokens a block; a block is kept or dropped as a whole. "auto": by the prompt's length (`auto_block_size`)."""

    last_n: int = 128
    """How many of the last tokens score the others. They are always kept."""

    sink_tokens: int = 128
    """How many of the first tokens are always kept."""

    drop_layers: Literal["auto", "all", "none"] | tuple[int, ...] = "auto"
    """Decoder layers after whose attention tokens are dropped: "auto" (`auto_drop_layers`), "all", "none", or
    indices."""

    window: Literal["position", "index"] = "position"
    """What a sliding window counts after a drop: original positions, or, as the public reference does, kept rows."""

    full_logits: Literal["frozen", "dense"] = "frozen"
    """When logits of all positions are asked for: dropped rows come from frozen states, or the call runs dense."""

    selection: Literal["top_p", "top_k"] = "top_p"
    """Keep the fewest blocks that hold mass `p`, or a fixed number of blocks by `keep_ratio`."""

    keep_ratio: float | tuple[float, ...] | None = None
    """`top_k` keeps ceil(keep_ratio × prompt tokens / block_size) blocks; in (0, 1]."""

    min_tokens: int = DEFAULT_MIN_TOKENS
    """Prompts with fewer tokens run dense, which is decided at run time."""

    inner_backend: str | Callable[..., Any] = "inductor"
    """What compiles the rewritten graph."""

    inner_options: InnerOptions | None = None
    """Passed on to the inner backend as `options`."""

    score_dtype: Literal["float32", "float64", "float8_e4m3"] = "float32"
    """Type in which scores are computed and summed. "float8_e4m3": queries and keys are rounded to 8 bits before they
    are multiplied, with one scale a tile; softmax and sums are float32. Needs a GPU that multiplies such numbers."""

    attention: Literal["dense", "block_sparse"] = "dense"
    """How full attention over a prompt is computed: every block of keys, or those that matter to each tile of queries
    (FlashPrefill, arXiv 2603.06199). Sliding windows, chunks and decode stay as they are."""

    sparse_alpha: float | tuple[float, ...] = 0.1
    """A block of keys is computed where its energy is at least this fraction of the tile's highest, in [0, 1)."""

    sparse_block_size: Literal[64, 128] = 128
    """Tokens in a block of keys."""

    sparse_sink_blocks: int = 2
    """How many of the first blocks are always computed."""

    sparse_window_blocks: int = 4
    """How many blocks up to a query's own are always computed, that one among them."""

    sparse_last_tokens: int = 256
    """The last queries of a prompt, so many of them, see every block."""

    sparse_correction: bool = True
    """Let a block that is left out take part as one key, its mean, with the mean of its values."""

    sparse_layers: Literal["auto", "all"] | tuple[int, ...] = "auto"
    """Decoder layers whose attention is block-sparse: "auto", wherever it can be; "all", where any that cannot is a
    refusal; or indices."""

    sparse_min_tokens: int = DEFAULT_SPARSE_MIN_TOKENS
    """Attention over fewer rows computes every block, which is decided at run time."""

    attention_dtype: Literal["model", "float8_e4m3"] = "model"
    """Type in which block-sparse attention multiplies. "float8_e4m3" needs a GPU that multiplies such numbers."""

    strict: bool = False
    """Raise where an attention op would otherwise stay dense with a recorded reason."""

    def __post_init__(self) -> None:
        for option in fields(self):
            self._store(option.name, _CHECKS[option.name](option.name, getattr(self, option.name)))
        self._check_keep_ratio()
        self._check_sparse()
        self._sort_drop_layers()
        self._sort_sparse_layers()

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the one way to normalise a field of a frozen dataclass

    def _check_keep_ratio(self) -> None:
        if self.selection == "top_k" and self.keep_ratio is None:
            allowed = "with selection='top_k', a number in (0, 1], or a list with one for each drop layer"
            raise OptionError("keep_ratio", None, allowed, "Set keep_ratio, or use selection='top_p'.")
        if self.selection == "top_p" and self.keep_ratio is not None:
            hint = "Set selection='top_k' as well, or use p in its place."
            raise OptionError("keep_ratio", self.keep_ratio, "None with selection='top_p'", hint)

    def _check_sparse(self) -> None:
        if self.attention == "block_sparse":
            return
        if self.drop_layers == "none":
            hint = "Nothing would change; set attention='block_sparse' as well, or name layers."
            raise OptionError("drop_layers", "none", "'none' with attention='block_sparse'", hint)
        if self.attention_dtype != "model":
            raise OptionError("attention_dtype", self.attention_dtype, "'model' with attention='dense'", SPARSE_TOO)

    def _sort_drop_layers(self) -> None:
        if isinstance(self.drop_layers, str):
            return
        count = len(self.drop_layers)
        order = sorted(range(count), key=self.drop_layers.__getitem__)
        for name in ("p", "keep_ratio"):
            values = getattr(self, name)
            if isinstance(values, tuple):
                self._store(name, tuple(_value_for(name, values, i, count) for i in order))
        self._store("drop_layers", tuple(sorted(self.drop_layers)))

    def _sort_sparse_layers(self) -> None:
        layers, alphas = self.sparse_layers, self.sparse_alpha
        if isinstance(layers, str):
            return
        self._store("sparse_layers", tuple(sorted(layers)))
        if isinstance(alphas, tuple) and len(alphas) == len(layers):  # others are refused where the model is known
            self._store("sparse_alpha", tuple(alpha for _, alpha in sorted(zip(layers, alphas, strict=True))))

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None = None) -> PrefillConfig:
        """The config for a user's `options`; None stands for no options. Unknown names raise `OptionError`."""
        if options is None:
            return cls()
        if not isinstance(options, Mapping):
            raise OptionError("options", options, "a dict of option names and values", 'For example {"p": 0.95}.')
        known = [option.name for option in fields(cls)]
        for name, value in options.items():
            if name not in known:
                hint = checks.did_you_mean(checks.ELSEWHERE.get(name, name), known, "Remove it.")
                raise OptionError(str(name), value, "the names " + ", ".join(known), f"There is no such option. {hint}")
        for name in ("preset", "p") if options.get("selection") == "top_k" else ():
            if options.get(name, "auto") != "auto":
                hint = "top_k reads keep_ratio, and no p (which a preset says too). Leave it out, or selection."
                raise OptionError(name, options[name], f"no {name} with selection='top_k'", hint)
        config = cls(**options)
        for name, default in ((o.name, o.default) for o in fields(cls) if o.name.startswith("sparse_")):
            if config.attention == "dense" and getattr(config, name) != default:
                raise OptionError(name, options[name], f"{default!r} with attention='dense'", SPARSE_TOO)
        return config

    def kept_for(self, index: int, count: int, depth: float) -> tuple[float, None] | tuple[None, float]:
        """How much the index-th of `count` drop layers keeps: (p, None) with `top_p`, (None, keep_ratio) with `top_k`.

        depth: the share of the decoder's layers that the drop layer ends, itself among them.
        A list of another length than `count` raises `OptionError`; an index outside [0, count), IndexError.
        """
        if self.keep_ratio is not None:
            return None, _value_for("keep_ratio", self.keep_ratio, index, count)
        p = PRESETS[self.preset].p(depth) if self.p == "auto" else self.p
        return _value_for("p", p, index, count), None


def _value_for(option: str, values: float | tuple[float, ...], index: int, count: int) -> float:
    if not 0 <= index < count:
        raise IndexError(f"drop layer {index} of {count}: wanted an index in [0, {count})")
    if not isinstance(values, tuple):
        return values
    if len(values) != count:
        hint = f"The list has {len(values)} values, and there are {count} drop layers."
        raise OptionError(option, values, f"a number, or a list of {count}, one for each drop layer", hint)
    return values[index]
