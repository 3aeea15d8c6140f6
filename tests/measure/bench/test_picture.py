"""Panels laid out and drawn: scales, ticks, labels that do not collide, PNG and HTML."""

from __future__ import annotations

import importlib.util
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ingot.errors import DeviceError
from ingot.measure.bench.charts.chart_html import Page, svg, write_html
from ingot.measure.bench.charts.chart_layout import (
    COLORS,
    FRONT_COLOR,
    LABEL_SIZE,
    MARK_SIZE,
    ON_DARK,
    OTHER_COLOR,
    Frame,
    Mark,
    Panel,
    Scale,
    Series,
    tick_texts,
)
from ingot.measure.bench.charts.chart_png import write_png
from ingot.measure.side.text_table import Table


def line(name: str, x: float, y: float, count: int = 8) -> Series:
    """Points that double in speed and grow in memory."""
    marks = (
        Mark(x + 0.4 * 2**i, y * 2**i / (1 + 2**i / 99), str(2**i), f"{name} {2**i}") for i in range(count)
    )
    return Series(name, "#0072B2", tuple(marks))


LINES = (line("a<b", 15, 200), line("c", 15.01, 199), line("d", 31, 90))
PANEL = Panel("Speed & memory", "GB", "tokens/s", LINES, front=((15.4, 198.0), (31.2, 90.0)))


def test_scales_are_logarithmic_where_values_span_enough() -> None:
    scale = Scale.over([10, 1000])
    assert scale.log
    assert scale.at(100) == pytest.approx(0.5)
    assert Scale.over([10, 20]).log is False
    assert Scale.over([-10, 1000]).log is False
    assert 0 < Scale.over([7.0]).at(7.0) < 1


@pytest.mark.parametrize(
    "values",
    [[10, 1000], [1, 9], [3.2, 3.3], [0.001, 5000], [5, 5], [15.4, 102], [1.8631, 1.86312], [2871.7, 2872.4]],
)
def test_ticks_are_few_and_within_the_axis(values: list[float]) -> None:
    scale = Scale.over(values)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 8
    assert all(-1e-9 <= scale.at(tick) <= 1 + 1e-9 for tick in ticks)
    assert len(set(tick_texts(ticks))) == len(ticks)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([2871.8, 2872.0, 2872.2000000000003], ["2,871.8", "2,872", "2,872.2"]),
        ([20000, 40000], ["20,000", "40,000"]),
        ([999.5, 1000.0, 1000.5], ["999.5", "1,000", "1,000.5"]),
        ([0.5, 10], ["0.5", "10"]),
        ([1500], ["1,500"]),
    ],
)
def test_ticks_have_the_digits_that_tell_them_apart(values: list[float], texts: list[str]) -> None:
    assert tick_texts(values) == texts


def test_a_dark_page_has_its_own_colours(tmp_path: Path) -> None:
    write_html([PANEL], Page("t", [], Table("t", ("a",), ())), tmp_path / "sweep.html")
    page = (tmp_path / "sweep.html").read_text()
    dark = page.partition("@media (prefers-color-scheme: dark)")[2].partition("</style>")[0]
    for color in {*COLORS, OTHER_COLOR, FRONT_COLOR}:
        light, other = (luminance(c) for c in (color, ON_DARK[color]))
        assert other > light or color == FRONT_COLOR  # a band behind the lines
        assert f"{ON_DARK[color]}" in dark
    used = {series.color for series in PANEL.series}
    for color in used:
        assert f"var(--ink-{color[1:].lower()}, {color})" in page
    assert "#fff" not in dark


def luminance(color: str) -> float:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_labels_touch_neither_each_other_nor_marks_and_stay_inside() -> None:
    frame = Frame.of(PANEL, 430, 330)
    labels = frame.labels()
    assert len(labels) >= 20
    boxes = [(la.x, la.y, len(la.text) * LABEL_SIZE * 0.6, LABEL_SIZE) for la in labels]
    spots = [frame.place(m.x, m.y) for s in PANEL.series for m in s.marks]
    for (ax, ay, aw, ah), (bx, by, bw, bh) in combinations(boxes, 2):
        assert ax + aw <= bx or bx + bw <= ax or ay + ah <= by or by + bh <= ay
    for x, y, width, height in boxes:
        assert 0 <= x <= 430 - width
        assert 0 <= y <= 330 - height
        assert not any(
            x - MARK_SIZE < sx < x + width + MARK_SIZE and y - MARK_SIZE < sy < y + height + MARK_SIZE
            for sx, sy in spots
        )


def test_the_page_stands_alone_and_escapes_text(tmp_path: Path) -> None:
    path = tmp_path / "sweep.html"
    table = Table("t", ("precision", "batch"), (("a<b", "1"),))
    write_html([PANEL, PANEL], Page("model <x>", ["about"], table, ["a note"], ["ingot sweep --x"]), path)
    page = path.read_text()
    assert page.count("<svg") == 2
    assert "model &lt;x&gt;" in page
    assert "<x>" not in page
    assert "a&lt;b" in page
    for absent in ("<script", "http://", "https://", "src="):
        assert absent not in page
    root = ElementTree.fromstring(svg(PANEL))
    assert len(root.findall("circle")) == 24
    told = [title.text for title in root.iter("title")]
    assert told[0] == "a<b 1"


def test_the_png_is_drawn_by_matplotlib(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "sweep.png"
    write_png([PANEL, PANEL], "title", ["one line"], path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    assert width > 2 * height > 600


def test_a_missing_matplotlib_is_named_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        DeviceError, match=r"pip install -c constraints.txt '.\[sweep\]' in Ingot's folder, or --no-png"
    ):
        write_png([PANEL], "title", [], tmp_path / "sweep.png")
