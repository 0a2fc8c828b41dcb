"""Our part of the key of torch's on-disk caches.

torch keys a compiled graph on the graph and on torch itself. The graph names our operators, and neither their schemas
nor what the composite ones are made of: an artifact of an older version of this package would be found under the same
key, and call operators as they were then.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from uniprefill_fx import ops

SOURCES = Path(ops.__file__).parent


@contextlib.contextmanager
def tagged() -> Iterator[None]:
    """What is compiled inside is cached for this version of the package only.

    The setting is process-wide: hold torch's compile lock, as every compilation does.
    """
    config: Any = torch.compiler.config
    with config.patch(cache_key_tag=f"{config.cache_key_tag};{tag()}"):
        yield


@functools.cache
def tag() -> str:
    """Version of the package, and a hash of the source of its operators; the same in every process."""
    try:
        version = importlib.metadata.version("uniprefill-fx")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        version = "unknown"
    return f"uniprefill-fx {version} {_hash(SOURCES)}"


def _hash(folder: Path) -> str:
    """A hash of the names and the contents of the Python files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
