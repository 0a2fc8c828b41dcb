"""`Report.to_html()` and `.plot()`: the page says what the call did, and opens in a browser without an error."""

from __future__ import annotations

import copy
import dataclasses
import html
import json
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_gemma3, tiny_llama, token_ids

import uniprefill_fx
from uniprefill_fx.tools.explain import Explanation as Report
from uniprefill_fx.tools.html_report import COLUMNS, column_width, contents, kept_map

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
TOKENS, BLOCK = 300, 16


class Tokenizer:
    """Text that would end a script, were it not escaped."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(f"</script><b>{i}" for i in ids)


class Page(HTMLParser):
    """The data of a page, what it would load from elsewhere, and its elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inside, self.data, self.loads, self.tags = False, "", [], []
        self.feed(text)

    loads: list[str]
    tags: list[tuple[str, dict[str, str | None]]]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        self.inside = tag == "script" and found.get("type") == "application/json"
        self.loads += [v for k, v in found.items() if k in ("src", "href") and v]

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        self.data += data if self.inside else ""


@pytest.fixture(scope="module")
def report() -> Report:
    options: dict[str, Any] = {"p": [0.9, 0.7], "block_size": BLOCK, "last_n": 16, "sink_tokens": 16}
    found = uniprefill_fx.explain(tiny_llama(4), token_ids(TOKENS), drop_layers=[1, 2], min_tokens=0, **options)
    assert (
        found.call is not None
        and found.call.dropped
        and len(found.call.kept_indices[2]) < len(found.call.kept_indices[1]) < TOKENS
    )
    return found


def expected_map(report: Report) -> list[list[float]]:
    """By layer and block: the share of its tokens that enter the layer, token by token."""
    assert report.call is not None
    alive, out = set(range(TOKENS)), []
    for layer in range(4):
        blocks = [range(i, min(i + BLOCK, TOKENS)) for i in range(0, TOKENS, BLOCK)]
        out.append([round(sum(t in alive for t in block) / len(block), 3) for block in blocks])
        if layer in report.call.kept_indices:
            alive = set(report.call.kept_indices[layer].tolist())
    return out


def test_contents(report: Report, tmp_path: Path) -> None:
    report.to_html(tmp_path / "report.html", Tokenizer())
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert not page.loads
    data = json.loads(page.data)
    (shown,) = data["maps"]
    assert shown["rows"] == expected_map(report)
    assert (shown["width"], shown["tokens"]) == (BLOCK, TOKENS)
    ids = token_ids(TOKENS)[0].tolist()
    assert shown["texts"][1] == Tokenizer().decode(ids[BLOCK : 2 * BLOCK])
    assert report.call is not None
    assert [layer["rows"] for layer in data["layers"]] == list(report.call.num_tokens)
    assert [layer["drop"] and layer["drop"].split(":")[0] for layer in data["layers"]] == [None, "p=0.9", "p=0.7", None]
    assert {layer["attention"] for layer in data["layers"]} == {"full"}
    assert data["title"] == "LlamaForCausalLM: 4 layers, 300 tokens"
    assert f"torch {torch.__version__}" in data["made"] and re.match(r"\d{4}-\d\d-\d\d, uniprefill-fx", data["made"])
    assert data["dropped"] and [layer["dropped"] for layer in data["layers"]] == [False, True, True, False]
    before, after = (code for _, code in data["graphs"])
    assert "scaled_dot_product_attention" in before and "uniprefill.select" in after
    assert f"{1 - report.call.compute_fraction:.0%}" in dict((name, value) for name, value in data["figures"]).values()


BLOCKS: dict[str, Any] = {"attention": "block_sparse", "sparse_alpha": 0.97, "sparse_block_size": 64}
BLOCKS |= {"sparse_sink_blocks": 1, "sparse_window_blocks": 1, "sparse_last_tokens": 64, "sparse_min_tokens": 0}


@pytest.fixture(scope="module")
def sparse_report() -> Report:
    """Layers 1 and 3 have full attention, and so blocks to leave out."""
    return uniprefill_fx.explain(tiny_gemma3(layers=4), token_ids(700), drop_layers="none", min_tokens=0, **BLOCKS)


def test_density(sparse_report: Report) -> None:
    """Beside each block-sparse layer its density; FLOPs fall by that part of its attention."""
    assert sparse_report.call is not None
    density = sparse_report.call.density
    data = contents(sparse_report)
    assert [layer["density"] for layer in data["layers"]] == [None, density[1], None, density[3]]
    assert 0 < density[1] < 0.9 and not data["dropped"]
    assert f"{1 - (density[1] + density[3]) / 2:.0%}" in [value for name, value in data["figures"] if "blocks" in name]
    assert "sparse_alpha=0.97" in data["about"]
    config = tiny_gemma3(layers=4).config
    attention = 4 * config.num_attention_heads * config.head_dim * 700 * 701 / 2 / 1e9
    for layer in (0, 1, 3):
        saved = data["layers"][layer]["dense_gflop"] - data["layers"][layer]["gflop"]
        assert saved == pytest.approx(attention * (1 - density.get(layer, 1.0)))


