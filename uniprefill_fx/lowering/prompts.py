"""What compiles the graphs of prompts: the inner backend, or TensorRT where it is asked for and can be had."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from uniprefill_fx.errors import RefusalError
from uniprefill_fx.lowering.engines import EnginePiece
from uniprefill_fx.lowering.inner import InnerBackend
from uniprefill_fx.lowering.pieces import CompiledPiece, compile_pieces
from uniprefill_fx.lowering.tensorrt import TensorRT
from uniprefill_fx.passes.rewrite.split import Piece

log = logging.getLogger(__name__)
CompiledPrompt = CompiledPiece | EnginePiece


@dataclass(frozen=True)
class PromptCompiler:
    """inner: the inner backend, Inductor beside TensorRT. tensorrt: None where it is not asked for. batch: sizes of the
    batch, for each of which engines are built."""

    inner: InnerBackend
    tensorrt: TensorRT | None
    batch: Collection[sympy.Expr] = ()

    def whole(self, gm: fx.GraphModule, name: str) -> CompiledPrompt:
        """A graph of a prompt in which nothing is dropped."""
        return self._engines(gm, name) or CompiledPiece(gm, self.inner, name)

    def pieces(self, pieces: Sequence[Piece]) -> list[Callable[..., Any]]:
        """What runs each piece; selections run as they are."""
        found: list[Callable[..., Any]] = []
        for number, piece in enumerate(pieces):
            run = piece.gm if piece.selection else self._engines(piece.gm, f"piece {number // 2}")
            if run is None:
                # All or none: what an engine returns is a copy, into which another piece would write in vain.
                return compile_pieces(pieces, self.inner)
            found.append(run)
        return found

    def _engines(self, gm: fx.GraphModule, name: str) -> EnginePiece | None:
        if self.tensorrt is None:
            return None
        try:
            return EnginePiece(gm, self.tensorrt, name, self.batch)
        except RefusalError as error:
            log.warning("%s: Inductor compiles it in place of TensorRT: %s", name, error)
            return None
