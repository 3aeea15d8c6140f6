"""``ingot repro``: a failure cut down to one layer, and its replay."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.opening import open_llm
from ingot.cli.options.flags import ENGINE_HELP, AsJson, Device, Threads, field_flags, option, set_threads
from ingot.cli.options.limit_flags import Limits
from ingot.cli.options.prompt_sources import MessagesFile, PromptIds, PromptText, one_prompt
from ingot.cli.terminal.console import print_facts, print_json, size_text, stderr, stdout
from ingot.errors import ConfigError, NoSuchPathError

if TYPE_CHECKING:
    from ingot.llm import LLM
    from ingot.llm.prompt_inputs import Messages, Prompt, PromptLike
    from ingot.proof.repro_bundle import Bundle
    from ingot.proof.repro_run import LayerReplay

_NO_VERDICT = 2  # exit code
_LAYER = (
    "The layer to extract, counted from 0; encoder.N: the encoder's; of pictures encoder.vit.N or "
    "encoder.qformer.N."
)
_IMAGE = "MiniGPT-4: a picture, which --prompt asks about in the model's chat format."
_AUDIO = "Whisper: a recording, of which 30 seconds are used. --prompt is then its transcript so far."
_WIDER = "plain PyTorch in the next wider dtype"
_ENGINE = typer.Argument(help=ENGINE_HELP, metavar="ENGINE", show_default=False)


@dataclass(frozen=True)
class ReproFlags:
    """What fails where, and the file; or the file to replay."""

    engine: Annotated[str | None, _ENGINE] = None
    layer: Annotated[str | None, option(_LAYER, shown=False, metavar="N")] = None
    prompt: PromptText = None
    ids: PromptIds = None
    messages: MessagesFile = None
    image: Annotated[str | None, option(_IMAGE, metavar="FILE")] = None
    audio: Annotated[str | None, option(_AUDIO, metavar="FILE")] = None
    language: Annotated[str | None, option("Of --audio, where the prompt is not --ids.", shown="en")] = None
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
    versions and machine. It contains the hidden states of the prompt, the picture or the recording: share it
    only as you would share these.
    --run exits with 1 if the output is not as expected, within the file's own floor, and with 2 if that floor
    would let any output pass.
    """
    if flags.run is not None:
        own = ("layer", "prompt", "ids", "messages", "image", "audio", "language", "step", "out", "expected")
        named = [f"--{name}" for name in own if getattr(flags, name) is not None]
        named = named if flags.engine is None else ["ENGINE", *named]
        if named:
            what = f"--run takes everything from its file: leave out {', '.join(named)}"
            raise typer.BadParameter(what)
        _replay(flags.run, flags)
        return
    if flags.engine is None or flags.layer is None:
        raise typer.BadParameter("give ENGINE and --layer, or --run FILE")
    name = Path(flags.engine).resolve().name
    target = flags.out or Path(f"{name}-layer{flags.layer}.safetensors")
    if target.exists():
        raise ConfigError("the file exists", seen=target, field="out", fix="--out, with another name")
    bundle = _capture(flags.engine, name, flags.layer, flags, limits)
    from ingot.proof.repro_bundle import write_bundle

    size = write_bundle(target, bundle)
    if flags.as_json:
        print_json({"file": str(target), "bytes": size} | bundle.facts.to_json())
    else:
        _show_bundle(target, size, bundle)


def _capture(engine: str, name: str, layer: str, flags: ReproFlags, limits: Limits) -> Bundle:
    """The bundle, with the names that only the command line knows."""
    half, dot, number = layer.rpartition(".")
    if not number.isdecimal() or (dot and half.partition(".")[0] != "encoder"):
        allowed = "it takes N or encoder.N; of pictures also encoder.vit.N or encoder.qformer.N"
        raise typer.BadParameter(f"{layer!r}; {allowed}", param_hint="--layer")
    request, step = _prompt(flags), flags.step or 0
    llm = open_llm(engine, flags.device, flags.threads, limits, "`ingot repro`", instead=None)
    from ingot.proof.repro_run import capture_layer

    if flags.audio is not None:
        request = _spoken(llm, request, flags.audio, flags.language)
    assert request is not None
    bundle = capture_layer(llm, request, int(number), step, flags.expected, half=half or "decoder")
    words = ["ingot", "repro", name, "--layer", layer, "--step", str(step), *limits.words()]
    bundle.facts = bundle.facts.replace(engine=name, command=" ".join(words))
    return bundle


