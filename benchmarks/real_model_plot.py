"""Draw KL against compute, and against time to the first token, from the JSON of `real_model.py` (needs matplotlib).

python benchmarks/real_model_plot.py benchmarks/results/real_model_gemma270m.json --out docs/real_model.png --axes time
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

AXES = ("compute", "time")
ONE_P, TWO_P, PRESET = "#888888", "#1f6fb4", "#c0392b"


@dataclass(frozen=True)
class Point:
    """A setting at one length: mean compute, median milliseconds to the first token (None: not timed), and KL over
    prompts."""

    setting: str
    compute: float
    ms: float | None
    median: float
    worst: float


def points(reports: Sequence[dict[str, Any]], tokens: int) -> list[Point]:
    """By rising compute, without p = 1, and without settings that time ran out for on some prompts."""
    found, times = [], times_of(reports).get(tokens, {})
    cells = by_cell(records(reports))
    most = max(len(own) for cell, own in cells.items() if (cell.part, cell.tokens) == ("text", tokens))
    for cell, own in cells.items():
        if cell == Cell("text", tokens, cell.setting) and cell.setting != "p=1" and len(own) == most:
            kl = [record["kl_all"] for record in own]
            ms = statistics.median(times[cell.setting]) if cell.setting in times else None
            compute = mean([record["compute"] for record in own])
            found.append(Point(cell.setting, compute, ms, statistics.median(kl), max(kl)))
    return sorted(found, key=lambda point: point.compute)


def look(setting: str) -> tuple[str, str]:
    if setting in PRESETS:
        return PRESET, "D"
    return (TWO_P, "o") if ".." in setting else (ONE_P, "s")


def draw(reports: Sequence[dict[str, Any]], out: Path, axes: Sequence[str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = sorted({record["tokens"] for record in records(reports) if record["part"] == "text"})
    size = (3 * len(lengths), 3.1 * len(axes))
    figure, panels = pyplot.subplots(
        len(axes), len(lengths), figsize=size, layout="constrained", squeeze=False, sharex="row", sharey=True
    )
    for column, tokens in enumerate(lengths):
        for kind, panel in zip(axes, panels[:, column], strict=True):
            _fill(panel, kind, points(reports, tokens))
            if kind == "time" and tokens in times_of(reports):
                dense = statistics.median(times_of(reports)[tokens]["dense"])
                panel.axvline(dense, color="black", linewidth=1)
                beside = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 7}
                panel.annotate("dense", (dense, 0), xycoords=("data", "axes fraction"), **beside)
        panels[0, column].set_title(f"{tokens:,} tokens", fontsize=9)
    for kind, row in zip(axes, panels, strict=True):
        if kind == "time":
            row[0].set_xlim(left=0, right=1.1 * row[0].get_xlim()[1])
    for panel in panels[:, 0]:
        panel.set_ylabel("KL from dense, 64 positions", fontsize=8)
    for color, label, marker in ((ONE_P, "one p", "s"), (TWO_P, "strict, then loose", "o"), (PRESET, "presets", "D")):
        panels[0, 0].plot([], [], color=color, marker=marker, linestyle="", label=label)
    panels[0, 0].legend(fontsize=7)
    run = reports[0]
    figure.suptitle(
        f"{run['model']}, {run['machine']}, {run['dtype']}: median over prompts, lines up to the worst one", fontsize=9
    )
    figure.savefig(out, dpi=130)
    print(f"wrote {out}")


def _fill(panel: Any, kind: str, found: Sequence[Point]) -> None:
    """KL of each setting, by compute or by time."""
    for point in found:
        at = point.compute if kind == "compute" else point.ms
        if at is None:
            continue
        color, marker = look(point.setting)
        panel.plot([at, at], [point.median, point.worst], color=color, alpha=0.3, linewidth=1)
        panel.plot(at, point.median, color=color, marker=marker, markersize=6 if color == PRESET else 4)
        if color == PRESET:
            beside = {"xytext": (5, 3), "textcoords": "offset points", "fontsize": 7}
            panel.annotate(point.setting, (at, point.median), **beside)
    panel.set_yscale("log")
    panel.grid(alpha=0.3)
    panel.set_xlabel("compute, of dense" if kind == "compute" else "milliseconds to the first token", fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="the PNG")
    parser.add_argument("--axes", nargs="+", choices=AXES, default=AXES, help="a row for each (%(default)s)")
    args = parser.parse_args()
    draw(read(args.reports), args.out, args.axes)


if __name__ == "__main__":
    main()
