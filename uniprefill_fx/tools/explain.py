"""`explain()`: what the backend finds in a model, decides, and does with one prompt."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Unpack

import torch

from uniprefill_fx.api import options_for
from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.pipeline import Compilation
from uniprefill_fx.runtime.last_call import watched
from uniprefill_fx.runtime.shown_options import Options, shows_options
from uniprefill_fx.tools import html_report
from uniprefill_fx.tools.isolated import checked_prompt, isolated, takes
from uniprefill_fx.tools.report import Report
from uniprefill_fx.torch_internals import compiled_module


class Explanation(Report):
    """A `Report` that writes itself as a page and as a figure."""

    def to_html(self, path: str | Path, tokenizer: Any = None) -> None:
        """Write the report as one page that needs nothing else; with a tokenizer, it shows the tokens' text."""
        page = html_report.page(self, tokenizer)
        Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")  # half a surrogate: JSON's escape

    def plot(self) -> Any:
        """A matplotlib `Figure` of what is kept where; `.savefig(path)` writes it. Needs matplotlib and a prompt."""
        return html_report.figure(self)


@shows_options(inner_backend="eager")
def explain(
    model: Any, input_ids: Any = None, /, *, call: dict[str, Any] | None = None, **options: Unpack[Options]
) -> Explanation:
    """Trace a model, run one prompt through it, and report what was found and what was dropped where.

    Nothing of this is kept: the model stays as it is, compiled or not.

    Args:
        model: a decoder. input_ids: its first argument, e.g. (1, tokens) int64.
        call: further keyword arguments of the call. `logits_to_keep=1` is added where the model knows it.
        options: as for `uniprefill_fx.compile`; `inner_backend` is "eager" unless given.

    Raises:
        OptionError: an unknown option or a bad value. TypeError, ValueError: no model, or no prompt for it.
        RuntimeError: Dynamo handed over no graph.
    """
    checked_prompt(model, input_ids)
    config = PrefillConfig.from_options({"inner_backend": "eager", **options_for(model, options)})
    compilations: list[Compilation] = []

    run = isolated(model, config, compilations.append)
    kwargs = dict(call or {})
    if takes(model, "logits_to_keep"):
        kwargs.setdefault("logits_to_keep", 1)
    with torch.inference_mode():
        _, done = watched(lambda: run(*(() if input_ids is None else (input_ids,)), **kwargs))
    if not compilations:
        raise RuntimeError(
            "Dynamo handed over no graph: is the model's forward disabled for it (torch.compiler.disable, "
            'TORCH_COMPILE_DISABLE)? TORCH_LOGS="dynamo" says more.'
        )
    ids = kwargs.get("input_ids") if input_ids is None else input_ids
    ids = ids if isinstance(ids, torch.Tensor) and not ids.is_floating_point() else None
    inside = compiled_module(model)
    inner = model if inside is None else inside
    name = inner.__name__ if inspect.isroutine(inner) else type(inner).__name__
    return Explanation(config, tuple(compilations), done, ids, name)