def test_nothing_saved_has_no_sign() -> None:
    """Scoring alone costs a little more than dense: still 0%, and not -0%."""
    options: dict[str, Any] = {"p": 1.0, "last_n": 1, "min_tokens": 0}
    found = uniprefill_fx.explain(tiny_llama(3), token_ids(TOKENS), drop_layers=[1], **options)
    assert found.savings is not None and -0.005 < found.savings.flops_saved < 0
    data = contents(found)
    assert [value for _, value in data["figures"]] == ["0%", "0%", "0%"]
    assert [layer["scoring"] for layer in data["layers"]] == [False, True, False]
    assert not any(layer["dropped"] for layer in data["layers"]), "a red line where nothing went"


def test_short_passes_share_a_line(report: Report) -> None:
    compilation = copy.copy(report.decoder)
    compilation.seconds = {"plan": 0.004, "rewrite": 0.5, "split": 0.002, "propagate": 0.01}
    shown = contents(dataclasses.replace(report, compilations=(compilation,)))["passes"]
    assert shown == [("rewrite", 0.5), ("propagate", 0.01), ("2 others, each below 0.01 s", pytest.approx(0.006))]


def test_half_a_surrogate(report: Report, tmp_path: Path) -> None:
    class Halves:
        def decode(self, ids: Sequence[int]) -> str:
            return "\ud83d and"

    report.to_html(tmp_path / "report.html", Halves())
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert json.loads(page.data)["maps"][0]["texts"][0] == "\ud83d and"


def test_batches_have_a_map_each() -> None:
    """Two prompts, one of them left-padded: each map shows its own kept columns and text."""
    ids = token_ids(2 * 256).reshape(2, 256).clone()
    mask = torch.ones_like(ids)
    ids[1, :60] = mask[1, :60] = 0
    options: dict[str, Any] = {"p": 0.7, "block_size": BLOCK, "last_n": 16, "sink_tokens": 16}
    call = {"attention_mask": mask}
    found = uniprefill_fx.explain(tiny_llama(3), ids, call=call, drop_layers=[1], min_tokens=0, **options)
    assert found.call is not None and found.call.dropped
    data = contents(found, Tokenizer())
    first, second = data["maps"]
    start = found.call.cu_seqlens[1][1]
    for shown, kept, row in (
        (first, found.call.kept_indices[1][:start], 0),
        (second, found.call.kept_indices[1][start:], 1),
    ):
        inside = set(kept.tolist())
        blocks = [range(i, i + BLOCK) for i in range(0, 256, BLOCK)]
        assert shown["rows"][0] == shown["rows"][1] == [1.0] * 16
        assert shown["rows"][2] == [round(sum(t in inside for t in block) / BLOCK, 3) for block in blocks]
        assert shown["texts"][5] == Tokenizer().decode(ids[row, 5 * BLOCK : 6 * BLOCK].tolist())
    assert second["rows"][2][:3] == [0.0] * 3 and first["rows"][2][0] == 1.0
    assert len(data["figures"]) == 3


def test_a_padded_prompt_by_keyword() -> None:
    """Ids and mask come by keyword: the map has the columns of the input, and the tokens' text."""
    ids = token_ids(256)
    mask = torch.ones_like(ids)
    mask[0, :60] = 0
    options: dict[str, Any] = {"p": 0.7, "block_size": BLOCK, "last_n": 16, "sink_tokens": 16}
    call = {"input_ids": ids, "attention_mask": mask}
    found = uniprefill_fx.explain(tiny_llama(3), call=call, drop_layers=[1], min_tokens=0, **options)
    assert found.call is not None and found.call.dropped and found.call.tokens == 196
    (shown,) = contents(found, Tokenizer())["maps"]
    inside = set(found.call.kept_indices[1].tolist())
    assert shown["rows"][2] == [
        round(sum(t in inside for t in range(i, i + BLOCK)) / BLOCK, 3) for i in range(0, 256, BLOCK)
    ]
    assert shown["texts"][5] == Tokenizer().decode(ids[0, 5 * BLOCK : 6 * BLOCK].tolist())


def test_a_dense_batch_has_a_map_each() -> None:
    ids = token_ids(2 * 64).reshape(2, 64)
    found = uniprefill_fx.explain(tiny_llama(2), ids, drop_layers=[0], min_tokens=100, p=0.99)
    assert found.call is not None and not found.call.dropped and found.call.tokens == 128
    assert [(shown["tokens"], shown["rows"]) for shown in contents(found)["maps"]] == [(64, [[1.0], [1.0]])] * 2
    assert not contents(found)["dropped"] and contents(found)["headline"] == (
        f"this prompt ran dense: {found.call.reason}",
    )
    assert [(layer["drop"], layer["dropped"]) for layer in contents(found)["layers"]] == [
        ("planned: p=0.99", False),
        (None, False),
    ]


