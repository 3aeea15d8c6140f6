"""Panels as a PNG.

Owns the only use of matplotlib, which is an optional extra. Knows no measurement.

    check_matplotlib()
    write_png(panels(record), "title", ["lines below it"], Path("sweep.png"))
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.errors import DeviceError, to_install
from ingot.measure.bench.charts.chart_layout import (
    FRONT_COLOR,
    LABEL_SIZE,
    MARK_SIZE,
    Frame,
    Panel,
    tick_texts,
)

WIDTH, HEIGHT = 430.0, 330.0  # of a panel's axes, in points
_LEFT, _RIGHT, _BELOW = 62.0, 14.0, 72.0
_DPI = 110
_LINE, _TITLE_LINE = 13.0, 26.0


def check_matplotlib(without: str = "--no-png (the HTML needs no library)") -> None:
    """Say early what would only fail once all is measured; ``without`` is how to do without the PNG.

    Raises:
        DeviceError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise DeviceError(
            "matplotlib is not installed, and the PNG needs it",
            fix=f"{to_install('sweep')}, or {without}",
        )


def write_png(panels: Sequence[Panel], title: str, lines: Sequence[str], path: Path) -> None:
    """Draw the panels side by side, the title and lines above, one legend below.

    Raises:
        DeviceError: matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    each = _LEFT + WIDTH + _RIGHT
    above = _TITLE_LINE + _LINE * len(lines) + 34
    width, height = each * len(panels), _BELOW + HEIGHT + above
    figure = Figure(figsize=(width / 72, height / 72), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(8 / width, 1 - 18 / height, title, fontsize=12, fontweight="bold")
    for i, line in enumerate(lines):
        down = 18 + _LINE * (i + 1) + 3
        figure.text(8 / width, 1 - down / height, line, fontsize=8, color="#555555")
    for i, panel in enumerate(panels):
        box = ((each * i + _LEFT) / width, _BELOW / height, WIDTH / width, HEIGHT / height)
        _draw(figure.add_axes(box), Frame.of(panel, WIDTH, HEIGHT))
    handles = {h.get_label(): h for axes in figure.axes for h in axes.get_legend_handles_labels()[0]}
    figure.legend(
        handles=list(handles.values()), loc="lower center", ncols=4 * len(panels), fontsize=9, frameon=False
    )
    figure.savefig(path)


def _draw(axes: Any, frame: Frame) -> None:
    """One panel, in pixels of the frame, so that labels lie where they were laid out."""
    panel = frame.panel
    axes.set(xlim=(0, frame.width), ylim=(0, frame.height), xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_title(panel.title, fontsize=11, loc="left")
    for axis, scale, size in ((axes.xaxis, frame.x, frame.width), (axes.yaxis, frame.y, frame.height)):
        ticks = scale.ticks()
        axis.set_ticks([scale.at(tick) * size for tick in ticks], tick_texts(ticks))
    axes.tick_params(labelsize=8)
    axes.grid(color="#EEEEEE")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.front:
        xs, ys = zip(*(frame.place(*point) for point in panel.front), strict=True)
        axes.plot(xs, ys, color=FRONT_COLOR, linewidth=7, solid_capstyle="round", label="Pareto line")
    for series in panel.series:
        xs, ys = zip(*(frame.place(mark.x, mark.y) for mark in series.marks), strict=True)
        style = "--" if series.dashed else "-"
        axes.plot(
            xs, ys, style, color=series.color, marker="o", markersize=1.5 * MARK_SIZE, label=series.name
        )
    for label in frame.labels():
        axes.text(label.x, label.y, label.text, fontsize=0.85 * LABEL_SIZE, color=label.color, va="bottom")
