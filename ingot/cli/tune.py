"""``ingot tune``: the kernels' tile sizes, measured on this GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.options.flags import AsJson, Device, EngineFolder, given, option
from ingot.cli.terminal.console import aligned, print_json, stderr, stdout
from ingot.cli.terminal.signals import ends_once
from ingot.cli.terminal.step_list import steps_shown
from ingot.engine.manifest import expect_engine

if TYPE_CHECKING:
    from ingot.building.tuner import TileChoice, Tuning


def tune(
    engine: EngineFolder,
    output: Annotated[
        Path | None, option("Write the plan here.", "--output", "-o", shown="into the engine")
    ] = None,
    ops: Annotated[str | None, option("Only these ops, separated by commas.", shown="all")] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Measure the kernels' tile sizes on this GPU and write the engine's plan.json."""
    expect_engine(engine)
    from ingot.building import tuner

    with ends_once(), steps_shown() as progress:
        names = None if ops is None else [name.strip() for name in ops.split(",")]
        tuning = tuner.tune(engine, **given(device=device, output=output, ops=names, progress=progress))
    for dropped in tuning.dropped:
        what = " ".join((*dropped.place, _tiles(dropped.tiles)))
        stderr().print(f"dropped {what}: {dropped.reason}", markup=False)
    if as_json:
        print_json(
            {
                "seconds": tuning.seconds,
                "compile_seconds": tuning.compile_seconds,
                "plan": tuning.plan.to_json(),
            }
        )
        return
    _show(tuning)


def _show(tuning: Tuning) -> None:
    head = ("op", "shape and rows", "default us", "best us", "gain", "tiles")
    for line in aligned([head, *map(_row, tuning.choices)], right=(2, 3, 4)):
        stdout().print(line, markup=False)
    better = sum(choice.tiles is not None for choice in tuning.choices)
    seconds = f"{tuning.seconds:.1f} s, {tuning.compile_seconds:.1f} s of it compiling"
    typer.echo(f"{better} of {len(tuning.choices)} choices differ from the defaults; {seconds}")


def _row(choice: TileChoice) -> tuple[str, ...]:
    gain = 1 - choice.best_us / choice.default_us
    tiles = "default" if choice.tiles is None else _tiles(choice.tiles)
    return (*choice.place, f"{choice.default_us:.2f}", f"{choice.best_us:.2f}", f"{gain:.1%}", tiles)


def _tiles(tiles: dict[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in tiles.items())
