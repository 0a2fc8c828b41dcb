"""The tables of `real_model.py`: by length and setting, means over prompts with 95% intervals; of times, medians."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from real_model_tools import bootstrap, paired_ratio

TASKS = ("passkey", "multikey")

Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    part: str
    tokens: int
    setting: str


def read(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The runs that files hold, one or a list of them each."""
    found: list[dict[str, Any]] = []
    for file in files:
        held = json.loads(file.read_text())
        found += held if isinstance(held, list) else [held]
    return found


def records(reports: Sequence[dict[str, Any]]) -> Records:
    """Of several runs, each prompt of a setting once: the first run that has it."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for report in reports:
        for row in report["records"]:
            record = dict(zip(report["columns"], row, strict=True))
            found.setdefault(tuple(record[name] for name in ("part", "tokens", "kind", "prompt", "setting")), record)
    return list(found.values())


def by_cell(found: Records) -> dict[Cell, Records]:
    cells: dict[Cell, Records] = defaultdict(list)
    for record in found:
        cells[Cell(record["part"], record["tokens"], record["setting"])].append(record)
    return dict(cells)


def times_of(reports: Sequence[dict[str, Any]], kind: str = "ms") -> dict[int, dict[str, list[float]]]:
    """By length and setting, the milliseconds of each prompt; of several runs, the last one's. kind: "ms" or
    "host_ms"."""
    merged: dict[int, dict[str, list[float]]] = {}
    for report in reports:
        for tokens, own in report["times"].items():
            merged[int(tokens)] = {setting: found[kind] for setting, found in own.items()}
    return merged


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def tables(reports: Sequence[dict[str, Any]]) -> str:
    cells, times = by_cell(records(reports)), times_of(reports)
    heads = {
        f"{r['model']}, {r['machine']}, {r['dtype']}, torch {r['torch']}, transformers {r['transformers']}, "
        f"{r['inner_backend']}, blocks of {r['block_size']}, {r['date']}"
        for r in reports
    }
    host = times_of(reports, "host_ms")
    parts = [_settings(cells, times, host), _variants(cells), _needles(cells), _calibrated(cells, reports)]
    return "\n\n".join([*sorted(heads), *(part for part in parts if part)])


Times = dict[int, dict[str, list[float]]]


def _settings(cells: dict[Cell, Records], times: Times, host: Times) -> str:
    lines = [
        "| tokens | setting | n | KL, next token | KL, 64 positions | median | worst | top-1 | top-1, 64 | kept "
        "| compute | first token, ms | of it the host | of dense | of stock |",
        "|---" * 15 + "|",
    ]
    for tokens in sorted({cell.tokens for cell in cells if cell.part == "text"} | set(times)):
        timed = times.get(tokens, {})
        names = [cell.setting for cell in cells if (cell.part, cell.tokens) == ("text", tokens)]
        for name in [*(n for n in timed if n not in names), *names]:
            own = cells.get(Cell("text", tokens, name), [])
            row = [f"{tokens:,}", name, str(len(own)) if own else ""]
            if own:
                kept = [mean([r["kept"][i] for r in own]) for i in range(len(own[0]["kept"]))]
                row += [str(bootstrap([r[kind] for r in own])) for kind in ("kl", "kl_all")]
                each = [r["kl_all"] for r in own]
                row += [f"{median(each):.2g}", f"{max(each):.2g}"]
                row += [f"{mean([r['top1'] for r in own]):.2f}", f"{bootstrap([r['top1_all'] for r in own]):.3f}"]
                row += [", ".join(f"{share:.2f}" for share in kept), f"{mean([r['compute'] for r in own]):.2f}"]
            else:
                row += [""] * 8
            ms = timed.get(name)
            row += [f"{median(ms):.1f}", f"{median(host[tokens][name]):.1f}"] if ms else ["", ""]
            for base in ("dense", "stock"):
                row += [f"{median(ms) / median(timed[base]):.2f}" if ms and base in timed else ""]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _variants(cells: dict[Cell, Records]) -> str:
    """Each way to select beside the published scores on the same prompts of all lengths, with as many rows."""
    lines = [
        "| like | compute | scores | n | KL, next token | KL, 64 positions | next, of the sum's | 64, of the sum's "
        "| top-1, 64 |",
        "|---" * 9 + "|",
    ]
    found: dict[tuple[str, str], Records] = defaultdict(list)
    for cell, own in cells.items():
        if cell.part == "variants":
            name, _, like = cell.setting.partition(" like ")
            found[like, name] += own
    for (like, name), own in sorted(found.items(), key=lambda item: item[0][0]):
        base = {(r["tokens"], r["kind"], r["prompt"]): r for r in found[like, "sum"]}
        same = [base[r["tokens"], r["kind"], r["prompt"]] for r in own]
        ratios = [str(paired_ratio([r[kl] for r in own], [r[kl] for r in same])) for kl in ("kl", "kl_all")]
        lines.append(
            f"| {like} | {mean([r['compute'] for r in own]):.2f} | {name} | {len(own)} "
            f"| {mean([r['kl'] for r in own]):.2g} | {mean([r['kl_all'] for r in own]):.2g} | {' | '.join(ratios)} "
            f"| {mean([r['top1_all'] for r in own]):.3f} |"
        )
    return "\n".join(lines) if len(lines) > 2 else ""


def _needles(cells: dict[Cell, Records]) -> str:
    """Right answers, and those that only dense had, by task and length."""
    lines = ["| task | tokens | setting | n | right | lost of dense's | compute |", "|---" * 7 + "|"]
    for cell, own in cells.items():
        if cell.part not in TASKS:
            continue
        dense = {r["prompt"]: r["right"] for r in cells[Cell(cell.part, cell.tokens, "dense")]}
        before = [dense[r["prompt"]] for r in own]
        lost = sum(was > r["right"] for was, r in zip(before, own, strict=True))
        lines.append(
            f"| {cell.part} | {cell.tokens:,} | {cell.setting} | {len(own)} | {sum(r['right'] for r in own):.0f} "
            f"| {lost} of {sum(before):.0f} | {mean([r['compute'] for r in own]):.2f} |"
        )
    return "\n".join(lines) if len(lines) > 2 else ""


def _calibrated(cells: dict[Cell, Records], reports: Sequence[dict[str, Any]]) -> str:
    """What `calibrate()` promised on one kind of text, and what it cost on the others."""
    lines = [
        "| tokens | calibrated on | budget | p | KL there, its bound | compute there | n, other kinds | KL, next token "
        "| KL, 64 positions | compute |",
        "|---" * 10 + "|",
    ]
    for found in (found for report in reports for found in report.get("calibrations", ())):
        part = f"calibrated on {found['kind']}"
        own = [r for cell, rs in cells.items() if (cell.part, cell.tokens) == (part, found["tokens"]) for r in rs]
        p = ", ".join(f"{p:g}" for p in found["p"])
        lines.append(
            f"| {found['tokens']:,} | {found['kind']} | {found['max_kl']:g} | {p} "
            f"| {found['kl']:.2g}, {found['bound']:.2g} | {found['compute']:.2f} | {len(own)} "
            + "".join(f"| {bootstrap([r[kl] for r in own])} " for kl in ("kl", "kl_all"))
            + f"| {mean([r['compute'] for r in own]):.2f} |"
        )
    return "\n".join(lines) if len(lines) > 2 else ""
