"""What an installed package holds: `kernels/`, at the top of a checkout, is `uniprefill_fx.kernels` there.

pip makes the environments to build in, so these tests need what `pip install .` needs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from checkpoints import ROOT

from uniprefill_fx.tools.html_report import PARTS

BUILD = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
LOOK = (
    "import uniprefill_fx.kernels.block_scores.kernel as k, transformers.utils as t, importlib.util as u; "
    "print(k.__file__, t.is_kernels_available(), u.find_spec('kernels'))"
)


FOLDERS = ("tests", "examples", "benchmarks", "docs", ".ci", ".github")
FILES = ("Makefile", "mkdocs.yml", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md")


def run(*command: str, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: what an earlier build left beside the package would get into the wheel."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("uniprefill_fx", "kernels"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*FILES, "LICENSE", "README.md", "pyproject.toml", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(checkout))
    return next(folder.glob("*.whl"))


def test_a_wheel_holds_the_kernels_inside_the_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    kernels = {str(path.relative_to(ROOT)) for path in (ROOT / "kernels").rglob("*.py")}
    assert {f"uniprefill_fx/{name}" for name in kernels} <= set(names) and kernels
    assert not [name for name in names if name.startswith("kernels/")]
    assert {"uniprefill_fx/py.typed", *(f"uniprefill_fx/tools/page/{name}" for name in PARTS)} <= set(names)


def test_installed_it_brings_no_package_named_kernels(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel))
    found = run(sys.executable, "-c", LOOK, cwd=tmp_path, env=dict(os.environ, PYTHONPATH=str(site))).split()
    assert Path(found[0]).is_relative_to(site) and found[1:] == ["False", "None"]


def test_a_source_distribution_builds_the_same_wheel(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    isolated = ["-m", "pip", "install", "--quiet", "--target", str(tmp_path / "tools"), "setuptools>=77"]
    run(sys.executable, *isolated)
    environment = dict(os.environ, PYTHONPATH=str(tmp_path / "tools"))
    run(sys.executable, "-c", BUILD, str(tmp_path), cwd=checkout, env=environment)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    for name in FOLDERS:  # what the tests need
        inside = {path.relative_to(checkout) for path in (checkout / name).rglob("*") if path.is_file()}
        assert inside and not {path for path in inside if not (source / path).is_file()}
    assert all((source / name).is_file() for name in FILES)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source))
    again = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert {n for n in again if n.endswith(".py")} == {
        n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".py")
    }
