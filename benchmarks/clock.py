"""Times of functions on a device, and what the device could do at best."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import triton

MATRIX_RATE = 989e12  # dense bf16 operations a second of an H200, by its datasheet
MEMORY_RATE = 4.8e12  # bytes a second


def limit_ms(operations: float, moved: float) -> float:
    """The time that the arithmetic or the memory traffic takes at the datasheet's rates, whichever is longer."""
    return max(operations / MATRIX_RATE, moved / MEMORY_RATE) * 1e3


class Clock:
    """Milliseconds of a function; on the CPU of one run, which only shows that it runs."""

    def __init__(self, device: torch.device, repeats: int, seconds: float = 1.0) -> None:
        self.cuda, self.repeats, self.seconds = device.type == "cuda", repeats, seconds
        # written in between, this leaves nothing else in the L2 cache
        self.other = torch.empty(1 << 28 if self.cuda else 1, dtype=torch.int8, device=device)

    def device_ms(self, function: Callable[[], Any], cold: bool) -> float:
        """Median time on the device, without the host's: of a CUDA graph."""
        if not self.cuda:
            return self.running_ms(function)
        function()  # compiles
        torch.cuda.synchronize()
        graph, turns = torch.cuda.CUDAGraph(), 1 if cold else 20
        with torch.cuda.graph(graph):
            for _ in range(turns):
                function()
        for _ in range(3):
            graph.replay()
        return self._median(graph.replay, cold) / turns

    def running_ms(self, function: Callable[[], Any]) -> float:
        """Median time as it runs, waits for the device included."""
        if not self.cuda:
            began = time.perf_counter()
            function()
            return (time.perf_counter() - began) * 1e3
        for _ in range(3):
            function()
        return self._median(function, cold=True)

    def _median(self, function: Callable[[], Any], cold: bool) -> float:
        """Of `repeats` runs, or of as many as `seconds` allow, three at least."""
        torch.cuda.synchronize()
        began, times = time.perf_counter(), []
        for _ in range(self.repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if cold:
                self.other.zero_()
            begin.record()
            function()
            end.record()
            times.append((begin, end))
            if len(times) % 3 == 0:
                end.synchronize()
                if time.perf_counter() - began > self.seconds:
                    break
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in times)

    def launches(self, function: Callable[[], Any]) -> dict[str, float]:
        """Microseconds of each kernel that the function launches, from the profiler; empty on the CPU."""
        if not self.cuda:
            return {}
        function()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            function()
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                found[f"{len(found)} {event.name}"] = event.time_range.elapsed_us()
        return found


def where_and_when(device: torch.device) -> dict[str, str]:
    """What every report of kernels begins with: date, card and versions."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "card": torch.cuda.get_device_name() if device.type == "cuda" else "CPU, interpreted",
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
