"""Every text decoder of transformers, tiny and random, through the backend, against a reference: docs/architectures.md.

    export PYTHONPATH=tests
    python benchmarks/architectures.py --out benchmarks/results/architectures_cpu.json --table docs/architectures.md
    python benchmarks/architectures.py --out /tmp/some.json --names llama gemma3n_text

The families are those of transformers' auto-mapping and some variants (`tests/arch_walk.py`, `tests/arch_builders.py`);
what is measured of each, and what it is compared with, is in `tests/arch_measure.py`. Rows that the file holds are not
run again unless they are named. A family that raises, or takes more than `--timeout` seconds, is a row that says so.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

try:
    from arch_measure import CALLS, EXACT, FAILS, GENERATE, NOT_RUN, RANKS, WrongError, measure, quiet, rows
except ModuleNotFoundError as error:
    if error.name != "arch_measure":
        raise
    raise SystemExit(
        "tests/arch_measure.py is not on the path: start this again from the checkout with PYTHONPATH=tests"
    ) from None

COLUMNS = ("family", "works?", "result", "drops after", "by default", "tokens lost", "largest difference", "reason")
HEAD = """# Architectures

Every causal language model that transformers' auto-mapping names, and some variants: made by
`benchmarks/architectures.py` from real runs{versions}.
Models are tiny, with random weights that make attention prefer some tokens, in float32 without an inner compiler.
Of each, prompts of two lengths drop after every layer with full attention, and `generate()` drops after the layers
that `drop_layers="auto"` picks.

**Works?** in one word: *yes*, *partly* (calls or `generate()` alone), or *no*. A *no* with the result "dense" still
runs and is right, only not faster. In full:

- **drops exactly**: tokens were lost, the kept sets are the reference's, and so are the logits of the prompts and of
  each generated token. The reference does not use this package's code: it is the stock model in which attention is
  hidden from the tokens that were dropped, which it chooses itself.
- **drops in calls only**: the same for calls of the model, but its `generate()` stays dense or cannot run.
- **drops in generate only**: the same the other way round.
- **dense**: nothing is dropped, the result is the stock model's, and the reason is what `explain()` prints.
- **cannot be built**: no tiny model of it runs on token ids alone, or `torch.compile` fails with any backend.
- **fails**: a call or `generate()` raises, or takes too long to trace. **not run**: nobody has looked yet.

{counts}

"""


def table(report: dict[str, Any]) -> str:
    """The page."""
    found = report["rows"]
    numbers = {status: sum(row["status"] == status for row in found) for status in RANKS}
    counts = ", ".join(f"{number} {status}" for status, number in numbers.items() if number)
    versions = f" (torch {report['torch']}, transformers {report['transformers']}, CPU, {report['date'][:10]})"
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    order = rows()
    for row in sorted(found, key=lambda row: order.index(row["name"])):
        differences = [row[kind] for kind in ("prompts", "generate") if kind in row]
        cells = (
            row["name"],
            "yes" if row["status"] == EXACT else "partly" if row["status"] in (CALLS, GENERATE) else "no",
            row["status"],
            ", ".join(map(str, row.get("drops_after", ()))),
            ", ".join(map(str, row.get("auto", ()))),
            str(row.get("lost", "")),
            f"{max(differences):.0e}" if differences and row["status"] == EXACT else "",
            row.get("reason", "").replace("|", "\\|"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return HEAD.format(versions=versions, counts=f"{len(found)} rows: {counts}.") + "\n".join(lines) + "\n"


def _send(name: str, to: Connection) -> None:
    try:
        to.send(measure(name))
    except Exception as error:
        kind = "wrong" if isinstance(error, WrongError) else type(error).__name__
        to.send({"name": name, "status": FAILS, "reason": f"{kind}: {str(error)[:300]}"})


def run(name: str, timeout: float, context: Any) -> dict[str, Any]:
    """Measure one family in a process of its own."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(name, theirs))
    process.start()
    theirs.close()
    try:
        row: dict[str, Any] = ours.recv() if ours.poll(timeout) else {"reason": f"more than {timeout:.0f} s"}
    except EOFError:
        row = {"reason": "the process died"}
    process.kill()
    process.join()
    return {"name": name, "status": FAILS, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; rows that it holds are not run again")
    parser.add_argument("--table", type=Path, help="Markdown page to write from it")
    parser.add_argument("--names", nargs="+", choices=rows(), metavar="NAME", help="run these again")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds a family")
    args = parser.parse_args()
    held = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    by_name = {row["name"]: row for row in held}
    again = [name for name in rows() if by_name.get(name, {}).get("status") == FAILS]
    new = [name for name in rows() if by_name.get(name, {"status": NOT_RUN})["status"] == NOT_RUN]
    wanted = args.names or [*new, *again]
    quiet()
    measure("llama")  # what is imported and made once: children start from there
    gc.freeze()
    gc.disable()
    context = multiprocessing.get_context("fork")
    report: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    report["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    for count, name in enumerate(wanted, 1):
        by_name[name] = run(name, args.timeout, context)
        print(f"{count} of {len(wanted)}: {by_name[name]}", flush=True)
        report["rows"] = [by_name.get(row, {"name": row, "status": NOT_RUN}) for row in rows()]
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.table:
        args.table.write_text(table(json.loads(args.out.read_text())))


if __name__ == "__main__":
    main()
