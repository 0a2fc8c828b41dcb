"""Draw time to first token inside vLLM, stock and with dropping, from the JSON of `serve.py` (needs matplotlib).

python benchmarks/serve_plot.py benchmarks/results/serve_llama8b_h200.json --out docs/serve_llama8b_h200.png
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

from plot import Points, tick

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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    looks: dict[str, dict[str, Any]] = {
        "stock vLLM": {"color": "#c0392b", "marker": "s"},
        "uniprefill": {"color": "#1f6fb4", "marker": "o", "linewidth": 2},
    }
    lines = series(report)
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), label=name, markersize=5, **looks[name])
    for tokens, ratio in ratios(lines).items():
        at = (tokens, dict(lines["uniprefill"])[tokens])
        axes.annotate(f"{ratio:.2f}×", at, (0, -14), textcoords="offset points", ha="center", fontsize=8)
    ticks = sorted({tokens for points in lines.values() for tokens, _ in points if tokens % 1024 == 0})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [tick(n) for n in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("prompt tokens, one prompt alone")
    axes.set_ylabel("time to first token, ms")
    ours = report["ours"]
    of, kept = ours["arguments"], ours["keep_ratio"]
    title = f"{of['model']}, {of['layers']} layers, {ours['card']}, vLLM {ours['vllm']}"
    if of["tiny"]:
        title = "DRY RUN, NOT A RESULT"
    shares = ", ".join(f"{share:g}" for share in kept.values())
    axes.set_title(f"{title}\ntokens kept after layers {', '.join(kept)}: {shares}", fontsize=9)
    axes.margins(0.1)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=150)
    print(f"wrote {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="the JSON of serve.py")
    parser.add_argument("--out", type=Path, help="the PNG (default: beside the JSON)")
    args = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("matplotlib is not installed: no plot")
    draw(json.loads(args.report.read_text()), args.out or args.report.with_suffix(".png"))


if __name__ == "__main__":
    main()
