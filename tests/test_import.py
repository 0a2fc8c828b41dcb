"""`import uniprefill_fx`: what it shows, what it loads, and that torch then knows the backend by its name."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pydoc
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoints import ROOT

import uniprefill_fx
from uniprefill_fx import OptionError, PrefillConfig
from uniprefill_fx.runtime.overrides import CHANGEABLE
from uniprefill_fx.runtime.registration import Checkout
from uniprefill_fx.runtime.shown_options import Options, option_texts


@pytest.fixture(scope="module")
def not_installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the package is on the path, and every other package installed, but not this one."""
    site = tmp_path_factory.mktemp("site")
    folder = Path(torch.__file__).parents[1]
    for item in folder.iterdir():
        if not item.name.startswith(("uniprefill", "__editable__")) and item.suffix != ".pth":
            (site / item.name).symlink_to(item)
    path = [str(ROOT), str(site), *[p for p in sys.path if p.endswith("site-packages") and Path(p) != folder]]
    return dict(os.environ, PYTHONPATH=os.pathsep.join(path))


def python(code: str, environment: dict[str, str]) -> str:
    """Runs without site-packages, so that nothing but PYTHONPATH is looked at; returns what it printed."""
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


USED = "print(torch.compile(lambda x: x + 1, backend='uniprefill', options={'inner_backend': 'eager'})(torch.ones(1)))"
EARLIER = "import torch; torch.compile(lambda x: x - 1, backend='eager')(torch.ones(2)); "


@pytest.mark.parametrize("before", ["", pytest.param(EARLIER, marks=pytest.mark.slow)], ids=["", "torch has asked"])
def test_on_the_path_only(not_installed: dict[str, str], before: str) -> None:
    """Where torch finds no entry point, the import is enough; also when torch has looked for entry points before."""
    if before:
        without = before + "print('uniprefill' in torch.compiler.list_backends())"
        assert python(without, not_installed) == "False\n"
    assert python(f"{before}import uniprefill_fx, torch; {USED}", not_installed) == "tensor([2.])\n"


def test_what_an_import_loads(not_installed: dict[str, str]) -> None:
    code = "import sys, uniprefill_fx; print(sorted({'torch', 'transformers', 'sympy', 'numpy'} & set(sys.modules)))"
    assert python(code, not_installed) == "[]\n"


def test_a_checkout_says_what_an_installation_would() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shown = Checkout(uniprefill_fx.__version__)
    assert shown.metadata["Name"] == project["name"] and shown.version == uniprefill_fx.__version__
    found = {(point.group, point.name, point.value) for point in shown.entry_points}
    groups = project["entry-points"].items()
    assert found == {(group, name, value) for group, points in groups for name, value in points.items()}


def test_version_is_that_of_the_installation() -> None:
    assert metadata.version("uniprefill-fx") == uniprefill_fx.__version__


def test_every_place_that_names_the_version_names_this_one() -> None:
    version = uniprefill_fx.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == version
    newest = re.findall(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert newest == version


def test_dir_has_the_public_names_only() -> None:
    assert dir(uniprefill_fx) == sorted([*uniprefill_fx.__all__, "__version__"])
    assert all(getattr(uniprefill_fx, name) is not None for name in dir(uniprefill_fx))


# Options in signatures

FIELDS = {field.name: field.default for field in dataclasses.fields(PrefillConfig)}
SHOWN: dict[Callable[..., Any], dict[str, Any]] = {
    uniprefill_fx.compile: FIELDS,
    uniprefill_fx.explain: FIELDS | {"inner_backend": "eager"},
}


def test_the_types_for_editors_name_every_option() -> None:
    """A new option needs a line in `Options`, too."""
    assert list(Options.__annotations__) == list(FIELDS) == list(option_texts())


@pytest.mark.parametrize("function", SHOWN, ids=lambda function: function.__name__)
def test_help_shows_names_defaults_and_texts(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert {name: p.default for name, p in parameters.items() if name in FIELDS} == SHOWN[function]
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    shown = pydoc.plain(pydoc.render_doc(function))
    assert "block_size = 64\n" in shown and "Tokens a block; a block is kept or dropped as a whole." in shown


def test_help_of_what_takes_some_options() -> None:
    names = list(inspect.signature(uniprefill_fx.override).parameters)
    assert sorted(names) == sorted(CHANGEABLE)
    shown = pydoc.plain(pydoc.render_doc(uniprefill_fx.override))
    assert "p: " in shown and "<as compiled>" in shown and "window" not in names
    assert not {"p", "preset", "selection", "keep_ratio"} & set(inspect.signature(uniprefill_fx.calibrate).parameters)


def test_an_unknown_name_is_still_refused_by_an_option_error() -> None:
    with pytest.raises(OptionError, match="Did you mean 'block_size'"):
        uniprefill_fx.compile(torch.nn.Linear(1, 1), blocksize=64)  # type: ignore[call-arg]
