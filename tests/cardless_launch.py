"""Compiles what a wrapper would launch, for a GPU that is not there: its machine code, or the error of the compiler.

The wrapper runs on CPU tensors and believes that they lie on such a GPU; each launch compiles and runs nothing.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from uniprefill_fx.kernels import checks, common

SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}
"""Bytes of shared memory that a program may use, by compute capability (CUDA programming guide, table of limits)."""
THREAD_REGISTERS = 255
CARD_REGISTERS = 65_536  # of a multiprocessor: one program's at most


@dataclass(frozen=True)
class Machine:
    """What one kernel's machine code needs.

    Attributes:
        shared: bytes of shared memory a program. registers: of a thread. threads: of a program.
        spilled: bytes of local memory a thread.
    """

    name: str
    shared: int
    registers: int
    threads: int
    spilled: int

    def fits(self, capability: int) -> bool:
        enough = self.registers <= THREAD_REGISTERS and self.registers * self.threads <= CARD_REGISTERS
        return enough and self.shared <= SHARED_MEMORY[capability]


class _Driver:
    """What Triton asks of a driver before it launches."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # Triton keeps what it compiled, and for what, by the number of the device

    def get_current_stream(self, device: int) -> int:
        return 0


def _needs(kernel: Any) -> Machine:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        said = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    registers, spilled = (int(re.findall(rf"{word}:(\d+)", said)[-1]) for word in ("REG", "STACK"))
    metadata = kernel.metadata
    return Machine(metadata.name, metadata.shared, registers, 32 * metadata.num_warps, spilled)


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[list[Machine]]:
    """Within it, launches on CPU tensors compile for a card of this capability and are appended to the list.

    Yields:
        what was compiled, in order. An error of the compiler leaves the wrapper as it would on the card.
    """
    found: list[Machine] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append(_needs(kernel.result() if hasattr(kernel, "result") else kernel))

    with contextlib.ExitStack() as stack:
        for place, name, value in (
            (JITFunction, "run", compile_only),
            (triton.runtime.driver, "_active", _Driver(capability)),
            (common, "check_device", lambda device: None),
            (checks, "check_device", lambda device: None),
            (checks, "shared_memory", lambda device: SHARED_MEMORY[capability]),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        yield found
