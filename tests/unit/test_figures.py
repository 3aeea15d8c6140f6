"""Every figure of README and docs equals its JSON file, and claims about figures hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.figures import PAGES, ROOT, rewritten, uncovered
from benchmarks.headline_table import joined
from benchmarks.load_table import LOAD_TABLES
from benchmarks.picture_tables import PICTURE_TABLES
from benchmarks.pocket_quality import CACHES, ENGINES
from benchmarks.quality_tables import QUALITY_TABLES
from benchmarks.result_values import RESULTS, significant, value_at
from benchmarks.shape_tables import SHAPE_TABLES, SHAPES_8B, WORKS, records
from benchmarks.source_tables import SOURCE_TABLES
from benchmarks.speech_tables import SPEECH_TABLES
from benchmarks.tables import BATCHES, GPU_TABLES, LABELS

TABLES = {
    **GPU_TABLES,
    **SHAPE_TABLES,
    **LOAD_TABLES,
    **QUALITY_TABLES,
    **SPEECH_TABLES,
    **SOURCE_TABLES,
    **PICTURE_TABLES,
}
BEYOND = 5.0  # points of other first choices, ingot eval's limit


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_what_its_files_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == rewritten(text, TABLES), "run python benchmarks/figures.py --write"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_figure_is_without_a_file(page: Path) -> None:
    assert list(uncovered(page.read_text(encoding="utf-8"))) == []


def test_every_table_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in TABLES if f"<!-- figures: {name} -->" not in text] == []


def test_every_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read, plain = set(), Path.read_text

    def noting(self: Path, *given: str | None, **named: str | None) -> str:
        read.add(self)
        return plain(self, *given, **named)

    monkeypatch.setattr(Path, "read_text", noting)
    for page in PAGES:
        rewritten(page.read_text(encoding="utf-8"), TABLES)
    named = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    folders = (RESULTS, RESULTS / "reference", RESULTS / "beside_vllm")
    files = [file for folder in folders for file in folder.glob("*.json")]
    assert [file.name for file in files if file not in read and file.name not in named] == []


def test_the_headline_is_its_processes_joined() -> None:
    assert value_at("headline.json") == joined(RESULTS / "headline")


def test_every_engine_of_the_quality_tables_is_measured() -> None:
    found = {name for name in value_at("pocket_quality.json", "engines") if not name.startswith("rptq")}
    assert found == {*ENGINES, *CACHES}  # RPTQ's are in a file of their own


class TestClaims:
    """What README and docs say of the figures in words."""

    def test_decode_steps_beside_fp16(self) -> None:
        schemes = value_at("headline.json", "schemes")
        slower = {
            (name, batch)
            for name in LABELS
            for batch in BATCHES
            if schemes[name]["decode"][batch]["p50"] > schemes["none"]["decode"][batch]["p50"]
        }
        assert slower == {("w4a8", "32"), ("w4a8", "64"), ("w8a8", "32")}

    def test_the_8b_shapes_beside_vllm(self) -> None:
        """One commit, one card a shape; Ingot is ahead in every row; fewer bits are faster on prompts."""
        found = {shape: records(shape) for shape in SHAPES_8B}
        machines = [one["machine"] for sides in found.values() for one in sides.values()]
        assert len({(one["gpu"], one["commit"]) for one in machines}) == 1
        assert all(len({one["card"] for one in sides.values()}) == 1 for sides in found.values())
        shares = {
            (shape, work, figure): sides["none"]["results"][work][figure]["p50"]
            / sides["vllm"]["results"][work][figure]["p50"]
            for shape, sides in found.items()
            for work, figure in WORKS.values()
        }
        assert {place for place, share in shares.items() if share >= 1} == set()
        for sides in found.values():
            mixed = {name: sides[name]["results"]["mixed_tok_s"]["p50"] for name in ("vllm", "none")}
            assert mixed["none"] > mixed["vllm"]
            for work in ("b64", "b1_16k", "b8_16k"):
                dense, eight, four = (
                    sides[name]["results"][work]["ttft_ms"]["p50"] for name in ("none", "w8a16", "w4a16")
                )
                assert four <= eight <= dense

    def test_whisper_on_a_cpu(self) -> None:
        for shape in ("tiny", "small"):
            sides = value_at("whisper_cpu_race.json", f"shapes.{shape}")
            beside = sides["faster_whisper"]["1"]["all_ms"]
            shares = [round(sides[name]["1"]["all_ms"] / beside, 1) for name in ("w8a16", "w8a8")]
            assert shares == [0.8, 0.6]

    def test_the_headline_is_of_one_commit(self) -> None:
        assert len(value_at("headline.json", "commits")) == 1

    def test_prompts_beside_fp16(self) -> None:
        schemes = value_at("headline.json", "schemes")
        for name in ("w8a16", "w4a16"):
            for batch in BATCHES:
                assert schemes[name]["ttft"][batch]["p50"] > schemes["none"]["ttft"][batch]["p50"]
        for batch in BATCHES:
            assert schemes["w8a8"]["ttft"][batch]["p50"] < schemes["none"]["ttft"][batch]["p50"]

    def test_which_scheme_for_what(self) -> None:
        schemes = value_at("headline.json", "schemes")
        fastest = [min(LABELS, key=lambda name: schemes[name]["decode"][batch]["p50"]) for batch in BATCHES]
        assert fastest == ["w4a16", "w4a16", "w4a16", "w8a16"]
        loads = {name: one["mixed"]["p50"] for name, one in schemes.items() if "mixed" in one}
        assert sorted(loads, key=loads.__getitem__)[-2:] == ["w8a8", "w8a8_int8"]

    def test_fewer_bits_on_a_cpu_are_slower(self) -> None:
        for name in ("w8a16", "w4a16", "w8a8", "w4a8", "rptq"):
            for place in (0, 1):
                path = f"sides.0.results.{place}.decode_ms.p50"
                assert value_at(f"pocket_cpu_{name}.json", path) > value_at("pocket_cpu_none.json", path)

    def test_which_engines_are_within_the_limits(self) -> None:
        found = value_at("pocket_quality.json", "engines")
        engines = {name: one for name, one in found.items() if not name.startswith("rptq")}  # measured again
        beyond = {name for name, one in engines.items() if one["top1_disagreement"] > BEYOND}
        assert {name for name in engines if name.startswith("w4a16") and name.endswith("round")} <= beyond
        assert {name for name in engines if name.startswith("w4a8")} <= beyond
        static = {name for name in engines if name.startswith("w8a8 static")}
        assert static - beyond == {"w8a8 static smoothquant search"}
        assert {name for name in engines if name.startswith("w8a8")} - static <= engines.keys() - beyond
        assert all(one["kl_mean"] < 0.01 for one in engines.values())

    def test_sites_of_rptq_in_4_bits(self) -> None:
        """The down projection's input alone costs exact answers; with it in 8 bits all others may have 4."""
        engines = value_at("pocket_rptq.json", "engines")
        dense = engines["none"]["exact"]
        passing = {name for name, one in engines.items() if one["exact"] >= 0.95 * dense}
        assert {name for name in engines if "w4a4" not in name or "R5" in name} <= passing
        assert "rptq-w4a4 128 ema-minmax R5" in passing
        costs = [engines[f"rptq-w4a4 128 ema-minmax {sites}"]["kl_mean"] for sites in ("R5", "R1,R3,R4")]
        assert costs[0] < 0.1 * costs[1]

    def test_caches(self) -> None:
        engines = value_at("pocket_quality.json", "engines")
        costs = [engines[name]["kl_mean"] for name in ("none int8", "none fp8", "w8a16 round")]
        assert costs[0] < costs[1]
        assert costs[0] < costs[2] / 5


