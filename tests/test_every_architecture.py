"""docs/architectures.md says what the backend does: every family of transformers is in it, and none became worse."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import pytest
import transformers
from arch_measure import DENSE, EXACT, FAILS, NOT_RUN, RANKS, WrongError, measure, quiet, rows
from checkpoints import ROOT
from packaging.version import Version

sys.path.insert(0, str(ROOT / "benchmarks"))
benchmark: Any = importlib.import_module("architectures")

REPORT: dict[str, Any] = json.loads((ROOT / "benchmarks/results/architectures_cpu.json").read_text())
TABLE: dict[str, dict[str, Any]] = {row["name"]: row for row in REPORT["rows"]}
# A hybrid that drops; attention that a model spells out; keys that an indexer picks.
QUICK = {"qwen3_5_text", "openai-gpt", "glm_moe_dsa"}

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def worse(got: dict[str, Any], held: dict[str, Any]) -> list[str]:
    """What a family does less well than its row says."""
    found = []
    if got["status"] not in RANKS or RANKS.index(got["status"]) > RANKS.index(held["status"]):
        found.append(f"{got['status']} ({got.get('reason')}), not {held['status']}")
    if missing := set(held.get("drops_after", ())) - set(got.get("drops_after", ())):
        found.append(f"no drop after layers {sorted(missing)} any more")
    if got["status"] == held["status"] == DENSE and got["category"] != held["category"]:
        found.append(f"dense because of {got['category']}, not {held['category']}")
    return found


def test_every_family_is_in_the_table() -> None:
    """Of the version that the table was made with (`benchmarks/architectures.py`), and of older ones."""
    if Version(transformers.__version__) <= Version(REPORT["transformers"]):
        assert not set(rows()) - set(TABLE)
    if Version(transformers.__version__) >= Version(REPORT["transformers"]):
        assert not set(TABLE) - set(rows())


def test_the_page_is_made_from_the_rows() -> None:
    assert (ROOT / "docs/architectures.md").read_text(encoding="utf-8") == benchmark.table(REPORT)


def test_rows_hold_together() -> None:
    for name, row in TABLE.items():
        assert row["status"] in RANKS and not row.get("reason", "").startswith("wrong"), row
        if row["status"] == EXACT:
            assert row["lost"] > 0 and max(row["prompts"], row["generate"]) < 1e-3, row
        assert row["status"] in (EXACT, NOT_RUN) or row["reason"], name


def test_what_is_worse() -> None:
    held = {"status": EXACT, "drops_after": [1, 3]}
    dense = {"status": DENSE, "drops_after": [], "category": "mask-not-understood", "reason": "a mask"}
    assert worse(held, held) == [] == worse(held | {"drops_after": [0, 1, 3]}, held) == worse(held, dense)
    assert len(worse(held | {"drops_after": [3]}, held)) == 1
    assert len(worse(dense, held)) == 2
    assert len(worse(dense | {"category": "graph-break"}, dense)) == 1
    assert worse(held | {"status": FAILS}, held)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in rows()]
)
def test_no_family_became_worse(name: str) -> None:
    quiet()
    try:
        got = measure(name)
    except WrongError:
        raise  # whatever the table says
    except Exception as error:
        got = {"status": FAILS, "reason": repr(error)}
    # of a family that came later nothing is held, but that what drops is right
    assert name not in TABLE or not worse(got, TABLE[name])
