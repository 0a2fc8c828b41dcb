"""What the command line says while it works: lines with the time on standard error, also where a step takes long.

Like `cli.py`, this needs nothing but the standard library.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from types import TracebackType

SILENCE = 5.0
"""Seconds after which a step that is not over says so; then twice as many, and so on up to `LONGEST`."""

LONGEST = 40.0

log = logging.getLogger("uniprefill_fx.tools.cli")
_LONG = re.compile(r" for sizes \[.*?\]|; .* s$")  # a size for each input of a piece; the time of each pass


class UserError(Exception):
    """Something the user can mend: the message says what was wrong and what to do."""


def say(step: str) -> None:
    """What begins now."""
    log.info(step)


class Progress(logging.Handler):
    """A context in which the package's log goes to standard error, and a step that takes long says so.

    A step is what the command line itself says; what the package logs (a line for each graph and each compiled piece)
    is shown below it.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.began = self.spoke = time.monotonic()
        self.step, self.patience = "starting", SILENCE
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._keep_talking, daemon=True)
        self.logger = logging.getLogger("uniprefill_fx")
        self.level_before = self.logger.level

    def __enter__(self) -> Progress:
        self.logger.addHandler(self)
        self.logger.setLevel(logging.INFO)
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.over.set()
        self.logger.removeHandler(self)
        self.logger.setLevel(self.level_before)
        self.thread.join()

    def emit(self, record: logging.LogRecord) -> None:
        text, self.patience = _LONG.sub("", record.getMessage()), SILENCE
        if record.name == log.name:
            self.step = text
        self._print(text if record.name == log.name else f"    {text}")

    def _print(self, text: str) -> None:
        self.spoke = time.monotonic()
        print(f"[{self.spoke - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def _keep_talking(self) -> None:
        while not self.over.wait(max(0.1, self.spoke + self.patience - time.monotonic())):
            if time.monotonic() - self.spoke >= self.patience:
                self._print(f"still: {self.step}")
                self.patience = min(2 * self.patience, LONGEST)
