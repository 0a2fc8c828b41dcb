"""What runs when a compiled graph is called in which nothing is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from uniprefill_fx.errors import Refusal
from uniprefill_fx.runtime.agreement import Agreement
from uniprefill_fx.runtime.last_call import LastCall, record
from uniprefill_fx.runtime.length_marks import LengthMarks


class Undropped:
    """A graph that never drops: a decode step, a later chunk, or a prefill that stays dense and records why.

    agreement: with the ranks that a prefill shares its graph with, whose own may drop."""

    def __init__(
        self,
        run: Callable[..., Any],
        marks: LengthMarks,
        prefill: bool,
        refusals: Sequence[Refusal],
        agreement: Agreement | None = None,
    ) -> None:
        self.run, self.marks, self.prefill, self.agreement = run, marks, prefill, agreement
        self.reason = refusals[-1] if refusals else None

    def __call__(self, *args: Any) -> Any:
        if self.prefill:
            if self.agreement is not None:
                self.agreement.reached("dense")  # dense it is, whatever the others wanted
            record(LastCall(False, self.reason, None))
        return self.marks(self.run(*args))
