"""Panels drawn by matplotlib: labels that do not collide, PNG and HTML."""

from __future__ import annotations

import importlib.util
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import DeviceError
from ingot.measure.bench import charts
from ingot.measure.bench.charts import ChartMark, Page, Panel, Series, write_html, write_png
from ingot.measure.side.text_table import Table


def line(name: str, x: float, y: float, count: int = 8) -> Series:
    """Points that double in speed and grow in memory."""
    marks = (ChartMark(x + 0.4 * 2**i, y * 2**i / (1 + 2**i / 99), str(2**i)) for i in range(count))
    return Series(name, "#0072B2", tuple(marks))


LINES = (line("a<b", 15, 200), line("c", 15.01, 199), line("d", 31, 90))
PANEL = Panel("Speed & memory", "GB", "tokens/s", LINES, front=((15.4, 198.0), (31.2, 90.0)))


WIDEST_X = max(m.x for s in LINES for m in s.marks) / min(m.x for s in LINES for m in s.marks)


@pytest.fixture
def drawn() -> Any:
    pytest.importorskip("matplotlib")
    return charts._figure([PANEL], "title", ["one line"])


def test_axes_are_logarithmic_where_values_span_enough(drawn: Any) -> None:
    (axes,) = drawn.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear" if WIDEST_X < 6 else "log", "log")
    ticks = [text.get_text() for text in axes.get_yticklabels()]
    assert "1,000" in ticks
    assert len(set(ticks)) == len(ticks)
    near = Panel(
        "t", "x", "y", (Series("a", "#0072B2", (ChartMark(-10, 5, "1"), ChartMark(1000, 5.1, "2"))),)
    )
    (axes,) = charts._figure([near], "", ()).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")


def test_every_mark_and_the_pareto_line_are_drawn(drawn: Any) -> None:
    (axes,) = drawn.axes
    points = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()}
    assert points == {"Pareto line": list(PANEL.front)} | {
        series.name: [(mark.x, mark.y) for mark in series.marks] for series in LINES
    }
    assert [axes.get_xlabel(), axes.get_ylabel()] == ["GB", "tokens/s"]


def test_labels_touch_no_other(drawn: Any) -> None:
    (axes,) = drawn.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) >= 12
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_the_page_stands_alone_and_escapes_text(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "sweep.html"
    table = Table("t", ("precision", "batch"), (("a<b", "1"),))
    write_html([PANEL, PANEL], Page("model <x>", ["about"], table, ["a note"], ["ingot sweep --x"]), path)
    page = path.read_text()
    assert page.count("<svg") == page.count("</svg>") == 1
    assert "<?xml" not in page
    assert "model &lt;x&gt;" in page
    assert "<x>" not in page
    assert "<td>a&lt;b</td>" in page
    for absent in ("<script", "src=", "url(http"):
        assert absent not in page


def test_without_matplotlib_the_page_has_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = tmp_path / "sweep.html"
    write_html([PANEL], Page("title", [], Table("t", ("precision",), (("fp16",),))), path)
    assert "<td>fp16</td>" in path.read_text()
    assert "<svg" not in path.read_text()


def test_the_png_is_drawn_by_matplotlib(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "sweep.png"
    write_png([PANEL, PANEL], "title", ["one line"], path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    assert width > 2 * height > 1200


def test_a_missing_matplotlib_is_named_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        DeviceError, match=r"pip install -c constraints.txt '.\[sweep\]' in Ingot's folder, or `no_png=True`"
    ):
        write_png([PANEL], "title", [], tmp_path / "sweep.png")
