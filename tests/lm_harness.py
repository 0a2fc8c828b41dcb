"""What tests with lm-evaluation-harness share."""

from __future__ import annotations

import importlib.util

import pytest

WITH_HARNESS = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason='no lm_eval: pip install "lm_eval[hf,ruler]"'
)


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of a hub."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
