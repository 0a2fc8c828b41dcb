"""Draw accuracy and KL against compute from the JSON of `accuracy.py` (needs matplotlib).

python benchmarks/accuracy_plot.py benchmarks/results/accuracy_h200.json --out docs/accuracy.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

LOOKS: dict[str, dict[str, Any]] = {
    "uniprefill": {"color": "#1f6fb4", "marker": "o", "linewidth": 2},
    "mean": {"color": "#2e8b57", "marker": "v"},
    "sinks+last": {"color": "#c0392b", "marker": "s"},
    "random": {"color": "#888888", "marker": "x"},
}
NAMES = {"mean": "blocks by mean key", "sinks+last": "first and last tokens", "random": "random blocks"}
PANELS = (
    ("needle-llama", "first"),
    ("needle-llama", "auto"),
    ("needle-gemma3", "auto"),
    ("needle-qwen3-next", "auto"),
)


def curves(rows: list[dict[str, Any]], model: str, layers: str) -> dict[str, list[tuple[float, float, float]]]:
    """By way of choosing tokens: (compute, right %, mean KL), from the cells where all ways were tried."""
    chosen = [
        r for r in rows if (r["model"], r["layers"], r["window"], r["place"]) == (model, layers, "position", "in")
    ]
    cells = {(r["tokens"], r["pairs"]) for r in chosen if " as p=" in r["setting"]}
    sums: dict[tuple[str, float], list[float]] = {}
    for row in chosen:
        if (row["tokens"], row["pairs"]) not in cells:
            continue
        way, _, p = row["setting"].replace("p=", "uniprefill as p=", not row["setting"].count(" ")).partition(" as p=")
        if way in LOOKS:
            total = sums.setdefault((way, float(p)), [0.0] * 4)
            for i, name in enumerate(("n", "compute_sum", "exact", "kl_sum")):
                total[i] += row[name]
    out: dict[str, list[tuple[float, float, float]]] = {}
    for (way, _), (n, compute, exact, kl) in sorted(sums.items()):
        out.setdefault(way, []).append((compute / n, 100 * exact / n, kl / n))
    return out


def draw(report: dict[str, Any], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [(panel, found) for panel in PANELS if (found := curves(report["rows"], *panel))]
    figure, axes = pyplot.subplots(
        2, len(shown), figsize=(3.4 * len(shown), 5.6), layout="constrained", squeeze=False, sharey="row"
    )
    for (above, below), ((model, layers), found) in zip(axes.T, shown, strict=True):
        for way, look in LOOKS.items():
            compute, right, kl = zip(*sorted(found.get(way, [(float("nan"),) * 3])), strict=True)
            above.plot(compute, right, label=NAMES.get(way, way), markersize=4, **look)
            below.plot(compute, [max(value, 1e-7) for value in kl], markersize=4, **look)
        above.set_title(f"{model}, drop layers: {layers}", fontsize=9)
        below.set_yscale("log")
        below.set_xlabel("compute (kept fraction, averaged over layers)", fontsize=8)
        for axis in (above, below):
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("right answers, %")
    axes[1, 0].set_ylabel("mean KL from dense (1e-7: less)")
    axes[0, 0].legend(fontsize=7)
    run = report["runs"][-1]
    figure.suptitle(f"Needle checkpoints, {run['device']}, {run['dtype']}, torch {run['torch']}", fontsize=10)
    figure.savefig(out, dpi=130)
    print(f"wrote {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--out", type=Path, help="the PNG (default: beside the JSON)")
    args = parser.parse_args()
    draw(json.loads(args.report.read_text()), args.out or args.report.with_suffix(".png"))


if __name__ == "__main__":
    main()
