"""Thirty architectures with random weights through the backend, against a reference: docs/architectures.md.

    export PYTHONPATH=tests
    python benchmarks/architectures.py --out benchmarks/results/architectures_cpu.json --table docs/architectures.md
    python benchmarks/architectures.py --out /tmp/some.json --names llama gemma3n --jobs 1

For each of `tests/arch_builders.py`: prompts of three lengths, eight tokens by `generate()`, and a left-padded batch of
two prompts, dropping after every layer with full attention. The reference (`tests/arch_reference.py`) is the stock
model in which attention is hidden from what was dropped; it chooses the rows itself. A row is an error unless the kept
sets are the reference's and rows are gone. Differences are of logits, absolute, in float32 without an inner compiler.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

try:
    from arch_builders import ARCHS
except ModuleNotFoundError as error:
    if error.name != "arch_builders":
        raise
    raise SystemExit(
        "tests/arch_builders.py is not on the path: start this again from the checkout with PYTHONPATH=tests"
    ) from None

COLUMNS = (
    "architecture",
    "attention by layer",
    "drops after",
    "graphs for three lengths",
    "largest difference: prompts",
    "8 tokens of `generate()`",
    "left-padded batch",
    "dense, because",
)
HEAD = """# Architectures

Made by `benchmarks/architectures.py` from real runs{versions}: random weights, float32,
no inner compiler, tokens dropped after every layer with full attention. Each result is compared with a reference that
does not use this package's code: the stock model in which attention is hidden from the tokens that were dropped, which
it chooses itself. Kept sets are identical in every row, and differences are of logits.

"""


def measure(name: str) -> dict[str, Any]:
    """One row. Raises AssertionError where a result is not the reference's."""
    from prefill_tools import Watch
    from test_architectures import LENGTHS, Subject, assert_dropped_as, left_padded, prompt_ids

    import uniprefill_fx

    torch.set_num_threads(1)
    began, watch, subject = time.perf_counter(), Watch(), Subject(name)
    row: dict[str, Any] = {"name": name, "family": subject.arch.family}
    errors: dict[str, list[float]] = {"prompts": [], "generate": [], "batch": []}

    def compare(kind: str, got: Tensor, want: Tensor) -> None:
        errors[kind].append(float((got - want).abs().max()))

    for length in LENGTHS:
        got, call = subject.prefill(length)
        want = subject.expected(prompt_ids(length), length)
        if subject.arch.dense is None:
            assert_dropped_as(call, want, subject.arch, length)
        compare("prompts", got, want.logits)
    row["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    plan = next((c.plan for c in reversed(watch.found) if c.plan.prefill), None)
    kinds = {a.layer: a.kind for a in plan.attention_nodes} if plan else {}
    row["attention_nodes"] = [kinds.get(layer, "-") for layer in range(plan.num_layers)] if plan else []
    row["dropped_after"] = list(call.kept_indices)
    row["dense"] = None if call.reason is None else call.reason.category.value
    out = subject.generate(LENGTHS[0])
    compare("generate", torch.cat(out.logits), subject.expected(out.sequences[:, :-1], LENGTHS[0]).logits)
    lengths = LENGTHS[:2]
    ids, mask = left_padded(lengths)
    try:
        with torch.inference_mode():
            place = (mask.cumsum(1) - 1).clamp(min=0)
            given: dict[str, Any] = {"position_ids": place} if "position_ids" in _parameters(subject.model) else {}
            given |= {"logits_to_keep": 1} if subject.last_only else {}
            logits = subject.model(ids, attention_mask=mask, **given).logits[:, -1]
        call = uniprefill_fx.last_call()
        assert call is not None
        row["batch_dropped"] = call.dropped
        for r, length in enumerate(lengths):
            compare("batch", logits[r : r + 1], subject.expected(prompt_ids(length), length).logits)
    except Exception as error:  # a model that takes no padding says so in the table
        row["batch_error"] = f"{type(error).__name__}: {str(error)[:200]}"
    row |= {kind: max(found) for kind, found in errors.items() if found}
    row["seconds"] = round(time.perf_counter() - began, 1)
    return row


def _parameters(model: Any) -> Any:
    return inspect.signature(model.forward).parameters


def table(report: dict[str, Any]) -> str:
    """The page."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in sorted(report["rows"], key=lambda r: list(ARCHS).index(r["name"])):
        if "error" in row:
            lines.append(f"| {row['name']} | | | | | | | failed: {row['error']} |")
            continue
        attention_nodes = (
            ", ".join(f"{i}: {kind}" for i, kind in enumerate(row["attention_nodes"]) if kind != "-") or "none"
        )
        batch = f"{row['batch']:.1e}" if "batch" in row else "not run"
        if "batch" in row and not row.get("batch_dropped"):
            batch = "dense"
        cells = (row["name"], attention_nodes, ", ".join(map(str, row["dropped_after"])) or "-", str(row["graphs"]))
        numbers = (f"{row['prompts']:.1e}", f"{row['generate']:.1e}", batch, row["dense"] or "")
        lines.append(f"| {' | '.join(cells + numbers)} |")
    versions = f" (torch {report['torch']}, transformers {report['transformers']}, CPU, {report['date'][:10]})"
    return HEAD.format(versions=versions) + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; rows that it holds are not run again")
    parser.add_argument("--table", type=Path, help="Markdown page to write from it")
    parser.add_argument("--names", nargs="+", default=list(ARCHS), choices=list(ARCHS))
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": json.loads(args.out.read_text())["rows"] if args.out.exists() else [],
    }
    wanted = [name for name in args.names if name not in {row["name"] for row in report["rows"]}]
    pool = ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    with pool:
        tasks = {pool.submit(measure, name): name for name in wanted}
        for task in as_completed(tasks):
            try:
                row = task.result()
            except Exception as error:
                row = {"name": tasks[task], "error": f"{type(error).__name__}: {str(error)[:200]}"}
            report["rows"].append(row)
            print(f"{len(report['rows'])} of {len(args.names)}: {row}", flush=True)
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.table:
        args.table.write_text(table(report))


if __name__ == "__main__":
    main()
