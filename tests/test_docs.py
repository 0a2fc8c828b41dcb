"""The documentation: links and pages exist, code can be read as code, every option is in the table."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from checkpoints import ROOT

import uniprefill_fx

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
SECTION = re.compile(r'^--8<-- "([^:"]+):([^"]+)"$', re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    """Every relative link, and every included section, is there."""
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        if "://" not in target:
            assert (page.parent / target).exists(), target
    for file, name in SECTION.findall(text):
        source = (ROOT / file).read_text(encoding="utf-8")
        assert source.count(f"[start:{name}]") == source.count(f"[end:{name}]") == 1


def test_pages_of_the_navigation_exist() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def files(entries: object) -> list[str]:
        if isinstance(entries, str):
            return [entries]
        values = entries.values() if isinstance(entries, dict) else entries
        assert not isinstance(values, str | int)
        return [file for value in values for file in files(value)]  # type: ignore[attr-defined]

    assert set(files(settings["nav"])) <= {page.name for page in PAGES[1:]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_is_code(page: Path) -> None:
    """Python blocks parse, and what they call on the package exists."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    blocks += [m for m in re.findall(r"(?:^    .*\n|^\n)+", text, re.MULTILINE) if re.search(r"uniprefill_fx[. ]", m)]
    for block in blocks:
        code = textwrap.dedent(block)
        if "-m uniprefill_fx" not in code:
            ast.parse(code)
        for name in re.findall(r"\buniprefill_fx\.([a-z_]+)\(", code):
            assert hasattr(uniprefill_fx, name), name


def test_everything_public_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    found = re.findall(r"^::: (uniprefill_fx[\w.]*)\.(\w+)$", text, re.MULTILINE)
    names = {name for module, name in found if hasattr(importlib.import_module(module), name)}
    assert names - {"Explanation"} == set(uniprefill_fx.__all__)


def test_every_option_is_in_the_table() -> None:
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(named) == sorted(option.name for option in dataclasses.fields(uniprefill_fx.PrefillConfig))


def test_the_notebook_is_code_without_results() -> None:
    """Results would be of another machine; `make notebook` makes them."""
    cells = json.loads((ROOT / "examples" / "first_minute.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5 and not any(cell["outputs"] or cell["execution_count"] for cell in code)
    for cell in code:
        ast.parse("".join(cell["source"]))


def test_the_readme_is_short_and_says_first_what_a_newcomer_asks() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) < 1200
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert heads[:5] == ["Install", "Use", "How fast", "What you risk", "Is it for you?"]
    assert text.count("![") == 2, "speed, and what it costs"
    table = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    (rows, exact), (own_exact, own_rows) = (
        re.findall(pattern, page)[0]
        for pattern, page in ((r"(\d+) rows: (\d+) drops exactly", table), (r"(\d+) of (\d+) drop exactly", text))
    )
    assert (own_rows, own_exact) == (rows, exact)


def test_speeds_of_the_readme_are_measured() -> None:
    """Every row of its table is a row of the benchmark's results."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "benchmarks" / "results" / "prefill_llama8b.json").read_text(encoding="utf-8"))
    rows = re.findall(r"^\| ([\d,]+) \|(.*)\|$", text, re.MULTILINE)
    by_tokens = {f"{row['tokens']:,}": row for row in found["results"]}
    for tokens, cells in rows:
        row = by_tokens[tokens]
        dense, ours = row["dense"], row["uniprefill"]
        stock = f"{row['stock']['ms']:,.0f}" if "stock" in row else "not measured"
        numbers = [f"{dense['ms']:,.0f}", f"{ours['ms']:,.0f}", f"{dense['ms'] / ours['ms']:.2f}"]
        want = [stock, *numbers, f"{ours['peak_gib'] / dense['peak_gib']:.2f}"]
        assert [cell.strip() for cell in cells.split("|")] == want
    assert len(rows) == 3


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mkdocs", "mkdocstrings"))),
    reason="mkdocs and mkdocstrings are not installed: make docs builds it",
)
def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shown = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    assert "What a sliding window counts after a drop" in shown, "the options' texts"
    assert "uniprefill.select" in (tmp_path / "how-it-works" / "index.html").read_text(encoding="utf-8")
