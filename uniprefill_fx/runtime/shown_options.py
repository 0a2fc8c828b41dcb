"""Options where people look for them: in signatures, in `help()`, and as the types that editors read.

Names, defaults and texts come from the fields of `PrefillConfig` and their docstrings. `Options` repeats the names,
since editors and type checkers run no code; a test fails where the two differ.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, TypedDict, TypeVar

from uniprefill_fx import config
from uniprefill_fx.config import PrefillConfig

F = TypeVar("F", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """Every option of the backend, as a user may write it; `PrefillConfig` says what each one does."""

    preset: Literal["quality", "balanced", "fast"]
    p: float | Sequence[float] | Literal["auto"]
    block_size: int | Literal["auto"]
    last_n: int
    sink_tokens: int
    drop_layers: Literal["auto", "all", "none"] | Sequence[int]
    window: Literal["position", "index"]
    full_logits: Literal["frozen", "dense"]
    selection: Literal["top_p", "top_k"]
    keep_ratio: float | Sequence[float] | None
    min_tokens: int
    inner_backend: str | Callable[..., Any]
    inner_options: Mapping[str, Any] | None
    score_dtype: Literal["float32", "float64", "float8_e4m3"]
    attention: Literal["dense", "block_sparse"]
    sparse_alpha: float | Sequence[float]
    sparse_block_size: Literal[64, 128]
    sparse_sink_blocks: int
    sparse_window_blocks: int
    sparse_last_tokens: int
    sparse_correction: bool
    sparse_layers: Literal["auto", "all"] | Sequence[int]
    sparse_min_tokens: int
    attention_dtype: Literal["model", "float8_e4m3"]
    strict: bool


class _AsCompiled:
    """The default of an option that stays what the model was compiled with, as a signature shows it."""

    def __repr__(self) -> str:
        return "<as compiled>"


AS_COMPILED = _AsCompiled()


def shows_options(only: Iterable[str] | None = None, **defaults: Any) -> Callable[[F], F]:
    """A decorator: the options stand in the function's signature and docstring in place of `**options`.

    Args:
        only: these options alone. defaults: those that are not `PrefillConfig`'s; `Ellipsis` leaves the option out.
    """
    shown = [field for field in fields(PrefillConfig) if only is None or field.name in set(only)]
    values = {field.name: field.default for field in shown} | defaults
    values = {name: value for name, value in values.items() if value is not ...}

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        kept = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        types = Options.__annotations__
        kept += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=types.get(name, Any))
            for name, value in values.items()
        ]
        function.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{_listed(values)}"
        return function

    return decorate


def _listed(values: Mapping[str, Any]) -> str:
    texts = option_texts()
    entries = [f"{name} = {value!r}\n" + textwrap.indent(texts.get(name, ""), "    ") for name, value in values.items()]
    return "Options:\n" + textwrap.indent("\n".join(entries), "    ")


@functools.cache
def option_texts() -> Mapping[str, str]:
    """By option, the docstring of its field; empty where Python came without sources."""
    try:
        tree = ast.parse(inspect.getsource(config))
    except OSError:
        return {}
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "PrefillConfig")
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