def test_refusals_are_shown(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    found = uniprefill_fx.explain(tiny_gemma3(layers=2, layer_types=["sliding_attention"] * 2), token_ids(64))
    found.to_html(tmp_path / "report.html")
    data = json.loads(Page((tmp_path / "report.html").read_text(encoding="utf-8")).data)
    assert any("no-full-attention" in reason for reason in data["refusals"])
    assert not data["maps"] and len(data["graphs"]) == 1
    with pytest.raises(ValueError, match="no prompt"):
        found.plot()


@pytest.mark.parametrize("tokens", [1, 100, 128 * 64, 128 * 64 + 1, 131_072])
def test_columns(tokens: int) -> None:
    """Whole blocks, at most `COLUMNS` of them, and no more blocks in one than needed."""
    width = column_width(tokens, 64)
    assert width % 64 == 0 and math.ceil(tokens / width) <= COLUMNS
    assert width == 64 or math.ceil(tokens / (width - 64)) > COLUMNS


def test_map_of_a_ragged_end() -> None:
    assert kept_map(2, 10, {0: torch.tensor([0, 1, 8, 9])}, 4) == [[1.0, 1.0, 1.0], [0.5, 0.0, 1.0]]


def test_plot(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    drawn = report.plot()
    left, right = drawn.axes
    (image,) = left.images
    assert [[round(x, 3) for x in row] for row in image.get_array().tolist()] == expected_map(report)
    assert report.call is not None
    assert [patch.get_width() for patch in right.patches] == list(report.call.num_tokens)
    drawn.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (Debian's package chromium)")


def opened(url: str, folder: Path) -> str:
    """The document after its scripts ran."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder}/profile", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@needs_chromium
def test_in_a_browser(report: Report, tmp_path: Path) -> None:
    """It opens, no script fails, and the map has the right cells."""
    report.to_html(tmp_path / "report.html", Tokenizer())
    url = (tmp_path / "report.html").as_uri()
    dom = opened(url, tmp_path)
    page = Page(dom)
    (body,) = [found for tag, found in page.tags if tag == "body"]
    assert body.get("data-ready") == "yes" and "data-error" not in body
    cells = [found for tag, found in page.tags if tag == "div" and found.get("class") == "cell"]
    want = expected_map(report)
    assert len(cells) == sum(map(len, want))
    for cell in cells:
        layer, column = int(str(cell["data-layer"])), int(str(cell["data-column"]))
        assert float(str(cell["data-kept"])) == want[layer][column]
    assert len(re.findall(r"<details>", dom)) == 2


@needs_chromium
def test_density_in_a_browser(report: Report, sparse_report: Report, tmp_path: Path) -> None:
    """A bar a layer as wide as its density; without block-sparse attention there is no such picture."""
    shown = []
    for each in (report, sparse_report):
        each.to_html(tmp_path / "report.html")
        dom = opened((tmp_path / "report.html").as_uri(), tmp_path)
        assert "data-error" not in dom and 'data-ready="yes"' in dom
        found = re.search(r'<div id="density">(.*?)</table>', dom)
        shown.append(found[1] if found else "")
    assert sparse_report.call is not None and not shown[0]
    widths = [float(width) for width in re.findall(r"width: ([\d.]+)%", shown[1])]
    assert widths == pytest.approx([100 * share for share in sparse_report.call.density.values()], rel=1e-4)
    assert re.findall(r"layer (\d)", shown[1]) == ["1", "3"]


NARROW = """<body><iframe style="width: 360px; height: 4000px; border: 0" srcdoc="%PAGE%"></iframe><script>
onload = () => {
  const page = document.querySelector("iframe").contentDocument, found = document.body.dataset;
  found.width = page.documentElement.scrollWidth;
  const scrolls = e => getComputedStyle(e).overflowX !== "visible" || (e.parentElement && scrolls(e.parentElement));
  found.cut = [...page.body.querySelectorAll("*")].filter(
    e => e.getBoundingClientRect().right > 360 && !scrolls(e)).map(e => e.tagName).join();
  const cells = [...page.querySelectorAll(".cell")], tip = page.getElementById("tip");
  found.stops = cells.filter(cell => cell.tabIndex === 0).length;
  cells[0].focus();
  found.first = tip.textContent;
  for (const key of ["ArrowDown", "ArrowRight", "ArrowUp", "ArrowDown", "ArrowUp", "ArrowUp"])
    page.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  found.moved = tip.textContent;
  found.legend = page.querySelector(".legend").textContent;
};
</script>"""


@needs_chromium
def test_narrow_and_by_keyboard(report: Report, tmp_path: Path) -> None:
    """At 360 pixels nothing is cut outside of what scrolls; arrow keys move from cell to cell and stop at the edge."""
    report.to_html(tmp_path / "report.html")
    inner = html.escape((tmp_path / "report.html").read_text(encoding="utf-8"))
    (tmp_path / "narrow.html").write_text(NARROW.replace("%PAGE%", inner), encoding="utf-8")
    page = Page(opened((tmp_path / "narrow.html").as_uri(), tmp_path))
    (body,) = [found for tag, found in page.tags if tag == "body"]
    assert (body["data-width"], body["data-cut"], body["data-stops"]) == ("360", "", "1")
    assert body["data-first"] == "layer 0, tokens 0 to 15: 100% computed"
    assert body["data-moved"] == "layer 0, tokens 16 to 31: 100% computed"
    assert "dropped after this layer" in str(body["data-legend"])
