"""Compiles what a wrapper would launch on a card that is not there, and says what the machine code needs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448}
"""Bytes of shared memory that a program may use, by compute capability."""


@dataclass(frozen=True)
class Compiled:
    """What one kernel's machine code needs."""

    name: str
    shared: int
    """Bytes of shared memory a program."""
    registers: int
    spilled: int
    """Bytes of local memory a thread."""
    assembly: str
    """PTX"""


class _Driver:
    """What Triton asks of a driver before it launches."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _resources(kernel: Any) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        said = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{word}:(\d+)", said)[-1]) for word in ("REG", "STACK"))
    return Compiled(kernel.metadata.name, kernel.metadata.shared, registers, stack, kernel.asm["ptx"])


@contextmanager
def compiling_for(capability: int) -> Iterator[list[Compiled]]:
    """Within it, launches on CPU tensors compile for a card of this capability and are appended to the list."""
    found: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        self.device_caches.clear()  # which do not know that the card has changed
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append(_resources(kernel.result() if hasattr(kernel, "result") else kernel))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(triton.runtime.driver, "_active", _Driver(capability))
        yield found
