"""`explain()`: what the backend finds in a model, decides, and does with one prompt."""

from __future__ import annotations

import html
import inspect
import time
from pathlib import Path
from typing import Any, Unpack

import torch

from uniprefill_fx.api import options_for
from uniprefill_fx.config import PrefillConfig
from uniprefill_fx.frontends.cache_argument import cache_of
from uniprefill_fx.pipeline import Compilation
from uniprefill_fx.runtime.last_call import LastCall, watched
from uniprefill_fx.runtime.overrides import override
from uniprefill_fx.runtime.shown_options import Options, shows_options
from uniprefill_fx.tools import html_report
from uniprefill_fx.tools.answers import answers
from uniprefill_fx.tools.isolated import checked_prompt, isolated, takes
from uniprefill_fx.tools.report import Report
from uniprefill_fx.torch_internals import compiled_module


class Explanation(Report):
    """A `Report` that writes itself as a page and as a figure, and shows itself in a notebook."""

    __repr__ = Report.__str__

    def to_html(self, path: str | Path, tokenizer: Any = None) -> None:
        """Write the report as one page that needs nothing else; with a tokenizer, it shows the tokens' text."""
        page = html_report.page(self, tokenizer)
        Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")  # half a surrogate: JSON's escape

    def _repr_html_(self) -> str:
        page = html.escape(html_report.page(self))
        return (
            f'<iframe srcdoc="{page}" style="width: 100%; height: 800px; border: 0" title="uniprefill report"></iframe>'
        )

    def plot(self) -> Any:
        """A matplotlib `Figure` of what is kept where; `.savefig(path)` writes it. Needs matplotlib and a prompt."""
        return html_report.figure(self)


@shows_options(inner_backend="eager")
def explain(
    model: Any,
    input_ids: Any = None,
    /,
    *,
    call: dict[str, Any] | None = None,
    answer: int = 0,
    **options: Unpack[Options],
) -> Explanation:
    """Trace a model, run one prompt through it, and report what was found and what was dropped where.

    Nothing of this is kept: the model stays as it is, compiled or not.

    Args:
        model: a decoder. input_ids: its first argument, e.g. (1, tokens) int64.
        call: further keyword arguments of the call. `logits_to_keep=1` is added where the model knows it.
        answer: how many tokens are to follow the prompt, dense and dropped, for the report to compare; 0 for none.
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
    arguments = () if input_ids is None else (input_ids,)
    ids = kwargs.get("input_ids") if input_ids is None else input_ids
    ids = ids if isinstance(ids, torch.Tensor) and not ids.is_floating_point() else None
    repeatable = cache_of(kwargs) is None  # a cache that was handed in holds the prompt after one run
    if answer and (ids is None or ids.dim() != 2 or len(ids) != 1 or not repeatable):
        raise ValueError(f"answer={answer} needs one prompt of token ids, (1, tokens), and no cache of its own")

    def again(**changed: Any) -> tuple[LastCall | None, float]:
        began = time.perf_counter()
        with torch.inference_mode(), override(**changed):
            _, call = watched(lambda: run(*arguments, **kwargs))
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        return call, time.perf_counter() - began

    with torch.inference_mode():
        _, done = watched(lambda: run(*arguments, **kwargs))
    if not compilations:
        raise RuntimeError(
            "Dynamo handed over no graph: is the model's forward disabled for it (torch.compiler.disable, "
            'TORCH_COMPILE_DISABLE)? TORCH_LOGS="dynamo" says more.'
        )
    made, followed = tuple(compilations), None  # steps of the answer are no part of the report
    if answer and ids is not None:
        others = {name: value for name, value in kwargs.items() if name != "input_ids"}
        with torch.inference_mode():
            followed = answers(run, ids, others, answer)
    inside = compiled_module(model)
    inner = model if inside is None else inside
    name = inner.__name__ if inspect.isroutine(inner) else type(inner).__name__
    return Explanation(config, made, done, ids, name, followed, again if repeatable else None)
