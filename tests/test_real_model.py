"""What `benchmarks/real_model.py` measures with: a forward without the package, other scores, prompts, tokens."""

from __future__ import annotations

import importlib
import json
import random
import re
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ROOT
from eager_reference import DropSpec, EagerReference
from exactness import assert_near
from tiny import tiny_gemma3, tiny_llama, token_ids
from torch import Tensor

from uniprefill_fx.config import PRESETS

sys.path.insert(0, str(ROOT / "benchmarks"))
masked: Any = importlib.import_module("masked_forward")
variants: Any = importlib.import_module("score_variants")
texts: Any = importlib.import_module("real_texts")
tokenizers_of_gguf: Any = importlib.import_module("gguf_tokenizer")
tools: Any = importlib.import_module("real_model_tools")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "SINK", 16)
    monkeypatch.setattr(variants, "LAST", 16)


@pytest.mark.parametrize("make", [lambda: tiny_gemma3(layers=6), lambda: tiny_llama(4)], ids=["gemma3", "llama"])
def test_the_forward_without_the_package_is_the_references(make: Any) -> None:
    """Rows kept, the prompt's last logits, and those of tokens that follow on the compact cache."""
    spec = DropSpec((1, 3), p=(0.9, 0.6), block_size=16, last_n=16, sink_tokens=16)
    ids, follow = token_ids(300), [7, 80, 12]
    reference = EagerReference(make(), spec)
    want = reference.prefill(ids)
    select = variants.Variant(p=spec.p, last_n=16, block_size=16)
    forward = masked.MaskedForward(make(), spec.drop_layers)
    logits, kept = forward(ids, follow, select)
    assert len(kept[1]) < len(kept[0]) < 300
    for layer, rows in zip(spec.drop_layers, kept, strict=True):
        assert torch.equal(rows, want.kept[layer])
    assert_near(logits[:1], want.last_logits[0])
    for i, token in enumerate(follow):
        assert_near(logits[i + 1 : i + 2], reference.step(torch.tensor([[token]]))[0])
    layers = forward.layers
    counts = [300 if layer <= 1 else len(kept[0]) if layer <= 3 else len(kept[1]) for layer in range(layers)]
    assert forward.compute_fraction(300, kept) == pytest.approx(sum(counts) / 300 / layers)
    with torch.inference_mode():
        assert_near(forward(ids)[0], make()(ids).logits[0, -1:])


@pytest.mark.parametrize("make", [lambda: tiny_gemma3(layers=6), lambda: tiny_llama(2)], ids=["gemma3", "llama"])
def test_continuations_of_several_prompts_are_those_of_each(make: Any) -> None:
    """Beside a run without a cache."""
    model, prompts = make(), [token_ids(200, seed) for seed in (0, 1, 2)]
    for ids, said in zip(prompts, tools.greedy(model, prompts, 5), strict=True):
        for token in said:
            with torch.inference_mode():
                assert int(model(ids, use_cache=False).logits[0, -1].argmax()) == token
            ids = torch.cat([ids, torch.tensor([[token]])], 1)


def test_settings() -> None:
    """A preset's p by depth, lists evenly from the first to the last drop, and each by its name."""
    depths = [1 / 3, 1 / 2, 2 / 3]
    want = {
        "quality": [0.999, 0.974, 0.95],
        "0.9": [0.9, 0.9, 0.9],
        "0.9..0.5": [0.9, 0.7, 0.5],
    }
    for text, each in want.items():
        setting = tools.Setting.parse(text)
        assert setting.p(depths) == pytest.approx(each, abs=6e-4) and setting.name.removeprefix("p=") == text
    calibrated = tools.Setting((1.0, 0.9, 0.3))
    assert calibrated.p(depths) == [1.0, 0.9, 0.3] and calibrated.name == "p=1..0.9..0.3"
    assert tools.Setting.parse("dense") == tools.DENSE and tools.DENSE.name == "dense"


