"""Draw time to first token inside vLLM, stock and with dropping, from the JSON of `serve.py` (needs matplotlib).

python benchmarks/serve_plot.py benchmarks/results/serve_llama8b_h200.json --out docs/serve_llama8b_h200.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plot import Points, axes_of_times, main, save

NAMES = {"stock": "stock vLLM", "ours": "uniprefill"}


def series(report: dict[str, Any]) -> dict[str, Points]:
    """By line of the plot: (tokens, milliseconds), ascending; systems without a measurement are left out."""
    found = {
        name: sorted((row["tokens"], row["ms"]) for row in report[system].get("ttft", []))
        for system, name in NAMES.items()
        if system in report
    }
    return {name: points for name, points in found.items() if points}


def ratios(lines: dict[str, Points]) -> dict[int, float]:
    """By number of tokens that both were measured at: how many times faster the prompt is with dropping."""
    stock, ours = (dict(lines.get(name, [])) for name in NAMES.values())
    return {tokens: stock[tokens] / ms for tokens, ms in ours.items() if tokens in stock}


def draw(report: dict[str, Any], out: Path) -> None:
    looks: dict[str, dict[str, Any]] = {
        "stock vLLM": {"color": "#c0392b", "marker": "s"},
        "uniprefill": {"color": "#1f6fb4", "marker": "o", "linewidth": 2},
    }
    lines = series(report)
    measured = {tokens for points in lines.values() for tokens, _ in points}
    figure, axes = axes_of_times(sorted(tokens for tokens in measured if tokens % 1024 == 0))
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), label=name, markersize=5, **looks[name])
    for tokens, ratio in ratios(lines).items():
        at = (tokens, dict(lines["uniprefill"])[tokens])
        axes.annotate(f"{ratio:.2f}×", at, (0, -14), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xlabel("prompt tokens, one prompt alone")
    ours = report["ours"]
    of, kept = ours["arguments"], ours["keep_ratio"]
    title = f"{of['model']}, {of['layers']} layers, {ours['card']}, vLLM {ours['vllm']}"
    if of["tiny"]:
        title = "DRY RUN, NOT A RESULT"
    shares = ", ".join(f"{share:g}" for share in kept.values())
    axes.set_title(f"{title}\ntokens kept after layers {', '.join(kept)}: {shares}", fontsize=9)
    axes.margins(0.1)
    save(figure, axes, out)


if __name__ == "__main__":
    main(draw, __doc__, "the JSON of serve.py")
