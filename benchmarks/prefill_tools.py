"""What `prefill.py` measures with: a clock, a budget, a view of the compilations, the limit, the table."""

from __future__ import annotations

import contextlib
import logging
import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from uniprefill_fx import backend
from uniprefill_fx.lowering.pieces import CompiledPiece
from uniprefill_fx.runtime.prefill import Prefill

GIB = 1 << 30


class Progress(logging.Handler):
    """Prints lines with the time since the start, the package's log among them, and watches the budget of seconds."""

    def __init__(self, budget: float) -> None:
        super().__init__(logging.INFO)
        self.began, self.budget = time.perf_counter(), budget
        self.skipped: list[str] = []

    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def left(self) -> float:
        return self.budget - self.elapsed()

    def say(self, line: str) -> None:
        print(f"[{self.elapsed():6.1f} s] {line}", flush=True)

    def warn(self, line: str) -> None:
        self.say(f"WARNING: {line}")

    def skip(self, what: str, why: str) -> None:
        self.skipped.append(f"{what}: {why}")
        self.say(f"SKIPPED {what}: {why}")

    def allows(self, what: str, seconds: float) -> bool:
        """Whether a step that takes about so many seconds still fits; says so when it does not."""
        if seconds <= self.left():
            return True
        self.skip(what, f"about {seconds:.0f} s wanted, {self.left():.0f} s of {self.budget:.0f} s left")
        return False

    def emit(self, record: logging.LogRecord) -> None:
        text = re.sub(r" for sizes \[.*?\]", "", record.getMessage())
        self.say(f"    {text}" if record.levelno < logging.WARNING else f"WARNING: {text}")


@dataclass(frozen=True)
class Timing:
    """One call: milliseconds on the device, until the call returned, and until its result was there; peak bytes."""

    ms: float
    host_ms: float
    wall_ms: float
    peak: int


class Clock:
    """Times calls with CUDA events; on the CPU with the wall clock, which only shows that it runs."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def time(self, function: Callable[[], Any]) -> Timing:
        """The result is freed before this returns."""
        self.synchronize()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
        began = time.perf_counter()
        result = function()
        if self.cuda:
            end.record()
        returned = time.perf_counter()
        self.synchronize()
        wall = (time.perf_counter() - began) * 1e3
        del result
        ms = begin.elapsed_time(end) if self.cuda else wall
        peak = torch.cuda.max_memory_allocated() if self.cuda else 0
        return Timing(ms, (returned - began) * 1e3, wall, peak)

    def count_syncs(self, function: Callable[[], Any]) -> tuple[Any, dict[str, int] | None]:
        """The function's result, and how often each place made the host wait for the device; None on the CPU."""
        if not self.cuda:
            return function(), None
        self.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = function()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        places: Counter[str] = Counter()
        for w in caught:  # torch warns where this package's, or Inductor's, code was when an operation waited
            if "called a synchronizing" in str(w.message):
                places[f"{'/'.join(w.filename.split('/')[-2:])}:{w.lineno}"] += 1
            elif "Synchronization debug mode" not in str(w.message):
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
        return result, dict(places)

    def kernels(self, function: Callable[[], Any]) -> list[dict[str, Any]]:
        """Kernels by total device time, from a profile; on the CPU, operators."""
        kind = torch.profiler.ProfilerActivity.CUDA if self.cuda else torch.profiler.ProfilerActivity.CPU
        wanted = torch.autograd.DeviceType.CUDA if self.cuda else torch.autograd.DeviceType.CPU
        self.synchronize()
        with torch.profiler.profile(activities=[kind]) as profile:
            function()
            self.synchronize()
        microseconds: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for event in profile.events() or ():
            # names like "## Call" are marked stretches of time, which hold kernels
            if event.device_type == wanted and not event.name.startswith(("## Call", "Torch")):
                microseconds[event.name] += event.time_range.elapsed_us()
                calls[event.name] += 1
        return [
            {"kernel": short_name(name), "calls": calls[name], "ms": us / 1e3, "name": name[:400]}
            for name, us in microseconds.most_common()
        ]


def short_name(kernel: str) -> str:
    """A kernel's name without the namespaces that all of them share, cut to a line."""
    return re.sub(r"^void |at::native::|\(anonymous namespace\)::|::?std::|c10::", "", kernel)[:90]


def median(timings: Sequence[Timing]) -> dict[str, Any]:
    """The JSON of repeated calls."""
    return {
        "ms": statistics.median(t.ms for t in timings),
        "all_ms": [round(t.ms, 3) for t in timings],
        "host_ms": statistics.median(t.host_ms for t in timings),
        "wall_ms": statistics.median(t.wall_ms for t in timings),
        "peak_gib": max(t.peak for t in timings) / GIB,
    }