def test_as_many_rows_as_another_choice() -> None:
    """Whatever ranks them; the first and the last rows are among them, and random ones depend on the seed."""
    ids, forward = token_ids(300), masked.MaskedForward(tiny_llama(4), (1, 2))
    base = variants.Variant(p=(0.8, 0.6), last_n=16, block_size=16)
    _, kept = forward(ids, (), base)
    found: dict[str, list[Tensor]] = {}
    for variant in [*variants.VARIANTS, *map(variants.Variant, variants.RIVALS)]:
        _, rows = forward(ids, (), variant.like(kept, seed=0))
        assert [len(own) for own in rows] == [len(own) for own in kept], variant.label
        assert set(range(16)) | set(range(284, 300)) <= set(rows[1].tolist())
        found[variant.name] = rows
    _, recent = forward(ids, (), variants.Variant("recent", block_size=1).like(kept, seed=0))
    assert torch.equal(recent[0][16:], torch.arange(300 - len(kept[0]) + 16, 300))
    _, again = forward(ids, (), variants.Variant("random blocks").like(kept, seed=5))
    assert not torch.equal(again[0], found["random blocks"][0])


def test_union_of_heads_is_the_union_of_their_top_p() -> None:
    """The n highest ranks are the union of what each head keeps with the p at which that union has n blocks."""
    by_head = torch.rand(3, 12, generator=torch.Generator().manual_seed(0)) ** 4
    rank = variants.union_rank(by_head)
    for p in (0.2, 0.5, 0.8, 0.95):
        union = set()
        for head in by_head.double():
            before = 0.0
            for block in head.argsort(descending=True).tolist():
                if before < p * float(head.sum()):
                    union.add(block)
                before += float(head[block])
        assert set(rank.argsort(descending=True)[: len(union)].tolist()) == union


def test_norms_behind_the_output_projection() -> None:
    """Those of the vectors that each head adds to the stream, written out."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, 40, 8, generator=draw) for heads in (4, 2, 2))
    project = torch.randn(10, 32, generator=draw)
    layer = masked.Layer(q, k, v, 8**-0.5, project, 0)
    look = variants.Look(variants.attention_of_last(layer, 5), layer)
    norms = variants._output_norms(look)[:, 0]
    for head in range(4):
        added = v[head // 2] @ project[:, 8 * head : 8 * head + 8].T
        torch.testing.assert_close(norms[head], added.norm(dim=-1))
    logits = (q[1, -1] @ k[0].T) * 8**-0.5
    torch.testing.assert_close(look.attention[1, -1], logits.softmax(-1))


def naive_pieces(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE as it is defined: merge the pair whose piece has the highest score, leftmost first."""
    parts = list(text)
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_merges_by_score_are_sentencepieces() -> None:
    """On random vocabularies and texts."""
    from tokenizers import Tokenizer, models

    draw = random.Random(0)
    for _ in range(20):
        pieces = list("abcd")
        for _ in range(30):
            pieces.append(draw.choice(pieces) + draw.choice(pieces))
        pieces = [p for p in dict.fromkeys(pieces) if len(p) <= 8]
        scores = [-1e9 if len(piece) == 1 else -float(i) for i, piece in enumerate(pieces)]
        merges = tokenizers_of_gguf.merges_of(pieces, scores, [tokenizers_of_gguf.NORMAL] * len(pieces))
        vocabulary = {piece: i for i, piece in enumerate(pieces)}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        for _ in range(20):
            text = "".join(draw.choices("abcd", k=40))
            named = {piece: score for piece, score in zip(pieces, scores, strict=True) if len(piece) > 1}
            assert tokenizer.encode(text).tokens == naive_pieces(text, named)


