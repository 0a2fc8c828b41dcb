"""A `Report` as one self-contained page, and as a figure: `Report.to_html()` and `Report.plot()`."""

from __future__ import annotations

import datetime
import json
from importlib import metadata, resources
from statistics import mean
from typing import Any

import jinja2
import torch
from torch import Tensor

from uniprefill_fx.config import auto_block_size
from uniprefill_fx.runtime.sparse_options import NAMES
from uniprefill_fx.tools.report import Report
from uniprefill_fx.tools.savings import Savings
from uniprefill_fx.tools.what_if import what_if

PARTS = ("page.html", "page.css", "page.js", "what_if.js")
"""The template, and what it includes."""
COLUMNS = 128
"""Most columns of a map; each stands for the same number of whole blocks."""
SHORT = 0.01
"""Seconds; passes that took less share one line."""
TEXT = 600
"""Most characters of a cell's text."""


def page(report: Report, tokenizer: Any = None) -> str:
    """The page: layers, map of kept tokens, density of block-sparse attention, figures, passes and graphs.

    `tokenizer`: anything with `decode(list of ids)`; then each cell of the map has its tokens' text.
    """
    files = resources.files("uniprefill_fx.tools") / "page"
    parts = {name: (files / name).read_text(encoding="utf-8") for name in PARTS}
    shown = contents(report, tokenizer)
    # "<" never appears in the data, so that no text of a prompt can end the script element
    data = json.dumps(shown, ensure_ascii=False).replace("<", "\\u003c")
    environment = jinja2.Environment(loader=jinja2.DictLoader(parts), autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template(PARTS[0]).render(shown, data=data)


def contents(report: Report, tokenizer: Any = None) -> dict[str, Any]:
    """What the page shows, fit for JSON."""
    plan, call = report.plan, report.call
    savings = report.savings
    graphs = [("Traced by Dynamo, before", _code(report.before))]
    if report.after is not None:
        graphs.append(("Rewritten, after", _code(report.after)))
    tokens = None if call is None else call.tokens
    options = ", ".join(f"{name}={value!r}" for name, value in _chosen(report).items())
    version = metadata.version("uniprefill-fx")
    return {
        "title": f"{report.model}: {plan.num_layers} layers, "
        + (f"{tokens:,} tokens" if tokens else "length not known"),
        "made": f"{datetime.date.today().isoformat()}, uniprefill-fx {version}, torch {torch.__version__}",
        "headline": report.headline,
        "dropped": call is not None and call.dropped,
        "about": options,
        "figures": _figures(report, savings),
        "layers": _layers(report, savings),
        "refusals": [str(refusal) for refusal in report.refusals],
        "maps": [_map(report, r, kept, tokenizer) for r, kept in enumerate(_requests(report))],
        "passes": _passes(report.decoder.seconds),
        "graphs": graphs,
        "answers": _answers(report, tokenizer),
        "what_if": what_if(report, tokenizer),
    }


def _answers(report: Report, tokenizer: Any) -> dict[str, Any] | None:
    """Token by token, so that the page can mark those that differ."""
    found = report.answers
    if found is None:
        return None
    texts = {
        name: [f"{i} " if tokenizer is None else str(tokenizer.decode([i])) for i in ids]
        for name, ids in (("dense", found.dense), ("dropped", found.dropped))
    }
    return texts | {"kl": found.kl}


def _passes(seconds: dict[str, float]) -> list[tuple[str, float]]:
    """Name and time of each pass; the short ones together at the end."""
    short = [s for s in seconds.values() if s < SHORT]
    shown = [(name, s) for name, s in seconds.items() if s >= SHORT]
    return [*shown, (f"{len(short)} others, each below {SHORT} s", sum(short))] if short else shown


def _percent(share: float) -> str:
    return f"{round(share, 2) + 0.0:.0%}"  # + 0.0: never "-0%"


def _chosen(report: Report) -> dict[str, Any]:
    """The options that say how much is kept, with what `override()` changed."""
    names = ("p", "keep_ratio", "block_size", "last_n", "sink_tokens", "drop_layers", "window")
    options = {name: getattr(report.config, name) for name in names}
    if report.config.attention == "block_sparse":
        options |= {name: getattr(report.config, name) for name in ("attention", "attention_dtype", *NAMES)}
    changed = report.call.changed if report.call is not None else {}
    if "p" in changed or ("keep_ratio" not in changed and options["keep_ratio"] is None):
        options["keep_ratio"] = None
    else:
        options["p"] = None
    options |= changed
    return {name: value for name, value in options.items() if value is not None}


def _figures(report: Report, savings: Savings | None) -> list[tuple[str, str]]:
    call = report.call
    if call is None or savings is None:
        return []
    dense = sum(savings.dense_flops.values())
    density = list(call.density.values())
    return [
        ("of the tokens saved, averaged over layers", _percent(1 - call.compute_fraction)),
        *(
            [("of the blocks of keys saved, where attention is block-sparse", _percent(1 - mean(density)))]
            if density
            else []
        ),
        (f"of {dense / 1e9:,.2f} GFLOP saved (estimate)", _percent(savings.flops_saved)),
        (f"of {savings.dense_kv_bytes / 2**20:,.1f} MiB of keys and values saved", _percent(savings.kv_saved)),
    ]


def _layers(report: Report, savings: Savings | None) -> list[dict[str, Any]]:
    plan, call = report.plan, report.call
    amounts = report.amounts
    attention_nodes = {attention.layer: attention for attention in plan.attention_nodes}
    refused = {refusal.layer: str(refusal) for refusal in plan.refusals if refusal.layer is not None}
    out = []
    for layer in range(plan.num_layers):
        attention, rows = attention_nodes.get(layer), _rows(report, layer)
        decision = None
        if layer in amounts:
            kept = (
                f": {len(call.kept_indices[layer]):,} kept" if call is not None and layer in call.kept_indices else ""
            )
            decision = ("" if kept else "planned: ") + amounts[layer] + kept
        out.append(
            {
                "index": layer,
                "attention": "no attention" if attention is None else attention.kind,
                "rows": rows,
                "density": call.density.get(layer) if call is not None else None,
                "share": rows / call.tokens if call is not None and call.tokens and rows is not None else None,
                "drop": decision,
                "dropped": call is not None
                and layer in call.kept_indices
                and len(call.kept_indices[layer]) < call.num_tokens[layer],
                "refused": refused.get(layer),
                "scoring": savings is not None and savings.flops.get(layer, 0.0) > savings.dense_flops.get(layer, 0.0),
                "gflop": savings.flops.get(layer, 0.0) / 1e9 if savings is not None else None,
                "dense_gflop": savings.dense_flops.get(layer, 0.0) / 1e9 if savings is not None else None,
            }
        )
    return out


def _rows(report: Report, layer: int) -> int | None:
    call = report.call
    if call is None or call.tokens is None:
        return None
    return call.num_tokens[layer] if call.num_tokens else call.tokens


def _requests(report: Report) -> list[dict[int, Tensor]]:
    """For each prompt of the call: by drop layer, the columns of the input that stayed."""
    call = report.call
    if call is None or call.tokens is None:
        return []
    return [
        {
            layer: rows[call.cu_seqlens[layer][r] : call.cu_seqlens[layer][r + 1]]
            for layer, rows in call.kept_indices.items()
        }
        for r in range(len(call.token_bounds))
    ]


def _map(report: Report, request: int, kept: dict[int, Tensor], tokenizer: Any) -> dict[str, Any]:
    """By layer and column: the share of the column's tokens that enter the layer (padding: up to the first drop)."""
    call = report.call
    assert call is not None and call.columns is not None
    tokens = call.columns
    block_size = _chosen(report)["block_size"]
    width = column_width(tokens, auto_block_size(tokens) if block_size == "auto" else block_size)
    texts = None
    if (
        tokenizer is not None
        and report.input_ids is not None
        and report.input_ids.numel() == tokens * len(call.token_bounds)
    ):
        ids = report.input_ids.reshape(-1, tokens)[request].tolist()
        texts = [str(tokenizer.decode(ids[i : i + width]))[:TEXT] for i in range(0, len(ids), width)]
    rows = kept_map(report.plan.num_layers, tokens, kept, width)
    return {"tokens": tokens, "width": width, "rows": [[round(x, 3) for x in row] for row in rows], "texts": texts}


def column_width(tokens: int, block_size: int) -> int:
    """Tokens of a column: whole blocks, as few as fit `COLUMNS`."""
    blocks = -(-tokens // block_size)
    return block_size * -(-blocks // COLUMNS)


def kept_map(num_layers: int, tokens: int, kept: dict[int, Tensor], width: int) -> list[list[float]]:
    """[layers][columns]: share of each column's tokens among the rows that enter each layer."""
    columns = -(-tokens // width)
    sizes = torch.bincount(torch.arange(tokens) // width, minlength=columns)
    shares = torch.ones(columns, dtype=torch.float64)
    out = []
    for layer in range(num_layers):
        out.append(shares.tolist())
        if layer in kept:
            shares = torch.bincount(kept[layer].cpu() // width, minlength=columns) / sizes.double()
    return out


def _code(gm: Any) -> str:
    return str(gm.print_readable(print_output=False))


def figure(report: Report) -> Any:
    """A matplotlib figure: the map of kept tokens (of a batch's first prompt), and rows by layer.

    Raises:
        ImportError: matplotlib is not installed. ValueError: the report holds no prompt.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("plot() needs matplotlib: pip install matplotlib") from error

    call = report.call
    if call is None or call.tokens is None:
        raise ValueError("the report holds no prompt whose tokens are known; pass one to explain()")
    shown = _map(report, 0, _requests(report)[0], None)
    layers = report.plan.num_layers
    drawn = Figure(figsize=(10, 1.5 + 0.16 * max(layers, 12)), layout="constrained")
    left, right = drawn.subplots(1, 2, width_ratios=(4, 1), sharey=True)
    edges = (0, shown["tokens"], layers - 0.5, -0.5)
    left.imshow(shown["rows"], aspect="auto", interpolation="nearest", extent=edges, cmap="Blues", vmin=0, vmax=1)
    for layer in call.kept_indices:
        for axes in (left, right):
            axes.axhline(layer + 0.5, color="#c0392b", linewidth=1)
    left.set_xlabel("token")
    left.set_ylabel("layer")
    left.yaxis.set_major_locator(MaxNLocator(integer=True))
    right.barh(range(layers), [_rows(report, layer) or 0 for layer in range(layers)], color="#1f6fb4")
    right.set_xlabel("rows")
    options = ", ".join(f"{name}={value}" for name, value in _chosen(report).items() if name in ("p", "keep_ratio"))
    ran = f"compute {call.compute_fraction:.2f} of dense" if call.dropped else "dense"
    red = "; red: tokens are dropped" if call.kept_indices else ""
    drawn.suptitle(f"{call.tokens:,} tokens, {options}, {ran}{red}", fontsize=10)
    return drawn