class Watch:
    """Every compilation of the backend from now on, and the seconds that the package's own passes took for it."""

    def __init__(self) -> None:
        self.found: list[backend.Compilation] = []
        self.tries: list[dict[str, Any]] = []
        original = backend.compile_graph

        def observed(gm: Any, inputs: Any, config: Any, observer: Any = None) -> Any:
            began, before = time.perf_counter(), len(self.found)
            try:
                return original(gm, inputs, config, self.found.append)
            finally:  # a static trace ends in an exception that asks for another trace
                done = self.found[-1] if len(self.found) > before else None
                self.tries.append(
                    {
                        "seconds": time.perf_counter() - began,
                        "kind": "traced again" if done is None else "drops" if self._prefill(done) else "never drops",
                        "passes": {} if done is None else dict(done.seconds),
                    }
                )

        backend.compile_graph = observed

    @staticmethod
    def _prefill(done: backend.Compilation) -> Prefill | None:
        return done.run if isinstance(done.run, Prefill) else None

    def sequence_ids(self) -> list[CompiledPiece]:
        """Every piece of every prefill, dense ones last."""
        prefills = [p for p in map(self._prefill, self.found) if p is not None]
        pieces = dict.fromkeys(run for p in prefills for _, run in p.steps if isinstance(run, CompiledPiece))
        return list(pieces) + [p.dense for p in prefills]

    def repeated(self) -> list[str]:
        """What was compiled more than once though only the length changed."""
        more = [f"{s.name} compiled {len(s.variants)} times" for s in self.sequence_ids() if len(s.variants) > 1]
        prefills = sum(1 for c in self.found if self._prefill(c) is not None)
        return more + ([f"Dynamo traced the prefill {prefills} times"] if prefills > 1 else [])


@contextlib.contextmanager
def guarded(progress: Progress, failed: list[str], what: str) -> Iterator[None]:
    """A step that may fail without ending the others: the error is printed and recorded."""
    try:
        yield
    except Exception as error:
        failed.append(f"{what}: {type(error).__name__}: {str(error)[:2000]}")
        progress.warn(f"{what} failed: {type(error).__name__}: {str(error)[:600]}")
        logging.getLogger(__name__).debug("%s", what, exc_info=error)


def per_token(points: Mapping[int, float], tokens: int) -> float:
    """Time at a length from times at others: time for a token is linear in the length between two measured ones.

    Exact for a·n + b·n² (log-log interpolation reads such a curve up to 5% too high, which would flatter the limit).
    Outside the measured lengths: the nearest two's line above, the shortest one's time for a token below, which is a
    lower bound there.
    """
    lengths = sorted(points)
    if tokens <= lengths[0] or len(lengths) == 1:
        return points[lengths[0]] / lengths[0] * tokens
    low, high = next(((a, b) for a, b in pairwise(lengths) if tokens <= b), (lengths[-2], lengths[-1]))
    a, b = points[low] / low, points[high] / high
    return (a + (b - a) * (tokens - low) / (high - low)) * tokens


def predicted_ms(points: Mapping[int, float], tokens: int) -> float:
    """A guess for the budget, on the high side; 0 when nothing is known."""
    if not points:
        return 0.0
    longest = max(points)
    if tokens <= longest:
        return per_token(points, tokens)
    quadratic = points[longest] * (tokens / longest) ** 2
    line = 1.2 * per_token(points, tokens) if len(points) > 1 else quadratic
    return max(points[longest], min(quadratic, line))


def limits(results: Sequence[dict[str, Any]], num_layers: int, batch: int) -> None:
    """Fill in the limit (d) of each result, from every dense time at hand; see `prefill.py`.

    Rows are those of all prompts of a batch, times are by the length of one.
    """
    measured = {
        r["tokens"]: (r["dense"]["ms"] - r["head_ms"]) / num_layers for r in results if "dense" in r and "head_ms" in r
    }
    for result in results:
        if not measured or "rows" not in result or "head_ms" not in result:
            continue
        rows = [n // batch for n in result["rows"]]
        result["limit_ms"] = result["head_ms"] + sum(per_token(measured, n) for n in rows)
        result["limit_below_measured"] = min(rows) < min(measured)
        exact = {n: (ms - result["head_ms"] * n / result["tokens"]) / num_layers for n, ms in result["exact"]}
        if exact:
            times = {**exact, result["tokens"]: measured[result["tokens"]]}
            result["limit_exact_ms"] = result["head_ms"] + sum(times[n] for n in rows)


def table(results: Sequence[dict[str, Any]]) -> str:
    """One line a length. Ratios above 1 are in favour of uniprefill, but for limit/uni: 1 is the limit."""
    columns = (
        "tokens|compute|dense ms|stock ms|uni ms|limit ms|dense/uni|stock/uni|limit/uni|"
        "dense host ms|uni host ms|dense GiB|uni GiB|uni/dense GiB|syncs"
    ).split("|")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for r in sorted(results, key=lambda r: r["tokens"]):
        dense, uni, stock = (r.get(name, {}) for name in ("dense", "uniprefill", "stock"))
        limit = r.get("limit_exact_ms", r.get("limit_ms"))
        mark = "e" if "limit_exact_ms" in r else "<" if r.get("limit_below_measured") else ""
        cells = [
            f"{r['tokens']:,}",
            _number(r.get("compute"), "{:.2f}"),
            *(_number(ms, "{:.1f}") for ms in (dense.get("ms"), stock.get("ms"), uni.get("ms"))),
            _number(limit, "{:.1f}") + mark,
            *(_ratio(ms, uni.get("ms")) for ms in (dense.get("ms"), stock.get("ms"), limit)),
            *(_number(x.get("host_ms"), "{:.1f}") for x in (dense, uni)),
            *(_number(x.get("peak_gib"), "{:.1f}") for x in (dense, uni)),
            _ratio(uni.get("peak_gib"), dense.get("peak_gib")),
            "" if r.get("syncs") is None else str(sum(r["syncs"].values())),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _ratio(a: float | None, b: float | None) -> str:
    return f"{a / b:.3f}" if a and b else ""