class TestNotation:
    @pytest.fixture
    def results(self, tmp_path: Path) -> Path:
        (tmp_path / "a.json").write_text(
            json.dumps({"steps": [{"ms": 2.6349, "kl": 4.9e-5}]}), encoding="utf-8"
        )
        return tmp_path

    def test_a_figure_of_a_sentence(self, results: Path) -> None:
        page = "It takes 2.63<!--= a.json steps.0.ms --> ms."
        assert rewritten(page, {}, results) == page
        assert rewritten(page.replace("2.63", "2.40"), {}, results) == page
        assert rewritten("9.9e-05<!--= a.json steps.0.kl -->", {}, results).startswith("4.9e-05<")

    @pytest.mark.parametrize("path", ["b.json steps", "a.json steps.1.ms", "a.json steps.0.us"])
    def test_a_path_that_is_not_there(self, results: Path, path: str) -> None:
        with pytest.raises(KeyError, match=path.split()[0]):
            rewritten(f"2.63<!--= {path} -->", {}, results)

    def test_a_table(self) -> None:
        page = "<!-- figures: one -->\n| old |\n<!-- end -->\n"
        assert rewritten(page, {"one": lambda: "| new |"}) == page.replace("old", "new")
        assert list(uncovered(page.replace("old", "3.14"))) == []

    @pytest.mark.parametrize(
        "line",
        [
            "A step takes 2.63 ms.",
            "| w8a8 | **2.63** |",
            "KL is 1.5e-03",
            "6,230 output tokens/s",
            "1.5 µs or 2",
        ],
    )
    def test_what_counts_as_measured(self, line: str) -> None:
        assert list(uncovered(line)) == [line]
        assert list(uncovered(f"```\n{line}\n```")) == []

    @pytest.mark.parametrize("line", ["Qwen2.5 has 7.72 B", "within 1e-4", "a limit of 0.01 nats", "3 steps"])
    def test_what_does_not(self, line: str) -> None:
        assert list(uncovered(line)) == []

    @pytest.mark.parametrize(
        ("value", "reported"),
        [(2.6349, "2.63"), (9.996, "10.0"), (99.96, "100"), (745.8, "746"), (0.0765, "0.0765"), (0, "0")],
    )
    def test_significant_digits(self, value: float, reported: str) -> None:
        assert significant(value) == reported
