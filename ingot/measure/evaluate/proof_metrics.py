"""Metrics of a finished engine, written to its proof unless one misses its threshold."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ingot.building.golden.golden_cases import steady_threads
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.scheme_table import GROUPS, MILDEST, SCHEMES
from ingot.device import resolve_device
from ingot.engine.manifest import WEIGHTS_FILE, Manifest
from ingot.engine.proof_file import Metric, Proof, read_proof, write_metrics
from ingot.engine.sketch import rounded
from ingot.errors import BuildError, ConfigError, OutOfMemoryError
from ingot.measure.evaluate.eval_record import Progress, Record, no_progress
from ingot.measure.evaluate.loss_limits import limits_for
from ingot.measure.evaluate.perplexity import perplexity
from ingot.measure.evaluate.planned_metrics import VALUES, Proving, delta_name, names_of
from ingot.measure.evaluate.scored_answers import AnswerSettings, answers, summarize
from ingot.measure.evaluate.token_divergence import divergence
from ingot.measure.side.freed_memory import free_memory
from ingot.measure.side.side_spec import SideSpec, longest

_log = logging.getLogger(__name__)
_FIX = "`prove` with other data, or another `against`; the build was discarded"
_SMALLER = (
    "compare `against` an engine; or build without `prove` and run `ingot eval`, whose flags can save memory"
)


def measure(
    engine: Path, proving: Proving, device: str = "auto", progress: Progress = no_progress
) -> tuple[Metric, ...]:
    """The metrics of an engine, measured on ``device`` like those of the reference."""
    if read_proof(engine) is None:
        raise BuildError("the engine has no golden cases, so it has no proof to add metrics to")
    place = resolve_device(device)
    spec = SideSpec(str(engine), device=device)
    other = None if proving.reference is None else proving.reference.replace(device=device)
    if place.type == "cuda":
        free_memory()
    found: list[Metric] = []
    with steady_threads((engine / WEIGHTS_FILE).stat().st_size, place):
        for verb in proving.verbs:
            try:
                found += _metrics(verb, _evaluated(verb, spec, other, proving, progress), proving)
            except ConfigError as error:
                raise ConfigError(
                    error.what, seen=error.seen, allowed=error.allowed, field="prove", fix=_FIX
                ) from None
            except OutOfMemoryError as error:
                if error.ledger is not None:  # its fixes are better
                    raise
                raise OutOfMemoryError(error.what, seen=error.seen, fix=_SMALLER) from None
            except OSError as error:
                raise BuildError("the metrics cannot be measured", seen=error) from error
    return tuple(found)


def keep(engine: Path, metrics: Sequence[Metric]) -> Proof:
    """Put metrics into an engine's proof.

    Raises:
        BuildError: one misses its threshold, or is not finite.
    """
    lost = [m for m in metrics if not math.isfinite(m.value)]
    if lost:
        raise BuildError(
            "a metric is not finite, so the build was discarded",
            seen=", ".join(f"{metric.name} {metric.value}" for metric in lost),
        )
    missed = [metric for metric in metrics if metric.met is False]
    if missed:
        nearer = _nearer(Manifest.read(engine).quant)
        raise BuildError(
            "the engine misses a threshold, so the build was discarded",
            seen="; ".join(_describe(metric) for metric in missed),
            fix=f"{nearer}; relax `threshold=NAME=X` if the metric is good enough; "
            "or leave out `prove` and inspect the engine with `ingot align` and `ingot eval`",
        )
    return write_metrics(engine, metrics)


def _nearer(quant: QuantConfig) -> str:
    """What another build can change to be nearer to the original."""
    if quant.dense:
        return "another `dtype`"
    if quant.source:
        return "a checkpoint with more bits (this one's quantized values are kept as they are)"
    infos = [SCHEMES[scheme] for scheme in quant.schemes if scheme != "none"]
    ways = []
    if infos and quant.method == "round":
        better = "gptq" if any("gptq" in info.method for info in infos) else "smoothquant"
        ways.append(f"`method={better}` with `calib`")
    sizes = [info.group for info in infos if len(info.group) > 1]
    if sizes and quant.group == 0:
        ways.append("`group_size=128`")
    elif quant.group and any(0 < size < quant.group and all(size in own for own in sizes) for size in GROUPS):
        ways.append("a smaller `group_size`")
    if infos:
        only = {*quant.schemes} - {"none"} == {MILDEST}
        ways.append("no `quant`" if only else f"`quant={MILDEST}`")
    if quant.head != "none":
        ways.append("no `quant_head`")
    return " or ".join(ways)


def _describe(metric: Metric) -> str:
    sign = "above" if metric.better == "lower" else "below"
    return f"{metric.name} {metric.value:.6g} is {sign} {metric.limit:.6g} {metric.unit}".rstrip()


def _evaluated(
    verb: str, spec: SideSpec, other: SideSpec | None, proving: Proving, progress: Progress
) -> Record:
    """The record of a verb of ``ingot eval`` with its defaults; answers take at most half of the context."""
    limits = [
        replace(limit, most=proving.thresholds.get(delta_name(verb, limit.metric), limit.most))
        for limit in limits_for(verb)
    ]
    if verb == "perplexity":
        return perplexity(spec, other, proving.data, limits, progress=progress).record
    if verb == "divergence":
        assert other is not None, "checked when the proving was planned"
        return divergence(spec, other, proving.data, limits, progress=progress).record
    room = min(longest(one) for one in (spec, other) if one is not None)
    asking = AnswerSettings()
    asking = replace(asking, max_new_tokens=max(1, min(asking.max_new_tokens, room // 2)))
    run = summarize if verb == "summarize" else answers
    return run(spec, other, proving.data, limits, asking, progress).record


def _metrics(verb: str, record: Record, proving: Proving) -> Iterator[Metric]:
    """The values of both sides, and their differences."""
    counts, sides, settings = record["counts"], record["sides"], record["settings"]
    for what, words in (("too_long", "too long for the context"), ("too_short", "too short to count")):
        if counts.get(what):
            _log.warning("%s: %d items were not measured: %s", verb, counts[what], words)
    better = names_of([verb], compared=True)
    common: dict[str, Any] = {
        "data": proving.data.path.name,
        "data_sha256": proving.sha256,
        "against": proving.against,
        "items": counts.get("cases", counts.get("documents")),
        "window": (settings["window"], settings["stride"]) if "window" in settings else None,
        "dtype": sides[0]["facts"]["dtype"],
        "against_dtype": sides[1]["facts"]["dtype"] if len(sides) > 1 else None,
    }
    for name in VALUES[verb]:
        ours, *theirs = (_number(side["metrics"][name]) for side in sides)
        reference = theirs[0] if theirs else None
        limit = proving.thresholds.get(name)
        yield Metric(name, ours, limit, better[name], against_value=reference, **common)
    for delta in record["deltas"]:
        name = delta_name(verb, delta["metric"])
        value = rounded(abs(delta["delta"]))
        yield Metric(name, value, delta["limit"], "lower", unit=delta["unit"], **common)


def _number(value: float | None) -> float:
    return math.nan if value is None else rounded(value)