def test_needles_lie_where_they_should() -> None:
    filler = torch.arange(1000, 2000)[None]
    prompt = texts.hide(filler, [(0.25, [1, 2, 3]), (0.75, [4, 5])], [6, 7], head=1)[0].tolist()
    assert len(prompt) == 1000 and prompt[0] == 1000 and prompt[-2:] == [6, 7]
    assert prompt.index(1) / 1000 == pytest.approx(0.25, abs=0.01) and prompt[prompt.index(1) :][:3] == [1, 2, 3]
    assert prompt.index(4) / 1000 == pytest.approx(0.75, abs=0.01)
    rest = [i for i in prompt if i >= 1000]
    assert rest == list(range(1000, 1000 + len(rest)))
    for task in (texts.pass_key, texts.multi_key):
        for depth in range(texts.DEPTHS):
            hidden, question, answer = task(depth, 3)
            (told,) = [place for place, line in hidden if f"{answer.strip(' .')}" in line]
            assert told == pytest.approx((depth + 0.5) / texts.DEPTHS) and answer.strip(" .") not in question


def test_texts_are_different_passages(tmp_path: Path) -> None:
    licence = "Permission is granted. " * 100
    for i in range(3):
        (tmp_path / f"LICENSE{i}.txt").write_text(licence)
    (tmp_path / "a.md").write_text("Something else. " * 200)
    (tmp_path / "b.md").write_text("short")
    text = texts.gather([tmp_path], "prose", 10**6)
    assert text.count(licence.strip()) == 1 and "Something else." in text and "short" not in text
    assert len(texts.gather([tmp_path], "code", 10**6)) == 1
    starts = [int(ids[0, 1]) for ids in texts.windows(range(100), 21, 5, [9])]
    assert starts == [0, 20, 40, 60, 80]
    with pytest.raises(SystemExit, match="a text of 99 tokens for 5 prompts of 21: wanted 100"):
        texts.windows(range(99), 21, 5, [9])


def test_intervals() -> None:
    values = [float(x) for x in torch.randn(200, generator=torch.Generator().manual_seed(1)).exp()]
    found, mean = tools.bootstrap(values), sum(values) / 200
    error = float(torch.tensor(values).std()) / 200**0.5
    assert found.mean == pytest.approx(mean)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.15)
    ratio = tools.paired_ratio([2 * v for v in values], values)
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    ratio = tools.paired_ratio([1.0, 4.0, 1e-9], [1.0, 1.0, 1e-7])  # what is below rounding is equal
    assert ratio.mean == pytest.approx(4 ** (1 / 3)) and ratio.low >= 1.0


def test_comparison_is_the_divergence() -> None:
    dense, other = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    other[2] = dense[2]
    found = tools.compare(dense, other)
    by_hand = [
        float((a.softmax(-1) * (a.log_softmax(-1) - b.log_softmax(-1))).sum())
        for a, b in zip(dense, other, strict=True)
    ]
    assert found["kl"] == pytest.approx(by_hand[0], rel=2e-3)
    assert found["kl_all"] == pytest.approx(sum(by_hand) / 3, rel=2e-3)
    same = (dense.argmax(-1) == other.argmax(-1)).double()
    assert (found["top1"], found["top1_all"]) == pytest.approx((float(same[0]), float(same.mean())), abs=1e-4)


@pytest.mark.slow
def test_a_whole_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, _small: None
) -> None:
    """Package and forward agree on what the published scores keep and cost; p = 1 costs nothing."""
    monkeypatch.undo()
    study: Any = importlib.import_module("real_model")
    monkeypatch.setattr(study, "VARIANTS", study.VARIANTS[:2])
    (tmp_path / "a.txt").write_text("".join(chr(32 + i * i * 7 % 90) for i in range(5000)))
    model = str(ROOT / "examples" / "ruler-gemma3")
    (tmp_path / "b.txt").write_text("".join(chr(32 + i * i * 11 % 90) for i in range(20000)))
    texts = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    command = f"--model {model} --text {' '.join(texts)} --out {tmp_path / 'out.json'} --lengths 700 --prompts 1 "
    command += "--needles 1 --grid 1 0.9..0.6 --like 0.9..0.6 --timed 0.9..0.6 --needled 0.9 --rounds 1 --device cpu "
    study.main([*command.split(), "--parts", "time", "text", "passkey", "multikey", "rivals", "variants"])
    (report,) = json.loads((tmp_path / "out.json").read_text())
    rows = [dict(zip(report["columns"], row, strict=True)) for row in report["records"]]
    own = {row["setting"]: row for row in rows if row["part"] in ("text", "variants")}
    assert own["p=1"]["kl_all"] < 1e-6 and own["p=1"]["compute"] == 1.0
    package, forward = own["p=0.9..0.6"], own["sum like p=0.9..0.6"]
    assert package["kept"] == forward["kept"] and package["compute"] == forward["compute"] < 1
    assert package["kl_all"] == pytest.approx(forward["kl_all"], rel=1e-2, abs=1e-5)
    assert {row["part"] for row in rows} == {"text", "variants", "passkey", "multikey"}
    assert set(report["times"]["700"]) == {"dense", "p=0.9..0.6"}
    assert "| 700 | p=0.9..0.6 | 2 |" in capsys.readouterr().out


