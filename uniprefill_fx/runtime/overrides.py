"""Options of the selection that may change from call to call: `override()`.

Score and select run between the compiled pieces and take these options as arguments, so that other values need no
compilation and can leave no stale one behind.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import fx

from uniprefill_fx.config import OptionError, PrefillConfig, auto_block_size
from uniprefill_fx.passes.operator_internals import schema_of
from uniprefill_fx.runtime.shown_options import AS_COMPILED, shows_options
from uniprefill_fx.runtime.sparse_options import NAMES

CHANGEABLE = ("preset", "p", "keep_ratio", "block_size", "last_n", "sink_tokens", *NAMES)
_AMOUNTS = ("preset", "p", "keep_ratio")  # how much is kept

_changes: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar("uniprefill_changes", default=None)


@shows_options(CHANGEABLE, **dict.fromkeys(CHANGEABLE, AS_COMPILED))
@contextlib.contextmanager
def override(**options: Any) -> Iterator[None]:
    """Prompts inside this context select with other options, by the compilations that exist.

    Args:
        options: of `preset`, `p`, `keep_ratio`, `block_size`, `last_n` and `sink_tokens`, as for
            `uniprefill_fx.compile`; and, of a model that was compiled with `attention="block_sparse"`, those that begin
            with `sparse_`, `sparse_layers` apart.
            `p` and `preset` mean `selection="top_p"`, `keep_ratio` means `"top_k"`, whatever the model was compiled
            with. `p="auto"` is that of the preset given beside it, or of the default one.
            Inside another `override` the inner values win, and outer ones that are not given again stay.

    Raises:
        OptionError: an option that is fixed when a model is compiled, a bad value, or `keep_ratio` beside `p` or
            `preset`. A list that does not have one
            value for each drop layer raises when a prompt runs.
    """
    for name, value in options.items():
        if name not in CHANGEABLE:
            hint = "Other options are fixed when the model is compiled."
            raise OptionError(name, value, "with override(), " + ", ".join(CHANGEABLE), hint)
    checked = PrefillConfig(**options | amount(options))
    given = {name: getattr(checked, name) for name in options}
    outer = dict(_changes.get() or {})
    if any(name in given for name in _AMOUNTS):
        outer = {name: value for name, value in outer.items() if name not in _AMOUNTS}
    with _within(outer | given):
        yield


def amount(options: Mapping[str, Any]) -> dict[str, Any]:
    """How much options of one call keep, as fields of `PrefillConfig` that stand in place of all those of the
    compilation: p and preset mean top_p, keep_ratio means top_k. Empty where the options say nothing of it.

    Raises:
        OptionError: keep_ratio beside p or preset.
    """
    given = {name: options[name] for name in _AMOUNTS if name in options}
    if not given:
        return {}
    if "keep_ratio" in given and len(given) > 1:
        beside = " or ".join(name for name in given if name != "keep_ratio")
        raise OptionError("keep_ratio", given["keep_ratio"], f"{beside} or keep_ratio", "Give one of the two.")
    selection = "top_k" if "keep_ratio" in given else "top_p"
    return {name: getattr(PrefillConfig, name) for name in _AMOUNTS} | given | {"selection": selection}


def as_compiled() -> AbstractContextManager[None]:
    """Prompts inside this context do not look at an `override` around it."""
    return _within(None)


@contextlib.contextmanager
def _within(changed: Mapping[str, Any] | None) -> Iterator[None]:
    token = _changes.set(changed)
    try:
        yield
    finally:
        _changes.reset(token)


def changes(tokens: int, auto_blocks: bool) -> dict[str, Any]:
    """The options of one prompt that differ from those of the compilation: what `override` says, and the block size
    that "auto" stands for. `auto_blocks`: whether the model was compiled with `block_size="auto"`."""
    changed = dict(_changes.get() or {})
    if changed.get("block_size", "auto" if auto_blocks else None) == "auto":
        changed["block_size"] = auto_block_size(tokens)
    return changed


def arguments(changed: Mapping[str, Any], index: int, count: int, depth: float) -> dict[str, Any]:
    """Arguments of the score and select ops of the index-th of `count` drop layers, for changed options.

    depth: as for `PrefillConfig.kept_for`.

    Raises:
        OptionError: a list whose length is not `count`.
    """
    out = {name: value for name, value in changed.items() if name not in _AMOUNTS}
    if own := amount(changed):
        out["p"], out["keep_ratio"] = PrefillConfig(**own).kept_for(index, count, depth)
    return out


class Changed(fx.Interpreter):
    """Runs a piece with some arguments of the package's ops replaced, by name."""

    def __init__(self, gm: fx.GraphModule, values: Mapping[str, Any]) -> None:
        super().__init__(gm)
        self.values = values

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        schema = schema_of(target)
        if schema is None or target.namespace != "uniprefill":
            return super().call_function(target, args, kwargs)
        names = [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        return self.call_package(target, given | {n: v for n, v in self.values.items() if n in given})

    def call_package(self, op: Any, values: dict[str, Any]) -> Any:
        """Run one op of the package: all of its arguments by name."""
        return op(**values)
