"""``ingot port``: what it takes to add an architecture that Ingot does not have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ingot.cli.opening import local_folder
from ingot.cli.options.flags import AsJson, Checkpoint, option
from ingot.cli.terminal.console import print_json, print_lines, stderr
from ingot.cli.terminal.step_list import status_shown

if TYPE_CHECKING:
    from ingot.measure.port.nearest import ConfigComparison
    from ingot.measure.port.port_report import PortReport

_OUTPUT = "Write two files there: the architecture, with what matched and what is open, and its parity test."
Output = Annotated[Path | None, option(_OUTPUT, "-o", "--output", metavar="FOLDER", shown=False)]


def port(checkpoint: Checkpoint, output: Output = None, as_json: AsJson = False) -> None:
    """Compare a checkpoint of an unknown architecture with the nearest one that Ingot has.

    Reads config.json and the tensors' names and shapes, no weights. Exit code 0: compared, or already
    registered; 1: the checkpoint cannot be read, or there is nothing to write.
    """
    folder = local_folder(checkpoint)
    with status_shown("comparing"):
        from ingot.checkpoint.checkpoint_reader import read_config
        from ingot.measure.port.port_files import open_points, write_port
        from ingot.measure.port.port_report import port_report

        report = port_report(folder)
    points = [] if report.nearest is None else open_points(report.nearest)
    written = () if output is None else write_port(report, read_config(folder), output)
    if as_json:
        print_json(report.to_json() | {"open": points, "written": [str(path) for path in written]})
        return
    print_lines(_lines(report, points))
    for path in written:
        stderr().print(f"wrote {path}", markup=False)


def _lines(report: PortReport, points: list[str]) -> Iterator[str]:
    names = ", ".join(report.hf_names)
    if report.registered is not None and report.nearest is None:
        yield f"{names}: Ingot has this architecture, {report.registered}; `ingot build` takes the checkpoint"
        return
    if report.registered is not None:
        yield f"{names}: Ingot has this architecture, {report.registered}, but it refuses config.json:"
        yield f"  {report.refused}"
    else:
        yield f"{names} (model_type {report.model_type}) is not registered"
    nearest = report.nearest
    assert nearest is not None
    yield f"nearest: {nearest.architecture}, score {nearest.score:.2f}: {nearest.why}"
    yield "others: " + ", ".join(f"{name} {score:.2f}" for name, score in report.others)
    yield from _config_lines(nearest)
    yield from _tensor_lines(nearest)
    yield "\nmodules of Hugging Face's class in running order, outputs for 8 tokens"
    if report.modules.absent is not None:
        yield f"  unknown: {report.modules.absent}"
    for row in report.modules.rows:
        yield f"  {row.name} {row.kind} {'' if row.shape is None else list(row.shape)}".rstrip()
    yield f"\nopen: {len(points)}"
    yield from (f"  {point}" for point in points)


def _config_lines(nearest: ConfigComparison) -> Iterator[str]:
    reading, name = nearest.reading, nearest.architecture
    yield "\nconfig.json"
    yield f"  {name} reads: {_listed(reading.reads)}"
    if reading.renamed:
        yield "  under another name: " + ", ".join(f"{k} (its {v})" for k, v in reading.renamed.items())
    yield "  unknown to it: " + (", ".join(f"{k}={v}" for k, v in reading.unknown.items()) or "none")
    for refusal in reading.refused:
        yield f"  refused by it: {refusal.key}={refusal.value}: {refusal.why}"
    yield f"  missing, and needed by it: {_listed(reading.missing)}"
    yield f"  missing, with a default of its own: {_listed(reading.defaults)}"
    if reading.unread:
        yield f"  known to it, but not read: {_listed(reading.unread)}"
    yield f"  without effect, or off: {_listed(reading.idle)}"


def _tensor_lines(nearest: ConfigComparison) -> Iterator[str]:
    yield "\ntensors"
    if nearest.tensors is None:
        yield f"  not compared: {nearest.architecture} makes no model of this config.json"
        return
    for one in nearest.tensors.tensors:
        state = "unmatched" if one.rule is None else one.rule
        yield f"  {one.pattern}: {state}" + (f" ({one.why})" if one.why else "")
    for rule in nearest.tensors.without_tensor:
        yield f"  rule without a tensor: {rule}"


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
