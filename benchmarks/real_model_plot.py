"""Draw KL against compute, and against time to the first token, from the JSON of `real_model.py` (needs matplotlib).

python benchmarks/real_model_plot.py benchmarks/results/real_model_gemma270m.json --out docs/real_model.png
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_model_table import Cell, by_cell, mean, read, records, times_of

from uniprefill_fx.config import PRESETS

ONE_P, TWO_P, PRESET = "#888888", "#1f6fb4", "#c0392b"


@dataclass(frozen=True)
class Point:
    """A setting at one length: mean compute, milliseconds to the first token (None: not timed), and KL over prompts."""

    setting: str
    compute: float
    ms: float | None
    median: float
    worst: float


def points(reports: Sequence[dict[str, Any]], tokens: int) -> list[Point]:
    """By rising compute, without p = 1."""
    found, times = [], times_of(reports).get(tokens, {})
    for cell, own in by_cell(records(reports)).items():
        if cell == Cell("text", tokens, cell.setting) and cell.setting != "p=1":
            kl = [record["kl_all"] for record in own]
            ms = mean(times[cell.setting]) if cell.setting in times else None
            compute = mean([record["compute"] for record in own])
            found.append(Point(cell.setting, compute, ms, statistics.median(kl), max(kl)))
    return sorted(found, key=lambda point: point.compute)


def look(setting: str) -> tuple[str, str]:
    if setting in PRESETS:
        return PRESET, "D"
    return (TWO_P, "o") if ".." in setting else (ONE_P, "s")


def draw(reports: Sequence[dict[str, Any]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = sorted({record["tokens"] for record in records(reports) if record["part"] == "text"})
    rows = 2 if times_of(reports) else 1
    figure, axes = pyplot.subplots(
        rows, len(lengths), figsize=(3.5 * len(lengths), 3.1 * rows), layout="constrained", squeeze=False, sharey=True
    )
    for column, tokens in enumerate(lengths):
        own, dense = points(reports, tokens), mean(times_of(reports).get(tokens, {}).get("dense", [float("nan")]))
        for row in range(rows):
            axis = axes[row, column]
            for point in own:
                at = point.compute if row == 0 else point.ms
                if at is None:
                    continue
                color, marker = look(point.setting)
                axis.plot([at, at], [point.median, point.worst], color=color, alpha=0.3, linewidth=1)
                axis.plot(at, point.median, color=color, marker=marker, markersize=6 if color == PRESET else 4)
                if color == PRESET:
                    beside = {"xytext": (5, 3), "textcoords": "offset points", "fontsize": 7}
                    axis.annotate(point.setting, (at, point.median), **beside)
            axis.set_yscale("log")
            axis.grid(alpha=0.3)
            axis.set_xlabel("compute, of dense" if row == 0 else "first token, ms", fontsize=8)
            if row == 1:
                axis.axvline(dense, color="black", linewidth=1)
                axis.annotate("dense", (dense, 1), xytext=(-4, 0), textcoords="offset points", ha="right", fontsize=7)
        axes[0, column].set_title(f"{tokens:,} tokens", fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel("KL from dense, 64 positions", fontsize=8)
    for color, label, marker in ((ONE_P, "one p", "s"), (TWO_P, "strict, then loose", "o"), (PRESET, "presets", "D")):
        axes[0, 0].plot([], [], color=color, marker=marker, linestyle="", label=label)
    axes[0, 0].legend(fontsize=7)
    run = reports[0]
    figure.suptitle(
        f"{run['model']}, {run['machine']}, {run['dtype']}: median over prompts, lines up to the worst one", fontsize=9
    )
    figure.savefig(out, dpi=130)
    print(f"wrote {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="the PNG")
    args = parser.parse_args()
    draw(read(args.reports), args.out)


if __name__ == "__main__":
    main()
