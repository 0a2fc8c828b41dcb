"""Where tests have to know the version of transformers that they run with."""

from __future__ import annotations

import transformers
from packaging.version import Version

PLAIN_CAUSAL = Version(transformers.__version__) >= Version("5.24")
"""It makes no mask where causal attention hides all that is to be hidden, and computes rotary angles elementwise."""
