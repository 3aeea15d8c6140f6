"""Panels of lines as a PNG, or on an HTML page beside a table; drawn by the optional matplotlib."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from ingot.errors import DeviceError, to_install
from ingot.measure.side.text_table import Table

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C564B")
OTHER_COLOR = "#444444"
_FRONT_COLOR = "#B0B0B0"
_WIDTH, _HEIGHT = 6.9, 5.6  # inches of a panel
_LINE_HEIGHT = 0.18  # inches of a line of text above
_DPI = 110
_LOG_FROM = 6.0  # largest over least value

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark }
body { font: 14px/1.45 system-ui, sans-serif; margin: 24px }
h1 { font-size: 19px; margin: 0 0 6px } p { margin: 2px 0 } code { font-size: 12px }
svg { max-width: 100%; height: auto; margin: 14px 0 }
table { border-collapse: collapse; margin: 14px 0 }
th, td { padding: 2px 10px; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884 }
th:first-child, td:first-child { text-align: left }
</style></head><body>
<h1>{{ title }}</h1>
{% for line in about %}<p>{{ line }}</p>
{% endfor %}{{ drawing }}
<table><thead><tr>{% for name in table.columns %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table>
{% for note in notes %}<p>{{ note }}</p>
{% endfor %}{% for command in commands %}<p><code>{{ command }}</code></p>
{% endfor %}</body></html>
"""


@dataclass(frozen=True)
class ChartMark:
    """A point and its label."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Series:
    """Points joined in their order; ``dashed`` for the reference."""

    name: str
    color: str
    marks: tuple[ChartMark, ...]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes; ``front``: the points of the Pareto line, if it is in this panel."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    front: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Page:
    """The page's texts and table."""

    title: str
    about: Sequence[str]
    table: Table
    notes: Sequence[str] = ()
    commands: Sequence[str] = ()


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_matplotlib(without: str = "`no_png=True` (the HTML then has the table alone)") -> None:
    """Check before anything is measured; ``without``: how to do without the PNG.

    Raises:
        DeviceError: matplotlib is not installed.
    """
    if not has_matplotlib():
        raise DeviceError(
            "matplotlib is not installed, and the PNG needs it",
            fix=f"{to_install('sweep')}, or {without}",
        )


def write_png(panels: Sequence[Panel], title: str, lines: Sequence[str], path: Path) -> None:
    """Draw the panels side by side, the title and lines above, one legend below."""
    check_matplotlib()
    _figure(panels, title, lines).savefig(path, dpi=_DPI)


def write_html(panels: Sequence[Panel], page: Page, path: Path) -> None:
    """Write a self-contained page with all texts escaped; without matplotlib it has only the table."""
    drawing = ""
    if panels and has_matplotlib():
        text = io.StringIO()
        _figure(panels, "", ()).savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        drawing = text.getvalue().partition("<svg")[2].join(("<svg", ""))
    environment = Environment(autoescape=True)
    path.write_text(
        environment.from_string(_PAGE).render(**vars(page), drawing=Markup(drawing)), encoding="utf-8"
    )


def _figure(panels: Sequence[Panel], title: str, lines: Sequence[str]) -> Any:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    above = _LINE_HEIGHT * (len(lines) + 2) if title else 0.1
    height = _HEIGHT + above
    with rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(_WIDTH * len(panels), height), facecolor="white")
        FigureCanvasAgg(figure)
        figure.text(0.01, 1 - 0.25 / height, title, fontsize=12, fontweight="bold")
        for place, line in enumerate(lines, start=1):
            figure.text(0.01, 1 - (0.25 + place * _LINE_HEIGHT) / height, line, fontsize=8, color="#555555")
        for place, panel in enumerate(panels, start=1):
            _draw(figure.add_subplot(1, len(panels), place), panel)
        handles = {h.get_label(): h for axes in figure.axes for h in axes.get_legend_handles_labels()[0]}
        figure.legend(
            handles=list(handles.values()),
            loc="lower center",
            ncols=4 * len(panels),
            fontsize=9,
            frameon=False,
        )
        figure.tight_layout(rect=(0, 0.06, 1, 1 - above / height))
        for axes, panel in zip(figure.axes, panels, strict=True):
            taken: list[Any] = []  # a label that would overlap one of these is left out
            for series, mark in ((one, mark) for one in panel.series for mark in one.marks):
                text = axes.annotate(
                    mark.label, (mark.x, mark.y), (-4, 4), textcoords="offset points", fontsize=8.5,
                    color=series.color, ha="right",
                )  # fmt: skip
                box = text.get_window_extent()
                if any(box.overlaps(other) for other in taken):
                    text.remove()
                else:
                    taken.append(box)
    return figure


def _draw(axes: Any, panel: Panel) -> None:
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_title(panel.title, fontsize=11, loc="left")
    if panel.front:
        xs, ys = zip(*panel.front, strict=True)
        axes.plot(xs, ys, color=_FRONT_COLOR, linewidth=7, solid_capstyle="round", label="Pareto line")
    for series in panel.series:
        xs, ys = zip(*((mark.x, mark.y) for mark in series.marks), strict=True)
        style = "--" if series.dashed else "-"
        axes.plot(xs, ys, style, color=series.color, marker="o", markersize=6, label=series.name)
    marks = [mark for series in panel.series for mark in series.marks]
    _scale(axes.xaxis, axes.set_xscale, [mark.x for mark in marks])
    _scale(axes.yaxis, axes.set_yscale, [mark.y for mark in marks])
    axes.margins(0.09)
    axes.tick_params(labelsize=8)
    axes.grid(color="#EEEEEE")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _scale(axis: Any, set_scale: Any, values: Sequence[float]) -> None:
    """Logarithmic where the values span enough; ticks such as 20,000."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    low, high = min(values), max(values)
    if low > 0 and high / low >= _LOG_FROM:
        set_scale("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
