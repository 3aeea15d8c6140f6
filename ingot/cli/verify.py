"""``ingot verify``: whether an engine still is what was built, on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.opening import expect_model
from ingot.cli.options.flags import AsJson, Device, EngineFolder, Threads, given, option, set_threads
from ingot.cli.options.limit_flags import PANEL, Embedding, MemoryFraction
from ingot.cli.terminal.console import print_facts, print_json, print_verdict
from ingot.cli.terminal.metric_text import metric_line
from ingot.cli.terminal.step_list import status_shown
from ingot.engine.manifest import expect_engine

if TYPE_CHECKING:
    from ingot.engine.source_figures import SourceFigures
    from ingot.proof.verify_engine import Verification

_BITS = "Run in the batch-invariant mode, and compare cases alone and together to the bit."
_WIDE = 0.1  # a limit on a row of logits, relative to its norm, that would catch nothing


def verify(
    engine: EngineFolder,
    source: Annotated[
        str | None,
        option("Also compare every stored tensor with this checkpoint: a folder, .pt file or id."),
    ] = None,
    device: Device = None,
    threads: Threads = None,
    memory_fraction: MemoryFraction = None,
    embedding: Embedding = None,
    batch_invariant: Annotated[bool, option(_BITS, "--batch-invariant", panel=PANEL)] = False,
    as_json: AsJson = False,
) -> None:
    """Check every hash of an engine, then replay its golden cases on this machine.

    Exit code 0: proven here; 1: failed, naming what is wrong; 2: usage error; 3: unproven here:
    nothing could be replayed. The result is written to verify.json in the engine, if its folder is writable.
    """
    expect_engine(engine)
    if source is not None:
        expect_model(source)
    with status_shown("loading") as progress:
        from ingot.config.runtime_config import RuntimeConfig
        from ingot.proof.verify_engine import verify

        set_threads(threads)
        values = given(memory_fraction=memory_fraction, embedding=embedding)
        runtime = RuntimeConfig(**values, batch_invariant=batch_invariant)
        found = verify(engine, runtime=runtime, **given(device=device, source=source, progress=progress))
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)
    raise typer.Exit({"proven": 0, "failed": 1, "unproven": 3}[found.verdict])


def _show(found: Verification) -> None:
    verdict = "unproven here" if found.verdict == "unproven" else found.verdict
    where = f" on {found.device} in {found.dtype}" if found.dtype else ""
    text = f"{found.engine}{where}, {found.seconds:.1f} s"
    print_verdict(verdict, text, "bold green" if found.verdict == "proven" else "bold red")
    print_facts(_facts(found), 10)


def _facts(found: Verification) -> Iterator[tuple[str, str]]:
    for failure in found.failures:
        yield failure.kind, failure.message
    if found.verdict == "unproven":
        yield "hashes", f"{found.num_tensors} tensors unchanged since the build"
        if found.proven_by is None:
            yield "cases", "none: the engine was built with --no-proof or by an older Ingot; build it again"
    elif found.dtype is not None:
        step = cases = "nothing compared"
        if found.steps:
            place = max(found.steps, key=lambda name: found.steps[name])
            step = f"largest deviation {found.steps[place]:.2g} of its limit ({place})"
        if found.worst:
            parts = ", ".join(f"{name} {ratio:.2g}" for name, ratio in found.worst.items())
            cases = f"largest deviations in noise floors (limit {found.factor:g}): {parts}"
        yield "steps", f"{found.num_steps} of {found.num_tokens} tokens, {step}"
        yield "cases", f"{found.num_cases}, {cases}"
        if found.equal_bits is not None and all(one.kind != "bits" for one in found.failures):
            text = (
                f"log-probabilities of {found.equal_bits} tokens are the same alone and together, to the bit"
            )
            yield "bits", text
        if found.limits:
            yield "limits", _limits(found.limits)
    if found.source is not None:
        yield "source", _source(found.source)
    for note in found.notes:
        yield "note", note
    yield from map(metric_line, found.metrics)
    if found.proven_by is not None:
        made = found.proven_by
        when = f", {made['time']}" if "time" in made else ""
        yield "proven by", f"Ingot {made['ingot']} on {made['device']}{when}, {made['dtype']} weights"


def _source(figures: SourceFigures) -> str:
    share, kind, measure = max(
        (share, kind.kind, measure) for kind in figures.kinds for measure, share in kind.worst.items()
    )
    where = f", largest deviation {share:.3g} of its limit ({measure}, {kind})" if share else ""
    return f"{figures.tensors} tensors compared with the checkpoint{where}"


def _limits(limits: dict[str, float]) -> str:
    from ingot.proof.golden_replay import percent

    if limits["logits"] > _WIDE:
        share = percent(limits["logits"])
        text = f"rounding may move a row of logits by {share} end to end: the proof rests on the steps"
        return f"{text} (docs/proof.md#end-to-end)"
    least, most = limits["modules, least"], limits["modules, most"]
    return (
        f"{percent(limits['logits'])} of a row of logits, {limits['logprobs']:.2g} nats of a "
        f"log-probability, {percent(least)} to {percent(most)} of a module's output"
    )
