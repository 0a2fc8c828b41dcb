"""`import uniprefill_fx` makes `backend="uniprefill"` known to torch where no installation does (PYTHONPATH alone).

torch asks `importlib.metadata` for entry points when a name is first looked up. An installed package has one; otherwise
the package stands in for its own installation here, so that neither torch nor the passes are loaded before it is time.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "uniprefill-fx"
NAME, TARGET = "uniprefill", "uniprefill_fx.backend"


class Checkout(metadata.Distribution):
    """What an installation would say of the package: its name, version and backend."""

    def __init__(self, version: str) -> None:
        self.files_read = {
            "METADATA": f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {version}\n",
            "entry_points.txt": f"[torch_dynamo_backends]\n{NAME} = {TARGET}:{NAME}\n"
            "[vllm.general_plugins]\nuniprefill = uniprefill_fx.vllm.plugin:register\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self.files_read.get(filename)

    def locate_file(self, path: object) -> Path:
        return Path(__file__).resolve().parents[2] / str(path)


class Finder(metadata.DistributionFinder):
    """Finds the checkout among the installed distributions, and no modules."""

    def __init__(self, found: Checkout) -> None:
        self.found = found

    def find_spec(self, *_: object) -> None:
        return None

    def find_distributions(
        self,
        context: metadata.DistributionFinder.Context = metadata.DistributionFinder.Context(),  # noqa: B008
    ) -> Iterable[metadata.Distribution]:
        return [self.found] if context.name in (None, DISTRIBUTION) else []


def register(version: str) -> None:
    """Have torch find the backend by its name. Does nothing where the package is installed."""
    try:
        metadata.distribution(DISTRIBUTION)
        return
    except metadata.PackageNotFoundError:
        sys.meta_path.append(Finder(Checkout(version)))
    # torch asks once, which may have been before this; but not where Dynamo, and with it the registry, is not loaded.
    if any(name.startswith("torch.") and name.endswith(".backends.registry") for name in sys.modules):
        importlib.import_module("uniprefill_fx.lowering.compiler_internals").add_backend(NAME, TARGET)