PAGE_COLUMNS = "| setting | p | tokens | prompts | compute |"


def settings_of(page: str) -> dict[tuple[str, int], list[str]]:
    """By setting and length, the cells behind the length; what a page says of a preset's p is the package's."""
    found: dict[tuple[str, int], list[str]] = {}
    setting = ""
    for line in page[page.index(PAGE_COLUMNS) :].split("\n\n")[0].splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0]:
            first, _, last = cells[1].partition(" to ")
            name = cells[0].split('"')[1] if '"' in cells[0] else cells[0]
            one = f"p={float(first):g}"
            setting = name if name in PRESETS else one + (f"..{float(last):g}" if last else "")
            if name in PRESETS:
                assert (float(first), float(last)) == (PRESETS[name].early, PRESETS[name].late)
        found[setting, int(cells[2].replace(",", ""))] = cells[3:]
    return found


def numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d[\d,]*\.?\d*(?:e-\d+)?|\.\d+", cell.replace(",", ""))]


def real_records(name: str) -> list[dict[str, Any]]:
    (run,) = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return [dict(zip(run["columns"], row, strict=True)) | {"run": run} for row in run["records"]]


def expected(own: list[dict[str, Any]]) -> list[float]:
    """Prompts, compute, KL of the next token and of 64 positions with intervals, its median and worst, agreement."""

    def interval(key: str) -> list[float]:
        values = torch.tensor([record[key] for record in own], dtype=torch.float64)
        drawn = values[torch.randint(len(values), (4000, len(values)), generator=torch.Generator().manual_seed(7))]
        return [float(values.mean()), *drawn.mean(1).quantile(torch.tensor([0.025, 0.975]).double()).tolist()]

    kls = sorted(record["kl_all"] for record in own)
    middle = [kls[(len(kls) - 1) // 2], kls[len(kls) // 2]]
    compute, agreed = (statistics.fmean(record[key] for record in own) for key in ("compute", "top1_all"))
    return [len(own), compute, *interval("kl"), *interval("kl_all"), sum(middle) / 2, kls[-1], 100 * agreed]


@pytest.mark.parametrize(("page", "rows"), [("choosing-p.md", 24), ("benchmarks.md", 21)])
def test_the_pages_say_what_was_measured(page: str, rows: int) -> None:
    """Each row is that of the records."""
    records = real_records("real_model_gemma270m")
    found = settings_of((ROOT / "docs" / page).read_text())
    for (setting, tokens), cells in found.items():
        own = [record for record in records if (record["setting"], record["tokens"]) == (setting, tokens)]
        shown = [number for cell in cells[:-1] for number in numbers(cell)]
        assert shown == pytest.approx(expected(own), rel=0.15, abs=0.006), (setting, tokens)
        exact = [i for i in range(len(shown)) if i not in (3, 4, 6, 7)]  # intervals are drawn
        assert [shown[i] for i in exact] == pytest.approx([expected(own)[i] for i in exact], rel=0.06)
        times = records[0]["run"]["times"][str(tokens)].get(setting)
        assert numbers(cells[-1]) == ([round(statistics.median(times["ms"]), 1)] if times else [])
    assert len(found) == rows


def test_the_readme_says_what_was_measured() -> None:
    """Its table is over the prompts of all lengths."""
    records = real_records("real_model_gemma270m")
    times = records[0]["run"]["times"]
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| preset | compute left") :].split("\n\n")[0].splitlines()[2:]
    for name, line in zip(PRESETS, table, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        own = [record for record in records if (record["part"], record["setting"]) == ("text", name)]
        by_length = [
            statistics.fmean(record["compute"] for record in own if record["tokens"] == tokens)
            for tokens in {record["tokens"] for record in own}
        ]
        n, _, *_, mean, low, high, _, worst, agreed = expected(own)
        assert n == 84 and f'"{name}"' in cells[0]
        assert numbers(cells[1]) == [round(min(by_length), 2), round(max(by_length), 2)]
        assert numbers(cells[2]) == pytest.approx([mean, low, high], rel=0.1)
        assert numbers(cells[3]) == pytest.approx([worst], rel=0.06) and numbers(cells[4]) == [round(agreed, 1)]
        shown = [number for cell in cells[5:] for number in numbers(cell)]
        assert shown == [round(statistics.median(times[tokens][name]["ms"]), 1) for tokens in ("4096", "32768")]


def test_the_page_says_which_needles_were_found() -> None:
    """Right answers and lost ones by task, setting and length."""
    records = real_records("real_model_gemma270m_needles")
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    table = page[page.index("| task | setting | 4,096 tokens") :].split("\n\n")[0].splitlines()[2:]
    names = ["dense", "quality", "balanced", "fast", "p=0.99", "p=0.9"]
    names += [f"{name} like balanced" for name in ("sum", "recent", "random blocks")]
    wanted = [(task, name) for task in ("passkey", "multikey") for name in names]
    for (task, name), line in zip(wanted, table, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        all_lost = all_dense = 0
        for tokens, cell in zip((4096, 8192, 16_384, 32_768), cells[2:6], strict=True):
            own = [r for r in records if (r["part"], r["tokens"]) == (task, tokens)]
            dense = {r["prompt"] for r in own if r["setting"] == "dense" and r["right"]}
            right = {r["prompt"] for r in own if r["setting"] == name and r["right"]}
            asked = {r["prompt"] for r in own}
            shown = [len(right), len(asked) if name == "dense" else len(dense - right)]
            assert numbers(cell.replace(",", " ")) == (shown if own else [])
            all_lost, all_dense = all_lost + len(dense - right), all_dense + len(dense)
        assert name == "dense" or numbers(cells[6]) == [all_lost, all_dense]


def test_the_page_says_what_calibrate_found() -> None:
    """What it promised, and what its choice cost on the kinds of text that it did not see."""
    records = real_records("real_model_gemma270m_needles")
    page = (ROOT / "docs" / "choosing-p.md").read_text()
    table = page[page.index("| calibrated on | p |") :].split("\n\n")[0].splitlines()[2:]
    for found, line in zip(records[0]["run"]["calibrations"], table, strict=True):
        kind, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        own = [record for record in records if record["part"] == f"calibrated on {kind}"]
        kl, kl_all, compute = (statistics.fmean(r[key] for r in own) for key in ("kl", "kl_all", "compute"))
        assert kind == found["kind"] and kind not in {record["kind"] for record in own}
        assert [float(p) for p in cells[0].split(", ")] == found["p"]
        promised, held_out, own_compute, n, first, every, others_compute = cells[1:]
        assert [float(kl) for kl in promised.split(", ")] == pytest.approx([found["kl"], found["bound"]], rel=0.06)
        assert float(held_out) == pytest.approx(found["held_out_kl"], rel=0.06) and int(n) == len(own) == 14
        assert [float(own_compute), float(others_compute)] == [round(found["compute"], 2), round(compute, 2)]
        assert [float(first.split()[0]), float(every.split()[0])] == pytest.approx([kl, kl_all], rel=0.06)
