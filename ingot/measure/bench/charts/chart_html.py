"""Panels and a table as one HTML file that needs nothing beside it.

Owns the page and its SVG. Knows no measurement.

    write_html(panels(record), sweep_table(record), "title", ["lines"], ["notes"], ["ingot sweep ..."], path)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from ingot.measure.bench.charts.chart_layout import (
    FRONT_COLOR,
    LABEL_SIZE,
    MARK_SIZE,
    ON_DARK,
    Frame,
    Label,
    Panel,
    Scale,
    Series,
    tick_texts,
)
from ingot.measure.side.text_table import Table

WIDTH, HEIGHT = 430.0, 330.0  # of a panel's axes, in pixels
_LEFT, _RIGHT, _ABOVE, _BELOW = 66.0, 16.0, 30.0, 44.0
_FLOOR = _ABOVE + HEIGHT

_SVG = """<svg viewBox="0 0 {{ width }} {{ height }}" width="{{ width }}" role="img" aria-label="{{ title }}">
<text x="{{ left }}" y="18" class="title">{{ title }}</text>
{% for tick in x_ticks %}<line x1="{{ tick.at }}" x2="{{ tick.at }}" y1="{{ top }}" y2="{{ floor }}" \
class="grid"/>
<text x="{{ tick.at }}" y="{{ floor + 15 }}" text-anchor="middle">{{ tick.text }}</text>
{% endfor %}{% for tick in y_ticks %}<line x1="{{ left }}" x2="{{ right }}" \
y1="{{ tick.at }}" y2="{{ tick.at }}" class="grid"/>
<text x="{{ left - 6 }}" y="{{ tick.at + 4 }}" text-anchor="end">{{ tick.text }}</text>
{% endfor %}<path d="M{{ left }} {{ top }}V{{ floor }}H{{ right }}" class="axes"/>
<text x="{{ (left + right) / 2 }}" y="{{ floor + 34 }}" text-anchor="middle" class="axis">{{ x_label }}</text>
<text transform="translate(13 {{ (top + floor) / 2 }}) rotate(-90)" text-anchor="middle" class="axis">\
{{ y_label }}</text>
{% if front %}<polyline points="{{ front }}" fill="none" style="stroke: {{ front_color }}" stroke-width="9" \
stroke-linecap="round" stroke-linejoin="round"/>{% endif %}
{% for line in lines %}<polyline points="{{ line.points }}" fill="none" style="stroke: {{ line.color }}" \
stroke-width="2"{% if line.dashed %} stroke-dasharray="6 4"{% endif %}/>
{% for dot in line.dots %}<circle cx="{{ dot.x }}" cy="{{ dot.y }}" r="{{ radius }}" \
style="fill: {{ line.color }}">\
<title>{{ dot.told }}</title></circle>
{% endfor %}{% endfor %}{% for label in labels %}<text x="{{ label.x }}" y="{{ label.y }}" \
style="fill: {{ label.color }}" class="label">{{ label.text }}</text>
{% endfor %}</svg>"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --page: #fff; --text: #222; --soft: #555 }
:root { --grid: #eee; --axes: #888; --band: #f6f6f6 }
@media (prefers-color-scheme: dark) {
:root { --page: #17191c; --text: #e6e6e6; --soft: #b0b4ba; --grid: #2c3036; --axes: #7d838b }
:root { --band: #1f2226; {{ on_dark }} }
}
body { font: 14px/1.45 system-ui, sans-serif; margin: 24px; color: var(--text); background: var(--page) }
h1 { font-size: 19px; margin: 0 0 6px } p { margin: 2px 0; color: var(--soft) } code { font-size: 12px }
.panels { display: flex; flex-wrap: wrap; gap: 12px; margin: 14px 0 }
svg { max-width: 100% } svg text { font: 11px system-ui, sans-serif; fill: var(--soft) }
svg .title { font-weight: 600; font-size: 13px } svg .axis { font-size: 12px }
svg .label { font-size: {{ label_size }}px }
.grid { stroke: var(--grid) } .axes { stroke: var(--axes); fill: none }
.legend span { margin-right: 18px; white-space: nowrap }
.legend i { display: inline-block; width: 22px; border-top: 3px solid; margin-right: 5px }
.legend i { vertical-align: middle }
table { border-collapse: collapse; margin: 14px 0 }
th, td { padding: 2px 10px; text-align: right; white-space: nowrap }
th { border-bottom: 1px solid var(--axes) } tr:nth-child(even) td { background: var(--band) }
th:first-child, td:first-child { text-align: left }
</style></head><body>
<h1>{{ title }}</h1>
{% for line in about %}<p>{{ line }}</p>
{% endfor %}<div class="panels">{% for drawing in drawings %}{{ drawing }}{% endfor %}</div>
<div class="legend">{% for entry in legend %}<span><i style="border-color: {{ entry.color }}; \
border-top-style: {{ 'dashed' if entry.dashed else 'solid' }}"></i>{{ entry.name }}</span>{% endfor %}</div>
<table><thead><tr>{% for name in table.columns %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table>
{% for note in notes %}<p>{{ note }}</p>
{% endfor %}{% for command in commands %}<p><code>{{ command }}</code></p>
{% endfor %}</body></html>
"""


@dataclass(frozen=True)
class Page:
    """What stands on the page beside the panels."""

    title: str
    about: Sequence[str]
    table: Table
    notes: Sequence[str] = ()
    commands: Sequence[str] = ()


def write_html(panels: Sequence[Panel], page: Page, path: Path) -> None:
    """Write the page; every text in it is escaped."""
    environment = Environment(autoescape=True)
    legend = {s.name: s for panel in panels for s in panel.series}
    entries = [{"name": s.name, "color": _color(s.color), "dashed": s.dashed} for s in legend.values()]
    if any(panel.front for panel in panels):
        entries.append({"name": "Pareto line", "color": _color(FRONT_COLOR), "dashed": False})
    text = environment.from_string(_PAGE).render(
        title=page.title,
        about=page.about,
        table=page.table,
        notes=page.notes,
        commands=page.commands,
        drawings=[Markup(svg(panel)) for panel in panels],
        legend=entries,
        label_size=LABEL_SIZE,
        on_dark="; ".join(f"{_name(light)}: {dark}" for light, dark in ON_DARK.items()),
    )
    path.write_text(text, encoding="utf-8")


def svg(panel: Panel) -> str:
    frame = Frame.of(panel, WIDTH, HEIGHT)
    return (
        Environment(autoescape=True)
        .from_string(_SVG)
        .render(
            width=_LEFT + WIDTH + _RIGHT,
            height=_FLOOR + _BELOW,
            title=panel.title,
            x_label=panel.x_label,
            y_label=panel.y_label,
            left=_LEFT,
            right=_LEFT + WIDTH,
            top=_ABOVE,
            floor=_FLOOR,
            radius=MARK_SIZE,
            front=_path(frame, panel.front),
            front_color=_color(FRONT_COLOR),
            lines=[_line(frame, series) for series in panel.series],
            labels=[_label(label) for label in frame.labels()],
            x_ticks=_ticks(frame.x, lambda share: _LEFT + share * WIDTH),
            y_ticks=_ticks(frame.y, lambda share: _FLOOR - share * HEIGHT),
        )
    )


def _color(light: str) -> str:
    """A colour that a dark page may change."""
    return f"var({_name(light)}, {light})"


def _name(light: str) -> str:
    return f"--ink-{light.removeprefix('#').lower()}"


def _at(frame: Frame, x: float, y: float) -> tuple[float, float]:
    across, up = frame.place(x, y)
    return round(_LEFT + across, 1), round(_FLOOR - up, 1)


def _path(frame: Frame, points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in (_at(frame, *point) for point in points))


def _line(frame: Frame, series: Series) -> dict[str, Any]:
    dots = [dict(zip("xy", _at(frame, m.x, m.y), strict=True), told=m.told) for m in series.marks]
    points = _path(frame, [(m.x, m.y) for m in series.marks])
    return {"color": _color(series.color), "dashed": series.dashed, "points": points, "dots": dots}


def _label(label: Label) -> dict[str, Any]:
    x, y = round(_LEFT + label.x, 1), round(_FLOOR - label.y - 1, 1)
    return {"text": label.text, "color": _color(label.color), "x": x, "y": y}


def _ticks(scale: Scale, place: Callable[[float], float]) -> list[dict[str, Any]]:
    ticks = scale.ticks()
    return [
        {"at": round(place(scale.at(tick)), 1), "text": text}
        for tick, text in zip(ticks, tick_texts(ticks), strict=True)
    ]
