"""``ingot repro``: a failure cut down to one layer, and its replay."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.console import print_facts, print_json, size_text, stderr, stdout
from ingot.cli.flags import AsJson, Device, Threads, field_flags, option, set_threads
from ingot.cli.limits import Limits
from ingot.cli.one_prompt import MessagesFile, PromptIds, PromptText, one_prompt
from ingot.cli.opening import open_llm

if TYPE_CHECKING:
    from ingot.llm.repro import Replay
    from ingot.llm.repro_bundle import Bundle

_NO_VERDICT = 2  # exit code


_WIDER = "plain PyTorch in the next wider dtype"
_ENGINE = typer.Argument(
    help="An engine folder, a checkpoint folder or a Hugging Face id.", metavar="ENGINE", show_default=False
)


@dataclass(frozen=True)
class ReproFlags:
    """What fails where, and the file; or the file to replay."""

    engine: Annotated[str | None, _ENGINE] = None
    layer: Annotated[int | None, option("The layer to extract, counted from 0.", shown=False)] = None
    prompt: PromptText = None
    ids: PromptIds = None
    messages: MessagesFile = None
    step: Annotated[
        int | None, option("Decode steps to run after the prompt.", shown="0: only the prompt")
    ] = None
    out: Annotated[
        Path | None, option("The file to write.", shown="ENGINE-layerN.safetensors", metavar="FILE")
    ] = None
    expected: Annotated[
        Path | None, option("A trace with the expected output.", shown=_WIDER, metavar="TRACE")
    ] = None
    run: Annotated[Path | None, option("Replay a bundle here instead.", shown=False, metavar="FILE")] = None
    device: Device = None
    threads: Threads = None
    as_json: AsJson = False


@field_flags("limits")
@field_flags("flags")
def repro(flags: ReproFlags, limits: Limits) -> None:
    """Reduce a failure to one layer in one small file; --run replays such a file.

    The file holds the layer's weights, its inputs and outputs in the engine, the expected outputs, and the
    versions and machine. It contains the prompt's hidden states: share it only as you would share the prompt.
    --run exits with 1 if the output is not as expected, within the file's own floor, and with 2 if that floor
    would let any output pass.
    """
    if flags.run is not None:
        _refuse(flags)
        _replay(flags.run, flags)
        return
    if flags.engine is None or flags.layer is None:
        raise typer.BadParameter("give ENGINE and --layer, or --run FILE")
    name = Path(flags.engine).resolve().name
    bundle = _capture(flags.engine, name, flags.layer, flags, limits)
    target = flags.out or Path(f"{name}-layer{flags.layer}.safetensors")
    from ingot.llm.repro_bundle import write_bundle

    size = write_bundle(target, bundle)
    if flags.as_json:
        print_json({"file": str(target), "bytes": size} | bundle.facts.to_json())
    else:
        _show_bundle(target, size, bundle)


def _refuse(flags: ReproFlags) -> None:
    """Refuse what a bundle has of its own."""
    own = ("layer", "prompt", "ids", "messages", "step", "out", "expected")
    named = [f"--{name}" for name in own if getattr(flags, name) is not None]
    named = named if flags.engine is None else ["ENGINE", *named]
    if named:
        raise typer.BadParameter(f"--run takes everything from its file: leave out {', '.join(named)}")


def _capture(engine: str, name: str, layer: int, flags: ReproFlags, limits: Limits) -> Bundle:
    """The bundle, with the names that only the command line knows."""
    request, step = one_prompt(flags.messages, flags.prompt, flags.ids), flags.step or 0
    instead = "`ingot verify` and `ingot align` name what is wrong in an engine that hears"
    llm = open_llm(engine, flags.device, flags.threads, limits, "`ingot repro`", instead)
    from ingot.llm.repro import capture_layer

    bundle = capture_layer(llm, request, layer, step, flags.expected)
    words = ["ingot", "repro", name, "--layer", str(layer), "--step", str(step), *limits.words()]
    bundle.facts = bundle.facts.replace(engine=name, command=" ".join(words))
    return bundle


def _show_bundle(target: Path, size: int, bundle: Bundle) -> None:
    facts, console = bundle.facts, stdout()
    console.print(f"{target} ({size_text(size)})", style="bold", markup=False)
    calls = "the prompt" if facts.step == 0 else f"the prompt and {facts.step} decode steps"
    rows = {
        "layer": f"{facts.layer} of {facts.engine}, {facts.model.architecture}, {facts.dtype}",
        "tokens": f"{sum(facts.counts)}: {calls}",
        "expected": facts.expected_from,
        "relative L2": f"{facts.output_error:.3g} for the engine's output, floor {facts.floor:.3g}",
        "verdict": "as expected" if facts.as_expected else "not as expected",
    }
    print_facts(rows.items(), 12)
    stderr().print(f"note: {facts.private}", style="dim", markup=False)


def _replay(path: Path, flags: ReproFlags) -> None:
    """Replay a bundle and exit by what it gives."""
    from ingot.device import resolve_device
    from ingot.llm.repro import replay
    from ingot.llm.repro_bundle import read_bundle

    set_threads(flags.threads)
    bundle = read_bundle(path)
    found = replay(bundle, resolve_device(flags.device or "auto"))
    if flags.as_json:
        print_json(_json(found) | {"file": str(path), "bundle": bundle.facts.to_json()})
    else:
        _show_replay(path, bundle, found)
    raise typer.Exit(1 if not found.agrees else 0 if found.proves else _NO_VERDICT)


def _json(found: Replay) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(found) | {"agrees": found.agrees, "repeats": found.repeats, "proves": found.proves}


def _show_replay(path: Path, bundle: Bundle, found: Replay) -> None:
    facts, console = bundle.facts, stdout()
    console.print(f"{path}: layer {facts.layer} of {facts.engine or 'an engine'}", style="bold", markup=False)
    gpu = facts.machine.get("gpu")
    rows = {
        "recorded": f"on {gpu}, torch {facts.machine.get('torch')}, ingot {facts.ingot_version}",
        "here": f"on {found.device}, {found.dtype}",
        "to expected": f"{found.against_expected:.3g} relative L2, floor {found.floor:.3g}",
        "to recorded": f"{found.against_output:.3g} relative L2 to the engine's output",
        "expected": f"{facts.expected_from}; the engine's output was {found.recorded:.3g} from it",
        "worst token": f"position {found.worst_position}, {found.worst:.3g}, floor {found.token_floor:.3g}",
        "verdict": _verdict(found, facts.as_expected),
    }
    print_facts(rows.items(), 12)


def _verdict(found: Replay, recorded_right: bool) -> str:
    if found.agrees and not found.proves:
        return f"none: the file's floor of {found.floor:.3g} lets any output pass"
    if found.agrees:
        return "as expected" if recorded_right else "as expected: the recorded failure does not occur here"
    return (
        "not as expected, the same as recorded"
        if found.repeats
        else "not as expected, and not the same as recorded"
    )
