"""Draw time to first token against prompt length from the JSON of `prefill.py` (needs matplotlib).

python benchmarks/plot.py benchmarks/results/prefill.json             # writes prefill.png beside it
python benchmarks/plot.py benchmarks/results/prefill.json --out x.png
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Points = list[tuple[int, float]]


def series(report: dict[str, Any]) -> dict[str, Points]:
    """By line of the plot: (tokens, milliseconds), where measured."""

    def measured(name: str) -> Points:
        return [(r["tokens"], r[name]["ms"]) for r in report["results"] if name in r]

    limits = [(r["tokens"], r.get("limit_exact_ms", r.get("limit_ms"))) for r in report["results"]]
    return {
        "dense": measured("dense"),
        "stock torch.compile": measured("stock"),
        "uniprefill": measured("uniprefill"),
        "limit": [(tokens, ms) for tokens, ms in limits if ms is not None],
    }


def tick(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"


def axes_of_times(lengths: Sequence[int]) -> tuple[Any, Any]:
    """A figure and its axes: prompt tokens against milliseconds to the first token, both logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [tick(n) for n in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_ylabel("time to first token, ms")
    axes.grid(alpha=0.3)
    return figure, axes


def save(figure: Any, axes: Any, out: Path) -> None:
    axes.legend()
    figure.savefig(out, dpi=150)
    print(f"wrote {out}")


def draw(report: dict[str, Any], out: Path) -> None:
    looks = {
        "dense": {"color": "#444444", "marker": "o"},
        "stock torch.compile": {"color": "#c0392b", "marker": "s"},
        "uniprefill": {"color": "#1f6fb4", "marker": "o", "linewidth": 2},
        "limit": {"color": "#1f6fb4", "linestyle": ":", "marker": ""},
    }
    figure, axes = axes_of_times([r["tokens"] for r in report["results"]])
    for name, points in series(report).items():
        if points:
            axes.plot(*zip(*sorted(points), strict=True), label=name, markersize=5, **looks[name])
    axes.set_xlabel("prompt tokens")
    layers = report["model"]["num_hidden_layers"]
    kept = ", ".join(f"{k:g}" for k in report["options"]["keep_ratio"])
    title = f"Llama-3.1-8B shape, {layers} layers, {report['card']}, torch {report['torch']}"
    if report["dry_run"]:
        title = "DRY RUN, NOT A RESULT"
    axes.set_title(f"{title}\ntokens kept after layers {report['options']['drop_layers']}: {kept}", fontsize=9)
    save(figure, axes, out)


def main(draw: Callable[[dict[str, Any], Path], None], about: str | None, report: str) -> None:
    """The command line of a script that draws one JSON."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help=report)
    parser.add_argument("--out", type=Path, help="the PNG (default: beside the JSON)")
    args = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("matplotlib is not installed: no plot")
    draw(json.loads(args.report.read_text()), args.out or args.report.with_suffix(".png"))


if __name__ == "__main__":
    main(draw, __doc__, "prefill.json")
