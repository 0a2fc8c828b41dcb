"""A note inside a compiled model that speaks up when the model is copied: copies are not compiled, and run dense."""

from __future__ import annotations

from typing import Any

from torch import nn

from uniprefill_fx.runtime.warn_once import warn_once

NAME = "_uniprefill_compiled"  # attribute of a compiled model


class CompiledNote:
    """Put into the attributes of a model that was compiled in place.

    `copy.deepcopy` and `pickle` leave out what `nn.Module.compile` made. The copy gets a plain None in place of this.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        self._warn("copy.deepcopy")

    def __reduce__(self) -> tuple[Any, ...]:
        self._warn("pickle")
        return type(None), ()

    @staticmethod
    def _warn(how: str) -> None:
        warn_once(
            f"copy by {how}",
            f"{how} of a compiled model: the copy is not compiled and runs dense. Call uniprefill_fx.compile(copy).",
            stacklevel=3,
        )


def note_compiled(model: nn.Module) -> None:
    """Have copies of a model say that they are not compiled."""
    vars(model)[NAME] = CompiledNote()
