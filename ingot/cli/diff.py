"""``ingot diff``: what differs between two engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.options.flags import AsJson, option
from ingot.cli.terminal.console import print_json, print_lines, stdout
from ingot.cli.terminal.step_list import status_shown
from ingot.engine.manifest import expect_engine

if TYPE_CHECKING:
    from ingot.engine.engine_diff import Comparison, FieldChange, LayerChange, TensorChange
    from ingot.engine.manifest import TensorEntry


def diff(
    left: Annotated[Path, typer.Argument(help="An engine folder.", metavar="A")],
    right: Annotated[Path, typer.Argument(help="Another engine folder.", metavar="B")],
    every: Annotated[
        bool, option("List every tensor, including those of quantized layers.", "--all")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Explain how two engines differ. Exit code 0: equal, 1: different, 2: cannot be compared."""
    for folder in (left, right):
        expect_engine(folder)
    from ingot.engine.engine_diff import compare_engines

    with status_shown("comparing") as say:
        progress = None if say is None else lambda name, done, total: say(f"{name} ({done}/{total})")
        found = compare_engines(left, right, progress)
    if as_json:
        print_json({"equal": found.equal, **found.to_json()})
    else:
        _show(found, every)
    raise typer.Exit(0 if found.equal else 1)


def _show(found: Comparison, every: bool) -> None:
    from ingot.engine.engine_diff import ABSENT

    if found.equal:
        stdout().print("equal")
    for title, changes in (("config", found.config), ("plan", found.plan), ("versions", found.versions)):
        _section(title, list(map(_field_line, changes)))
    only = {(True, False): "only in B", (False, True): "only in A", (False, False): "contents differ"}
    _section("files", [f"{c.name}: {only[c.left == ABSENT, c.right == ABSENT]}" for c in found.files])
    _section("quantized layers", _layer_lines(found), len(found.layers))
    layers = () if every else {layer.name for layer in found.layers}
    others = [change for change in found.tensors if change.name.rpartition(".")[0] not in layers]
    _section("tensors" if every or not layers else "other tensors", _tensor_lines(others), len(others))
    _section("metrics (not part of the verdict)", list(map(_field_line, found.metrics)))


def _section(title: str, lines: Sequence[str], count: int | None = None) -> None:
    if lines:
        stdout().print(f"{title}: {len(lines) if count is None else count} differ", style="bold")
    print_lines(f"  {line}" for line in lines)


def _field_line(change: FieldChange) -> str:
    left, right = (value if isinstance(value, str) else repr(value) for value in (change.left, change.right))
    return f"{change.name}: {left} -> {right}"


def _layer_lines(found: Comparison) -> list[str]:
    """One line per pair of schemes: how many layers, and how far apart their weights are."""
    groups: dict[tuple[str, str], list[LayerChange]] = {}
    for layer in found.layers:
        groups.setdefault((layer.left, layer.right), []).append(layer)
    lines = []
    for (left, right), layers in groups.items():
        errors = [(layer.relative, layer.name) for layer in layers if layer.relative is not None]
        text = f"weights not compared: {found.incomparable or 'shapes differ'}"
        if errors:
            mean, (most, name) = sum(error for error, _ in errors) / len(errors), max(errors)
            text = f"dequantized error {mean:.2%} on average, at most {most:.2%} ({name})"
        lines.append(f"{len(layers)} layers: {left} -> {right}, {text}")
    return lines


def _tensor_lines(changes: Sequence[TensorChange]) -> list[str]:
    """One line per tensor, or for all that differ only by the same two dtypes."""
    recast: dict[tuple[str, str], list[TensorChange]] = {}
    for change in changes:
        if change.left and change.right and change.aspects == ("dtype",) and not change.max_abs:
            recast.setdefault((change.left.dtype, change.right.dtype), []).append(change)
    groups = [(pair, found) for pair, found in recast.items() if len(found) > 1]
    shown = {change.name for _, found in groups for change in found}
    lines = [f"{len(found)} tensors: {a} -> {b}, values equal" for (a, b), found in groups]
    return lines + [_tensor_line(change) for change in changes if change.name not in shown]


def _tensor_line(change: TensorChange) -> str:
    if change.left is None or change.right is None:
        entry = change.left or change.right
        return f"{change.name}: only in {'A' if change.left else 'B'} ({_entry(entry)})"
    parts = [f"{change.name}: {', '.join(change.aspects)}"]
    if change.left.dtype != change.right.dtype or change.left.shape != change.right.shape:
        parts.append(f"{_entry(change.left)} -> {_entry(change.right)}")
    if change.max_abs is not None:
        parts.append(f"max-abs {change.max_abs:.3g}, relative {change.relative:.3g}")
    return "; ".join(parts)


def _entry(entry: TensorEntry | None) -> str:
    return "" if entry is None else f"{entry.dtype} {'x'.join(map(str, entry.shape))}"
