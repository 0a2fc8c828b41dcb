"""Past Dynamo's recompile limit steps run eagerly. Where they could not read a compact cache, nothing is dropped."""

from __future__ import annotations

from typing import Any

from uniprefill_fx.errors import Category, refuse
from uniprefill_fx.torch_internals import graphs_of, recompile_limit


class EagerReader:
    """Whether what follows a prefill could read a compact cache, should Dynamo compile no more graphs of this model.

    Args:
        unreadable: what eager code could not do on a compact cache; None: it reads one. code: that of the traced frame.
    """

    ROOM = 3  # graphs that one kind of call may still ask for behind its prefill: steps, drafts, another length

    def __init__(self, unreadable: str | None, code: Any) -> None:
        self.unreadable, self.code = unreadable, code

    def check(self) -> None:
        """Raises RefusalError: a decode step might find no graph, and could not run eagerly."""
        if self.unreadable is None or self.code is None:
            return
        graphs, limit = graphs_of(self.code), recompile_limit()
        if graphs + self.ROOM > limit:
            raise refuse(
                Category.RECOMPILE_LIMIT,
                f"{graphs} graphs of {limit} are made, and without one no step could read what is kept: "
                f"{self.unreadable}",
                "raise torch._dynamo.config.recompile_limit; TORCH_LOGS=recompiles tells what the graphs are for",
            )