def _prompt(flags: ReproFlags) -> PromptLike | Messages | None:
    """The prompt; None for a recording without one."""
    given = (flags.messages, flags.prompt, flags.ids)
    if flags.image is not None:
        if flags.prompt is None or (flags.messages, flags.ids, flags.audio) != (None, None, None):
            raise typer.BadParameter("--image goes with --prompt", param_hint="--image")
        if not Path(flags.image).is_file():
            raise NoSuchPathError("no such file", seen=flags.image, field="image")
        parts = [{"type": "image", "image": flags.image}, {"type": "text", "text": flags.prompt}]
        return [{"role": "user", "content": parts}]
    if flags.audio is not None and not Path(flags.audio).is_file():
        raise NoSuchPathError("no such file", seen=flags.audio, field="audio")
    if flags.audio is None:
        if flags.language is not None:
            raise typer.BadParameter("it is of --audio", param_hint="--language")
        return one_prompt(*given)
    if flags.messages is not None or (flags.ids is not None and flags.language is not None):
        raise typer.BadParameter("--audio goes with --prompt and --language, or with --ids")
    return None if given == (None, None, None) else one_prompt(*given)


def _spoken(llm: LLM, text: PromptLike | Messages | None, audio: str, language: str | None) -> Prompt:
    """A recording's first window and the ids after it: those given, or start, language, task and text."""
    from ingot.audio.recording_samples import read_audio
    from ingot.llm.prompt_inputs import Input, Prompt
    from ingot.speech.recording_features import first_window
    from ingot.speech.transcriber import Transcriber

    engine = llm.engine
    if engine.manifest.model.modality.takes_text:
        raise typer.BadParameter("this engine does not take speech", param_hint="--audio")
    features = first_window(read_audio(audio), engine.manifest.model, engine.device)
    if isinstance(text, list):
        return Prompt([Input(features), text])
    return Prompt([Input(features), Transcriber.of_llm(llm).prompt_ids(language, str(text or ""))])


def _show_bundle(target: Path, size: int, bundle: Bundle) -> None:
    facts, console = bundle.facts, stdout()
    console.print(f"{target} ({size_text(size)})", style="bold", markup=False)
    calls = ": the prompt" if facts.step == 0 else f": the prompt and {facts.step} decode steps"
    calls = calls if facts.of_decoder else ""
    rows = {
        "layer": f"{facts.name} of {facts.engine}, {facts.model.architecture}, {facts.dtype}",
        "tokens" if facts.of_decoder else "positions": f"{sum(facts.counts)}{calls}",
        "expected": facts.expected_from,
        "relative L2": f"{facts.output_error:.3g} for the engine's output, floor {facts.floor:.3g}",
        "verdict": "as expected" if facts.as_expected else "not as expected",
    }
    print_facts(rows.items(), 12)
    stderr().print(f"note: {facts.private}", style="dim", markup=False)


def _replay(path: Path, flags: ReproFlags) -> None:
    from ingot.device import resolve_device
    from ingot.proof.repro_bundle import read_bundle
    from ingot.proof.repro_run import replay

    set_threads(flags.threads)
    bundle = read_bundle(path)
    found = replay(bundle, resolve_device(flags.device or "auto"))
    if flags.as_json:
        verdict = {"agrees": found.agrees, "repeats": found.repeats, "proves": found.proves}
        print_json(asdict(found) | verdict | {"file": str(path), "bundle": bundle.facts.to_json()})
    else:
        _show_replay(path, bundle, found)
    raise typer.Exit(1 if not found.agrees else 0 if found.proves else _NO_VERDICT)


def _show_replay(path: Path, bundle: Bundle, found: LayerReplay) -> None:
    facts, console = bundle.facts, stdout()
    console.print(f"{path}: {facts.name} of {facts.engine or 'an engine'}", style="bold", markup=False)
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


def _verdict(found: LayerReplay, recorded_right: bool) -> str:
    if found.agrees and not found.proves:
        return f"none: the file's floor of {found.floor:.3g} lets any output pass"
    if found.agrees:
        return "as expected" if recorded_right else "as expected: the recorded failure does not occur here"
    return f"not as expected, {'the' if found.repeats else 'and not the'} same as recorded"
